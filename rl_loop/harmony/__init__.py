"""Harmony format on token ids: rendering, parsing, vocabularies."""
