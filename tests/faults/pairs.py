"""Two faults at once. The second begins within seconds of the first, independent of its outcome."""

import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import psutil

from tests.faults.kinds import KINDS, SERVER_KINDS, Kind, Moment, NotPossibleYetError

SEPARATOR = "+"
"""Separator of the two kinds in the name of a pair."""
LONGEST_BETWEEN = 3.0
"""Maximum seconds between the starts of two faults."""


class OnlyFirstError(Exception):
    """The second fault had no possible target."""

    def __init__(self, kind: str, detail: str) -> None:
        """``kind`` and ``detail`` describe the fault that was injected."""
        super().__init__(detail)
        self.kind = kind
        self.detail = detail


def plan_pairs(kinds: Sequence[str], count: int, chance: random.Random) -> list[str]:
    """Choose pairs of kinds with equal frequency of all kinds.

    A kind that ends a run at once comes second, because no other fault can follow it.

    Raises:
        ValueError: more than half of ``kinds`` end a run at once.
    """
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


def find_kind(name: str) -> Kind:
    """Return the kind of this name, or the combination of two kinds."""
    kinds = [_all_kinds()[part] for part in name.split(SEPARATOR)]
    if len(kinds) == 1:
        return kinds[0]

    first, second = kinds
    # An order may be lost with the process that has executed it. Then only the losses can show it.
    must_end = any(kind.must_end and not kind.is_order for kind in kinds)
    # The fault that need not heal may end the run for a different reason.
    may_end = [kind for kind in kinds if not kind.must_recover]
    names = [kind.named_by for kind in may_end]
    return Kind(
        inject=lambda moment: _inject_both(name, moment),
        must_end=must_end,
        must_recover=not may_end,
        named_by="|".join(names) if all(names) else "",
        kills_driver=first.kills_driver or second.kills_driver,
        comes_back=first.comes_back or second.comes_back,
    )


def _all_kinds() -> dict[str, Kind]:
    return KINDS | SERVER_KINDS


def _inject_both(name: str, moment: Moment) -> str:
    """Inject two faults, which may overlap. Raises the errors of the first fault.

    Raises OnlyFirstError if only one of the two faults is possible.
    """
    first, second = name.split(SEPARATOR)
    with ThreadPoolExecutor(1) as thread:
        injecting = thread.submit(_all_kinds()[first].inject, moment)
        time.sleep(moment.random.uniform(0, LONGEST_BETWEEN))
        try:
            second_detail = _all_kinds()[second].inject(moment)
        except (NotPossibleYetError, psutil.NoSuchProcess, FileNotFoundError):
            raise OnlyFirstError(first, injecting.result()) from None
        try:
            first_detail = injecting.result()
        except (NotPossibleYetError, psutil.NoSuchProcess, FileNotFoundError):
            raise OnlyFirstError(second, second_detail) from None
    return f"{first_detail}; {second_detail}"
