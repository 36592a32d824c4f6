"""Name table of GPT-OSS."""
