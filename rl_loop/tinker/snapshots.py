"""Snapshots: weights that sample. They are files, so that many of them need no memory."""

import os
import secrets
import shutil
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


@dataclass(frozen=True, eq=False)
class Snapshot:
    """Weights that sample. They never change. Compared by identity."""

    rank: int = 1
    """Rank of the adapter."""
    file: Path | None = None
    """File with the factors by name. None for the base."""

    def read(self) -> dict[str, torch.Tensor] | None:
        """Return the factors by name. None for the base."""
        return None if self.file is None else load_file(self.file)


class SnapshotStore:
    """Files of snapshots in a directory. A file is deleted when its snapshot is not used any more."""

    def __init__(self, directory: Path) -> None:
        """Use ``directory``. Files of an earlier process in it are deleted."""
        shutil.rmtree(directory, ignore_errors=True)
        self._directory = directory

    def save(self, rank: int, tensors: Mapping[str, torch.Tensor]) -> Snapshot:
        """Write a snapshot. Raises OSError."""
        file = self._new_file()
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
        return self._snapshot(rank, file)

    def link(self, rank: int, checkpoint: Path) -> Snapshot:
        """Return a snapshot of a file that is never changed, but may be deleted. Raises OSError."""
        file = self._new_file()
        try:
            os.link(checkpoint, file)
        except PermissionError:
            # Some file systems have no links.
            shutil.copyfile(checkpoint, file)
        return self._snapshot(rank, file)

    def _new_file(self) -> Path:
        self._directory.mkdir(parents=True, exist_ok=True)
        return self._directory / f"{secrets.token_hex(8)}.safetensors"

    def _snapshot(self, rank: int, file: Path) -> Snapshot:
        snapshot = Snapshot(rank, file)
        weakref.finalize(snapshot, file.unlink, missing_ok=True)
        return snapshot
