"""In place of SGLang in ``PYTHONPATH``: servers for ``benchmarks/concurrent_episodes.py``."""
