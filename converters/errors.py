"""The error of every conversion."""

from __future__ import annotations


class ConversionError(ValueError):
    """Weights could not be read, converted or written. The message names the file, key or tensor and what to do."""
