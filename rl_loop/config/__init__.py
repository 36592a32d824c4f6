"""Typed configuration of a run.

Reading a configuration imports neither torch nor Ray, so mistakes are reported at once.
"""

__all__ = ["load", "run"]
