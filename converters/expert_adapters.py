"""Unmerged adapters of experts in a weight sync: names, shapes, and conversion from the trainer.

A server gets the factors of a layer's two matrices for all experts, with the rows of Hugging Face's MXFP4 blocks:

    model.layers.N.mlp.experts.gate_up_proj.lora_A   [experts, rank, in]
    model.layers.N.mlp.experts.gate_up_proj.lora_B   [experts, out, rank]

and the same for ``down_proj``. PEFT's files have other names and shapes (``peft_format``).
"""

from collections.abc import Callable, Iterator

from torch import Tensor

from converters.families.gpt_oss.table import interleave_gate_up
from converters.hf_layouts import Shape
from converters.mapping import ParameterMapping, identity, single_part
from converters.names import parameter_mappings
from megatron_gptoss.config import AdapterConfig, ModelConfig

MATRICES = {"gate_up": "gate_up_proj", "down": "down_proj"}
"""Hugging Face's name of each expert matrix, by adapter name."""
_LINEARS = {"gate_up": "linear_fc1", "down": "linear_fc2"}
"""Megatron's name of each expert matrix. Equals ``EXPERT_LINEARS``, whose module imports Megatron."""

_TARGETS = {
    "self_attention.linear_qkv.weight": ("q", "k", "v"),
    "self_attention.linear_proj.weight": ("o",),
    "mlp.router.weight": ("router",),
    "embedding.word_embeddings.weight": ("embedding",),
    "output_layer.weight": ("head",),
}
"""Adapter targets of each weight that is always merged, by the end of its Megatron name."""


def expert_adapter_shapes(config: ModelConfig, rank: int) -> dict[str, Shape]:
    """Return the shapes of all factors of expert adapters, by name.

    Args:
        config: model configuration.
        rank: rank of the expert adapters.
    """
    return {
        mapping.hf_names[0]: (config.num_experts, *mapping.shape)
        for mapping in factor_mappings(config, rank)
        if mapping.expert == 0
    }


def factor_mappings(config: ModelConfig, rank: int) -> Iterator[ParameterMapping]:
    """Yield an entry for each factor of each expert, in the order in which a sync sends them.

    Args:
        config: model configuration.
        rank: rank of the expert adapters.
    """
    sides = {
        "gate_up": (2 * config.intermediate_size, config.hidden_size),
        "down": (config.hidden_size, config.intermediate_size),
    }
    for layer in range(config.num_layers):
        for target, (rows, inputs) in sides.items():
            prefix = f"model.layers.{layer}.mlp.experts.{MATRICES[target]}.lora_"
            for factor, shape in (("a", (rank, inputs)), ("b", (rows, rank))):
                # The innermost loop, because ``GatheringPlanner`` stacks the entries that follow
                # expert 0.
                for expert in range(config.num_experts):
                    yield ParameterMapping(
                        name=factor_name(layer, expert, target, factor),
                        shape=shape,
                        hf_names=(f"{prefix}{factor.upper()}",),
                        part_shapes=(shape,),
                        tensor_parallel_dim=None,
                        layer=layer,
                        expert=expert,
                        # Only a sync uses these entries. Checkpoints have the factors of a layer in
                        # one tensor.
                        checkpoint_key="",
                        to_megatron=identity,
                        to_hf=single_part(_row_order(target, factor)),
                    )


def factor_name(layer: int, expert: int, target: str, factor: str) -> str:
    """Return the name of one expert's factor in the whole model.

    Args:
        layer: 0-based layer.
        expert: index of the expert.
        target: "gate_up" or "down".
        factor: "a" or "b".
    """
    experts = f"decoder.layers.{layer}.mlp.experts.local_experts"
    return f"{experts}.{expert}.{_LINEARS[target]}.{factor}"


def is_factor(mapping: ParameterMapping) -> bool:
    """Return True for an entry of ``factor_mappings``."""
    return mapping.name.endswith((".a", ".b"))


def _row_order(target: str, factor: str) -> Callable[[Tensor], Tensor]:
    """Return the function that lets rows of gate and up alternate, as in the blocks of the matrix."""
    return interleave_gate_up if (target, factor) == ("gate_up", "b") else identity


# -- syncs without the base -------------------------------------------------------------------------


def is_changed(mapping: ParameterMapping, adapter: AdapterConfig) -> bool:
    """Return True if training of unmerged adapters changes a merged weight.

    Args:
        mapping: entry of the name table.
        adapter: settings of the adapters.
    """
    for suffix, targets in _TARGETS.items():
        if mapping.name.endswith(suffix):
            return not set(targets).isdisjoint(adapter.targets)
    # Training with adapters does not change biases, norms and sinks. Experts change by their
    # factors, which are sent, too.
    return False


def changed_names(config: ModelConfig, adapter: AdapterConfig) -> set[str]:
    """Return the Hugging Face names of all merged weights that training of unmerged adapters changes.

    Args:
        config: model configuration.
        adapter: settings of the adapters.
    """
    return {
        name
        for mapping in parameter_mappings(config).values()
        if is_changed(mapping, adapter)
        for name in mapping.hf_names
    }
