"""Tasks of a run: sources, files, demonstrations."""

__all__ = ["demonstrations"]
