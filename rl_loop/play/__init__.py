"""Plays single episodes for people: ``gptoss play``."""
