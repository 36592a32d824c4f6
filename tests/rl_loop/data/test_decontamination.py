"""Copies of held-out prompts among training prompts, against the rule written down naively."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_loop.data.decontamination import SHARED_WORDS, find_giveaways

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
@pytest.mark.parametrize("prompts", [500, 1000, 2000])
@pytest.mark.parametrize("copies", [1, 2, 9, 10, 11, 12, 20, 21, 30])
def test_near_copies_are_found_however_many_there_are(
    copies: int, prompts: int, held_out_prompts: int
) -> None:
    held_out = [f"{QUESTION} after two hours?", *unrelated(held_out_prompts - 1, seed=1)]
    training = [
        *unrelated(prompts - copies),
        *(f"{QUESTION} after {i} hours?" for i in range(copies)),
    ]
    random.Random(copies).shuffle(training)
    found = find_giveaways(training, held_out)
    assert [text for text, gives_away in zip(training, found, strict=True) if gives_away] == [
        text for text in training if text.startswith("A train")
    ]


@pytest.mark.parametrize("held_out_prompts", [3, 40, 128])
def test_the_words_of_a_form_give_nothing_away(held_out_prompts: int) -> None:
    held_out = [f"{FORM} {text}" for text in unrelated(held_out_prompts, seed=1)]
    training = [f"{FORM} {text}" for text in unrelated(300)]
    assert not any(find_giveaways(training, held_out))
    training[7] = held_out[2]
    training[9] = f"{FORM} Well, {held_out[1].removeprefix(FORM)} indeed"
    assert [i for i, gives_away in enumerate(find_giveaways(training, held_out)) if gives_away] == [
        7,
        9,
    ]


def test_one_held_out_prompt_in_a_form_of_the_training_prompts_gives_nothing_away() -> None:
    training = [f"{FORM} {i}+1" for i in range(40)]
    assert not any(find_giveaways([*training, "What is y?"], ["Once upon a time", f"{FORM} 77*7"]))


def test_short_prompts_are_compared_as_a_whole() -> None:
    training = ["what IS x ?", "What is x? Say.", "x", ""]
    assert find_giveaways(training, ["What is x?"]) == [True, False, False, False]
    assert find_giveaways(training, [""]) == [False, False, False, True]
    assert find_giveaways([], ["What is x?"]) == []


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(0, 40))
def test_what_few_prompts_share_is_found_as_the_naive_rule_finds_it(
    seed: int, held_out: int, prompts: int
) -> None:
    rng = random.Random(seed)
    # so few different words that runs of 13 are often shared, but never by more than ten prompts
    texts = [
        " ".join(rng.choices("ab,", weights=[40, 40, 1], k=rng.randint(1, 24)))
        for _ in range(held_out + prompts)
    ]
    truth, training = texts[:held_out], texts[held_out:][:10]

    def runs(text: str) -> set[tuple[str, ...]]:
        words = text.replace(",", " , ").split()
        return {
            tuple(words[i : i + SHARED_WORDS]) for i in range(max(1, len(words) - SHARED_WORDS + 1))
        }

    forbidden = set().union(*map(runs, truth))
    assert find_giveaways(training, truth) == [bool(runs(text) & forbidden) for text in training]


def test_the_time_grows_with_the_words_and_not_with_the_copies() -> None:
    held_out = unrelated(200, seed=1)

    def seconds(training: list[str]) -> float:
        """Return the processor time of the fastest of three calls: the others had a busy neighbour."""
        times = []
        for _ in range(3):
            began = time.process_time()
            find_giveaways(training, held_out)
            times.append(time.process_time() - began)
        return min(times)

    few, many = unrelated(2_000), unrelated(20_000)
    assert seconds(many) < 25 * seconds(few)
    assert seconds(many) < 10, "100,000 prompts of 100 words take four seconds"

    few_copies, many_copies = (
        [held_out[i % 200] for i in range(count)] for count in (2_000, 20_000)
    )
    assert seconds(many_copies) < 25 * seconds(few_copies), (
        "comparing each with each would be 100 times as slow"
    )
