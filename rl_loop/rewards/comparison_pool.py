"""Compares answers in separate processes, because algebra may take forever or use all memory."""

import atexit

from rl_loop.rewards.checker_pool import CheckerPool

SECONDS = 2.0
"""Limit of processor time per comparison in seconds. Comparisons usually take a thousandth of it.
Answers whose comparison exceeds it count as not equivalent."""
WORKERS = 32
"""Maximum number of concurrent comparisons. Further comparisons wait."""
MAX_CHARACTERS = 2000
"""Maximum characters of an expression. A longer expression counts as not equivalent."""

Pair = tuple[str, str]
"""Answer and truth in standard notation."""


class ComparisonPool:
    """Compares expressions. Any number of threads may use it."""

    def __init__(self, seconds: float = SECONDS, workers: int = WORKERS) -> None:
        self.processes = CheckerPool(
            "the process that compares answers",
            f"{__name__}:compare",
            prepare=f"{__name__}:prepare",
            seconds=seconds,
            workers=workers,
            control=("1/2", "0.5"),
        )

    def equivalent_texts(self, answer: str, truth: str) -> bool:
        """Return True if two answers in standard notation mean the same.

        An answer that kills two processes counts as different, unless the machine is out of memory.

        Raises:
            CheckerError: if no process can be started, no process answers any question, or two
                processes die while the machine is out of memory.
        """
        # Checked here, so that a huge text does not even reach a process.
        if max(len(answer), len(truth)) > MAX_CHARACTERS:
            return False
        return bool(self.processes.judge((answer, truth), too_expensive=False))

    def close(self) -> None:
        """Stop all processes. The next comparison starts new ones."""
        self.processes.close()


def prepare(_: None) -> None:
    """Import sympy and use it once, so that forked workers inherit its caches."""
    compare((r"\sin^2 x+\cos^2 x+\sqrt{2}\pi", r"1+\frac{2\pi}{\sqrt{2}}"))


def compare(pair: Pair) -> bool:
    """Return True if two texts in standard notation mean the same. Runs in a worker."""
    # Imported here, because the caller's process does not need sympy.
    from rl_loop.rewards.comparison import equivalent_texts

    answer, truth = pair
    try:
        return equivalent_texts(answer, truth)
    except (Exception, RecursionError, MemoryError):
        # sympy raises many types of exceptions.
        return False


_pool = ComparisonPool()
atexit.register(_pool.close)
equivalent_texts = _pool.equivalent_texts
