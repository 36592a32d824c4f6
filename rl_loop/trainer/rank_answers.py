"""What a trainer rank tells the driver of itself, as data that the driver can read without
Megatron."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RankPlace:
    """Where a rank stands among the others."""

    data: int
    """Its data-parallel rank."""
    answers: bool
    """Whether it is the one of its data-parallel rank that returns what was computed."""


@dataclass(frozen=True)
class Resumed:
    """What a run goes on from."""

    state: dict[str, Any]
    """What was saved with the checkpoint that was loaded."""
    damages: list[str]
    """Of newer checkpoints, which were passed over: the file, and what is wrong with it."""
