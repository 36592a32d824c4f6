"""Low-rank adapters: their ranks and targets, and how many parameters they have."""

from typing import Self

from pydantic import Field, model_validator

from megatron_gptoss.config.model import AdapterTarget, ModelConfig
from megatron_gptoss.config.strict_model import StrictModel

PART_OF_TARGET = {
    "q": "attention",
    "k": "attention",
    "v": "attention",
    "o": "attention",
    "experts": "experts",
    "router": "experts",
    "embedding": "embedding",
    "head": "head",
}
"""Part of the model that holds each target. Layers have the parts "attention" and "experts"."""


class AdapterConfig(StrictModel):
    """Low-rank adapters (LoRA, arXiv 2106.09685): every target's weight is W + alpha / rank * B A.

    Only A [rank, in] and B [out, rank] are trained; all else, biases and norms too, is frozen.
    """

    rank: int = Field(32, gt=0)
    """Rank of all updates but those of experts."""
    alpha: float = Field(32.0, gt=0)
    """An update is scaled by alpha over its rank."""
    expert_rank: int | None = Field(None, gt=0)
    """Rank of the update of each expert's matrices; null for rank / experts_per_token, at least 1:
    as many trained parameters per token as in a dense layer."""
    targets: tuple[AdapterTarget, ...] = ("q", "k", "v", "o", "experts")
    """Weights with adapters: q, k, v and o, the projections of attention; experts, the gate, up and
    down projection of each; router; embedding; head, the output layer."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.targets:
            raise ValueError("adapter.targets is empty: nothing would be trained")
        if len(set(self.targets)) < len(self.targets):
            raise ValueError(f"adapter.targets names a target twice: {', '.join(self.targets)}")
        if self.expert_rank is not None and "experts" not in self.targets:
            raise ValueError(
                f"adapter.expert_rank ({self.expert_rank}) has no effect: adapter.targets "
                "does not have experts"
            )
        return self

    def trained_parts(self) -> set[str]:
        """Return the parts of the model with adapters, as in PART_OF_TARGET."""
        return {PART_OF_TARGET[target] for target in self.targets}

    def rank_of_experts(self, model: ModelConfig) -> int:
        """Return the rank of the updates of experts."""
        return self.expert_rank or max(1, self.rank // model.experts_per_token)

    def layer_parameters(self, model: ModelConfig, tensor: int = 1) -> tuple[int, int]:
        """Count what one layer's adapters have on one of ``tensor`` tensor-parallel ranks.

        Returns:
            The parameters for attention and router, and those for one expert.
        """
        hidden = model.hidden_size
        # One factor has the side that ranks split, the other one is whole.
        sizes = {
            "q": hidden + model.query_size // tensor,
            "k": hidden + model.key_size // tensor,
            "v": hidden + model.key_size // tensor,
            "o": hidden + model.query_size // tensor,
            "router": hidden + model.num_experts,
        }
        dense = self.rank * sum(size for target, size in sizes.items() if target in self.targets)

        expert = 0
        if "experts" in self.targets:
            gate_and_up = hidden + 2 * model.intermediate_size
            down = model.intermediate_size + hidden
            expert = self.rank_of_experts(model) * (gate_and_up + down)
        return dense, expert

    def vocabulary_parameters(self, model: ModelConfig, target: str, tensor: int = 1) -> int:
        """Count those of the embedding's or the head's adapter (``target``) on one of ``tensor``
        ranks; 0 if it has none."""
        if target not in self.targets:
            return 0
        return self.rank * (model.hidden_size + model.vocab_size // tensor)

    def num_parameters(self, model: ModelConfig) -> int:
        """Count the parameters of all adapters of ``model``: all that is trained."""
        dense, expert = self.layer_parameters(model)
        layers = model.num_layers * (dense + model.num_experts * expert)
        vocabulary = [self.vocabulary_parameters(model, name) for name in ("embedding", "head")]
        return layers + sum(vocabulary)

    def difference(self, other: "AdapterConfig", model: ModelConfig) -> tuple[str, str, str] | None:
        """Find what makes the adapters of another configuration other ones, in ``model``.

        Returns:
            A key, its value here and its value there; None where shapes, scales and targets agree,
            however they are written.
        """
        here = self._as_built(model)
        there = other._as_built(model)
        for key, value in here.items():
            if there[key] != value:
                return f"adapter.{key}", value, there[key]
        return None

    def _as_built(self, model: ModelConfig) -> dict[str, str]:
        """Return what decides on shapes and scales; "none" where a key has no effect."""
        has_experts = "experts" in self.targets
        has_others = set(self.targets) != {"experts"}
        return {
            "targets": ", ".join(sorted(self.targets)),
            "rank": str(self.rank) if has_others else "none",
            "expert_rank": str(self.rank_of_experts(model)) if has_experts else "none",
            "alpha": str(self.alpha),
        }

    def check_ranks(self, model: ModelConfig) -> None:
        """Raise ValueError naming the target that ``model`` lacks, or that is too small for its
        rank."""
        for target in self.targets:
            if target not in model.adapter_targets:
                available = ", ".join(model.adapter_targets) or "none"
                raise ValueError(
                    f"adapter.targets: {target} of a {model.model_type} model cannot be adapted; "
                    f"available: {available}"
                )

            key, rank = "adapter.rank", self.rank
            if target == "experts":
                key, rank = "adapter.expert_rank", self.rank_of_experts(model)

            smaller_side = _smaller_side(target, model)
            if rank > smaller_side:
                raise ValueError(
                    f"{key} ({rank}) exceeds the smaller side ({smaller_side}) of what "
                    f"target {target} adapts: use a smaller rank or leave the target out"
                )


def _smaller_side(target: AdapterTarget, model: ModelConfig) -> int:
    """Return the smaller side of the matrix that a target adapts: its largest possible rank."""
    # Every matrix has the residual stream on one side. An expert's are two, of the same sides.
    other_sides: dict[AdapterTarget, int] = {
        "q": model.query_size,
        "k": model.key_size,
        "v": model.key_size,
        "o": model.query_size,
        "experts": model.intermediate_size,
        "router": model.num_experts,
        "embedding": model.vocab_size,
        "head": model.vocab_size,
    }
    return min(other_sides[target], model.hidden_size)
