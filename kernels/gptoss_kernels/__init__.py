"""Kernels of GPT-OSS for CPUs and GPUs. They need only torch."""

__all__ = ["mxfp4", "sink_attention"]
