"""Hugging Face directories <-> Megatron torch_dist checkpoints, one tensor in memory at a time, without a model.

A checkpoint is a directory of Megatron's dist_checkpointing plus ``gptoss_config.json``, the ModelConfig as JSON; the
trainer's checkpoints hold the same. Keys are those of Megatron's Transformer Engine layers whatever wrote the
checkpoint: layers stacked along a leading axis, experts along a second one, the layer norm before attention as
``decoder.layers.self_attention.linear_qkv.layer_norm_weight`` and the one before the experts as
``decoder.layers.pre_mlp_layernorm.weight``. The CPU layer specification maps its own names to these."""

import contextlib
import math
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Literal

import torch

from converters import hf_directory
from converters.hf_directory import HfDirectory, tokenizer_and_generation, write_hf_directory
from converters.hf_layouts import is_expert_matrix
from converters.megatron_checkpoint import MegatronCheckpoint, check_same_model
from converters.mxfp4_export import quantise
from converters.names import NamedParts, ParameterMapping, parameter_mappings, stack_experts
from converters.new_directory import new_directory
from converters.pipeline import Progress, bf16_bytes, in_order
from converters.read_back import check_export, check_import
from converters.reports import Check, ExportReport, QuantisationError, ReadBack
from converters.torch_dist_files import Shape, TorchDistWriter
from megatron_gptoss.checkpoint.directory import MODEL_CONFIG_FILE
from megatron_gptoss.config import ModelConfig

Precision = Literal["bf16", "fp32"]
ExportFormat = Literal["bf16", "fp32", "mxfp4"]
DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}


def import_checkpoint(
    hf_dir: Path,
    megatron_dir: Path,
    dtype: Precision | None = None,
    progress: Progress | None = None,
    check: Check = "sample",
    check_progress: Progress | None = None,
) -> ReadBack:
    """Write ``hf_dir`` as a checkpoint that loads at any tensor, pipeline and expert parallel size.

    ``dtype`` converts; without it each tensor keeps its own. What was written is read back and compared as ``check``
    says (``read_back``). The checkpoint appears in one move at the end: an import that is interrupted, or found wrong,
    leaves nothing. Raises ConversionError naming the file, key or tensor."""
    source = HfDirectory(hf_dir)
    with new_directory(Path(megatron_dir)) as partial:
        with TorchDistWriter(partial) as writer:
            _write_parameters(source, writer, dtype, progress)
            for key, shape, index in _empty_entries(source.config):
                writer.add_object(key, shape, index, None)
            writer.add_object("common_state", (1,), (0,), {"checkpoint_version": 3.0, "iteration": 0})
        (partial / MODEL_CONFIG_FILE).write_text(source.config.model_dump_json(indent=1))
        converted = None if dtype is None else DTYPES[dtype]
        result = check_import(hf_dir, partial, converted, check, check_progress)
    return result


def _write_parameters(
    source: HfDirectory, writer: TorchDistWriter, dtype: Precision | None, progress: Progress | None
) -> None:
    table = list(parameter_mappings(source.config).values())
    leading = source.config.num_layers, source.config.num_experts

    def convert(mapping: ParameterMapping) -> torch.Tensor:
        tensor = mapping.to_megatron(*(source.get(name, mapping.expert) for name in mapping.hf_names))
        return (tensor if dtype is None else tensor.to(DTYPES[dtype])).contiguous()

    def size(mapping: ParameterMapping) -> int:
        stored = source.dtype(mapping.hf_names[0]) if dtype is None else DTYPES[dtype]
        return math.prod(mapping.shape) * stored.itemsize

    with contextlib.closing(in_order(convert, table, size, progress)) as tensors:
        for mapping, tensor in zip(table, tensors, strict=True):
            index = mapping.checkpoint_index
            writer.add_tensor(mapping.checkpoint_key, leading[: len(index)], index, tensor)


def export_checkpoint(
    megatron_dir: Path,
    hf_dir: Path,
    dtype: ExportFormat = "bf16",
    reference: Path | None = None,
    max_shard_bytes: int = 5_000_000_000,
    progress: Progress | None = None,
    check: Check = "sample",
    check_progress: Progress | None = None,
) -> ExportReport:
    """Write the weights of a checkpoint, imported or saved by a trainer, as a Hugging Face directory.

    Tokenizer files and generation settings are copied from ``reference``, another Hugging Face directory. To "mxfp4",
    its scales are kept wherever they still fit. What was written is read back and compared as ``check`` says
    (``read_back``). Raises ConversionError naming the file, key or tensor; ``hf_dir`` then does not exist."""
    checkpoint, report = MegatronCheckpoint(megatron_dir), ExportReport()
    quantised = dtype == "mxfp4"
    hf_directory.written_shapes(checkpoint.config, quantised)  # does it fit at all?
    tokenizer_files, generation = tokenizer_and_generation(reference) if reference is not None else ([], {})
    original = None
    if quantised and reference is not None and (Path(reference) / "config.json").exists():
        original = HfDirectory(reference)
        check_same_model(original, checkpoint.config, megatron_dir)
    element = torch.float32 if dtype == "fp32" else torch.bfloat16

    def convert(mapping: ParameterMapping) -> tuple[NamedParts, QuantisationError | None]:
        parts = mapping.named_parts(checkpoint.parameter(mapping))
        [(name, part), *_] = parts.items()
        if quantised and mapping.expert is not None and is_expert_matrix(name):
            blocks, error = quantise(name, mapping.expert, part, original)
            return (mapping, blocks), error
        return (mapping, {name: part.to(element).contiguous() for name, part in parts.items()}), None

    table = list(parameter_mappings(checkpoint.config).values())

    def converted() -> Generator[NamedParts, None, None]:
        with contextlib.closing(in_order(convert, table, bf16_bytes, progress)) as results:
            for (mapping, parts), error in results:
                if error is not None:
                    report.add(mapping.hf_names[0], error)
                yield mapping, parts

    def read_back(partial: Path) -> None:
        report.read_back = check_export(
            megatron_dir,
            partial,
            dtype=None if quantised else element,
            reference=None if original is None else original.path,
            report=report,
            check=check,
            progress=check_progress,
        )

    with contextlib.closing(converted()) as parts:
        write_hf_directory(
            hf_dir,
            checkpoint.config,
            stack_experts(checkpoint.config, parts),
            tokenizer_files=tokenizer_files,
            generation_config=generation,
            max_shard_bytes=max_shard_bytes,
            quantised=quantised,
            check=read_back,
        )
    return report


def _empty_entries(config: ModelConfig) -> Iterator[tuple[str, Shape, Shape]]:
    """``_extra_state`` of linear and norm modules, as (key, shape, index): fp8 scales if there were any.

    Megatron's loader fails by default when one that its model has is absent, and ignores those that it has not: these
    are the ones of the local and of the Transformer Engine layers together."""
    layers, experts = config.num_layers, config.num_experts
    attention = (f"self_attention.{module}" for module in ("linear_qkv", "linear_proj", "core_attention"))
    per_layer = [*attention, "pre_mlp_layernorm"]
    for layer in range(layers):
        for module in per_layer:
            yield f"decoder.layers.{module}._extra_state", (layers,), (layer,)
        for module in ("linear_fc1", "linear_fc2"):
            for expert in range(experts):
                yield f"decoder.layers.mlp.experts.experts.{module}._extra_state", (layers, experts), (layer, expert)
    yield "decoder.final_layernorm._extra_state", (1,), (0,)
