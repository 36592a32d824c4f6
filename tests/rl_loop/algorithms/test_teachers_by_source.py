"""Every token is scored by the teacher of its task's source, and by no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_gptoss.packing import build_batch
from megatron_gptoss.planning.activation_memory import scoring_memory
from megatron_gptoss.planning.state_memory import weight_memory
from megatron_gptoss.samples import NO_TEACHER, TrainingSamples
from megatron_gptoss.scorer import LogProbScorer
from rl_loop.algorithms.config import AlgorithmConfig
from rl_loop.config.errors import ConfigError, StartError
from rl_loop.config.run import RlConfig
from rl_loop.data.credit import assign_advantages
from rl_loop.data.samples import to_samples
from rl_loop.data.trajectory import Trajectory, TrajectoryGroup
from rl_loop.lifecycle.inputs import read_inputs
from rl_loop.lifecycle.resume import input_paths
from rl_loop.lifecycle.start_checks import check_run_requirements
from rl_loop.trainer.group import TrainerGroup
from rl_loop.trainer.local_rank import LocalRank
from rl_loop.trainer.rank_inputs import RankInputs
from rl_loop.trainer.teacher_plan import plan_teachers
from tests.support.distributed import free_port, run_distributed
from tests.support.in_process import RanksOfJob, local_loop, local_trainer, train_and_record
from tests.support.megatron_gptoss.layouts import LAYOUTS
from tests.support.rl_loop.algorithms import save_teacher
from tests.support.rl_loop.small_config import config

SOURCES = "tasks.sources={first: {environment: retool}, second: {environment: retool}}"
EVALUATED = "tasks.sources.third={environment: retool, weight: 0}"
KEY = "algorithm.distillation.teacher"


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return two teachers with different weights."""
    directory = tmp_path_factory.mktemp("models")
    model = config(directory).model
    return [save_teacher(directory / f"teacher_{seed}", model, seed) for seed in (3, 4)]


def distilling(directory: Path, teachers: str, *overrides: str) -> RlConfig:
    return config(
        directory,
        SOURCES,
        f"algorithm.distillation={{teachers: {teachers}}}",
        "rollout.samples_per_task=2",
        "rollout.tasks_per_step=4",
        *overrides,
    )


def by_source(teachers: list[Path]) -> str:
    return f"{{first: {teachers[0]}, second: {teachers[1]}}}"


def of_transformers(teacher: Path, ids: np.ndarray) -> np.ndarray:
    """Return the log-probs of a sequence by another implementation, 0 for the first token."""
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)
    row = torch.from_numpy(ids.astype(np.int64))[None]
    with torch.no_grad():
        log_probs = model(row).logits[0, :-1].double().log_softmax(-1)
    return np.concatenate([[0.0], log_probs.gather(-1, row[0, 1:, None])[:, 0].numpy()])


def test_each_source_has_the_advantage_of_its_teacher(tmp_path: Path, teachers: list[Path]) -> None:
    settings = distilling(
        tmp_path, by_source(teachers), "algorithm.advantage=none", "training.steps=1"
    )
    with local_loop(settings) as loop:
        trained = train_and_record(loop)
    (samples,) = trained
    assert samples.teachers is not None and set(samples.teachers) == {0, 1}

    for i, teacher in enumerate(samples.teachers):
        # The name of a task begins with its source.
        assert samples.sequence_name(i).startswith(("first-", "second-")[teacher])
        ids, advantages, rollout, sampled = (
            samples.rows(name)[i]
            for name in ("token_ids", "advantages", "rollout_log_probs", "loss_mask")
        )
        gains = np.where(sampled, of_transformers(teachers[teacher], ids) - rollout, 0.0)
        np.testing.assert_allclose(advantages, gains, atol=1e-3)
        other = np.where(sampled, of_transformers(teachers[1 - teacher], ids) - rollout, 0.0)
        assert np.abs(advantages - other).max() > 0.1


def group(source: str) -> TrajectoryGroup:
    episode = Trajectory(
        source, token_ids=[1, 2, 3], loss_mask=[0, 1, 1], rollout_log_probs=[0.0, -1.0, -2.0]
    )
    return TrajectoryGroup(source, [episode], source=source)


def test_source_without_teacher_learns_from_rewards_alone(teachers: list[Path]) -> None:
    settings = AlgorithmConfig.model_validate(
        {"advantage": "reinforce", "distillation": {"teacher": "x", "teachers": {"plain": None}}}
    )
    groups = [group("taught"), group("plain")]
    samples = to_samples(groups, settings, 0, {"taught": 0, "plain": NO_TEACHER})
    scores = np.array([0, -3, -1, np.nan, np.nan, np.nan], dtype=np.float32)
    assigned = assign_advantages(
        samples.with_columns(teacher_log_probs=scores), groups, settings, 10
    )
    np.testing.assert_allclose(assigned.column("advantages"), [0, -2, 1, 0, 0, 0])

    # A missing number is an error where a teacher belongs.
    scores[2] = np.nan
    with pytest.raises(ValueError, match="taught: the teacher has no finite log-prob of token 2"):
        assign_advantages(samples.with_columns(teacher_log_probs=scores), groups, settings, 10)
    with pytest.raises(KeyError, match="unknown"):
        to_samples([group("unknown")], settings, 0, {"taught": 0, "plain": NO_TEACHER})


# ---- columns of a rank


def mixed_samples() -> TrainingSamples:
    """Return sequences of both teachers and of none, with prompts that some of them share."""
    generator = np.random.default_rng(0)
    prompt = generator.integers(0, 576, 8)
    rows = [
        np.concatenate([prompt[: 8 * (n % 2)], generator.integers(0, 576, n)])
        for n in (40, 25, 60, 7, 31, 12, 19)
    ]
    samples = TrainingSamples.join(
        [{"token_ids": row, "loss_mask": [0] + [1] * (len(row) - 1)} for row in rows]
    )
    samples.teachers = np.array([0, 1, 1, NO_TEACHER, 1, 0, 1])
    return samples


def columns_by_sequence(
    settings: RlConfig, trainer: TrainerGroup, rank: LocalRank
) -> dict[int, Any]:
    """Return ids, log-probs of the teachers' top tokens, and log-probs of this rank's sequences."""
    samples = mixed_samples()
    plan = trainer._plan(samples)
    inputs: RankInputs = trainer._inputs.store(
        samples, plan, teachers=plan_teachers(samples, plan, settings)
    )[rank.worker.position().data]
    packed = inputs.pack(1)
    assert settings.algorithm.divergence is not None
    worker = rank.worker
    worker.teachers.add_columns(packed, inputs, settings.algorithm.divergence.top_k)
    log_probs = worker.teachers.log_probs(inputs)

    columns = {}
    batches = [batch for batches in packed for batch in batches]
    sequences = plan.list_sequences(worker.position().data)
    for rows, batch in zip(inputs.rows, batches, strict=True):
        label = 0
        for row in rows:
            start, end = inputs.samples.offsets[row : row + 2]
            labels = slice(label, label + end - start - 1)
            label = labels.stop
            columns[sequences[row]] = (
                batch.column("teacher_top_ids")[labels].numpy(),
                batch.column("teacher_top_log_probs")[labels].numpy(),
                log_probs[start:end],
            )
    return columns


def divergence_config(directory: Path, teachers: list[Path], *overrides: str) -> RlConfig:
    return distilling(
        directory,
        by_source(teachers),
        "algorithm.distillation.loss={type: reverse_kl, top_k: 8}",
        "training.max_tokens_per_micro_batch=80",
        "rollout.max_episode_tokens=80",
        "rollout.max_sampled_tokens_per_turn=16",
        *overrides,
    )


@pytest.mark.parametrize("sharing", ["off", "all, min_shared: 4"])
def test_each_sequence_has_the_columns_of_its_teacher(
    sharing: str, tmp_path: Path, teachers: list[Path]
) -> None:
    settings = divergence_config(tmp_path, teachers, f"training={{share_prefixes: {sharing}}}")
    trainer = local_trainer(settings)
    rank = trainer.ranks
    assert isinstance(rank, LocalRank)
    try:
        found = columns_by_sequence(settings, trainer, rank)
        scorers: list[LogProbScorer] = rank.worker.teachers.scorers
        samples = mixed_samples()
        assert samples.teachers is not None
        for i, teacher in enumerate(samples.teachers):
            ids, top, log_probs = found[i]
            if teacher == NO_TEACHER:
                assert np.isnan(top).all() and np.isnan(log_probs).all()
                continue
            alone = build_batch(samples, [i])
            (expected,) = scorers[teacher].top_log_probs([alone], 8)
            np.testing.assert_array_equal(ids, expected[0].numpy())
            np.testing.assert_allclose(top, expected[1].numpy(), atol=1e-5)
            (row,) = scorers[teacher].score([alone])
            np.testing.assert_allclose(log_probs[1:], row.numpy(), atol=1e-5)
    finally:
        trainer.close()


def columns_in_layout(rank: int, port: int, settings: RlConfig) -> dict[int, Any]:
    torch.set_num_threads(1)
    ranks = RanksOfJob(settings, rank, port)
    trainer = TrainerGroup(settings, ranks)
    trainer.ready()
    try:
        return columns_by_sequence(settings, trainer, ranks)
    finally:
        trainer.close()


@pytest.mark.slow
def test_ranks_with_unequal_shares_of_a_teacher_agree(tmp_path: Path, teachers: list[Path]) -> None:
    """One rank may have no sequence of a teacher, but its experts take part in the pass."""
    alone = divergence_config(tmp_path, teachers)
    trainer = local_trainer(alone)
    try:
        assert isinstance(trainer.ranks, LocalRank)
        expected = columns_by_sequence(alone, trainer, trainer.ranks)
    finally:
        trainer.close()
    sizes = ", ".join(f"{key}: {value}" for key, value in LAYOUTS["expert"].items())
    both = divergence_config(tmp_path, teachers, f"parallel={{world_size: 2, {sizes}}}")
    found: dict[int, Any] = {}
    for columns in run_distributed(columns_in_layout, 2, free_port(), both):
        assert columns
        found |= columns
    assert found.keys() == expected.keys()
    for i, (ids, top, log_probs) in found.items():
        np.testing.assert_array_equal(ids, expected[i][0])
        np.testing.assert_allclose(top, expected[i][1], atol=1e-5)
        np.testing.assert_allclose(log_probs, expected[i][2], atol=1e-5)


# ---- configuration


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["algorithm.distillation={teachers: {first: a}}"],
            "tasks.sources.second has no teacher. Set algorithm.distillation.teacher or "
            "algorithm.distillation.teachers.second",
        ),
        (
            ["algorithm.distillation={teacher: a, teachers: {frist: b}}"],
            "algorithm.distillation.teachers names frist, but tasks.sources has first, second",
        ),
        (
            [
                "algorithm.advantage=none",
                "algorithm.distillation={teacher: a, teachers: {first: null}}",
            ],
            "algorithm.distillation.teachers.first is null, and advantage none ignores",
        ),
        (
            ["algorithm.distillation={teachers: {first: null, second: null}}"],
            "algorithm.distillation.teachers is null for all sources",
        ),
    ],
)
def test_source_without_teacher_is_named(
    overrides: list[str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as raised:
        config(tmp_path, SOURCES, *overrides)
    assert message in str(raised.value)


def test_teacher_of_each_source_is_an_input(tmp_path: Path, teachers: list[Path]) -> None:
    """Sources for evaluation need none, and a directory is loaded once."""
    first, second = teachers
    settings = distilling(tmp_path, f"{{second: {second}}}", f"{KEY}={first}", EVALUATED)
    assert settings.teachers == (first, second)
    assert settings.teacher_of_source == {"first": 0, "second": 1}
    paths = {KEY: str(first), f"{KEY}s.second": str(second)}
    assert paths.items() <= input_paths(settings).items()
    assert len({known.digest for known in read_inputs(paths).values()}) == 2

    alike = distilling(tmp_path, f"{{second: {first}}}", f"{KEY}={first}")
    assert alike.teachers == (first,) and alike.teacher_of_source is None
    plain = distilling(tmp_path, "{second: null}", f"{KEY}={first}")
    assert plain.teacher_of_source == {"first": 0, "second": NO_TEACHER}


def test_unsuitable_teacher_of_a_source_is_named(tmp_path: Path, teachers: list[Path]) -> None:
    absent = tmp_path / "absent"
    settings = distilling(tmp_path, f"{{first: {teachers[0]}, second: {absent}}}")
    with pytest.raises(StartError, match=r"distillation\.teachers\.second: .*absent has no"):
        check_run_requirements(settings)


def test_plan_counts_every_teacher_once(tmp_path: Path, teachers: list[Path]) -> None:
    one, two = (
        distilling(tmp_path, f"{{first: {teachers[0]}, second: {teachers[i]}}}").memory_inputs
        for i in range(2)
    )
    added = weight_memory(two, 0) - weight_memory(one, 0)
    assert added == pytest.approx(2 * one.model.num_parameters, rel=1e-6)
    # Teachers score one after the other.
    assert scoring_memory(one, 0) == scoring_memory(two, 0)
