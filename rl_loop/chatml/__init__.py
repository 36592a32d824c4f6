"""ChatML with tools, the chat format of Qwen2.5 and of many dense models: rendering and parsing."""
