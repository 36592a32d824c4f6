"""Checks that a run can write its directory, and that the disk has enough free space."""

import math
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megatron_gptoss.config import AdapterConfig, ModelConfig, Quantization
from megatron_gptoss.config.precision import bytes_per_number
from megatron_gptoss.planning.parameter_counts import MXFP4_BYTES
from rl_loop.config.errors import StartError
from rl_loop.config.every_run import RunConfig
from rl_loop.config.run import RlConfig
from rl_loop.config.training import TrainingConfig
from rl_loop.tracking.run_directory import RunDirectory

GB = 1e9
MB = 1e6

MOMENT_BYTES = 8
"""Bytes of Adam's two moments of one parameter, in fp32."""


def check_writable(directory: Path) -> None:
    """Check that this user can create ``directory`` or write in it.

    Raises:
        StartError: if not.
    """
    nearest = _nearest_existing(directory)
    if not nearest.is_dir():
        raise StartError(f"output_dir: {nearest} is a file. Name a directory")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise StartError(
            f"output_dir: this user cannot write in {nearest}. Name another directory, or change "
            "its permissions"
        )


@dataclass(frozen=True)
class DiskNeed:
    """Disk space of a run's checkpoints, kept adapters and export. Episodes and logs are smaller."""

    training: TrainingConfig
    """Number of steps, and of checkpoints to keep."""
    checkpoint: float
    """Bytes of one checkpoint (``checkpoint_bytes``)."""
    export: float = 0.0
    """Bytes of the export (``export_bytes``). 0 if the run exports nothing."""
    adapters: float = 0.0
    """Bytes of the adapters of one checkpoint (``kept_adapter_bytes``). 0 if the run keeps none."""

    def missing_bytes(self, run: RunDirectory | None = None) -> float:
        """Return the bytes that the run will write in addition to its present files.

        Args:
            run: directory of the run; None for a new run.
        """
        most, saved = checkpoints_at_a_time(self.training), checkpoints_of_run(self.training)
        if run is not None:
            most = _missing_steps(run.checkpoints, most)
            saved = _missing_steps(run.adapters, saved)
        # An earlier export exists until the new one is complete.
        return self.checkpoint * most + self.adapters * saved + self.export

    def describe(self) -> str:
        """Return the parts in words."""
        most, saved = checkpoints_at_a_time(self.training), checkpoints_of_run(self.training)
        parts = [f"{most} checkpoint{'s' * (most > 1)} of {format_size(self.checkpoint)}"]
        if self.adapters:
            parts.append(f"the adapters of {saved} checkpoints, {format_size(self.adapters)} each")
        if self.export:
            parts.append(f"an export of {format_size(self.export)}")
        *first, last = parts
        return f"{', '.join(first)} and {last}" if first else last


def disk_need(config: RunConfig) -> DiskNeed:
    """Return the disk space that a run of this configuration needs."""
    model, dtype, adapter = config.model, config.dtype, config.adapter
    has_critic = isinstance(config, RlConfig) and config.algorithm.critic is not None
    export = export_bytes(model, dtype, config.trained_quantization) if config.exports else 0.0
    return DiskNeed(
        config.training,
        checkpoint_bytes(model, dtype, adapter=adapter, has_critic=has_critic),
        export,
        kept_adapter_bytes(config.training, model, dtype, adapter),
    )


def check_disk(directory: Path, need: DiskNeed) -> None:
    """Check that the disk has space for the checkpoints, the kept adapters and the export of a run.

    Args:
        directory: directory of the run.
        need: disk space of the whole run.

    Raises:
        StartError: if the space does not suffice, or the directory is not writable.
    """
    check_writable(directory)
    run = RunDirectory(directory)
    needed = need.missing_bytes(run)
    folder = _nearest_existing(directory)
    # Unfinished directories of a killed process are deleted when the run continues.
    free = shutil.disk_usage(folder).free + _sum_file_sizes(run.unfinished())
    if needed > free:
        keep_none = ", or set training.keep_adapters to false" if need.adapters else ""
        raise StartError(
            f"output_dir: {format_size(free)} are free in {folder}, but the run needs "
            f"{format_size(needed)} for {need.describe()}. Free disk space, or lower "
            f"training.keep_checkpoints{keep_none}"
        )


def checkpoint_bytes(
    model: ModelConfig,
    dtype: str,
    *,
    adapter: AdapterConfig | None = None,
    has_critic: bool = False,
) -> float:
    """Return the bytes of one checkpoint.

    It holds weights, fp32 master weights and two fp32 moments of the trained parameters.

    Args:
        model: architecture of policy and critic.
        dtype: "fp32" or "bf16". fp32 weights have no separate master weights.
        adapter: adapter, if only its factors are trained.
        has_critic: True if a critic of the policy's size is trained, too.
    """
    weight_bytes = bytes_per_number(dtype)
    master_bytes = 0 if dtype == "fp32" else 4
    models = 2 if has_critic else 1
    # A checkpoint of adapters does not contain the frozen base.
    trained = model.num_parameters if adapter is None else adapter.num_parameters(model)
    return models * trained * (weight_bytes + master_bytes + MOMENT_BYTES)


def kept_adapter_bytes(
    training: TrainingConfig, model: ModelConfig, dtype: str, adapter: AdapterConfig | None
) -> float:
    """Return the bytes that ``training.keep_adapters`` keeps of one checkpoint. 0 without it."""
    if not training.keep_adapters or adapter is None:
        return 0.0
    return adapter.num_parameters(model) * bytes_per_number(dtype)


def export_bytes(model: ModelConfig, dtype: str, quantization: Quantization | None = None) -> float:
    """Return the bytes of an export's weights. Adapters are merged into the weights."""
    plain = model.num_parameters
    packed_bytes = 0.0
    if quantization is not None:
        # The gate, up and down projections of one expert. Only these are quantized.
        matrices = 3 * model.hidden_size * model.intermediate_size
        packed = model.num_layers * model.num_experts * matrices
        plain -= packed
        packed_bytes = packed * MXFP4_BYTES
    return plain * bytes_per_number(dtype) + packed_bytes


def checkpoints_at_a_time(training: TrainingConfig) -> int:
    """Return the largest number of checkpoints that exist at a time.

    The oldest checkpoint is deleted after a newer one is complete.
    """
    return min(training.keep_checkpoints + 1, checkpoints_of_run(training))


def checkpoints_of_run(training: TrainingConfig) -> int:
    """Return the number of checkpoints that a run saves, including those that it deletes."""
    return math.ceil(training.steps / training.checkpoint_every)


def _missing_steps(directory: Path, needed: int) -> int:
    """Return the number of step directories that are missing for ``needed`` in total."""
    # Unfinished directories have a suffix after the six digits, so the pattern excludes them.
    return max(0, needed - len(list(directory.glob("step_??????"))))


def _sum_file_sizes(directories: Iterable[Path]) -> int:
    """Return the total size of all files in the directories."""
    files = (file for directory in directories for file in directory.rglob("*"))
    return sum(file.stat().st_size for file in files if file.is_file())


def _nearest_existing(directory: Path) -> Path:
    absolute = directory.absolute()
    return next(folder for folder in (absolute, *absolute.parents) if folder.exists())


def format_size(count: float) -> str:
    """Return a number of bytes in GB, or in MB if it is small."""
    return f"{count / GB:.1f} GB" if count >= GB / 10 else f"{count / MB:.1f} MB"
