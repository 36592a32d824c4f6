"""Names and lifecycle of the directories that hold checkpoints.

    ROOT/step_000120/                      torch_dist: model and optimizer, for other layouts, too
    ROOT/step_000120/gptoss_config.json    ModelConfig
    ROOT/step_000120/adapter.json          adapter settings and digest of the base (only adapters)
    ROOT/step_000120/quantization.json     number format of the experts (only if quantized)
    ROOT/step_000120/checksums.json        size and checksum of every file (``checksums``)
    ROOT/step_000120/training_state.json   state of the caller: step, data position, ...
    ROOT/latest                            name of the newest complete checkpoint

A checkpoint is written as ``step_000120.partial`` and published when every rank is done
(``new_directory``); ``latest`` changes last. Saving a step again replaces its earlier checkpoint.
If a process ends between the two renames of a replacement, ``find_checkpoint`` returns
``step_000120.old`` for the name ``step_000120``, and the next save renames it back.

No function here is collective or imports Megatron.
"""

import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from gptoss_kernels.cache import write_atomically
from megatron_gptoss import new_directory
from megatron_gptoss.checkpoint.errors import CheckpointError
from megatron_gptoss.new_directory import OLD, PARTIAL, final_name, is_partial, old_name
from megatron_gptoss.untrusted_files import read_bytes

MODEL_CONFIG_FILE = "gptoss_config.json"
"""File with the ModelConfig."""
ADAPTER_FILE = "adapter.json"
"""File that only a checkpoint of adapters has. Other checkpoints contain a whole model."""
QUANTIZATION_FILE = "quantization.json"
"""File that only a checkpoint of quantized experts has. Their weights are saved unrounded."""
TRAINING_STATE_FILE = "training_state.json"
"""File with the state of the caller. Written last: a directory without it is incomplete."""
LATEST_FILE = "latest"
"""File with the name of the newest complete checkpoint."""

STEP_PATTERN = "step_??????"
"""Glob pattern of checkpoint names."""


def step_directory(root: Path, step: int) -> Path:
    """Return the path of step ``step``'s checkpoint."""
    return root / f"step_{step:06d}"


def checkpoint_step(checkpoint: Path) -> int:
    """Return the step of a checkpoint, also of one with the suffix of a replacement."""
    return int(final_name(checkpoint).name.rpartition("_")[2])


def latest_checkpoint(root: Path) -> Path | None:
    """Return the newest complete checkpoint under ``root``; None if nothing was saved.

    Raises:
        CheckpointError: the checkpoint that ``latest`` names is missing or incomplete.
    """
    # A checkpoint that `latest` does not name is ignored, even if it is complete: a user may have
    # set `latest` back.
    pointer = root / LATEST_FILE
    if not pointer.exists():
        return None

    name = read_bytes(pointer).decode(errors="replace").strip()
    path = find_checkpoint(root, name)
    if path is None:
        raise CheckpointError(
            f"{pointer} names {name}, which is missing or incomplete. Correct or delete the file"
        )
    return path


def find_checkpoint(root: Path, name: str) -> Path | None:
    """Return the complete checkpoint ``name`` under ``root``; None if there is none.

    The returned directory has the suffix of a replacement if a process was killed while it
    replaced the checkpoint.

    Args:
        root: directory of checkpoints.
        name: name of the checkpoint, with or without that suffix.
    """
    # Do not rename the directory back: the process that replaces it may still be running.
    final = final_name(root / name)
    for path in (final, old_name(final)):
        if _is_complete(path):
            return path
    return None


def earlier_checkpoints(checkpoint: Path) -> list[Path]:
    """Return the complete checkpoints of lower steps in the same directory, newest first."""
    root = checkpoint.parent
    # Names have six digits, so their order is the order of steps.
    written = (path for path in root.glob(f"{STEP_PATTERN}*") if not is_partial(path))
    names = {final_name(path).name for path in written}
    earlier = sorted((name for name in names if name < final_name(checkpoint).name), reverse=True)
    checkpoints = [find_checkpoint(root, name) for name in earlier]
    return [path for path in checkpoints if path is not None]


def describe_earlier(checkpoint: Path) -> str:
    """Return a sentence part that names the checkpoint before one that cannot be loaded."""
    earlier = earlier_checkpoints(checkpoint)
    return f"the one before it is {earlier[0]}" if earlier else "there is none before it"


def publish(final: Path, keep: int) -> None:
    """Publish a complete checkpoint as the latest and delete all but the newest ``keep``.

    A crash at any point leaves a complete checkpoint that ``latest_checkpoint`` returns.

    Args:
        final: path of the checkpoint. It was written at ``partial_name(final)``.
        keep: number of checkpoints to keep.

    Raises:
        OSError: a rename fails. An earlier checkpoint of this step then has its name again.
    """
    root = final.parent
    new_directory.publish(final)
    # Only after publishing, which waits for the disk: `latest` must never name a missing directory.
    write_atomically(root / LATEST_FILE, final.name.encode())
    for outdated in _outdated_checkpoints(root.glob(STEP_PATTERN), final, keep):
        _delete(outdated)


def clean_up_after_crash(root: Path) -> None:
    """Remove the remains of an interrupted save under ``root``.

    A replaced checkpoint gets its name back, or is deleted if its replacement is complete.
    Incomplete checkpoints are deleted.
    """
    # An incomplete `final` next to a complete `old` cannot be used, so delete it first: restore()
    # does not overwrite.
    for old in root.glob(STEP_PATTERN + OLD):
        final = final_name(old)
        if not _is_complete(final):
            _delete(final)
        new_directory.restore(final)
        _delete(old)

    for abandoned in root.glob(STEP_PATTERN + PARTIAL):
        shutil.rmtree(abandoned, ignore_errors=True)


def _is_complete(checkpoint: Path) -> bool:
    """Return True if the directory exists and contains the file that is written last."""
    return (checkpoint / TRAINING_STATE_FILE).exists()


def _delete(checkpoint: Path) -> None:
    """Delete a checkpoint if it exists."""
    # Delete this file first: if the process is killed here, the rest counts as incomplete.
    with suppress(OSError):
        (checkpoint / TRAINING_STATE_FILE).unlink(missing_ok=True)
    shutil.rmtree(checkpoint, ignore_errors=True)


def _outdated_checkpoints(checkpoints: Iterable[Path], newest: Path, keep: int) -> list[Path]:
    """Return the members of ``checkpoints`` that are not among the ``keep`` newest.

    ``newest`` is always kept.
    """
    # Higher steps than the newest exist if a user has set ``latest`` back by hand. That part of the
    # run was abandoned, so these checkpoints count as the oldest.
    others = sorted(path for path in checkpoints if path != newest)
    oldest_first = sorted(others, key=lambda path: path < newest)
    surplus = len(oldest_first) - (keep - 1)
    return oldest_first[: max(0, surplus)]
