r"""Equivalence of answers in \boxed{}."""

from __future__ import annotations

import time
from collections.abc import Iterator
from decimal import Decimal

import pytest

from rl_loop.rewards.math_answer import PLAIN_NUMBER, is_correct, last_boxed
from rl_loop.rewards.math_verify_process import LONGEST, MathVerifyProcess
from tests.rl_loop.rewards.labelled_answers import pairs


@pytest.fixture(scope="module")
def math_verify() -> Iterator[MathVerifyProcess]:
    process = MathVerifyProcess(seconds=2.0)
    yield process
    process.close()


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{4}", "4"),
        (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{1} or \boxed{2}", "2"),
        (r"\boxed{1} or \boxed{2", "1"),
        (r"\boxed{}", ""),
        ("4", None),
        (r"\boxed{4", None),
        (r"\boxed 4", None),
    ],
)
def test_last_complete_box_is_found(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


@pytest.mark.parametrize(
    ("answer", "truth", "correct"),
    [
        ("42", "42", True),
        ("-42", "42", False),
        ("42.0", "42", True),
        ("043", "43", True),
        ("1,000", "1000", True),
        (r"\frac{1}{2}", "0.5", True),
        (r"\frac{1}{2}", "0.6", False),
        ("(1,2)", "(1, 2)", True),
        ("x+1", "1+x", True),
        ("", "0", False),
        ("forty-two", "42", False),
        ("{{{", "1", False),
        (r"\frac{", "1", False),
        ("1" * 10_000, "1", False),
    ],
)
def test_answers_are_compared_by_value(answer: str, truth: str, correct: bool) -> None:
    assert is_correct(rf"The answer is \boxed{{{answer}}}.", truth) is correct


def test_an_answer_outside_the_box_does_not_count() -> None:
    assert not is_correct("42", "42")


WHOLE = ("0", "1", "007", "12", "99999999", "123456789012", "99999999999999999999")
PLACES = ("", "0", "10", "5", "50", "123450", "123456", "123457", "999999")


def plain_numbers() -> list[str]:
    texts = [f"{sign}{whole}.{places}".rstrip(".") for sign in ("", "-") for whole in WHOLE for places in PLACES]
    return [text for text in texts if PLAIN_NUMBER.fullmatch(text)]


def test_fast_path_of_plain_numbers_agrees_with_math_verify(math_verify) -> None:
    numbers = plain_numbers()
    assert len(numbers) > 80
    close = [(a, b) for a in numbers for b in numbers if abs(abs(Decimal(a)) - abs(Decimal(b))) < Decimal("0.00001")]
    for a, b in [*close, *zip(numbers, reversed(numbers), strict=True)]:
        assert math_verify.equivalent(a, b) is (Decimal(a) == Decimal(b)), (a, b)


def test_numbers_that_math_verify_rounds_are_left_to_it(math_verify) -> None:
    assert math_verify.equivalent("0.12345678", "0.12345679")
    assert is_correct(r"\boxed{0.12345678}", "0.12345679")
    assert math_verify.equivalent("99999999999999999999.123456", "99999999999999999999.123457")
    assert is_correct(r"\boxed{99999999999999999999.123456}", "99999999999999999999.123457")


@pytest.mark.parametrize("bomb", ["9^{9^{9^{9}}}", "10^{10^{10}}"])
def test_an_answer_that_computes_for_ever_is_wrong_and_the_next_one_is_compared(math_verify, bomb: str) -> None:
    assert math_verify.equivalent("1/2", "0.5")
    began = time.monotonic()
    assert not math_verify.equivalent(bomb, "4")
    assert time.monotonic() - began < 10
    assert math_verify.equivalent("1/2", "0.5")


def test_an_answer_of_absurd_length_is_wrong(math_verify) -> None:
    assert not math_verify.equivalent("1+" * LONGEST + "1", "1")


def test_every_labelled_pair_is_judged_as_labelled() -> None:
    found = pairs()
    assert len(found) >= 200
    wrong = [pair for pair in found if is_correct(rf"It is \boxed{{{pair[0]}}}.", pair[1]) is not pair[2]]
    assert wrong == []


def test_hanging_expressions_are_cut_off_and_the_next_answer_is_judged(math_verify: MathVerifyProcess) -> None:
    for hanging in (r"\binom{10^{9}}{5\cdot 10^{8}}", "(((1000000!)!)!)"):
        began = time.monotonic()
        assert not math_verify.equivalent(hanging, "3")
        assert time.monotonic() - began < 60
        assert math_verify.equivalent("x+1", "1+x")
