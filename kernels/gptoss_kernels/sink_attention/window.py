"""Our own kernels for Hopper: CUDA C++ with warpgroup products, native sink, forward and backward.

For sliding-window layers, and for full attention over short packed sequences. Query heads that
share a kv head are packed into one tile: with 8 heads a tile is 8 positions, so little work is
lost where the causal triangle or the window ends. For O and dQ of a window, a block holds every
key that its tiles see in shared memory; in full attention the keys pass. The backward pass runs as
two kernels that each own what they write (dQ; dK and dV): no atomics, so the result is
deterministic, and every tile is aligned to its sequence's start, so a sequence has the same bits
in every pack.

The kernels are in cuda/; each .cu file says at its top who owns what and what waits for what. This
module computes the same sizes (``KernelShape``), makes their tables of work (``_items``) and
launches them.
"""

import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gptoss_kernels import nvrtc
from gptoss_kernels.sink_attention.autograd import Gradients, SavedTensors
from gptoss_kernels.sink_attention.layout import PackedLayout

SOURCES = Path(__file__).parent / "cuda"
THREADS = 128
TILE_ROWS = 64
"""Positions x heads of a tile."""
CHUNK = {"window_forward": 64, "window_backward_q": 40}
"""Positions that one thread block of a row-owning kernel takes, in whole tiles, all their keys in
shared memory. As many as leave room for three blocks on a multiprocessor."""
KEYS = 64
"""Keys that one thread block of the dK, dV kernel owns."""
STAGES = {"backward_kv": 4, "full_backward_q": 2, "full_forward": 3}
"""Pairs of tiles that pass (Q and dO, or K and V) which a block holds."""
STEP_KEYS = 48
"""Keys of one product in the window's row-owning kernels."""
MAX_KEY_STEPS = 3
"""Such products per tile at most: the forward pass keeps all scores of a row in registers."""
LOG2_E = 1.4426950408889634
HEAD_SIZE = 64
"""The row of 128 bytes that the tiles' swizzle is made for."""
TILE_BYTES = TILE_ROWS * HEAD_SIZE * 2


@dataclass(frozen=True)
class KernelShape:
    """What a kernel is compiled for."""

    heads_per_kv: int
    """Query heads per kv head."""
    window: int | None
    """Keys that a query sees; None for full attention."""

    @property
    def group(self) -> int:
        """Heads packed into a tile: the largest of 8, 4, 2, 1 that divides ``heads_per_kv``."""
        return next(size for size in (8, 4, 2, 1) if self.heads_per_kv % size == 0)

    @property
    def tile_positions(self) -> int:
        """Positions of a tile."""
        return TILE_ROWS // self.group

    @property
    def halo(self) -> int:
        """Keys held before a chunk: HALO of resident_keys.cuh."""
        earlier_keys = (self.window or 1) - 1
        return _round_up(earlier_keys, 16)

    @property
    def key_steps(self) -> int:
        """Products of STEP_KEYS keys that a tile takes: STEPS of resident_keys.cuh."""
        keys = self.halo - self._skipped_keys + self.tile_positions
        return _ceil_divide(keys, STEP_KEYS)

    @property
    def _skipped_keys(self) -> int:
        """Keys of the halo that no row sees: SKIP of resident_keys.cuh."""
        return (self.halo - (self.window or 1) + 1) // 8 * 8

    def chunk(self, kernel: str) -> int:
        """Positions of a block of a row-owning kernel."""
        return _round_up(CHUNK.get(kernel, self.tile_positions), self.tile_positions)

    def resident_keys(self, chunk: int) -> int:
        """Keys held for a chunk of positions: RESIDENT_KEYS of resident_keys.cuh."""
        last_tile = chunk - self.tile_positions
        last_step_end = last_tile + self._skipped_keys + self.key_steps * STEP_KEYS
        return max(self.halo + chunk, _round_up(last_step_end, 8))

    def shared_bytes(self, kernel: str) -> int:
        """Dynamic shared memory of a block of a kernel, as its source lists it."""
        barrier_bytes = 8
        if kernel == "full_forward":
            return STAGES[kernel] * 2 * TILE_BYTES + TILE_BYTES
        if kernel == "full_backward_q":
            return STAGES[kernel] * (2 * TILE_BYTES + barrier_bytes) + 2 * TILE_BYTES
        if kernel == "backward_kv":
            row_stats_bytes = TILE_ROWS * 8
            return STAGES[kernel] * (2 * TILE_BYTES + row_stats_bytes + barrier_bytes) + TILE_BYTES

        # The window's row-owning kernels: K and V, then tiles of Q (and dO and O), then shares.
        key_bytes = 2 * self.resident_keys(self.chunk(kernel)) * HEAD_SIZE * 2
        tiles = 1 if kernel == "window_forward" else 3
        return key_bytes + tiles * TILE_BYTES + 256


def unsupported_reason(
    device: torch.device, heads_per_kv: int, head_size: int, window: int | None
) -> str | None:
    """Say why our kernels cannot take these bf16 shapes on this GPU; None when they can."""
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        return f"our own kernels are for Hopper (compute capability 9.0), {device} has {capability}"
    if head_size != HEAD_SIZE:
        return f"q has head size {head_size}, our own kernels take {HEAD_SIZE}"
    if window is not None and KernelShape(heads_per_kv, window).key_steps > MAX_KEY_STEPS:
        return f"window {window} is too long for the window kernels with {heads_per_kv} query heads per kv head"
    return None


def window_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    layout: PackedLayout,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Compute O like q and LSE [tokens, heads] fp32 from bf16; window None for full attention."""
    q, k, v = (_dense(x) for x in (q, k, v))
    heads = q.shape[1]
    shape = KernelShape(heads // k.shape[1], window)
    o = torch.empty_like(q)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)

    if window is None:
        name = "full_forward"
        order = "keys"
    else:
        # A window is the same work everywhere but at a sequence's start.
        name = "window_forward"
        order = None
    items, count = _items(layout, shape.chunk(name), q.device, order)
    if count:
        launch = _kernel(name, shape, q.device)
        blocks = count * heads // shape.group
        launch(blocks, THREADS, q, k, v, sinks.float(), o, lse, items, heads, scale * LOG2_E)
    return o, lse


def window_backward(
    saved: SavedTensors, grad_o: Tensor, layout: PackedLayout, window: int | None, scale: float
) -> Gradients:
    """Compute the gradients of q, k, v and the sinks; window None for full attention.

    The kernel for dQ also writes what the one for dK and dV needs: per row LSE and delta, and per
    item a share of the sinks' gradient.
    """
    q, k, v, sinks, o, lse = saved
    q, k, v, o, lse, grad_o = (_dense(x) for x in (q, k, v, o, lse, grad_o))
    dense = (q, k, v, sinks.float(), o, lse)

    grad_q, row_stats, shares = _query_gradients(dense, grad_o, layout, window, scale)
    if not shares.numel():
        return grad_q, torch.empty_like(k), torch.empty_like(v), torch.zeros_like(sinks)

    grad_k, grad_v, grad_sinks = _key_gradients(
        dense, grad_o, row_stats, shares, layout, window, scale
    )
    return grad_q, grad_k, grad_v, grad_sinks.to(sinks.dtype)


def _query_gradients(
    saved: SavedTensors, grad_o: Tensor, layout: PackedLayout, window: int | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute dQ, and for the other kernel (LSE, delta) [tokens, heads, 2] and the items' shares
    of the sinks' gradient [items, heads], both fp32."""
    q, k, v, sinks, o, lse = saved
    heads = q.shape[1]
    shape = KernelShape(heads // k.shape[1], window)

    if window is None:
        name = "full_backward_q"
        order = "sequence"
    else:
        name = "window_backward_q"
        order = None
    items, count = _items(layout, shape.chunk(name), q.device, order)

    grad_q = torch.empty_like(q)
    row_stats = torch.empty(*lse.shape, 2, dtype=torch.float32, device=q.device)
    shares = torch.empty(count, heads, dtype=torch.float32, device=q.device)
    if count == 0:
        return grad_q, row_stats, shares

    blocks = count * heads // shape.group
    launch = _kernel(name, shape, q.device)
    # The window's kernel reads keys with plain copies into shared memory. Full attention's lets TMA
    # bring them, by descriptors ("maps") instead of pointers, and takes the scale in base 2, too.
    inputs = (sinks, o, lse, grad_o)
    outputs = (grad_q, row_stats, shares)
    if window is None:
        maps = (_tensor_map(k, heads=1), _tensor_map(v, heads=1))
        scales = (scale, scale * LOG2_E)
        launch(blocks, THREADS, q, *maps, *inputs, *outputs, items, heads, *scales)
    else:
        launch(blocks, THREADS, q, k, v, *inputs, *outputs, items, heads, scale)
    return outputs


def _key_gradients(
    saved: SavedTensors,
    grad_o: Tensor,
    row_stats: Tensor,
    shares: Tensor,
    layout: PackedLayout,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute dK, dV and, from the items' shares, the sinks' gradient [heads] in fp32."""
    q, k, v = saved[:3]
    heads = q.shape[1]
    shape = KernelShape(heads // k.shape[1], window)
    order = "queries" if window is None else None
    items, count = _items(layout, KEYS, q.device, order)

    grad_k = torch.empty_like(k)
    grad_v = torch.empty_like(v)
    # One block per item and kv head. The kernel also adds up the items' shares of the sinks'
    # gradient, which saves a launch. The arguments are those of backward_kv.cu, in its order.
    grad_sinks = torch.empty(heads, dtype=torch.float32, device=q.device)
    _kernel("backward_kv", shape, q.device)(
        count * k.shape[1],
        THREADS,
        _tensor_map(q, heads=shape.group),
        k,
        v,
        row_stats,
        _tensor_map(grad_o, heads=shape.group),
        grad_k,
        grad_v,
        items,
        shares,
        len(shares),
        grad_sinks,
        heads,
        scale,
        scale * LOG2_E,
    )
    return grad_k, grad_v, grad_sinks


def _dense(x: Tensor) -> Tensor:
    """Return x contiguous and at a multiple of 16 bytes, copied where it is not.

    Copies of 16 bytes and TMA need that, and a view may not have it.
    """
    x = x.contiguous()
    if x.data_ptr() % 16:
        return x.clone()
    return x


def _tensor_map(x: Tensor, heads: int) -> nvrtc.TensorMap:
    """Describe x for a kernel whose tiles, of so many heads, come by TMA."""
    return nvrtc.tensor_map(x, (TILE_ROWS // heads, heads))


def _items(
    layout: PackedLayout, length: int, device: torch.device, order: str | None
) -> tuple[Tensor, int]:
    """Make the table of a kernel's items, ``length`` positions of one sequence each.

    Items of unequal work are sorted, so that the longest start first and the multiprocessors end
    together.

    Args:
        order: None for the order of the positions; "keys" or "queries": those that see, or are
            seen by, most first; "sequence": those of the longest sequence first, which then read
            its keys at the same time, and among them the last ones first, which see most.

    Returns:
        [items, 4] int32 on the device, (sequence start, sequence end, the item's first position,
        0), and the number of items.
    """
    key = ("items", length, device, order)
    if key not in layout.plans:
        table = _item_table(layout, length, order)
        # From pinned memory: a copy from elsewhere waits until the GPU has done what is queued.
        host = torch.empty(table.shape, dtype=torch.int32, pin_memory=device.type == "cuda")
        host.copy_(table)
        layout.plans[key] = (host.to(device, non_blocking=True), len(table))
    return layout.plans[key]


def _item_table(layout: PackedLayout, length: int, order: str | None) -> Tensor:
    """Make the table of ``_items`` as int64 on the CPU."""
    start, end, number = layout.pieces(length)
    before = number * length
    table = torch.stack((start, end, start + before, torch.zeros_like(start)), 1)
    if order is None:
        return table

    if order == "keys":
        work = before
    elif order == "queries":
        work = end - start - before
    else:
        # The sort is stable: turned round, a sequence's last items come first.
        table = table.flip(0)
        work = (end - start).flip(0)
    return table[work.argsort(descending=True, stable=True)]


@functools.cache
def _kernel(name: str, shape: KernelShape, device: torch.device) -> nvrtc.Kernel:
    """Compile and load a kernel, once per process."""
    source = SOURCES / f"{name}.cu"
    cubin = nvrtc.compile_cubin(source, macros(name, shape), nvrtc.architecture(device))
    with torch.cuda.device(device):
        return nvrtc.Kernel(cubin, name, shape.shared_bytes(name))


def macros(name: str, shape: KernelShape) -> dict[str, int]:
    """Return the macros that a kernel's source is compiled with; tile.cuh explains them."""
    values = {
        "HEAD_SIZE": HEAD_SIZE,
        "GROUP": shape.group,
        "GROUPS": shape.heads_per_kv // shape.group,
        "WINDOW": shape.window or 0,
    }
    if name in CHUNK:
        values["CHUNK"] = shape.chunk(name)
    return values


def _ceil_divide(value: int, divisor: int) -> int:
    return (value + divisor - 1) // divisor


def _round_up(value: int, multiple: int) -> int:
    return _ceil_divide(value, multiple) * multiple
