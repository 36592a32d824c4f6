"""Choice of the attention backend.

The order of "auto" follows the measurements on an H200 in docs/performance/attention.md:

hopper    Kernels of this package. Fastest for sliding windows, and for full attention if sequences
          average at most SHORT_MEAN tokens.
flash4    flash-attn-4. Fastest for full attention over longer sequences. Supports windows and head
          sizes that the kernels of this package do not.
flash3    FlashAttention-3. Second for longer sequences, because the sink needs an extra pass.
reference Plain torch, for everything else: CPUs, fp32, fp64, and GPUs without the above.
"""

import functools
import logging
from typing import NamedTuple

import torch

from gptoss_kernels.sink_attention import flash, hopper

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "reference", "hopper", "flash3", "flash4")
"""Valid values of a backend option."""
FLASH_MODULES = {"flash3": "flash_attn_interface", "flash4": "flash_attn.cute"}
"""Python module of each FlashAttention backend."""
FLASH_HEAD_SIZES = (64, 96, 128)
"""Head sizes that the FlashAttention backends support."""
# The kernels of backend hopper are about as fast as flash-attn-4 for sequences of 2,048 tokens and
# 1.13x to 1.24x as fast for 1,024 (docs/performance/attention.md). Their gain falls with length.
SHORT_MEAN = 1024
"""Largest ``PackedLayout.mean_length``, in tokens, for which "auto" prefers backend hopper in full
attention."""


class ShapeClass(NamedTuple):
    """Properties of a layer and its tensors that decide which backends can run.

    Lengths of sequences are not part of it: they change every step, and this is a cache key.
    """

    device: torch.device
    """Device of the tensors."""
    dtype: torch.dtype
    """Data type of q, k and v."""
    heads: int
    """Number of query heads."""
    kv_heads: int
    """Number of key and value heads."""
    head_size: int
    """Channels per head."""
    window: int | None
    """Number of keys that a query sees, including its own; None for all earlier keys."""

    def __str__(self) -> str:
        """Return the properties in words, for messages."""
        window = "full attention" if self.window is None else f"window {self.window}"
        return (
            f"{self.dtype} on {self.device}, heads {self.heads}/{self.kv_heads}, head size "
            f"{self.head_size}, {window}"
        )


def resolve_backend(backend: str, shape: ShapeClass, short: bool) -> str:
    """Return the requested backend, or the chosen one for "auto".

    Args:
        backend: one of BACKENDS.
        shape: properties of the layer and its tensors.
        short: whether the mean sequence length is at most SHORT_MEAN.

    Returns:
        A backend that can run, never "auto".

    Raises:
        ValueError: the backend does not exist or does not support the shape.
    """
    if backend == "auto":
        return choose_backend(shape, short)

    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")

    reason = unsupported_reason(backend, shape)
    if reason is not None:
        raise ValueError(f"backend {backend!r} does not support these arguments: {reason}")
    return backend


@functools.cache
def choose_backend(shape: ShapeClass, short: bool) -> str:
    """Return the fastest backend for a shape class. Log the choice once per class.

    Args:
        shape: properties of the layer and its tensors.
        short: whether the mean sequence length is at most SHORT_MEAN.
    """
    order = ["flash4", "flash3", "hopper"]
    if short or shape.window is not None:
        order = ["hopper", "flash4", "flash3"]
    supported = [backend for backend in order if unsupported_reason(backend, shape) is None]
    chosen = supported[0] if supported else "reference"

    text = str(shape)
    if short:
        text += ", short sequences"
    logger.info("sink attention for %s uses %s", text, chosen)
    return chosen


def slow_reason(shape: ShapeClass) -> str | None:
    """Return why a layer on a GPU has no kernel and runs the slow reference; None if it has one.

    The reference is expected on CPUs and in fp32, so None there, too. In bf16 on a GPU it means a
    missing package or an unsupported shape, and several times the duration of a step.
    """
    if shape.device.type != "cuda" or shape.dtype != torch.bfloat16:
        return None
    reasons = [unsupported_reason(backend, shape) for backend in ("hopper", "flash4", "flash3")]
    if None in reasons:
        return None
    return f"sink attention for {shape} uses the slow reference: {'; '.join(map(str, reasons))}"


@functools.cache
def unsupported_reason(backend: str, shape: ShapeClass) -> str | None:
    """Return the reason why a backend does not support a shape class; None if it does."""
    if backend == "reference":
        return None
    if shape.device.type != "cuda":
        return f"{backend} needs a CUDA device, the tensors are on {shape.device}"
    if shape.dtype != torch.bfloat16:
        return f"{backend} supports only bf16, q is {shape.dtype}"

    if backend == "hopper":
        heads_per_kv = shape.heads // shape.kv_heads
        return hopper.unsupported_reason(shape.device, heads_per_kv, shape.head_size, shape.window)

    module = FLASH_MODULES[backend]
    if not flash.is_installed(module):
        return f"{module} is not installed"
    major, minor = torch.cuda.get_device_capability(shape.device)
    if major < 9:
        return f"{backend} needs compute capability 9.0, this is {major}.{minor}"
    if shape.head_size not in FLASH_HEAD_SIZES:
        return f"{backend} supports head sizes 64, 96 and 128, q has {shape.head_size}"
    return None


def describe() -> str:
    """Return a report of the available backends, one line per backend, for ``gptoss doctor``."""
    # Heads and head sizes are those of GPT-OSS.
    lines = ["sink attention backends for 64/8 heads of size 64 in bf16:"]
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    windowed = ShapeClass(device, torch.bfloat16, heads=64, kv_heads=8, head_size=64, window=128)
    full = windowed._replace(window=None)

    for backend in ("hopper", "flash4", "flash3", "reference"):
        reason = unsupported_reason(backend, windowed)
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
