"""Policy model on Megatron-Core: layers, trainer, checkpoints, predictions of memory and time."""

from megatron_gptoss.uncompiled import compile_only_on_gpus

compile_only_on_gpus()
