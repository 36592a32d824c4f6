"""Two faults at once: the second begins within seconds of the first, whatever has become of that."""

import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import psutil

from tests.faults.kinds import KINDS, SERVER_KINDS, Kind, Moment, NotPossibleYet

SEPARATOR = "+"
"""Between the names of two kinds, in the name of a pair."""
LONGEST_BETWEEN = 3.0
"""Seconds between the beginnings of two faults."""


class OnlyFirst(Exception):
    """The second fault met nothing that it could be done to."""

    def __init__(self, kind: str, detail: str) -> None:
        """``kind``, ``detail``: of the first, which was injected."""
        super().__init__(detail)
        self.kind = kind
        self.detail = detail


def plan_pairs(kinds: Sequence[str], count: int, chance: random.Random) -> list[str]:
    """Choose pairs of two kinds, each kind as often as any other. What ends a run at once is the
    second of a pair: after that there is nothing that another fault could meet.

    Raises ValueError if more than half of ``kinds`` are of that sort."""
    last = [name for name in kinds if _all_kinds()[name].ends_at_once]
    if 2 * len(last) > len(kinds):
        raise ValueError(f"no pairs of kinds most of which end a run at once: {', '.join(last)}")

    pairs: list[str] = []
    while len(pairs) < count:
        firsts = chance.sample(kinds, len(kinds))
        seconds = chance.sample(kinds, len(kinds))
        drawn = list(zip(firsts, seconds, strict=True))
        if any(first in last and second in last for first, second in drawn):
            continue
        for pair in drawn:
            pairs.append(SEPARATOR.join(sorted(pair, key=lambda name: name in last)))
    return pairs[:count]


def kind_of(name: str) -> Kind:
    """Return the kind of this name, or what two kinds are together."""
    kinds = [_all_kinds()[part] for part in name.split(SEPARATOR)]
    if len(kinds) == 1:
        return kinds[0]

    first, second = kinds
    # An order may be lost with the process that has carried it out; then nothing is to be noticed
    # but by the losses.
    must_end = any(kind.must_end and not kind.is_order for kind in kinds)
    # The one that need not heal may end the run for a reason of its own.
    may_end = [kind for kind in kinds if not kind.must_heal]
    names = [kind.named_by for kind in may_end]
    return Kind(
        inject=lambda moment: _inject_both(name, moment),
        must_end=must_end,
        must_heal=not may_end,
        named_by="|".join(names) if all(names) else "",
        kills_driver=first.kills_driver or second.kills_driver,
        comes_back=first.comes_back or second.comes_back,
    )


def _all_kinds() -> dict[str, Kind]:
    return KINDS | SERVER_KINDS


def _inject_both(name: str, moment: Moment) -> str:
    """Inject two faults, which may take some time each. Raises what the first raises, and OnlyFirst
    if the second is not possible."""
    first, second = name.split(SEPARATOR)
    with ThreadPoolExecutor(1) as thread:
        injecting = thread.submit(_all_kinds()[first].inject, moment)
        time.sleep(moment.random.uniform(0, LONGEST_BETWEEN))
        try:
            second_detail = _all_kinds()[second].inject(moment)
        except (NotPossibleYet, psutil.NoSuchProcess, FileNotFoundError):
            raise OnlyFirst(first, injecting.result()) from None
        try:
            first_detail = injecting.result()
        except (NotPossibleYet, psutil.NoSuchProcess, FileNotFoundError):
            raise OnlyFirst(second, second_detail) from None
    return f"{first_detail}; {second_detail}"
