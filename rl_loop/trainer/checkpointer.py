"""Schedule of checkpoints, and the progress of a run that is saved with them."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from rl_loop.config.training import TrainingConfig


@dataclass
class RunState:
    """Progress of a run. It is saved with every checkpoint, and a resumed run continues from it."""

    step: int = 0
    """Number of completed steps."""
    seconds: float = 0.0
    """Wall time of these steps, including earlier attempts."""
    next_task: int = 0
    """Position of the next training task."""
    tasks: dict[str, Any] | None = None
    """``TaskMixture.cursor`` at the next training task. None without tasks."""
    data: dict[str, Any] | None = None
    """State of the conversation stream. None without conversations."""

    @classmethod
    def from_checkpoint(cls, saved: dict[str, Any] | None) -> "RunState":
        """Return the state from the result of ``to_checkpoint``. None is the start of a run."""
        if saved is None:
            return cls()
        return cls(
            step=saved["step"],
            seconds=saved["seconds"],
            next_task=saved["next_task"],
            tasks=saved.get("tasks"),
            data=saved.get("data"),
        )

    def to_checkpoint(self) -> dict[str, Any]:
        """Return the state as a dict of JSON values."""
        state: dict[str, Any] = {
            "step": self.step,
            "seconds": self.seconds,
            "next_task": self.next_task,
        }
        if self.tasks is not None:
            state["tasks"] = self.tasks
        if self.data is not None:
            state["data"] = self.data
        return state


class SavingTrainer(Protocol):
    """Trainer that writes checkpoints: a TrainerGroup."""

    def save(self, step: int, state: dict[str, Any], block: bool) -> None: ...


class Checkpointer:
    """Decides after every step whether to save the run and whether to end it."""

    def __init__(
        self,
        trainer: SavingTrainer,
        state: RunState,
        training: TrainingConfig,
        *,
        stop_requested: Callable[[], bool] = lambda: False,
        on_checkpoint_start: Callable[[], None] = lambda: None,
        task_cursor: Callable[[RunState], dict[str, Any] | None] = lambda state: None,
    ) -> None:
        """Continue from a state.

        Args:
            trainer: writes the checkpoints.
            state: state of the checkpoint that the run continues from.
            training: length of the run and frequency of checkpoints.
            stop_requested: returns True if the run must end with the current step.
            on_checkpoint_start: called when a checkpoint begins.
            task_cursor: returns ``RunState.tasks`` for a state.
        """
        self._trainer = trainer
        self._training = training
        self._stop_requested = stop_requested
        self._on_checkpoint_start = on_checkpoint_start
        self._task_cursor = task_cursor
        self.state = state
        self.save_external_state: Callable[[int], None] = lambda step: None
        """Called with the number of completed steps before their checkpoint is written. It saves
        the data that is kept outside of checkpoints."""
        self._first_step = state.step
        self._earlier_seconds = state.seconds
        # The system's clock may be set during a run.
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """Wall time of the run so far, in seconds, including earlier attempts."""
        return self._earlier_seconds + time.monotonic() - self._began

    def end_step(self, *, data_exhausted: bool = False) -> bool:
        """Count a completed step and save the run if due.

        Args:
            data_exhausted: True if no data is left for a further step.

        Returns:
            True if the run ends with this step.
        """
        self.state.step += 1
        # The last checkpoint must be complete before the processes that write it end.
        is_last = (
            self._stop_requested() or data_exhausted or self.state.step == self._training.steps
        )
        if is_last or self.state.step % self._training.checkpoint_every == 0:
            self._save(block=is_last)
        return is_last

    def save_finished_steps(self) -> None:
        """Save the completed steps of this attempt and wait until they are written.

        The step in progress must not have changed the policy.
        """
        # Without a completed step, the state is that of the checkpoint from which this attempt
        # continues.
        if self.state.step > self._first_step:
            self._save(block=True)

    def _save(self, *, block: bool) -> None:
        """Begin a checkpoint. With ``block``, wait until it is complete."""
        self._on_checkpoint_start()
        # First the data outside of the checkpoint, which must exist if a run resumes from it.
        self.save_external_state(self.state.step)
        # Only a saved state needs the time and the cursor, so they are computed here.
        self.state.seconds = self.seconds
        self.state.tasks = self._task_cursor(self.state)
        self._trainer.save(self.state.step, self.state.to_checkpoint(), block)
