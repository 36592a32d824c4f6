"""Tasks of a run: sources, files, demonstrations."""
