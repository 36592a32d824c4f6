"""Every key of a configuration, and another value for each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, TypeAliasType, get_args, get_origin

from pydantic import BaseModel

from rl_loop.config.run import RlConfig, SftConfig

CONFIGS = Path(__file__).parents[4] / "configs"


def list_keys(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all keys below a model with their annotations.

    An optional section is a key itself, because it may become null. Entries of a mapping of
    sections have the name ``*``.
    """
    for name, field in model.model_fields.items():
        key = prefix + name
        choices = list(_choices(field.annotation))
        sections = [choice for choice in choices if _is_section(choice)]
        if sections and NoneType in choices:
            yield key, field.annotation
        for section in sections:
            yield from list_keys(section, f"{key}.")

        mapped = [get_args(choice)[1] for choice in choices if get_origin(choice) is dict]
        sections_by_name = [section for section in mapped if _is_section(section)]
        for section in sections_by_name:
            yield from list_keys(section, f"{key}.*.")
        if not sections and not sections_by_name:
            yield key, field.annotation


def all_keys() -> dict[str, Any]:
    """Return the keys of ``gptoss rl`` and ``gptoss sft`` with their annotations."""
    return dict([*list_keys(SftConfig), *list_keys(RlConfig)])


def other_values(annotation: Any, value: Any) -> list[Any]:
    """Return values of the annotation's type that differ from ``value``, likely ones first."""
    others: list[Any] = []
    for choice in _choices(annotation):
        if choice is NoneType:
            others.append(None)
        elif get_origin(choice) is Literal:
            others += get_args(choice)
        elif choice is bool:
            others += [True, False]
        elif choice is int:
            others += [(value or 0) + 1, (value or 0) + 2, 2, 3] if _is_number(value) else [1, 2]
        elif choice is float:
            others += [0.3, 0.7, 1.5, 3.0]
        elif choice is str:
            others += ["other"]
        elif choice is Path:
            others += ["/other"]
        elif get_origin(choice) is tuple:
            inner = get_args(choice)
            literals = [get_args(item) for item in inner if get_origin(item) is Literal]
            others += [[literal] for options in literals for literal in options]
            others += [["other"]] if inner[0] is str else []
            others += [[0.3, 3.0]] if inner[0] is float else []
        elif get_origin(choice) is list:
            others += [["--other"]]
        elif get_origin(choice) is dict:
            others += [{"other": 0.5}, {"other": "x"}]
        elif _is_section(choice):
            others += [{}]
    return [other for other in others if other != value]


def _choices(annotation: Any) -> Iterator[Any]:
    """Yield the members of a union, without aliases and metadata."""
    if isinstance(annotation, TypeAliasType):
        yield from _choices(annotation.__value__)
    elif get_origin(annotation) is Annotated or not _is_union(annotation):
        if get_origin(annotation) is Annotated:
            yield from _choices(get_args(annotation)[0])
        else:
            yield annotation
    else:
        for member in get_args(annotation):
            yield from _choices(member)


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) not in (None, Literal, list, dict, tuple, set)


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
