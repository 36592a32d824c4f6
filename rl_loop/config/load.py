"""Reads configurations: YAML files with overrides from the command line."""

import re
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from yaml import YAMLError

from megatron_gptoss.config import StrictModel
from megatron_gptoss.families.registry import read_hf_config
from rl_loop.algorithms.choices import CHOICES
from rl_loop.config.errors import ConfigError
from rl_loop.config.every_run import RunConfig
from rl_loop.config.overrides import (
    drop_replaced_data,
    insert_choices,
    leaf_keys,
    name_single_sources,
    reject_split_data,
)
from rl_loop.config.run import RlConfig, SftConfig
from rl_loop.config.shipped import find_config, find_section, section_names
from rl_loop.config.suggestions import known_keys, similar_keys, similar_names
from rl_loop.config.tinker import TinkerConfig
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
    overrides = overrides or []
    # OmegaConf would read a word without "=" as a key that is null.
    for override in overrides:
        if not re.match("[^=]+=", override):
            raise ConfigError(
                f"override {override!r} is not of the form key=value, such as optimizer.lr=1e-6"
            )
    # Insert before the other overrides, which may set values of the named file.
    for key in ("model", "algorithm"):
        overrides = _insert_named_section(path, tree, key, overrides)
    # Before the next steps, which compare full keys.
    overrides = name_single_sources(tree, overrides)
    drop_replaced_data(tree, overrides)
    reject_split_data(path, tree, overrides)

    try:
        overrides = insert_choices(tree, overrides)
        merged = OmegaConf.merge(tree, OmegaConf.from_dotlist(overrides))
        # Resolve ``${...}`` here, because pydantic does not know it.
        raw = OmegaConf.to_container(merged, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {error}") from error
    except TypeError:
        # OmegaConf does not report which override it was.
        raise ConfigError(
            f"{path}: one of the overrides {' '.join(overrides)} sets a list where the file has "
            "keys, or keys where the file has a list. Correct the override"
        ) from None
    return validated(path, kind, raw)


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
        {dotted key: the file with the value, or "command line"}. Keys that are missing have
        defaults. A key includes all keys below it.
    """
    path = find_config(path, kind.command)
    # Only the keys matter here, so references in values stay unresolved.
    tree = OmegaConf.to_container(read_yaml(path))
    assert isinstance(tree, dict)
    origins = {key: str(path) for key in leaf_keys(tree)}

    for override in overrides or []:
        key, _, value = override.partition("=")
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
            for name in leaf_keys(section):
                full = f"{key}.{name}"
                choice = next((c for c in CHOICES if full == c or full.startswith(f"{c}.")), None)
                if choice is None:
                    # Values of the run's file and of overrides have precedence over the named file.
                    origins.setdefault(full, str(file))
                elif choice not in chosen:
                    origins.setdefault(f"{choice}.type" if full == choice else full, str(file))
    # A plain name sets the type of a choice. The other values are the defaults of that type.
    return origins | {f"{key}.type": origin for key, origin in chosen.items()}


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


def _insert_named_section(path: Path, tree: Any, key: str, overrides: list[str]) -> list[str]:
    """Insert the values of the file that ``key`` names into ``tree``.

    The last override of ``key`` names the file, or the tree if there is no override.

    Returns:
        The overrides without those of ``key`` itself. Overrides below ``key`` are kept.
    """
    prefix = f"{key}="
    names = [override.removeprefix(prefix) for override in overrides if override.startswith(prefix)]
    # The last override wins, as in OmegaConf.
    name = names[-1] if names else tree.get(key)
    if isinstance(name, str):
        _, tree[key] = _named_section(path, key, name)
    return [override for override in overrides if not override.startswith(prefix)]


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
        raise ConfigError(f"{path} is a directory. Name the YAML file") from None
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
