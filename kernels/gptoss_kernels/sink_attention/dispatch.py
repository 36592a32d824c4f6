"""Which backend "auto" takes. The order of the rules is what docs/performance.md measured on an H200.

window   our kernels for sliding-window layers: they win every such case, whatever the lengths.
short    our kernels for full attention: they win where sequences average SHORT_MEAN tokens or less.
flash4   wins full attention over longer ones on Hopper, and takes windows and head sizes that our kernels do not.
flash3   is second there, by the price of the sink's extra pass.
reference serves everything else: CPUs, fp32 and fp64, GPUs without any of the above."""

import functools
import logging

import torch

from gptoss_kernels.sink_attention import flash, window

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "reference", "window", "short", "flash3", "flash4")
SHORT_MEAN = 1024
"""Mean sequence length (``PackedLayout.mean_length``) in tokens up to which our kernels serve full attention."""


@functools.cache
def choose(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_size: int, width: int | None, short: bool
) -> str:
    """The backend for a shape class; logged once for each. ``short``: the mean length is at most SHORT_MEAN."""
    order = ("window", "short", "flash4", "flash3") if short else ("window", "flash4", "flash3")
    refusals = {name: why_not(name, device, dtype, heads, kv_heads, head_size, width) for name in order}
    chosen = next((name for name, reason in refusals.items() if reason is None), "reference")
    text = f"{dtype} on {device}, heads {heads}/{kv_heads}, head size {head_size}, window {width}"
    text += ", short sequences" if short else ""
    if chosen == "reference" and device.type == "cuda" and dtype == torch.bfloat16:
        logger.warning("sink attention for %s takes the slow reference: %s", text, refusals)
    else:
        logger.info("sink attention for %s takes %s", text, chosen)
    return chosen


@functools.cache
def why_not(
    backend: str, device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_size: int, width: int | None
) -> str | None:
    """Why a backend cannot take a shape class; None when it can."""
    if backend == "reference":
        return None
    if device.type != "cuda":
        return f"{backend} needs a CUDA device, the tensors are on {device}"
    if dtype != torch.bfloat16:
        return f"{backend} takes bf16, q is {dtype}"
    if backend in ("window", "short"):
        if (width is None) != (backend == "short"):
            return f"window is {width}: backend window takes windows, backend short takes None"
        return window.why_not(device, heads // kv_heads, head_size, width)
    module = {"flash3": "flash_attn_interface", "flash4": "flash_attn.cute"}[backend]
    if not flash.installed(module):
        return f"{module} is not installed"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 9:
        return f"{backend} needs compute capability 9.0, this is {major}.{minor}"
    if head_size not in (64, 96, 128):
        return f"{backend} takes head sizes 64, 96 and 128, q has {head_size}"
    return None


def describe() -> str:
    """What is available here, one line per backend: for a diagnosis command."""
    lines = ["sink attention backends, in the order auto tries them for 64/8 heads of size 64 in bf16:"]
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    for name, width in (("window", 128), ("short", None), ("flash4", None), ("flash3", None), ("reference", None)):
        reason = why_not(name, device, torch.bfloat16, 64, 8, 64, width)
        lines.append(f"  {name:10s}{'available' if reason is None else 'no: ' + reason}")
    for layers, width, short in (
        ("window 128 layers", 128, True),
        (f"full layers, sequences averaging up to {SHORT_MEAN} tokens,", None, True),
        ("full layers, longer sequences,", None, False),
    ):
        lines.append(f"  {layers} take {choose(device, torch.bfloat16, 64, 8, 64, width, short)}")
    return "\n".join(lines)
