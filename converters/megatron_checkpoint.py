"""Access to a torch_dist checkpoint of a model by entries of the name table."""

from collections.abc import Iterator
from pathlib import Path

import torch

from converters.bits import FileRange, TensorRange
from converters.errors import ConversionError
from converters.hf_directory import HfDirectory
from converters.mapping import NamedTensor, ParameterMapping
from converters.names import hf_tensors, parameter_mappings
from converters.torch_dist_files import Shape, TorchDistReader
from megatron_gptoss.checkpoint.directory import MODEL_CONFIG_FILE, QUANTIZATION_FILE
from megatron_gptoss.config import ModelConfig
from megatron_gptoss.families.registry import parse_model_config
from megatron_gptoss.untrusted_files import read_bytes

MODEL_KEYS = ("embedding.", "decoder.", "output_layer.")
"""Prefixes of model keys. A trainer's checkpoint also holds the optimizer's keys."""


class MegatronCheckpoint:
    """A torch_dist checkpoint of a model, read parameter by parameter."""

    def __init__(
        self,
        path: Path,
        unfinished: bool = False,
        from_disk: bool = False,
        verify: bool = True,
    ) -> None:
        """Open a checkpoint.

        Args:
            path: directory of the checkpoint.
            unfinished: see ``TorchDistReader``.
            from_disk: see ``TorchDistReader``.
            verify: see ``TorchDistReader``.

        Raises:
            ConversionError: if it is not a complete checkpoint of one model.
        """
        self.path = Path(path)
        self._reader = TorchDistReader(self.path, unfinished, from_disk, verify)
        self.config = read_model_config(self.path / MODEL_CONFIG_FILE)

        # A missing key fails when its parameter is read. An additional key would go unnoticed.
        known = {mapping.checkpoint_key for mapping in parameter_mappings(self.config).values()}
        for key in self._reader.keys() - known:
            if key.startswith(MODEL_KEYS):
                raise ConversionError(
                    f"{self.path}: key {key} is unknown to a {self.config.model_type} model. The "
                    "checkpoint is of a different model, or has adapters that must be merged first"
                )

    def get(self, key: str, index: Shape) -> torch.Tensor:
        """Read element ``index`` along the leading dimensions of ``key``: shape[len(index):]."""
        shape = self._reader.shape(key)[len(index) :]
        return self._reader.get(key, index, shape)

    def parameter(self, mapping: ParameterMapping) -> torch.Tensor:
        """Read a full Megatron parameter [mapping.shape], in the dtype in which it is stored."""
        return self._reader.get(mapping.checkpoint_key, mapping.checkpoint_index, mapping.shape)

    def find_file(self, mapping: ParameterMapping) -> str:
        """Return the name of the file that holds the parameter."""
        return self._reader.find_file(mapping.checkpoint_key, mapping.checkpoint_index)

    def file_ranges(self, mapping: ParameterMapping) -> list[FileRange]:
        """Return the byte ranges of a parameter."""
        return self._reader.chunk_ranges(mapping.checkpoint_key, mapping.checkpoint_index)

    def tensor_range(self, mapping: ParameterMapping) -> TensorRange | None:
        """Return the byte range of a parameter's values; None if they are not contiguous."""
        key = mapping.checkpoint_key
        return self._reader.tensor_range(key, mapping.checkpoint_index, mapping.shape)

    @property
    def is_quantized(self) -> bool:
        """True if experts were trained through MXFP4; their values are then rounded to MXFP4."""
        # A trainer writes this file next to the weights.
        return (self.path / QUANTIZATION_FILE).exists()

    def check_chunk_ranges(self) -> None:
        """Check that all values lie within their files. See ``TorchDistReader``."""
        self._reader.check_chunk_ranges()

    def hf_tensors(self) -> Iterator[NamedTensor]:
        """Yield every Hugging Face tensor [hf_shapes], in the order of ``names.hf_shapes``."""
        return hf_tensors(self.config, self.parameter)


def read_model_config(path: Path) -> ModelConfig:
    """Read the ModelConfig of a checkpoint.

    Raises:
        ConversionError: if the file is missing or damaged.
    """
    try:
        return parse_model_config(read_bytes(path))
    except FileNotFoundError:
        raise ConversionError(
            f"{path}: missing. It holds the model configuration, and imports and trainers write it"
        ) from None
    except ValueError as error:
        raise ConversionError(f"{path}: {error}") from None


def check_same_model(source: HfDirectory, config: ModelConfig, path: Path) -> None:
    """Raise ConversionError naming the first value in which two architectures differ.

    Args:
        source: first model.
        config: configuration of the second model.
        path: origin of ``config``, for the message.
    """
    theirs = config.model_dump()
    for key, value in source.config.model_dump().items():
        # initializer_std does not affect existing weights
        if theirs.get(key) != value and key != "initializer_std":
            raise ConversionError(
                f"different models: {key} is {value} in {source.path}, but {theirs.get(key)} in "
                f"{path}"
            )
