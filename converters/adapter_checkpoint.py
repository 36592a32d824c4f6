"""Adapters out of a checkpoint, into PEFT's format, and into a running model."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state

from converters.errors import ConversionError
from converters.megatron_checkpoint import read_model_config
from converters.names import Shape
from converters.new_directory import new_directory
from converters.peft_format import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    AdapterMapping,
    PeftDirectory,
    adapter_mappings,
    peft_config,
)
from converters.safetensors_files import SafetensorsWriter
from converters.torch_dist_files import TorchDistReader
from megatron_gptoss.checkpoint.directory import ADAPTER_FILE, MODEL_CONFIG_FILE
from megatron_gptoss.config import AdapterConfig, ModelConfig
from megatron_gptoss.layers.adapters import named_adapters

_NAME = re.compile(r"decoder\.layers\.(\d+)\..*?(?:local_experts\.(\d+)\..*)?adapters\.(\w+)$")


class CheckpointAdapters:
    """The adapters of a trainer's checkpoint, put together over its ranks."""

    def __init__(self, path: Path) -> None:
        """Open ``path``. Raises ConversionError naming what is missing."""
        self.path = path
        self.model = read_model_config(path / MODEL_CONFIG_FILE)
        content = _read_adapter_file(path / ADAPTER_FILE)
        self.adapter = AdapterConfig.model_validate(content["settings"])
        self.base: str = content["base"]
        """Digest of the base."""
        self.mappings = list(adapter_mappings(self.model, self.adapter))
        self._reader = TorchDistReader(path)

    def read(self, mapping: AdapterMapping) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A [rank, in] and B [out, rank], of experts stacked."""
        a_shape, b_shape = mapping.factor_shapes
        a = self._read_factor(mapping, "a", a_shape)
        b = self._read_factor(mapping, "b", b_shape)
        return a, b

    def _read_factor(self, mapping: AdapterMapping, factor: str, shape: Shape) -> torch.Tensor:
        key = f"{mapping.checkpoint_key}.{factor}"
        if mapping.experts is None:
            return self._reader.get(key, (mapping.layer,), shape)

        experts = range(mapping.experts)
        return torch.stack([self._reader.get(key, (mapping.layer, i), shape) for i in experts])


def _read_adapter_file(file: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(file.read_text())
    except FileNotFoundError:
        raise ConversionError(
            f"{file}: missing; only checkpoints of runs that train adapters have it"
        ) from None
    return content


def export_adapter(checkpoint: Path, peft_dir: Path, base: str | None = None) -> None:
    """Write the adapters of a trainer's checkpoint in PEFT's format, and read them back.

    Args:
        checkpoint: a step of a run that trains adapters.
        peft_dir: the directory to write; it appears in one move at the end.
        base: Hugging Face name or directory of the base, for ``adapter_config.json``.

    Raises:
        ConversionError: naming the file, key or tensor.
    """
    source = CheckpointAdapters(checkpoint)
    expected: dict[str, Shape] = {}
    for mapping in source.mappings:
        expected.update(zip(mapping.names, mapping.peft_shapes, strict=True))

    with new_directory(peft_dir) as partial:
        settings = peft_config(source.model, source.adapter, base)
        (partial / CONFIG_FILE).write_text(json.dumps(settings, indent=2))
        writer = SafetensorsWriter(partial / WEIGHTS_FILE, expected)
        for mapping in source.mappings:
            factors = mapping.to_peft(*source.read(mapping))
            for name, factor in zip(mapping.names, factors, strict=True):
                writer.add(name, factor)
        writer.close()
        _check_written(partial, source)


def _check_written(path: Path, source: CheckpointAdapters) -> None:
    """Compare every tensor that was written with its source."""
    written = PeftDirectory(path, source.model)
    for mapping in written.mappings:
        pairs = zip(written.read(mapping), source.read(mapping), strict=True)
        if not all(torch.equal(found, expected) for found, expected in pairs):
            raise ConversionError(
                f"{path}: {mapping.names[0]} does not come back as it was written; the disk or the "
                "memory is damaged"
            )


def open_adapters(path: Path, model: ModelConfig) -> PeftDirectory | CheckpointAdapters:
    """Open adapters of ``model`` in PEFT's format or in a trainer's checkpoint.

    Raises:
        ConversionError: naming the file, setting or tensor that does not fit.
    """
    if not (path / MODEL_CONFIG_FILE).exists():
        return PeftDirectory(path, model)

    adapters = CheckpointAdapters(path)
    theirs = adapters.model.model_dump()
    for key, value in model.model_dump().items():
        # initializer_std says nothing about weights that exist
        if theirs[key] != value and key != "initializer_std":
            raise ConversionError(
                f"{path}: holds adapters of another model, whose {key} is {theirs[key]}, not {value}"
            )
    return adapters


@torch.no_grad()
def load_adapter(
    model: torch.nn.Module, config: ModelConfig, source: PeftDirectory | CheckpointAdapters
) -> None:
    """Fill this rank's adapters of ``model`` in place. Not collective.

    Args:
        model: of any parallel layout, built with ``source.adapter``.
        config: of the model.
        source: the adapter.

    Raises:
        ConversionError: when model and adapter differ in a setting.
    """
    chunk: Any = model[0] if isinstance(model, torch.nn.ModuleList) else model
    _check_same_settings(chunk.config.adapter, source, config)

    mappings = {(mapping.layer, mapping.kind): mapping for mapping in source.mappings}
    group = parallel_state.get_tensor_model_parallel_group()
    last: tuple[AdapterMapping, tuple[torch.Tensor, torch.Tensor]] | None = None
    for name, adapter in named_adapters(model):
        match = _NAME.fullmatch(name)
        assert match is not None, name
        layer, expert, kind = match.groups()
        mapping = mappings[int(layer), kind]

        # Experts share two tensors, which are read once.
        if last is None or last[0] != mapping:
            last = (mapping, source.read(mapping))
        for factor, full in zip("ab", last[1], strict=True):
            if expert is not None:
                full = full[int(expert)]
            dim = adapter.tensor_parallel_dims.get(factor)
            if dim is not None:
                full = full.chunk(group.size(), dim)[group.rank()]
            getattr(adapter, factor).copy_(full)


def _check_same_settings(
    adapter: AdapterConfig | None,
    source: PeftDirectory | CheckpointAdapters,
    config: ModelConfig,
) -> None:
    if adapter is None:
        raise ConversionError(f"{source.path}: the model was built without adapters")

    settings = {
        "rank": (adapter.rank, source.adapter.rank),
        "alpha": (adapter.alpha, source.adapter.alpha),
        "expert_rank": (adapter.rank_of_experts(config), source.adapter.rank_of_experts(config)),
        "targets": (sorted(adapter.targets), sorted(source.adapter.targets)),
    }
    for key, (own, theirs) in settings.items():
        if own != theirs:
            raise ConversionError(
                f"{source.path}: adapter.{key} of the model is {own}, and of this adapter {theirs}"
            )
