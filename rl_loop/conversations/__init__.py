"""A user's own conversations: files of chats as samples of supervised fine-tuning."""
