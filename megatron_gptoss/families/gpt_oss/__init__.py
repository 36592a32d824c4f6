"""GPT-OSS: a mixture of experts with attention sinks and sliding windows."""
