"""Replaces SGLang in ``PYTHONPATH``: servers for ``benchmarks/rollouts/concurrent.py``."""
