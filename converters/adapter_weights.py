"""Loading of adapters into a running model, from a checkpoint or from PEFT's format."""

import re
from typing import Any

import torch
from megatron.core import parallel_state

from converters.adapter_checkpoint import Adapters, check_base_digest
from converters.errors import ConversionError
from megatron_gptoss.checkpoint.base_digest import base_digest
from megatron_gptoss.config import ModelConfig
from megatron_gptoss.layers.adapters import named_adapters

_NAME = re.compile(r"(?:decoder\.layers\.(\d+)\.)?.*?adapters\.(\w+)$")
"""Name of an adapter in a model. Groups: layer (None outside the layers) and kind."""


@torch.no_grad()
def load_adapter(model: torch.nn.Module, config: ModelConfig, source: Adapters) -> None:
    """Fill this rank's adapters of ``model`` in place. Collective.

    Args:
        model: model of any parallel layout, built with ``source.adapter`` and a loaded base.
        config: model configuration.
        source: adapter to load.

    Raises:
        ConversionError: if model and adapter differ in a setting, or if the adapter was trained on
            a different base.
    """
    _check_same_settings(model, source, config)
    # PEFT's adapters have no digest of their base.
    if source.base is not None:
        check_base_digest(source, base_digest(model), "that of the model")

    mappings = {(mapping.layer, mapping.kind): mapping for mapping in source.mappings}
    group = parallel_state.get_tensor_model_parallel_group()
    for name, adapter in named_adapters(model):
        match = _NAME.fullmatch(name)
        assert match is not None, name
        layer, kind = match.groups()
        factors = source.read(mappings[None if layer is None else int(layer), kind])

        for factor, full in zip("ab", factors, strict=True):
            # Expert-parallel ranks hold a range of the experts, tensor-parallel ranks a slice of a
            # factor.
            if adapter.experts is not None:
                full = full[adapter.experts.start : adapter.experts.stop]
            dim = adapter.tensor_parallel_dims.get(factor)
            if dim is not None:
                full = full.chunk(group.size(), dim)[group.rank()]
            getattr(adapter, factor).copy_(full)


def _check_same_settings(model: torch.nn.Module, source: Adapters, config: ModelConfig) -> None:
    """Raise ConversionError if model and source do not have the same adapters."""
    chunk: Any = model[0] if isinstance(model, torch.nn.ModuleList) else model
    if chunk.config.adapter is None:
        raise ConversionError(
            f"{source.path}: holds adapters, but the model was built without adapters. Set adapter"
        )

    difference = chunk.config.adapter.difference(source.adapter, config)
    if difference is not None:
        key, own, theirs = difference
        raise ConversionError(
            f"{source.path}: the adapters have {key}={theirs}, but the model was built with "
            f"{key}={own}. Set {key}={theirs}"
        )
