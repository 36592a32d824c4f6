"""The closed loop.

    weights v -> rollout workers -> episodes sampled with v -> rewards -> group advantages -> packed batch
        ^                                                                                         |
        +------------- v + 1 <- optimizer step, importance ratio 1 because sampled with v <-------+

Everything random is derived from the seed and the step number, so a resumed run continues the same curve.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rl_loop.batch import advantages_of, rollout_metrics, to_samples, training_metrics
from rl_loop.canary import check_canary
from rl_loop.config import RlConfig
from rl_loop.environments import Task
from rl_loop.evaluation import evaluation_figures, held_out_episodes
from rl_loop.metrics import Name, StepMetrics
from rl_loop.rollout_pool import GroupRequest, RolloutPool, RolloutsAbandoned
from rl_loop.run import Session
from rl_loop.run_directory import episode_record
from rl_loop.trajectory import Trajectory


class RlLoop:
    """One run of ``gptoss rl``."""

    def __init__(self, config: RlConfig, session: Session, rollouts: RolloutPool) -> None:
        self.config, self.session, self.rollouts = config, session, rollouts
        self.trainer, self.tasks, self.progress = session.trainer, session.tasks, session.progress

    def train(self) -> int:
        """All steps that are left. Returns the number of steps done in all, fewer than wanted if interrupted."""
        config, session = self.config, self.session
        for step in range(session.first_step, config.training.steps):
            began = time.monotonic()
            metrics = StepMetrics(step)
            with self._timed("sync", metrics):
                self.sync_weights(step, metrics)
            if step % config.evaluate_every == 0:
                with self._timed("evaluate", metrics):
                    self.evaluate(step, metrics)
            try:
                with self._timed("rollout", metrics):
                    groups = self.rollouts.run(self.requests(step), lambda: session.interrupt.hurried)
            except RolloutsAbandoned:  # nothing of this step has changed the policy; it begins anew after the resume
                if step > session.first_step:
                    session.save(step)
                return step
            with self._timed("train", metrics):
                samples = to_samples(groups, advantages_of(groups, config.algorithm.advantage))
                updates = self.trainer.rl_step(samples, config.algorithm, step)
            rollout_metrics(metrics, groups)
            training_metrics(metrics, updates)
            seconds = time.monotonic() - began
            metrics.add_last(Name.STEP_SECONDS, seconds)
            tokens = sum(len(trajectory) for group in groups for trajectory in group.trajectories)
            metrics.add_last(Name.TOKENS_PER_SECOND, tokens / seconds)
            self._record_episodes([t for g in groups for t in g.trajectories], step, "train")
            session.writer.write(metrics)
            last = session.interrupt.requested or step + 1 == config.training.steps
            if last or (step + 1) % config.training.checkpoint_every == 0:
                session.save(step + 1)
            if session.interrupt.requested:
                return step + 1
        return config.training.steps

    def requests(self, step: int) -> list[GroupRequest]:
        """The episodes of one training step."""
        rollout = self.config.rollout
        tasks = self.tasks.train(step * rollout.tasks_per_step, rollout.tasks_per_step)
        return [self._request(task, step, i, rollout.samples_per_task) for i, task in enumerate(tasks)]

    def _request(self, task: Task, step: int, position: int, samples: int) -> GroupRequest:
        base = ((self.config.seed * 1_000_003 + step) * 1_000_003 + position) * 1_000
        return GroupRequest(task, tuple(base + i for i in range(samples)), self.config.rollout.temperature)

    def sync_weights(self, version: int, metrics: StepMetrics) -> None:
        """Bring the workers to the trainer's weights and make sure that both compute the same with them."""
        self.rollouts.sync_weights(self.trainer.weights(), version)
        gap = check_canary(self.trainer, self.rollouts, self.tasks.canary(), self.config, version)
        metrics.add_max("mismatch/canary_gap", gap, over="tokens")

    def evaluate(self, step: int, metrics: StepMetrics) -> None:
        """Held-out tasks, one episode each."""
        episodes = held_out_episodes(self.rollouts, self.tasks, self.config.rollout.evaluation_temperature)
        for name, value in evaluation_figures(episodes).items():
            metrics.add_mean(f"held_out/{name}", value * len(episodes), len(episodes), "sequences")
        self._record_episodes(episodes, step, "held_out")

    def final_evaluation(self) -> StepMetrics:
        """Sync the final weights and evaluate them."""
        metrics = StepMetrics(self.config.training.steps)
        self.progress.phase("evaluate")
        self.sync_weights(self.config.training.steps, metrics)
        self.evaluate(self.config.training.steps, metrics)
        return metrics

    def _record_episodes(self, episodes: list[Trajectory], step: int, split: str) -> None:
        decode = self.tasks.harmony.decode_token
        kept = episodes[:: max(1, len(episodes) // max(1, self.config.training.episodes_in_report))]
        kept = kept[: self.config.training.episodes_in_report]
        self.session.run.append_episodes([episode_record(e, decode, step=step, split=split) for e in kept])

    @contextmanager
    def _timed(self, phase: str, metrics: StepMetrics) -> Iterator[None]:
        self.progress.phase(phase)
        began = time.monotonic()
        yield
        metrics.add_last(f"seconds/{phase}", time.monotonic() - began)
