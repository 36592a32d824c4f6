"""Forward and backward pass of each backend, bound to a packing."""

from functools import partial

from gptoss_kernels.sink_attention import flash
from gptoss_kernels.sink_attention.autograd import AttentionPasses
from gptoss_kernels.sink_attention.hopper import hopper_backward, hopper_forward
from gptoss_kernels.sink_attention.layout import AttentionSegments, PackedLayout
from gptoss_kernels.sink_attention.reference import reference_backward, reference_forward

OWN_PASSES = {
    "hopper": (hopper_forward, hopper_backward),
    "reference": (reference_forward, reference_backward),
}
"""Forward and backward pass of the backends that this package implements."""


def bind_passes(
    backend: str,
    segments: AttentionSegments,
    layout: PackedLayout,
    window: int | None,
    scale: float,
) -> AttentionPasses:
    """Return the passes of a backend for a packing with one query per key.

    Args:
        backend: name returned by ``resolve_backend``, except flash4, which has its own autograd.
        segments: the packing.
        layout: layout of ``segments.cu_seqlens_q``.
        window: number of keys that a query sees, including its own; None for all earlier keys.
        scale: factor of the scores.

    Raises:
        KeyError: the backend does not exist.
    """
    # FlashAttention needs the offsets on the device; the other backends use the host's layout.
    if backend == "flash3":
        return flash.passes_with_added_sink(flash.flash3_kernels(), segments, window, scale)

    forward, backward = OWN_PASSES[backend]
    return AttentionPasses(
        forward=partial(forward, layout=layout, window=window, scale=scale),
        backward=partial(backward, layout=layout, window=window, scale=scale),
    )
