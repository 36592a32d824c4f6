"""Checkpoints of tenants on disk: ``MODEL/KIND/NAME``.

A checkpoint is a directory with a JSON file and tensors. Pickle is never read.
"""

import json
import logging
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from megatron_gptoss.new_directory import OLD, PARTIAL, final_name, new_directory, restore
from rl_loop.gateway.errors import ApiError
from rl_loop.tinker.errors import ClientError, bad_request
from rl_loop.tracking.run_directory import atomic_file

logger = logging.getLogger(__name__)

SCHEME = "tinker://"
"""Beginning of the name of a checkpoint."""
TENSORS = "tensors.safetensors"
"""File with the tensors of a checkpoint."""
ABOUT = "checkpoint.json"
"""File with the data about a checkpoint."""
Kind = Literal["weights", "sampler_weights", "external_weights"]
"""``weights`` have the optimizer's state. ``external_weights`` are adapters in PEFT's format."""
KINDS: tuple[Kind, ...] = get_args(Kind)
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_MODEL = re.compile(r"[0-9a-f]{1,64}:train:[0-9]{1,9}")


@dataclass(frozen=True)
class CheckpointName:
    """Name of a checkpoint in the API: ``tinker://MODEL/KIND/NAME``."""

    model_id: str
    """Tenant that saved the checkpoint."""
    kind: Kind
    """Kind of the checkpoint."""
    name: str
    """Name that the client chose."""

    def __post_init__(self) -> None:
        """Check all parts, because they become names of directories.

        Raises:
            ApiError: a part has other characters than letters, digits, ".", "_" and "-".
        """
        is_reserved = self.name.endswith((PARTIAL, OLD))
        if not _MODEL.fullmatch(self.model_id):
            raise bad_request(f"{self} is not the name of a checkpoint")
        if not _NAME.fullmatch(self.name) or is_reserved:
            raise bad_request(
                f"checkpoint name {self.name[:128]!r}: use up to 128 letters, digits, '.', '_' and '-', "
                f"but no '.' or '-' at the beginning and no ending {PARTIAL} or {OLD}"
            )

    def __str__(self) -> str:
        return f"{SCHEME}{self.model_id}/{self.kind}/{self.name}"[:300]

    @classmethod
    def parse(cls, text: object) -> "CheckpointName":
        """Read a name. Raises ApiError."""
        parts = str(text).removeprefix(SCHEME).split("/")
        if not str(text).startswith(SCHEME) or len(parts) != 3:
            raise bad_request(f"{str(text)[:128]!r} is not of the form {SCHEME}MODEL/KIND/NAME")
        return cls.of_parts(*parts)

    @classmethod
    def of_parts(cls, model_id: str, kind: str, name: str) -> "CheckpointName":
        """Return the name with these parts. Raises ApiError if it is not a valid name."""
        for known in KINDS:
            if kind == known:
                return cls(model_id, known, name)
        raise bad_request(
            f"{kind[:128]!r} is not a kind of checkpoints. Known kinds: {', '.join(KINDS)}"
        )


@dataclass(frozen=True)
class CheckpointFacts:
    """Data about a checkpoint."""

    owner: str
    """Owner of the checkpoint. Others do not see it."""
    base: str
    """Digest of the base. Factors of another base are useless."""
    rank: int
    """Rank of the adapter."""
    created: float
    """Time of creation in seconds since the epoch."""
    expires: float | None = None
    """Time at which the checkpoint is deleted. None to keep it."""
    user_metadata: Mapping[str, str] | None = None
    """Data of the client."""
    run_metadata: Mapping[str, Any] | None = None
    """Data of the client about the tenant."""

    @property
    def is_expired(self) -> bool:
        """True if the checkpoint must be deleted."""
        return self.expires is not None and self.expires < time.time()


class CheckpointStore:
    """Checkpoints of all tenants in a directory."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        """Keep checkpoints in ``directory``, up to ``max_bytes`` of each owner.

        Incomplete checkpoints of an earlier process are deleted.
        """
        self._directory = directory
        self._max_bytes = max_bytes
        for path in list(directory.glob("*/*/*")):
            if path.name.endswith(OLD):
                restore(final_name(path))
            if path.name.endswith((PARTIAL, OLD)):
                shutil.rmtree(path, ignore_errors=True)

    def save(
        self,
        name: CheckpointName,
        facts: CheckpointFacts,
        tensors: Mapping[str, torch.Tensor],
        *,
        overwrite: bool = False,
    ) -> None:
        """Write a checkpoint. It appears when it is complete.

        Raises:
            ClientError: it exists, and ``overwrite`` is False. Or there is no room for it.
            DirectoryError: it cannot be written.
        """

        def write(directory: Path) -> None:
            contiguous = {key: tensor.contiguous() for key, tensor in tensors.items()}
            save_file(contiguous, directory / TENSORS)

        self.save_files(name, facts, tensors, write, overwrite=overwrite)

    def save_files(
        self,
        name: CheckpointName,
        facts: CheckpointFacts,
        tensors: Mapping[str, torch.Tensor],
        write: Callable[[Path], None],
        *,
        overwrite: bool = False,
    ) -> None:
        """Write a checkpoint like ``save``, whose files ``write`` creates in a directory."""
        path = self._path(name)
        if path.exists() and not overwrite:
            raise ClientError(f"{name} exists. Choose another name, or overwrite it")
        needed = sum(tensor.nbytes for tensor in tensors.values())
        used = sum(self.size(one) for one, _ in self.list(facts.owner) if one != name)
        if used + needed > self._max_bytes:
            raise ClientError(
                f"{name} needs {needed / 1e9:.3f} GB, but other checkpoints use {used / 1e9:.3f} of "
                f"{self._max_bytes / 1e9:.3f} GB. Delete some"
            )
        with new_directory(path, overwrite=overwrite) as partial:
            write(partial)
            (partial / ABOUT).write_text(json.dumps(asdict(facts), indent=1))

    def set_expiry(self, name: CheckpointName, facts: CheckpointFacts) -> None:
        """Replace the data about a checkpoint, which has another time to live. Raises OSError."""
        with atomic_file(self._path(name) / ABOUT) as file:
            file.write(json.dumps(asdict(facts), indent=1).encode())

    def files(self, name: CheckpointName) -> dict[str, Path]:
        """Return the files of a checkpoint with weights and settings, by name."""
        paths = self._path(name).glob("*")
        return {path.name: path for path in paths if path.name.removesuffix(PARTIAL) != ABOUT}

    def tensors(self, name: CheckpointName) -> Path:
        """Return the file with the tensors of a checkpoint."""
        return self._path(name) / TENSORS

    def load(
        self, name: CheckpointName, base: str
    ) -> tuple[CheckpointFacts, dict[str, torch.Tensor]]:
        """Read a checkpoint.

        Args:
            name: name of the checkpoint.
            base: digest of the base of this server.

        Raises:
            ClientError: there is no such checkpoint, or it belongs to another base.
        """
        facts = self.facts(name)
        if facts is None:
            raise ClientError(f"there is no checkpoint {name}")
        self.check_base(name, facts, base)
        if name.kind == "external_weights":
            raise ClientError(f"{name} is for other programs. Load other weights")
        try:
            return facts, load_file(self._path(name) / TENSORS)
        except (OSError, SafetensorError) as error:
            raise ClientError(f"{name} cannot be read: {error}") from None

    @staticmethod
    def check_base(name: CheckpointName, facts: CheckpointFacts, base: str) -> None:
        """Raise ClientError if a checkpoint belongs to another base than ``base``."""
        if facts.base != base:
            raise ClientError(f"{name} was trained on another base than this server has")

    def facts(self, name: CheckpointName) -> CheckpointFacts | None:
        """Return the data about a checkpoint. None if there is none.

        Raises:
            ClientError: its file is damaged.
        """
        facts = self._read_facts(name)
        return None if facts is None or facts.is_expired else facts

    def _read_facts(self, name: CheckpointName) -> CheckpointFacts | None:
        """Return the data about a checkpoint, even if it is expired. Raises ClientError."""
        path = self._path(name) / ABOUT
        try:
            return CheckpointFacts(**json.loads(path.read_text()))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            raise ClientError(f"{name}: {ABOUT} is damaged: {error}") from None

    def size(self, name: CheckpointName) -> int:
        """Return the bytes of a checkpoint."""
        return sum(file.stat().st_size for file in self._path(name).iterdir())

    def list(
        self, owner: str, model_id: str | None = None
    ) -> list[tuple[CheckpointName, CheckpointFacts]]:
        """Return checkpoints of an owner's tenant, or of all tenants, without damaged ones.

        The oldest one is the first.
        """
        chosen = [
            (name, facts)
            for name, facts in self._readable()
            if facts.owner == owner and not facts.is_expired and model_id in (None, name.model_id)
        ]
        return sorted(chosen, key=lambda one: one[1].created)

    def delete(self, name: CheckpointName) -> bool:
        """Delete a checkpoint. Return False if there is none."""
        path = self._path(name)
        if not path.is_dir():
            return False
        shutil.rmtree(path)
        return True

    def delete_expired(self) -> None:
        """Delete checkpoints whose time to live is over."""
        for name, facts in self._readable():
            if facts.is_expired:
                self.delete(name)

    def _readable(self) -> Iterator[tuple[CheckpointName, CheckpointFacts]]:
        """Yield all checkpoints. Log damaged ones, which must not hide the others."""
        for name in self._names():
            try:
                facts = self._read_facts(name)
            except ClientError as error:
                logger.warning("%s", error)
                continue
            if facts is not None:
                yield name, facts

    def _names(self) -> Iterator[CheckpointName]:
        """Yield the names of all checkpoints."""
        for path in sorted(self._directory.glob("*/*/*")):
            model_id = path.parts[-3].replace("_train_", ":train:")
            try:
                yield CheckpointName.of_parts(model_id, path.parts[-2], path.name)
            except ApiError:
                continue  # a directory that is being written

    def _path(self, name: CheckpointName) -> Path:
        # Some file systems do not allow colons.
        model = name.model_id.replace(":train:", "_train_")
        return self._directory / model / name.kind / name.name
