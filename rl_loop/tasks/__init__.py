"""The tasks of a run: sources, files, demonstrations."""
