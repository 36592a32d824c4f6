"""ChatML with tools, the chat format of Qwen2.5 and many dense models: rendering and parsing."""
