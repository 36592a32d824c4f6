"""Reads configurations: YAML files, overrides from the command line, and errors that name file and key."""

import re
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from yaml import YAMLError

from megatron_gptoss.config import StrictModel
from rl_loop.config.errors import ConfigError
from rl_loop.config.run import RlConfig, RunConfig, SftConfig
from rl_loop.engines.registry import TAG


def load_config[Config: RunConfig](path: Path, kind: type[Config], overrides: list[str] | None = None) -> Config:
    """Read a YAML file, apply ``key.sub=value`` overrides and validate. Raises ConfigError naming file and keys.
    ``model: NAME`` and ``algorithm: NAME`` stand for NAME.yaml in a folder of that name beside the file's own."""
    tree = read_yaml(path)
    changes = overrides or []
    for item in changes:
        if not re.match("[^=]+=", item):
            raise ConfigError(f"override {item!r}: expected key=value, such as optimizer.lr=1e-6")
    for key in ("model", "algorithm"):
        named = [item.partition("=")[2] for item in changes if item.startswith(f"{key}=")] or [tree.get(key)]
        changes = [item for item in changes if not item.startswith(f"{key}=")]
        if isinstance(named[-1], str):
            file = path.parent.parent / key / f"{named[-1]}.yaml"
            if not file.exists():
                known = ", ".join(sorted(p.stem for p in file.parent.glob("*.yaml"))) or "none"
                raise ConfigError(f"{path}: {key}: there is no {file}; those there: {known}")
            tree[key] = read_yaml(file)
    try:
        raw = OmegaConf.to_container(OmegaConf.merge(tree, OmegaConf.from_dotlist(changes)), resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {error}") from error
    return validated(path, kind, raw)


def validated[Model: StrictModel](path: Path, kind: type[Model], raw: Any) -> Model:
    """``raw``, read from ``path``, as ``kind``. Raises ConfigError naming file and keys."""
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        _refuse_other_kind(path, kind, error)
        lines = [f"  {_key_of(e)}: {_explain(e)}" for e in error.errors()]
        raise ConfigError(f"{path} is not a valid {kind.__name__}:\n" + "\n".join(lines)) from None


def _refuse_other_kind(path: Path, kind: type[StrictModel], error: ValidationError) -> None:
    """Raise ConfigError if the keys that ``kind`` does not know are those of the other kind of run."""
    unknown = [str(e["loc"][0]) for e in error.errors() if e["type"] == "extra_forbidden" and len(e["loc"]) == 1]
    for this, other in ((RlConfig, SftConfig), (SftConfig, RlConfig)):
        own = [key for key in unknown if key in other.model_fields]
        if kind is this and own:
            hint = "; `gptoss plan` and `gptoss launch` take it with --sft" if this is RlConfig else ""
            raise ConfigError(
                f"{path} is a configuration of `gptoss {other.command}` (it has {', '.join(own)}), "
                f"not of `gptoss {this.command}`{hint}"
            ) from None


def dump_config(config: StrictModel) -> str:
    """YAML of the whole configuration, defaults included; ``load_config`` reads it back."""
    return OmegaConf.to_yaml(OmegaConf.create(config.model_dump(mode="json")))


def read_yaml(path: Path) -> Any:
    """The mapping in a YAML file. Raises ConfigError naming the file."""
    try:
        tree = OmegaConf.load(path)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (YAMLError, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {error}") from None
    if not OmegaConf.is_dict(tree):
        raise ConfigError(f"{path}: expected a mapping of keys to values")
    return tree


def _key_of(error: Any) -> str:
    """Name the key that an error is about, without the tags of a union, which only pydantic knows."""
    parts = [str(part) for part in error["loc"]]
    return ".".join(part for part in parts if not part.startswith(TAG)) or "(top level)"


def _explain(error: Any) -> str:
    if error["type"] == "extra_forbidden":
        return "unknown key"
    message = error["msg"].removeprefix("Value error, ")
    value = error["input"]
    return f"{message} (got {value!r})" if not isinstance(value, dict | list) else message
