r"""Equivalence of answers in \boxed{}."""

from __future__ import annotations

import time
from collections.abc import Iterator
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_loop.rewards.math_answer import PLAIN_NUMBER, is_correct, last_boxed
from rl_loop.rewards.math_verify_process import LONGEST, MathVerifyProcess


@pytest.fixture(scope="module")
def math_verify() -> Iterator[MathVerifyProcess]:
    process = MathVerifyProcess(seconds=1.0)
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


numbers = st.builds(
    lambda sign, whole, places, zeros: sign + (f"{whole}.{places}{'0' * zeros}"[: len(whole) + 7] if places else whole),
    st.sampled_from(["", "-"]),
    st.sampled_from(["0", "1", "007", "12", "123456789012", "99999999999999999999"]),
    st.sampled_from(["", "0", "5", "1", "12345", "123456", "999999"]),
    st.integers(0, 3),
)


@settings(deadline=None, max_examples=150)
@given(numbers, numbers)
def test_fast_path_of_plain_numbers_agrees_with_math_verify(math_verify, answer: str, truth: str) -> None:
    assert PLAIN_NUMBER.fullmatch(answer) and PLAIN_NUMBER.fullmatch(truth)
    assert math_verify.equivalent(answer, truth) is (Decimal(answer) == Decimal(truth))


def test_numbers_that_math_verify_rounds_are_left_to_it(math_verify) -> None:
    assert math_verify.equivalent("0.12345678", "0.12345679")
    assert is_correct(r"\boxed{0.12345678}", "0.12345679")


@pytest.mark.parametrize("bomb", ["9^{9^{9^{9}}}", "10^{10^{10}}"])
def test_an_answer_that_computes_for_ever_is_wrong_and_the_next_one_is_compared(math_verify, bomb: str) -> None:
    assert math_verify.equivalent("1/2", "0.5")
    began = time.monotonic()
    assert not math_verify.equivalent(bomb, "4")
    assert time.monotonic() - began < 10
    assert math_verify.equivalent("1/2", "0.5")


def test_an_answer_of_absurd_length_is_wrong(math_verify) -> None:
    assert not math_verify.equivalent("1+" * LONGEST + "1", "1")
