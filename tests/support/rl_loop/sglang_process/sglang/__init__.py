"""Replaces SGLang in the environment of a server process."""
