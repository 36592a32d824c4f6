"""Reads configurations: YAML files with overrides from the command line."""

import json
import re
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from yaml import YAMLError

from megatron_gptoss.config import StrictModel
from megatron_gptoss.families.registry import read_hf_config
from rl_loop.algorithms.choices import CHOICES, as_section
from rl_loop.config.errors import ConfigError
from rl_loop.config.every_run import RunConfig
from rl_loop.config.run import RlConfig, SftConfig
from rl_loop.config.shipped import find_config, find_section, section_names
from rl_loop.config.suggestions import known_keys, similar_keys, similar_names
from rl_loop.config.tinker import TinkerConfig
from rl_loop.conversations.config import ONLY_SOURCE, ConversationSource
from rl_loop.registry import TAG


def load_config[Config: RunConfig](
    path: Path,
    kind: type[Config],
    overrides: list[str] | None = None,
) -> Config:
    """Read a YAML file, apply ``key.sub=value`` overrides and validate.

    Names are short forms:

    - ``model: NAME`` and ``algorithm: NAME`` refer to NAME.yaml in a folder of that name next to
      the file's folder, or among the shipped ones.
    - ``model: PATH`` refers to the architecture in a Hugging Face directory or ``config.json``.
    - ``policy_loss: NAME`` and ``advantage: NAME`` mean ``{type: NAME}``. An override of the type
      drops the keys of the other type.

    Args:
        path: a file, or the name of a shipped configuration.
        kind: type of the configuration.
        overrides: ``key.sub=value`` each.

    Raises:
        ConfigError: the message names file and keys.

    Example:
        >>> from rl_loop.config.run import RlConfig
        >>> config = load_config(Path("tiny_retool"), RlConfig, ["optimizer.lr=1e-5"])
        >>> config.optimizer.lr, config.model.num_layers
        (1e-05, 4)
    """
    path = find_config(path, kind.command)
    if not path.exists():
        raise ConfigError(f"{path}: no such file{similar_names(path.stem, kind.command)}")
    tree = read_yaml(path)
    changes = overrides or []
    # OmegaConf would read a word without "=" as a key that is null.
    for change in changes:
        if not re.match("[^=]+=", change):
            raise ConfigError(
                f"override {change!r} is not of the form key=value, such as optimizer.lr=1e-6"
            )
    # Insert before the other overrides, which may change values of the named file.
    for key in ("model", "algorithm"):
        changes = _insert_named_section(path, tree, key, changes)
    # Rename before the next steps, which compare full keys.
    changes = _name_only_sources(tree, changes)
    _drop_replaced_sections(tree, changes)
    _reject_split_data(path, tree, changes)

    try:
        changes = _insert_choices(tree, changes)
        merged = OmegaConf.merge(tree, OmegaConf.from_dotlist(changes))
        # Resolve ``${...}`` here, because pydantic does not know it.
        raw = OmegaConf.to_container(merged, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {error}") from error
    except TypeError:
        # OmegaConf does not report which override it was.
        raise ConfigError(
            f"{path}: one of the overrides {' '.join(changes)} sets a list where the file has "
            "keys, or keys where the file has a list. Correct the override."
        ) from None
    return validated(path, kind, raw)


HELD_OUT_OF = {"path": "validation_path", "train_path": "held_out_path"}
"""Keys of training data, and of the corresponding held-out data."""
DATA_KEYS = ("data", "vocabulary_data")
"""Sections that accept a single source without a name (``DataConfig``)."""


def _name_only_sources(tree: Any, changes: list[str]) -> list[str]:
    """Name single sources of data, in the YAML tree and in the overrides."""
    # ``data.path`` and ``data.sources.data.path`` are the same key, and the override must win.
    renamed = list(changes)
    for section in DATA_KEYS:
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
        for number, change in enumerate(renamed):
            key, _, value = change.partition("=")
            field = key.removeprefix(f"{section}.")
            # ``removeprefix`` returns the key itself if it belongs to another section.
            if key != field and field.split(".")[0] in ConversationSource.model_fields:
                renamed[number] = f"{section}.sources.{ONLY_SOURCE}.{field}={value}"
    return renamed


def _reject_split_data(path: Path, tree: Any, changes: list[str]) -> None:
    """Raise ConfigError if overrides replace training data but not the file's held-out data."""
    # OmegaConf parses slowly, and all of these keys contain "path".
    path_changes = [change for change in changes if "path" in change]
    keys = {key for change in path_changes for key in _keys_of_change(change)}
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
                f"replaces. Add {held_out}=FILE, or {held_out}=null."
            )


def _keys_of_change(change: str) -> list[str]:
    """Return the keys of all values in an override, including values in a mapping."""
    return _leaf_keys(_values_of_change(change))


def _mappings_of_change(change: str) -> list[str]:
    """Return the keys of all mappings in an override, outer ones first."""

    def list_keys(values: Any, prefix: str) -> list[str]:
        if not isinstance(values, dict):
            return []
        below = [key for name in values for key in list_keys(values[name], f"{prefix}{name}.")]
        return [prefix.removesuffix("."), *below]

    return list_keys(_values_of_change(change), "")


def _values_of_change(change: str) -> Any:
    try:
        return OmegaConf.to_container(OmegaConf.from_dotlist([change]))
    except OmegaConfBaseException:
        return {}  # ``load_config`` reports the error.


DATA_SECTION = re.compile(r"(.*\.)?(data|vocabulary_data|sources|sources\.[^.]+)")
"""Keys whose mapping describes all data, or all of one source."""


def _drop_replaced_sections(tree: Any, changes: list[str]) -> None:
    """Delete the data that an override ``key={...}`` replaces."""
    # A merge would keep files of the other data.
    for change in changes:
        key, _, value = change.partition("=")
        # Other values replace a section in any case. Only mappings would be merged.
        if not value.lstrip().startswith("{"):
            continue
        for replaced in filter(DATA_SECTION.fullmatch, _mappings_of_change(change)):
            if not f"{replaced}.".startswith(f"{key}."):
                continue  # Only a parent of the key.
            parent, _, name = replaced.rpartition(".")
            section = OmegaConf.select(tree, parent) if parent else tree
            if OmegaConf.is_dict(section) and name in section:
                del section[name]


def value_origins(
    path: Path,
    kind: type[RunConfig],
    overrides: list[str] | None = None,
) -> dict[str, str]:
    """Return the origin of each value that ``load_config`` returns for the same arguments.

    Args:
        path: a file, or the name of a shipped configuration.
        kind: type of the configuration.
        overrides: ``key.sub=value`` each.

    Returns:
        By dotted key: the file with the value, or "command line". Other keys have defaults. A key
        includes all keys below it.
    """
    path = find_config(path, kind.command)
    # Only the keys matter here, so references in values stay unresolved.
    tree = OmegaConf.to_container(read_yaml(path))
    assert isinstance(tree, dict)
    origins = {key: str(path) for key in _leaf_keys(tree)}

    for change in overrides or []:
        key, _, value = change.partition("=")
        # These overrides name a file. Its values are added below.
        if key in ("model", "algorithm"):
            tree[key] = value
        # An override of a section replaces the values below it, whatever file they came from.
        below = [known for known in origins if known == key or known.startswith(f"{key}.")]
        for known in below:
            del origins[known]
        origins[key] = "command line"

    # A section that is a name has the values of the file with that name.
    chosen = {key: origins.pop(key) for key in CHOICES if key in origins}
    for key in ("model", "algorithm"):
        if isinstance(tree.get(key), str):
            origins.pop(key, None)
            file, section = _named_section(path, key, tree[key])
            for name in _leaf_keys(section):
                full = f"{key}.{name}"
                choice = next((c for c in CHOICES if full == c or full.startswith(f"{c}.")), None)
                if choice is None:
                    # Values of the run's file and of overrides have precedence over the named file.
                    origins.setdefault(full, str(file))
                elif choice not in chosen:
                    origins.setdefault(f"{choice}.type" if full == choice else full, str(file))
    # A plain name sets the type of a choice. The other values are the defaults of that type.
    return origins | {f"{key}.type": origin for key, origin in chosen.items()}


def _leaf_keys(tree: Any, prefix: str = "") -> list[str]:
    """List the dotted keys of all values in a tree of mappings."""
    if not isinstance(tree, dict) or not tree:
        return [prefix.removesuffix(".")] if prefix else []
    return [leaf for key, value in tree.items() for leaf in _leaf_keys(value, f"{prefix}{key}.")]


def load_rl_config(path: Path, overrides: list[str] | None = None) -> RlConfig:
    """Read a configuration of ``gptoss rl`` with ``load_config``."""
    return load_config(path, RlConfig, overrides)


def load_run_config(path: Path, command: str, overrides: list[str] | None = None) -> RunConfig:
    """Read a configuration of ``gptoss COMMAND`` with ``load_config``. COMMAND is rl, sft or tinker."""
    return load_config(path, _get_config_class(command), overrides)


def keys_of_command(command: str) -> list[str]:
    """Return the dotted keys of a ``gptoss COMMAND`` configuration. COMMAND is rl, sft or tinker."""
    return list(known_keys(_get_config_class(command)))


def _get_config_class(command: str) -> type[RunConfig]:
    kinds: dict[str, type[RunConfig]] = {
        kind.command: kind for kind in (RlConfig, SftConfig, TinkerConfig)
    }
    return kinds[command]


def _insert_named_section(path: Path, tree: Any, key: str, changes: list[str]) -> list[str]:
    """Insert the file that ``key`` names, in the YAML tree or in its last override, into ``tree``.

    Returns:
        The overrides without those of ``key`` itself. Overrides below ``key`` are kept.
    """
    prefix = f"{key}="
    names = [change.removeprefix(prefix) for change in changes if change.startswith(prefix)]
    # The last override wins, as in OmegaConf.
    name = names[-1] if names else tree.get(key)
    if isinstance(name, str):
        _, tree[key] = _named_section(path, key, name)
    return [change for change in changes if not change.startswith(prefix)]


def _insert_choices(tree: Any, changes: list[str]) -> list[str]:
    """Insert the type of each of CHOICES, from the YAML tree or its last override, into ``tree``.

    Returns:
        The overrides without those of a type. Overrides below a section are kept.
    """
    changes = [part for change in changes for part in _split_at_choice(change)]
    for key in CHOICES:
        section = as_section(_plain(OmegaConf.select(tree, key)))
        is_chosen = section is not None
        others = []
        for change in changes:
            name = change.partition("=")[0]
            # ``policy_loss=NAME`` and ``policy_loss.type=NAME`` both set the type.
            if name not in (key, f"{key}.type"):
                others.append(change)
                continue

            is_chosen = True
            # from_dotlist parses the value as YAML, so ``{type: ppo, ...}`` becomes a mapping.
            value = as_section(_plain(OmegaConf.select(OmegaConf.from_dotlist([change]), name)))
            # An override of the type with the same type keeps the other keys of the section.
            # Another type replaces the section, because losses have different bounds.
            keeps_type = isinstance(section, dict) and section.get("type") == _read_type(value)
            if name == key or not keeps_type:
                section = value
        changes = others
        if is_chosen:
            # A merge would keep keys of the other type, which the new type rejects.
            OmegaConf.update(tree, key, section, merge=False, force_add=True)
    return changes


def _split_at_choice(change: str) -> list[str]:
    """Return an override, with one of CHOICES inside its mapping as a separate override."""
    name = change.partition("=")[0]
    key = next((key for key in CHOICES if key.startswith(f"{name}.")), None)
    if key is None:
        return [change]
    section: Any = OmegaConf.select(OmegaConf.from_dotlist([change]), name)
    if not OmegaConf.is_dict(section):
        return [change]
    *sections, last = key.removeprefix(f"{name}.").split(".")
    parent: Any = OmegaConf.select(section, ".".join(sections)) if sections else section
    if not OmegaConf.is_dict(parent) or last not in parent:
        return [change]
    # JSON is YAML, too.
    chosen = json.dumps(_plain(parent.pop(last)))
    return [f"{name}={json.dumps(_plain(section))}", f"{key}={chosen}"]


def _plain(value: Any) -> Any:
    """Return a value of OmegaConf as a plain Python value."""
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


def _read_type(section: Any) -> Any:
    return section.get("type") if isinstance(section, dict) else None


def _named_section(path: Path, key: str, name: str) -> tuple[Path, Any]:
    """Return the file that ``key: NAME`` in the configuration ``path`` refers to, and its values.

    Raises:
        ConfigError: the file has a wrong key, or the name is unknown. The message names file and
            key, or the known names.
    """
    file = find_section(path, key, name)
    if file is not None:
        return file, OmegaConf.to_container(read_yaml(file))
    # Names come first, so that a directory called ``tiny`` does not hide the shipped model.
    if key == "model" and Path(name).exists():
        return _hf_section(path, Path(name))

    known = ", ".join(section_names(path, key))
    other = ". No Hugging Face directory or config.json has this path" if key == "model" else ""
    raise ConfigError(
        f"{path}: {key}: {name}.yaml is neither in {path.parent.parent / key} nor among the "
        f"shipped ones: {known}{other}"
    )


def _hf_section(path: Path, source: Path) -> tuple[Path, Any]:
    """Return the ``config.json`` of a Hugging Face model, and its architecture as ``model``."""
    try:
        model = read_hf_config(source)
    except (ValueError, OSError) as error:
        raise ConfigError(f"{path}: model: {error}") from None
    file = source / "config.json" if source.is_dir() else source
    # Leave defaults out, so that ``value_origins`` does not attribute them to config.json.
    return file, model.model_dump(mode="json", exclude_unset=True)


def validated[Model: StrictModel](path: Path, kind: type[Model], raw: Any) -> Model:
    """Return ``raw`` from ``path`` as ``kind``. Raise ConfigError that names file and keys."""
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        # For a file of the other command, one sentence is better than a list of unknown keys.
        _reject_other_kind(path, kind, error)
        listed = ""
        for mistake in error.errors():
            key = _format_error_key(mistake)
            # Messages about several sections begin with their keys.
            listed += f"\n  {key}{': ' if key else ''}{_explain(mistake, kind)}"
        raise ConfigError(f"{path}: the configuration is invalid:{listed}") from None


def _reject_other_kind(path: Path, kind: type[StrictModel], error: ValidationError) -> None:
    """Raise ConfigError if keys that ``kind`` does not have belong to the other command."""
    # Only top-level keys differ between the two kinds. A typo in a section is not evidence.
    unknown = []
    for mistake in error.errors():
        if mistake["type"] == "extra_forbidden" and len(mistake["loc"]) == 1:
            unknown.append(str(mistake["loc"][0]))

    for this, other in ((RlConfig, SftConfig), (SftConfig, RlConfig)):
        keys_of_other = [key for key in unknown if key in other.model_fields]
        if kind is not this or not keys_of_other:
            continue
        message = (
            f"{path} is a configuration of `gptoss {other.command}` (it has "
            f"{', '.join(keys_of_other)}), not of `gptoss {this.command}`"
        )
        if this is RlConfig:
            message += (
                ". `gptoss plan`, `gptoss config` and `gptoss launch` accept it with --sft. For "
                "`gptoss eval` name a configuration of configs/rl, and add --weights RUN/export"
            )
        raise ConfigError(message) from None


def dump_config(config: StrictModel) -> str:
    """Return YAML of a configuration, including defaults. ``load_config`` reads it."""
    # JSON mode turns paths and tuples into types that YAML has.
    return OmegaConf.to_yaml(OmegaConf.create(config.model_dump(mode="json")))


def read_yaml(path: Path) -> Any:
    """Read the mapping in a YAML file. Raises ConfigError naming the file."""
    try:
        tree = OmegaConf.load(path)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a directory. Name the YAML file.") from None
    except RecursionError:
        raise ConfigError(
            f"{path}: the YAML has too many nested levels to be parsed. Remove levels"
        ) from None
    except (YAMLError, OSError, ValueError) as error:
        raise ConfigError(f"{path}: not a YAML file that can be read ({error})") from None
    if not OmegaConf.is_dict(tree):
        raise ConfigError(
            f"{path}: the file contains no `key: value` lines at its top level. Name a configuration"
        )
    return tree


def _format_error_key(error: Any) -> str:
    """Return the key of an error, without pydantic's tags of unions. Empty for the top level."""
    parts = [str(part) for part in error["loc"]]
    return ".".join(part for part in parts if not part.startswith(TAG))


def _explain(error: Any, kind: type[StrictModel]) -> str:
    """Return the fault of a value, with the value unless it is a section."""
    if error["type"] == "extra_forbidden":
        return f"unknown key{similar_keys(_format_error_key(error), kind)}"
    if error["type"] == "union_tag_invalid":
        known = error["ctx"]["expected_tags"].replace(TAG, "").replace("'", "")
        return f"unknown type {error['input'].get('type')!r}. Choose one of {known}"
    # pydantic adds this prefix to the message of a ValueError in a validator.
    message = error["msg"].removeprefix("Value error, ")
    if isinstance(error["input"], dict | list):
        return message
    return f"{message} (got {error['input']!r})"
