"""The forward and the backward pass of each backend, bound to one packing."""

from functools import partial

from gptoss_kernels.sink_attention import flash
from gptoss_kernels.sink_attention.autograd import AttentionPasses
from gptoss_kernels.sink_attention.layout import PackedLayout, Segments
from gptoss_kernels.sink_attention.reference import reference_backward, reference_forward
from gptoss_kernels.sink_attention.window import window_backward, window_forward

OWN_PASSES = {
    "window": (window_forward, window_backward),
    "short": (window_forward, window_backward),
    "reference": (reference_forward, reference_backward),
}
"""Passes of this package. Both names of our kernels share them: ``window`` None selects full
attention."""


def bind_passes(
    backend: str, segments: Segments, layout: PackedLayout, window: int | None, scale: float
) -> AttentionPasses:
    """Return the passes of a backend for queries and keys of the same sequences.

    Args:
        backend: name of a backend, as ``resolve_backend`` returns it; not flash4, which brings its
            own autograd.
        segments: the packing, with one query per key.
        layout: the layout of ``segments.cu_seqlens_q``.
        window: keys that a query sees, itself included; None for all earlier ones.
        scale: factor of the scores.

    Raises:
        KeyError: no such backend.
    """
    if backend == "flash3":
        return flash.folded_passes(flash.flash3_kernels(), segments, window, scale)

    forward, backward = OWN_PASSES[backend]
    return AttentionPasses(
        forward=partial(forward, layout=layout, window=window, scale=scale),
        backward=partial(backward, layout=layout, window=window, scale=scale),
    )
