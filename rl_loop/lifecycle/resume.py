"""Compares the configuration of a run with the one that is to resume it, and refuses what cannot
change."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_loop.config.errors import ConfigError
from rl_loop.config.load import dump_config, read_yaml
from rl_loop.config.run import RlConfig, RunConfig
from rl_loop.tracking.run_directory import RunDirectory, atomic_write_text

LOCATION = ("name", "output_dir")
"""Keys that say where the run is; they may differ, because a run that was found is at the right
place."""

SHAPE = "the checkpoint's weights have the shapes of the other model"
DATA = "data is addressed by position: some tasks would be trained on twice and others never"
STATE = "the checkpoint's optimizer state does not fit"
ADAPTER = "the checkpoint holds what those settings train, and the optimizer's state for it"

FIXED = {
    "model": SHAPE,
    "adapter": ADAPTER,
    "quantization": "the policy has learned with the other experts, and the curve would say nothing of it",
    "dtype": STATE,
    "vocabulary": "the policy has learned the other token ids",
    "vocabulary_data": "the policy has learned the other token ids",
    "tokenizer": "the policy has learned the other token ids",
    "prompt": "the policy has learned with the other system message, and the curve would say nothing of it",
    "chatml": "the policy has learned with the other system message, and the curve would say nothing of it",
    "seed": DATA,
    "tasks": DATA,
    "data": DATA,
    "demonstrations": DATA,
    "sequences_per_step": DATA,
    "rollout.tasks_per_step": DATA,
    "algorithm.dynamic_sampling_rounds": DATA,
    "algorithm.order": DATA,
    "ablation.freeze": STATE,
    "optimizer.moment_dtype": STATE,
    "algorithm.critic.optimizer.moment_dtype": STATE,
}
"""Keys, with everything below them, that cannot change between two steps of one run, and why. All
others can: the learning rate and its schedule, the number of steps, limits, checkpoints, rewards,
the loss, engines, tracking."""

CHANGEABLE = (
    "data.max_refused_share",
    "data.validate_every",
    "data.workers",
)
"""Keys below those of FIXED that can change."""


@dataclass(frozen=True)
class Change:
    """One setting that is no longer what it was; None where a value is absent."""

    key: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key}: {_shown(self.before)} -> {_shown(self.now)}"


def changes_since(run: RunDirectory, config: RunConfig) -> list[Change]:
    """Return how ``config`` differs from the configuration that ``run`` has.

    Raises ConfigError, naming keys and both values, if something differs that cannot change, and
    if it is a run of another kind."""
    if not run.config.exists():
        return []

    before = _stored_config(run, type(config))
    changes = differences(before, config.model_dump(mode="json"))
    changes = [change for change in changes if change.key not in LOCATION]

    refused: list[Change] = []
    reasons: list[str] = []
    for change in changes:
        reason = _refusal(change, before, config, run)
        if reason is None:
            continue
        refused.append(change)
        if reason not in reasons:
            reasons.append(reason)
    if refused:
        listed = ", ".join(str(change) for change in refused)
        raise ConfigError(
            f"--resume cannot change {listed} ({'; '.join(reasons)}). Keep what {run.config} says, or start another "
            f"run from these weights: name=ANOTHER {_beginning_from(run, before, refused)}"
        )
    return changes


def differences(before: Any, now: Any, key: str = "") -> list[Change]:
    """Compare two configurations as JSON, leaf by leaf. Paths that lead to the same file do not
    differ.

    ``key``: where in the configuration both are; empty at the top."""
    if isinstance(before, dict) and isinstance(now, dict):
        changes: list[Change] = []
        for name in before | now:
            key_below = f"{key}.{name}" if key else name
            changes += differences(before.get(name), now.get(name), key_below)
        return changes

    if before == now or _is_same_file(before, now):
        return []
    return [Change(key, before, now)]


def write_config(
    run: RunDirectory, config: RunConfig, changes: Sequence[Change], step: int
) -> None:
    """Write config.yaml as the run goes on with it. Comments on top say what changed, and from
    which step on."""
    history = []
    if run.config.exists():
        history = [line for line in run.config.read_text().splitlines() if line.startswith("# ")]
    if changes:
        listed = "; ".join(str(change) for change in changes)
        history.append(f"# from step {step + 1} on: {listed}")

    atomic_write_text(run.config, "".join(f"{line}\n" for line in history) + dump_config(config))


def _stored_config(run: RunDirectory, kind: type[RunConfig]) -> dict[str, Any]:
    """Read the configuration that a run has, completed with the defaults of settings that are
    newer than it."""
    from omegaconf import OmegaConf

    raw: Any = OmegaConf.to_container(read_yaml(run.config))
    command = "rl" if "algorithm" in raw else "sft"
    if command != kind.command:
        raise ConfigError(
            f"{run.path} is a run of `gptoss {command}`; `gptoss {kind.command}` cannot go on with it"
        )

    try:
        return kind.model_validate(raw).model_dump(mode="json")
    except ValueError:  # of another version of the code: what it had is compared as it stands
        return raw


def _refusal(
    change: Change, before: dict[str, Any], config: RunConfig, run: RunDirectory
) -> str | None:
    """Say why this cannot change; None if it can."""
    if change.key in CHANGEABLE:
        return None
    for key, reason in FIXED.items():
        if key.startswith("rollout.") and not isinstance(config, RlConfig):
            continue  # of a supervised run it is only how it evaluates
        if change.key == key or change.key.startswith(f"{key}."):
            return reason

    if change.key == "algorithm.critic" and None in (change.before, change.now):
        return "a critic learns from the first step on"

    if change.key in ("parallel.expert", "parallel.tensor"):
        parallel = before.get("parallel", {})
        was_split = parallel.get("expert", 1) > 1 or parallel.get("tensor", 1) > 1
        is_split = config.parallel.expert > 1 or config.parallel.tensor > 1
        if was_split != is_split:
            return "with expert or tensor parallelism the optimizer is another one than without"

    if change.key in ("initial_weights", "initial_adapter"):
        if not (run.checkpoints / "latest").exists():
            return "no checkpoint was saved yet: the curve would begin with one model and go on with the other"
        # Of adapters they are the base, by whatever path: the checkpoint knows its digest.
        has_reference = isinstance(config, RlConfig) and config.algorithm.kl is not None
        if has_reference and (config.adapter is None or change.key == "initial_adapter"):
            return "they are the reference policy of algorithm.kl"
    return None


def _beginning_from(run: RunDirectory, before: dict[str, Any], refused: list[Change]) -> str:
    """Write the override with which another run begins with this one's weights."""
    if before.get("adapter") is None:
        return f"initial_weights={run.path}"
    # Its checkpoints have no base; adapters with other settings begin on the merged model.
    if not any(change.key.split(".")[0] in ("adapter", "model", "dtype") for change in refused):
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
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)
