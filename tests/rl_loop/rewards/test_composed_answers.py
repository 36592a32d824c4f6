r"""Composed answers: none equals two different truths, and all of its numbers matter.

Comparisons run in this process, because forks would take most of the time. Other tests cover the
pool.
"""

from __future__ import annotations

import re
from collections import Counter

import pytest

from rl_loop.rewards import math_answer
from rl_loop.rewards.comparison import equivalent_texts
from rl_loop.rewards.math_answer import is_correct
from tests.support.rl_loop.rewards.answer_classes import SAME, classes
from tests.support.rl_loop.rewards.composed_answers import KINDS, Composed, composed
from tests.support.rl_loop.rewards.labelled_answers import pairs


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math_answer, "equivalent_texts", equivalent_texts)


def judged(answer: str, truth: str) -> bool:
    return is_correct(rf"So it is \boxed{{{answer}}}.", truth)


def find_mistakes(case: Composed) -> list[tuple[str, str, str]]:
    """Return the pairs that are judged wrongly in either direction."""
    found = []
    if case.is_readable and not judged(case.answer, case.same):
        found.append(("is", case.answer, case.same))
    for other in case.others:
        if judged(case.answer, other):
            found.append(("is not", case.answer, other))
        if judged(other, case.answer):
            found.append(("is not", other, case.answer))
    return found


def check(count: int, seed: int) -> None:
    found = [mistake for case in composed(count, seed) for mistake in find_mistakes(case)]
    kinds = Counter(kind for kind, _, _ in found)
    assert found == [], (kinds, found[:20])


def test_no_composed_answer_equals_two_truths() -> None:
    """Cases: separators, relations, moduli, bases, units, factorials, sets, ellipses, prose."""
    check(10 * len(KINDS), seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
def test_none_of_20000_composed_answers_equals_two_truths(seed: int) -> None:
    check(5_000, seed)


LENIENT = {
    # Another number has the same value, or a rule ignores the number.
    "letters of a choice",
    "a rounded ground truth",
}
SAME_VALUE = re.compile(r"binom|choose|floor|cm")
"""Answers in which other numbers can have the same value (5 over 3) or units are optional."""


def test_every_number_of_a_right_answer_matters() -> None:
    """A labelled answer is wrong after any of its numbers changes."""
    labelled = [(answer, truth) for answer, truth, is_equal in pairs() if is_equal]
    for name in SAME:
        if name not in LENIENT:
            labelled += [(answer, truth) for answer, truth, _ in classes()[f"same: {name}"]]

    tried = 0
    ignored = []
    for answer, truth in labelled:
        if SAME_VALUE.search(answer):
            continue
        for number in re.finditer("[0-9]+", answer):
            for step in (1, 3):
                changed = (
                    f"{answer[: number.start()]}{int(number[0]) + step}{answer[number.end() :]}"
                )
                tried += 1
                if judged(changed, truth):
                    ignored.append((changed, truth))
    assert tried > 1000
    assert ignored == []
