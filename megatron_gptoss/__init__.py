"""The GPT-OSS policy on Megatron-Core, and one optimizer step on a packed batch."""
