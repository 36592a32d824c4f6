"""Copies of held-out prompts among training prompts, against the rule written down naively."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_loop.data.decontamination import SHARED_WORDS, find_contaminated
from tests.support.processor_speed import slowness

WORDS = "".join(chr(ord("a") + i) for i in range(26))
QUESTION = (
    "A train leaves the station at nine in the morning and travels at sixty miles per hour until it reaches the next "
    "town. How far is it"
)
FORM = "Solve this and put the last line of your work in a box with the answer only please:"


def unrelated(count: int, seed: int = 0, length: int = 40) -> list[str]:
    rng = random.Random(seed)
    vocabulary = ["".join(rng.choices(WORDS, k=rng.randint(2, 9))) for _ in range(3000)]
    return [" ".join(rng.choices(vocabulary, k=length)) for _ in range(count)]


@pytest.mark.parametrize("held_out_prompts", [1, 3, 128])
@pytest.mark.parametrize("prompts", [500, pytest.param(1000, marks=pytest.mark.slow), 2000])
@pytest.mark.parametrize(
    "copies",
    [1, 9, 10, 11, 12, 30, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 20, 21))],
)
def test_near_copies_are_found_in_any_number(
    copies: int, prompts: int, held_out_prompts: int
) -> None:
    held_out = [f"{QUESTION} after two hours?", *unrelated(held_out_prompts - 1, seed=1)]
    training = [
        *unrelated(prompts - copies),
        *(f"{QUESTION} after {i} hours?" for i in range(copies)),
    ]
    random.Random(copies).shuffle(training)
    found = find_contaminated(training, held_out)
    assert [text for text, gives_away in zip(training, found, strict=True) if gives_away] == [
        text for text in training if text.startswith("A train")
    ]


@pytest.mark.parametrize("held_out_prompts", [3, 40, 128])
def test_words_of_a_shared_form_are_not_copies(held_out_prompts: int) -> None:
    held_out = [f"{FORM} {text}" for text in unrelated(held_out_prompts, seed=1)]
    training = [f"{FORM} {text}" for text in unrelated(300)]
    assert not any(find_contaminated(training, held_out))
    training[7] = held_out[2]
    training[9] = f"{FORM} Well, {held_out[1].removeprefix(FORM)} indeed"
    assert [
        i for i, gives_away in enumerate(find_contaminated(training, held_out)) if gives_away
    ] == [
        7,
        9,
    ]


def test_form_with_one_held_out_prompt_is_not_a_copy() -> None:
    training = [f"{FORM} {i}+1" for i in range(40)]
    assert not any(
        find_contaminated([*training, "What is y?"], ["Once upon a time", f"{FORM} 77*7"])
    )


def test_short_prompts_are_compared_as_a_whole() -> None:
    training = ["what IS x ?", "What is x?y", "x", ""]
    assert find_contaminated(training, ["What is x?"]) == [True, True, False, False]
    assert find_contaminated(training, [""]) == [False, False, False, True]
    assert find_contaminated([], ["What is x?"]) == []


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(0, 40))
def test_shared_words_of_few_prompts_match_the_naive_rule(
    seed: int, held_out: int, prompts: int
) -> None:
    rng = random.Random(seed)
    # With few different words, runs of 13 words are often shared, but by at most 10 prompts.
    texts = [
        " ".join(rng.choices("ab,", weights=[40, 40, 1], k=rng.randint(SHARED_WORDS, 24)))
        for _ in range(held_out + prompts)
    ]
    truth, training = texts[:held_out], texts[held_out:][:10]

    def runs(text: str) -> set[tuple[str, ...]]:
        words = text.replace(",", " , ").split()
        return {
            tuple(words[i : i + SHARED_WORDS]) for i in range(max(1, len(words) - SHARED_WORDS + 1))
        }

    forbidden = set().union(*map(runs, truth))
    assert find_contaminated(training, truth) == [bool(runs(text) & forbidden) for text in training]


def test_decontamination_time_grows_with_words_not_copies() -> None:
    held_out = unrelated(200, seed=1)

    def seconds(training: list[str]) -> float:
        """Return the processor time of the fastest of 3 calls. Other processes slow some down."""
        times = []
        for _ in range(3):
            began = time.process_time()
            find_contaminated(training, held_out)
            times.append(time.process_time() - began)
        return min(times)

    few, many = unrelated(400), unrelated(4_000)
    of_many = seconds(many)
    assert of_many < 25 * seconds(few)
    assert of_many < 2 * slowness(), "100,000 prompts of 100 words take four seconds"

    few_copies, many_copies = ([held_out[i % 200] for i in range(count)] for count in (400, 4_000))
    assert seconds(many_copies) < 25 * seconds(few_copies), (
        "comparing each with each would be 100 times as slow"
    )


SHORT = "What is the sum of the first 10 primes?"


@pytest.mark.parametrize(
    "prompt",
    [
        rf"{SHORT} Answer in \boxed{{}}.",
        f"Solve the following problem step by step.\n\n{SHORT}\n\nThink first.",
        f"Question: {SHORT}",
        f"Please tell me, {SHORT.lower()}",
        "What is the sum of the first 10 primes",
        "What is the sum of the first 10 primes (give an integer)?",
        f"<question>{SHORT}</question>",
        f"**{SHORT}**",
    ],
)
def test_short_held_out_question_is_found_in_longer_prompts(prompt: str) -> None:
    assert find_contaminated([prompt], [SHORT]) == [True]
    # The training prompt can also be the bare question.
    assert find_contaminated([SHORT], [prompt]) == [True]


@pytest.mark.parametrize(
    "prompt",
    [
        "What is the sum of the first 10 primes greater than 50?",
        "What is the sum of the first 10 odd primes?",
        "What is the product of the first 10 primes?",
    ],
)
def test_other_short_questions_are_not_copies(prompt: str) -> None:
    assert find_contaminated([prompt], [SHORT]) == [False]
    assert find_contaminated([SHORT], [prompt]) == [False]


def test_short_terms_inside_longer_terms_are_not_copies() -> None:
    training = ["2 * 3 + 4", "13 + 4", "3 + 4 * 5", "0.3 + 4", "3 + 4.5", "Compute: 3 + 4."]
    assert find_contaminated(training, ["3 + 4"]) == [False] * 5 + [True]


CHINESE = "一个长方形的长是宽的两倍，周长是三十六厘米，求这个长方形的面积是多少平方厘米"


@pytest.mark.parametrize(
    ("held_out", "prompt", "is_copy"),
    [
        (f"{CHINESE}。", f"请解答：{CHINESE}。请写出过程。", True),
        (f"{CHINESE}。", f"小明问老师，{CHINESE}呢。", True),
        ("1加1等于几？", "请回答：1加1等于几？谢谢。", True),
        ("1加1等于几？", "请回答：21加1等于几？谢谢。", False),
        ("鶏と兎が合わせて10匹います。", "次の問題。鶏と兎が合わせて10匹います。足は何本？", True),
        ("鶏と兎が合わせて10匹います。", "鶏と兎が合わせて12匹います。足は何本？", False),
        (
            "ผลบวกของจำนวนเฉพาะสิบตัวแรกเป็นเท่าใด",
            "โจทย์: ผลบวกของจำนวนเฉพาะสิบตัวแรกเป็นเท่าใด ตอบเป็นตัวเลข",
            False,
        ),
        (
            "ผลบวกของจำนวนเฉพาะสิบตัวแรกเป็นเท่าใดในระบบเลขฐานสิบ",
            "จงหาผลบวกของจำนวนเฉพาะสิบตัวแรกเป็นเท่าใดในระบบเลขฐานสิบ",
            True,
        ),
        ("पहली दस अभाज्य संख्याओं का योग क्या है?", "हल करें: पहली दस अभाज्य संख्याओं का योग क्या है?", True),
    ],
)
def test_copies_are_found_without_blanks(held_out: str, prompt: str, is_copy: bool) -> None:
    assert find_contaminated([prompt], [held_out]) == [is_copy]


def test_shared_beginnings_without_blanks_are_not_copies() -> None:
    """Some equal characters do not make an equal sentence."""
    training = [
        "一个长方形的长是宽的三倍，面积是多少",
        "求函数的最小值",
        "一个长方形的长是宽的两倍",
    ]
    assert find_contaminated(training[:2], [f"{CHINESE}。"]) == [False, False]


def test_time_of_short_prompts_grows_with_the_words() -> None:
    """Many short held-out questions begin alike. Comparing all pairs would take minutes."""
    held_out = [f"What is the value of {i} plus {i + 1}?" for i in range(5_000)]
    training = [f"Solve it. What is the value of {i} plus {i + 1}? Say." for i in range(10_000)]
    began = time.process_time()
    assert sum(find_contaminated(training, held_out)) == 5_000
    assert time.process_time() - began < 10 * slowness()


def test_short_question_that_is_a_form_is_not_a_copy() -> None:
    held_out = ["What is the answer?", *unrelated(5, seed=1)]
    training = [f"{text}. What is the answer?" for text in unrelated(300)]
    assert not any(find_contaminated(training, held_out))
