"""Our own kernels for Hopper: CUDA C++ with warpgroup products, native sink, forward and backward.

For sliding-window layers, and for full attention over short packed sequences. Query heads that share a kv head are
packed into one tile: with 8 heads a tile is 8 positions, so little work is lost where the causal triangle or the window
ends. For O and dQ of a window, a block holds every key that its tiles see in shared memory; in full attention the keys
pass. The backward pass runs as two kernels that each own what they write (dQ; dK and dV): no atomics, so the result is
deterministic, and every tile is aligned to its sequence's start, so a sequence has the same bits in every pack."""

import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gptoss_kernels import nvrtc
from gptoss_kernels.sink_attention.layout import PackedLayout, Saved

SOURCES = Path(__file__).parent / "cuda"
THREADS = 128
TILE_ROWS = 64
"""Positions x heads of a tile."""
CHUNK = {"window_forward": 64, "window_backward_q": 40}
"""Positions that one thread block of a row-owning kernel takes, in whole tiles, all their keys in shared memory."""
KEYS = 64
"""Keys that one thread block of the dK, dV kernel owns."""
STAGES = {"backward_kv": 4, "full_backward_q": 2, "full_forward": 3}
"""Pairs of tiles that pass (Q and dO, or K and V) which a block holds."""
LOG2_E = 1.4426950408889634
HEAD_SIZE = 64
"""The row of 128 bytes that the tiles' swizzle is made for."""


@dataclass(frozen=True)
class Shape:
    """What a kernel is compiled for."""

    heads_per_kv: int
    window: int | None
    """None for full attention."""

    @property
    def group(self) -> int:
        """Heads packed into a tile: the largest of 8, 4, 2, 1 that divides the heads of a kv head."""
        return next(g for g in (8, 4, 2, 1) if self.heads_per_kv % g == 0)

    @property
    def halo(self) -> int:
        """Keys held before a chunk."""
        return ((self.window or 1) - 1 + 15) // 16 * 16

    @property
    def key_steps(self) -> int:
        """Products of 48 keys that a tile takes in the row-owning kernels."""
        return (self.halo - self._skipped + TILE_ROWS // self.group + 47) // 48

    @property
    def _skipped(self) -> int:
        return (self.halo - (self.window or 1) + 1) // 8 * 8

    def chunk(self, kernel: str) -> int:
        """Positions of a block of a row-owning kernel."""
        tile = TILE_ROWS // self.group
        return (CHUNK.get(kernel, tile) + tile - 1) // tile * tile

    def held_keys(self, chunk: int) -> int:
        """Keys that such a kernel holds for a chunk of positions, as resident_keys.cuh computes it."""
        end = chunk - TILE_ROWS // self.group + self._skipped + self.key_steps * 48
        return max(self.halo + chunk, (end + 7) // 8 * 8)

    def shared_bytes(self, kernel: str) -> int:
        tile = TILE_ROWS * HEAD_SIZE * 2
        if stages := STAGES.get(kernel):
            besides = {"backward_kv": TILE_ROWS * 8 + 8, "full_backward_q": 8}.get(kernel, 0)  # 8: a barrier
            return stages * (2 * tile + besides) + (2 if kernel == "full_backward_q" else 1) * tile
        tiles = 1 if kernel == "window_forward" else 3
        return 2 * self.held_keys(self.chunk(kernel)) * HEAD_SIZE * 2 + tiles * tile + 256


def why_not(device: torch.device, heads_per_kv: int, head_size: int, window: int | None) -> str | None:
    """Why the window kernels cannot take these bf16 shapes on this GPU; None when they can."""
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        return f"our own kernels are for Hopper (compute capability 9.0), {device} has {capability}"
    if head_size != HEAD_SIZE:
        return f"q has head size {head_size}, our own kernels take {HEAD_SIZE}"
    # the window's forward keeps all scores of a row in registers
    if window is not None and Shape(heads_per_kv, window).key_steps > 3:
        return f"window {window} is too long for the window kernels with {heads_per_kv} query heads per kv head"
    return None


def window_forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, layout: PackedLayout, window: int | None, scale: float
) -> tuple[Tensor, Tensor]:
    """O like q and LSE [tokens, heads] fp32, from bf16 q, k, v."""
    q, k, v = _dense(q), _dense(k), _dense(v)
    heads = q.shape[1]
    o = torch.empty_like(q)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    shape = Shape(heads // k.shape[1], window)
    name = "full_forward" if window is None else "window_forward"
    items, count = _items(layout, shape.chunk(name), q.device, "keys" if window is None else None)
    if count:
        rows = q, k, v, sinks.float(), o, lse, items, heads, scale * LOG2_E
        _kernel(name, shape, q.device)(count * heads // shape.group, THREADS, *rows)
    return o, lse


def window_backward(
    saved: Saved, grad_o: Tensor, layout: PackedLayout, window: int | None, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and the sinks."""
    q, k, v, sinks, o, lse = saved
    q, k, v, o, lse, grad_o = (_dense(x) for x in (q, k, v, o, lse, grad_o))
    heads = q.shape[1]
    shape = Shape(heads // k.shape[1], window)
    grad_q, grad_k, grad_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    row_stats = torch.empty(*lse.shape, 2, dtype=torch.float32, device=q.device)
    name = "full_backward" if window is None else "window_backward"
    items, count = _items(layout, shape.chunk(f"{name}_q"), q.device, "sequence" if window is None else None)
    grad_sinks = (torch.empty if count else torch.zeros)(heads, dtype=torch.float32, device=q.device)
    if count:
        shares = torch.empty(count, heads, dtype=torch.float32, device=q.device)
        passing = (k, v) if window is not None else (_tiles(k, 1), _tiles(v, 1))
        rows = q, *passing, sinks.float(), o, lse, grad_o, grad_q, row_stats, shares, items, heads, scale
        rows = rows if window is not None else (*rows, scale * LOG2_E)
        _kernel(f"{name}_q", shape, q.device)(count * heads // shape.group, THREADS, *rows)
        keys, key_count = _items(layout, KEYS, q.device, "queries" if window is None else None)
        passing = _tiles(q, shape.group), _tiles(grad_o, shape.group)
        columns = passing[0], k, v, row_stats, passing[1], grad_k, grad_v, keys, shares, count, grad_sinks, heads
        _kernel("backward_kv", shape, q.device)(key_count * k.shape[1], THREADS, *columns, scale, scale * LOG2_E)
    return grad_q, grad_k, grad_v, grad_sinks.to(sinks.dtype)


def _dense(x: Tensor) -> Tensor:
    """Contiguous, from a multiple of 16 bytes on, which copies of 16 bytes and TMA need and views may not have."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _tiles(x: Tensor, heads: int) -> nvrtc.TensorMap:
    """What a kernel takes of a tensor whose tiles, of so many heads, pass by TMA."""
    return nvrtc.tensor_map(x, (TILE_ROWS // heads, heads))


def _items(layout: PackedLayout, length: int, device: torch.device, order: str | None) -> tuple[Tensor, int]:
    """[items, 4] int32: sequence start, sequence end, first position of the item, 0. An item is `length` positions.

    Items of unequal work are sorted, so that the longest start first and the multiprocessors end together: by most
    "keys" or "queries", or by the longest "sequence", whose items then read its keys at the same time."""
    key = ("items", length, device, order)
    if key not in layout.plans:
        start, end, number = layout.pieces(length)
        before = number * length
        table = torch.stack((start, end, start + before, torch.zeros_like(start)), 1)
        if order:
            work = {"keys": before, "queries": end - start - before, "sequence": end - start}[order]
            if order == "sequence":  # and in it the last items, which see most keys
                table, work = table.flip(0), work.flip(0)
            table = table[work.argsort(descending=True, stable=True)]
        # from pinned memory: a copy from elsewhere would wait until the GPU has done what is queued
        host = torch.empty(table.shape, dtype=torch.int32, pin_memory=device.type == "cuda").copy_(table)
        layout.plans[key] = host.to(device, non_blocking=True), len(table)
    return layout.plans[key]


@functools.cache
def _kernel(name: str, shape: Shape, device: torch.device) -> nvrtc.Kernel:
    cubin = nvrtc.compile_cubin(SOURCES / f"{name}.cu", defines(name, shape), nvrtc.architecture(device))
    with torch.cuda.device(device):
        return nvrtc.Kernel(cubin, name, shape.shared_bytes(name))


def defines(name: str, shape: Shape) -> dict[str, int]:
    """The macros that the sources are compiled with."""
    macros = {
        "HEAD_SIZE": HEAD_SIZE,
        "GROUP": shape.group,
        "GROUPS": shape.heads_per_kv // shape.group,
        "WINDOW": shape.window or 0,  # full attention does without
    }
    return macros | ({"CHUNK": shape.chunk(name)} if name in CHUNK else {})
