"""Name table of dense decoders like Llama and Qwen2.5."""
