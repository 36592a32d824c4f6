"""Combinations that would silently do something else are refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_loop.config.errors import ConfigError
from rl_loop.config.load import load_config
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
    room += ["rollout.max_tokens=8192", "rollout.max_new_tokens_per_turn=2048"]
    config = load_config(TINY, RlConfig, [f"algorithm={path.stem}", "algorithm.gamma=0.99", *room])
    assert config.algorithm.gamma == 0.99


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["advantage=gae"], "advantage gae needs a value model"),
        (["critic.warmup_steps=1"], "a critic is of no use to advantage grpo"),
        (["old_log_probs=rollout"], "a correction would count it twice"),
        (["max_staleness=1", "old_log_probs=detach"], "detach calls stale tokens on-policy"),
        (["max_staleness=1", "correction.weight=none"], "ignores how far the policy has moved"),
        (["max_staleness=2", "dynamic_sampling_rounds=2"], "begun one ahead at most"),
        (["order=ready_first", "dynamic_sampling_rounds=2"], "whose rounds take tasks in order"),
        (["mini_batches=2", "old_log_probs=detach"], "only the first is on-policy"),
        (["old_log_probs=substitute"], "substitute is called detach now"),
        (["advantage=gdpo"], "gdpo needs algorithm.reward_weights"),
        (["routing_replay=R2"], "R2 replays the routes of the forward pass"),
        (["routing_replay=R3"], "set rollout.routed_experts"),
        (["kl.estimator=k1"], "kl.estimator k1 does nothing in the loss"),
        (["correction.off_policy_limit=1e-4"], "which is 1 with old_log_probs detach"),
        (["correction.bounds=[0.5,2]"], "bounds belong to sequence_mis and icepop"),
        (["correction.weight=icepop", "correction.bounds=[2,3]"], "must hold 1"),
        (["policy_loss=gspo", "dual_clip=3"], "dual_clip belongs to policy_loss ppo"),
        (
            ["advantage=gdpo", "reward_weights={correct: 1.0}", "kl={place: reward}"],
            "would undo kl.coefficient",
        ),
        (
            ["advantage=reinforce", "dynamic_sampling_rounds=2"],
            "drops groups of equal rewards, and advantage reinforce",
        ),
        (
            ["advantage=gae", "critic={}", "dynamic_sampling_rounds=2"],
            "advantage gae learns from them",
        ),
        (["whiten_over=samples"], "whiten_over belongs to whiten_advantages"),
        (
            ["advantage=gae", "critic={}", "whiten_advantages=true", "whiten_over=samples"],
            "one advantage per token: use tokens",
        ),
        (
            ["advantage=gae", "critic={}", "correction.weight=sequence_mis"],
            "must reject for the critic too",
        ),
    ],
)
def test_wrong_combinations_are_refused_with_the_reason(overrides: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_config(TINY, RlConfig, [f"algorithm.{item}" for item in overrides])


def test_a_group_of_one_needs_an_advantage_without_groups() -> None:
    with pytest.raises(ConfigError, match="samples_per_task is 1"):
        load_config(TINY, RlConfig, ["rollout.samples_per_task=1"])
    load_config(TINY, RlConfig, ["rollout.samples_per_task=1", "algorithm=reinforce"])


def test_servers_on_the_trainer_s_gpus_cannot_generate_while_it_learns() -> None:
    overlap = ["algorithm.max_staleness=1", "rollout.engine.type=sglang"]
    assert load_config(TINY, RlConfig, overlap).algorithm.old_log_probs_from == "forward"
    with pytest.raises(ConfigError, match="gives its GPUs to one of them at a time"):
        load_config(
            TINY,
            RlConfig,
            [*overlap, "rollout.engine.colocated=true", "rollout.engine.weight_sync=cuda_ipc"],
        )


def test_a_critic_that_warms_up_for_the_whole_run_is_refused() -> None:
    with pytest.raises(ConfigError, match="leaves none of the 20 steps"):
        load_config(TINY, RlConfig, ["algorithm=ppo", "training.steps=20"])


def test_a_penalty_on_every_length_is_refused() -> None:
    with pytest.raises(ConfigError, match="every episode is punished for its length"):
        load_config(TINY, RlConfig, ["algorithm=dapo"])


def test_an_unknown_algorithm_names_those_there_are() -> None:
    with pytest.raises(ConfigError, match="cispo, dapo"):
        load_config(TINY, RlConfig, ["algorithm=pppo"])
