"""Adapters in PEFT's format: the tensors of ``adapter_model.safetensors``.

Attention projections, the embedding and the output layer are PEFT's ``target_modules``, with one
pair of A [rank, in] and B [out, rank] each. PEFT treats the embedding as a product of one-hot
tokens with it, which swaps the factors: its A [rank, vocab_size] is our B transposed, its
B [hidden_size, rank] is our A transposed. The matrices of a layer's experts, one Hugging Face
tensor for all experts, are ``target_parameters`` (peft 0.18 and later). Their adapters are stored
in two matrices:

    lora_A [experts * rank, in]     expert-major: A of expert 0, A of expert 1, ...
    lora_B [out, rank * experts]    rank-major: every expert's column 0 of B, then column 1, ...

Swapping the two orders gives the right shapes and wrong values. Rows of B of the gate and up
projection alternate between gate and up, like the channels of the tensor.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from converters.families.gpt_oss.table import interleave_gate_up, separate_gate_up
from converters.mapping import Shape
from converters.peft_settings import EXPERTS, TARGETS
from megatron_gptoss.config import AdapterConfig, ModelConfig

WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
BASE_KEY = "megatron_gptoss.base_digest"
"""Key of the safetensors metadata with the digest of the base. PEFT ignores it."""
MERGE_KEY = "megatron_gptoss.merge_experts"
"""Key of the safetensors metadata: "false" if the trainer did not merge expert adapters. PEFT ignores it."""

_PEFT_MODULES = TARGETS | {
    "router": "model.layers.{layer}.mlp.router",
    # The parameter that is wrapped first is nested deeper: PEFT wraps in the order of the module.
    "gate_up": "model.layers.{layer}.mlp.experts.base_layer",
    "down": "model.layers.{layer}.mlp.experts",
}
"""Name of the PEFT module that holds the factors, by kind of adapter."""
_MEGATRON_MODULES = {
    "embedding": "embedding.word_embeddings",
    "q": "decoder.layers.self_attention.linear_qkv",
    "k": "decoder.layers.self_attention.linear_qkv",
    "v": "decoder.layers.self_attention.linear_qkv",
    "o": "decoder.layers.self_attention.linear_proj",
    "router": "decoder.layers.mlp.router",
    "gate_up": "decoder.layers.mlp.experts.experts.linear_fc1",
    "down": "decoder.layers.mlp.experts.experts.linear_fc2",
    "head": "output_layer",
}
"""Name of the adapted module in torch_dist checkpoints (which stack layers), by kind."""
BASE_COPIES = {
    f"{PREFIX}{module}{inner}.weight": f"{module}.weight"
    for module in ("model.embed_tokens", "lm_head")
    for inner in ("", ".base_layer")
}
"""Hugging Face name of each base tensor that PEFT may store in the adapter's file, by name there.

PEFT stores them with adapters of the embedding or the output layer.
"""
PARAMETERS = {"gate_up": "gate_up_proj", "down": "down_proj"}
"""PEFT's names of the two expert matrices."""


@dataclass(frozen=True)
class AdapterMapping:
    """One adapter of the model, or a layer's expert adapters."""

    kind: str
    """One of embedding, q, k, v, o, router, gate_up, down, head."""
    layer: int | None
    """0-based layer; None outside the layers."""
    shape: Shape
    """[out, in] of the adapted weight; for experts, of one expert."""
    rank: int
    scale: float
    """Factor of the product B A."""
    experts: int | None
    """Number of experts; None if the adapter is not of experts."""
    exchanged: bool = False
    """True for PEFT's other layout of experts, in which A has the outputs and B the inputs.

    PEFT 0.19 and later writes it with transformers 4, which does not mark experts as transposed.
    """
    is_unpaired: bool = False
    """True for one of the two expert matrices if the other has no adapter in the layer."""

    @property
    def checkpoint_key(self) -> str:
        """Key in a torch_dist checkpoint, without the name of the factor (a or b)."""
        return f"{_MEGATRON_MODULES[self.kind]}.adapters.{self.kind}"

    @property
    def checkpoint_index(self) -> Shape:
        """Index along the leading dimensions: (layer,), or () outside the layers."""
        return () if self.layer is None else (self.layer,)

    @property
    def names(self) -> tuple[str, str]:
        """PEFT's names of A and B."""
        # PEFT wraps the experts once per matrix. The first wrapper is the inner one.
        return peft_names("down" if self.is_unpaired else self.kind, self.layer)

    @property
    def factor_shapes(self) -> tuple[Shape, Shape]:
        """Shapes of A [rank, in] and B [out, rank]; for experts, with a leading [experts]."""
        rows, columns = self.shape
        stack = () if self.experts is None else (self.experts,)
        return (*stack, self.rank, columns), (*stack, rows, self.rank)

    @property
    def peft_shapes(self) -> tuple[Shape, Shape]:
        """PEFT's shapes of A and B."""
        rows, columns = self.shape
        # PEFT's factors of an embedding are swapped: A is our B transposed.
        if self.kind == "embedding":
            return (self.rank, rows), (columns, self.rank)

        # PEFT stores a layer's expert factors in one pair.
        width = self.rank * (self.experts or 1)
        if self.exchanged:
            return (width, rows), (columns, width)
        return (width, columns), (rows, width)

    def to_peft(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Convert factors to PEFT's layout.

        Args:
            a: [rank, in]; for experts, [experts, rank, in].
            b: [out, rank]; for experts, [experts, out, rank].

        Returns:
            A and B with ``peft_shapes``.

        Example:
            Two experts with 3 outputs, 2 inputs and rank 2. Columns of B alternate between experts.

            >>> mapping = AdapterMapping("down", 0, shape=(3, 2), rank=2, scale=1.0, experts=2)
            >>> a = torch.arange(8).view(2, 2, 2)
            >>> b = torch.tensor([[[1, 2], [3, 4], [5, 6]], [[10, 20], [30, 40], [50, 60]]])
            >>> peft_a, peft_b = mapping.to_peft(a, b)
            >>> peft_a.tolist()
            [[0, 1], [2, 3], [4, 5], [6, 7]]
            >>> peft_b.tolist()
            [[1, 10, 2, 20], [3, 30, 4, 40], [5, 50, 6, 60]]
        """
        if self.kind == "embedding":
            return b.T.contiguous(), a.T.contiguous()
        if self.experts is None:
            return a, b

        # Only B has the outputs. Megatron has all gates first, Hugging Face alternates.
        if self.kind == "gate_up":
            b = torch.stack([interleave_gate_up(expert_b) for expert_b in b])

        # [experts, out, rank] -> [out, rank, experts]
        return a.flatten(0, 1), b.permute(1, 2, 0).flatten(1).contiguous()

    def from_peft(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Invert ``to_peft``: ``peft_shapes`` become [..., rank, in] and [..., out, rank].

        Also reads PEFT's exchanged layout.
        """
        if self.kind == "embedding":
            return b.T.contiguous(), a.T.contiguous()
        if self.experts is None:
            return a, b

        # A is expert-major, B is rank-major (module docstring).
        a = a.view(self.experts, self.rank, -1)
        b = b.view(-1, self.rank, self.experts).permute(2, 0, 1).contiguous()
        # PEFT adapted the transposed matrix: the factors are transposed and swap places.
        if self.exchanged:
            a, b = b.mT.contiguous(), a.mT.contiguous()
        # After the exchange, because only now B has the outputs.
        if self.kind == "gate_up":
            b = torch.stack([separate_gate_up(expert_b) for expert_b in b])
        return a, b


def peft_names(kind: str, layer: int | None) -> tuple[str, str]:
    """Return PEFT's names of A and B for one kind of adapter."""
    module = PREFIX + _PEFT_MODULES[kind].format(layer=layer)
    if kind == "embedding":
        return f"{module}.lora_embedding_A", f"{module}.lora_embedding_B"
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"


def adapter_mappings(model: ModelConfig, adapter: AdapterConfig) -> Iterator[AdapterMapping]:
    """Yield all adapters of a model, in the order of its weights.

    Args:
        model: model configuration.
        adapter: adapter settings.
    """
    for kind, layer in adapter_places(model):
        # One target of our settings covers both expert matrices.
        target = "experts" if kind in EXPERTS else kind
        if target in adapter.targets:
            rank = adapter.rank_of_experts(model) if kind in EXPERTS else adapter.rank
            yield make_mapping(model, kind, layer, rank, adapter.alpha / rank)


def adapter_places(model: ModelConfig) -> Iterator[tuple[str, int | None]]:
    """Yield kind and layer of every weight that can have an adapter, in model order."""
    yield "embedding", None
    for layer in range(model.num_layers):
        for kind in ("q", "k", "v", "o", "router", *EXPERTS):
            yield kind, layer
    yield "head", None


def make_mapping(
    model: ModelConfig, kind: str, layer: int | None, rank: int, scale: float
) -> AdapterMapping:
    """Return the entry of an adapter."""
    hidden = model.hidden_size
    shapes = {
        "embedding": (model.vocab_size, hidden),
        "q": (model.query_size, hidden),
        "k": (model.key_size, hidden),
        "v": (model.key_size, hidden),
        "o": (hidden, model.query_size),
        "router": (model.num_experts, hidden),
        "gate_up": (2 * model.intermediate_size, hidden),
        "down": (hidden, model.intermediate_size),
        "head": (model.vocab_size, hidden),
    }
    experts = model.num_experts if kind in EXPERTS else None
    return AdapterMapping(kind, layer, shapes[kind], rank, scale, experts)
