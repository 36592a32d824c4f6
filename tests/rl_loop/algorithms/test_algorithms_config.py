"""Configuration ``algorithm``: defaults, overrides and rejected combinations."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from launch.config_view import config_lines
from rl_loop.algorithms.config import AlgorithmConfig
from rl_loop.algorithms.registry import ADVANTAGES, POLICY_LOSSES
from rl_loop.config.errors import ConfigError
from rl_loop.config.load import load_config, read_yaml
from rl_loop.config.run import RlConfig

CONFIGS = Path(__file__).parents[3] / "configs"
TINY = CONFIGS / "rl/tiny_retool.yaml"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("algorithm/*.yaml")), ids=lambda p: p.stem)
def test_every_named_algorithm_loads(path: Path) -> None:
    room = [
        "training.steps=30",
        "model.max_length=8192",
        "training.max_tokens_per_micro_batch=8192",
    ]
    room += ["rollout.max_episode_tokens=8192", "rollout.max_sampled_tokens_per_turn=2048"]
    config = load_config(
        TINY, RlConfig, [f"algorithm={path.stem}", "algorithm.entropy_bonus=0.5", *room]
    )
    assert config.algorithm.entropy_bonus == 0.5


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["advantage=gae"], "advantage gae needs a value model"),
        (["critic.warmup_steps=1"], "advantage grpo does not use a critic"),
        (["old_log_probs=rollout"], "a correction would count it twice"),
        (["max_staleness=1", "old_log_probs=detach"], "detach treats stale tokens as on-policy"),
        (["max_staleness=1", "correction.weight=none"], "ignores the change of the policy"),
        (["mini_batches=2", "old_log_probs=detach"], "only the first is on-policy"),
        (["advantage=gdpo"], "gdpo has no reward weights. Set algorithm.advantage.reward_weights"),
        (["routing_replay=R2"], "R2 replays the routes of the forward pass"),
        (["kl.estimator=k1"], "kl.estimator=k1 has no effect in the loss"),
        (["correction.off_policy_limit=1e-4"], "no effect with old_log_probs=detach"),
        (["correction.bounds=[0.5,2]"], "bounds apply only to the weights sequence_mis and icepop"),
        (["correction.weight=icepop", "correction.bounds=[2,3]"], "must contain 1"),
        (["policy_loss=gspo", "policy_loss.dual_clip=3"], "dual_clip: unknown key for this"),
        (
            ["advantage={type: gdpo, reward_weights: {correct: 1.0}}", "kl={apply_to: reward}"],
            "would cancel kl.coefficient",
        ),
        (
            ["advantage=reinforce", "dynamic_sampling_rounds=2"],
            "drops groups of equal rewards, but advantage reinforce",
        ),
        (
            ["advantage=gae", "critic={}", "dynamic_sampling_rounds=2"],
            "advantage gae learns from them",
        ),
        (
            ["advantage=gae", "critic={}", "whiten_advantages=samples"],
            "gae has one per token. Set whiten_advantages=tokens",
        ),
        (
            ["advantage=gae", "critic={}", "correction.weight=sequence_mis"],
            "also applies to the critic",
        ),
    ],
)
def test_wrong_combinations_are_rejected_with_the_reason(overrides: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_config(TINY, RlConfig, [f"algorithm.{item}" for item in overrides])


def test_group_of_one_needs_an_advantage_without_groups() -> None:
    with pytest.raises(ConfigError, match="samples_per_task is 1"):
        load_config(TINY, RlConfig, ["rollout.samples_per_task=1"])
    load_config(TINY, RlConfig, ["rollout.samples_per_task=1", "algorithm=reinforce"])


def test_colocated_servers_with_staleness_are_rejected() -> None:
    overlap = ["algorithm.max_staleness=1", "rollout.engine.type=sglang"]
    assert load_config(TINY, RlConfig, overlap).algorithm.old_log_probs_from == "forward"
    with pytest.raises(ConfigError, match="lets only one of them use the GPUs at a time"):
        load_config(
            TINY,
            RlConfig,
            [*overlap, "rollout.engine.colocated=true", "rollout.engine.weight_sync=cuda_ipc"],
        )


def test_critic_that_warms_up_for_the_whole_run_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"must be less than training.steps \(20\)"):
        load_config(TINY, RlConfig, ["algorithm=ppo", "training.steps=20"])


def test_length_penalty_on_every_length_is_rejected() -> None:
    with pytest.raises(ConfigError, match="would otherwise apply to every episode"):
        load_config(TINY, RlConfig, ["algorithm=dapo"])


def test_unknown_algorithm_is_rejected_with_the_known_names() -> None:
    with pytest.raises(ConfigError, match="cispo, dapo"):
        load_config(TINY, RlConfig, ["algorithm=pppo"])


ROOM = [
    "model.max_length=8192",
    "training.max_tokens_per_micro_batch=8192",
    "rollout.max_episode_tokens=8192",
    "rollout.max_sampled_tokens_per_turn=2048",
]
"""Limits large enough for the longest ``overlong_buffer_tokens`` of the named algorithms."""


def algorithm_with(*overrides: str) -> AlgorithmConfig:
    return load_config(TINY, RlConfig, [*ROOM, "training.steps=30", *overrides]).algorithm


def chosen_keys(name: str, section: str) -> set[str]:
    """Return the keys that the file of a named algorithm sets in a section."""
    value = read_yaml(CONFIGS / f"algorithm/{name}.yaml").get(section)
    return {str(key) for key in value} - {"type"} if isinstance(value, Mapping) else set()


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("algorithm/*.yaml")), ids=lambda p: p.stem)
@pytest.mark.parametrize("section", ["policy_loss", "advantage"])
def test_printed_defaults_do_not_depend_on_the_chosen_spelling(path: Path, section: str) -> None:
    """A loss chosen by its key has the defaults of the named algorithm with that loss.

    Only keys in the algorithm's file differ. Otherwise gspo would run with the bounds of ppo.
    """
    named = printed(getattr(algorithm_with(f"algorithm={path.stem}"), section))
    own = chosen_keys(path.stem, section)
    given = "".join(f", {key}: {named[key]}" for key in own & {"reward_weights"})
    needed = ["algorithm.dynamic_sampling_rounds=1"] if section == "advantage" else []
    needed += ["algorithm.critic={}"] if named["type"] == "gae" else []
    if named["type"] == "none":
        # dapo's penalty and rounds need rewards.
        needed += ["algorithm.distillation.teacher=x", "algorithm.overlong_buffer_tokens=null"]
    for choice in (
        f"algorithm.{section}={{type: {named['type']}{given}}}",
        f"algorithm.{section}.type={named['type']}",
        f"algorithm.{section}={named['type']}",
    ):
        if given and "{" not in choice:
            continue  # gdpo has no default weights
        for base in ([], ["algorithm=dapo"], ["algorithm=grpo"]):
            alone = printed(getattr(algorithm_with(*base, choice, *needed), section))
            if named["type"] == "ppo" and base == ["algorithm=dapo"] and ".type=" in choice:
                continue  # the type does not change, so the bound of the file stays
            assert alone.keys() == named.keys()
            differing = {key for key in named if alone[key] != named[key]}
            assert differing <= own, (choice, base)


def printed(section: object) -> dict[str, Any]:
    """Return a section as ``gptoss config`` prints it."""
    return TypeAdapter(Any).dump_python(section, mode="json")


def test_every_loss_and_advantage_is_in_a_named_algorithm() -> None:
    """Printed defaults are therefore tested for all names of the registries."""
    algorithms = [algorithm_with(f"algorithm={p.stem}") for p in CONFIGS.glob("algorithm/*.yaml")]
    assert {algorithm.policy_loss.type for algorithm in algorithms} == set(POLICY_LOSSES)
    assert {algorithm.advantage.type for algorithm in algorithms} == set(ADVANTAGES)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_loss_functions_have_no_default_arguments(name: str) -> None:
    """A second default could differ from the configuration's. None disables a parameter."""
    parameters = inspect.signature(POLICY_LOSSES.resolve(name)).parameters.values()
    assert all(p.default in (p.empty, None) for p in parameters)


def test_override_of_one_bound_keeps_type_and_other_bounds() -> None:
    loss = algorithm_with("algorithm=gspo", "algorithm.policy_loss.clip_low=0.1").policy_loss
    assert printed(loss) == {"type": "gspo", "clip_low": 0.1, "clip_high": 4e-4}


def test_another_loss_type_drops_bounds_of_the_named_algorithm() -> None:
    """dapo sets clip_high for ppo, which does not suit the ratio of a sequence."""
    loss = algorithm_with("algorithm=dapo", "algorithm.policy_loss.type=gspo").policy_loss
    assert printed(loss) == {"type": "gspo", "clip_low": 3e-4, "clip_high": 4e-4}


@pytest.mark.parametrize("value", ["null", "3", "[ppo]"])
def test_policy_loss_that_is_not_a_section_is_rejected(value: str) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.policy_loss"):
        algorithm_with(f"algorithm.policy_loss={value}")


def test_printed_origins_name_the_file_or_the_command_line() -> None:
    lines = config_lines(TINY, "rl", ["algorithm=gspo", "algorithm.advantage=dr_grpo"])
    shown = dict(line.split("  # ") for line in lines)
    origins = {text.split(":")[0]: (text.strip(), origin) for text, origin in shown.items()}
    assert origins["algorithm.policy_loss.type"][0].endswith("gspo")
    assert origins["algorithm.policy_loss.type"][1].endswith("algorithm/gspo.yaml")
    assert origins["algorithm.policy_loss.clip_low"] == (
        "algorithm.policy_loss.clip_low: 0.0003",
        "default",
    )
    assert origins["algorithm.advantage.type"][1] == "command line"
