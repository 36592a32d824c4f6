"""Applies overrides of the command line to the YAML tree of a configuration, before OmegaConf.

OmegaConf merges mappings. Some overrides must instead replace a mapping: the data of a run, and the
settings of a choice such as ``policy_loss``, whose keys depend on its type.
"""

import json
import re
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rl_loop.algorithms.choices import CHOICES, as_section
from rl_loop.config.errors import ConfigError
from rl_loop.conversations.config import ONLY_SOURCE, ConversationSource

HELD_OUT_OF = {"path": "validation_path", "train_path": "held_out_path"}
"""{key of training data: key of the corresponding held-out data}."""
UNNAMED_SOURCE_SECTIONS = ("data", "vocabulary_data")
"""Sections that accept a single source without a name (``DataConfig``)."""
DATA_SECTION = re.compile(r"(.*\.)?(data|vocabulary_data|sources|sources\.[^.]+)")
"""Keys whose mapping describes all data, or all of one source."""


def name_single_sources(tree: Any, overrides: list[str]) -> list[str]:
    """Replace the short keys of a single source, such as ``data.path``, by its full keys.

    The full key is ``data.sources.data.path``. File and command line may use different forms of one
    key, so both are replaced.

    Args:
        tree: YAML tree of the file, which is changed in place.
        overrides: ``key.sub=value`` each.

    Returns:
        The overrides with full keys.
    """
    renamed = list(overrides)
    for section in UNNAMED_SOURCE_SECTIONS:
        data = tree.get(section)
        if not OmegaConf.is_dict(data):
            continue
        short = [key for key in data if key in ConversationSource.model_fields]
        named = data.get("sources", {})
        # A file that has both forms is rejected later, by ``CorpusConfig``.
        if short and not named:
            data["sources"] = {ONLY_SOURCE: {key: data.pop(key) for key in short}}

        # With several sources, a short key belongs to none of them.
        if set(data.get("sources", {})) != {ONLY_SOURCE}:
            continue
        for number, override in enumerate(renamed):
            key, _, value = override.partition("=")
            field = key.removeprefix(f"{section}.")
            # ``removeprefix`` returns the key itself if it belongs to another section.
            if key != field and field.split(".")[0] in ConversationSource.model_fields:
                renamed[number] = f"{section}.sources.{ONLY_SOURCE}.{field}={value}"
    return renamed


def reject_split_data(path: Path, tree: Any, overrides: list[str]) -> None:
    """Raise ConfigError if overrides replace training data but not the file's held-out data."""
    # OmegaConf parses slowly, and all of these keys contain "path".
    path_overrides = [override for override in overrides if "path" in override]
    keys = {key for override in path_overrides for key in _leaf_keys_of(override)}
    for key in sorted(keys):
        section, _, name = key.rpartition(".")
        if name not in HELD_OUT_OF or not section:
            continue
        held_out = f"{section}.{HELD_OUT_OF[name]}"
        value = OmegaConf.select(tree, held_out)
        if value is not None and held_out not in keys:
            # Show the short keys, as users of a single source write them.
            held_out, key = (k.replace(f".sources.{ONLY_SOURCE}.", ".") for k in (held_out, key))
            raise ConfigError(
                f"{held_out}: {value} belongs to the {key} of {path}, which an override "
                f"replaces. Add {held_out}=FILE, or {held_out}=null"
            )


def _leaf_keys_of(override: str) -> list[str]:
    """Return the keys of all values in an override, including values in a mapping."""
    return leaf_keys(_values_of(override))


def _mapping_keys_of(override: str) -> list[str]:
    """Return the keys of all mappings in an override, outer ones first."""

    def list_keys(values: Any, prefix: str) -> list[str]:
        if not isinstance(values, dict):
            return []
        below = [key for name in values for key in list_keys(values[name], f"{prefix}{name}.")]
        return [prefix.removesuffix("."), *below]

    return list_keys(_values_of(override), "")


def _values_of(override: str) -> Any:
    try:
        return OmegaConf.to_container(OmegaConf.from_dotlist([override]))
    except OmegaConfBaseException:
        return {}  # ``load_config`` reports the error.


def drop_replaced_data(tree: Any, overrides: list[str]) -> None:
    """Delete the data that an override ``key={...}`` replaces from ``tree``."""
    for override in overrides:
        key, _, value = override.partition("=")
        # OmegaConf merges only mappings, which would keep files of the replaced data.
        if not value.lstrip().startswith("{"):
            continue
        for replaced in filter(DATA_SECTION.fullmatch, _mapping_keys_of(override)):
            if not f"{replaced}.".startswith(f"{key}."):
                continue  # Only a parent of the key.
            parent, _, name = replaced.rpartition(".")
            section = OmegaConf.select(tree, parent) if parent else tree
            if OmegaConf.is_dict(section) and name in section:
                del section[name]


def insert_choices(tree: Any, overrides: list[str]) -> list[str]:
    """Set each section of CHOICES in ``tree`` to the type that the file or its last override names.

    Returns:
        The overrides without those of a type. Overrides of other keys of a section are kept.
    """
    overrides = [part for override in overrides for part in _split_at_choice(override)]
    for key in CHOICES:
        section = as_section(_to_plain(OmegaConf.select(tree, key)))
        is_chosen = section is not None
        kept = []
        for override in overrides:
            name = override.partition("=")[0]
            # ``policy_loss=NAME`` and ``policy_loss.type=NAME`` both set the type.
            if name not in (key, f"{key}.type"):
                kept.append(override)
                continue

            is_chosen = True
            # from_dotlist parses the value as YAML, so ``{type: ppo, ...}`` becomes a mapping.
            value = as_section(
                _to_plain(OmegaConf.select(OmegaConf.from_dotlist([override]), name))
            )
            # An override of the type with the same type keeps the other keys of the section.
            # Another type replaces the section, because losses have different bounds.
            keeps_type = isinstance(section, dict) and section.get("type") == _read_type(value)
            if name == key or not keeps_type:
                section = value
        overrides = kept
        if is_chosen:
            # A merge would keep keys of the other type, which the new type rejects.
            OmegaConf.update(tree, key, section, merge=False, force_add=True)
    return overrides


def _split_at_choice(override: str) -> list[str]:
    """Return an override, with one of CHOICES inside its mapping as a separate override."""
    name = override.partition("=")[0]
    key = next((key for key in CHOICES if key.startswith(f"{name}.")), None)
    if key is None:
        return [override]
    section: Any = OmegaConf.select(OmegaConf.from_dotlist([override]), name)
    if not OmegaConf.is_dict(section):
        return [override]
    *sections, last = key.removeprefix(f"{name}.").split(".")
    parent: Any = OmegaConf.select(section, ".".join(sections)) if sections else section
    if not OmegaConf.is_dict(parent) or last not in parent:
        return [override]
    # JSON is YAML, too.
    chosen = json.dumps(_to_plain(parent.pop(last)))
    return [f"{name}={json.dumps(_to_plain(section))}", f"{key}={chosen}"]


def _to_plain(value: Any) -> Any:
    """Return a value of OmegaConf as a plain Python value."""
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


def _read_type(section: Any) -> Any:
    return section.get("type") if isinstance(section, dict) else None


def leaf_keys(tree: Any, prefix: str = "") -> list[str]:
    """List the dotted keys of all values in a tree of mappings."""
    if not isinstance(tree, dict) or not tree:
        return [prefix.removesuffix(".")] if prefix else []
    return [leaf for key, value in tree.items() for leaf in leaf_keys(value, f"{prefix}{key}.")]
