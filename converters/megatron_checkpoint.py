"""A torch_dist checkpoint of GPT-OSS as the name table sees it."""

from collections.abc import Iterator
from pathlib import Path

import torch

from converters.bits import FileRange
from converters.errors import ConversionError
from converters.hf_directory import HfDirectory
from converters.names import NamedTensor, ParameterMapping, hf_tensors, parameter_mappings
from converters.torch_dist_files import Shape, TorchDistReader
from megatron_gptoss.checkpoint.directory import MODEL_CONFIG_FILE
from megatron_gptoss.config import ModelConfig

MODEL_KEYS = ("embedding.", "decoder.", "output_layer.")
"""Keys of the model start with these; a trainer's checkpoint also holds the optimizer's."""


class MegatronCheckpoint:
    """A torch_dist checkpoint of GPT-OSS, read parameter by parameter."""

    def __init__(self, path: Path, unfinished: bool = False, from_disk: bool = False) -> None:
        """``unfinished`` and ``from_disk``: see TorchDistReader."""
        self.path = Path(path)
        self._reader = TorchDistReader(self.path, unfinished, from_disk)
        config_file = self.path / MODEL_CONFIG_FILE
        try:
            self.config = ModelConfig.model_validate_json(config_file.read_text())
        except FileNotFoundError:
            raise ConversionError(
                f"{config_file}: missing; it holds the model configuration, and import and trainer write it"
            ) from None
        except ValueError as error:
            raise ConversionError(f"{config_file}: {error}") from None
        known = {mapping.checkpoint_key for mapping in parameter_mappings(self.config).values()}
        unknown = [key for key in self._reader.keys() - known if key.startswith(MODEL_KEYS)]
        if unknown:
            raise ConversionError(
                f"{self.path}: key {unknown[0]} is unknown to GPT-OSS; the checkpoint is of another model, or has "
                "adapters that must be merged first"
            )

    def get(self, key: str, index: Shape) -> torch.Tensor:
        """Element ``index`` of the leading axes of ``key``."""
        return self._reader.get(key, index, self._reader.shape(key)[len(index) :])

    def parameter(self, mapping: ParameterMapping) -> torch.Tensor:
        return self._reader.get(mapping.checkpoint_key, mapping.checkpoint_index, mapping.shape)

    def file_of(self, mapping: ParameterMapping) -> str:
        """Name of the file that holds a parameter."""
        return self._reader.file_of(mapping.checkpoint_key, mapping.checkpoint_index)

    def file_range(self, mapping: ParameterMapping) -> FileRange | None:
        """See TorchDistReader."""
        return self._reader.file_range(mapping.checkpoint_key, mapping.checkpoint_index, mapping.shape)

    def check_places(self) -> None:
        """See TorchDistReader."""
        self._reader.check_places()

    def hf_tensors(self) -> Iterator[NamedTensor]:
        """Every Hugging Face tensor, in the order of ``names.hf_shapes``."""
        return hf_tensors(self.config, self.parameter)


def check_same_model(source: HfDirectory, config: ModelConfig, path: Path) -> None:
    """Raises ConversionError naming the first value in which the two architectures differ."""
    ours, theirs = source.config.model_dump(), config.model_dump()
    for key, value in ours.items():
        if theirs[key] != value and key != "initializer_std":  # says nothing about weights that exist
            raise ConversionError(f"different models: {key} is {value} in {source.path} but {theirs[key]} in {path}")
