"""Name table of dense decoders of the Llama and Qwen2.5 kind."""
