"""Writing of weight files: one file, or several files of a limited size with an index."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from converters.bits import FileRange, require_finite
from converters.errors import ConversionError, count_tensors
from converters.hf_layouts import Shape
from converters.safetensors_files import SafetensorsWriter
from converters.weight_files import INDEX_FILE, SINGLE_FILE


class ShardWriter:
    """Writes tensors to files of a limited size, and an index if there are several files."""

    def __init__(self, directory: Path, expected: Mapping[str, Shape], max_bytes: int) -> None:
        """Write to an existing directory.

        Args:
            directory: directory of the files.
            expected: {stored name: shape} of all tensors to write.
            max_bytes: maximum size of a file, unless a single tensor is larger.
        """
        self._directory = directory
        self._expected = expected
        self._max_bytes = max_bytes
        self._writer: SafetensorsWriter | None = None
        self._shards: list[list[str]] = []
        """Names of the tensors in each file."""
        self._sizes: dict[str, int] = {}
        """Size of each tensor added so far, in bytes."""
        self._dtype: torch.dtype | None = None
        """Dtype of the first tensor."""

    def add(self, name: str, tensor: torch.Tensor) -> FileRange:
        """Append a tensor to the last file, or to a new file if the last one would be too large.

        Args:
            name: stored name.
            tensor: values [expected[name]] of a dtype that safetensors_files knows.

        Returns:
            Byte range of the values in the file.

        Raises:
            ConversionError: if the tensor is repeated, unknown, of a different shape or not finite.
        """
        if name in self._sizes:
            raise ConversionError(f"tensor {name} was given twice")
        if name not in self._expected:
            raise ConversionError(f"tensor {name} is not part of the model to write")
        if tuple(tensor.shape) != self._expected[name]:
            raise ConversionError(
                f"tensor {name} has shape {list(tensor.shape)}, expected "
                f"{list(self._expected[name])}"
            )

        # Engines load NaN without an error, and then sample arbitrary tokens.
        require_finite(tensor, name, "the weights to write")
        self._sizes[name] = tensor.nbytes
        self._dtype = self._dtype or tensor.dtype
        return self._writer_for(tensor.nbytes).add(name, tensor)

    def _writer_for(self, tensor_bytes: int) -> SafetensorsWriter:
        """Return the file that receives the next tensor. A full file is closed."""
        if self._writer is not None and self._writer.size + tensor_bytes > self._max_bytes:
            self._writer.close()
            self._writer = None
        if self._writer is None:
            # File names contain the number of files, which is known only at the end.
            path = self._directory / f"shard-{len(self._shards)}"
            self._writer = SafetensorsWriter(path, self._expected)
            self._shards.append(self._writer.names)
        return self._writer

    def finish(self) -> torch.dtype:
        """Close the files and give them their final names.

        Returns:
            The dtype of the first tensor, for config.json.

        Raises:
            ConversionError: if a tensor is missing.
        """
        # ``add`` rejected unknown tensors, so only missing tensors are left to check.
        missing = [name for name in self._expected if name not in self._sizes]
        if missing or self._writer is None or self._dtype is None:
            raise ConversionError(f"{count_tensors(missing)} missing from the weights to write")
        self._writer.close()

        # transformers looks for a single file under this name, without an index.
        if len(self._shards) == 1:
            (self._directory / "shard-0").rename(self._directory / SINGLE_FILE)
            return self._dtype

        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._shards):
            file = f"model-{number + 1:05d}-of-{len(self._shards):05d}.safetensors"
            (self._directory / f"shard-{number}").rename(self._directory / file)
            weight_map |= dict.fromkeys(names, file)
        total_bytes = sum(self._sizes.values())
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        write_json(self._directory / INDEX_FILE, index)
        return self._dtype


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file with the indentation of Hugging Face's files."""
    path.write_text(json.dumps(content, indent=2) + "\n")
