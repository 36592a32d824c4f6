"""Finds training prompts that give away a held-out prompt.

Two prompts with SHARED_WORDS consecutive words in common count as copies (GPT-3, arXiv 2005.14165,
appendix C). A shorter prompt is a copy if the other prompt contains all of it as a sentence. Words
that many prompts have in common do not count, because a data set may wrap its problems into a form.
"""

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

SHARED_WORDS = 13
"""Number of consecutive common words that make a copy."""
FREE_WORDS = 8
"""A short prompt of at least this many words also counts in the middle of a sentence."""

FEW_PROMPTS = 10
FEW_SHARE = 0.01
"""Words that at most this many training prompts share always count. Words that more prompts share
may belong to a form."""
HELD_OUT_SHARE = 0.1
"""A form is in at least this share of the held-out prompts, and in two."""
ENOUGH_HELD_OUT = 20
TRAINING_SHARE = 0.1
"""With fewer than ENOUGH_HELD_OUT held-out prompts, a form is in this share of the training
prompts."""

WORD, IDEOGRAPH, LETTER = 4, 2, 1
"""Weights of a word between blanks, and of a character of a script without blanks: about 2
ideographs, or 4 letters, make a word."""
IDEOGRAPHS = (
    "\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\ua000-\ua4cf\U00020000-\U0003ffff"
)
"""Kana, Chinese characters and Yi. NFKC maps compatibility forms to them."""
LETTERS = "\u0e00-\u0eff\u0f00-\u0fff\u1000-\u109f\u1780-\u17ff\u1950-\u19df\u1a20-\u1aaf"
"""Thai, Lao, Tibetan, Burmese, Khmer, Tai."""
MARKS = "\u0300-\u036f\u0591-\u05c7\u0610-\u065f\u0900-\u0963\u0966-\u0dff"
"""Signs within words that ``re`` does not classify as letters."""
TOKEN = re.compile(
    rf"(?P<ideograph>[{IDEOGRAPHS}])|(?P<letter>[{LETTERS}])"
    rf"|(?:(?![{IDEOGRAPHS}{LETTERS}])[\w{MARKS}])+|[^\w\s]"
)

# Text on either side of a sentence. After "2 *", or before "* 5", "3 + 4" is part of another term.
BEFORE_SENTENCE = re.compile(
    r"(?:^|\n|[;?!\"`#$。、「『《]|(?<=[a-z])>|\*\*|(?<![0-9])[.:]|[.:](?=\s))\s*$"
)
AFTER_SENTENCE = re.compile(
    r"\s*(?:$|\n|[;?!\"`#$。、」』》]|</|\*\*|[.,](?![0-9])|:(?!\s*[0-9])|(?<=\s)\()"
)
CONTEXT = 16
"""Number of characters before a sentence that are checked."""
FINAL_MARKS = frozenset(".?!。")

WordRun = tuple[str, ...]
"""Consecutive words of a prompt."""


def find_contaminated(prompts: Iterable[str], held_out: Sequence[str]) -> list[bool]:
    """Return for each training prompt whether it gives away a held-out prompt.

    It does if any of these holds:

    - The prompts are equal.
    - They have SHARED_WORDS consecutive words in common that do not belong to a form.
    - One of them has fewer words, and the other one contains all of it: as a sentence, or, from
      FREE_WORDS words on, as the end of a sentence.

    The result is exact for any number of copies. Only the words of the held-out prompts and of
    short training prompts are kept. The time grows with the number of words in all prompts.
    """
    held_out_words = [_Words(prompt) for prompt in held_out]
    held_out_counts: Counter[WordRun] = Counter()
    short_held_out = _ShortPrompts()
    for words in held_out_words:
        if words.is_short:
            short_held_out.add(words)
        held_out_counts.update({run for _, run in words.runs()})

    # A set, because a run counts once per prompt.
    # Looking up a run's first and last word is cheaper than building the run, and usually enough.
    ends = {(run[0], run[-1]) for run in held_out_counts}
    # Equal prompts count even if all their words belong to a form.
    held_out_prompts = set(held_out)

    shared_runs: list[list[tuple[int, WordRun]]] = []
    contained: list[set[WordRun]] = []
    short_training = _ShortPrompts()
    prompts_of: dict[WordRun, list[int]] = defaultdict(list)
    is_equal: list[bool] = []
    training_counts: Counter[WordRun] = Counter()
    for number, prompt in enumerate(prompts):
        words = _Words(prompt)
        shared = [(start, run) for start, run in words.runs(ends) if run in held_out_counts]
        short = short_held_out.in_text(words)
        if words.is_short and words.tokens:
            # A prompt without words is contained in every text.
            prompts_of[short_training.add(words)].append(number)

        training_counts.update({run for _, run in shared} | short)
        shared_runs.append(shared)
        contained.append(short)
        is_equal.append(prompt in held_out_prompts)

    # The opposite direction: a short training prompt inside a held-out prompt.
    for words in held_out_words:
        inside = short_training.in_text(words)
        for run in inside:
            for number in prompts_of[run]:
                contained[number].add(run)
        held_out_counts.update(inside | short_held_out.in_text(words))
    # A short prompt is contained in each of its copies.
    for run, numbers in prompts_of.items():
        training_counts[run] = max(training_counts[run], len(numbers))

    # Only now are all counts known.
    forms = _forms(training_counts, len(shared_runs), held_out_counts, len(held_out))
    return [
        equal or bool(short - forms) or _is_contaminated(shared, forms)
        for equal, short, shared in zip(is_equal, contained, shared_runs, strict=True)
    ]


def _forms(
    training_counts: Counter[WordRun],
    training_prompts: int,
    held_out_counts: Counter[WordRun],
    held_out_prompts: int,
) -> set[WordRun]:
    """Return the runs that belong to a form. The numbers of prompts with a run tell."""
    return {
        run
        for run, count in training_counts.items()
        if _is_common_form(
            in_training=count,
            training_prompts=training_prompts,
            in_held_out=held_out_counts[run],
            held_out_prompts=held_out_prompts,
        )
    }


@dataclass
class _Words:
    """The words and punctuation marks of a prompt, in lower case."""

    text: str
    tokens: list[str] = field(init=False)
    weights: list[int] = field(init=False)
    is_short: bool = field(init=False)
    """True if there are fewer than SHARED_WORDS words."""

    def __post_init__(self) -> None:
        # NFKC makes full-width and other compatibility forms equal to the usual ones.
        self.text = unicodedata.normalize("NFKC", self.text).lower()
        self.tokens = []
        self.weights = []
        for match in TOKEN.finditer(self.text):
            self.tokens.append(match[0])
            kind = match.lastgroup
            self.weights.append(
                WORD if kind is None else IDEOGRAPH if kind == "ideograph" else LETTER
            )
        self.is_short = sum(self.weights) < SHARED_WORDS * WORD

    def runs(self, ends: set[tuple[str, str]] | None = None) -> list[tuple[int, WordRun]]:
        """Return all runs of SHARED_WORDS words and their starts, or only those with ``ends``.

        A shorter text is one run.
        """
        tokens = self.tokens
        if not tokens:
            return []
        if self.is_short:
            return [(0, tuple(tokens))] if ends is None or (tokens[0], tokens[-1]) in ends else []

        # Sliding window: ``weight`` is the weight of tokens[start:stop].
        runs = []
        stop = 0
        weight = 0
        for start in range(len(tokens)):
            while weight < SHARED_WORDS * WORD and stop < len(tokens):
                weight += self.weights[stop]
                stop += 1
            # The rest of the text is shorter than a run.
            if weight < SHARED_WORDS * WORD:
                break
            if ends is None or (tokens[start], tokens[stop - 1]) in ends:
                runs.append((start, tuple(tokens[start:stop])))
            weight -= self.weights[start]
        return runs

    def is_sentence(self, start: int, stop: int, *, may_begin_anywhere: bool) -> bool:
        """Return True if the tokens [start, stop) are one sentence, or more, of the text."""
        begin = self._spans[start][0]
        if not AFTER_SENTENCE.match(self.text, self._spans[stop - 1][1]):
            return False
        if may_begin_anywhere:
            return True
        # "x" marks that more text precedes, because "^" would match at the start of the excerpt.
        before = self.text[max(0, begin - CONTEXT) : begin]
        return bool(BEFORE_SENTENCE.search(f"x{before}" if begin > CONTEXT else before))

    @cached_property
    def _spans(self) -> list[tuple[int, int]]:
        """Positions of the tokens in the text."""
        return [match.span() for match in TOKEN.finditer(self.text)]


class _ShortPrompts:
    """Prompts of fewer than SHARED_WORDS words, to be found inside others."""

    def __init__(self) -> None:
        self._runs: dict[WordRun, bool] = {}
        """The words without final marks -> whether they may follow other words of a sentence."""
        self._lengths: dict[tuple[str, str], set[int]] = defaultdict(set)
        """First two words -> lengths of the prompts that begin with them."""

    def add(self, words: _Words) -> WordRun:
        """Add a prompt, and return its words without final marks."""
        run = _without_final_marks(words.tokens)
        if run:
            self._runs[run] = sum(words.weights[: len(run)]) >= FREE_WORDS * WORD
            self._lengths[run[0], run[1] if len(run) > 1 else ""].add(len(run))
        return run

    def in_text(self, words: _Words) -> set[WordRun]:
        """Return the prompts that are inside a text, or equal to it."""
        if not self._runs:
            return set()
        matches = set()
        tokens = words.tokens
        for start, pair in enumerate(zip(tokens, [*tokens[1:], ""], strict=False)):
            # Prompts of a single word have no second word.
            lengths = self._lengths.get(pair, set()) | self._lengths.get((pair[0], ""), set())
            for length in lengths:
                run = tuple(tokens[start : start + length])
                if run in matches or len(run) < length or run not in self._runs:
                    continue
                if words.is_sentence(start, start + length, may_begin_anywhere=self._runs[run]):
                    matches.add(run)
        return matches


def _without_final_marks(tokens: list[str]) -> WordRun:
    stop = len(tokens)
    while stop > 0 and tokens[stop - 1] in FINAL_MARKS:
        stop -= 1
    return tuple(tokens[:stop])


def _is_contaminated(shared: list[tuple[int, WordRun]], forms: set[WordRun]) -> bool:
    """Return True if a shared run is not a form's, and does not begin or end in a form."""
    words_of_forms = {start + i for start, run in shared if run in forms for i in range(len(run))}
    for start, run in shared:
        # Many prompts of a form have "in a box: What is", few have "in a box: Suppose that".
        # Neither is a copy. A run at the edge of a form has a few other words, which make no copy.
        other_words = sum(start + i not in words_of_forms for i in range(len(run)))
        if run not in forms and 2 * other_words > len(run):
            return True
    return False


def _is_common_form(
    *, in_training: int, training_prompts: int, in_held_out: int, held_out_prompts: int
) -> bool:
    """Return True if a run belongs to a form, by the numbers of prompts that contain it."""
    if in_training <= max(FEW_PROMPTS, FEW_SHARE * training_prompts):
        return False
    if in_held_out >= max(2, HELD_OUT_SHARE * held_out_prompts):
        return True
    return held_out_prompts < ENOUGH_HELD_OUT and in_training > TRAINING_SHARE * training_prompts
