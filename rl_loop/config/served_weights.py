"""Which weights of a run are served: those of its export, or of a checkpoint of more steps."""

from dataclasses import dataclass
from pathlib import Path

from megatron_gptoss.checkpoint.directory import (
    ADAPTER_FILE,
    latest_checkpoint,
    step_of,
)
from megatron_gptoss.checkpoint.errors import CheckpointError
from megatron_gptoss.untrusted_files import read_json


@dataclass(frozen=True)
class ServedWeights:
    """What of a run's directory is served."""

    run: Path
    """The directory of the run."""
    is_export: bool
    """Whether it is the export."""
    step: int | None
    """Steps that they were trained for; None if nothing says so."""
    newer_adapters: Path | None = None
    """A checkpoint that is newer than the export and cannot take its place: it holds adapters
    without their base."""

    @property
    def source(self) -> Path:
        """The export, or the run itself, whose newest checkpoint is meant."""
        return self.run / "export" if self.is_export else self.run

    @property
    def description(self) -> str:
        """Say in one line what is served, and of which step."""
        kind = "its export" if self.is_export else "its newest checkpoint"
        after = "of an unknown step" if self.step is None else f"after step {self.step}"
        return f"{self.run}: what is served is {kind}, {after}"

    def warning(self, base: str) -> str | None:
        """Say how to have the newer weights if older ones are served; None if they are not.

        Args:
            base: what the run began with, as a directory.
        """
        if self.newer_adapters is None:
            return None
        return (
            f"{self.newer_adapters} is of step {step_of(self.newer_adapters)}, but holds adapters without their "
            f"base: gptoss convert merge {base} {self.newer_adapters} DIR makes a model of them, for --weights DIR"
        )


def served_weights(run: Path) -> ServedWeights:
    """Choose what of the directory of a run is served.

    The last step of a run is always saved, so that the newest checkpoint has at least the steps of
    the export. The export is preferred where it has as many: it holds the bits that were compared,
    and adapters merged into their base.
    """
    has_export = (run / "export" / "config.json").exists()
    try:
        checkpoint = latest_checkpoint(run / "checkpoints")
    except CheckpointError:
        # Whoever needs the checkpoint says what is wrong with it.
        checkpoint = None

    saved = None if checkpoint is None else step_of(checkpoint)
    if not has_export:
        return ServedWeights(run, is_export=False, step=saved)

    exported = _exported_step(run)
    if checkpoint is None or saved is None or (exported is not None and exported >= saved):
        return ServedWeights(run, is_export=True, step=exported)
    if (checkpoint / ADAPTER_FILE).exists():
        return ServedWeights(run, is_export=True, step=exported, newer_adapters=checkpoint)
    return ServedWeights(run, is_export=False, step=saved)


def _exported_step(run: Path) -> int | None:
    """Return the steps of the export as the summary has them, which is written after it."""
    try:
        steps = read_json(run / "summary.json")["steps"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return steps if isinstance(steps, int) else None
