"""Built-in implementations. Each module has one kind."""
