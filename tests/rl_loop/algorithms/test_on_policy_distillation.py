"""A teacher scores the sampled tokens. The difference of log-probs is their advantage."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_gptoss.packing import PackedBatch
from megatron_gptoss.planning.activation_memory import scoring_memory, temporary_memory
from megatron_gptoss.planning.state_memory import weight_memory
from megatron_gptoss.samples import TrainingSamples
from rl_loop.algorithms.choices import NoAdvantage
from rl_loop.algorithms.config import AlgorithmConfig, DistillationConfig
from rl_loop.algorithms.distillation import forward_kl, jensen_shannon, reverse_kl
from rl_loop.algorithms.objectives import policy_objective
from rl_loop.config.errors import ConfigError, StartError
from rl_loop.config.run import TEACHER_KEY, RlConfig
from rl_loop.data.credit import assign_advantages
from rl_loop.data.trajectory import Trajectory, TrajectoryGroup
from rl_loop.lifecycle.start_checks import check_teacher
from rl_loop.tracking.metrics import StepMetrics
from rl_loop.tracking.run_directory import read_training_steps
from rl_loop.tracking.step_metrics import add_teacher_metrics
from tests.support.in_process import local_loop, train_and_record
from tests.support.rl_loop.algorithms import build_sample_batch, save_teacher
from tests.support.rl_loop.small_config import config

COEFFICIENT = 0.5
TEACHER = Path("teacher")


def algorithm(**settings: Any) -> AlgorithmConfig:
    distillation = DistillationConfig(teacher=TEACHER, coefficient=COEFFICIENT)
    return AlgorithmConfig(distillation=distillation, **settings)


def scored_samples(**columns: list[Any]) -> TrainingSamples:
    """Return two episodes of 4 and 3 tokens with log-probs of the teacher."""
    first = {
        "token_ids": [1, 2, 3, 4],
        "loss_mask": [0, 1, 0, 1],
        "rollout_log_probs": [0.0, -1.0, 0.0, -2.0],
        "teacher_log_probs": [0.0, -3.0, -9.0, -0.5],
    }
    second = {
        "token_ids": [1, 2, 3],
        "loss_mask": [0, 1, 1],
        "rollout_log_probs": [0.0, -1.0, -1.0],
        "teacher_log_probs": [0.0, -1.0, -2.0],
    }
    joined = TrainingSamples.join([first, second])
    return joined.with_columns(**{name: np.array(column) for name, column in columns.items()})


def group(samples: TrainingSamples, rewards: tuple[float, float]) -> TrajectoryGroup:
    """Return the episodes of the samples."""
    names = ("token_ids", "loss_mask", "rollout_log_probs")
    rows = zip(*(samples.rows(name) for name in names), rewards, strict=True)
    episodes = [
        Trajectory("t", **dict(zip((*names, "reward"), row, strict=True)))  # type: ignore[arg-type]
        for row in rows
    ]
    return TrajectoryGroup("t", episodes)


def test_teachers_advantage_is_added_to_that_of_the_reward() -> None:
    samples = scored_samples()
    groups = [group(samples, (1.0, 0.0))]
    rewarded = assign_advantages(samples, groups, AlgorithmConfig(), 10).column("advantages")
    both = assign_advantages(samples, groups, algorithm(), 10).column("advantages")
    alone = assign_advantages(samples, groups, algorithm(advantage=NoAdvantage()), 10)

    gains = COEFFICIENT * np.array([0, -2, 0, 1.5, 0, 0, -1])
    assert rewarded.any()
    np.testing.assert_allclose(both, rewarded + gains, atol=1e-6)
    np.testing.assert_allclose(alone.column("advantages"), gains, atol=1e-6)


def test_spliced_and_old_tokens_get_no_advantage_of_the_teacher() -> None:
    samples = scored_samples(
        is_off_policy=[False, True, False, False, False, False, False],
        staleness=np.array([0, 0, 0, 1, 0, 0, 2], dtype=np.int32),  # type: ignore[arg-type]
    )
    settings = algorithm(advantage=NoAdvantage(), max_staleness=1)
    assigned = assign_advantages(samples, [group(samples, (1.0, 0.0))], settings, 10)
    expected = COEFFICIENT * np.array([0, 0, 0, 1.5, 0, 0, 0])
    np.testing.assert_allclose(assigned.column("advantages"), expected, atol=1e-6)

    metrics = StepMetrics(step=1)
    add_teacher_metrics(metrics, samples)
    assert metrics.values()["distillation/teacher_kl"] == pytest.approx((-1.5 + 0 + 1) / 3)


def with_teacher_columns(samples: TrainingSamples, k: int = 3) -> tuple[PackedBatch, torch.Tensor]:
    """Return a packed batch with k log-probs of a teacher, and those of the policy, [tokens, k]."""
    rows = [{name: samples.rows(name)[i] for name in samples.columns} for i in range(len(samples))]
    batch = build_sample_batch(rows)
    generator = torch.Generator().manual_seed(0)
    policy, teacher = (
        torch.randn(batch.tokens, 9, generator=generator).log_softmax(-1)[:, :k] for _ in range(2)
    )
    batch.teacher_top_ids = torch.arange(k).expand(batch.tokens, k)
    batch.teacher_top_log_probs = teacher
    return batch, policy


@pytest.mark.parametrize("kind", ["reverse_kl", "forward_kl", "jsd"])
def test_divergence_is_in_the_loss_of_compared_tokens(kind: str) -> None:
    """Spliced and old tokens have none, and their NaN reaches neither loss nor gradient."""
    samples = scored_samples(
        is_off_policy=[False, True, False, False, False, False, False],
        staleness=np.array([0, 0, 0, 1, 0, 0, 2], dtype=np.int32),  # type: ignore[arg-type]
        advantages=np.zeros(7, dtype=np.float32),  # type: ignore[arg-type]
    )
    batch, policy = with_teacher_columns(samples)
    settings = AlgorithmConfig.model_validate(
        {
            "advantage": "none",
            "distillation": {"teacher": TEACHER, "coefficient": COEFFICIENT, "loss": kind},
            "max_staleness": 1,
            "old_log_probs": "rollout",
            "correction": {"weight": "none"},
        }
    )
    batch.old_log_probs = batch.rollout_log_probs
    # Labels of the packed row: the first sequence predicts its tokens 1 to 3, the second 1 and 2.
    compared = torch.tensor([False, False, True, True, False])
    policy[~compared] = torch.nan
    teacher = batch.column("teacher_top_log_probs")
    teacher[~compared] = torch.nan
    leaf = policy.requires_grad_()
    rollout = batch.column("rollout_log_probs")
    loss_tokens = torch.from_numpy(samples.loss_tokens)
    output = policy_objective(settings, loss_tokens, 10)(rollout, rollout, batch, leaf)
    output.loss.backward()

    assert settings.divergence is not None and not settings.estimates
    function = {"reverse_kl": reverse_kl, "forward_kl": forward_kl}.get(
        kind, partial(jensen_shannon, beta=0.5)
    )
    other = policy.detach().clone().requires_grad_()
    # Token-mean: the denominator counts the four sampled tokens.
    formula = COEFFICIENT * function(other[compared], teacher[compared]).sum() / 4
    formula.backward()
    torch.testing.assert_close(output.loss.float(), formula)
    torch.testing.assert_close(leaf.grad[compared], other.grad[compared], rtol=0, atol=1e-6)
    assert leaf.grad[compared].abs().min() > 1e-4
    assert not leaf.grad[~compared].any()
    kl = reverse_kl(policy[compared], teacher[compared]).sum()
    torch.testing.assert_close(output.sums["distillation/teacher_kl"], kl.detach())
    assert output.sums["comparable"] == 2


def test_gradient_equals_that_of_the_formula() -> None:
    """The loss is -coefficient / N x the sum of (log pi_teacher - log pi) x log pi over N tokens."""
    samples = scored_samples()
    settings = algorithm(advantage=NoAdvantage())
    samples = assign_advantages(samples, [group(samples, (1.0, 0.0))], settings, 10)
    rows = [{name: samples.rows(name)[i] for name in samples.columns} for i in range(len(samples))]
    batch = build_sample_batch(rows)
    # The engine's log-probs, so that the correction of the mismatch is 1.
    leaf = batch.column("rollout_log_probs").clone().requires_grad_()
    loss_tokens = torch.from_numpy(samples.loss_tokens)
    output = policy_objective(settings, loss_tokens, 10)(leaf, torch.zeros_like(leaf), batch)
    output.loss.backward()

    other = batch.column("rollout_log_probs").clone().requires_grad_()
    gains = batch.column("teacher_log_probs") - batch.column("rollout_log_probs")
    formula = -COEFFICIENT * (gains * other)[batch.loss_mask].sum() / 4
    formula.backward()
    torch.testing.assert_close(leaf.grad, other.grad, rtol=0, atol=1e-6)
    assert leaf.grad is not None and leaf.grad.abs().max() > 0.1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.advantage=none"], "advantage none ignores the rewards"),
        (
            ["algorithm=distillation", "algorithm.overlong_buffer_tokens=10"],
            "overlong_buffer_tokens changes advantages of rewards",
        ),
        (
            ["algorithm=distillation", "algorithm.whiten_advantages=tokens"],
            "whiten_advantages changes advantages of rewards",
        ),
        (
            ["algorithm=distillation", "algorithm.kl={apply_to: reward, estimator: k1}"],
            "kl.apply_to=reward changes advantages of rewards",
        ),
        (
            ["algorithm=distillation", "algorithm.dynamic_sampling_rounds=2"],
            "dynamic_sampling_rounds (2) drops groups",
        ),
        (["algorithm.distillation={coefficient: 1.0}"], "teacher"),
        (
            ["algorithm=distillation", "algorithm.distillation.loss={type: jsd, top_k: 577}"],
            "algorithm.distillation.loss.top_k (577) exceeds model.vocab_size (576)",
        ),
        (
            ["algorithm=distillation", "algorithm.distillation.loss=kl"],
            "unknown type 'kl'. Choose one of sampled_token, reverse_kl, forward_kl, jsd",
        ),
    ],
)
def test_settings_without_effect_are_refused(
    overrides: list[str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as raised:
        config(tmp_path, *overrides)
    assert message in str(raised.value)


# ---- the loop


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    return save_teacher(directory / "teacher", config(directory).model, seed=3)


def distilling(directory: Path, teacher: Path, *overrides: str) -> RlConfig:
    return config(
        directory,
        "algorithm=distillation",
        f"algorithm.distillation.teacher={teacher}",
        "algorithm.distillation.loss=sampled_token",
        "rollout.samples_per_task=1",
        "rollout.tasks_per_step=8",
        "optimizer={lr: 1.0e-2, warmup_steps: 0, schedule: constant}",
        *overrides,
    )


def test_policy_approaches_its_teacher_without_rewards(tmp_path: Path, teacher: Path) -> None:
    settings = distilling(tmp_path, teacher, "training.steps=16", "algorithm.routing_replay=R3")
    with local_loop(settings) as loop:
        trained = train_and_record(loop)
    steps = read_training_steps(settings.directory / "metrics.jsonl")

    distances = [step["distillation/teacher_kl"] for step in steps]
    assert sum(distances[-3:]) < 0.9 * sum(distances[:3])
    assert {step["ratio/deviation_max"] for step in steps} == {0}

    # The teacher scores the very tokens that were sampled, with its own experts.
    samples = trained[-1]
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)
    ids = torch.from_numpy(samples.rows("token_ids")[0].astype(np.int64))[None]
    with torch.no_grad():
        log_probs = model(ids).logits[0, :-1].double().log_softmax(-1)
    expected = log_probs.gather(-1, ids[0, 1:, None])[:, 0]
    np.testing.assert_allclose(samples.rows("teacher_log_probs")[0][1:], expected, atol=1e-3)


def test_reverse_kl_trains_the_policy_in_the_loop(tmp_path: Path, teacher: Path) -> None:
    settings = distilling(
        tmp_path,
        teacher,
        "training.steps=4",
        "algorithm.distillation.loss={type: reverse_kl, top_k: 576}",
        "algorithm.mini_batches=2",
    )
    with local_loop(settings) as loop:
        loop.train()
    steps = read_training_steps(settings.directory / "metrics.jsonl")
    distances = [step["distillation/teacher_kl"] for step in steps]
    assert distances[-1] < 0.9 * distances[0]
    # The top k are the whole vocabulary.
    assert steps[0]["distillation/teacher_mass"] == pytest.approx(1, abs=1e-5)


def test_unsuitable_teacher_is_named_before_the_run(tmp_path: Path, teacher: Path) -> None:
    check_teacher(TEACHER_KEY, teacher, distilling(tmp_path, teacher))
    absent = tmp_path / "absent"
    with pytest.raises(StartError, match=r"algorithm\.distillation\.teacher: .*absent has no"):
        check_teacher(TEACHER_KEY, absent, distilling(tmp_path, absent))


def test_plan_counts_the_teacher(tmp_path: Path, teacher: Path) -> None:
    settings = distilling(tmp_path, teacher)
    without = config(tmp_path)
    added = weight_memory(settings.memory_inputs, 0) - weight_memory(without.memory_inputs, 0)
    assert added == pytest.approx(2 * settings.model.num_parameters, rel=1e-6)


def test_plan_counts_the_teachers_most_likely_tokens(tmp_path: Path, teacher: Path) -> None:
    """They matter next to blocks of logits only for large k."""
    model = "model.vocab_size=20000"
    inputs = [
        distilling(tmp_path, teacher, model, f"algorithm.distillation.loss={loss}").memory_inputs
        for loss in ("sampled_token", "{type: reverse_kl, top_k: 10000}")
    ]
    assert [each.teacher_top_k for each in inputs] == [0, 10_000]
    tokens = inputs[0].tokens
    updates = [temporary_memory(each, 0) for each in inputs]
    assert updates[1] - updates[0] == 36 * 10_000 * tokens
    scoring = [scoring_memory(each, 0) for each in inputs]
    assert scoring[1] - scoring[0] == pytest.approx(4 * 8 * 10_000 * tokens, rel=1e-2)
