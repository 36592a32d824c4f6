"""Sequences of the checks. Each kind of sequence exposes one kind of fault."""

import random
from dataclasses import dataclass
from functools import cached_property

from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
from rl_loop.certify.model import BEACON

BEACONS = 4
"""Number of intervals between beacons in a sequence of kind "window"."""
PROMPTS = 6
"""Number of prompts to continue."""
CONTINUATION = PROMPTS + 4
"""Number of tokens to decode, so that every beacon of ``prompts`` leaves the window."""
TAIL = 96
"""Number of tokens beyond YaRN's original length."""


@dataclass(frozen=True)
class ProbeSequence:
    """Token ids with their purpose."""

    kind: str
    """"short", "window", "long" or "prompt"."""
    ids: tuple[int, ...]


@dataclass(frozen=True)
class ProbeSequences:
    """All sequences for one architecture. They depend only on ``seed``."""

    config: GptOssModelConfig
    special_ids: tuple[int, ...]
    """Special tokens that sequences contain."""
    seed: int = 0

    @cached_property
    def short(self) -> list[ProbeSequence]:
        """Sequences that fit in a window, so that faults of the window do not change them."""
        length = min(self.config.sliding_window, 96)
        return [ProbeSequence("short", self._draw(length, f"short {i}")) for i in range(3)]

    @cached_property
    def window(self) -> list[ProbeSequence]:
        """Texts with beacons at a distance of one window plus one token.

        The token 2 positions before a beacon attends to the previous beacon as its oldest key. The
        token 1 position before a beacon attends to no beacon.
        """
        distance = self.config.sliding_window + 1
        sequences = []
        for number in range(2):
            # The first beacon is at position 0 or 1. With 2 more tokens, both sequences have a last
            # beacon.
            ids = list(self._draw(BEACONS * distance + 2, f"window {number}"))
            for i in range(number, len(ids), distance):
                ids[i] = BEACON
            sequences.append(ProbeSequence("window", tuple(ids)))
        return sequences

    @cached_property
    def long(self) -> list[ProbeSequence]:
        """Text that is longer than YaRN's original length."""
        length = self.config.yarn_original_length + TAIL
        if self.config.yarn_factor == 1:
            # Without YaRN there is no original length, and a few windows are enough.
            length = BEACONS * self.config.sliding_window + TAIL
        return [ProbeSequence("long", self._draw(min(length, self.config.max_length), "long"))]

    @cached_property
    def all(self) -> list[ProbeSequence]:
        """All sequences except prompts, short sequences first."""
        return [*self.short, *self.window, *self.long]

    @cached_property
    def prompts(self) -> list[ProbeSequence]:
        """Prompts with one beacon each, which leaves the window while the continuation is decoded.

        One decoded token attends to the beacon as its oldest key. The next token does not attend to
        it.
        """
        sequences = []
        for number in range(PROMPTS):
            # The beacon is the oldest key of position ``number + window - 1``.
            length = max(self.config.sliding_window - 3, PROMPTS)
            ids = list(self._draw(length, f"prompt {number}"))
            ids[number] = BEACON
            sequences.append(ProbeSequence("prompt", tuple(ids)))
        return sequences

    def _draw(self, length: int, name: str) -> tuple[int, ...]:
        """Draw random tokens, on average 1 of 12 special."""
        # A string seeds Random by its SHA-512, so sequences are equal in all processes.
        rng = random.Random(f"{self.seed}/{name}")
        # Further beacons would change the distances between beacons.
        ordinary = [i for i in range(self.config.vocab_size) if i != BEACON]
        ids = []
        for _ in range(length):
            is_special = self.special_ids and rng.random() < 1 / 12
            ids.append(rng.choice(self.special_ids if is_special else ordinary))
        return tuple(ids)
