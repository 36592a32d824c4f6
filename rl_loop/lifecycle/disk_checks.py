"""Checks that a run can write its directory, and that the disk has enough free space."""

import math
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from megatron_gptoss.config import AdapterConfig, ModelConfig, Quantization
from megatron_gptoss.config.precision import bytes_of
from megatron_gptoss.planning.parameter_counts import MXFP4_BYTES
from rl_loop.config.errors import StartError
from rl_loop.config.training import TrainingConfig
from rl_loop.tracking.run_directory import RunDirectory

GB = 1e9
MB = 1e6

"""Bytes of one parameter, by dtype."""

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


def check_disk(
    directory: Path,
    training: TrainingConfig,
    checkpoint: float,
    export: float = 0.0,
    adapters: float = 0.0,
) -> None:
    """Check that the disk has space for the checkpoints, the kept adapters and the export of a run.

    Args:
        directory: directory of the run.
        training: number of steps, and of checkpoints to keep.
        checkpoint: bytes of one checkpoint (``checkpoint_bytes``).
        export: bytes of the export (``export_bytes``). 0 if the run exports nothing.
        adapters: bytes of the adapters of one checkpoint (``kept_adapter_bytes``). 0 if the run
            keeps none.

    Raises:
        StartError: if the space does not suffice, or the directory is not writable.
    """
    check_writable(directory)
    run = RunDirectory(directory)
    most = checkpoints_at_a_time(training)
    saved = checkpoints_of_run(training)
    # An earlier export exists until the new one is complete. Unfinished directories of a killed
    # process are deleted when the run continues.
    needed = checkpoint * _missing_steps(run.checkpoints, most) + export
    needed += adapters * _missing_steps(run.adapters, saved)

    folder = _nearest_existing(directory)
    free = shutil.disk_usage(folder).free + _bytes_of(run.unfinished())
    if needed > free:
        parts = [f"{most} checkpoints of {_size(checkpoint)}"]
        if adapters:
            parts.append(f"the adapters of {saved} checkpoints, {_size(adapters)} each")
        if export:
            parts.append(f"an export of {_size(export)}")
        or_keep_no_adapters = ", or set training.keep_adapters to false" if adapters else ""
        raise StartError(
            f"output_dir: {_size(free)} are free in {folder}, but the run needs {_size(needed)} "
            f"for {' and '.join(parts)}. Free disk space, or lower "
            f"training.keep_checkpoints{or_keep_no_adapters}"
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
    weight_bytes = bytes_of(dtype)
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
    return adapter.num_parameters(model) * bytes_of(dtype)


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
    return plain * bytes_of(dtype) + packed_bytes


def checkpoints_at_a_time(training: TrainingConfig) -> int:
    """Return the largest number of checkpoints that exist at a time.

    The oldest checkpoint is deleted after a newer one is complete.
    """
    return min(training.keep_checkpoints + 1, checkpoints_of_run(training))


def checkpoints_of_run(training: TrainingConfig) -> int:
    """Return the number of checkpoints that a run saves, including those that it deletes."""
    return math.ceil(training.steps / training.checkpoint_every)


def _missing_steps(directory: Path, wanted: int) -> int:
    """Return the number of step directories that are missing for ``wanted`` in total."""
    # Unfinished directories have a suffix after the six digits, so the pattern excludes them.
    return max(0, wanted - len(list(directory.glob("step_??????"))))


def _bytes_of(directories: Iterable[Path]) -> int:
    """Return the total size of all files in the directories."""
    files = (file for directory in directories for file in directory.rglob("*"))
    return sum(file.stat().st_size for file in files if file.is_file())


def _nearest_existing(directory: Path) -> Path:
    absolute = directory.absolute()
    return next(folder for folder in (absolute, *absolute.parents) if folder.exists())


def _size(count: float) -> str:
    return f"{count / GB:.1f} GB" if count >= GB / 10 else f"{count / MB:.1f} MB"
