"""Safe reading of the pickled parts of untrusted torch_dist checkpoints.

A pickle can name any function and have it called on loading.

    .metadata     a pickle that torch would load without restrictions. Here an unpickler reads it
                  that accepts only the classes of such a file.
    __*.distcp    tensors, which torch loads as data only, and objects (such as the optimizer's
                  groups), which torch would unpickle. Here both are loaded as data only.
    common.pt     file of older Megatron versions. torch.load reads it as data only by default.
"""

import io
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from threading import RLock
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem

from megatron_gptoss.untrusted_files import is_plain_name, read_bytes

METADATA_FILE = ".metadata"
"""Name of the file that describes the tensors of a checkpoint."""
MAX_METADATA_BYTES = 1 << 30
"""Size limit of METADATA_FILE. For the 120B model it has a few megabytes."""

ALLOWED_CLASSES: dict[tuple[str, str], Any] = {
    **{
        (dcp.__name__, name): getattr(dcp, name)
        for name in (
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorStorageMetadata",
            "TensorProperties",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    },
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    # torch's writer stores the path that it wrote to. A pure path cannot access files.
    ("pathlib", "PosixPath"): PurePosixPath,
}
"""{(module, name): class or function} that METADATA_FILE may name, in addition to dtypes."""


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickler that accepts only ALLOWED_CLASSES and dtypes."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the object with this name; raise UnpicklingError if it is not allowed."""
        found = ALLOWED_CLASSES.get((module, name))
        if found is not None:
            return found
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(
            f"it names {module}.{name}, which no checkpoint needs. It was not loaded, because it "
            "could execute code of an untrusted author"
        )


def read_metadata(path: Path) -> dcp.Metadata:
    """Read a ``.metadata`` file.

    Raises:
        ValueError: the file is damaged, names a function or class that no checkpoint needs, or
            names a data file outside of its directory. The message names the file.
    """
    # Access all fields that are used later, so that a pickle of other objects fails here.
    try:
        metadata = _MetadataUnpickler(io.BytesIO(read_bytes(path, MAX_METADATA_BYTES))).load()
        places = list(metadata.storage_data.values())
        _ = metadata.state_dict_metadata.items()
        names = {place.relative_path for place in places}
    except Exception as error:
        # Unpickling a damaged file may raise any exception.
        raise ValueError(
            f"{path}: damaged or unsafe ({error}); the checkpoint cannot be read"
        ) from None

    # key=str: the names of an untrusted file may have any type.
    for name in sorted(names, key=str):
        if not is_plain_name(name):
            raise ValueError(f"{path}: names the data file {name!r}, which is not in its directory")
    assert isinstance(metadata, dcp.Metadata)
    return metadata


# Without the lock, the first of two threads to leave its block would restore the unsafe loaders
# while the other thread still reads.
_READING_DATA_ONLY = RLock()
"""Lock for changing the loaders of torch."""


@contextmanager
def data_only() -> Iterator[None]:
    """Make torch's and Megatron's checkpoint loaders read data only within the block.

    Blocks of several threads run one at a time.
    """
    with _READING_DATA_ONLY, _changed_loaders():
        yield


@contextmanager
def _changed_loaders() -> Iterator[None]:
    """Replace the two methods of torch that unpickle without restrictions."""
    read_of_torch = filesystem.FileSystemReader.read_metadata
    load_of_torch = DefaultLoadPlanner.load_bytes
    filesystem.FileSystemReader.read_metadata = _read_metadata  # type: ignore[method-assign]
    DefaultLoadPlanner.load_bytes = _load_bytes  # type: ignore[method-assign]
    try:
        # The extra state of Transformer Engine's layers is a BytesIO, which is data.
        with torch.serialization.safe_globals([io.BytesIO]):
            yield
    finally:
        filesystem.FileSystemReader.read_metadata = read_of_torch  # type: ignore[method-assign]
        DefaultLoadPlanner.load_bytes = load_of_torch  # type: ignore[method-assign]


def _read_metadata(self: Any, *args: Any, **options: Any) -> dcp.Metadata:
    """Safe replacement of ``FileSystemReader.read_metadata``."""
    metadata = read_metadata(Path(self._get_metadata_path(options.get("rank"))))
    if metadata.storage_meta is None:
        metadata.storage_meta = dcp.StorageMeta()
    metadata.storage_meta.load_id = self.load_id
    return metadata


def _load_bytes(self: Any, read_item: ReadItem, value: io.BytesIO) -> None:
    """Safe replacement of ``DefaultLoadPlanner.load_bytes``."""
    name = read_item.dest_index.fqn
    try:
        loaded = torch.load(value, weights_only=True)
    except pickle.UnpicklingError as error:
        # Do not show the rest of torch's message: it explains how to disable the protection.
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        reason = f"it names {named.group(1)}" if named else "it is damaged or holds more than data"
        raise ValueError(f"{name}: not loaded, because {reason}") from None
    if self.flatten_state_dict:
        set_element(self.original_state_dict, self.mappings[name], loaded)
    else:
        self.state_dict[name] = loaded
