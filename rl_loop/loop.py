"""The closed loop.

    weights v -> rollout workers -> episodes sampled with v -> rewards -> advantages -> packed batch
        ^                                                                                         |
        +------------- v + 1 <- optimizer step, importance ratio 1 because sampled with v <-------+

Everything random is derived from the seed and the step number, so a resumed run continues the same curve."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from rl_loop.ablations.engine_weights import with_engine_faults
from rl_loop.canary import check_canary
from rl_loop.config.run import RlConfig
from rl_loop.data import samples as batch
from rl_loop.data.trajectory import Trajectory, TrajectoryGroup
from rl_loop.evaluation.evaluate import evaluation_figures, held_out_requests
from rl_loop.infrastructure import InfrastructureOutage
from rl_loop.rollout.pool import GroupRequest, RolloutsAbandoned
from rl_loop.run import Session
from rl_loop.tracking.episode_record import episode_record
from rl_loop.tracking.metrics import Name, StepMetrics
from rl_loop.tracking.run_directory import metric_curve, read_json_lines
from rl_loop.tracking.signal_watch import SignalWatch
from rl_loop.trainer.worker import RlUpdates

DRIFT_STEPS = 10
"""Steps at the start of a run that later ones are compared with."""


@dataclass(frozen=True)
class RolloutBatch:
    """The episodes of one step."""

    train: list[TrajectoryGroup]  # rollout.tasks_per_step groups to train on
    held_out: list[TrajectoryGroup]  # of the evaluation, where one was asked for
    replaced: int  # groups without signal that dynamic sampling left out
    next_task: int  # position of the first training task that is still to be used


class RlLoop:
    """One run of ``gptoss rl``."""

    def __init__(self, config: RlConfig, session: Session) -> None:
        assert session.rollouts is not None
        self.config, self.session, self.rollouts = config, session, session.rollouts
        self.trainer, self.tasks, self.progress = session.trainer, session.tasks, session.progress
        self.held_out = held_out_requests(self.tasks, config.rollout.evaluation_temperature)
        earlier = read_json_lines(session.run.metrics)
        self._first_gaps = metric_curve(earlier, Name.LOGPROB_GAP)[1][:DRIFT_STEPS]
        self._thread = ThreadPoolExecutor(1, "rollouts")
        self._ahead: Future[RolloutBatch] | None = None
        self._ended = False
        self._watch = SignalWatch()

    def train(self) -> int:
        """All steps that are left. Returns the number of steps done in all, fewer than wanted if interrupted."""
        try:
            return self._train()
        finally:
            self._ended = True
            self._thread.shutdown()

    def _train(self) -> int:
        config, session = self.config, self.session
        for step in range(session.state["step"], config.training.steps):
            began = time.monotonic()
            metrics = StepMetrics(step)
            try:
                rollouts = self.rollouts_of(step, metrics)
            except RolloutsAbandoned:  # nothing of this step has changed the policy; it begins anew after the resume
                if step > session.state["step"]:
                    session.save(step, block=True)
                return step
            except InfrastructureOutage:
                if step > session.state["step"]:  # what was learned until now is not lost with what went wrong now
                    session.save(step, block=True)
                raise
            self.rollouts.pause()

            groups = rollouts.train
            with self._timed("prepare", metrics):
                samples = batch.to_samples(groups, config.algorithm, step)
                oldest = max((max(sample.staleness) for sample in samples if sample.staleness), default=0)
                metrics.add("rollout/staleness_max", oldest, "max", "tokens")

            with self._timed("estimate", metrics):
                columns: dict[str, Any] = (
                    self.trainer.estimates(samples) if config.algorithm.critic or config.algorithm.kl else {}
                )
                if config.algorithm.routing_replay != "none" and step % config.evaluate_every == 0:
                    free = self.trainer.score([replace(sample, routed_experts=None) for sample in samples])
                    batch.kl_without_replay(metrics, samples, free)

            with self._timed("prepare", metrics):
                for name, rows in columns.items():
                    samples = [replace(s, **{name: row}) for s, row in zip(samples, rows, strict=True)]
                samples = batch.with_advantages(samples, groups, config.algorithm, config.rollout.max_response_tokens)
                batch.signal_metrics(metrics, groups, samples)

            with self._timed("train", metrics), self.rollouts.updating_weights(step + 1):
                updates = self.trainer.rl_step(samples, config.algorithm, step)

            batch.rollout_metrics(metrics, groups)
            metrics.add("tasks_left_out", len(self.tasks.unusable), "last")
            batch.training_metrics(metrics, updates.policy)
            batch.critic_metrics(metrics, updates.critic)
            metrics.add("skipped_updates", updates.skipped, "sum")
            self._add_drift(metrics)
            self._warn_if_nothing_is_learned(step, metrics, updates)

            session.state["next_task"] = rollouts.next_task
            episodes = [trajectory for group in groups for trajectory in group.trajectories]
            self._record_episodes(episodes, step, "train")
            if session.end_step(metrics, began, sum(map(len, episodes))):
                return step + 1
        return config.training.steps

    def rollouts_of(self, step: int, metrics: StepMetrics) -> RolloutBatch:
        """The episodes of this step, after a sync to its weights, and where due those of their evaluation.

        With ``max_staleness`` 1 the ones to train on were begun one step ago, and those of the next step begin here:
        the engines work while the trainer does, on weights that are one step older than the trainer's."""
        config, ahead = self.config, self._ahead
        with self._timed("rollout", metrics):
            begun = ahead.result() if ahead else None
        with self._timed("sync", metrics):
            self.sync_weights(step, metrics)
        held_out = self.held_out if step % config.evaluate_every == 0 else []
        with self._timed("rollout", metrics):
            if begun is None:
                # held-out episodes run among those of the step, so that no worker waits for the last of them
                rollouts = self.collect(step, self._next_task(step), held_out)
            else:
                rollouts = replace(begun, held_out=self._run(held_out) if held_out else [])
        if config.algorithm.max_staleness and step + 1 < config.training.steps:
            self._ahead = self._thread.submit(self.collect, step + 1, rollouts.next_task)

        if config.algorithm.dynamic_sampling_rounds > 1:
            metrics.add("rollout/groups_replaced", rollouts.replaced, "sum", "groups")
        if held_out:
            self.record_evaluation(step, metrics, rollouts.held_out)
        return rollouts

    def _next_task(self, step: int) -> int:
        """Position of the first training task of a step, which a checkpoint remembers: dynamic sampling uses more or
        fewer tasks per step. Checkpoints from before that counted all its rounds."""
        per_step = self.config.rollout.tasks_per_step * self.config.algorithm.dynamic_sampling_rounds
        return int(self.session.state.get("next_task", step * per_step))

    def collect(self, step: int, first_task: int, held_out: Sequence[GroupRequest] = ()) -> RolloutBatch:
        """Run the episodes of one training step, on tasks from position ``first_task`` on, and of ``held_out``.

        With dynamic sampling, groups without signal make room for those of further tasks; what is still missing after
        the last round is filled up with them. Every task is used in its turn: one whose episodes were not needed,
        because enough came before it, is the first of the next step, with new episodes."""
        algorithm, wanted = self.config.algorithm, self.config.rollout.tasks_per_step
        rounds = algorithm.dynamic_sampling_rounds
        evaluated: list[TrajectoryGroup] = []
        with_signal: list[tuple[int, TrajectoryGroup]] = []  # with the position of the task
        silent: list[tuple[int, TrajectoryGroup]] = []
        next_task = first_task
        for number in range(rounds):
            others = held_out if number == 0 else ()
            groups = self._run([*others, *self.requests(step * rounds + number, next_task)])
            evaluated += groups[: len(others)]
            for position, group in enumerate(groups[len(others) :], start=next_task):
                has_signal = rounds == 1 or batch.has_signal(group, algorithm)
                (with_signal if has_signal else silent).append((position, group))
            next_task += wanted
            if len(with_signal) >= wanted:
                break

        chosen = (with_signal + silent)[:wanted]
        if len(with_signal) >= wanted:
            next_task = chosen[-1][0] + 1
        used = {position for position, _ in chosen}
        replaced = sum(position < next_task and position not in used for position, _ in silent)
        return RolloutBatch([group for _, group in chosen], evaluated, replaced, next_task)

    def _run(self, requests: Sequence[GroupRequest]) -> list[TrajectoryGroup]:
        return self.rollouts.run(requests, lambda: self._ended or self.session.interrupt.abort_rollouts)

    def requests(self, block: int, first_task: int) -> list[GroupRequest]:
        """The episodes of ``tasks_per_step`` tasks from position ``first_task`` on. ``block`` seeds them: a step is one
        block unless it samples dynamically."""
        rollout = self.config.rollout
        tasks = self.tasks.train(first_task, rollout.tasks_per_step)
        requests = []
        for position, task in enumerate(tasks):
            base = ((self.config.seed * 1_000_003 + block) * 1_000_003 + position) * 1_000
            seeds = tuple(range(base, base + rollout.samples_per_task))
            requests.append(GroupRequest(task, seeds, rollout.temperature, purify=True))
        return requests

    def sync_weights(self, version: int, metrics: StepMetrics) -> None:
        """Bring the workers to the trainer's weights and make sure that both compute the same with them."""
        source = with_engine_faults(self.trainer, self.config.ablation, self.config.seed + version)
        self.rollouts.sync_weights(source, version)
        gap = check_canary(self.trainer, self.rollouts, self.tasks.canary(), self.config, version)
        metrics.add("mismatch/canary_gap", gap, "max", "tokens")

    def record_evaluation(self, step: int, metrics: StepMetrics, groups: list[TrajectoryGroup]) -> None:
        episodes = [episode for group in groups for episode in group.trajectories]
        batch.lost_episodes(metrics, groups, prefix="held_out")
        for name, value in evaluation_figures(episodes).items():
            metrics.add_mean(f"held_out/{name}", value * len(episodes), len(episodes), "sequences")
        self._record_episodes(episodes, step, "held_out")

    def final_evaluation(self) -> StepMetrics:
        metrics = StepMetrics(self.config.training.steps)
        self.progress.phase("evaluate")
        self.sync_weights(self.config.training.steps, metrics)
        self.record_evaluation(self.config.training.steps, metrics, self.rollouts.run(self.held_out))
        return metrics

    def _add_drift(self, metrics: StepMetrics) -> None:
        """The mismatch as a multiple of what it was in the first steps of the run."""
        gap = metrics.values().get(Name.LOGPROB_GAP)
        if gap is None:  # the critic is warming up
            return
        if len(self._first_gaps) < DRIFT_STEPS:
            self._first_gaps.append(gap)
        if (before := sum(self._first_gaps) / len(self._first_gaps)) > 0:
            metrics.add("mismatch/drift", gap / before, "last")

    def _warn_if_nothing_is_learned(self, step: int, metrics: StepMetrics, updates: RlUpdates) -> None:
        only_the_critic_learns = updates.critic and not updates.policy
        if only_the_critic_learns:
            return
        gradients = [update.grad_norm for update in updates.policy]
        warning = self._watch.observe(metrics.values(), gradients)
        if warning is not None:
            self.progress.note(f"step {step + 1}: {warning}")

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
        metrics.add(f"seconds/{phase}", time.monotonic() - began, "sum", "phases")
