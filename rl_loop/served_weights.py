"""Choice of a run's weights to serve: its export, or a newer checkpoint."""

from dataclasses import dataclass
from pathlib import Path

from megatron_gptoss.checkpoint.directory import (
    ADAPTER_FILE,
    checkpoint_step,
    latest_checkpoint,
)
from megatron_gptoss.checkpoint.errors import CheckpointError
from megatron_gptoss.untrusted_files import read_json


@dataclass(frozen=True)
class ServedWeights:
    """Weights in a run's directory to serve."""

    run: Path
    """Directory of the run."""
    is_export: bool
    """True for the export, False for the newest checkpoint."""
    step: int | None
    """Number of training steps of the weights. None if unknown."""
    newer_adapters: Path | None = None
    """Newer checkpoint that cannot be served, because it has only adapters without their base. None
    if there is no such checkpoint."""

    @property
    def path(self) -> Path:
        """Path for a loader: the directory of the export, or of the run for its newest
        checkpoint."""
        return self.run / "export" if self.is_export else self.run

    @property
    def description(self) -> str:
        """Description of the weights and their step, in one line."""
        kind = "its export" if self.is_export else "its newest checkpoint"
        after = "of an unknown step" if self.step is None else f"after step {self.step}"
        return f"{self.run}: serving {kind}, {after}"

    def describe_newer_weights(self, base: str) -> str | None:
        """Return how to serve newer weights, or None if the newest weights are served.

        Args:
            base: directory of the run's initial weights.
        """
        if self.newer_adapters is None:
            return None
        return (
            f"{self.newer_adapters} is newer (step {checkpoint_step(self.newer_adapters)}), but has "
            f"adapters without their base model. To serve it, run `gptoss convert merge {base} "
            f"{self.newer_adapters} DIR` and pass --weights DIR"
        )


def choose_served_weights(run: Path) -> ServedWeights:
    """Choose the weights of a run to serve.

    They are the newest ones that a server can load. With equal steps, the export is preferred.
    """
    has_export = (run / "export" / "config.json").exists()
    try:
        checkpoint = latest_checkpoint(run / "checkpoints")
    except CheckpointError:
        # Code that reads the checkpoint reports its fault.
        checkpoint = None

    saved = None if checkpoint is None else checkpoint_step(checkpoint)
    if not has_export:
        return ServedWeights(run, is_export=False, step=saved)

    exported = _exported_step(run)
    # The last step of a run is always saved, so the newest checkpoint has at least as many steps as
    # the export. This also holds if the export's step is unknown. With equal steps the export is
    # preferred, because its weights were compared with the trainer, and its adapters are merged
    # into their base.
    if checkpoint is None or saved is None or (exported is not None and exported >= saved):
        return ServedWeights(run, is_export=True, step=exported)
    # A checkpoint of adapters has no base model, so a server cannot load it.
    if (checkpoint / ADAPTER_FILE).exists():
        return ServedWeights(run, is_export=True, step=exported, newer_adapters=checkpoint)
    return ServedWeights(run, is_export=False, step=saved)


def _exported_step(run: Path) -> int | None:
    """Return the steps of the export from the summary, which is written after the export."""
    try:
        steps = read_json(run / "summary.json")["steps"]
    # The file may be absent, or a user may have edited it.
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return steps if isinstance(steps, int) else None
