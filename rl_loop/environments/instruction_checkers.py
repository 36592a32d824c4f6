"""Checks texts against the constraints of IFEval and IFBench, with the checkers of if-verifiable.

The checkers are taken as they are published, but for what would make a verdict depend on chance
or on data that is not installed: see ``make_checker`` and ``meets``. Their regular expressions take
seconds for texts of 20 KB that are written for it, so that ``judge`` asks other processes."""

import atexit
import json
import logging
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

from rl_loop.extras import install_command
from rl_loop.rewards import CheckerFailure
from rl_loop.rewards.checker_pool import CheckerPool

SECONDS = 10.0
"""Processor time for one text and one constraint, which usually take milliseconds. A text that takes
more does not meet the constraint."""

PUNKT = {"punkt_tab": "tokenizers/punkt_tab/english/"}
TAGGER = {"averaged_perceptron_tagger_eng": "taggers/averaged_perceptron_tagger_eng/"}
STOPWORDS = {"stopwords": "corpora/stopwords"}

NLTK_DATA = {
    "length_constraints:number_sentences": PUNKT,
    "words:keywords_specific_position": PUNKT,
    "words:words_position": PUNKT,
    "format:title_case": PUNKT,
    "ratio:stop_words": STOPWORDS,
    "words:start_verb": PUNKT | TAGGER,
}
"""What checkers read from NLTK's data, which NLTK does not bring along: package -> place. Counting
capital words would read it too, and is done without it here."""

CAPITAL_WORDS = "change_case:capital_word_frequency"
LETTER_FREQUENCY = "keywords:letter_frequency"


@dataclass(frozen=True)
class Constraint:
    """One instruction that a text must follow."""

    name: str
    """Of the checker, such as "punctuation:no_comma"."""
    arguments: dict[str, Any]
    """Of the checker."""


@dataclass(frozen=True)
class Verdict:
    """Whether a text meets a constraint."""

    strict: bool
    """As it is."""
    loose: bool
    """As it is, or without its first line, its last line or its asterisks."""


@cache
def ifeval_checkers() -> dict[str, Any]:
    """Return the checkers of IFEval by name.

    Raises CheckerFailure where they are not installed."""
    try:
        import langdetect
        from if_verifiable.ifeval.instructions_registry import INSTRUCTION_DICT
    except ImportError as error:
        raise CheckerFailure(f"{error}; {install_command('environments')}") from None

    # langdetect draws samples of a text: without a seed, its verdicts differ from run to run.
    langdetect.DetectorFactory.seed = 0
    return dict(INSTRUCTION_DICT)


@cache
def ifeval_conflicts() -> dict[str, Any]:
    """Return for each constraint of IFEval those that cannot be met with it."""
    ifeval_checkers()  # says how to install what is missing
    from if_verifiable.ifeval.instructions_registry import INSTRUCTION_CONFLICTS, conflict_make

    conflicts: dict[str, Any] = conflict_make(INSTRUCTION_CONFLICTS)
    return conflicts


@cache
def ifbench_checkers() -> dict[str, Any]:
    """Return the checkers of IFBench by name."""
    import nltk

    # if-verifiable downloads NLTK data when it is imported, or tries to: what is missing is named
    # instead.
    download = nltk.download
    nltk.download = lambda *_arguments, **_settings: False
    try:
        from if_verifiable.ifbench.instructions_registry import INSTRUCTION_DICT
    finally:
        nltk.download = download
    return dict(INSTRUCTION_DICT)


def checker_class(name: str) -> Any:
    """Return the checker of a constraint of IFEval or IFBench.

    Raises ValueError if there is none."""
    if name in ifeval_checkers():
        return ifeval_checkers()[name]
    if name not in ifbench_checkers():
        raise ValueError(f"neither IFEval nor IFBench has a constraint {name!r}")
    return ifbench_checkers()[name]


def missing_data(name: str) -> list[str]:
    """Return the packages of NLTK data that a checker needs and that are not installed."""
    import nltk

    missing = []
    for package, place in NLTK_DATA.get(name, {}).items():
        try:
            nltk.data.find(place)
        except LookupError:
            missing.append(package)
    return missing


def draw_constraint(name: str, seed: int) -> tuple[Constraint, str]:
    """Draw the arguments of a constraint of IFEval as a function of the seed.

    Returns the constraint and the sentence that asks for it."""
    checker = ifeval_checkers()[name](name)
    with _seeded(seed):
        text = checker.build_description()
        arguments = checker.get_instruction_args() or {}
    return Constraint(name, arguments), text


UNMET = Verdict(strict=False, loose=False)

Question = tuple[Constraint, str, str]
"""A constraint, a text and the prompt that the text answers."""


async def judge(constraint: Constraint, text: str, prompt: str) -> Verdict:
    """Run ``check`` for a text of the policy, in a process of its own.

    A text that takes more than SECONDS, or too much memory, does not meet the constraint. Raises
    CheckerFailure."""
    verdict: Verdict = await _processes.judged((constraint, text, prompt), too_expensive=UNMET)
    return verdict


def prepare(_: None) -> None:
    """Import the checkers, from which workers are forked that have them."""
    # langdetect logs every text whose language it does not know.
    logging.disable()
    # Each question says what is missing.
    with suppress(Exception):
        ifeval_checkers()
        ifbench_checkers()


def answer(question: Question) -> Verdict:
    """Answer a question. Runs in a worker."""
    return check(*question)


_processes = CheckerPool(
    "the process that checks instructions",
    f"{__name__}:answer",
    prepare=f"{__name__}:prepare",
    seconds=SECONDS,
    control=(Constraint("punctuation:no_comma", {}), "text", ""),
)
atexit.register(_processes.close)


def check(constraint: Constraint, text: str, prompt: str) -> Verdict:
    """Check whether ``text``, an answer to ``prompt``, meets a constraint.

    A text on which the checker fails does not meet it. Raises CheckerFailure if the checker lacks
    what it would need on any text."""
    from if_verifiable.common import get_loose_transformations

    if not text.strip():
        return UNMET

    try:
        checker = make_checker(constraint, prompt)
        strict = meets(checker, constraint.name, text)
        variants = get_loose_transformations(text)
        loose = strict or any(meets(checker, constraint.name, variant) for variant in variants)
        return Verdict(strict, loose)
    except CheckerFailure:
        raise
    except Exception as error:
        # KeyError and IndexError are LookupErrors too, over a text; NLTK's, of missing data, is
        # the class itself.
        if isinstance(error, ImportError) or type(error) is LookupError:
            reason = " ".join(str(error).split())[:200]
            raise CheckerFailure(f"{constraint.name} cannot be checked: {reason}") from None
        return UNMET


def make_checker(constraint: Constraint, prompt: str) -> Any:
    """Make the checker of a constraint, the same one for the same arguments.

    Checkers draw what they are not told, which the arguments seed here."""
    name = constraint.name
    arguments = {key: value for key, value in constraint.arguments.items() if value is not None}
    checker = checker_class(name)(name)

    with _seeded(json.dumps([name, arguments], sort_keys=True, default=str)):
        checker.build_description(**arguments)
        # A checker that compares with the prompt says so in its arguments.
        described = checker.get_instruction_args()
        if described and "prompt" in described:
            checker.build_description(prompt=prompt)

    # "The letter # should appear at least 4 times" (IFEval 1122 and 1129): the published checker
    # takes a random letter for one that is none.
    letter = arguments.get("letter")
    if name == LETTER_FREQUENCY and isinstance(letter, str) and len(letter) == 1:
        checker._letter = letter.lower()
    return checker


def meets(checker: Any, name: str, text: str) -> bool:
    """Ask a checker about a text. No constraint is met by a text of blanks."""
    if not text.strip():
        return False
    if name != CAPITAL_WORDS:
        return bool(checker.check_following(text))

    count = count_capital_words(text)
    if checker._comparison_relation == "less than":
        return bool(count < checker._frequency)
    return bool(count >= checker._frequency)


def count_capital_words(text: str) -> int:
    """Count as many words of capital letters as NLTK does, without its model of sentences.

    A sentence's end matters to NLTK's words only in that a full stop there is a word of its own,
    and CAN'T before it two. Where the model sees no end after a full stop ("U.S. ARMY"), words
    differ, but not how many are capital."""
    from nltk.tokenize.destructive import NLTKWordTokenizer

    tokenizer = NLTKWordTokenizer()
    sentences = re.split(r"(?<=[.?!])\s+|(?<=[.?!][\"')\]}»”’])\s+", text)
    return sum(word.isupper() for sentence in sentences for word in tokenizer.tokenize(sentence))


@contextmanager
def _seeded(seed: int | str) -> Iterator[None]:
    """Seed the global generator, from which the checkers draw, and set it back afterwards.

    Not for threads: two at a time would draw from each other's seed."""
    state = random.getstate()
    try:
        random.seed(seed)
        yield
    finally:
        random.setstate(state)
