"""Opens all parts of a run, and closes them after success, an error or an interrupt."""

import logging
import shutil
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rl_loop.cluster.ray_session import ray_session
from rl_loop.config.every_run import RunConfig
from rl_loop.config.load import dump_config
from rl_loop.config.run import RlConfig, SftConfig, check_reward_parts
from rl_loop.lifecycle.inputs import to_json
from rl_loop.lifecycle.interrupt import InterruptHandler, SeparateSessions
from rl_loop.lifecycle.resume import ConfigChange, changes_since, read_run_inputs, write_config
from rl_loop.lifecycle.resume_rules import sampling_digest
from rl_loop.lifecycle.start_checks import check_run_requirements, store_need
from rl_loop.lifecycle.store_size import check_running_store, store_bytes
from rl_loop.run_parts import build_rollouts, build_tasks, build_trainer, open_supervised_data
from rl_loop.tracking.metrics import MetricsWriter
from rl_loop.tracking.progress import Progress, ProgressFactory
from rl_loop.tracking.run_directory import (
    RunDirectory,
    StartMode,
    check_start,
    read_json_lines,
    start_run,
    write_json,
)
from rl_loop.tracking.run_lock import LEASE_SECONDS, locked_run

# Modules that import torch or Ray are imported where they are used, so that a mistake in a
# configuration is reported first.
if TYPE_CHECKING:
    from rl_loop.chat.codec import ChatCodec
    from rl_loop.conversations.rejections import RejectionReport
    from rl_loop.loop import RlLoop
    from rl_loop.rollout.pool import RolloutPool
    from rl_loop.rollout.worker import RolloutWorker
    from rl_loop.supervised_data import SupervisedData
    from rl_loop.tasks.source import TaskMixture
    from rl_loop.tracking.recorder import StepRecorder
    from rl_loop.trainer.checkpointer import Checkpointer, RunState
    from rl_loop.trainer.group import TrainerGroup

logger = logging.getLogger(__name__)


class RunInterrupted(Exception):  # noqa: N818 - control flow, not an error
    """The run was stopped on request. The message states the saved step."""

    exit_status = 130
    """Exit status for the shell."""


class RunSession(ABC):
    """A training run between its start and its end, as a context.

    Everything that starts is put on one stack, and the stack is unwound however the run ends. The
    run's directory is written only after all parts are ready. After an interrupt the context raises
    RunInterrupted, once everything is closed.
    """

    codec: "ChatCodec"
    """Renders and parses the conversations of the policy."""
    trainer: "TrainerGroup"
    """Ranks of the trainer, ready."""
    run: RunDirectory
    """Directory of the run."""
    progress: Progress
    """Display for the user."""
    recorder: "StepRecorder"
    """Writer of metrics and episodes."""
    checkpointer: "Checkpointer"
    """Saves the run, and knows the step to continue from."""

    def __init__(self, config: RunConfig, show: ProgressFactory, how: StartMode) -> None:
        self._config = config
        self._show = show
        self._how = how
        self._stack = ExitStack()
        self.interrupt = InterruptHandler()

    def __enter__(self) -> Self:
        # Python does not call ``__exit__`` if ``__enter__`` raises, but some parts have started
        # already.
        try:
            self._open()
        except BaseException as error:
            self._stack.__exit__(type(error), error, error.__traceback__)
            self._raise_if_interrupted(error)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, traceback)
        self._raise_if_interrupted(error)

    def _raise_if_interrupted(self, error: BaseException | None) -> None:
        """Raise RunInterrupted if ``error`` is a request to stop. Everything is closed by now."""
        if isinstance(error, KeyboardInterrupt):
            message = f"stopped at once; {self.saved_step_message()}"
        elif isinstance(error, RunInterrupted):
            message = str(error)
        else:
            return
        # The user asked for the stop, so its traceback is not shown.
        stop = RunInterrupted(message)
        stop.exit_status = self.interrupt.exit_status
        raise stop from None

    # -- parts that differ between RlSession and SftSession ---------------------------------------

    @abstractmethod
    def _open_data(self) -> None:
        """Read and check the training data, and set ``codec``."""

    @abstractmethod
    def _start_actors(self) -> None:
        """Start the trainer, and engines if there are any."""

    @abstractmethod
    def _continue_data(self, state: "RunState") -> None:
        """Continue with the data where a checkpoint stopped."""

    @abstractmethod
    def _task_cursor(self, state: "RunState") -> dict[str, Any] | None:
        """Return the position in the data of tasks after the steps of ``state``."""

    # -- building ---------------------------------------------------------------------------------

    def _open(self) -> None:
        config, how, stack = self._config, self._how, self._stack
        # First on the stack, so that signals are handled until all other parts are closed.
        stack.enter_context(self.interrupt.installed())

        # A previous attempt's node may have died, and its lock is then still held.
        wait_seconds = LEASE_SECONDS if how is StartMode.RESUME_OR_NEW else 0.0
        stack.enter_context(locked_run(config.directory, wait_seconds))
        self.run = check_start(config.directory, how)
        if how.may_resume:
            # Unfinished files of a killed driver take the disk space of new ones.
            self._delete_unfinished()

        # Mistakes are found before anything heavy is started.
        self._inputs = read_run_inputs(config)
        changes = changes_since(self.run, config, self._inputs) if how.may_resume else []
        check_run_requirements(config)
        for change in changes:
            logger.info("%s: --resume changes %s", config.name, change)
        self._open_data()

        self._start_ray()
        self._start_actors()
        state = self._load_state()
        self._continue_data(state)
        self._begin_directory(changes, state.step)
        self._start_recording(state)

    def _start_ray(self) -> None:
        # After Ray is gone, delete checkpoints and exports whose writers were stopped.
        self._stack.callback(self._delete_unfinished)
        daemons = self._stack.enter_context(SeparateSessions())
        need = store_need(self._config)
        self._stack.enter_context(ray_session(store_bytes(need)))
        daemons.all_started()
        # The Ray at RAY_ADDRESS has a store of a size that this run did not choose.
        check_running_store(need)
        # Ray has replaced the handler of SIGTERM.
        self.interrupt.install()

    def _start_trainer(self) -> None:
        """Start the ranks. They load their weights until ``trainer.ready()`` returns."""
        config = self._config
        logger.info(
            "%s: loading the policy, trainer ranks: %d", config.name, config.parallel.world_size
        )
        self.trainer = build_trainer(config, self._inputs)
        self._stack.callback(self.trainer.close)

    def _start_rollouts(self, worker_class: "type[RolloutWorker] | None" = None) -> "RolloutPool":
        """Start engines and rollout workers, which begin while the ranks load their weights."""
        # Engines on the trainer's GPUs start later, because they take a share of the memory that
        # the trainer leaves.
        if self._config.rollout.engine.shares_trainer_gpus:
            self.trainer.ready()
        rollouts = build_rollouts(self._config, worker_class)
        self._stack.callback(rollouts.close)
        return rollouts

    def _load_state(self) -> "RunState":
        from rl_loop.trainer.checkpointer import RunState

        # A resumed run may find no checkpoint: it was stopped before its first one.
        resumed = self.trainer.resume() if self._how.may_resume else None
        if resumed is None:
            return RunState()

        state = RunState.from_checkpoint(resumed.state)
        for damage in resumed.damages:
            logger.warning("%s: %s", self._config.name, damage)
        if resumed.damages:
            logger.warning(
                "%s: --resume continues after step %d, the newest complete checkpoint. Later "
                "steps are repeated",
                self._config.name,
                state.step,
            )
        return state

    def _begin_directory(self, changes: list[ConfigChange], step: int) -> None:
        """Write the configuration. An earlier run is deleted here, once all parts are ready."""
        config = self._config
        if self._how.may_resume:
            write_config(self.run, config, changes, step)
        else:
            self.run = start_run(config.directory, dump_config(config), self._how)
        write_json(self.run.inputs, to_json(self._inputs), indent=1)

    def _start_recording(self, state: "RunState") -> None:
        from rl_loop.tracking.episode_recorder import EpisodeRecorder
        from rl_loop.tracking.experiment_trackers import experiment_trackers
        from rl_loop.tracking.prometheus_metrics import prometheus_listener
        from rl_loop.tracking.recorder import StepRecorder
        from rl_loop.trainer.checkpointer import Checkpointer

        config = self._config
        self.progress = self._stack.enter_context(
            self._show(config.name, config.training.steps, state.step)
        )
        resume_after = state.step if self._how.may_resume else None
        trackers = experiment_trackers(config.name, dump_config(config), self.run)
        for tracker in trackers:
            self._stack.callback(tracker.close)
        listeners = [
            self.progress.step,
            prometheus_listener(config.name),
            *[tracker.log_step for tracker in trackers],
        ]
        writer = MetricsWriter(self.run, resume_after, listeners)
        self._stack.callback(writer.close)

        episodes = self._stack.enter_context(
            EpisodeRecorder(
                self.run.episodes,
                self.codec.vocabulary,
                config.tracking.episodes,
                resume_after,
            )
        )
        self.recorder = StepRecorder(
            self.run,
            writer,
            self.progress,
            episodes,
            trackers,
            steps=config.training.steps,
        )
        self.checkpointer = Checkpointer(
            self.trainer,
            state,
            config.training,
            stop_requested=lambda: self.interrupt.requested,
            on_checkpoint_start=self._begin_checkpoint,
            task_cursor=self._task_cursor,
        )
        # Last on the stack, so that it runs first: the clean-up begins before any part is closed.
        self._stack.callback(self.interrupt.begin_clean_up)

    def _begin_checkpoint(self) -> None:
        self.progress.phase("checkpoint")
        # A run that continues from the checkpoint does not record its steps again.
        self.recorder.finish_writing()

    # -- stopping ---------------------------------------------------------------------------------

    def finishing_steps(self) -> AbstractContextManager[None]:
        """Let the current step end before a request to stop takes effect."""
        note = "stopping after this step; press Ctrl-C again to stop at once"
        return self.interrupt.finishing_steps(lambda: self.progress.note(note))

    def saved_step_message(self) -> str:
        """Return a message with the saved step, for a run that was stopped within a step."""
        run = RunDirectory(self._config.directory)
        if not run.existing():
            return "the run had not started, and nothing was written"
        latest = run.checkpoints / "latest"
        if not latest.exists():
            return f"{run.path} has no checkpoint yet, so --resume starts with step 1"
        # The file has the name of a directory, such as step_000010.
        saved = int(latest.read_text().rpartition("_")[2])
        return (
            f"{run.path} has its newest checkpoint after step {saved} of "
            f"{self._config.training.steps}; --resume continues there"
        )

    def _delete_unfinished(self) -> None:
        """Delete incomplete checkpoints and exports."""
        for unfinished in self.run.unfinished():
            shutil.rmtree(unfinished, ignore_errors=True)


class RlSession(RunSession):
    """A run of reinforcement learning."""

    tasks: "TaskMixture"
    """Training and held-out tasks."""
    rollouts: "RolloutPool"
    """Engines and rollout workers. They start until ``rollouts.ready()`` returns."""

    _config: RlConfig

    def __init__(self, config: RlConfig, show: ProgressFactory, how: StartMode) -> None:
        super().__init__(config, show, how)

    def _open_data(self) -> None:
        self.tasks = build_tasks(self._config)
        self.codec = self.tasks.codec
        check_reward_parts(self._config, self.tasks.reward_parts())

    def _start_actors(self) -> None:
        self._start_trainer()
        self.rollouts = self._start_rollouts()
        self.trainer.ready()

    def _continue_data(self, state: "RunState") -> None:
        if state.tasks is not None:
            self.tasks.continue_from(state.tasks)

    def _task_cursor(self, state: "RunState") -> dict[str, Any]:
        return self.tasks.cursor(state.next_task)


class SftSession(RunSession):
    """A run of supervised fine-tuning."""

    data: "SupervisedData"
    """Conversations or generated demonstrations."""
    rejections: "RejectionReport"
    """Conversations that are left out."""

    rollouts: "RolloutPool | None" = None
    """Engines that sample in validations. None without ``data.sampled_conversations``."""

    _config: SftConfig

    def __init__(self, config: SftConfig, show: ProgressFactory, how: StartMode) -> None:
        super().__init__(config, show, how)

    def _open_data(self) -> None:
        self.codec, self.data = open_supervised_data(self._config)
        self._stack.callback(self.data.close)
        self.data.check()

    def _start_actors(self) -> None:
        self._start_trainer()
        if self._config.samples:
            # Imports torch.
            from rl_loop.rollout.worker import ChatWorker

            self.rollouts = self._start_rollouts(ChatWorker)
        self.trainer.ready()

    def _continue_data(self, state: "RunState") -> None:
        self.data.continue_from(state)

    def _task_cursor(self, state: "RunState") -> dict[str, Any] | None:
        return self.data.task_cursor(state.step)

    def _start_recording(self, state: "RunState") -> None:
        from rl_loop.conversations.rejections import RejectionReport

        super()._start_recording(state)
        self.rejections = RejectionReport(
            write=self.run.append_rejections,
            show=self.progress.note,
            earlier=read_json_lines(self.run.rejected),
        )
        self.progress.phase("data")
        self.data.start(self.rejections)


def build_loop(config: RlConfig, session: RlSession) -> "RlLoop":
    """Build the loop over the parts of an open session."""
    from rl_loop.loop import RlLoop
    from rl_loop.rollout.group_store import GroupStore

    # The digest keeps a resume from training on episodes that were sampled with other settings.
    group_store = GroupStore(
        session.run.async_episodes,
        config.training.keep_checkpoints,
        sampling_digest(config.model_dump(mode="json")),
    )
    return RlLoop(
        config,
        trainer=session.trainer,
        rollouts=session.rollouts,
        tasks=session.tasks,
        recorder=session.recorder,
        checkpointer=session.checkpointer,
        group_store=group_store,
        abort_rollouts=lambda: session.interrupt.abort_rollouts,
    )
