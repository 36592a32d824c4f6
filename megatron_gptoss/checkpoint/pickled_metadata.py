"""Reads what torch_dist checkpoints pickle without running what a stranger may have put there.

    .metadata     a pickle, which torch would load whatever it calls: read by an unpickler that
                  knows the classes of such a file and no other
    __*.distcp    tensors, which torch loads as data only, and objects (the optimizer's groups, ...),
                  which it would load as any pickle: read as data only, too
    common.pt     of older Megatron: torch.load reads it as data only by itself

In a pickle, a name of a function is an order to call it.
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
MAX_METADATA_BYTES = 1 << 30
"""Size limit. The metadata of a 120B model's checkpoint have a few megabytes."""

CLASSES: dict[tuple[str, str], Any] = {
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
    # Where a writer of torch's own says that it wrote to.
    ("pathlib", "PosixPath"): PurePosixPath,
}
"""All that a ``.metadata`` may name, besides dtypes."""


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = CLASSES.get((module, name))
        if found is not None:
            return found
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(
            f"it names {module}.{name}, which no checkpoint needs: it was not loaded, because it "
            "could run a program of whoever wrote the file"
        )


def read_metadata(path: Path) -> dcp.Metadata:
    """Read a ``.metadata`` file.

    Raises:
        ValueError: naming the file, if it is damaged, names a function or class that no checkpoint
            needs, or a data file outside its directory.
    """
    try:
        metadata = _MetadataUnpickler(io.BytesIO(read_bytes(path, MAX_METADATA_BYTES))).load()
        places = list(metadata.storage_data.values())
        _ = metadata.state_dict_metadata.items()
        names = {place.relative_path for place in places}
    except Exception as error:  # unpickling a damaged file raises anything
        raise ValueError(f"{path}: damaged ({error}); the checkpoint cannot be read") from None

    for name in sorted(names, key=str):
        if not is_plain_name(name):
            raise ValueError(f"{path}: names the data file {name!r}, which is not in its directory")
    assert isinstance(metadata, dcp.Metadata)
    return metadata


_READING_DATA_ONLY = RLock()
"""Held where the loaders of torch are changed: the first of two threads to leave would give the
other one those that run any pickle."""


@contextmanager
def data_only() -> Iterator[None]:
    """Let torch's and Megatron's loaders of checkpoints read data only, within the block.

    Blocks of several threads take turns."""
    with _READING_DATA_ONLY, _changed_loaders():
        yield


@contextmanager
def _changed_loaders() -> Iterator[None]:
    read_of_torch = filesystem.FileSystemReader.read_metadata
    load_of_torch = DefaultLoadPlanner.load_bytes
    filesystem.FileSystemReader.read_metadata = _read_metadata  # type: ignore[method-assign]
    DefaultLoadPlanner.load_bytes = _load_bytes  # type: ignore[method-assign]
    try:
        # What Transformer Engine's layers keep is bytes in such a file.
        with torch.serialization.safe_globals([io.BytesIO]):
            yield
    finally:
        filesystem.FileSystemReader.read_metadata = read_of_torch  # type: ignore[method-assign]
        DefaultLoadPlanner.load_bytes = load_of_torch  # type: ignore[method-assign]


def _read_metadata(self: Any, *args: Any, **options: Any) -> dcp.Metadata:
    """Read as ``FileSystemReader.read_metadata`` does."""
    metadata = read_metadata(Path(self._get_metadata_path(options.get("rank"))))
    if metadata.storage_meta is None:
        metadata.storage_meta = dcp.StorageMeta()
    metadata.storage_meta.load_id = self.load_id
    return metadata


def _load_bytes(self: Any, read_item: ReadItem, value: io.BytesIO) -> None:
    """Load an object as ``DefaultLoadPlanner.load_bytes`` does."""
    name = read_item.dest_index.fqn
    try:
        loaded = torch.load(value, weights_only=True)
    except pickle.UnpicklingError as error:
        # The rest of torch's message says how to load it all the same.
        named = re.search(r"GLOBAL [\w.]+", str(error))
        what = f"it names {named.group()}" if named else "or is damaged"
        raise ValueError(f"{name}: holds more than data ({what}), and was not loaded") from None
    if self.flatten_state_dict:
        set_element(self.original_state_dict, self.mappings[name], loaded)
    else:
        self.state_dict[name] = loaded
