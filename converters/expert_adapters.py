"""Unmerged adapters of experts in a weight sync: names, shapes, and conversion from the trainer.

A server gets the factors of a layer's two matrices for all experts, with the rows of Hugging Face's MXFP4 blocks:

    model.layers.N.mlp.experts.gate_up_proj.lora_A   [experts, rank, in]
    model.layers.N.mlp.experts.gate_up_proj.lora_B   [experts, out, rank]

and the same for ``down_proj``. PEFT's files have other names and shapes (``peft_format``).
"""

from torch import Tensor

from converters.families.gpt_oss.table import interleave_gate_up
from converters.hf_layouts import Shape
from converters.mapping import NamedTensor
from megatron_gptoss.config import ModelConfig

MATRICES = {"gate_up": "gate_up_proj", "down": "down_proj"}
"""Hugging Face's name of each expert matrix, by adapter name."""


def expert_adapter_shapes(config: ModelConfig, rank: int) -> dict[str, Shape]:
    """Return the shapes of all factors of expert adapters, by name.

    Args:
        config: model configuration.
        rank: rank of the expert adapters.
    """
    hidden = config.hidden_size
    sides = {
        "gate_up": (2 * config.intermediate_size, hidden),
        "down": (hidden, config.intermediate_size),
    }
    shapes: dict[str, Shape] = {}
    for layer in range(config.num_layers):
        for target, (rows, inputs) in sides.items():
            a_name, b_name = factor_names(layer, target)
            shapes[a_name] = (config.num_experts, rank, inputs)
            shapes[b_name] = (config.num_experts, rows, rank)
    return shapes


def factor_names(layer: int, target: str) -> tuple[str, str]:
    """Return the names of A and B in a sync.

    Args:
        layer: 0-based layer.
        target: "gate_up" or "down".
    """
    matrix = f"model.layers.{layer}.mlp.experts.{MATRICES[target]}"
    return f"{matrix}.lora_A", f"{matrix}.lora_B"


def sent_factors(layer: int, target: str, a: Tensor, b: Tensor) -> list[NamedTensor]:
    """Return the factors of a layer's experts as a server gets them.

    Args:
        layer: 0-based layer.
        target: "gate_up" or "down".
        a: [experts, rank, in].
        b: [experts, out, rank], in the trainer's row order.
    """
    if target == "gate_up":
        # The same function as for rows of the matrix. Experts come first here, so move them last.
        b = interleave_gate_up(b.movedim(0, -1)).movedim(-1, 0)
    a_name, b_name = factor_names(layer, target)
    return [(a_name, a.contiguous()), (b_name, b.contiguous())]
