"""Modules of a transformer layer, and the layer specifications for CPUs and GPUs."""
