"""Precisions that configuration keys choose from."""

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

Precision = Literal["fp32", "bf16"]

DTYPE_NAMES: dict[str, str] = {"fp32": "float32", "bf16": "bfloat16"}
"""Names of the dtypes in torch, in Hugging Face's config.json and in arguments of SGLang."""


def bytes_per_number(precision: str) -> int:
    """Return the bytes of a number."""
    return {"fp32": 4, "bf16": 2}[precision]


def torch_dtype(precision: str) -> "torch.dtype":
    """Return the dtype of a precision."""
    # Configurations are read without torch, whose import takes a second.
    import torch

    dtype: torch.dtype = getattr(torch, DTYPE_NAMES[precision])
    return dtype
