"""The GPT-OSS policy on Megatron-Core, and one optimizer step on a packed batch."""

from megatron_gptoss.uncompiled import compile_only_on_gpus

compile_only_on_gpus()
