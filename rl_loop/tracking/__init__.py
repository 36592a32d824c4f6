"""What a run leaves behind: its directory, metrics and where they go."""
