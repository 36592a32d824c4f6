"""Running a configuration from start to export: ``run_sft`` and ``run_rl`` are what the ``gptoss`` commands call."""

import logging
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rl_loop.cluster.ray_session import ray_session
from rl_loop.config.load import dump_config
from rl_loop.config.run import RlConfig, RunConfig, SftConfig, check_reward_parts
from rl_loop.config.training import TrainingConfig
from rl_loop.lifecycle.interrupt import Interrupt, SeparateSessions
from rl_loop.lifecycle.resume import Change, changes_since, write_config
from rl_loop.lifecycle.start_checks import check_what_a_run_needs
from rl_loop.session import build_rollouts, build_tasks
from rl_loop.tracking.metrics import MetricsWriter, Name, StepMetrics
from rl_loop.tracking.run_directory import (
    RunDirectory,
    Start,
    check_start,
    metric_curve,
    read_json,
    read_json_lines,
    start_run,
)
from rl_loop.tracking.run_lock import LEASE_SECONDS, locked_run

if TYPE_CHECKING:
    from rl_loop.rollout.pool import RolloutPool
    from rl_loop.tasks.source import TaskSource
    from rl_loop.trainer.group import TrainerGroup


logger = logging.getLogger(__name__)


class Progress(Protocol):
    """What a run tells while it goes."""

    def phase(self, name: str) -> None: ...

    def note(self, message: str) -> None: ...

    def step(self, step: int, values: dict[str, float]) -> None: ...


ProgressFactory = Callable[[str, int, int], AbstractContextManager[Progress]]
"""(title, total steps, first step) -> context"""


@dataclass
class Session:
    """What a training run has at hand between its start and its end."""

    training: TrainingConfig
    run: RunDirectory
    tasks: "TaskSource"
    trainer: "TrainerGroup"
    rollouts: "RolloutPool | None"
    """None without reinforcement learning."""
    writer: MetricsWriter
    progress: Progress
    interrupt: Interrupt
    state: dict[str, Any]
    """Of the checkpoint that the run goes on from: the steps done ("step") and the wall time they took ("seconds").
    What else the loop puts in is saved with the next checkpoint: where it stands in the tasks ("next_task")."""
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Wall time of the run so far, earlier attempts included."""
        return self.state["seconds"] + time.monotonic() - self.began

    def end_step(self, metrics: StepMetrics, began: float, tokens: int) -> bool:
        """Write what a step that began at ``began`` (time.monotonic) was like and, where due, a checkpoint; whether the
        run is to end with it."""
        seconds, training = time.monotonic() - began, self.training
        metrics.add(Name.STEP_SECONDS, seconds, "last")
        metrics.add(Name.TOKENS_PER_SECOND, tokens / seconds, "last")
        self.writer.write(metrics)
        done = metrics.step + 1
        last = self.interrupt.requested or done == training.steps
        if last or done % training.checkpoint_every == 0:
            self.save(done, block=last)
        return last

    def finishing_steps(self) -> AbstractContextManager[None]:
        """Inside, a request to stop lets the step under way end."""
        note = "stopping after this step; Ctrl-C again stops at once"
        return self.interrupt.waiting_for_steps(lambda: self.progress.note(note))

    def save(self, steps_done: int, block: bool) -> None:
        """Begin a checkpoint, and with ``block`` wait until it is complete."""
        self.progress.phase("checkpoint")
        state = self.state | {"step": steps_done, "seconds": self.seconds}
        self.trainer.save(steps_done, state, block)


class Interrupted(Exception):
    """The run was stopped on request. The message says what is saved, ``exit_status`` what the shell is to be told."""

    exit_status = 130


@contextmanager
def _stopping(config: RunConfig, interrupt: Interrupt) -> Iterator[None]:
    """Make ``Interrupted`` of a request to stop, once everything that the run has started is gone."""
    run = RunDirectory(config.directory)
    try:
        yield
    except KeyboardInterrupt:
        raise _interrupted(f"stopped at once; {_what_is_saved(run, config)}", interrupt) from None
    except Interrupted as stop:
        raise _interrupted(str(stop), interrupt) from None


def _interrupted(message: str, interrupt: Interrupt) -> Interrupted:
    stop = Interrupted(message)
    stop.exit_status = interrupt.exit_status
    return stop


def _what_is_saved(run: RunDirectory, config: RunConfig) -> str:
    """What a run that was stopped in the middle of something goes on from."""
    if not run.existing():
        return "the run had not begun, and nothing was written"
    latest = run.checkpoints / "latest"
    if not latest.exists():
        return f"{run.path} has no checkpoint yet, so it begins with step 1 again"
    saved = int(latest.read_text().rpartition("_")[2])
    return f"{run.path} goes on after step {saved} of {config.training.steps}, its newest checkpoint"


@contextmanager
def _without_half_checkpoints(run: RunDirectory) -> Iterator[None]:
    """Delete what was being written when its writers were ended."""
    try:
        yield
    finally:
        for unfinished in (*run.checkpoints.glob("*.partial"), *run.critic_checkpoints.glob("*.partial")):
            shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def _session(config: RunConfig, show: ProgressFactory, how: Start) -> Iterator[Session]:
    """Everything that a training run starts, and stops again: directory, Ray, trainer ranks, metrics, signals. Nothing
    is written before all of it is there."""
    interrupt = Interrupt()
    # an attempt on a cluster may follow one whose node has died
    wait_seconds = LEASE_SECONDS if how is Start.RESUME_OR_NEW else 0.0
    with interrupt.installed(), _stopping(config, interrupt), locked_run(config.directory, wait_seconds):
        run = check_start(config.directory, how)
        changes = changes_since(run, config) if how.may_resume else []
        check_what_a_run_needs(config)
        for change in changes:
            logger.info("%s: --resume changes %s", config.name, change)
        tasks = build_tasks(config)  # which may find mistakes in files: before weights are loaded
        if isinstance(config, RlConfig):
            check_reward_parts(config, tasks.reward_parts())
        with _without_half_checkpoints(run), _actors(config, interrupt) as (trainer, rollouts):
            resumed = trainer.resume() if how.may_resume else None
            state = resumed or {"step": 0, "seconds": 0.0}
            run = _begin(config, how, changes, state["step"])
            from rl_loop.tracking.metric_sinks import step_listeners

            with show(config.name, config.training.steps, state["step"]) as progress:
                listeners = [progress.step, *step_listeners(config)]
                writer = MetricsWriter(run, state["step"] - 1 if how.may_resume else None, listeners)
                try:
                    yield Session(config.training, run, tasks, trainer, rollouts, writer, progress, interrupt, state)
                finally:
                    interrupt.leave()
                    writer.close()


@contextmanager
def _actors(config: RunConfig, interrupt: Interrupt) -> Iterator[tuple["TrainerGroup", "RolloutPool | None"]]:
    """Ray, with the trainer's ranks ready and the rollout workers on their way."""
    from rl_loop.trainer.group import TrainerGroup

    with SeparateSessions() as daemons, ray_session():
        daemons.all_started()
        interrupt.install()  # Ray has taken SIGTERM
        logger.info("%s: loading the policy, trainer ranks: %d", config.name, config.parallel.world_size)
        trainer, rollouts = TrainerGroup(config), None
        try:
            if isinstance(config, RlConfig):
                if config.rollout.engine.shares_trainer_gpus:
                    trainer.ready()  # servers that share its GPUs take a part of what it leaves
                rollouts = build_rollouts(config)
            trainer.ready()
            yield trainer, rollouts
        finally:
            trainer.close()


def _begin(config: RunConfig, how: Start, changes: list[Change], step: int) -> RunDirectory:
    """Write the run's configuration, now that it is sure to begin, and only now delete an earlier run."""
    if not how.may_resume:
        return start_run(config.directory, dump_config(config), how)
    run = RunDirectory(config.directory)
    write_config(run, config, changes, step)
    return run


def run_sft(
    config: SftConfig,
    show: ProgressFactory,
    *,
    resume: bool = False,
    overwrite: bool = False,
    resume_or_new: bool = False,
) -> Path:
    """Supervised fine-tuning on generated demonstrations. Returns the run directory; raises Interrupted."""
    how = Start.chosen(resume=resume, overwrite=overwrite, resume_or_new=resume_or_new)
    with _session(config, show, how) as session:
        with session.finishing_steps():
            _sft_steps(config, session)
        losses = metric_curve(read_json_lines(session.run.metrics), Name.LOSS)[1]
        session.run.write_summary(steps=config.training.steps, loss=losses[-1], seconds=round(session.seconds, 1))
    return config.directory


def _sft_steps(config: SftConfig, session: Session) -> None:
    """All steps that are left. Raises Interrupted."""
    from rl_loop.data.samples import optimizer_metrics  # imports torch, which _session has done by now

    for step in range(session.state["step"], config.training.steps):
        started = time.monotonic()
        session.progress.phase("train")
        samples = session.tasks.demonstrations(
            step * config.sequences_per_step, config.sequences_per_step, config.demonstrations
        )
        update = session.trainer.sft_step(samples, step)
        metrics = StepMetrics(step)
        metrics.add_mean(Name.LOSS, update.sums["loss"], update.sums["tokens"], "tokens")
        optimizer_metrics(metrics, update)
        last = session.end_step(metrics, started, sum(len(sample.token_ids) for sample in samples))
        if last and step + 1 < config.training.steps:
            raise Interrupted(f"saved after step {step + 1} of {config.training.steps} in {session.run.path}")


def run_rl(
    config: RlConfig,
    show: ProgressFactory,
    *,
    resume: bool = False,
    overwrite: bool = False,
    resume_or_new: bool = False,
) -> Path:
    """On-policy reinforcement learning, evaluation and export. Returns the run directory; raises Interrupted."""
    how = Start.chosen(resume=resume, overwrite=overwrite, resume_or_new=resume_or_new)
    with _session(config, show, how) as session:
        from rl_loop.export import export_policy, greedy_agreement
        from rl_loop.loop import RlLoop

        loop = RlLoop(config, session)
        session.progress.note("waiting for the rollout engines")
        loop.rollouts.ready()
        with session.finishing_steps():
            done = loop.train()
        if done < config.training.steps or session.interrupt.requested:
            saved = f"saved after step {done} of {config.training.steps} in {session.run.path}"
            if not (session.run.checkpoints / "latest").exists():
                saved = f"stopped; {_what_is_saved(session.run, config)}"
            elif done == config.training.steps:
                saved += "; its evaluation and its export are left"
            raise Interrupted(saved)
        evaluation = loop.final_evaluation()
        session.writer.write(evaluation)
        loop.rollouts.close()
        session.progress.phase("export")
        export_policy(session.trainer, session.tasks.harmony, config, session.run.export)
        agreeing, compared = greedy_agreement(session.trainer, session.tasks, config, session.run.export)
        session.run.write_summary(
            **_summary(session.run, config, evaluation),
            seconds=round(session.seconds + _seconds_of_initial_run(config), 1),
            greedy_answers_equal=agreeing,
            greedy_answers_compared=compared,
        )
    return config.directory


def _summary(run: RunDirectory, config: RlConfig, evaluation: StepMetrics) -> dict[str, Any]:
    records = read_json_lines(run.metrics)
    final = evaluation.values()

    def curve(name: str) -> list[float]:
        return metric_curve(records, name)[1]

    gaps = curve(Name.LOGPROB_GAP)
    return {
        "steps": config.training.steps,
        "held_out_accuracy_sft": curve(Name.HELD_OUT_ACCURACY)[0],
        "held_out_accuracy_rl": final[Name.HELD_OUT_ACCURACY],
        "held_out_reward_sft": curve("held_out/reward")[0],
        "held_out_reward_rl": final["held_out/reward"],
        "tool_call_rate": final["held_out/tool_call_rate"],
        "mean_turns": final["held_out/turns"],
        "max_clip_fraction": max(curve(Name.CLIP_FRACTION)),
        "max_ratio_deviation": max(curve("ratio/deviation_max")),
        "mean_logprob_gap": sum(gaps) / len(gaps),
        "max_logprob_gap": max(curve("mismatch/logprob_gap_max")),
    }


def _seconds_of_initial_run(config: RunConfig) -> float:
    """Training time of the run that the initial weights come from, 0 if they come from elsewhere."""
    source = RunDirectory(config.initial_weights) if config.initial_weights is not None else None
    if source is None or not source.summary.exists():
        return 0.0
    return float(read_json(source.summary).get("seconds", 0.0))
