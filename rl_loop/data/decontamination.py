"""Which training prompts give away a held-out prompt.

The rule is GPT-3's (arXiv 2005.14165, appendix C): two prompts with SHARED_WORDS words in a row
in common are taken for copies. Words that many prompts have in common, because a data set wraps
its problems into a form, give nothing away."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence

SHARED_WORDS = 13
"""As many words in a row in common make a copy."""

FEW_PROMPTS = 10
FEW_SHARE = 0.01
"""What no more training prompts than these have in common is always taken for copies; what more
have may be a form."""
HELD_OUT_SHARE = 0.1
"""A form is in at least this share of the held-out prompts too, and in two."""
ENOUGH_HELD_OUT = 20
TRAINING_SHARE = 0.1
"""Fewer than ENOUGH_HELD_OUT held-out prompts say nothing about forms: a form is then what this
share of the training prompts has."""

WordRun = tuple[str, ...]
"""Words that follow each other in a prompt."""


def find_giveaways(prompts: Iterable[str], held_out: Sequence[str]) -> list[bool]:
    """Say of each training prompt whether it gives away a held-out one.

    It does if they are equal or have SHARED_WORDS words in a row in common that are not the words
    of a form. Prompts of fewer words must have all of them in common.

    Exact, whatever the number of copies. Only the runs of the held-out prompts are kept; the time
    grows with the number of words in all prompts together."""
    held_out_counts: Counter[WordRun] = Counter()
    for prompt in held_out:
        held_out_counts.update({run for _, run in _runs(_words(prompt))})

    # Looking up a run's first and last word is cheaper than making the run, and nearly always
    # enough.
    ends = {(run[0], run[-1]) for run in held_out_counts}
    held_out_prompts = set(held_out)

    shared_runs: list[list[tuple[int, WordRun]]] = []
    is_equal: list[bool] = []
    training_counts: Counter[WordRun] = Counter()
    for prompt in prompts:
        shared = [
            (start, run) for start, run in _runs(_words(prompt), ends) if run in held_out_counts
        ]
        training_counts.update({run for _, run in shared})
        shared_runs.append(shared)
        is_equal.append(prompt in held_out_prompts)

    # Only now is it known how many prompts have a run, so that forms can be told from copies.
    forms: set[WordRun] = set()
    for run, count in training_counts.items():
        if _is_form(
            in_training=count,
            training_prompts=len(shared_runs),
            in_held_out=held_out_counts[run],
            held_out_prompts=len(held_out),
        ):
            forms.add(run)
    return [
        equal or _gives_away(shared, forms)
        for equal, shared in zip(is_equal, shared_runs, strict=True)
    ]


def _gives_away(shared: list[tuple[int, WordRun]], forms: set[WordRun]) -> bool:
    """Say whether a run that a prompt shares is no form's, nor one that begins or ends in a form.

    "in a box: What is" is in many prompts of the form, "in a box: Suppose that" in few, and
    neither is a copy."""
    words_of_forms = {start + i for start, run in shared if run in forms for i in range(len(run))}
    for start, run in shared:
        other_words = sum(start + i not in words_of_forms for i in range(len(run)))
        if run not in forms and 2 * other_words > len(run):
            return True
    return False


def _is_form(
    *, in_training: int, training_prompts: int, in_held_out: int, held_out_prompts: int
) -> bool:
    """Say whether a run of words is a form's, by how many of how many prompts have it."""
    if in_training <= max(FEW_PROMPTS, FEW_SHARE * training_prompts):
        return False
    if in_held_out >= max(2, HELD_OUT_SHARE * held_out_prompts):
        return True
    return held_out_prompts < ENOUGH_HELD_OUT and in_training > TRAINING_SHARE * training_prompts


def _words(text: str) -> list[str]:
    """Split into words and punctuation marks, in lower case."""
    return re.findall(r"\w+|[^\w\s]", text.lower())


def _runs(words: list[str], ends: set[tuple[str, str]] | None = None) -> list[tuple[int, WordRun]]:
    """Return all runs of SHARED_WORDS words and where they begin, or only those with ``ends``.

    A shorter text is one run."""
    if not words:
        return []

    length = min(SHARED_WORDS, len(words))
    runs = []
    for start, pair in enumerate(zip(words, words[length - 1 :], strict=False)):
        if ends is None or pair in ends:
            runs.append((start, tuple(words[start : start + length])))
    return runs
