"""Verifiable instruction following: answers must meet constraints that programs check (IFEval, arXiv 2311.07911).

Prompts are composed from the IFEval checkers of if-verifiable that need no download; in later turns, as in Multi-IF,
the user adds constraints and the earlier ones must still hold. IFEval and IFBench files are read as they are."""

import json
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from random import Random
from typing import Any

from pydantic import Field, field_validator

from rl_loop.environments.base import Environment, EnvironmentOptions, Script, Split, StepResult, Task, final, text_in
from rl_loop.rewards import CheckerFailure

TOPICS = ("rivers", "bread", "trains", "clouds", "chess", "gardens", "winter", "maps", "owls", "tea", "boats", "stars")

# How a text is made to meet a constraint, in the order in which they are applied. Those that a plain text meets leave
# it alone; a task for which that fails is not given.
SOLUTIONS: dict[str, Any] = {
    "detectable_format:constrained_response": lambda text, **_: "My answer is yes.",
    "keywords:existence": lambda text, keywords, **_: f"{text} {' '.join(keywords)}",
    "keywords:frequency": lambda text, keyword, frequency, relation: text + f" {keyword}" * _least(frequency, relation),
    "keywords:forbidden_words": lambda text, **_: text,
    "keywords:letter_frequency": lambda text, letter, let_frequency, let_relation: (
        text + f" {letter}" * _least(let_frequency, let_relation)
    ),
    "length_constraints:number_words": lambda text, num_words, relation: text + " more" * _least(num_words, relation),
    "length_constraints:number_paragraphs": lambda text, num_paragraphs: "\n***\n".join([text] * num_paragraphs),
    "length_constraints:nth_paragraph_first_word": lambda text, num_paragraphs, nth_paragraph, first_word: "\n\n".join(
        f"{first_word} {text}" if i + 1 == nth_paragraph else text for i in range(num_paragraphs)
    ),
    "detectable_content:number_placeholders": lambda text, num_placeholders: text + " [name]" * num_placeholders,
    "detectable_format:number_bullet_lists": lambda text, num_bullets: text + "\n* so" * num_bullets,
    "detectable_format:number_highlighted_sections": lambda text, num_highlights: text + " *so*" * num_highlights,
    "detectable_format:multiple_sections": lambda text, section_spliter, num_sections: "\n".join(
        f"{section_spliter} {i + 1}\n{text}" for i in range(num_sections)
    ),
    "detectable_content:postscript": lambda text, postscript_marker: f"{text}\n{postscript_marker} so",
    "detectable_format:title": lambda text, **_: f"<<so>>\n{text}",
    "combination:two_responses": lambda text, **_: f"{text}\n******\nor {text}",
    "detectable_format:json_format": lambda text, **_: f'["{text}"]',
    "startend:end_checker": lambda text, end_phrase: f"{text} {end_phrase}",
    "change_case:english_lowercase": lambda text, **_: text.lower(),
    "change_case:english_capital": lambda text, **_: text.upper(),
    "punctuation:no_comma": lambda text, **_: text.replace(",", ""),
    "startend:quotation": lambda text, **_: f'"{text}"',
}


# What checkers read from NLTK's data, which it does not bring along: package and place. Counting capital words, which
# needs it, too, is done without it here.
NLTK_DATA = {
    "length_constraints:number_sentences": {"punkt_tab": "tokenizers/punkt_tab/english/"},
    "words:keywords_specific_position": {"punkt_tab": "tokenizers/punkt_tab/english/"},
    "words:words_position": {"punkt_tab": "tokenizers/punkt_tab/english/"},
    "format:title_case": {"punkt_tab": "tokenizers/punkt_tab/english/"},
    "ratio:stop_words": {"stopwords": "corpora/stopwords"},
    "words:start_verb": {
        "punkt_tab": "tokenizers/punkt_tab/english/",
        "averaged_perceptron_tagger_eng": "taggers/averaged_perceptron_tagger_eng/",
    },
}


def _least(count: int, relation: str) -> int:
    return count if relation == "at least" else 0


class InstructionOptions(EnvironmentOptions):
    constraints: int = Field(2, gt=0)
    """New constraints per turn of the user."""
    turns: int = Field(1, gt=0)
    """Turns of the user."""
    checkers: list[str] = Field(default_factory=lambda: list(SOLUTIONS))
    """IFEval constraints to choose from."""
    skip_unavailable: bool = False
    """Of files: leave out rows with a constraint whose checker needs NLTK data that is not installed. Otherwise the
    first such row is an error that says how to install it."""

    @field_validator("checkers")
    @classmethod
    def _checkers_are_known(cls, checkers: list[str]) -> list[str]:
        if unknown := sorted(set(checkers) - set(SOLUTIONS)):
            raise ValueError(f"no prompts are composed with {', '.join(unknown)}; known: {', '.join(SOLUTIONS)}")
        return checkers


class InstructionEnvironment(Environment):
    """``task.metadata["turns"]``: per turn of the user its new constraints, [name, arguments]."""

    Options = InstructionOptions

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._turn = 0
        self._scores: list[tuple[float, float]] = []

    @classmethod
    def generate(cls, split: Split, seed: int, index: int, options: Any) -> Task:
        count = options.constraints * options.turns
        for attempt in range(1000):
            rng = Random(f"{split}/{seed}/{index}/{attempt}")
            topic = rng.choice(TOPICS)
            names = _compatible(options.checkers, count, rng)
            described = [_constraint(name, rng.randrange(1 << 30)) for name in names]
            parts = [described[i : i + options.constraints] for i in range(0, len(described), options.constraints)]
            texts = [" ".join(text for _, _, text in part) for part in parts]
            turns = [[[name, arguments] for name, arguments, _ in part] for part in parts]
            follow_ups = [f"Now also: {text}" for text in texts[1:]]
            messages = [{"role": "user", "content": f"Write about {topic}. {texts[0]}"}]
            metadata = {"turns": turns, "user": follow_ups, "topic": topic}
            known = [constraint for turn in turns for constraint in turn]
            ends = range(options.constraints, len(known) + 1, options.constraints)
            met = (_check(known[i], _solution(topic, known[:end]), "")[0] for end in ends for i in range(end))
            if len(names) == count and all(met):
                return Task(f"{split}-{index}", messages, "", "instructions", metadata)
        raise ValueError(f"no {options.constraints} x {options.turns} constraints of {options.checkers} go together")

    @classmethod
    def from_record(cls, record: dict[str, Any], name: str, options: Any) -> Task | None:
        """{"key", "prompt", "instruction_id_list", "kwargs"}, as IFEval and IFBench publish."""
        names, given = record["instruction_id_list"], record["kwargs"]
        for key, values in (("instruction_id_list", names), ("kwargs", given)):
            if not isinstance(values, list) or len(values) != len(names) or not values:
                raise ValueError(f"{key!r} must be a list with an entry for each constraint")
        if not all(arguments is None or isinstance(arguments, dict) for arguments in given):
            raise ValueError("'kwargs' must be a list of objects")

        arguments = [{k: v for k, v in (entry or {}).items() if v is not None} for entry in given]
        constraints = [list(pair) for pair in zip(names, arguments, strict=True)]
        for constraint, _ in constraints:
            _registry(constraint)
            missing = _missing_data(constraint)
            if missing and options.skip_unavailable:
                return None
            if missing:
                command = f"python -m nltk.downloader {' '.join(missing)}"
                hint = f"{command} (or leave such rows out: skip_unavailable: true)"
                raise ValueError(f"{constraint} needs data of NLTK: {hint}")

        metadata = {"turns": [constraints], "user": []}
        return Task(name, [{"role": "user", "content": text_in(record, "prompt")}], "", "instructions", metadata)

    @classmethod
    def solve(cls, task: Task, rng: Random, careless: bool) -> Script:
        """Meets every constraint; careless, it forgets about half of them."""
        known: list[Any] = []
        for turn in task.metadata["turns"]:
            known += [constraint for constraint in turn if not careless or rng.random() < 0.5]
            yield [final(_solution(task.metadata["topic"], known))]

    async def answer(self, text: str) -> StepResult:
        turns = self.task.metadata["turns"]
        self._turn += 1
        known = [constraint for turn in turns[: self._turn] for constraint in turn]
        checked = [_check(constraint, text, self.task.messages[-1]["content"]) for constraint in known]
        self._scores.append((sum(s for s, _ in checked) / len(known), sum(loose for _, loose in checked) / len(known)))
        if self._turn < len(turns):
            return StepResult(user=self.task.metadata["user"][self._turn - 1])
        return self.unfinished()

    def unfinished(self) -> StepResult:
        """Turns that were not answered count as 0."""
        turns = len(self.task.metadata["turns"])
        strict, loose = (sum(score[i] for score in self._scores) / turns for i in (0, 1))
        return self.finished(strict, strict=float(strict >= 1), loose=float(loose >= 1), partial_loose=loose)


@cache
def _registries() -> tuple[dict[str, Any], dict[str, Any]]:
    try:
        import langdetect
        from if_verifiable.ifeval.instructions_registry import INSTRUCTION_CONFLICTS, INSTRUCTION_DICT, conflict_make
    except ImportError as error:
        raise CheckerFailure(f"{error}; pip install 'megatron-gptoss[environments]'") from None

    langdetect.DetectorFactory.seed = 0
    return INSTRUCTION_DICT, conflict_make(INSTRUCTION_CONFLICTS)


@cache
def _ifbench() -> dict[str, Any]:
    import nltk

    # if-verifiable downloads NLTK data when it is imported, or tries to: what is missing is named instead
    download, nltk.download = nltk.download, lambda *_arguments, **_settings: False
    try:
        from if_verifiable.ifbench.instructions_registry import INSTRUCTION_DICT
    finally:
        nltk.download = download
    return dict(INSTRUCTION_DICT)


def _registry(name: str) -> dict[str, Any]:
    """The checkers among which ``name`` is. Raises ValueError."""
    if name in _registries()[0]:
        return _registries()[0]
    if name not in _ifbench():
        raise ValueError(f"neither IFEval nor IFBench has a constraint {name!r}")
    return _ifbench()


def _missing_data(name: str) -> list[str]:
    """The packages of NLTK data that a checker needs and that are not installed."""
    import nltk

    missing = []
    for package, place in NLTK_DATA.get(name, {}).items():
        try:
            nltk.data.find(place)
        except LookupError:
            missing.append(package)
    return missing


def _check(constraint: list[Any], text: str, prompt: str) -> tuple[bool, bool]:
    """Strict and loose: does ``text`` meet one constraint, and does it without its first or last line or asterisks?

    A checker that fails on a text is not met by it. Raises CheckerFailure if it lacks what it needs on any text."""
    from if_verifiable.common import get_loose_transformations

    name, arguments = constraint
    if not text.strip():
        return False, False
    try:
        checker = _checker(name, arguments, prompt)
        strict = _meets(checker, name, text)
        loose = strict or any(_meets(checker, name, variant) for variant in get_loose_transformations(text))
    except (ImportError, LookupError) as error:
        # KeyError and IndexError are LookupErrors of a text; NLTK's, of missing data, is the class itself
        if type(error) is LookupError or isinstance(error, ImportError):
            raise CheckerFailure(f"{name} cannot be checked: {' '.join(str(error).split())[:200]}") from None
        return False, False
    except Exception:
        return False, False
    return strict, loose


def _checker(name: str, arguments: dict[str, Any], prompt: str) -> Any:
    checker = _registry(name)[name](name)
    given = {key: value for key, value in arguments.items() if value is not None}
    with _seeded(json.dumps([name, given], sort_keys=True, default=str)):
        checker.build_description(**given)
        described = checker.get_instruction_args()
        if described and "prompt" in described:
            checker.build_description(prompt=prompt)

    # "the letter # should appear at least 4 times" (IFEval 1122 and 1129): the checker takes a random letter for it
    letter = given.get("letter")
    if name == "keywords:letter_frequency" and isinstance(letter, str) and len(letter) == 1:
        checker._letter = letter.lower()
    return checker


def _meets(checker: Any, name: str, text: str) -> bool:
    if not text.strip():
        return False
    if name == "change_case:capital_word_frequency":
        count = _capital_words(text)
        limit, relation = checker._frequency, checker._comparison_relation
        return bool(count < limit if relation == "less than" else count >= limit)
    return bool(checker.check_following(text))


def _capital_words(text: str) -> int:
    """As many words of capital letters as NLTK finds, without its model of sentences.

    A sentence's end matters to NLTK's words only in that a full stop there is a word of its own, and CAN'T before it
    two. Where the model sees no end after a full stop ("U.S. ARMY"), words differ, but not how many are capital."""
    from nltk.tokenize.destructive import NLTKWordTokenizer

    sentences = re.split(r"(?<=[.?!])\s+|(?<=[.?!][\"')\]}»”’])\s+", text)
    words = (word for sentence in sentences for word in NLTKWordTokenizer().tokenize(sentence))
    return sum(word.isupper() for word in words)


def _constraint(name: str, seed: int) -> tuple[str, dict[str, Any], str]:
    """Name, arguments and text of a constraint, a function of the seed."""
    checker = _registries()[0][name](name)
    with _seeded(seed):
        text = checker.build_description()
        return name, checker.get_instruction_args() or {}, text


@contextmanager
def _seeded(seed: int | str) -> Iterator[None]:
    """The checkers draw what they are not told from the global generator: here it is a function of the seed."""
    state = random.getstate()
    try:
        random.seed(seed)
        yield
    finally:
        random.setstate(state)


def _compatible(names: list[str], count: int, rng: Random) -> list[str]:
    conflicts, chosen = _registries()[1], list[str]()
    for name in rng.sample(names, len(names)):
        if len(chosen) < count and not any(name in conflicts[other] for other in chosen):
            chosen.append(name)
    return chosen


def _solution(topic: str, constraints: list[Any]) -> str:
    text = f"This is a note about {topic}."
    for name, arguments in sorted(constraints, key=lambda constraint: list(SOLUTIONS).index(constraint[0])):
        text = SOLUTIONS[name](text, **arguments)
    return text
