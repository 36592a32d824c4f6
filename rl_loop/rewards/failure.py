"""Raised by a reward that fails for another reason than the answer."""


class CheckerFailure(RuntimeError):
    """A checker of answers could not run: it did not start, died, or lacks data that it needs.

    It says nothing about the answer. An episode whose reward raises it has no reward, and must
    not be counted as wrong."""
