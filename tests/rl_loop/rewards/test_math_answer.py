r"""Equivalence of answers in \boxed{}."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from rl_loop.rewards.comparison_pool import MAX_CHARACTERS, ComparisonPool
from rl_loop.rewards.math_answer import PLAIN_NUMBER, is_correct, last_boxed, normalize_answer
from rl_loop.rewards.number import parse_number
from tests.support.processor_speed import slowness
from tests.support.rl_loop.rewards.answer_classes import classes
from tests.support.rl_loop.rewards.labelled_answers import pairs


@pytest.fixture(scope="module")
def comparisons() -> Iterator[ComparisonPool]:
    pool = ComparisonPool(seconds=1.0)
    yield pool
    pool.close()


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
        (r"\boxed {4}", "4"),
        (r"\boxed{4\boxed{5}}", r"4\boxed{5}"),
        (r"\boxed{4 \boxed{5}", "5"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{[1,2\}} or so }", r"[1,2\}"),
        (r"} \boxed{4} {", "4"),
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


def test_answer_outside_the_box_is_wrong() -> None:
    assert not is_correct("42", "42")


WHOLE = ("0", "1", "007", "12", "99999999", "123456789012", "99999999999999999999")
PLACES = ("", "0", "10", "5", "50", "123450", "123456", "123457", "999999")


def plain_numbers() -> list[str]:
    texts = [
        f"{sign}{whole}.{places}".rstrip(".")
        for sign in ("", "-")
        for whole in WHOLE
        for places in PLACES
    ]
    return [text for text in texts if PLAIN_NUMBER.fullmatch(text)]


def test_fast_path_of_plain_numbers_agrees_with_algebra(comparisons) -> None:
    numbers = plain_numbers()
    assert len(numbers) > 80
    close = [
        (a, b)
        for a in numbers
        for b in numbers
        if abs(abs(Decimal(a)) - abs(Decimal(b))) < Decimal("0.00001")
    ]
    for a, b in [*close, *zip(numbers, reversed(numbers), strict=True)]:
        assert comparisons.equivalent_texts(a, b) is (Decimal(a) == Decimal(b)), (a, b)


def test_decimals_are_rounded_to_the_digits_of_the_truth(comparisons) -> None:
    assert comparisons.equivalent_texts("0.12345678", "0.12345679")
    assert is_correct(r"\boxed{0.12345678}", "0.12345679")
    # All written digits count. math-verify uses doubles, and treats 1e-9 as 0.
    assert not is_correct(r"\boxed{99999999999999999999.123456}", "99999999999999999999.123457")
    assert not is_correct(r"\boxed{0.000000001}", "0.000000002")


def test_answer_beyond_the_length_limit_is_wrong(comparisons) -> None:
    assert not comparisons.equivalent_texts("1+" * MAX_CHARACTERS + "1", "1")


def test_every_labelled_pair_is_judged_as_labelled() -> None:
    found = pairs()
    assert len(found) >= 200
    wrong = [
        pair for pair in found if is_correct(rf"It is \boxed{{{pair[0]}}}.", pair[1]) is not pair[2]
    ]
    assert wrong == []


@pytest.mark.parametrize("name", classes())
def test_every_pair_of_a_class_is_judged_as_labelled(name: str) -> None:
    wrong = [
        pair
        for pair in classes()[name]
        if is_correct(rf"It is \boxed{{{pair[0]}}}.", pair[1]) is not pair[2]
    ]
    assert wrong == []


def test_labels_agree_with_each_other() -> None:
    found = [*pairs(), *(pair for group in classes().values() for pair in group)]
    assert len(found) > 500
    labels: dict[tuple[str, str], bool] = {}
    for given_answer, truth, equal in found:
        assert labels.setdefault((given_answer, truth), equal) is equal, (given_answer, truth)


# ---- properties

NUMBERS = st.one_of(
    st.integers(-(10**12), 10**12).map(str),
    st.tuples(st.integers(-(10**6), 10**6), st.integers(0, 99999)).map(
        lambda parts: f"{parts[0]}.{parts[1]:05d}"
    ),
    st.tuples(st.integers(-999, 999), st.integers(2, 999)).map(
        lambda parts: rf"\frac{{{parts[0]}}}{{{parts[1]}}}"
    ),
)
WRAPPERS = [
    "{}",
    "{}.",
    " {} ",
    "${}$",
    r"\({}\)",
    "{{{}}}",
    r"\boxed{{{}}}",
    r"\fbox{{{}}}",
    r"\boldsymbol{{{}}}",
    r"\textcolor{{red}}{{{}}}",
    r"\displaystyle {}",
    r"\underline{{{}}}",
    r"\left({}\right)",
    r"{}\text{{ apples}}",
    r"{}~\mathrm{{cm}}",
    r"{}^\circ",
    "{} €",
    r"\text{{The answer is }}{}",
    "The answer is {}.",
    "x = {}",
    "+0 + {}",
]


def spelled(number: str) -> list[str]:
    """Return the same number in several spellings."""
    found = [
        number,
        number.replace("-", "−"),
        f"{number}.0" if number.lstrip("-").isdigit() else number,
    ]
    if number.lstrip("-").isdigit():
        found += [
            f"{int(number):,}".replace(",", separator)
            for separator in (",", "{,}", r"\,", " ", "\u2009", "~", "'")
        ]
        found.append("".join(chr(ord(c) + 0xFEE0) if c.isdigit() else c for c in number))
    return found


@settings(deadline=None, max_examples=150)
@given(NUMBERS, st.sampled_from(WRAPPERS), st.integers(0, 20))
@example("1000", "+0 + {}", 9)  # +0 + 1'000
@example("1000", "x = {}", 3)  # x = 1,000
def test_number_equals_itself_in_every_spelling(number: str, wrapper: str, spelling: int) -> None:
    forms = spelled(number)
    form = forms[spelling % len(forms)]
    assume(not (r"\left(" in wrapper and ("," in form)))  # (1,000) is a point, by its comma
    written = wrapper.format(form)
    assert is_correct(rf"\boxed{{{written}}}", number), written


@settings(deadline=None, max_examples=150)
@given(
    NUMBERS,
    st.sampled_from(WRAPPERS),
    st.sampled_from(["1", "-1", "10", "0.00001", "1/7"]),
    st.booleans(),
)
def test_another_number_is_never_correct(
    number: str, wrapper: str, difference: str, first: bool
) -> None:
    value = parse_number(number)
    assert value is not None
    other = value.value + Fraction(difference)
    sign = "-" if other < 0 else ""
    written = rf"{sign}\frac{{{abs(other.numerator)}}}{{{other.denominator}}}"
    answer, truth = (
        (wrapper.format(written), number) if first else (wrapper.format(number), written)
    )
    assert not is_correct(rf"\boxed{{{answer}}}", truth), (answer, truth)


@settings(deadline=None, max_examples=100)
@given(NUMBERS, NUMBERS)
def test_comparison_of_numbers_is_symmetric(one: str, other: str) -> None:
    assert is_correct(rf"\boxed{{{one}}}", other) is is_correct(rf"\boxed{{{other}}}", one)


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 10**6), st.integers(0, 5), st.integers(1, 5))
def test_repeating_decimal_equals_its_fraction(digits: int, start: int, length: int) -> None:
    block = f"{digits % 10**length:0{length}d}"
    beginning = "".join(random.Random(digits).choices("0123456789", k=start))
    period = Fraction(int(block), 10**length - 1) / 10**start
    exact = Fraction(int(beginning or "0"), 10**start) + period
    truth = f"{exact.numerator}/{exact.denominator}"
    assert is_correct(rf"\boxed{{0.{beginning}\overline{{{block}}}}}", truth)
    assert is_correct(rf"\boxed{{0.{beginning}({block})}}", truth)


PIECES = [
    *r"{}()[]^_!\/,.:;=<>|$%&~#0159xi ½²√π°€−",
    r"\frac",
    r"\text{",
    r"\boxed{",
    r"\sqrt{",
    r"\overline{",
    " and ",
    "\n",
]
PIECES += [
    r"\choose ",
    r"\left(",
    r"\dot",
    "...",
    "The answer is ",
    r"\{",
    "\u2009",
    "\ud800",
    "\0",
    r"\begin{pmatrix}",
]


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.sampled_from(PIECES), max_size=40).map("".join),
    st.sampled_from(["5", r"\frac{1}{2}", "(1,2)", "C", "x+1"]),
)
def test_garbage_is_judged_without_an_exception(text: str, truth: str) -> None:
    assert is_correct(rf"\boxed{{{text}}}", truth) in (True, False)
    assert is_correct(text, truth) in (True, False)


ENDLESS = {
    "nested braces": r"\boxed{" + "{" * 10_000 + "5" + "}" * 10_000 + "}",
    "open boxes": r"\boxed{" * 150_000,
    "closed boxes": r"\boxed{" * 60_000 + "}" * 60_000,
    "a megabyte of braces": r"\boxed{" + "{" * 10**6,
    "a megabyte after the box": r"\boxed{6}" + "a" * 10**6,
    "spaces": r"\boxed{5" + " " * 1990 + "x}",
    "digit groups": r"\boxed{" + "1 234" * 390 + "}",
    "points": r"\boxed{" + "1." * 990 + "}",
    "repeated digits": r"\boxed{0." + "12345" * 300 + "x...}",
    "words": r"\boxed{" + "a and " * 320 + "}",
    "introductions": r"\boxed{" + "the answer is " * 140 + "}",
    "units": r"\boxed{5" + " cm" * 600 + "}",
    "fractions": r"\boxed{" + r"\frac" * 390 + "}",
    "exponents": r"\boxed{5" + "²" * 1900 + "}",
    "tower": r"\boxed{9^{9^{9^9}}}",
    "bare tower": r"\boxed{" + "2^" * 900 + "2}",
    "factorials": r"\boxed{(((1000000!)!)!)}",
    "powers": r"\boxed{" + "+".join(["9^{9999}"] * 200) + "}",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_judging_a_huge_text_takes_bounded_time(name: str) -> None:
    assert is_correct(r"\boxed{x+1}", "1+x")  # excludes the start of the processes
    seconds = []
    # The best of 3 excludes pauses of Python's garbage collector.
    for _ in range(3):
        began = time.process_time()
        assert not is_correct(ENDLESS[name], "5")
        normalize_answer(last_boxed(ENDLESS[name]))
        seconds.append((time.process_time() - began) / slowness())
    assert min(seconds) < 0.5
