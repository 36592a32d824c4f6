"""The steps of supervised fine-tuning on generated demonstrations."""

from typing import Protocol

from megatron_gptoss.samples import TrainingSamples
from megatron_gptoss.trainer import StepStatistics
from rl_loop.config.training import DemonstrationConfig
from rl_loop.tracking.metrics import Name
from rl_loop.tracking.recorder import StepRecorder
from rl_loop.tracking.step_metrics import add_optimizer_metrics
from rl_loop.trainer.checkpointer import Checkpointer


class Trainer(Protocol):
    """Takes optimizer steps: a TrainerGroup."""

    def sft_step(self, samples: TrainingSamples, step: int) -> StepStatistics: ...


class Demonstrations(Protocol):
    """Makes demonstrations: a TaskSource."""

    def demonstrations(
        self, position: int, count: int, mixture: DemonstrationConfig
    ) -> TrainingSamples: ...


def train_on_demonstrations(
    trainer: Trainer,
    tasks: Demonstrations,
    recorder: StepRecorder,
    checkpointer: Checkpointer,
    mixture: DemonstrationConfig,
    *,
    steps: int,
    sequences_per_step: int,
) -> int:
    """Run all steps that are left. Returns the number of steps done in all, fewer than
    ``steps`` if interrupted."""
    state = checkpointer.state
    while state.step < steps:
        record = recorder.begin_step(state.step)
        recorder.progress.phase("train")
        # By position, so that a resumed run goes on with the demonstrations that come next.
        samples = tasks.demonstrations(state.step * sequences_per_step, sequences_per_step, mixture)
        update = trainer.sft_step(samples, state.step)

        record.metrics.add_mean(Name.LOSS, update.sums["loss"], update.sums["tokens"], "tokens")
        add_optimizer_metrics(record.metrics, update)
        recorder.record_sft_step(record, tokens=samples.tokens)
        if checkpointer.end_step():
            break
    return state.step
