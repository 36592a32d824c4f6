"""GPT-OSS weights between Hugging Face and Megatron: directories, torch_dist checkpoints and running models."""
