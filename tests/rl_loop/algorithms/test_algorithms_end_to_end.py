"""Every named algorithm through the real loop in one process, with engine and sandbox."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_loop.config.run import RlConfig
from rl_loop.data.samples import OffPolicyError, to_samples
from rl_loop.tracking.run_directory import is_training_step, read_json_lines, read_training_steps
from tests.support.in_process import LocalRollouts, local_loop
from tests.support.rl_loop.small_config import CONFIGS, NOTHING_ENDS, config
from tests.support.waiting import PATIENCE_SECONDS, wait_until_async

STEPS = 6
ALGORITHMS: dict[str, list[str]] = {
    "ppo": ["algorithm.critic.warmup_steps=2", "algorithm.critic.lr=1e-3"],
    "grpo": ["algorithm.kl.coefficient=0.01", "algorithm.correction.weight=sequence_mis"],
    "dr_grpo": ["algorithm.correction.weight=icepop", "algorithm.correction.veto=1e-4"],
    "dapo": ["algorithm.overlong_buffer_tokens=100", "algorithm.mini_batches=2"],
    "rloo": [
        "algorithm.kl.coefficient=0.01",
        "algorithm.kl.apply_to=reward",
        "algorithm.kl.estimator=k1",
    ],
    "gspo": ["algorithm.mini_batches=2", "algorithm.routing_replay=R2"],
    "cispo": ["algorithm.routing_replay=R3", "ablation.engine_noise=0.02", "canary_tolerance=9"],
    "reinforce": [
        "rollout.samples_per_task=1",
        "rollout.tasks_per_step=8",
        "algorithm.entropy_bonus=0.01",
    ],
    "gdpo": ["algorithm.old_log_probs=rollout", "algorithm.correction.weight=none"],
}


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRollouts]:
    shared = LocalRollouts(config(tmp_path_factory.mktemp("rollouts")))
    yield shared
    shared.close()


def train(
    settings: RlConfig, rollouts: LocalRollouts | None, resume: bool = False
) -> list[dict[str, Any]]:
    with local_loop(settings, rollouts, resume) as loop:
        loop.train()
    return read_training_steps(settings.directory / "metrics.jsonl")


def test_every_named_algorithm_is_tested() -> None:
    # test_on_policy_distillation.py trains with a teacher.
    assert {*ALGORITHMS, "distillation"} == {p.stem for p in CONFIGS.glob("algorithm/*.yaml")}


# These differ from other algorithms only in options whose formulas test_algorithms.py covers.
SLOW = ("dr_grpo", "rloo", "reinforce", "gspo")
TRAINED = [
    pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in ALGORITHMS
]


@pytest.mark.parametrize("name", TRAINED)
def test_every_algorithm_trains_without_nan(
    name: str, tmp_path: Path, rollouts: LocalRollouts
) -> None:
    options = [f"algorithm={name}", *ALGORITHMS[name], f"training.steps={STEPS}"]
    settings = config(tmp_path, *options)
    steps = train(settings, rollouts)
    assert len(steps) == STEPS
    for step in steps:
        assert all(value is not None and math.isfinite(value) for value in step.values())
        assert step.get("skipped_updates", 0) == 0
    trained = [step for step in steps if "loss" in step]
    assert len(trained) == (STEPS - 2 if name == "ppo" else STEPS)
    assert sum(step["grad_norm"] > 0 for step in trained) > STEPS / 2
    if settings.algorithm.old_log_probs_from == "detach":
        assert {step["clip_fraction"] for step in trained} == {0}
        assert {step["ratio/mean"] for step in trained} == {1}
        assert {step["ratio/deviation_max"] for step in trained} == {0}
    else:
        assert max(step["ratio/deviation_max"] for step in trained) > 0
    if name == "ppo":
        assert steps[-1]["critic/loss"] < steps[0]["critic/loss"]
    if name == "cispo":
        assert 0.5 < trained[0]["routing/agreement"] < 1
        assert trained[0]["mismatch/kl_k3"] < trained[0]["routing/kl_k3_without_replay"]


EXTRA = {"dapo": ["algorithm.overlong_buffer_tokens=2"], "ppo": ["algorithm.critic.warmup_steps=1"]}


@pytest.mark.parametrize("name", ["grpo", "dapo", "ppo", "gdpo"])
def test_step_with_all_tokens_masked_changes_no_weight(name: str, tmp_path: Path) -> None:
    options = [
        f"algorithm={name}",
        "algorithm.mini_batches=2",
        "rollout.truncated_episodes=mask",
        *NOTHING_ENDS,
    ]
    options += ["algorithm.old_log_probs=forward", *EXTRA.get(name, [])]
    with local_loop(config(tmp_path, *options)) as loop:
        before = loop.trainer.weights()
        loop.train()
        after = loop.trainer.weights()
        steps = read_training_steps(loop.recorder.run.metrics)
    assert all(torch.equal(before[tensor], after[tensor]) for tensor in before)
    assert [step["skipped_updates"] for step in steps] == [2, 2]
    for step in steps:
        assert all(value is not None and math.isfinite(value) for value in step.values())
        assert not {"loss", "grad_norm", "critic/loss"} & set(step)
    train(config(tmp_path, *options, "training.steps=3"), None, resume=True)


@pytest.mark.parametrize("name", ["grpo", "dapo", "gdpo"])
def test_groups_of_equal_rewards_have_zero_gradient(name: str, tmp_path: Path) -> None:
    steps = train(config(tmp_path, f"algorithm={name}", *NOTHING_ENDS, *EXTRA.get(name, [])), None)
    for step in steps:
        assert all(value is not None and math.isfinite(value) for value in step.values())
        assert step["rollout/zero_advantage_fraction"] == 1
        assert (step["loss"], step["grad_norm"]) == (0, 0)


def test_resumed_critic_continues_the_same_curve(tmp_path: Path, rollouts: LocalRollouts) -> None:
    options = [
        "algorithm=ppo",
        "algorithm.critic.warmup_steps=1",
        "algorithm.critic.lr=1e-3",
    ]
    once = ["optimizer.schedule=constant", *options]
    whole = train(config(tmp_path / "whole", *once, "training.steps=4"), rollouts)
    train(config(tmp_path / "cut", *once, "training.steps=2"), rollouts)
    resumed = train(config(tmp_path / "cut", *once, "training.steps=4"), rollouts, resume=True)
    for name in ("critic/loss", "critic/grad_norm", "reward", "grad_norm", "loss"):
        got, want = ([step[name] for step in curve if name in step] for curve in (resumed, whole))
        assert got == pytest.approx(want, rel=1e-4, abs=1e-6), name


def test_stale_tokens_are_not_treated_as_on_policy(tmp_path: Path, rollouts: LocalRollouts) -> None:
    settings = config(tmp_path, "training.steps=1")
    with local_loop(settings, rollouts) as loop:
        loop.sync_engines(3, loop.recorder.begin_step(3))
        loop.collector.begin(0)
        groups = loop.collector.collect(0).train
        assert to_samples(groups, settings.algorithm, 3).staleness is None
        with pytest.raises(
            OffPolicyError, match="sampled 1 weight versions ago would count as on-policy"
        ):
            to_samples(groups, settings.algorithm, 4)
        groups[0].trajectories[0] = replace(groups[0].trajectories[0], excluded=True)
        assert to_samples(groups, settings.algorithm, 3).loss_tokens[0] == 0


def test_rollouts_overlap_training_and_lag_by_one_version(tmp_path: Path) -> None:
    options = [
        "algorithm.max_staleness=1",
        "training.steps=4",
        "evaluate_every=2",
        "optimizer.lr=1e-2",
    ]
    settings = config(tmp_path, *options)
    rollouts = LocalRollouts(settings)
    generate = rollouts.worker.engine.generate
    learning = [threading.Event() for _ in range(4)]
    generated = [threading.Event() for _ in range(4)]

    async def generate_concurrently(request: Any) -> Any:
        """Begin the episodes of a step after the trainer has begun the previous step."""
        seed = int(request.episode.rpartition("/")[2])
        step = seed // (1_000 * 1_000_003)
        if step > 0:
            await wait_until_async(learning[step - 1].is_set)
        result = await generate(request)
        generated[step].set()
        return result

    rollouts.worker.engine.generate = generate_concurrently  # type: ignore[method-assign]
    with local_loop(settings, rollouts) as loop:
        learn = loop.trainer.rl_step

        def rl_step(samples: Any, step: int) -> Any:
            learning[step].set()
            if step < 3:  # no step follows the last one
                assert generated[step + 1].wait(PATIENCE_SECONDS), (
                    "nothing is generated while the trainer learns"
                )
            return learn(samples, step)

        loop.trainer.rl_step = rl_step  # type: ignore[method-assign]
        loop.train()
        records = read_json_lines(loop.recorder.run.metrics)
    rollouts.close()
    steps = [record for record in records if is_training_step(record)]
    assert [step["rollout/staleness_max"] for step in steps] == [0, 1, 1, 1]
    assert all(step["correction/dropped_fraction/too_old"] == 0 for step in steps)
    assert [record["step"] for record in records if "held_out/reward" in record] == [0, 2]
    # The importance weight contains the updates after the tokens were sampled.
    assert steps[0]["mismatch/kl_k3"] < 1e-6 < min(step["mismatch/kl_k3"] for step in steps[1:])


def test_runs_with_shared_prefixes_count_saved_tokens(
    tmp_path: Path, rollouts: LocalRollouts
) -> None:
    options = [
        "training.share_prefixes=all",
        "training.min_shared=4",
        "algorithm=cispo",
        "algorithm.routing_replay=R3",
        "algorithm.old_log_probs=forward",
        "training.steps=2",
    ]
    for step in train(config(tmp_path, *options), rollouts):
        # Samples of a task have at least their prompts in common.
        assert 0.1 < step["prefixes/saved_tokens"] < 1
        assert 0 <= step["prefixes/route_conflicts"] < step["prefixes/saved_tokens"]
        # Both passes have the same micro-batches, so on-policy ratios are exactly 1.
        assert step["ratio/deviation_max"] == 0
        assert step["routing/agreement"] > 0.9
        assert math.isfinite(step["loss"])
