"""Custom attention kernels for Hopper in CUDA C++, with warpgroup MMA and a native sink.

They compute the forward and backward pass of sliding-window layers, and of full attention over short
packed sequences.

- Query heads that share a kv head form one tile. With 8 heads a tile has 8 positions, so little
  work is wasted at the causal diagonal and at the end of the window.
- For O and dQ of a window, a block keeps every key that its tiles see in shared memory. In full
  attention the keys are streamed.
- The backward pass is two kernels: one writes dQ, the other dK and dV. Each output has one owner,
  so there are no atomics and the result is deterministic.
- Tiles are aligned to the start of their sequence, so a sequence has the same bits in every pack.

The kernels are in cuda/. The comment at the top of each .cu file describes ownership and
synchronization. ``KernelShape`` computes the sizes that the CUDA sources use. This module also builds
the tables of work items (``_items``) and launches the kernels.
"""

import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gptoss_kernels import nvrtc
from gptoss_kernels.device_copies import copy_to_device
from gptoss_kernels.sink_attention.autograd import Gradients, SavedTensors
from gptoss_kernels.sink_attention.layout import PackedLayout

SOURCES = Path(__file__).parent / "cuda"
"""Folder of the CUDA sources."""
THREADS = 128
"""Threads per block of every kernel: one warpgroup."""
TILE_ROWS = 64
"""Rows per tile: positions times heads. M of a warpgroup MMA."""
# All keys of a chunk are in shared memory. With these chunks three blocks fit on a multiprocessor.
CHUNK = {"window_forward": 64, "window_backward_q": 40}
"""Positions per block of the window kernels for O and dQ, in whole tiles."""
# M of a warpgroup MMA: dK and dV have a row per key, so a block cannot own fewer keys.
KEYS = 64
"""Keys per block of the kernel for dK and dV."""
# As many stages as shared memory allows without losing a block per multiprocessor, which has 228
# KiB and reserves 1 KiB per block: four blocks of full_forward (56 KiB), four of full_backward_q
# (48 KiB, limited by registers), three of backward_kv (74 KiB). full_forward uses every byte: 256
# more cost it a block and 10% of its speed.
STAGES = {"backward_kv": 4, "full_backward_q": 2, "full_forward": 3}
"""Pipeline stages per kernel. A stage holds a pair of tiles: Q and dO, or K and V."""
# 8 positions with windows of 128 see 135 keys. Three steps of 48 mask 1/9 of the work. Steps of 64
# would mask 1/3.
STEP_KEYS = 48
"""Keys per MMA step in the window kernels for O and dQ."""
# The forward kernel keeps all scores of a row in registers. More steps would not fit.
MAX_KEY_STEPS = 3
"""Maximum steps of STEP_KEYS keys per tile, which limits the window."""
# The kernels compute exponentials as powers of 2, because the GPU has an instruction for them.
LOG2_E = 1.4426950408889634
"""log2(e)."""
HEAD_SIZE = 64
"""Only supported head size. Its rows have 128 bytes, the width of the swizzle."""
TILE_BYTES = TILE_ROWS * HEAD_SIZE * 2
"""Size of a bf16 tile."""


@dataclass(frozen=True)
class KernelShape:
    """Parameters of a layer for which a kernel is compiled, and the sizes that follow from them."""

    heads_per_kv: int
    """Number of query heads per kv head."""
    window: int | None
    """Number of keys that a query sees, including its own; None for full attention."""

    @property
    def group(self) -> int:
        """Heads per tile: the largest of 8, 4, 2 and 1 that divides ``heads_per_kv``."""
        # A group must not cross kv heads, because the rows of a tile share their keys.
        return next(size for size in (8, 4, 2, 1) if self.heads_per_kv % size == 0)

    @property
    def tile_positions(self) -> int:
        """Positions per tile."""
        return TILE_ROWS // self.group

    @property
    def halo(self) -> int:
        """Keys in shared memory before a chunk, like HALO in resident_keys.cuh."""
        earlier_keys = (self.window or 1) - 1
        return _round_up(earlier_keys, 16)

    @property
    def key_steps(self) -> int:
        """Steps of STEP_KEYS keys per tile, like STEPS in resident_keys.cuh."""
        keys = self.halo - self._skipped_keys + self.tile_positions
        return _ceil_divide(keys, STEP_KEYS)

    @property
    def _skipped_keys(self) -> int:
        """Keys of the halo that no row sees, like SKIP in resident_keys.cuh."""
        # A multiple of 8, because the swizzle repeats after 8 rows, and an MMA descriptor must
        # begin there.
        return (self.halo - (self.window or 1) + 1) // 8 * 8

    def chunk(self, kernel: str) -> int:
        """Return the positions per block of a kernel for O or dQ, a multiple of the tile."""
        return _round_up(CHUNK.get(kernel, self.tile_positions), self.tile_positions)

    def resident_keys(self, chunk: int) -> int:
        """Return the keys in shared memory for a chunk, like RESIDENT_KEYS in resident_keys.cuh."""
        # The last step may read beyond the chunk, because a step always has STEP_KEYS keys.
        last_tile = chunk - self.tile_positions
        last_step_end = last_tile + self._skipped_keys + self.key_steps * STEP_KEYS
        return max(self.halo + chunk, _round_up(last_step_end, 8))

    def shared_bytes(self, kernel: str) -> int:
        """Return the dynamic shared memory per block in bytes, laid out as in the source."""
        barrier_bytes = 8
        if kernel == "full_forward":
            return STAGES[kernel] * 2 * TILE_BYTES + TILE_BYTES
        if kernel == "full_backward_q":
            return STAGES[kernel] * (2 * TILE_BYTES + barrier_bytes) + 2 * TILE_BYTES
        if kernel == "backward_kv":
            row_stats_bytes = TILE_ROWS * 8
            return STAGES[kernel] * (2 * TILE_BYTES + row_stats_bytes + barrier_bytes) + TILE_BYTES

        # Window kernels for O and dQ: K and V, then a tile of Q (for dQ also dO and O), then the
        # partial sums of the sinks' gradient.
        key_bytes = 2 * self.resident_keys(self.chunk(kernel)) * HEAD_SIZE * 2
        tiles = 1 if kernel == "window_forward" else 3
        return key_bytes + tiles * TILE_BYTES + 256


def unsupported_reason(
    device: torch.device, heads_per_kv: int, head_size: int, window: int | None
) -> str | None:
    """Return the reason why the kernels do not support a layer; None if they do.

    Args:
        device: CUDA device.
        heads_per_kv: number of query heads per kv head.
        head_size: channels per head.
        window: number of keys that a query sees, including its own; None for full attention.
    """
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        return f"the kernels need compute capability 9.0 (Hopper), {device} has {capability}"
    if head_size != HEAD_SIZE:
        return f"q has head size {head_size}, the kernels support only {HEAD_SIZE}"
    if supported_heads_per_kv(heads_per_kv, window) is None:
        return f"window {window} is too long for the window kernels"
    return None


def supported_heads_per_kv(heads_per_kv: int, window: int | None) -> int | None:
    """Return the number of query heads per kv head with which the kernels compute a layer.

    A tile of few heads has many positions, so its keys may not fit. Then heads of zeros are added
    until the keys fit: 4 instead of 3 heads for windows of 128.

    Args:
        heads_per_kv: number of query heads per kv head.
        window: number of keys that a query sees, including its own; None for full attention.

    Returns:
        At least ``heads_per_kv``. None if the window is too long for any number of heads.
    """
    if window is None:
        return heads_per_kv
    candidates = range(heads_per_kv, _round_up(heads_per_kv, 8) + 1)
    fitting = (n for n in candidates if KernelShape(n, window).key_steps <= MAX_KEY_STEPS)
    return next(fitting, None)


def hopper_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    layout: PackedLayout,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Compute attention with sinks.

    Args:
        q: [tokens, heads, 64] bf16.
        k: [tokens, kv_heads, 64] bf16.
        v: [tokens, kv_heads, 64] bf16.
        sinks: [heads] logits.
        layout: packing of the tokens.
        window: number of keys that a query sees, including its own; None for full attention.
        scale: factor of the scores.

    Returns:
        O [tokens, heads, 64] bf16 and LSE [tokens, heads] fp32.
    """
    kv_heads = k.shape[1]
    heads_per_kv = q.shape[1] // kv_heads
    supported = supported_heads_per_kv(heads_per_kv, window)
    if supported is not None and supported > heads_per_kv:
        # Drop the results of the added heads.
        q, sinks = pad_heads(q, kv_heads, supported), pad_heads(sinks[None], kv_heads, supported)[0]
        o, lse = hopper_forward(q, k, v, sinks, layout, window, scale)
        return unpad_heads(o, kv_heads, heads_per_kv), unpad_heads(lse, kv_heads, heads_per_kv)

    q, k, v = (_dense(x) for x in (q, k, v))
    heads = q.shape[1]
    shape = KernelShape(heads_per_kv, window)
    o = torch.empty_like(q)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)

    if window is None:
        name = "full_forward"
        order = "keys"
    else:
        # All items of a window have the same work, except at the start of a sequence.
        name = "window_forward"
        order = None
    items, count = _items(layout, shape.chunk(name), q.device, order)
    if count:
        launch = _kernel(name, shape, q.device)
        blocks = count * heads // shape.group
        launch(blocks, THREADS, q, k, v, sinks.float(), o, lse, items, heads, scale * LOG2_E)
    return o, lse


def hopper_backward(
    saved: SavedTensors, grad_o: Tensor, layout: PackedLayout, window: int | None, scale: float
) -> Gradients:
    """Compute the gradients of q, k, v and the sinks.

    Args:
        saved: q [tokens, heads, 64], k and v [tokens, kv_heads, 64], sinks [heads],
            O [tokens, heads, 64] and LSE [tokens, heads].
        grad_o: [tokens, heads, 64] gradient of O.
        layout: packing of the tokens.
        window: number of keys that a query sees, including its own; None for full attention.
        scale: factor of the scores.

    Returns:
        Gradients with the shapes and dtypes of q, k, v and sinks.
    """
    q, k, v, sinks, o, lse = saved
    kv_heads = k.shape[1]
    heads_per_kv = q.shape[1] // kv_heads
    supported = supported_heads_per_kv(heads_per_kv, window)
    if supported is not None and supported > heads_per_kv:
        # dO of the additional heads is 0, so they add nothing to dK and dV.
        q, o, lse, grad_o, sinks = (
            pad_heads(x, kv_heads, supported) for x in (q, o, lse, grad_o, sinks[None])
        )
        padded = (q, k, v, sinks[0], o, lse)
        grad_q, grad_k, grad_v, grad_sinks = hopper_backward(padded, grad_o, layout, window, scale)
        grad_q = unpad_heads(grad_q, kv_heads, heads_per_kv)
        return grad_q, grad_k, grad_v, unpad_heads(grad_sinks[None], kv_heads, heads_per_kv)[0]

    q, k, v, o, lse, grad_o = (_dense(x) for x in (q, k, v, o, lse, grad_o))
    dense = (q, k, v, sinks.float(), o, lse)

    # The first kernel also writes the inputs of the second: LSE and delta of each row, and partial
    # sums of the sinks' gradient.
    grad_q, row_stats, shares = _query_gradients(dense, grad_o, layout, window, scale)
    if not shares.numel():
        # Without tokens no kernel is launched. k and v are empty, but every head has a sink.
        return grad_q, torch.empty_like(k), torch.empty_like(v), torch.zeros_like(sinks)

    grad_k, grad_v, grad_sinks = _key_gradients(
        dense, grad_o, row_stats, shares, layout, window, scale
    )
    return grad_q, grad_k, grad_v, grad_sinks.to(sinks.dtype)


def _query_gradients(
    saved: SavedTensors, grad_o: Tensor, layout: PackedLayout, window: int | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute dQ and the inputs of the kernel for dK and dV.

    Returns:
        dQ like q, (LSE * log2(e), delta) of each row [tokens, heads, 2] fp32, and partial sums of
        the sinks' gradient [items, heads] fp32.
    """
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
    # LSE and delta of a row are adjacent, so that the next kernel reads one range of memory. Two
    # separate arrays were slower.
    row_stats = torch.empty(*lse.shape, 2, dtype=torch.float32, device=q.device)
    shares = torch.empty(count, heads, dtype=torch.float32, device=q.device)
    if count == 0:
        return grad_q, row_stats, shares

    blocks = count * heads // shape.group
    launch = _kernel(name, shape, q.device)
    # The window kernel copies keys with plain instructions. The kernel for full attention uses TMA,
    # which needs descriptors instead of pointers, and takes the scale in base 2, too.
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
    """Compute dK and dV, and the sinks' gradient [heads] in fp32 as the sum of ``shares``."""
    q, k, v = saved[:3]
    heads = q.shape[1]
    shape = KernelShape(heads // k.shape[1], window)
    # Unlike for dQ, the order of the sequences is 3% slower here (64 sequences of 512 tokens).
    order = "queries" if window is None else None
    items, count = _items(layout, KEYS, q.device, order)

    grad_k = torch.empty_like(k)
    grad_v = torch.empty_like(v)
    # One block per item and kv head. The kernel also sums the partial sums of the sinks' gradient,
    # which saves a launch. The order of the arguments is that of backward_kv.cu.
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


def pad_heads(x: Tensor, kv_heads: int, heads_per_kv: int) -> Tensor:
    """Add heads of zeros after the query heads of every kv head.

    Args:
        x: [tokens, heads, ...] values of the query heads.
        kv_heads: number of kv heads.
        heads_per_kv: number of query heads per kv head in the result.

    Returns:
        [tokens, kv_heads * heads_per_kv, ...], contiguous.
    """
    tokens, heads, *rest = x.shape
    by_kv = x.reshape(tokens, kv_heads, heads // kv_heads, *rest)
    padded = x.new_zeros(tokens, kv_heads, heads_per_kv, *rest)
    padded[:, :, : heads // kv_heads] = by_kv
    return padded.flatten(1, 2)


def unpad_heads(x: Tensor, kv_heads: int, heads_per_kv: int) -> Tensor:
    """Remove the heads that ``pad_heads`` added.

    Args:
        x: [tokens, heads, ...] values of the query heads.
        kv_heads: number of kv heads.
        heads_per_kv: number of query heads per kv head in the result.

    Returns:
        [tokens, kv_heads * heads_per_kv, ...], contiguous.
    """
    by_kv = x.reshape(len(x), kv_heads, x.shape[1] // kv_heads, *x.shape[2:])
    return by_kv[:, :, :heads_per_kv].flatten(1, 2).contiguous()


def _dense(x: Tensor) -> Tensor:
    """Return x as contiguous memory at a multiple of 16 bytes, copied if necessary."""
    # Copies of 16 bytes and TMA need the alignment. A contiguous view can be misaligned.
    x = x.contiguous()
    if x.data_ptr() % 16:
        return x.clone()
    return x


def _tensor_map(x: Tensor, heads: int) -> nvrtc.TensorMap:
    """Return the descriptor of x for tiles of ``heads`` heads."""
    return nvrtc.tensor_map(x, (TILE_ROWS // heads, heads))


def _items(
    layout: PackedLayout, length: int, device: torch.device, order: str | None
) -> tuple[Tensor, int]:
    """Return a kernel's table of work items, cached with the packing.

    Items with more work come first.

    Args:
        layout: packing of the tokens.
        length: positions per item; an item belongs to one sequence.
        device: device of the table.
        order: order of the items:

            - None: by position.
            - "keys": items that see the most keys first.
            - "queries": items that the most queries see first.
            - "sequence": items of the longest sequence first, because they read the same keys at
              the same time. Within a sequence the last items come first, because they see most.

    Returns:
        [items, 4] int32 on the device (start of the sequence, end of the sequence, first position
        of the item, 0), and the number of items.
    """
    key = ("items", length, device, order)
    if key not in layout.plans:
        table = _item_table(layout, length, order)
        layout.plans[key] = (copy_to_device(table.to(torch.int32), device), len(table))
    return layout.plans[key]


def _item_table(layout: PackedLayout, length: int, order: str | None) -> Tensor:
    """Return the table of ``_items``, [items, 4] int64 on the CPU."""
    start, end, number = layout.pieces(length)
    before = number * length
    table = torch.stack((start, end, start + before, torch.zeros_like(start)), 1)
    if order is None:
        return table

    # The last items should be short, so that all multiprocessors finish at about the same time.
    # Under the causal mask an item sees all keys before it, and all queries after it see the item.
    if order == "keys":
        work = before
    elif order == "queries":
        work = end - start - before
    else:
        # The sort is stable, so reversing the table puts the last items of a sequence first.
        table = table.flip(0)
        work = (end - start).flip(0)
    return table[work.argsort(descending=True, stable=True)]


@functools.cache
def _kernel(name: str, shape: KernelShape, device: torch.device) -> nvrtc.CudaKernel:
    """Return a compiled kernel, loaded once per process and device."""
    source = SOURCES / f"{name}.cu"
    cubin = nvrtc.compile_cubin(source, macros(name, shape), nvrtc.architecture(device))
    with torch.cuda.device(device):
        return nvrtc.CudaKernel(cubin, name, shape.shared_bytes(name))


def macros(name: str, shape: KernelShape) -> dict[str, int]:
    """Return the macros for compiling a kernel; tile.cuh explains them.

    Args:
        name: name of the kernel and of its .cu file.
        shape: parameters of the layer.
    """
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
    """Return value / divisor, rounded up."""
    return (value + divisor - 1) // divisor


def _round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``value``."""
    return _ceil_divide(value, multiple) * multiple
