"""Which training prompts give away a held-out prompt.

The rule is GPT-3's (arXiv 2005.14165, appendix C): two prompts with SHARED_WORDS words in a row in common are taken for
copies. Words that many prompts have in common, because a data set wraps its problems into a form, give nothing away."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence

SHARED_WORDS = 13
"""As many words in a row in common make a copy."""

# What so few training prompts have in common is always taken for copies; what more have may be a form
FEW_PROMPTS = 10
FEW_SHARE = 0.01
# A form is in many held-out prompts, too: at least in this share of them, and in two
HELD_OUT_SHARE = 0.1
# Fewer held-out prompts than that say nothing about forms; a form is then what this share of training prompts has
ENOUGH_HELD_OUT = 20
TRAINING_SHARE = 0.1

Run = tuple[str, ...]


def find_giveaways(prompts: Iterable[str], held_out: Sequence[str]) -> list[bool]:
    """Which training prompts equal a held-out prompt, or have SHARED_WORDS words in a row in common with it that are
    not the words of a form. Prompts of fewer words must have all of them in common.

    Exact, whatever the number of copies. Only the runs of the held-out prompts are kept; the time grows with the
    number of words in all prompts together."""
    in_held_out: Counter[Run] = Counter()
    for prompt in held_out:
        in_held_out.update({run for _, run in _runs(_words(prompt))})

    # looking up a run's first and last word is cheaper than making the run, and nearly always enough
    ends = {(run[0], run[-1]) for run in in_held_out}
    equal = set(held_out)

    shared: list[list[tuple[int, Run]]] = []
    is_equal: list[bool] = []
    for prompt in prompts:
        shared.append([(place, run) for place, run in _runs(_words(prompt), ends) if run in in_held_out])
        is_equal.append(prompt in equal)

    in_training = Counter(run for runs in shared for run in {run for _, run in runs})
    forms = {run for run, count in in_training.items() if _is_form(count, len(shared), in_held_out[run], len(held_out))}
    return [same or _gives_away(runs, forms) for same, runs in zip(is_equal, shared, strict=True)]


def _gives_away(shared: list[tuple[int, Run]], forms: set[Run]) -> bool:
    """Whether a run that a prompt shares is no form's, nor one that begins or ends in a form: "in a box: What is" is in
    many prompts of the form, "in a box: Suppose that" in few, and neither is a copy."""
    of_forms = {place + i for place, run in shared if run in forms for i in range(len(run))}
    for place, run in shared:
        own_words = sum(place + i not in of_forms for i in range(len(run)))
        if run not in forms and 2 * own_words > len(run):
            return True
    return False


def _is_form(in_training: int, training_prompts: int, in_held_out: int, held_out_prompts: int) -> bool:
    if in_training <= max(FEW_PROMPTS, FEW_SHARE * training_prompts):
        return False
    if in_held_out >= max(2, HELD_OUT_SHARE * held_out_prompts):
        return True
    return held_out_prompts < ENOUGH_HELD_OUT and in_training > TRAINING_SHARE * training_prompts


def _words(text: str) -> list[str]:
    """Words and punctuation marks, in lower case."""
    return re.findall(r"\w+|[^\w\s]", text.lower())


def _runs(words: list[str], ends: set[tuple[str, str]] | None = None) -> list[tuple[int, Run]]:
    """Where runs of SHARED_WORDS words begin, and the runs: all, or those with ``ends``. A shorter text is one run."""
    if not words:
        return []
    length = min(SHARED_WORDS, len(words))
    places = enumerate(zip(words, words[length - 1 :], strict=False))
    return [(i, tuple(words[i : i + length])) for i, pair in places if ends is None or pair in ends]
