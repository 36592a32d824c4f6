"""Registry of the model families: name table, stateful modules and reference."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from converters.families.dense import table as dense
from converters.families.gpt_oss import table as gpt_oss
from converters.mapping import ParameterMapping
from converters.reference.decoder import Decoder
from converters.reference.dense import DenseEquations, HuggingFaceDense, MegatronDense
from converters.reference.gpt_oss import GptOss, HuggingFaceGptOss, MegatronGptOss
from converters.reference.layouts import WeightLayout
from megatron_gptoss.config import ModelConfig
from megatron_gptoss.families.dense.config import DenseModelConfig
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig


@dataclass(frozen=True)
class FamilyTensors:
    """Description of a family's weights for both sides."""

    mappings: Callable[[Any], Iterator[ParameterMapping]]
    """Function of the configuration that yields the name table, in model order.

    Megatron names are those of its local layers, with the norm before attention in the QKV
    projection. The experts that share a Hugging Face tensor are adjacent.
    """
    stateful_modules: tuple[str, ...]
    """Modules of a layer with an entry ``_extra_state`` in Megatron's checkpoints."""
    stateful_expert_modules: tuple[str, ...]
    """Modules of every expert with an entry ``_extra_state``."""
    reference: type[Decoder]
    """Equations from which ``verify`` computes the outputs of both sides."""
    hugging_face_layout: type[WeightLayout]
    """Weights as Hugging Face stores them."""
    megatron_layout: type[WeightLayout]
    """Weights as Megatron stores them."""


_TENSORS: dict[type[ModelConfig], FamilyTensors] = {
    GptOssModelConfig: FamilyTensors(
        mappings=gpt_oss.mappings,
        stateful_modules=gpt_oss.STATEFUL_MODULES,
        stateful_expert_modules=gpt_oss.STATEFUL_EXPERT_MODULES,
        reference=GptOss,
        hugging_face_layout=HuggingFaceGptOss,
        megatron_layout=MegatronGptOss,
    ),
    DenseModelConfig: FamilyTensors(
        mappings=dense.mappings,
        stateful_modules=dense.STATEFUL_MODULES,
        # Dense models have no experts.
        stateful_expert_modules=(),
        reference=DenseEquations,
        hugging_face_layout=HuggingFaceDense,
        megatron_layout=MegatronDense,
    ),
}


def get_family_tensors(model: ModelConfig) -> FamilyTensors:
    """Return the weight description of a model's family."""
    return _TENSORS[type(model)]


def hugging_face_reference(
    config: ModelConfig, get: Callable[..., torch.Tensor], dtype: torch.dtype = torch.float32
) -> Decoder:
    """Return the reference of a model on its Hugging Face tensors.

    Args:
        config: model configuration.
        get: function of (name, expert) that returns a tensor with its Hugging Face shape [...],
            such as ``HfDirectory.get`` or ``build_getter(weights)``.
        dtype: dtype of all computed values but rotary angles.
    """
    family = get_family_tensors(config)
    return family.reference(config, family.hugging_face_layout(config, get, dtype))
