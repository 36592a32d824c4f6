"""Facts of a run's configuration for the list of runs, and differences between configurations.

A run directory may hold any YAML, so values of unexpected types are left out.
"""

from collections.abc import Mapping, Sequence
from typing import Any

NAMING_KEYS = ("name", "output_dir")
"""Keys that differ between any two runs."""


def describe_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return kind ("rl", "sft" or ""), tags, model and data of a run, for search and groups."""
    kind = "rl" if "algorithm" in config else "sft" if "sequences_per_step" in config else ""
    model = _section(config, "model")
    layers, hidden = model.get("num_layers"), model.get("hidden_size")
    data = _section(config, "data") if config.get("data") else _section(config, "tasks")
    tags = _section(config, "tracking").get("tags")
    return {
        "kind": kind,
        "tags": [str(tag) for tag in tags] if isinstance(tags, list) else [],
        "model": f"{model.get('model_type')} {layers}x{hidden}" if layers and hidden else "",
        "data": ", ".join(sorted(map(str, _section(data, "sources")))),
    }


def planned_steps(config: Mapping[str, Any]) -> int | None:
    """Return ``training.steps``, None if it is unknown."""
    steps = _section(config, "training").get("steps")
    return steps if isinstance(steps, int) else None


def is_on_policy(config: Mapping[str, Any]) -> bool:
    """Return True if a run trains on each token once, with the weights that sampled it."""
    algorithm = _section(config, "algorithm")
    return (
        algorithm.get("mini_batches", 1) == 1
        and algorithm.get("max_staleness", 0) == 0
        and algorithm.get("old_log_probs", "auto") in ("auto", "detach")
    )


def compare_configs(configs: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """Return the keys whose values differ.

    Args:
        configs: {dotted key: value as text} of each run.

    Returns:
        "rows" with "key" and "values", None for a missing key; and "equal", the number of keys
        with the same value in all runs.
    """
    # Keys keep the order of the file, in which related keys are neighbors.
    keys = [key for key in dict.fromkeys(key for config in configs for key in config)]
    rows = []
    for key in keys:
        values = [config.get(key) for config in configs]
        if len(set(values)) > 1 and key not in NAMING_KEYS:
            rows.append({"key": key, "values": values})
    return {"rows": rows, "equal": len(set(keys) - set(NAMING_KEYS)) - len(rows)}


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    return section if isinstance(section, Mapping) else {}
