"""Compares answers in separate processes, because an answer can make algebra run forever or use all
memory."""

import atexit

from rl_loop.rewards.checker_pool import CheckerPool

SECONDS = 2.0
"""Processor time of one comparison, which usually takes a thousandth of that; a slower one counts
as not equivalent."""
WORKERS = 32
"""Comparisons at the same time; more wait until one of these is over."""
LONGEST = 2000
"""Characters of an expression; a longer one counts as not equivalent."""

Pair = tuple[str, str]
"""An answer and the truth, in standard notation."""


class ComparisonPool:
    """Compares expressions, from any number of threads."""

    def __init__(self, seconds: float = SECONDS, workers: int = WORKERS) -> None:
        self.processes = CheckerPool(
            "the process that compares answers",
            f"{__name__}:compare",
            prepare=f"{__name__}:prepare",
            seconds=seconds,
            workers=workers,
            control=("1/2", "0.5"),
        )

    def equivalent(self, answer: str, truth: str) -> bool:
        """Return True if two answers in standard notation say the same.

        An answer over which two processes die says something else, unless the machine is out of memory.

        Raises:
            CheckerFailure: no process can be started, none answers any question, or two die while
                the machine is out of memory.
        """
        if max(len(answer), len(truth)) > LONGEST:
            return False
        return bool(self.processes.judge((answer, truth), too_expensive=False))

    def close(self) -> None:
        """End all processes; the next comparison starts new ones."""
        self.processes.close()


def prepare(_: None) -> None:
    """Import sympy and use it once: every worker then has what that leaves in memory."""
    compare((r"\sin^2 x+\cos^2 x+\sqrt{2}\pi", r"1+\frac{2\pi}{\sqrt{2}}"))


def compare(pair: Pair) -> bool:
    """Return True if two texts in standard notation say the same. Runs in a worker."""
    # Imported here: the side that asks needs no sympy.
    from rl_loop.rewards.comparison import says_the_same

    answer, truth = pair
    try:
        return says_the_same(answer, truth)
    except (Exception, RecursionError, MemoryError):
        # sympy raises all sorts of things.
        return False


_pool = ComparisonPool()
atexit.register(_pool.close)
equivalent = _pool.equivalent
