"""What somebody may have meant: the nearest known keys and names to one that there is not."""

from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any, get_args

from megatron_gptoss.config import StrictModel
from rl_loop.config.shipped import shipped_names

MOST_SUGGESTED = 3
"""More than a few are no help."""


def similar_names(name: str, folder: str) -> str:
    """Return "; did you mean ...?" with shipped configurations that are called nearly ``name``, or
    nothing.

    Args:
        folder: rl, sft or cluster.
    """
    return _question(get_close_matches(name, shipped_names(folder), MOST_SUGGESTED))


def similar_keys(key: str, kind: type[StrictModel]) -> str:
    """Return "; did you mean ...?" with keys of ``kind`` that are nearly ``key``, or nothing.

    Keys of that name in other sections come first, then misspelled keys of the same section. A key
    that only another type of a union has is reported as such.

    Args:
        key: dotted, such as ``optimizer.learning_rate``.
    """
    section, _, name = key.rpartition(".")
    # Members of a union share keys.
    known = list(dict.fromkeys(known_keys(kind)))
    if key in known:
        return f" for this {section}.type"

    near = [other for other in known if other.rpartition(".")[2] == name][:MOST_SUGGESTED]
    if not near:
        siblings = [other for other in known if other.rpartition(".")[0] == section]
        near = get_close_matches(key, siblings, MOST_SUGGESTED, cutoff=0.75)
    return _question(near)


def _question(names: list[str]) -> str:
    return f"; did you mean {' or '.join(names)}?" if names else ""


def known_keys(kind: type[StrictModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of a configuration, sections included."""
    for name, field in kind.model_fields.items():
        yield f"{prefix}{name}"
        for section in _models_in(field.annotation):
            yield from known_keys(section, f"{prefix}{name}.")


def _models_in(annotation: Any) -> Iterator[type[StrictModel]]:
    """Yield the configurations that a value of this type may be; not those in lists and mappings,
    which have keys of the user's own."""
    if isinstance(annotation, type) and issubclass(annotation, StrictModel):
        yield annotation
        return
    if isinstance(annotation, type) or getattr(annotation, "__origin__", None) in (list, dict):
        return
    for part in get_args(annotation):
        yield from _models_in(part)
