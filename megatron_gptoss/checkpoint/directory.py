"""The files of a directory of checkpoints: names, the ``latest`` pointer, and how both change.

    ROOT/step_000120/                      torch_dist: model and optimizer, for any layout
    ROOT/step_000120/gptoss_config.json    the ModelConfig
    ROOT/step_000120/adapter.json          of adapters: their settings, and which base they change
    ROOT/step_000120/quantization.json    of experts that are trained through another format: its name
    ROOT/step_000120/checksums.json        of every file: its size and checksum (``checksums``)
    ROOT/step_000120/training_state.json   what the caller wants back: step, data position, ...
    ROOT/latest                            the name of the newest complete checkpoint

A checkpoint is written as ``step_000120.partial`` and published when every rank is done
(``new_directory``); ``latest`` changes last. A step that is saved again replaces its earlier
checkpoint. If a process ends while it replaces one by two renames, ``find_checkpoint`` returns
``step_000120.old`` for the name ``step_000120``, and the next save renames it back.

Nothing here is collective or imports Megatron.
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
ADAPTER_FILE = "adapter.json"
"""Only a checkpoint of adapters has it; any other holds a whole model."""
QUANTIZATION_FILE = "quantization.json"
"""Only a checkpoint has it whose experts multiply rounded: it holds them unrounded."""
TRAINING_STATE_FILE = "training_state.json"
"""Written last, so that a directory without it is not complete."""
LATEST_FILE = "latest"

STEP_PATTERN = "step_??????"


def step_directory(root: Path, step: int) -> Path:
    """Return where the checkpoint of ``step`` is kept."""
    return root / f"step_{step:06d}"


def step_of(checkpoint: Path) -> int:
    """Return the step of a directory that ``step_directory`` named, or that replaces such a one."""
    return int(final_name(checkpoint).name.rpartition("_")[2])


def latest_checkpoint(root: Path) -> Path | None:
    """Return the newest complete checkpoint under ``root``, or None where nothing was saved.

    Raises:
        CheckpointError: when the checkpoint that ``latest`` names is gone.
    """
    pointer = root / LATEST_FILE
    if not pointer.exists():
        return None

    name = read_bytes(pointer).decode(errors="replace").strip()
    path = find_checkpoint(root, name)
    if path is None:
        raise CheckpointError(
            f"{pointer} names {name}, which is missing or incomplete; correct or delete the file"
        )
    return path


def find_checkpoint(root: Path, name: str) -> Path | None:
    """Return the complete checkpoint ``name`` under ``root``; None if there is none.

    Its directory has another name only where the process was killed while it replaced this
    checkpoint. Nothing is renamed here, because the process that is replacing it may be alive.
    ``name`` may also be the directory name that this function returned for another root.
    """
    final = final_name(root / name)
    for path in (final, old_name(final)):
        if _is_complete(path):
            return path
    return None


def earlier_checkpoints(checkpoint: Path) -> list[Path]:
    """List the complete checkpoints beside this one of lower steps, the newest first."""
    root = checkpoint.parent
    written = (path for path in root.glob(f"{STEP_PATTERN}*") if not is_partial(path))
    names = {final_name(path).name for path in written}
    earlier = sorted((name for name in names if name < final_name(checkpoint).name), reverse=True)
    found = [find_checkpoint(root, name) for name in earlier]
    return [path for path in found if path is not None]


def offer_earlier(checkpoint: Path) -> str:
    """Say which checkpoint there is before one that cannot be loaded."""
    earlier = earlier_checkpoints(checkpoint)
    return f"the one before it is {earlier[0]}" if earlier else "there is none before it"


def publish(final: Path, keep: int) -> None:
    """Publish a complete checkpoint as the latest and delete all but the newest ``keep``.

    A crash at any point leaves a complete checkpoint that ``latest_checkpoint`` returns.

    Args:
        final: name of the checkpoint, which was written at ``partial_name(final)``.
        keep: number of checkpoints to keep.

    Raises:
        OSError: when a rename fails; an earlier checkpoint of this step then has its name again.
    """
    root = final.parent
    new_directory.publish(final)
    # The pointer may reach the disk only after the name that it holds.
    write_atomically(root / LATEST_FILE, final.name.encode())
    for outdated in _outdated_checkpoints(root.glob(STEP_PATTERN), final, keep):
        _delete(outdated)


def clean_up_after_crash(root: Path) -> None:
    """Undo what a crash left of a save under ``root``.

    A checkpoint that was set aside gets its name back, or is deleted if its successor has that
    name. Incomplete checkpoints are deleted.
    """
    for old in root.glob(STEP_PATTERN + OLD):
        final = final_name(old)
        if not _is_complete(final):
            _delete(final)
        new_directory.restore(final)
        _delete(old)

    for abandoned in root.glob(STEP_PATTERN + PARTIAL):
        shutil.rmtree(abandoned, ignore_errors=True)


def _is_complete(checkpoint: Path) -> bool:
    return (checkpoint / TRAINING_STATE_FILE).exists()


def _delete(checkpoint: Path) -> None:
    """Delete the directory if it exists.

    If the process is killed meanwhile, the rest does not look complete.
    """
    with suppress(OSError):
        (checkpoint / TRAINING_STATE_FILE).unlink(missing_ok=True)
    shutil.rmtree(checkpoint, ignore_errors=True)


def _outdated_checkpoints(checkpoints: Iterable[Path], newest: Path, keep: int) -> list[Path]:
    """Return which of ``checkpoints`` are not among the ``keep`` newest; never ``newest``.

    Steps above that of ``newest`` belong to a course of the run that was given up (somebody set
    ``latest`` back by hand). They count as older than all others.
    """
    others = sorted(path for path in checkpoints if path != newest)
    oldest_first = sorted(others, key=lambda path: path < newest)
    surplus = len(oldest_first) - (keep - 1)
    return oldest_first[: max(0, surplus)]
