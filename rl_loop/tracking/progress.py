"""How a run tells the user what it is doing."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Progress(Protocol):
    """Receives what happens in a run, to show it."""

    def phase(self, name: str) -> None:
        """Take the name of what the run does from now on."""
        ...

    def episodes(self, ended: int, wanted: int) -> None:
        """Take how many episodes of the present phase have ended, of how many."""
        ...

    def note(self, message: str) -> None:
        """Take a message to the user."""
        ...

    def step(self, step: int, values: dict[str, float]) -> None:
        """Take the metrics of a finished step."""
        ...


ProgressFactory = Callable[[str, int, int], AbstractContextManager[Progress]]
"""(title, total steps, first step) -> a context in which progress is shown."""


class SilentProgress:
    """A display that shows nothing. A subclass shows what it overrides."""

    def phase(self, name: str) -> None:
        pass

    def episodes(self, ended: int, wanted: int) -> None:
        pass

    def note(self, message: str) -> None:
        pass

    def step(self, step: int, values: dict[str, float]) -> None:
        pass


@contextmanager
def silent(title: str, total: int, first: int) -> Iterator[Progress]:
    """Show nothing; a ``ProgressFactory``."""
    yield SilentProgress()
