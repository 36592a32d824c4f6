"""The training loop of reinforcement learning.

    weights v -> rollout workers -> episodes sampled with v -> advantages -> packed batch
        ^                                                                           |
        +------------------------ v + 1 <- optimizer steps <------------------------+

``RlLoop.run_step`` is one pass. With ``algorithm.max_staleness`` 0 and one mini-batch, an update
starts from the weights that sampled its tokens. Their importance ratio is then exactly 1, unless
``algorithm.old_log_probs`` is set.

If ``algorithm.max_staleness`` is k > 0, episodes of the next k steps run at the same time. A weight
sync interrupts them, and they continue with the new weights.

All seeds follow from the run's seed and the step number. With ``max_staleness`` 0, a resumed run
therefore continues the same curve, bit for bit with ``rollout.engine.deterministic``. Otherwise the
batch decides the last bits. With ``max_staleness`` above 0, the time of a sync decides which
weights sample a token, so curves differ in their last digits.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from typing import Protocol

import numpy as np

from converters.mxfp4_tensors import Digests
from megatron_gptoss.samples import TrainingSamples
from rl_loop.config.run import RlConfig
from rl_loop.data.credit import assign_advantages
from rl_loop.data.response_check import check_sampled_by_policy
from rl_loop.data.rollout_batch import RlUpdates, RolloutBatch
from rl_loop.data.samples import to_samples
from rl_loop.data.trajectory import TrajectoryGroup
from rl_loop.infrastructure import InfrastructureOutageError
from rl_loop.rollout.collector import (
    HeldOutTasks,
    RolloutCollector,
    TrainingRequests,
    TrainingTasks,
    held_out_requests,
)
from rl_loop.rollout.group_store import FinishedGroups, GroupStore
from rl_loop.rollout.group_stream import GroupRequest, GroupStream, RolloutsAbandoned
from rl_loop.tracking.metrics import StepMetrics
from rl_loop.tracking.recorder import StepRecord, StepRecorder
from rl_loop.tracking.step_metrics import (
    add_mismatch_without_replay,
    add_shaping_metrics,
    add_teacher_metrics,
)
from rl_loop.trainer.checkpointer import Checkpointer
from rl_loop.weight_sync.canary import CanaryTolerance, SyncCheck, check_sync
from rl_loop.weight_sync.source import WeightSource

EPISODE_MISMATCH_FACTOR = 100
"""Allowed difference between engine and trainer on one episode, as a multiple of the canary's
tolerance. Rounding, routes and unlikely tokens stay far below it. An answer to another request lies
far above it."""


class RlTrainer(WeightSource, Protocol):
    """The policy and the models beside it: a TrainerGroup (``trainer.group``).

    It splits the samples over the data-parallel ranks, and calls the method of the same name of
    ``trainer.worker.TrainerWorker`` on every rank.
    """

    def score(self, samples: TrainingSamples, temperature: float | None = None) -> np.ndarray: ...

    def compute_estimates(self, samples: TrainingSamples) -> dict[str, np.ndarray]: ...

    def rl_step(self, samples: TrainingSamples, step: int) -> RlUpdates: ...

    def mxfp4_digests(self) -> Digests: ...

    def enter_phase(self, phase: str) -> None: ...


class RolloutRunner(Protocol):
    """The engines, and the workers that run episodes with them: a RolloutPool (``rollout.pool``).

    Embedded engines are parts of the workers. SGLang servers belong to the pool's backend.
    """

    @property
    def scores_during_rollouts(self) -> bool: ...

    def sync_weights(self, source: WeightSource, version: int) -> None: ...

    def prepare_sync(self, source: WeightSource) -> None: ...

    # These four compare engines with the trainer (``weight_sync.canary``).

    def score(self, token_ids: list[int], temperature: float) -> list[list[float]]: ...

    def rounding_errors(self, token_ids: list[int]) -> list[float | None]: ...

    def mxfp4_digests(self) -> list[Digests]: ...

    def compare_weights(self) -> None: ...

    # These two run episodes.

    def stream(self) -> GroupStream: ...

    def run(
        self, requests: Sequence[GroupRequest], abandon: Callable[[], bool] = ...
    ) -> list[TrajectoryGroup]: ...

    def pause(self) -> None: ...

    def updating_weights(self, version: int) -> AbstractContextManager[None]: ...


class RlTasks(TrainingTasks, HeldOutTasks, Protocol):
    """Training and held-out tasks: a TaskMixture."""

    unusable: list[str]
    """Reasons for tasks that were left out at the start, such as a prompt that is too long."""

    @property
    def selects_tasks(self) -> bool: ...

    def add_groups(self, step: int, groups: Sequence[TrajectoryGroup]) -> None: ...

    def canary(self) -> list[int]: ...


class RlLoop:
    """Steps of reinforcement learning, evaluations, and the state for a resume."""

    def __init__(
        self,
        config: RlConfig,
        *,
        trainer: RlTrainer,
        rollouts: RolloutRunner,
        tasks: RlTasks,
        recorder: StepRecorder,
        checkpointer: Checkpointer,
        group_store: GroupStore | None = None,
        abort_rollouts: Callable[[], bool] = lambda: False,
    ) -> None:
        """Build the loop over parts that are ready.

        Args:
            config: configuration of the run.
            trainer: the policy.
            rollouts: engines and the workers that run episodes with them.
            tasks: training and held-out tasks.
            recorder: writes metrics and episodes.
            checkpointer: saves the run, and knows the step to continue from.
            group_store: keeps finished episodes with checkpoints. None to sample them again after
                a resume.
            abort_rollouts: returns True if no time is left for the episodes in flight.
        """
        self.config = config
        self.algorithm = config.algorithm
        self.trainer = trainer
        self.rollouts = rollouts
        self.tasks = tasks
        self.recorder = recorder
        self.checkpointer = checkpointer
        self.state = checkpointer.state
        self.canary_tolerance = CanaryTolerance.of(config.canary_tolerance, config.dtype)
        # The same requests with the same seeds in every evaluation, so that curves differ by the
        # weights only.
        self.held_out = held_out_requests(tasks, config.rollout.evaluation_temperature)
        self.group_store = group_store
        self.engine_digests: Digests = {}
        """Digests of the quantized experts that the engines held after the last sync."""

        # The check of the last sync may run on a thread while episodes run.
        self._sync_check: Future[SyncCheck] | None = None
        self._checking = ThreadPoolExecutor(1, "canary")

        self._first_step = self.state.step
        self.collector = self._make_collector(abort_rollouts)
        # Groups are written before their checkpoint. If the run dies in between, a resume starts at
        # an earlier checkpoint and deletes the file.
        checkpointer.save_external_state = self.save_finished_groups

    def _make_collector(self, abort_rollouts: Callable[[], bool]) -> RolloutCollector:
        """Return the collector of the steps that are left."""
        config, step = self.config, self.state.step
        finished: FinishedGroups = {}
        if self.group_store is not None:
            finished = self.group_store.load(step)
        return RolloutCollector(
            self.rollouts,
            TrainingRequests(self.tasks, config.rollout, config.seed),
            config.algorithm,
            steps=config.training.steps,
            first_step=step,
            first_task=self.state.next_task,
            finished=finished,
            # Episodes of engines with wrong weights are useless, so a failed check ends the wait
            # for them. `collect_episodes` then raises the error of the check.
            abandon=lambda: abort_rollouts() or self._sync_check_has_failed(),
            on_ended=self.recorder.progress.episodes,
        )

    def train(self) -> int:
        """Run all steps that are left.

        Returns:
            The number of completed steps, which is below ``training.steps`` after an interrupt.
        """
        try:
            while self.state.step < self.config.training.steps:
                self.run_step(self.state.step)
                # Counts the step. The trainer has weights ``state.step`` again.
                is_last = self.checkpointer.end_step()
                if is_last:
                    break
        except RolloutsAbandoned:
            # This step has not changed the policy. A resume takes the step again.
            self._save_finished_steps()
        except InfrastructureOutageError:
            # The outage must not lose the steps before it.
            self._save_finished_steps()
            raise
        finally:
            self.collector.close()
        return self.state.step

    def run_step(self, step: int) -> None:
        """Run one step. The trainer has weights ``step`` before and ``step + 1`` afterwards.

        Output, metrics and recorded episodes name a step by the weights after it: ``step + 1``.
        Held-out episodes have the number of their weights: ``step``.
        """
        record = self.recorder.begin_step(step)
        # Before the episodes: tokens of the weights that the update starts from have a ratio of 1.
        self.sync_engines(step, record)
        rollouts = self.collect_episodes(step, record)
        # The check must end here: it scores with weights that the update changes, and with engines
        # that may pause.
        self.finish_sync_check(record, record.metrics)
        self.switch_to_trainer(step)
        samples = self.build_samples(step, rollouts, record)
        samples = self.add_estimates(step, samples, record)
        samples = self.assign_advantages(samples, rollouts, record)
        updates = self.update_policy(step, samples, record)
        self.record_step(record, rollouts, samples, updates)

    def evaluate(self) -> StepMetrics:
        """Measure the policy on the held-out tasks after the last step. Returns the metrics."""
        step = self.config.training.steps
        record = self.recorder.begin_step(step)
        self.sync_engines(step, record)
        self.recorder.progress.phase("evaluate")
        # The collector has ended with the last step, so the pool runs these episodes directly.
        groups = self.rollouts.run(self.held_out)
        self.finish_sync_check(record, record.evaluation)
        self.recorder.record_evaluation(record, groups)
        return record.evaluation

    # -- phases of a step, in order ---------------------------------------------------------------

    def sync_engines(self, version: int, record: StepRecord) -> None:
        """Send the trainer's weights to the engines, and begin to compare both.

        Asynchronous episodes continue with the new weights.

        Raises:
            CanaryError: engines that are compared here, such as SGLang, differ from the trainer by
                more than the tolerance.
        """
        with record.time_phase("sync"):
            self.rollouts.sync_weights(self.trainer, version)
            check = partial(
                check_sync,
                self.trainer,
                self.rollouts,
                self.tasks.canary(),
                tolerance=self.canary_tolerance,
                version=version,
                is_quantized=self.config.trained_quantization is not None,
            )
            # Some engines give equal numbers under load. Their check runs while episodes begin, and
            # costs no time. Others are checked before new episodes begin, although episodes that
            # are asynchronous continue.
            if self.rollouts.scores_during_rollouts:
                self._sync_check = self._checking.submit(check)
            else:
                self._sync_check = Future()
                self._sync_check.set_result(check())

    def collect_episodes(self, step: int, record: StepRecord) -> RolloutBatch:
        """Return the episodes of a step and its evaluation.

        Also begin the episodes of later steps, as far as ``max_staleness`` allows.
        """
        with record.time_phase("rollout"):
            held_out = self.held_out if self._is_evaluated(step) else []
            self.collector.begin(step, held_out)
            try:
                return self.collector.collect(step)
            except Exception:
                # Engines with wrong weights fail in many ways. The check names the cause.
                if self._sync_check is not None:
                    self._sync_check.result()
                raise

    def finish_sync_check(self, record: StepRecord, metrics: StepMetrics) -> None:
        """Wait for the comparison of the engines with the trainer.

        Raises:
            CanaryError: they differ by more than the tolerance (``weight_sync.canary``). Episodes
                since the sync are neither trained on nor recorded.
        """
        with record.time_phase("sync"):
            assert self._sync_check is not None
            result = self._sync_check.result()
        self.engine_digests = result.mxfp4_digests
        # SGLang's servers report no digests, because checksums compare their weights. A count of 0
        # would read as if no weights had been compared.
        if result.mxfp4_digests:
            compared = len(result.mxfp4_digests)
            metrics.add("mismatch/mxfp4_experts_compared", compared, "last")
        metrics.add("mismatch/canary_gap", result.canary_gap, "max", "tokens")

    def switch_to_trainer(self, step: int) -> None:
        """Pause servers on the trainer's GPUs, and begin the trainer's next memory phase.

        The next weight sync resumes them.
        """
        # With staleness the engines sample episodes of later steps during the update.
        if self.algorithm.max_staleness == 0:
            self.rollouts.pause()
        self.trainer.enter_phase("scoring" if self._scores_samples(step) else "between_phases")

    def build_samples(
        self, step: int, rollouts: RolloutBatch, record: StepRecord
    ) -> TrainingSamples:
        """Return the token sequences of a step.

        Raises:
            OffPolicyError: older weights sampled a token and ``algorithm.old_log_probs`` is
                "detach", or the engine reports a weight version that does not exist yet.
        """
        with record.time_phase("prepare"):
            teachers = self.config.teacher_of_source
            return to_samples(rollouts.train, self.algorithm, step, teachers)

    def add_estimates(
        self, step: int, samples: TrainingSamples, record: StepRecord
    ) -> TrainingSamples:
        """Return the samples with the estimates of critic, reference policy and teacher.

        Steps with an evaluation also measure the mismatch without routing replay.
        """
        with record.time_phase("estimate"):
            if self.algorithm.estimates:
                samples = samples.with_columns(**self.trainer.compute_estimates(samples))
            if self.algorithm.compares_sampled_tokens:
                add_teacher_metrics(record.metrics, samples)
            # Without routes the trainer chooses the experts again, as it would without routing
            # replay.
            if self._compares_routes(step):
                scores = self.trainer.score(samples.without_routes())
                add_mismatch_without_replay(record.metrics, samples, scores)
            return samples

    def assign_advantages(
        self, samples: TrainingSamples, rollouts: RolloutBatch, record: StepRecord
    ) -> TrainingSamples:
        """Return the samples with an advantage for every sampled token."""
        limits = self.config.rollout
        with record.time_phase("prepare"):
            add_shaping_metrics(record.metrics, rollouts.train, self.algorithm)
            return assign_advantages(
                samples,
                rollouts.train,
                self.algorithm,
                limits.max_response_tokens,
                limits.max_episode_tokens,
            )

    def update_policy(self, step: int, samples: TrainingSamples, record: StepRecord) -> RlUpdates:
        """Train on the samples, and begin to gather the new weights for the next sync.

        Raises:
            ResponseMismatchError: the policy has not sampled one of the episodes. The trainer has
                the new weights, but the step is neither counted nor saved, and a resume repeats it.
        """
        with record.time_phase("update"):
            # Engines that restart during the update wait for the new weights.
            with self.rollouts.updating_weights(step + 1):
                updates = self.trainer.rl_step(samples, step)
            # For embedded engines, the ranks gather the new weights while this step is recorded.
            # Servers receive them only in the next sync.
            self.rollouts.prepare_sync(self.trainer)

        # Only with "detach" does the update use the log-probs of the weights that sampled.
        if self.algorithm.old_log_probs_from == "detach":
            limit = EPISODE_MISMATCH_FACTOR * self.canary_tolerance.nats
            check_sampled_by_policy(samples, updates.tokens, limit, step)
        return updates

    def record_step(
        self,
        record: StepRecord,
        rollouts: RolloutBatch,
        samples: TrainingSamples,
        updates: RlUpdates,
    ) -> None:
        """Write metrics and episodes, also of the evaluation, and count the tasks as used."""
        # An interrupted step begins again with the same tasks, so they count only here.
        self.state.next_task = rollouts.next_task
        self.tasks.add_groups(self.state.step, [*rollouts.train, *(rollouts.replaced or [])])
        if self.tasks.selects_tasks:
            record.metrics.add("rollout/tasks_skipped", rollouts.skipped_tasks, "sum")
        record.metrics.add("tasks_left_out", len(self.tasks.unusable), "last")
        self.recorder.record_rl_step(record, rollouts, samples, updates)

    # -- conditions -------------------------------------------------------------------------------

    def _is_evaluated(self, step: int) -> bool:
        return step % self.config.evaluate_every == 0

    def _compares_routes(self, step: int) -> bool:
        """Return True if the step measures the mismatch without routing replay."""
        return self.algorithm.routing_replay != "none" and self._is_evaluated(step)

    def _scores_samples(self, step: int) -> bool:
        """Return True if a forward pass over the samples precedes the update."""
        algorithm = self.algorithm
        return (
            bool(algorithm.estimates)
            or algorithm.old_log_probs_from == "forward"
            or self._compares_routes(step)
        )

    def _sync_check_has_failed(self) -> bool:
        check = self._sync_check
        return check is not None and check.done() and check.exception() is not None

    # -- saving -----------------------------------------------------------------------------------

    def save_finished_groups(self, step: int) -> None:
        """Keep the groups that ended and were not trained on, for a resume after ``step`` steps."""
        if self.group_store is not None:
            self.group_store.save(step, self.collector.finished_groups())

    def _save_finished_steps(self) -> None:
        """Save the steps of this attempt, and leave restored groups to the next one."""
        self.checkpointer.save_finished_steps()
        # ``GroupStore.load`` has marked the restored groups as in use. They are not the cause of
        # this end, so the mark is removed. After other errors it stays, and a resume samples the
        # groups again.
        if self.group_store is not None:
            self.group_store.release(self._first_step)
