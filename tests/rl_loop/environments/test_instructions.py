"""Instruction following: published rows of IFEval and IFBench, and checkers with missing needs."""

from __future__ import annotations

import asyncio
import inspect
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rl_loop.environments import RewardConfig, arithmetic, instruction_checkers
from rl_loop.environments.instruction_checkers import (
    NLTK_DATA,
    TextConstraint,
    check,
    count_capital_words,
    ifbench_checkers,
    ifeval_checkers,
    make_checker,
    satisfies,
)
from rl_loop.environments.instructions import InstructionEnvironment, InstructionOptions
from rl_loop.environments.scripted_messages import final
from rl_loop.rewards import CheckerError
from rl_loop.rewards.checker_pool import CheckerPool
from rl_loop.tasks.task_file import TaskData, TaskFileError

SENTENCES = "length_constraints:number_sentences"
CAPITALS = "change_case:capital_word_frequency"


def row(name: str, **arguments: Any) -> dict[str, Any]:
    return {
        "key": 1,
        "prompt": "Write about tea.",
        "instruction_id_list": [name],
        "kwargs": [arguments],
    }


def write_tasks(path: Path, rows: list[dict[str, Any]], **options: Any) -> TaskData:
    path.write_text("".join(json.dumps(record) + "\n" for record in rows))
    return TaskData(
        str(path), "instructions", InstructionEnvironment, InstructionOptions(**options)
    )


def reward(record: dict[str, Any], answer: str) -> float:
    task = InstructionEnvironment.from_record(record, "t", InstructionOptions())
    assert task is not None
    environment = InstructionEnvironment(task, arithmetic.interpret, RewardConfig())
    return asyncio.run(environment.step([final(answer)])).reward


@pytest.fixture
def without_nltk_data(monkeypatch, tmp_path: Path) -> None:
    import nltk

    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    ifeval_checkers()[SENTENCES]  # load the registry before the NLTK data is missing
    from if_verifiable.ifeval import instructions_util

    instructions_util._get_sentence_tokenizer.cache_clear()


@pytest.fixture
def with_nltk_data(monkeypatch, tmp_path: Path) -> None:
    """Write a sentence model without abbreviations to the files that NLTK reads."""
    import nltk
    from if_verifiable.ifeval import instructions_util

    place = tmp_path / "tokenizers" / "punkt_tab" / "english"
    place.mkdir(parents=True)
    for name in ("collocations.tab", "sent_starters.txt", "abbrev_types.txt", "ortho_context.tab"):
        (place / name).write_text("")
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    instructions_util._get_sentence_tokenizer.cache_clear()
    yield
    instructions_util._get_sentence_tokenizer.cache_clear()


def test_row_whose_checker_lacks_data_is_rejected_with_remedy(tmp_path, without_nltk_data) -> None:
    rows = [row("punctuation:no_comma"), row(SENTENCES, num_sentences=2, relation="at least")]
    with pytest.raises(
        TaskFileError,
        match=r"line 2: length_constraints:number_sentences .*nltk.downloader punkt_tab",
    ):
        write_tasks(tmp_path / "ifeval.jsonl", rows)
    assert len(write_tasks(tmp_path / "ifeval.jsonl", rows, skip_unavailable=True)) == 1


def test_checker_that_loses_its_data_is_a_checker_failure(without_nltk_data) -> None:
    with pytest.raises(CheckerError, match="punkt_tab"):
        check(
            TextConstraint(SENTENCES, {"num_sentences": 2, "relation": "at least"}), "One. Two.", ""
        )


def test_sentences_are_counted_if_nltk_data_is_present(with_nltk_data) -> None:
    constraint = TextConstraint(SENTENCES, {"num_sentences": 3, "relation": "at least"})
    assert check(constraint, "One here. Two here. Three here.", "").strict
    assert not check(constraint, "One here. Two here.", "").strict


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> Iterator[CheckerPool]:
    """Checkers with a tenth of the default time limit."""
    kept = instruction_checkers._checker_pool
    pool = CheckerPool(
        "the checker",
        "rl_loop.environments.instruction_checkers:run_check_request",
        prepare="rl_loop.environments.instruction_checkers:prepare",
        seconds=kept.seconds / 10,
        control=kept.control,
    )
    monkeypatch.setattr(instruction_checkers, "_checker_pool", pool)
    yield pool
    pool.close()


def test_slow_checker_does_not_block_the_event_loop(hasty: CheckerPool) -> None:
    """The time of the published bullet checker grows with the square of empty lines."""
    record = row("detectable_format:number_bullet_lists", num_bullets=2)
    task = InstructionEnvironment.from_record(record, "t", InstructionOptions())
    assert task is not None
    slow = "\n" * 100_000 + "* one\n* two"

    async def judge(text: str) -> float:
        environment = InstructionEnvironment(task, arithmetic.interpret, RewardConfig())
        return (await environment.step([final(text)])).reward

    async def main() -> tuple[float, float, int]:
        judged = asyncio.create_task(judge(slow))
        await asyncio.sleep(0.05)
        honest = await judge("* one\n* two")
        assert not judged.done()
        turns = 0
        while not judged.done():
            await asyncio.sleep(0.01)
            turns += 1
        return judged.result(), honest, turns

    too_slow, honest, turns = asyncio.run(main())
    assert (too_slow, honest) == (-1.0, 1.0)
    assert turns >= 10


def test_all_checkers_that_read_nltk_data_are_listed() -> None:
    reading = re.compile(
        r"word_tokenize|pos_tag|count_stopwords|\bcount_sentences\(|sent_tokenize|nltk\.corpus"
    )
    registries = {**ifbench_checkers(), **ifeval_checkers()}
    found = {
        name for name, checker in registries.items() if reading.search(inspect.getsource(checker))
    }
    assert found == {*NLTK_DATA, CAPITALS}


def test_every_checker_runs_without_missing_packages(without_nltk_data) -> None:
    """An exception of a checker would count as a constraint that is not met."""
    random.seed(0)
    text = "This is a NOTE about tea. It has two sentences, and * a list\n* of points.\n\nA second PARAGRAPH ends it."
    for name, kind in ifeval_checkers().items():
        if name in NLTK_DATA or name == "combination:repeat_prompt":
            continue
        checker = kind(name)
        checker.build_description()
        arguments = checker.get_instruction_args() or {}
        satisfies(make_checker(TextConstraint(name, arguments), "Write."), name, text)


def test_importing_ifbench_checkers_downloads_no_data(monkeypatch) -> None:
    import nltk

    def download(*arguments: Any, **settings: Any) -> None:
        raise AssertionError("nothing is downloaded behind the user's back")

    monkeypatch.setattr(nltk, "download", download)
    ifbench_checkers.cache_clear()
    assert "words:start_verb" in ifbench_checkers()
    assert nltk.download is download


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("NASA and the U.S. ARMY.", 3),
        ("I CAN'T. Then she WON'T!", 5),
        ("I CAN'T go", 3),
        ('He said "STOP." Then I went.', 2),
        ("none here", 0),
        ("A B.C. X-RAY 5 É", 4),
        ("", 0),
    ],
)
def test_capital_words_are_counted_without_nltk_data(
    without_nltk_data, text: str, count: int
) -> None:
    assert count_capital_words(text) == count


def test_capital_words_are_counted_as_nltk_counts_them(with_nltk_data) -> None:
    from nltk import word_tokenize

    words = [
        "CAN'T",
        "NASA",
        "U.S.",
        "MR.",
        "e.g.",
        "I",
        "WE'LL",
        "it's",
        "IT'S",
        "dog",
        "A.",
        "O'NEIL",
        "(NASA)",
    ]
    words += ['"YES"', "'NO'", "INC.", "3.", "X-RAY", "GIMME", "CANNOT", "P.M."]
    marks = ["", "", "", ".", "!", "?", "...", '."', ".)", "?!", ",", ";", ":"]
    rng = random.Random(0)
    for _ in range(800):
        text = "".join(
            rng.choice(words) + rng.choice(marks) + rng.choice([" ", "  ", "\n"]) for _ in range(8)
        )
        assert count_capital_words(text) == sum(word.isupper() for word in word_tokenize(text)), (
            text
        )


@pytest.mark.parametrize("letter", ["#", "!"])
def test_character_that_is_not_a_letter_is_counted_as_prompted(letter: str) -> None:
    """For IFEval 1122 and 1129 the published checker draws a random letter instead."""
    record = row(
        "keywords:letter_frequency", letter=letter, let_frequency=4, let_relation="at least"
    )
    for _ in range(20):
        assert reward(record, f"tea {letter * 4}") == 1.0
        assert reward(record, "abcdefghijklmnopqrstuvwxyz" * 4) == -1.0


def test_missing_checker_arguments_depend_only_on_the_row() -> None:
    record = row("keywords:letter_frequency", let_frequency=1, let_relation="at least")
    for letter in "aeiouxyz":
        assert len({reward(record, letter * 3) for _ in range(10)}) == 1


def test_text_before_a_thought_marker_is_checked() -> None:
    """Answers come from the channel ``final``, so they contain no thoughts to remove."""
    assert reward(row("punctuation:no_comma"), "first, second </think> third") == -1.0
    assert reward(row("keywords:existence", keywords=["first"]), "first </think> second") == 1.0
    assert reward(row("keywords:existence", keywords=["first"]), "<think> first") == 1.0


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {**row("punctuation:no_comma"), "kwargs": []},
            "'kwargs' must be a list with an entry for each constraint",
        ),
        ({**row("punctuation:no_comma"), "kwargs": [3]}, "'kwargs' must be a list of objects"),
        (
            {**row("punctuation:no_comma"), "instruction_id_list": "x"},
            "'instruction_id_list' must be a list",
        ),
        ({**row("punctuation:no_comma"), "prompt": None}, "'prompt' must be text"),
        (
            row("punctuation:no_colons"),
            "constraint 'punctuation:no_colons' is unknown",
        ),
    ],
)
def test_malformed_row_is_named(tmp_path: Path, record: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskFileError, match=f"line 1: .*{re.escape(message)}"):
        write_tasks(tmp_path / "ifeval.jsonl", [record])


def test_unknown_checkers_are_rejected_by_the_configuration() -> None:
    with pytest.raises(ValueError, match="unknown checkers length_constraints:number_sentences"):
        InstructionOptions(checkers=[SENTENCES])
