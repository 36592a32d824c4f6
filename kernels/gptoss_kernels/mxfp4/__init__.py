"""MXFP4: blocks of 32 four-bit floats (e2m1) sharing one power-of-two scale (e8m0, bias 127)."""

from gptoss_kernels.mxfp4.api import dequantize, fake_quantize, quantize

__all__ = ["dequantize", "fake_quantize", "quantize"]
