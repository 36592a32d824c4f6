"""Our own kernels for sliding-window layers: CUDA C++ on tensor cores, forward and backward, native sink.

Query heads that share a kv head are packed into one tile, keys stay in a ring in shared memory while a block walks
along its sequence, and the backward pass runs as two kernels that each own what they write (dQ; dK and dV): no atomics,
so the result is deterministic, and every tile is aligned to its sequence's start, so a sequence's bits do not depend on
what it is packed with.
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from gptoss_kernels import nvrtc
from gptoss_kernels.sink_attention.layout import PackedLayout

SOURCES = Path(__file__).parent / "cuda"
THREADS = 128
TILE_ROWS = 128
"""Positions x heads of a tile of the row-owning kernels."""
CHUNK = 128
"""Positions that one thread block of a row-owning kernel walks."""
HOPPER_CHUNK = {"window_forward_hopper": 64, "window_backward_q_hopper": 32}
"""Positions that one thread block of Hopper's row-owning kernels takes, all their keys in shared memory."""
KEYS = 64
"""Keys that one thread block of the dK, dV kernel owns."""
WAVE = 64
"""Rows (positions x heads) of one step of the dK, dV kernel."""
STAGES = 2
HEAD_SIZES = (32, 64)
MAX_WINDOW = 256


@dataclass(frozen=True)
class Shape:
    """What a kernel is compiled for."""

    head_size: int
    heads_per_kv: int
    window: int

    @property
    def group(self) -> int:
        """Heads packed into a tile: the largest of 8, 4, 2, 1 that divides the heads of a kv head."""
        return next(g for g in (8, 4, 2, 1) if self.heads_per_kv % g == 0)

    @property
    def key_steps(self) -> int:
        """Products of 48 keys that a tile of 64 rows takes in Hopper's row-owning kernels."""
        halo = (self.window - 1 + 15) // 16 * 16
        skipped = (halo - self.window + 1) // 8 * 8
        return (halo - skipped + 64 // self.group + 47) // 48

    def held_keys(self, chunk: int) -> int:
        """Keys that such a kernel holds for a chunk of positions, as held.cuh computes it."""
        halo = (self.window - 1 + 15) // 16 * 16
        skipped = (halo - self.window + 1) // 8 * 8
        return max(halo + chunk, (chunk - 64 // self.group + skipped + self.key_steps * 48 + 7) // 8 * 8)

    def ring_bytes(self) -> int:
        new = TILE_ROWS // self.group // 16
        halo = (self.window - 1 + 15) // 16
        return 2 * (halo + 2 * new) * 16 * self.head_size * 2

    def shared_bytes(self, kernel: str) -> int:
        tile = TILE_ROWS * self.head_size * 2
        if kernel == "window_forward":
            return self.ring_bytes() + 2 * tile
        if kernel in HOPPER_CHUNK:
            tiles = 2 if kernel == "window_forward_hopper" else 4
            return 2 * self.held_keys(HOPPER_CHUNK[kernel]) * self.head_size * 2 + tiles * 64 * self.head_size * 2 + 256
        if kernel == "window_backward_q":
            return self.ring_bytes() + 4 * tile + TILE_ROWS * 4
        stages = 3 if kernel == "window_backward_kv_hopper" else STAGES
        return stages * WAVE * (2 * self.head_size * 2 + 8) + 2 * KEYS * self.head_size * 2


def why_not(device: torch.device, heads_per_kv: int, head_size: int, window: int | None) -> str | None:
    """Why the window kernels cannot take these bf16 shapes on this GPU; None when they can."""
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "the window kernels need a GPU of compute capability 8.0 or later"
    if head_size not in HEAD_SIZES:
        return f"q has head size {head_size}, the window kernels take {' and '.join(map(str, HEAD_SIZES))}"
    if window is None or window > MAX_WINDOW:
        return f"window is {window}, the window kernels take 1 to {MAX_WINDOW}"
    needed = Shape(head_size, heads_per_kv, window).shared_bytes("window_backward_q")
    if needed > nvrtc.shared_limit(device):
        return f"window {window} with head size {head_size} needs {needed} bytes of shared memory"
    return None


class WindowSinkAttention(torch.autograd.Function):
    """O [tokens, heads, head_size] bf16 and LSE [tokens, heads] fp32."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor,
        layout: PackedLayout,
        window: int,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        o, lse = window_forward(q, k, v, sinks, layout, window, scale)
        ctx.save_for_backward(q, k, v, sinks, o, lse)
        ctx.arguments = layout, window, scale
        ctx.mark_non_differentiable(lse)
        return o, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_o: torch.Tensor, _grad_lse: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sinks, o, lse = ctx.saved_tensors
        layout, window, scale = ctx.arguments
        grads = window_backward(q, k, v, sinks, o, lse, grad_o.contiguous(), layout, window, scale)
        return (*grads, None, None, None)


def window_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor,
    layout: PackedLayout,
    window: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """O like q and LSE [tokens, heads], from contiguous bf16 q, k, v."""
    heads = q.shape[1]
    o = torch.empty_like(q)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    shape = Shape(q.shape[2], heads // k.shape[1], window)
    name, chunk = row_kernel("window_forward", shape, q.device)
    items, count = _items(layout, chunk, q.device)
    if count:
        kernel = _kernel(name, shape, q.device)
        common = (q, k, v, sinks.float(), o, lse, items, heads, scale * 1.4426950408889634)
        kernel(count * heads // shape.group, THREADS, *common, *(() if name in HOPPER_CHUNK else (chunk,)))
    return o, lse


def window_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    grad_o: torch.Tensor,
    layout: PackedLayout,
    window: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k, v and the sinks, from contiguous tensors and the forward's O and LSE."""
    heads = q.shape[1]
    shape = Shape(q.shape[2], heads // k.shape[1], window)
    grad_q, grad_k, grad_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    row_stats = torch.empty(*lse.shape, 2, dtype=torch.float32, device=q.device)
    name, chunk = row_kernel("window_backward_q", shape, q.device)
    items, count = _items(layout, chunk, q.device)
    shares = torch.empty(count, heads, dtype=torch.float32, device=q.device)
    if count:
        kernel = _kernel(name, shape, q.device)
        common = (q, k, v, sinks.float(), o, lse, grad_o, grad_q, row_stats, shares, items, heads, scale)
        kernel(count * heads // shape.group, THREADS, *common, *(() if name in HOPPER_CHUNK else (chunk,)))
        suffix = "_hopper" if has_warpgroups(shape, q.device) else ""
        kernel = _kernel(f"window_backward_kv{suffix}", shape, q.device)
        items, count = _items(layout, KEYS, q.device)
        kernel(count * k.shape[1], THREADS, q, k, v, row_stats, grad_o, grad_k, grad_v, items, heads, scale)
    return grad_q, grad_k, grad_v, shares.sum(0).to(sinks.dtype)


def _items(layout: PackedLayout, length: int, device: torch.device) -> tuple[torch.Tensor, int]:
    """[items, 4] int32: sequence start, sequence end, first position of the item, 0. An item is `length` positions."""
    key = ("items", length, device)
    if key not in layout.plans:
        begin, lengths = layout.offsets[:-1], layout.offsets.diff()
        counts = (lengths + length - 1) // length
        sequence = torch.repeat_interleave(torch.arange(len(begin)), counts)
        number = torch.arange(len(sequence)) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
        start = begin[sequence]
        table = torch.stack((start, start + lengths[sequence], start + number * length, torch.zeros_like(start)), 1)
        layout.plans[key] = table.to(torch.int32).to(device), len(table)
    items, count = layout.plans[key]
    return items, count


@functools.cache
def has_warpgroups(shape: Shape, device: torch.device) -> bool:
    """Whether the kernels with Hopper's warpgroup products serve this: their tiles are 64 wide."""
    return torch.cuda.get_device_capability(device) == (9, 0) and shape.head_size == 64


@functools.cache
def row_kernel(name: str, shape: Shape, device: torch.device) -> tuple[str, int]:
    """The row-owning kernel (forward or dQ) for this shape, and the positions that one of its blocks takes."""
    hopper = f"{name}_hopper"
    fits = (
        has_warpgroups(shape, device)
        and 64 // shape.group <= HOPPER_CHUNK[hopper]
        and shape.shared_bytes(hopper) <= nvrtc.shared_limit(device)
        # the forward keeps all scores of a row in registers
        and (name != "window_forward" or shape.key_steps <= 3)
    )
    return (hopper, HOPPER_CHUNK[hopper]) if fits else (name, CHUNK)


@functools.cache
def _kernel(name: str, shape: Shape, device: torch.device) -> nvrtc.Kernel:
    cubin = nvrtc.compile_cubin(SOURCES / f"{name}.cu", defines(name, shape), nvrtc.architecture(device))
    with torch.cuda.device(device):
        return nvrtc.Kernel(cubin, name, shape.shared_bytes(name))


def defines(name: str, shape: Shape) -> dict[str, int]:
    """The macros that the sources are compiled with."""
    return {
        "HEAD_SIZE": shape.head_size,
        "GROUP": shape.group,
        "GROUPS": shape.heads_per_kv // shape.group,
        "WINDOW": shape.window,
        "WAVE": WAVE,
        "CHUNK": HOPPER_CHUNK.get(name, CHUNK),
        "STAGES": STAGES,
    }
