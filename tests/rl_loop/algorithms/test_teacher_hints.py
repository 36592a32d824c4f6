"""A teacher that sees a hint scores the very tokens of a policy that does not."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_gptoss.packing import build_batch
from megatron_gptoss.samples import TrainingSamples
from rl_loop.chat.messages import ParsedMessage
from rl_loop.config.episode import EpisodeLimits
from rl_loop.config.errors import ConfigError
from rl_loop.config.run import RlConfig
from rl_loop.data.samples import to_samples
from rl_loop.data.trajectory import FinishReason, Trajectory, TrajectoryGroup
from rl_loop.engines.protocol import SamplingParams
from rl_loop.environments import RewardConfig, Task, make_environment
from rl_loop.rollout.agent import run_episode
from rl_loop.run_parts import build_tasks
from rl_loop.sandbox import ExecutionResult
from rl_loop.tasks.source import TaskMixture
from rl_loop.tasks.task_file import TaskFileError
from rl_loop.trainer.local_rank import LocalRank
from rl_loop.trainer.rank_inputs import RankInputs
from rl_loop.trainer.teacher_plan import plan_teachers
from tests.support.in_process import local_trainer
from tests.support.rl_loop.algorithms import save_teacher
from tests.support.rl_loop.scripted_engine import ScriptedEngine
from tests.support.rl_loop.small_config import config

HINT = "tasks.sources.retool.teacher_hint='Compute {ground_truth}.'"


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    return save_teacher(directory / "teacher", config(directory).model, seed=3)


def distilling(directory: Path, teacher: Path, *overrides: str) -> RlConfig:
    loss = "{type: reverse_kl, top_k: 8}"
    return config(
        directory,
        f"algorithm.distillation={{teacher: {teacher}, loss: {loss}}}",
        HINT,
        *overrides,
    )


def play(tasks: TaskMixture, task: Task, limits: EpisodeLimits) -> Trajectory:
    """Return an episode of two turns with a call of Python."""
    codec = tasks.codec
    call = codec.render_assistant([ParsedMessage("analysis", "python", "code", "x=1")], "<|call|>")
    thought = ParsedMessage("analysis", None, None, "I know.")
    answer = ParsedMessage("final", None, None, rf"\boxed{{{task.ground_truth}}}")
    turns = [call, codec.render_assistant([thought, answer], "<|return|>")]

    async def execute(code: str, history: object = ()) -> ExecutionResult:
        return ExecutionResult("17\n", 0)

    return asyncio.run(
        run_episode(
            task.task_id,
            make_environment(task, execute, RewardConfig()),
            ScriptedEngine(turns),
            codec,
            limits,
            SamplingParams(100, 1.0),
            seed=0,
        )
    )


def episodes(settings: RlConfig) -> list[Trajectory]:
    """Return an episode with a hint, and one without."""
    tasks = build_tasks(settings)
    hinted, other = tasks.train(0, 2)
    assert hinted.teacher_hint == f"Compute {hinted.ground_truth}."
    # Held-out tasks are evaluated without a teacher.
    assert all(task.teacher_hint is None for task in tasks.held_out())
    plain = replace(other, teacher_hint=None)
    played = [play(tasks, task, settings.rollout) for task in (hinted, plain)]
    for episode in played:
        episode.weight_versions = []
    return played


def alone(prompt: np.ndarray, rest: np.ndarray) -> TrainingSamples:
    ids = np.concatenate([prompt, rest])
    return TrainingSamples.join([{"token_ids": ids, "loss_mask": np.ones(len(ids), np.bool_)}])


@pytest.mark.parametrize("sharing", ["off", "prompts, min_shared: 4"])
def test_teacher_scores_its_prompt_and_the_policys_tokens(
    sharing: str, tmp_path: Path, teacher: Path
) -> None:
    settings = distilling(tmp_path, teacher, f"training={{share_prefixes: {sharing}}}")
    played = episodes(settings)
    # Copies share their prompts, and those of the teacher.
    groups = [TrajectoryGroup(one.task_id, [one, one], source="retool") for one in played]
    samples = to_samples(groups, settings.algorithm, 0, settings.teacher_of_source)
    trainer = local_trainer(settings)
    assert isinstance(trainer.ranks, LocalRank)
    teachers = trainer.ranks.worker.teachers
    try:
        plan = trainer._plan(samples)
        (inputs,) = trainer._inputs.store(
            samples, plan, teachers=plan_teachers(samples, plan, settings)
        )
        packed = inputs.pack(1)
        teachers.add_columns(packed, inputs, 8)
        found = plan.gather_results(
            samples, [teachers.log_probs(inputs)], "teacher_log_probs", np.dtype(np.float32)
        )
        tops = top_columns(inputs, packed, plan.list_sequences(0))
        sequences = [episode for group in groups for episode in group.trajectories]
        for i, episode in enumerate(sequences):
            prompt, rest = np.split(episode.token_ids, [episode.turns[0].end])
            assert [turn.role for turn in episode.turns] == [
                "prompt", "assistant", "tool", "assistant",
            ]  # fmt: skip
            if i < 2:
                assert episode.teacher_prompt is not None
                assert len(episode.teacher_prompt) > len(prompt)
                prompt = episode.teacher_prompt
            row = build_batch(alone(prompt, rest))
            (log_probs,) = teachers.scorers[0].score([row])
            (expected,) = teachers.scorers[0].top_log_probs([row], 8)
            sampled = episode.loss_mask[episode.turns[0].end :]
            assert sampled.any() and not sampled.all()
            own = found[samples.offsets[i] : samples.offsets[i + 1]]
            # Label j - 1 of a row is token j.
            at = len(prompt) - 1
            np.testing.assert_allclose(
                own[episode.loss_mask], log_probs.numpy()[at:][sampled], atol=1e-5
            )
            assert np.isnan(own[~episode.loss_mask]).all()
            np.testing.assert_array_equal(
                tops[i][0][episode.loss_mask[1:]], expected[0].numpy()[at:][sampled]
            )
            np.testing.assert_allclose(
                tops[i][1][episode.loss_mask[1:]], expected[1].numpy()[at:][sampled], atol=1e-5
            )
            assert np.isnan(tops[i][1][~episode.loss_mask[1:]]).all()
    finally:
        trainer.close()


def top_columns(
    inputs: RankInputs, packed: list[list[object]], sequences: list[int]
) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Return ids and log-probs of the teacher's top tokens by sequence, [labels, k] each."""
    columns = {}
    batches = [batch for batches in packed for batch in batches]
    for rows, batch in zip(inputs.rows, batches, strict=True):
        label = 0
        for row in rows:
            start, end = inputs.samples.offsets[row : row + 2]
            labels = slice(label, label + end - start - 1)
            label = labels.stop
            columns[sequences[row]] = tuple(
                batch.column(name)[labels].numpy()
                for name in ("teacher_top_ids", "teacher_top_log_probs")
            )
    return columns


def test_teachers_longer_prompt_counts_towards_the_limit(tmp_path: Path, teacher: Path) -> None:
    settings = distilling(tmp_path, teacher)
    tasks = build_tasks(settings)
    (task,) = tasks.train(0, 1)
    whole = play(tasks, task, settings.rollout)
    assert whole.teacher_prompt is not None and not whole.truncated
    longer = len(whole.teacher_prompt) - whole.turns[0].end
    for room, is_truncated in ((longer, False), (longer - 1, True)):
        limits = settings.rollout.model_copy(update={"max_episode_tokens": len(whole) + room})
        episode = play(tasks, task, limits)
        assert (episode.finish_reason is FinishReason.MAX_EPISODE_TOKENS) == is_truncated


def test_hints_that_cannot_be_used_are_named(tmp_path: Path, teacher: Path) -> None:
    with pytest.raises(ConfigError, match=r"retool\.teacher_hint is for a teacher, but"):
        config(tmp_path, HINT)
    unknown = "tasks.sources.retool.teacher_hint='Use {solution}.'"
    with pytest.raises(TaskFileError, match=r"teacher_hint: task .* has no solution\. Known"):
        build_tasks(distilling(tmp_path, teacher, unknown)).train(0, 1)
