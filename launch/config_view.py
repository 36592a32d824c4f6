"""Output of ``gptoss config``: every value of a resolved configuration, and its origin."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rl_loop.config.load import load_run_config, value_origins

DEFAULT = "default"


def config_lines(
    path: Path,
    command: str,
    overrides: list[str] | None = None,
    *,
    changed_only: bool = False,
) -> list[str]:
    """Return ``key: value  # origin`` of every value, in the order of the reference.

    Args:
        path: see ``load_run_config``.
        command: rl or sft.
        overrides: see ``load_run_config``.
        changed_only: whether to leave out defaults.

    Raises:
        ConfigError: if the configuration is not valid.
    """
    config = load_run_config(path, command, overrides)
    # After loading, because origins are defined for a valid configuration only.
    origins = value_origins(path, type(config), overrides)

    entries = []
    for key, value in leaf_values(config.model_dump(mode="json")):
        origin = _find_origin(key, origins)
        if origin != DEFAULT or not changed_only:
            entries.append((f"{key}: {value_text(value)}", origin))
    # Long values, such as prompts, must not push all origins to the right.
    width = min(max((len(text) for text, _ in entries), default=0), 60)
    return [f"{text:{width}}  # {origin}" for text, origin in entries]


def leaf_values(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of every leaf in nested mappings."""
    for key, value in tree.items():
        # An empty mapping has no leaves, so it is a value.
        if isinstance(value, dict) and value:
            yield from leaf_values(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _find_origin(key: str, origins: dict[str, str]) -> str:
    """Return the origin of ``key`` or its longest known prefix."""
    # An override may set a whole section at once.
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        origin = origins.get(".".join(parts[:length]))
        if origin is not None:
            return origin
    return DEFAULT


def value_text(value: Any) -> str:
    """Format a value as YAML and the command line accept it."""
    if isinstance(value, str):
        return value
    # YAML reads JSON, and KEY=VALUE of the command line is read as YAML.
    return json.dumps(value, ensure_ascii=False)
