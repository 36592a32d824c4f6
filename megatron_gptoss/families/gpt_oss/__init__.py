"""GPT-OSS: mixture of experts with attention sinks and sliding windows."""
