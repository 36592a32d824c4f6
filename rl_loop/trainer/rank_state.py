"""Data about a trainer rank for the driver, which reads it without Megatron."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RankPosition:
    """Position of a rank among the ranks."""

    data: int
    """Data-parallel rank."""
    returns_results: bool
    """True if this rank returns the results of its data-parallel rank."""
    slow_attention: tuple[str, ...] = ()
    """Reasons why layers of this rank run the slow reference of attention on a GPU."""


@dataclass(frozen=True)
class ResumedState:
    """State from which a run continues."""

    state: dict[str, Any]
    """State that was saved with the loaded checkpoint."""
    damages: list[str]
    """Files of newer, skipped checkpoints, each with its fault."""
