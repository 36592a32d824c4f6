"""Writes a dense model as a GPT-OSS directory."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from converters.errors import ConversionError
from converters.harmony_tokens import harmony_tokens
from converters.hf_directory import HfDirectory, write_hf_directory
from converters.mapping import NamedTensor
from converters.model_extras import ModelExtras, read_extras
from converters.names import hf_shapes
from converters.ordered_map import Progress
from converters.upcycling.architecture import UpcycleOptions, upcycled_config
from converters.upcycling.calibration import UpcycleReport, measure
from converters.upcycling.weights import upcycled_tensors
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig


def upcycle(
    source_dir: Path,
    target_dir: Path,
    options: UpcycleOptions,
    tokens: Sequence[int],
    dtype: torch.dtype = torch.bfloat16,
    progress: Progress | None = None,
    measure_progress: Progress | None = None,
) -> UpcycleReport:
    """Write a GPT-OSS directory that computes the function of a dense one.

    Args:
        source_dir: Hugging Face directory of a Llama or Qwen2.5 model.
        target_dir: directory to write; must not exist.
        options: properties of the new model.
        tokens: tokens of the calibration text. Only the first ``max_length`` are used.
        dtype: dtype of the weights to write.
        progress: function of (written bytes, total bytes).
        measure_progress: function of (read bytes, total bytes) of the measurement before.

    Returns:
        Sizes and losses of the new model.

    Raises:
        ConversionError: if the source is not a dense model with plain rotary embeddings, the
            target exists, or a file cannot be read or written.
    """
    source = HfDirectory(source_dir)
    config = upcycled_config(source, options)
    extras = read_extras(source_dir)
    # Before the measurement, which reads the whole model: a tokenizer without enough unused tokens
    # is an error.
    renamed = harmony_tokens(extras) if options.harmony else None
    ids = torch.tensor(tokens[: config.max_length])
    if len(ids) < 2:
        raise ConversionError(
            f"the calibration text must have at least 2 tokens to measure activations, got {len(ids)}. "
            "Use a longer text"
        )

    with torch.no_grad():
        measured = measure(source, config, options, ids, measure_progress)
        tensors = upcycled_tensors(source, config, options, measured, dtype)
        if renamed is not None:
            tensors = renamed.with_rows(tensors)
            extras = renamed.extras
        write_hf_directory(
            target_dir,
            config,
            _with_progress(tensors, config, dtype, progress),
            extras=_without_dense_keys(extras),
        )
    return measured.report


def _without_dense_keys(extras: ModelExtras) -> ModelExtras:
    """Return extras without keys of config.json that only the dense families have."""
    # The other keys describe the source's architecture and would have no meaning for GPT-OSS.
    known = GptOssModelConfig.hf_keys.copied_from(dict(extras.config))
    return ModelExtras(extras.files, extras.generation, known)


def _with_progress(
    tensors: Iterator[NamedTensor],
    config: GptOssModelConfig,
    dtype: torch.dtype,
    progress: Progress | None,
) -> Iterator[NamedTensor]:
    """Yield the tensors, and report the bytes that the consumer has taken so far."""
    total = sum(math.prod(shape) for shape in hf_shapes(config).values()) * dtype.itemsize
    done = 0
    for name, tensor in tensors:
        size = tensor.nbytes
        yield name, tensor
        done += size
        if progress is not None:
            progress(done, total)
