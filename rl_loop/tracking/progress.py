"""Interface for showing a run's progress to the user."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Progress(Protocol):
    """Receiver of a run's events, to display them."""

    def phase(self, name: str) -> None:
        """Receive the name of the phase that starts."""
        ...

    def episodes(self, ended: int, total: int) -> None:
        """Receive the phase's number of finished episodes, and the total number."""
        ...

    def note(self, message: str) -> None:
        """Receive a message to the user."""
        ...

    def step(self, step: int, values: dict[str, float]) -> None:
        """Receive the metrics of a finished step."""
        ...


ProgressFactory = Callable[[str, int, int], AbstractContextManager[Progress]]
"""(title, total steps, first step) -> context manager that shows the progress."""


class SilentProgress:
    """Display without output. Subclasses override methods to show events."""

    def phase(self, name: str) -> None:
        pass

    def episodes(self, ended: int, total: int) -> None:
        pass

    def note(self, message: str) -> None:
        pass

    def step(self, step: int, values: dict[str, float]) -> None:
        pass


@contextmanager
def silent(title: str, total: int, first: int) -> Iterator[Progress]:
    """Show nothing. A ``ProgressFactory``."""
    yield SilentProgress()
