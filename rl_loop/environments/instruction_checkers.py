"""Checks of texts against the constraints of IFEval and IFBench, with if-verifiable's checkers.

The checkers are used as published, with two exceptions. ``make_checker`` seeds their random
arguments, so that a verdict does not depend on chance. ``satisfies`` counts capital words without
NLTK's data, which need not be installed. Adversarial texts of 20 KB need seconds in the checkers'
regular expressions, so ``check_in_process`` runs the checkers in other processes.
"""

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
from rl_loop.rewards import CheckerError
from rl_loop.rewards.checker_pool import CheckerPool

MAX_CHECK_SECONDS = 10.0
"""Limit of processor time in seconds for one text and one constraint.

A check usually takes milliseconds. A text that takes longer than the limit does not satisfy the
constraint.
"""

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
"""NLTK data that checkers read: {package: path}, by constraint.

NLTK does not ship this data. The original checker of capital words also reads it, but its
replacement ``count_capital_words`` does not.
"""

CAPITAL_WORDS = "change_case:capital_word_frequency"
LETTER_FREQUENCY = "keywords:letter_frequency"


@dataclass(frozen=True)
class TextConstraint:
    """Constraint on a text."""

    name: str
    """Name of the checker, such as "punctuation:no_comma"."""
    arguments: dict[str, Any]
    """Arguments of the checker."""


@dataclass(frozen=True)
class ConstraintVerdict:
    """Result of checking a text against a constraint."""

    strict: bool
    """True if the unmodified text satisfies the constraint."""
    loose: bool
    """True if the text satisfies it unmodified or without its first line, last line or asterisks."""


@cache
def ifeval_checkers() -> dict[str, Any]:
    """Return the checkers of IFEval by name. Raises CheckerError if they are not installed."""
    # Optional packages, so they are imported only for tasks that need them.
    try:
        import langdetect
        from if_verifiable.ifeval.instructions_registry import INSTRUCTION_DICT
    except ImportError as error:
        raise CheckerError(f"{error}; {install_command('environments')}") from None

    # langdetect samples from a text, so its verdicts would vary without a seed.
    langdetect.DetectorFactory.seed = 0
    return dict(INSTRUCTION_DICT)


@cache
def ifeval_conflicts() -> dict[str, Any]:
    """Return each IFEval constraint's incompatible constraints."""
    ifeval_checkers()  # reports how to install missing packages
    from if_verifiable.ifeval.instructions_registry import INSTRUCTION_CONFLICTS, conflict_make

    conflicts: dict[str, Any] = conflict_make(INSTRUCTION_CONFLICTS)
    return conflicts


@cache
def ifbench_checkers() -> dict[str, Any]:
    """Return the checkers of IFBench by name."""
    import nltk

    # if-verifiable tries to download NLTK data when it is imported. ``missing_data`` reports missing
    # data instead.
    download = nltk.download
    nltk.download = lambda *_arguments, **_settings: False
    try:
        from if_verifiable.ifbench.instructions_registry import INSTRUCTION_DICT
    finally:
        nltk.download = download
    return dict(INSTRUCTION_DICT)


def checker_class(name: str) -> Any:
    """Return the checker for a constraint of IFEval or IFBench. Raises ValueError if unknown."""
    if name in ifeval_checkers():
        return ifeval_checkers()[name]
    if name not in ifbench_checkers():
        raise ValueError(
            f"constraint {name!r} is unknown. Use a constraint of IFEval or IFBench, such as "
            "length_constraints:number_words"
        )
    return ifbench_checkers()[name]


def missing_data(name: str) -> list[str]:
    """Return the missing packages of NLTK data that a checker needs."""
    import nltk

    missing = []
    for package, place in NLTK_DATA.get(name, {}).items():
        try:
            nltk.data.find(place)
        except LookupError:
            missing.append(package)
    return missing


def draw_constraint(name: str, seed: int) -> tuple[TextConstraint, str]:
    """Return a constraint of IFEval with random arguments, and the sentence that requests it.

    Equal seeds give equal constraints.
    """
    checker = ifeval_checkers()[name](name)
    # Checkers draw their arguments from Python's global generator.
    with _fixed_seed(seed):
        text = checker.build_description()
        arguments = checker.get_instruction_args() or {}
    return TextConstraint(name, arguments), text


NOT_SATISFIED = ConstraintVerdict(strict=False, loose=False)

CheckRequest = tuple[TextConstraint, str, str]
"""Constraint, text, and the prompt that the text answers."""


async def check_in_process(constraint: TextConstraint, text: str, prompt: str) -> ConstraintVerdict:
    """Run ``check`` in another process, with limits of time and memory.

    Returns:
        The verdict. A text that exceeds a limit does not satisfy the constraint.

    Raises:
        CheckerError: if the checker fails on every text.
    """
    verdict: ConstraintVerdict = await _checker_pool.judge_async(
        (constraint, text, prompt), too_expensive=NOT_SATISFIED
    )
    return verdict


def prepare(_: None) -> None:
    """Import the checkers in the process that forks the workers."""
    # langdetect logs every text whose language it does not know.
    logging.disable()
    # If a package is missing, each question reports it.
    with suppress(Exception):
        ifeval_checkers()
        ifbench_checkers()


def run_check_request(request: CheckRequest) -> ConstraintVerdict:
    """Return the verdict of a request. Runs in a worker."""
    return check(*request)


_checker_pool = CheckerPool(
    "the process that checks instructions",
    f"{__name__}:run_check_request",
    prepare=f"{__name__}:prepare",
    seconds=MAX_CHECK_SECONDS,
    # A question that every working process answers.
    control=(TextConstraint("punctuation:no_comma", {}), "text", ""),
)
# Worker processes must not outlive this one.
atexit.register(_checker_pool.close)


def check(constraint: TextConstraint, text: str, prompt: str) -> ConstraintVerdict:
    """Return whether ``text``, an answer to ``prompt``, satisfies a constraint.

    Returns:
        The verdict. A text on which the checker raises an exception does not satisfy the constraint.

    Raises:
        CheckerError: if the checker cannot work because a package or data is missing.
    """
    from if_verifiable.common import get_loose_transformations

    # A blank text would satisfy constraints such as "no commas".
    if not text.strip():
        return NOT_SATISFIED

    try:
        checker = make_checker(constraint, prompt)
        strict = satisfies(checker, constraint.name, text)
        variants = get_loose_transformations(text)
        loose = strict or any(satisfies(checker, constraint.name, variant) for variant in variants)
        return ConstraintVerdict(strict, loose)
    except CheckerError:
        raise
    except Exception as error:
        # NLTK raises LookupError itself for missing data. Its subclasses KeyError and IndexError
        # come from the text.
        if isinstance(error, ImportError) or type(error) is LookupError:
            reason = " ".join(str(error).split())[:200]
            raise CheckerError(f"{constraint.name} cannot be checked: {reason}") from None
        # Published checkers raise exceptions on texts that they do not expect, so the text is the
        # cause. If the episode were invalid, the policy could avoid a bad reward.
        return NOT_SATISFIED


def make_checker(constraint: TextConstraint, prompt: str) -> Any:
    """Return the checker of a constraint.

    Checkers draw missing arguments at random. The given arguments seed the draw.
    """
    name = constraint.name
    # Files can list the arguments of all checkers in each entry. The unused arguments are null.
    arguments = {key: value for key, value in constraint.arguments.items() if value is not None}
    checker = checker_class(name)(name)

    # Equal constraints get equal checkers.
    with _fixed_seed(json.dumps([name, arguments], sort_keys=True, default=str)):
        checker.build_description(**arguments)
        # Checkers that compare with the prompt have an argument "prompt".
        described = checker.get_instruction_args()
        if described and "prompt" in described:
            checker.build_description(prompt=prompt)

    # "The letter # should appear at least 4 times" (IFEval 1122 and 1129): the published checker
    # replaces "#", which is not a letter, by a random letter.
    letter = arguments.get("letter")
    if name == LETTER_FREQUENCY and isinstance(letter, str) and len(letter) == 1:
        checker._letter = letter.lower()
    return checker


def satisfies(checker: Any, name: str, text: str) -> bool:
    """Return a checker's result for a text. A blank text satisfies no constraint."""
    if not text.strip():
        return False
    if name != CAPITAL_WORDS:
        return bool(checker.check_following(text))

    # Fields of the checker, because its method would read NLTK's data.
    count = count_capital_words(text)
    if checker._comparison_relation == "less than":
        return bool(count < checker._frequency)
    return bool(count >= checker._frequency)


def count_capital_words(text: str) -> int:
    """Return the number of words in capital letters, without NLTK's sentence model.

    The count equals the count of NLTK with the model.
    """
    from nltk.tokenize.destructive import NLTKWordTokenizer

    tokenizer = NLTKWordTokenizer()
    # A sentence boundary affects only the final period of a word and contractions before it. A
    # boundary that the model does not find ("U.S. ARMY") therefore changes the words, but not the
    # number of capital words.
    sentences = re.split(r"(?<=[.?!])\s+|(?<=[.?!][\"')\]}»”’])\s+", text)
    return sum(word.isupper() for sentence in sentences for word in tokenizer.tokenize(sentence))


@contextmanager
def _fixed_seed(seed: int | str) -> Iterator[None]:
    """Seed the global generator of the checkers within the block, and restore it afterwards.

    Not thread-safe: two threads would draw from the same generator.
    """
    state = random.getstate()
    try:
        random.seed(seed)
        yield
    finally:
        random.setstate(state)
