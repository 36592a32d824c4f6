"""What converters know of each family of models."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from converters.families.dense import table as dense
from converters.families.gpt_oss import table as gpt_oss
from converters.mapping import ParameterMapping
from converters.reference import dense as dense_forward
from converters.reference import gpt_oss as gpt_oss_forward
from converters.reference.layouts import LayoutModel
from megatron_gptoss.config import ModelConfig
from megatron_gptoss.families.dense.config import DenseModelConfig
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig


@dataclass(frozen=True)
class FamilyTensors:
    """A family's weights on either side."""

    mappings: Callable[[Any], Iterator[ParameterMapping]]
    """(config) -> the name table, in model order. Names of Megatron parameters are those of its local
    layers, with the norm before attention in the QKV projection; the parameters of experts that share
    a Hugging Face tensor follow one another."""
    stateful_modules: tuple[str, ...]
    """Modules of a layer that have an entry ``_extra_state`` in Megatron's checkpoints."""
    stateful_expert_modules: tuple[str, ...]
    """The same of every expert."""
    hugging_face_model: type[LayoutModel]
    """The arithmetic of Hugging Face's layout, from which ``verify`` computes."""
    megatron_model: type[LayoutModel]
    """The arithmetic of Megatron's layout."""


_TENSORS: dict[type[ModelConfig], FamilyTensors] = {
    GptOssModelConfig: FamilyTensors(
        mappings=gpt_oss.mappings,
        stateful_modules=gpt_oss.STATEFUL_MODULES,
        stateful_expert_modules=gpt_oss.STATEFUL_EXPERT_MODULES,
        hugging_face_model=gpt_oss_forward.HuggingFaceGptOss,
        megatron_model=gpt_oss_forward.MegatronGptOss,
    ),
    DenseModelConfig: FamilyTensors(
        mappings=dense.mappings,
        stateful_modules=dense.STATEFUL_MODULES,
        stateful_expert_modules=(),
        hugging_face_model=dense_forward.HuggingFaceDense,
        megatron_model=dense_forward.MegatronDense,
    ),
}


def tensors_of(model: ModelConfig) -> FamilyTensors:
    """Return what is known of a model's weights."""
    return _TENSORS[type(model)]
