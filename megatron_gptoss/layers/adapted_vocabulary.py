"""Embedding and output layer with a frozen base and adapters.

Both weights are [vocab_size, hidden_size]. Tensor-parallel ranks split their rows, and with them
the rows of B. Every rank has the whole A. GPTModel does not take these two modules from the layer
specification, so they replace its modules after construction and reuse the weights.
"""

from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, VocabParallelEmbedding
from torch import Tensor

from megatron_gptoss.layers.adapted_linears import (
    AdaptedLinear,
    adapter_settings,
    low_rank,
    sharded_state,
)
from megatron_gptoss.layers.merge import merged_weight
from megatron_gptoss.transformer_config import PolicyTransformerConfig


def adapt_vocabulary(chunk: GPTModel) -> None:
    """Replace embedding and output layer of a model chunk by layers with adapters.

    Only layers that the chunk contains and the settings name are replaced.
    """
    config: Any = chunk.config
    targets = adapter_settings(config).targets

    if chunk.pre_process and "embedding" in targets:
        embedding = chunk.embedding
        embedding.word_embeddings = AdaptedEmbedding(embedding.word_embeddings, config)
    if chunk.post_process and "head" in targets:
        chunk.output_layer = AdaptedHead(chunk.output_layer, config)


class AdaptedVocabulary(AdaptedLinear):
    """Weight [vocab_size / tensor, hidden_size] with one adapter."""

    def __init__(
        self,
        weight: torch.nn.Parameter,
        target: str,
        config: PolicyTransformerConfig,
        tp_group: Any,
    ) -> None:
        """Allocate an adapter, uninitialized.

        Args:
            weight: [vocab_size / tensor, hidden_size] base to reuse.
            target: name of the adapter, "embedding" or "head".
            config: configuration of the model.
            tp_group: tensor-parallel group.
        """
        super().__init__()
        self.config = config
        self.weight = weight
        self.tp_group = tp_group

        model = config.architecture
        adapter = low_rank(config, model.vocab_size, model.hidden_size, split=0)
        self.adapters = torch.nn.ModuleDict({target: adapter})

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return A [rank, hidden_size] and B [vocab_size / tensor, rank], in the model's dtype."""
        [adapter] = self.adapters.values()
        factors: tuple[Tensor, Tensor] = adapter()
        return factors

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the sharded tensors of base and adapter."""
        dims = {"weight": 0, **self.tensor_parallel_dims()}
        return sharded_state(self, dims, prefix, sharded_offsets, metadata)


class AdaptedEmbedding(AdaptedVocabulary):
    """Embedding with an adapter. A token gets its row of the merged weight."""

    def __init__(self, embedding: VocabParallelEmbedding, config: PolicyTransformerConfig) -> None:
        super().__init__(embedding.weight, "embedding", config, embedding.tp_group)
        self._first_id = embedding.vocab_start_index
        self._end_id = embedding.vocab_end_index
        self._scatters = embedding.reduce_scatter_embeddings

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the embeddings of tokens.

        Args:
            input_ids: [1, tokens] int64, the same on all tensor-parallel ranks.

        Returns:
            [1, tokens, hidden_size]. With sequence parallelism, this rank's part
            [tokens / tensor, 1, hidden_size].
        """
        # Like Megatron's VocabParallelEmbedding: ids of other ranks read row 0, which is masked
        # below.
        is_on_other_rank = (input_ids < self._first_id) | (input_ids >= self._end_id)
        local_ids = (input_ids - self._first_id).masked_fill(is_on_other_rank, 0)
        a, b = self.factors()

        # Merge only the rows of these tokens; the bits are those of the whole merged weight.
        # Indexing is used because torch's embedding accumulates B's gradient in a random order on
        # GPUs.
        ids = local_ids.flatten()
        rows = merged_weight(self.read_base()[ids], a, b[ids], self.scale)
        rows = rows.unflatten(0, input_ids.shape).masked_fill(is_on_other_rank[..., None], 0.0)

        # Exactly one rank has the row and the others have 0, so the sum is exact.
        if self._scatters:
            tokens_first = rows.transpose(0, 1).contiguous()
            scattered: Tensor = reduce_scatter_to_sequence_parallel_region(
                tokens_first, group=self.tp_group
            )
            return scattered
        reduced: Tensor = reduce_from_tensor_model_parallel_region(rows, group=self.tp_group)
        return reduced


class AdaptedHead(AdaptedVocabulary):
    """Output layer with an adapter."""

    def __init__(self, layer: ColumnParallelLinear, config: PolicyTransformerConfig) -> None:
        super().__init__(layer.weight, "head", config, layer.tp_group)
        self.sequence_parallel = layer.sequence_parallel

    def output_weight(self) -> Tensor:
        """Return the merged weight [vocab_size / tensor, hidden_size], in the dtype of the base.

        It is differentiable in A and B. For code that computes log-probs in blocks and never has
        all logits.
        """
        return merged_weight(self.read_base(), *self.factors(), self.scale)

    def forward(self, hidden_states: Tensor, **unused: Any) -> tuple[Tensor, None]:
        """Return the logits of this rank's vocabulary part. There is no bias.

        Args:
            hidden_states: [tokens, 1, hidden_size], or with sequence parallelism
                [tokens / tensor, 1, hidden_size].
            unused: options of Megatron's layer.

        Returns:
            [tokens, 1, vocab_size / tensor] in the dtype of the input, and None for the bias.
        """
        # Both functions sum the gradient of the input over ranks in the backward pass.
        if self.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(hidden_states, group=self.tp_group)
        else:
            hidden_states = copy_to_tensor_model_parallel_region(hidden_states, group=self.tp_group)
        return self.multiply(hidden_states), None
