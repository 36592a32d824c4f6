"""Built-in subjects. Each module has one kind."""
