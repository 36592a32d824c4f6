"""Mixture-of-experts layer that replaces Megatron's dispatcher, times it and frees its tensors."""

from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_gptoss.step_clock import StepClock, start_all_to_all, stop_all_to_all
from megatron_gptoss.token_dispatcher import AlltoAllTokenDispatcher

DISPATCHER_TENSORS = ("probs", "routing_map", "reversed_local_input_permutation_mapping")
"""Attributes of Megatron's all-to-all dispatcher that keep tensors until the next forward pass."""


class GptOssMoELayer(MoELayer):
    """Megatron's MoE layer with three changes.

    * Its all-to-all dispatcher is ``dispatcher_class``.
    * The exchange of tokens and of their gradients counts as communication of ``clock``.
    * It keeps no graph and no tensors after the forward pass.
    """

    dispatcher_class: type[AlltoAllTokenDispatcher] = AlltoAllTokenDispatcher
    """Class that replaces Megatron's all-to-all dispatcher."""
    clock: StepClock | None = None
    """Clock of the trainer, which sets it; None to measure nothing."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        # Megatron's layer cannot be given the class of a dispatcher.
        if config.moe_token_dispatcher_type == "alltoall":
            self.token_dispatcher = self.build_dispatcher(kwargs["pg_collection"])

    def build_dispatcher(self, groups: ProcessGroupCollection) -> AlltoAllTokenDispatcher:
        """Return a dispatcher for the experts of this rank.

        Args:
            groups: process groups of the layer.
        """
        return self.dispatcher_class(
            self.num_local_experts,
            self.local_expert_indices,
            config=self.config,
            pg_collection=groups,
        )

    def dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Send tokens to their experts.

        Args:
            hidden_states: [tokens, hidden_size] in the model's dtype.
            probs: [tokens, experts] gate values.

        Returns:
            Received tokens [rows, hidden_size] and their gate values.
        """
        clock = self._exchange_clock
        tokens, probs = super().dispatch(start_all_to_all(clock, hidden_states), probs)
        return stop_all_to_all(clock, tokens), probs

    def combine(self, output: Tensor) -> Tensor:
        """Send the output [rows, hidden_size], of any dtype, back to the ranks of the tokens."""
        clock = self._exchange_clock
        return stop_all_to_all(clock, super().combine(start_all_to_all(clock, output)))

    def postprocess(self, output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
        """Return the output of the layer, [tokens, 1, hidden_size], and release its tensors.

        Args:
            output: combined output of the experts, in the model's dtype.
            shared_expert_output: [tokens, 1, hidden_size]; None without shared experts.
        """
        result: Tensor = super().postprocess(output, shared_expert_output)
        # Otherwise the dispatcher would keep the gates, and with them the graph of all earlier
        # layers, until the next micro-batch. The graph refers to the model in ways that Python's
        # garbage collector cannot see, so the model would never be freed. The dispatcher would also
        # keep the order of tokens: 4 MB for 16,384 tokens, which keep a whole block of torch's
        # allocator in use.
        for name in DISPATCHER_TENSORS:
            if hasattr(self.token_dispatcher, name):
                setattr(self.token_dispatcher, name, None)
        return result

    @property
    def _exchange_clock(self) -> StepClock | None:
        """Clock for the exchange of tokens; None if tokens stay on this rank."""
        # Megatron's other dispatchers have no such property.
        exchanges_tokens = getattr(self.token_dispatcher, "exchanges_tokens", True)
        return self.clock if exchanges_tokens else None
