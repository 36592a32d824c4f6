"""Records the steps of a run: metrics, episodes for the report, drift, and missing signals."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from megatron_gptoss.samples import TrainingSamples
from rl_loop.data.rollout_batch import RlUpdates, RolloutBatch
from rl_loop.data.samples import max_staleness
from rl_loop.data.trajectory import TrajectoryGroup
from rl_loop.tracking.episode_recorder import EpisodeRecorder
from rl_loop.tracking.episode_table import SplitEpisodes, sample_rows
from rl_loop.tracking.experiment_trackers import ExperimentTracker
from rl_loop.tracking.metrics import MetricName, MetricsWriter, StepMetrics
from rl_loop.tracking.progress import Progress
from rl_loop.tracking.run_directory import (
    RunDirectory,
    metric_curve,
    read_json_lines,
)
from rl_loop.tracking.signal_watch import PATIENCE, SignalWatch
from rl_loop.tracking.step_metrics import (
    add_held_out_metrics,
    add_rollout_metrics,
    add_staleness_metrics,
    add_update_metrics,
    add_zero_advantage_fraction,
)

TABLE_EPISODES = 4
"""Number of episodes per step and split in the tables of experiment trackers."""

DRIFT_STEPS = 10
"""First steps of a run that later steps are compared with."""


class StepRecord:
    """Metrics of one step while it runs.

    The step number of a record is the number of completed steps. The update of the step belongs to
    ``done + 1`` steps. An evaluation of the policy before that update belongs to ``done`` steps.
    """

    def __init__(self, done: int, progress: Progress) -> None:
        """Start a record. ``done`` is the number of completed steps before this one."""
        self.metrics = StepMetrics(done + 1)
        """Metrics of episodes and update."""
        self.evaluation = StepMetrics(done)
        """Metrics of held-out data. Empty if the step has no evaluation."""
        self._progress = progress
        self._began = time.monotonic()

    @contextmanager
    def time_phase(self, phase: str) -> Iterator[None]:
        """Show ``phase`` to the user and add the block's seconds to ``seconds/PHASE``."""
        with self._time_phase(phase, self.metrics):
            yield

    @contextmanager
    def timed_evaluation(self, phase: str) -> Iterator[None]:
        """Show and time a phase of the evaluation, as ``time_phase`` does for phases of the step."""
        with self._time_phase(phase, self.evaluation):
            yield

    @contextmanager
    def _time_phase(self, phase: str, metrics: StepMetrics) -> Iterator[None]:
        self._progress.phase(phase)
        began = time.monotonic()
        yield
        metrics.add(f"seconds/{phase}", time.monotonic() - began, "sum", "phases")

    def add_speed(self, tokens: int) -> None:
        """Add the step's wall time until now in seconds, and ``tokens`` per second.

        Args:
            tokens: all tokens of the step's sequences: prompts, tool outputs and sampled tokens.
        """
        seconds = time.monotonic() - self._began
        self.metrics.add(MetricName.STEP_SECONDS, seconds, "last")
        self.metrics.add(MetricName.TOKENS_PER_SECOND, tokens / seconds, "last")


class StepRecorder:
    """Writes the results of steps, and keeps the values of the first steps for comparison."""

    def __init__(
        self,
        run: RunDirectory,
        writer: MetricsWriter,
        progress: Progress,
        episodes: EpisodeRecorder,
        trackers: Sequence[ExperimentTracker] = (),
        samples: int = TABLE_EPISODES,
        *,
        steps: int,
    ) -> None:
        """Create the recorder of a run, with the values of its first steps if it is resumed.

        Args:
            run: the run's directory.
            writer: writes metrics.
            progress: prints to the terminal.
            episodes: writes episodes.
            trackers: experiment trackers.
            samples: episodes of each step and split that ``trackers`` get.
            steps: training steps of the run.
        """
        self.run = run
        self.progress = progress
        self._writer = writer
        self._episodes = episodes
        self._trackers = trackers
        self._samples = samples
        # A resumed run is compared with the first steps of the whole run, which the file has.
        self._first_gaps = metric_curve(read_json_lines(run.metrics), MetricName.LOG_PROB_GAP)[1][
            :DRIFT_STEPS
        ]
        self._watch = SignalWatch(min(PATIENCE, steps))

    def begin_step(self, done: int) -> StepRecord:
        """Return the record of the step that follows ``done`` completed steps."""
        return StepRecord(done, self.progress)

    def record_rl_step(
        self,
        record: StepRecord,
        rollouts: RolloutBatch,
        samples: TrainingSamples,
        updates: RlUpdates,
    ) -> None:
        """Write a finished step of reinforcement learning.

        Args:
            record: metrics of the step.
            rollouts: episodes of the step.
            samples: samples of ``rollouts.train``, with advantages.
            updates: results of the updates.
        """
        metrics = record.metrics
        metrics.add("rollout/staleness_max", max_staleness(samples), "max", "tokens")
        # None without dynamic sampling. With it, 0 replaced groups are a result.
        if rollouts.replaced is not None:
            metrics.add("rollout/groups_replaced", len(rollouts.replaced), "sum", "groups")
        if rollouts.async_groups is not None:
            add_staleness_metrics(metrics, rollouts.async_groups, rollouts.episodes, samples)
        add_zero_advantage_fraction(metrics, rollouts.train, samples)
        add_rollout_metrics(metrics, rollouts.train)
        add_update_metrics(metrics, updates)
        self._add_drift(metrics)
        self._warn_if_nothing_is_learned(metrics, updates)

        recorded = [SplitEpisodes("train", rollouts.train, samples, updates.tokens)]
        if rollouts.replaced:
            recorded.append(SplitEpisodes("replaced", rollouts.replaced))
        if rollouts.held_out:
            add_held_out_metrics(record.evaluation, rollouts.held_out)
            held_out = SplitEpisodes("held_out", rollouts.held_out, step=record.evaluation.step)
            recorded.append(held_out)
        # First, because Weights & Biases takes steps in ascending order only.
        self._write_evaluation(record)
        self._record_episodes(metrics.step, recorded)

        # Last, so that the time of the step includes the writing of its episodes.
        record.add_speed(sum(map(len, rollouts.sequences)))
        self._writer.write(metrics)

    def record_sft_step(
        self,
        record: StepRecord,
        samples: TrainingSamples,
        sampled: Sequence[TrajectoryGroup] = (),
    ) -> None:
        """Write a finished step of supervised fine-tuning.

        Args:
            record: metrics of the step.
            samples: trained samples.
            sampled: turns of conversations that a validation before the step sampled.
        """
        self.record_validation(record, sampled)
        self._episodes.record_conversations(record.metrics.step, samples)
        record.add_speed(samples.tokens)
        self._writer.write(record.metrics)

    def record_validation(
        self, record: StepRecord, sampled: Sequence[TrajectoryGroup] = ()
    ) -> None:
        """Write a validation, with the turns that it ``sampled``."""
        self._write_evaluation(record)
        if sampled:
            step = record.evaluation.step
            self._record_episodes(step, [SplitEpisodes("held_out", sampled, step=step)])

    def record_evaluation(self, record: StepRecord, groups: Sequence[TrajectoryGroup]) -> None:
        """Write an evaluation that belongs to no training step."""
        add_held_out_metrics(record.evaluation, groups)
        self._record_episodes(record.evaluation.step, [SplitEpisodes("held_out", groups)])
        self._write_evaluation(record)

    def finish_writing(self) -> None:
        """Wait until all episodes are on disk. Raises RunWriteError if writing failed."""
        self._episodes.finish_writing()

    def _write_evaluation(self, record: StepRecord) -> None:
        if record.evaluation.scalars:
            self._writer.write(record.evaluation)

    def _record_episodes(self, step: int, splits: Sequence[SplitEpisodes]) -> None:
        self._episodes.record(step, splits)
        if not self._trackers or self._samples == 0:
            return
        samples = sample_rows(step, splits, self._samples)
        for tracker in self._trackers:
            tracker.log_samples(step, samples)

    def _add_drift(self, metrics: StepMetrics) -> None:
        """Add the mismatch of engine and trainer relative to the first steps of the run."""
        gap = metrics.values().get(MetricName.LOG_PROB_GAP)
        # The critic is warming up, and no policy update measured the mismatch.
        if gap is None:
            return

        # The first steps are compared with the mean of the steps until then.
        if len(self._first_gaps) < DRIFT_STEPS:
            self._first_gaps.append(gap)
        before = sum(self._first_gaps) / len(self._first_gaps)
        if before > 0:
            metrics.add("mismatch/drift", gap / before, "last")

    def _warn_if_nothing_is_learned(self, metrics: StepMetrics, updates: RlUpdates) -> None:
        only_the_critic_learns = updates.critic and not updates.policy
        if only_the_critic_learns:
            return
        gradients = [update.grad_norm for update in updates.policy]
        warning = self._watch.observe(metrics.values(), gradients)
        if warning is not None:
            self.progress.note(f"step {metrics.step}: {warning}")
