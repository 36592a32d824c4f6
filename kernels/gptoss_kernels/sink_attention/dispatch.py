"""Which backend "auto" takes; the order is what docs/performance.md measured on an H200.

window   our kernels for sliding-window layers: they win every such case, whatever the lengths.
short    our kernels for full attention: they win where sequences average SHORT_MEAN tokens or
         less, and serve longer ones where no FlashAttention is installed.
flash4   wins full attention over longer ones on Hopper, and takes windows and head sizes that our
         kernels do not.
flash3   is second there, by the price of the sink's extra pass.
reference serves everything else: CPUs, fp32 and fp64, GPUs without any of the above.
"""

import functools
import logging
from typing import NamedTuple

import torch

from gptoss_kernels.sink_attention import flash, window

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "reference", "window", "short", "flash3", "flash4")
FLASH_MODULES = {"flash3": "flash_attn_interface", "flash4": "flash_attn.cute"}
"""The module that brings each FlashAttention backend."""
FLASH_HEAD_SIZES = (64, 96, 128)
SHORT_MEAN = 1024
"""Mean sequence length (``PackedLayout.mean_length``) in tokens up to which our kernels serve full
attention."""


class ShapeClass(NamedTuple):
    """What the choice of a backend depends on, but for the lengths of the sequences."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_size: int
    window: int | None


def resolve_backend(backend: str, shape: ShapeClass, short: bool) -> str:
    """Return the backend that computes: the requested one, or the choice for "auto".

    Args:
        backend: one of BACKENDS.
        shape: the layer and its tensors.
        short: whether the mean length is at most SHORT_MEAN.

    Raises:
        ValueError: no such backend, or it cannot take the shape.
    """
    if backend == "auto":
        return choose_backend(shape, short)

    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")

    reason = unsupported_reason(backend, shape)
    if reason is not None:
        raise ValueError(f"backend {backend!r} cannot take this: {reason}")
    return backend


@functools.cache
def choose_backend(shape: ShapeClass, short: bool) -> str:
    """Choose the backend for a shape class, and log the choice once for each.

    Args:
        shape: the layer and its tensors.
        short: whether the mean length is at most SHORT_MEAN.
    """
    order = ["window", "flash4", "flash3", "short"]
    if short:
        order = ["window", "short", "flash4", "flash3"]
    reasons = {backend: unsupported_reason(backend, shape) for backend in order}
    supported = [backend for backend in order if reasons[backend] is None]
    chosen = supported[0] if supported else "reference"

    text = (
        f"{shape.dtype} on {shape.device}, heads {shape.heads}/{shape.kv_heads}, "
        f"head size {shape.head_size}, window {shape.window}"
    )
    if short:
        text += ", short sequences"
    if chosen == "reference" and shape.device.type == "cuda" and shape.dtype == torch.bfloat16:
        logger.warning("sink attention for %s takes the slow reference: %s", text, reasons)
    else:
        logger.info("sink attention for %s takes %s", text, chosen)
    return chosen


@functools.cache
def unsupported_reason(backend: str, shape: ShapeClass) -> str | None:
    """Say why a backend cannot take a shape class; None when it can."""
    if backend == "reference":
        return None
    if shape.device.type != "cuda":
        return f"{backend} needs a CUDA device, the tensors are on {shape.device}"
    if shape.dtype != torch.bfloat16:
        return f"{backend} takes bf16, q is {shape.dtype}"

    if backend in ("window", "short"):
        takes_windows = backend == "window"
        has_window = shape.window is not None
        if takes_windows != has_window:
            return (
                f"window is {shape.window}: backend window takes windows, backend short takes None"
            )
        heads_per_kv = shape.heads // shape.kv_heads
        return window.unsupported_reason(shape.device, heads_per_kv, shape.head_size, shape.window)

    module = FLASH_MODULES[backend]
    if not flash.installed(module):
        return f"{module} is not installed"
    major, minor = torch.cuda.get_device_capability(shape.device)
    if major < 9:
        return f"{backend} needs compute capability 9.0, this is {major}.{minor}"
    if shape.head_size not in FLASH_HEAD_SIZES:
        return f"{backend} takes head sizes 64, 96 and 128, q has {shape.head_size}"
    return None


def describe() -> str:
    """Describe what is available here, one line per backend: for a diagnosis command."""
    lines = [
        "sink attention backends, in the order auto tries them for 64/8 heads of size 64 in bf16:"
    ]
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    windowed = ShapeClass(device, torch.bfloat16, heads=64, kv_heads=8, head_size=64, window=128)
    full = windowed._replace(window=None)

    backends = {
        "window": windowed,
        "short": full,
        "flash4": full,
        "flash3": full,
        "reference": full,
    }
    for backend, shape in backends.items():
        reason = unsupported_reason(backend, shape)
        status = "available" if reason is None else f"no: {reason}"
        lines.append(f"  {backend:10s}{status}")

    choices = {
        "window 128 layers": choose_backend(windowed, short=True),
        f"full layers, sequences averaging up to {SHORT_MEAN} tokens,": choose_backend(
            full, short=True
        ),
        "full layers, longer sequences,": choose_backend(full, short=False),
    }
    lines += [f"  {layers} take {backend}" for layers, backend in choices.items()]
    return "\n".join(lines)
