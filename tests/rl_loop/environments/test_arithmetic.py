"""The demo's task generator."""

from __future__ import annotations

from rl_loop.environments import arithmetic
from rl_loop.environments.arithmetic import TEMPLATES, choose_split, problem

TRAIN = [problem("train", 0, i) for i in range(3000)]
HELD_OUT = [problem("held_out", 0, i) for i in range(3000)]


def test_no_problem_is_in_both_splits_by_expression_or_text() -> None:
    other_seed = [problem("held_out", 1, i) for i in range(3000)]
    for held_out in (HELD_OUT, other_seed):
        assert not {p.expression for p in TRAIN} & {p.expression for p in held_out}
        assert not {p.text for p in TRAIN} & {p.text for p in held_out}
    assert all(choose_split(p.expression) == "held_out" for p in HELD_OUT)


def test_equal_problem_texts_have_equal_expressions() -> None:
    expressions: dict[str, set[str]] = {}
    for p in TRAIN + HELD_OUT:
        expressions.setdefault(p.text, set()).add(p.expression)
    assert all(len(found) == 1 for found in expressions.values())


def test_problem_depends_only_on_split_seed_and_index() -> None:
    assert problem("train", 0, 2999) == TRAIN[2999]
    assert problem("train", 1, 2999) != TRAIN[2999]
    assert problem("train", 0, 10**12) == problem("train", 0, 10**12)


def test_arithmetic_problems_are_varied() -> None:
    assert len({p.expression for p in TRAIN}) > 0.95 * len(TRAIN)
    assert len({p.answer for p in TRAIN}) > 0.5 * len(TRAIN)
    words = {"".join(c for c in p.text if c.isalpha()) for p in TRAIN}
    signs = {"".join(c for c in p.expression if not c.isdigit()) for p in TRAIN}
    shapes = [
        [pattern.format(a="", b="", c="", d="") for pattern in template] for template in TEMPLATES
    ]
    assert words == {"".join(c for c in text if c.isalpha()) for text, _ in shapes}
    assert signs == {expression for _, expression in shapes}


def test_answer_is_the_value_of_the_problem_text() -> None:
    by_hand = arithmetic.ArithmeticProblem("", "(12+30)*2-5")
    assert by_hand.answer == 79
    for p in TRAIN[:200]:
        for number in filter(
            str.isdigit, "".join(c if c.isdigit() else " " for c in p.expression).split()
        ):
            assert number in p.text
