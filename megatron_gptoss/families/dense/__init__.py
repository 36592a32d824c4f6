"""Dense decoders: Llama and Qwen2.5."""
