"""Compares a run with the configuration for its resume, and refuses impossible changes.

``resume_rules`` lists the effect of every key, and ``inputs`` the files.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_gptoss.checkpoint.directory import LATEST_FILE
from rl_loop.config.errors import ConfigError
from rl_loop.config.every_run import RunConfig
from rl_loop.config.load import dump_config, read_yaml
from rl_loop.config.run import RlConfig, SftConfig
from rl_loop.lifecycle.inputs import (
    TOOL_SERVERS,
    WEIGHTS,
    RunInput,
    data_input_paths,
    from_json,
    read_inputs,
    task_input_paths,
)
from rl_loop.lifecycle.resume_rules import TOKEN_IDS, TOOLS, ResumeEffect, find_rule
from rl_loop.tasks.codec import tokenizer_directory
from rl_loop.tracking.run_directory import RunDirectory, atomic_write_text, read_json

LOCATION = ("name", "output_dir")
"""Keys of the run's location, which is correct because the run was found."""


@dataclass(frozen=True)
class ConfigChange:
    """One setting with another value than before. None is an absent value."""

    key: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key}: {_shown(self.before)} -> {_shown(self.now)}"


def input_paths(config: RunConfig) -> dict[str, str]:
    """Return the paths of a configuration that lead to inputs, by key."""
    paths: dict[str, Any] = {
        "initial_weights": config.initial_weights,
        "initial_adapter": config.initial_adapter,
    }
    # Other vocabularies depend on no tokenizer of the weights.
    if config.vocabulary == "tokenizer":
        paths["tokenizer"] = tokenizer_directory(config.tokenizer_source)
    paths |= task_input_paths(config.tasks) | config.teacher_paths
    if isinstance(config, SftConfig):
        paths |= data_input_paths("data", config.data)
    if isinstance(config, RlConfig):
        paths |= data_input_paths("vocabulary_data", config.vocabulary_data)
    return {key: str(path) for key, path in paths.items() if path is not None}


def read_run_inputs(config: RunConfig) -> dict[str, RunInput]:
    """Return the inputs of a run by configuration key. Raises StartError."""
    return read_inputs(input_paths(config))


def changes_since(
    run: RunDirectory, config: RunConfig, inputs: Mapping[str, RunInput] | None = None
) -> list[ConfigChange]:
    """Return the differences between ``config`` and the configuration of ``run``.

    Args:
        run: the run to resume.
        config: the configuration to resume it with.
        inputs: inputs of ``config``. None to read them.

    Raises:
        ConfigError: naming keys and both values, if a key or the content of a file differs that
            cannot change, or if the run is of another kind.
    """
    if not run.config.exists():
        return []

    before = _stored_config(run, type(config))
    changes = differences(before, config.model_dump(mode="json"))
    changes = [change for change in changes if change.key not in LOCATION]
    contents = _changes_of_content(run, read_run_inputs(config) if inputs is None else inputs)

    # All rejected keys are reported at once, so that one attempt shows all mistakes.
    rejected: list[ConfigChange] = []
    reasons: list[str] = []
    for change in changes:
        # Data may move if its content stays.
        # A path is only a name of the content, which was compared above.
        has_same_content = change.key in contents and contents[change.key] is None
        reason = None if has_same_content else _rejection_reason(change, before, config, run)
        if reason is None:
            continue
        rejected.append(change)
        if reason not in reasons:
            reasons.append(reason)
    if rejected:
        listed = ", ".join(str(change) for change in rejected)
        raise ConfigError(
            f"--resume cannot change {listed} ({'; '.join(reasons)}). Keep the values in "
            f"{run.config}, or start another run from these weights: name=ANOTHER "
            f"{_restart_override(run, before, rejected)}"
        )

    # An unchanged path may lead to other content, so check every input, not only changed keys.
    for key, content in contents.items():
        if content is not None:
            _reject_changed_content(key, content, before, config, run)
    return changes


def _changes_of_content(
    run: RunDirectory, inputs: Mapping[str, RunInput]
) -> dict[str, ConfigChange | None]:
    """Compare inputs with those that the run began with.

    Returns, for each key that both have, how the content changed. None if it did not.
    """
    # The file is written after all parts are ready, so no step has been taken without it.
    if not run.inputs.exists():
        return {}
    recorded = from_json(read_json(run.inputs))
    changes: dict[str, ConfigChange | None] = {}
    for key, now in inputs.items():
        before = recorded.get(key)
        if before is not None:
            changes[key] = None if now.digest == before.digest else ConfigChange(key, before, now)
    return changes


def _reject_changed_content(
    key: str, change: ConfigChange, before: dict[str, Any], config: RunConfig, run: RunDirectory
) -> None:
    """Raise ConfigError if a run cannot continue with other content of a file."""
    if key in WEIGHTS:
        reason = _weights_rejection_reason(key, config, run)
    elif key == "tokenizer":
        reason = TOKEN_IDS
    elif f".{TOOL_SERVERS}." in key:
        reason = TOOLS
    else:
        reason = find_rule(key, _samples(config)).reason
    if reason is None:
        return

    remedy = "Restore the earlier content"
    old: RunInput = change.before
    if old.path != change.now.path and os.path.exists(old.path):
        remedy = f"Set {key}={old.path}"
    raise ConfigError(
        f"{key}: the content of {change.now.path} differs from the content at the start of the "
        f"run ({old.path} with digest {old.digest}, now {change.now.digest}), and --resume "
        f"cannot change it: {reason}. {remedy}, or start another run from these weights: "
        f"name=ANOTHER {_restart_override(run, before, [change])}"
    )


def differences(before: Any, now: Any, key: str = "") -> list[ConfigChange]:
    """Compare two configurations as JSON, leaf by leaf. Paths to the same file do not differ.

    Args:
        before: the earlier configuration.
        now: the present one.
        key: key of both sections. Empty at the top.
    """
    if isinstance(before, dict) and isinstance(now, dict):
        changes: list[ConfigChange] = []
        for name in before | now:
            key_below = f"{key}.{name}" if key else name
            changes += differences(before.get(name), now.get(name), key_below)
        return changes

    if before == now or _is_same_file(before, now):
        return []
    return [ConfigChange(key, before, now)]


def write_config(
    run: RunDirectory, config: RunConfig, changes: Sequence[ConfigChange], step: int
) -> None:
    """Write config.yaml as the run continues with it.

    Comments on top list the changes and their steps.
    """
    history = []
    if run.config.exists():
        history = [line for line in run.config.read_text().splitlines() if line.startswith("# ")]
    if changes:
        listed = "; ".join(str(change) for change in changes)
        history.append(f"# from step {step + 1} on: {listed}")

    atomic_write_text(run.config, "".join(f"{line}\n" for line in history) + dump_config(config))


def _stored_config(run: RunDirectory, kind: type[RunConfig]) -> dict[str, Any]:
    """Read the configuration of a run. Settings that are newer than the run get their defaults."""
    from omegaconf import OmegaConf

    raw: Any = OmegaConf.to_container(read_yaml(run.config))
    # Every stored configuration of `gptoss rl` has this section, and no other one.
    command = "rl" if "algorithm" in raw else "sft"
    if command != kind.command:
        raise ConfigError(
            f"{run.path} is a run of `gptoss {command}`, so `gptoss {kind.command}` cannot "
            f"continue it. Use `gptoss {command}`, or another name"
        )

    try:
        return kind.model_validate(raw).model_dump(mode="json")
    except ValueError:
        # Written by another version of the code, so compare its values unmodified.
        return raw


def _rejection_reason(
    change: ConfigChange, before: dict[str, Any], config: RunConfig, run: RunDirectory
) -> str | None:
    """Return why a key cannot change. None if it can."""
    rule = find_rule(change.key, _samples(config))
    if rule.effect is ResumeEffect.REJECTED:
        return rule.reason

    # With adapters the base is frozen. Without them the trained experts have this format.
    if change.key == "quantization" and config.adapter is None:
        return (
            "the policy was trained with the other expert format, so curves would not be comparable"
        )

    if change.key in ("parallel.expert", "parallel.tensor"):
        parallel = before.get("parallel", {})
        was_split = parallel.get("expert", 1) > 1 or parallel.get("tensor", 1) > 1
        is_split = config.parallel.expert > 1 or config.parallel.tensor > 1
        if was_split != is_split:
            return "the optimizer differs with and without expert or tensor parallelism"

    if change.key == "training.steps":
        # The last evaluation would call weights of later steps by an earlier one.
        done = _finished_steps(run)
        if done > config.training.steps:
            return f"the newest checkpoint already has {done} steps"

    if change.key in WEIGHTS:
        return _weights_rejection_reason(change.key, config, run)
    return None


def _finished_steps(run: RunDirectory) -> int:
    """Return the steps of the newest checkpoint. 0 without one."""
    latest = run.checkpoints / LATEST_FILE
    if not latest.exists():
        return 0
    # The file names a directory such as step_000010. A damaged one is reported when it is loaded.
    number = latest.read_bytes().decode(errors="replace").strip().rpartition("_")[2]
    return int(number) if number.isdecimal() else 0


def _samples(config: RunConfig) -> bool:
    """Return True if the run samples episodes."""
    return isinstance(config, RlConfig)


def _weights_rejection_reason(key: str, config: RunConfig, run: RunDirectory) -> str | None:
    """Return why a run cannot continue with other initial weights. None if it can."""
    if not (run.checkpoints / LATEST_FILE).exists():
        return "no checkpoint exists yet, so one run would have begun with two models"
    # The base of adapters may have any path and format: the checkpoint has a digest of its values.
    has_reference = isinstance(config, RlConfig) and config.algorithm.kl is not None
    if has_reference and (config.adapter is None or key == "initial_adapter"):
        return "they are the reference policy of algorithm.kl"
    return None


def _restart_override(
    run: RunDirectory, before: dict[str, Any], rejected: list[ConfigChange]
) -> str:
    """Return the override with which another run begins with this one's weights."""
    if before.get("adapter") is None:
        return f"initial_weights={run.path}"
    # Its checkpoints have no base. Adapters with other settings begin on the merged model.
    if not any(change.key.split(".")[0] in ("adapter", "model", "dtype") for change in rejected):
        return f"initial_adapter={run.path}"
    if (run.export / "config.json").exists():
        return f"initial_weights={run.export}"
    return "initial_weights=MERGED (gptoss convert merge BASE CHECKPOINT MERGED writes it)"


def _is_same_file(before: Any, now: Any) -> bool:
    if not isinstance(before, str) or not isinstance(now, str) or not Path(now).exists():
        return False
    return os.path.realpath(before) == os.path.realpath(now)


def _shown(value: Any) -> str:
    """Write a value as in YAML, on one line."""
    if value is None:
        return "null"
    if isinstance(value, RunInput):
        return f"{value.path} (digest {value.digest})"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)
