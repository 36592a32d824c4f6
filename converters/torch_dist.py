"""Hugging Face directories <-> Megatron torch_dist checkpoints, one tensor in memory at a time, without a model.

A checkpoint is a directory of Megatron's dist_checkpointing plus ``gptoss_config.json``, the ModelConfig as JSON; the
trainer's checkpoints hold the same. Keys are those of Megatron's Transformer Engine layers whatever wrote the
checkpoint: layers stacked along a leading axis, experts along a second one, the layer norm before attention as
``decoder.layers.self_attention.linear_qkv.layer_norm_weight`` and the one before the experts as
``decoder.layers.pre_mlp_layernorm.weight``. The CPU layer specification maps its own names to these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from converters.errors import ConversionError
from converters.hf_directory import HfDirectory, new_directory, tokenizer_and_generation, write_hf_directory
from converters.names import ParameterMapping, hf_tensors, parameter_mappings
from converters.torch_dist_files import Shape, TorchDistReader, TorchDistWriter
from megatron_gptoss.checkpoint import MODEL_CONFIG_FILE
from megatron_gptoss.config import ModelConfig

Precision = Literal["bf16", "fp32"]
DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}


class HfWeights(Protocol):
    """Where an import reads from: bf16 or fp32 tensors by Hugging Face name, however they are stored."""

    config: ModelConfig

    def names(self) -> list[str]: ...

    def get(self, name: str, expert: int | None = None) -> torch.Tensor:
        """The tensor, or the ``expert``-th slice along its first dimension."""


Progress = Callable[[int, int], None]
"""(parameters written, parameters in all)"""


def import_checkpoint(
    hf_dir: Path, megatron_dir: Path, dtype: Precision | None = None, progress: Progress | None = None
) -> None:
    """Write ``hf_dir`` as a checkpoint that loads at any tensor, pipeline and expert parallel size.

    ``dtype`` converts; without it each tensor keeps its own. The checkpoint appears in one move at the end: an import
    that is interrupted leaves nothing. Raises ConversionError naming the file, key or tensor.
    """
    source = HfDirectory(hf_dir)
    with new_directory(Path(megatron_dir)) as partial:
        with TorchDistWriter(partial) as writer:
            write_checkpoint(source, writer, dtype, progress)
        (partial / MODEL_CONFIG_FILE).write_text(source.config.model_dump_json(indent=1))


def write_checkpoint(
    source: HfWeights, writer: TorchDistWriter, dtype: Precision | None, progress: Progress | None = None
) -> None:
    """Every parameter of ``source``, and the entries without content that Megatron's loader insists on."""
    config = source.config
    table = parameter_mappings(config)
    for count, mapping in enumerate(table.values()):
        tensor = mapping.to_megatron(*(source.get(name, mapping.expert) for name in mapping.hf_names))
        if dtype is not None:
            tensor = tensor.to(DTYPES[dtype])
        writer.add_tensor(mapping.checkpoint_key, _leading_shape(mapping, config), mapping.checkpoint_index, tensor)
        if progress is not None:
            progress(count + 1, len(table))
    for key, shape, index in _empty_entries(config):
        writer.add_object(key, shape, index, None)
    writer.add_object("common_state", (1,), (0,), {"checkpoint_version": 3.0, "iteration": 0})


def export_checkpoint(
    megatron_dir: Path,
    hf_dir: Path,
    dtype: Precision = "bf16",
    tokenizer_source: Path | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write the weights of a checkpoint, imported or saved by a trainer, as a Hugging Face directory.

    Tokenizer files and generation settings are copied from ``tokenizer_source``, another Hugging Face directory. Raises
    ConversionError naming the file or key; ``hf_dir`` then does not exist.
    """
    checkpoint = MegatronCheckpoint(megatron_dir)
    tokenizer_files: list[Path] = []
    generation: dict[str, Any] = {}
    if tokenizer_source is not None:
        tokenizer_files, generation = tokenizer_and_generation(tokenizer_source)
    tensors = ((name, tensor.to(DTYPES[dtype])) for name, tensor in checkpoint.hf_tensors())
    write_hf_directory(
        hf_dir,
        checkpoint.config,
        tensors,
        tokenizer_files=tokenizer_files,
        generation_config=generation,
        max_shard_bytes=max_shard_bytes,
    )


class MegatronCheckpoint:
    """A torch_dist checkpoint of GPT-OSS, read parameter by parameter."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._reader = TorchDistReader(self.path)
        config_file = self.path / MODEL_CONFIG_FILE
        try:
            self.config = ModelConfig.model_validate_json(config_file.read_text())
        except FileNotFoundError:
            raise ConversionError(
                f"{config_file}: missing; it holds the model configuration, and import and trainer write it"
            ) from None
        except ValueError as error:
            raise ConversionError(f"{config_file}: {error}") from None

    def parameter(self, mapping: ParameterMapping) -> torch.Tensor:
        return self._reader.get(mapping.checkpoint_key, mapping.checkpoint_index, mapping.shape)

    def hf_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every Hugging Face tensor, in the order of ``names.hf_shapes``."""
        return hf_tensors(self.config, self.parameter)


@dataclass(frozen=True)
class Difference:
    """A tensor that is not the same on both sides."""

    name: str
    largest: float
    """Largest absolute difference of any two elements; nan if either side has one."""
    elements: int
    """How many elements differ."""


@dataclass
class VerifyReport:
    """What ``verify`` found; printing it is the answer for a person."""

    tensors: int = 0
    differences: list[Difference] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        return not self.differences

    def __str__(self) -> str:
        if self.equal:
            return f"all {self.tensors} tensors are equal bit for bit"
        lines = [f"{len(self.differences)} of {self.tensors} tensors differ:"]
        lines += [f"  {d.name}: {d.elements} elements, largest difference {d.largest:.3g}" for d in self.differences]
        return "\n".join(lines)


def verify(hf_dir: Path, megatron_dir: Path) -> VerifyReport:
    """Compare every tensor bit for bit, as fp32 where the two sides differ in dtype (bf16 and fp16 fit in it exactly).

    Raises ConversionError when either side cannot be read or they are of different architectures.
    """
    source, checkpoint = HfDirectory(hf_dir), MegatronCheckpoint(megatron_dir)
    ours, theirs = source.config.model_dump(), checkpoint.config.model_dump()
    for key, value in ours.items():
        if theirs[key] != value and key != "initializer_std":  # says nothing about weights that exist
            raise ConversionError(f"different models: {key} is {value} in {hf_dir} but {theirs[key]} in {megatron_dir}")
    report = VerifyReport()
    for name, tensor in checkpoint.hf_tensors():
        report.tensors += 1
        expected, actual = source.get(name).float(), tensor.float()
        different = expected.view(torch.int32) != actual.view(torch.int32)
        if different.any():
            largest = (expected - actual).abs().max().item()
            report.differences.append(Difference(name, largest, int(different.sum())))
    return report


def _leading_shape(mapping: ParameterMapping, config: ModelConfig) -> Shape:
    if mapping.layer is None:
        return ()
    return (config.num_layers,) if mapping.expert is None else (config.num_layers, config.num_experts)


def _empty_entries(config: ModelConfig) -> Iterator[tuple[str, Shape, Shape]]:
    """``_extra_state`` of linear and norm modules, as (key, shape, index): fp8 scales if there were any.

    Megatron's loader fails by default when one that its model has is absent, and ignores those that it has not: these
    are the ones of the local and of the Transformer Engine layers together.
    """
    layers, experts = config.num_layers, config.num_experts
    per_layer = (
        "self_attention.linear_qkv",
        "self_attention.linear_proj",
        "self_attention.core_attention",
        "pre_mlp_layernorm",
    )
    for layer in range(layers):
        for module in per_layer:
            yield f"decoder.layers.{module}._extra_state", (layers,), (layer,)
        for module in ("linear_fc1", "linear_fc2"):
            for expert in range(experts):
                yield f"decoder.layers.mlp.experts.experts.{module}._extra_state", (layers, experts), (layer, expert)
    yield "decoder.final_layernorm._extra_state", (1,), (0,)
