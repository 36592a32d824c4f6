"""Suggestions for unknown keys and names: the most similar known ones."""

from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any, get_args

from megatron_gptoss.config import StrictModel
from rl_loop.config.shipped import shipped_names

MAX_SUGGESTIONS = 3
"""Maximum number of suggestions in a message."""


def similar_names(name: str, folder: str) -> str:
    """Return "; did you mean ...?" with similar shipped names, or an empty string.

    Args:
        name: the unknown name.
        folder: rl, sft or cluster.
    """
    return _question(get_close_matches(name, shipped_names(folder), MAX_SUGGESTIONS))


def similar_keys(key: str, kind: type[StrictModel]) -> str:
    """Return "; did you mean ...?" with similar keys of ``kind``, or an empty string.

    Keys of that name in other sections come first, then misspelled keys of the same section. A key
    of another type of a union is reported as such.

    Args:
        key: the unknown key, dotted, such as ``optimizer.learning_rate``.
        kind: type of the configuration.
    """
    section, _, name = key.rpartition(".")
    # Members of a union share keys.
    known = list(dict.fromkeys(known_keys(kind)))
    if key in known:
        return f" for this {section}.type"

    # A key in the wrong section is more likely than a typo that has the name of another key.
    near = [other for other in known if other.rpartition(".")[2] == name][:MAX_SUGGESTIONS]
    if not near:
        siblings = [other for other in known if other.rpartition(".")[0] == section]
        # Keys of a section share its name. With difflib's default of 0.6, all of them would be
        # similar.
        near = get_close_matches(key, siblings, MAX_SUGGESTIONS, cutoff=0.75)
    return _question(near)


def _question(names: list[str]) -> str:
    return f"; did you mean {' or '.join(names)}?" if names else ""


def known_keys(kind: type[StrictModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of a configuration, including sections."""
    for name, field in kind.model_fields.items():
        yield f"{prefix}{name}"
        # Sections of a union have keys in common, so some keys come several times.
        for section in _models_in(field.annotation):
            yield from known_keys(section, f"{prefix}{name}.")


def _models_in(annotation: Any) -> Iterator[type[StrictModel]]:
    """Yield the configuration types that a value of this type may have.

    Types within lists and mappings are left out, because users choose the keys there.
    """
    if isinstance(annotation, type) and issubclass(annotation, StrictModel):
        yield annotation
        return
    # Users choose the keys of mappings, so the types of their values give no known keys.
    if isinstance(annotation, type) or getattr(annotation, "__origin__", None) in (list, dict):
        return
    for part in get_args(annotation):
        yield from _models_in(part)
