"""The closed loop.

    weights v -> rollout workers -> episodes sampled with v -> advantages -> packed batch
        ^                                                                           |
        +------ v + 1 <- optimizer step, importance ratio 1 as sampled with v <-----+

With ``algorithm.max_staleness`` k above 0, episodes of the next k steps are sampled meanwhile; when
a sync comes they go on from where they are, with weights v + 1.

Everything random is derived from the seed and the step number, so a resumed run
continues the same curve."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from converters.mxfp4_tensors import Digests
from megatron_gptoss.config import Quantization
from megatron_gptoss.samples import TrainingSamples
from rl_loop.algorithms.config import AlgorithmConfig
from rl_loop.config.rollout import RolloutConfig
from rl_loop.data.credit import assign_advantages
from rl_loop.data.rollout_batch import RlUpdates, RolloutBatch, TokenEstimates
from rl_loop.data.samples import to_samples
from rl_loop.data.trained_tokens import check_sampled_by_policy
from rl_loop.data.trajectory import TrajectoryGroup
from rl_loop.environments import Task
from rl_loop.infrastructure import InfrastructureOutage
from rl_loop.rollout.collector import EarlierGroups, RolloutCollector, held_out_requests
from rl_loop.rollout.dynamic_sampling import DynamicCollector
from rl_loop.rollout.group_store import FinishedGroups, GroupStore
from rl_loop.rollout.group_stream import GroupRequest, GroupStream, RolloutsAbandoned
from rl_loop.tracking.metrics import StepMetrics
from rl_loop.tracking.recorder import StepRecord, StepRecorder
from rl_loop.tracking.step_metrics import add_mismatch_without_replay
from rl_loop.trainer.checkpointer import Checkpointer
from rl_loop.weight_sync.canary import CanaryTolerance, SyncCheck, check_sync
from rl_loop.weight_sync.source import WeightSource

FOREIGN_FACTOR = 100
"""Times the canary's tolerance that engine and trainer may differ on one episode: rounding, routes
and unlikely tokens stay far below it, and an answer to another request lies far above."""


class Trainer(WeightSource, Protocol):
    """The policy and what learns beside it: a TrainerGroup."""

    def score(self, samples: TrainingSamples, temperature: float | None = None) -> np.ndarray: ...

    def compute_values_and_reference_log_probs(
        self, samples: TrainingSamples
    ) -> TokenEstimates: ...

    def rl_step(self, samples: TrainingSamples, step: int) -> RlUpdates: ...

    def packed_digests(self) -> Digests: ...

    def enter_phase(self, phase: str) -> None: ...


class Rollouts(Protocol):
    """The engines, and the workers that run episodes with them: a RolloutPool."""

    @property
    def scores_beside_rollouts(self) -> bool: ...

    def sync_weights(self, source: WeightSource, version: int) -> None: ...

    def prepare_sync(self, source: WeightSource) -> None: ...

    def score(self, token_ids: list[int], temperature: float) -> list[list[float]]: ...

    def rounding_errors(self, token_ids: list[int]) -> list[float | None]: ...

    def packed_digests(self) -> list[Digests]: ...

    def compare_weights(self) -> None: ...

    def stream(self) -> GroupStream: ...

    def run(
        self, requests: Sequence[GroupRequest], abandon: Callable[[], bool] = ...
    ) -> list[TrajectoryGroup]: ...

    def pause(self) -> None: ...

    def updating_weights(self, version: int) -> AbstractContextManager[None]: ...


class Tasks(Protocol):
    """What is trained on and measured: a TaskSource."""

    unusable: list[str]

    def train(self, position: int, count: int) -> list[Task]: ...

    def held_out(self) -> list[Task]: ...

    def canary(self) -> list[int]: ...


@dataclass(frozen=True)
class LoopSettings:
    """The sections of a configuration that the loop needs."""

    steps: int
    """Training steps of the whole run."""
    seed: int
    """Of sampling."""
    evaluate_every: int
    """Steps between two evaluations."""
    canary_tolerance: CanaryTolerance
    """Largest difference between engine and trainer after a sync."""
    algorithm: AlgorithmConfig
    """Advantages and the policy loss."""
    rollout: RolloutConfig
    """How episodes are sampled."""
    quantization: Quantization | None = None
    """What experts are trained through, and sampled from."""

    def is_evaluated(self, step: int) -> bool:
        return step % self.evaluate_every == 0


class Collector(Protocol):
    """Runs the episodes that steps train on, perhaps ahead of them, and those of evaluations."""

    def begin(self, version: int, held_out: Sequence[GroupRequest] = ...) -> None: ...

    def collect(self, step: int) -> RolloutBatch: ...

    @property
    def passed_over(self) -> list[int]: ...

    def finished_groups(self) -> FinishedGroups: ...

    def close(self) -> None: ...


class RlLoop:
    """Reinforcement learning, one step after the other."""

    def __init__(
        self,
        settings: LoopSettings,
        *,
        trainer: Trainer,
        rollouts: Rollouts,
        tasks: Tasks,
        recorder: StepRecorder,
        checkpointer: Checkpointer,
        group_store: GroupStore | None = None,
        abort_rollouts: Callable[[], bool] = lambda: False,
    ) -> None:
        """Build the loop over parts that are ready.

        Args:
            settings: sections of the configuration.
            trainer: the policy.
            rollouts: engines and the workers that run episodes with them.
            tasks: training and held-out tasks.
            recorder: writes metrics and episodes.
            checkpointer: saves the run, and knows the step to continue from.
            group_store: keeps finished episodes with checkpoints. None to sample them again after
                a resume.
            abort_rollouts: returns True if no time is left for the episodes in flight.
        """
        self.settings = settings
        self.algorithm = settings.algorithm
        self.trainer = trainer
        self.rollouts = rollouts
        self.tasks = tasks
        self.recorder = recorder
        self.checkpointer = checkpointer
        self.state = checkpointer.state
        self.sampled_bits: Digests = {}
        """Of quantized experts: what engines held after the last sync."""
        self.held_out = held_out_requests(tasks, settings.rollout.evaluation_temperature)
        self.group_store = group_store
        self._first_step = self.state.step

        # The check of the last sync, perhaps under way on a thread of its own.
        self._check: Future[SyncCheck] | None = None
        self._checking = ThreadPoolExecutor(1, "canary")

        self.collector = self._new_collector(lambda: abort_rollouts() or self._check_has_failed())
        checkpointer.before_save = self.save_finished_groups

    def _new_collector(self, abandon: Callable[[], bool]) -> Collector:
        settings = self.settings
        if self.algorithm.dynamic_sampling_rounds > 1:
            return DynamicCollector(
                self.rollouts,
                self.tasks,
                settings.rollout,
                settings.algorithm,
                steps=settings.steps,
                seed=settings.seed,
                first_task=self.first_task(self.state.step),
                abandon=abandon,
                on_ended=self._show_episodes,
            )

        finished: FinishedGroups = {}
        if self.group_store is not None:
            finished = self.group_store.load(self.state.step)
        return RolloutCollector(
            self.rollouts,
            self.tasks,
            settings.rollout,
            settings.algorithm,
            steps=settings.steps,
            seed=settings.seed,
            first_step=self.state.step,
            earlier=EarlierGroups(self.state.passed_over, finished),
            abandon=abandon,
            on_ended=self._show_episodes,
        )

    def _show_episodes(self, ended: int, wanted: int) -> None:
        self.recorder.progress.episodes(ended, wanted)

    def train(self) -> int:
        """Run all steps that are left. Returns the number of steps done in all, fewer
        than wanted if interrupted."""
        try:
            while self.state.step < self.settings.steps:
                self.run_step(self.state.step)
                # Counts the step: the trainer's weights have that version from here on.
                is_last = self.checkpointer.end_step()
                if is_last:
                    break
        except RolloutsAbandoned:
            # This step has not changed the policy. A resume takes the step again.
            self._save_finished_steps()
        except InfrastructureOutage:
            # The outage must not lose the steps before it.
            self._save_finished_steps()
            raise
        finally:
            self.collector.close()
        return self.state.step

    def _save_finished_steps(self) -> None:
        """Save the steps of this attempt, and leave restored groups to the next one."""
        self.checkpointer.save_finished_steps()
        if self.group_store is not None:
            self.group_store.give_back(self._first_step)

    def run_step(self, step: int) -> None:
        """Sync, collect, estimate, assign advantages, update, record. The trainer has weights
        ``step`` before and ``step + 1`` afterwards."""
        record = self.recorder.begin_step(step)

        # Episodes that were begun ahead go on with the new weights from where they are.
        with record.timed("sync"):
            self.sync_engines(step)
        with record.timed("rollout"):
            rollouts = self.collect(step)
        with record.timed("sync"):
            self.finish_check(record.metrics)

        # From here on the engines sample episodes of later steps, or make room for the trainer.
        if self.algorithm.max_staleness == 0:
            self.rollouts.pause()
        self.trainer.enter_phase("scoring" if self.scores_samples(step) else "resting")

        # On-policy: a token of other weights than ``step`` raises OffPolicyError unless the
        # configuration allows it.
        with record.timed("prepare"):
            samples = to_samples(rollouts.train, self.algorithm, version=step)
        with record.timed("estimate"):
            samples = self.add_estimates(samples)
            self.measure_mismatch_without_replay(step, samples, record.metrics)
        with record.timed("prepare"):
            rollout = self.settings.rollout
            longest = rollout.max_response_tokens
            samples = assign_advantages(
                samples, rollouts.train, self.algorithm, longest, rollout.max_tokens
            )

        with record.timed("train"):
            updates = self.update(step, samples)
        # Only these log-probs are of the very weights that sampled.
        if self.algorithm.old_log_probs_from == "detach":
            limit = FOREIGN_FACTOR * self.settings.canary_tolerance.nats
            check_sampled_by_policy(samples, updates.tokens, limit, step)

        # Only now: an interrupted step begins anew with the same tasks.
        self.state.next_task = rollouts.next_task
        self.state.passed_over = self.collector.passed_over
        self.record(record, rollouts, samples, updates)

    def sync_engines(self, version: int) -> None:
        """Bring the engines to the trainer's weights, and begin to check that both compute the same
        with them. ``finish_check`` waits for the check.
        """
        self.rollouts.sync_weights(self.trainer, version)

        check = partial(
            check_sync,
            self.trainer,
            self.rollouts,
            self.tasks.canary(),
            tolerance=self.settings.canary_tolerance,
            version=version,
            is_quantized=self.settings.quantization is not None,
        )
        if self.rollouts.scores_beside_rollouts:
            self._check = self._checking.submit(check)
        else:
            self._check = Future()
            self._check.set_result(check())

    def finish_check(self, metrics: StepMetrics) -> None:
        """Wait until every engine has been compared with the trainer. Raises what they differ in:
        nothing may be trained on, or recorded, that was sampled since the last sync."""
        assert self._check is not None
        found = self._check.result()
        if self.settings.quantization is not None:
            self.sampled_bits = found.packed_experts
            # SGLang's servers tell no digests: their weights are compared by checksums, and a 0 would
            # read as if nothing had been.
            if found.packed_experts:
                compared = len(found.packed_experts)
                metrics.add("mismatch/packed_experts_compared", compared, "last")
        metrics.add("mismatch/canary_gap", found.canary_gap, "max", "tokens")

    def _check_has_failed(self) -> bool:
        check = self._check
        return check is not None and check.done() and check.exception() is not None

    def collect(self, step: int) -> RolloutBatch:
        """Return the episodes of this step and, where due, those of its evaluation; begin those
        of later steps as far as the weights of this one allow."""
        held_out = self.held_out if self.settings.is_evaluated(step) else []
        self.collector.begin(step, held_out)
        try:
            return self.collector.collect(step)
        except Exception:
            # Engines with other weights than the trainer's fail in many ways: this names the cause.
            if self._check is not None:
                self._check.result()
            raise

    def first_task(self, step: int) -> int:
        """Return the position of the first training task of a step.

        The state remembers it: dynamic sampling uses more or fewer tasks per step. Checkpoints
        from before that counted all its rounds."""
        if self.state.next_task is not None:
            return self.state.next_task
        return step * self.settings.rollout.tasks_per_step * self.algorithm.dynamic_sampling_rounds

    def scores_samples(self, step: int) -> bool:
        """Return whether a model computes log-probs or values of the samples before the update."""
        algorithm = self.algorithm
        compares_routes = algorithm.routing_replay != "none" and self.settings.is_evaluated(step)
        return (
            algorithm.critic is not None
            or algorithm.kl is not None
            or algorithm.old_log_probs_from == "forward"
            or compares_routes
        )

    def add_estimates(self, samples: TrainingSamples) -> TrainingSamples:
        """Return the samples with the critic's values and the reference policy's
        log-probs, if there are any."""
        if self.algorithm.critic is None and self.algorithm.kl is None:
            return samples
        return self.trainer.compute_values_and_reference_log_probs(samples).attach(samples)

    def measure_mismatch_without_replay(
        self, step: int, samples: TrainingSamples, metrics: StepMetrics
    ) -> None:
        """On steps with an evaluation, score the episodes with the experts that the trainer
        chooses itself: what routing replay is good for."""
        if self.algorithm.routing_replay == "none" or not self.settings.is_evaluated(step):
            return
        scores = self.trainer.score(samples.without_routes())
        add_mismatch_without_replay(metrics, samples, scores)

    def save_finished_groups(self, step: int) -> None:
        """Keep what was sampled ahead for a run that is resumed after ``step`` steps."""
        if self.group_store is not None:
            self.group_store.save(step, self.collector.finished_groups())

    def update(self, step: int, samples: TrainingSamples) -> RlUpdates:
        """Train on the samples. Engines that restart meanwhile wait for the
        weights that come of it."""
        with self.rollouts.updating_weights(step + 1):
            updates = self.trainer.rl_step(samples, step)
        self.rollouts.prepare_sync(self.trainer)
        return updates

    def record(
        self,
        record: StepRecord,
        rollouts: RolloutBatch,
        samples: TrainingSamples,
        updates: RlUpdates,
    ) -> None:
        """Write what the step was like."""
        record.metrics.add("tasks_left_out", len(self.tasks.unusable), "last")
        self.recorder.record_rl_step(record, rollouts, samples, updates)

    def evaluate(self) -> StepMetrics:
        """Measure the policy as it is now on the held-out tasks, and write
        and return the result."""
        step = self.settings.steps
        record = self.recorder.begin_step(step)
        self.recorder.progress.phase("evaluate")
        self.sync_engines(step)
        groups = self.rollouts.run(self.held_out)
        self.finish_check(record.evaluation)
        self.recorder.record_evaluation(record, groups)
        return record.evaluation
