"""Configuration of low-rank adapters, and their number of parameters."""

from typing import Self

from pydantic import Field, model_validator

from megatron_gptoss.config.model import AdapterTarget, ModelConfig, Quantization
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
"""Part of the model that contains each target. Layers have the parts "attention" and "experts"."""


class AdapterConfig(StrictModel):
    """Low-rank adapters (LoRA, arXiv 2106.09685). A target's weight is W + alpha / rank * B A.

    Only A [rank, in] and B [out, rank] are trained. All other parameters are frozen.
    """

    rank: int = Field(32, gt=0)
    """Rank of all other updates."""
    alpha: float = Field(32.0, gt=0)
    """Scale of an update times its rank."""
    expert_rank: int | None = Field(None, gt=0)
    """Rank of expert updates; null for rank / experts_per_token, at least 1. With null a
    token trains the same number of parameters as in a dense layer.
    """
    targets: tuple[AdapterTarget, ...] = ("q", "k", "v", "o", "experts")
    """Weights with adapters: q, k, v, o (projections of attention), experts (gate, up and down
    projections), router, embedding, head (output layer).
    """
    merge_experts: bool = True
    """Multiply by expert weights that are merged with their adapters and rounded to the model's precision. false:
    multiply by the base and by the adapters separately, which keeps updates that are small relative to the base. Needs
    ``quantization: mxfp4`` and ``experts`` among the targets. Servers then need ``rollout.engine.quantization: mxfp4``.
    """

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Reject targets and ranks that have no effect."""
        if not self.targets:
            raise ValueError("adapter.targets is empty: nothing would be trained")
        if len(set(self.targets)) < len(self.targets):
            raise ValueError(f"adapter.targets names a target twice: {', '.join(self.targets)}")
        if self.expert_rank is not None and "experts" not in self.targets:
            raise ValueError(
                f"adapter.expert_rank ({self.expert_rank}) has no effect: adapter.targets "
                "does not have experts"
            )
        if not self.merge_experts and "experts" not in self.targets:
            raise ValueError(
                "adapter.merge_experts (false) has no effect: adapter.targets does not have experts"
            )
        return self

    def unmerged_expert_rank(self, model: ModelConfig) -> int | None:
        """Return the rank of expert updates that are not merged in ``model``; None if all are merged."""
        return None if self.merge_experts else self.rank_of_experts(model)

    def trained_parts(self) -> set[str]:
        """Return the parts of the model that have adapters, as in PART_OF_TARGET."""
        return {PART_OF_TARGET[target] for target in self.targets}

    def rank_of_experts(self, model: ModelConfig) -> int:
        """Return the rank of expert updates in ``model``."""
        return self.expert_rank or max(1, self.rank // model.experts_per_token)

    def layer_parameters(self, model: ModelConfig, tensor: int = 1) -> tuple[int, int]:
        """Return one layer's number of adapter parameters on one rank.

        Args:
            model: architecture.
            tensor: tensor-parallel size.

        Returns:
            Parameters for attention and router, and parameters for one expert.
        """
        hidden = model.hidden_size
        # Tensor parallelism splits one factor. Every rank has the whole other factor.
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
        """Return the number of adapter parameters that the embedding or the output layer has on one rank.

        Args:
            model: architecture.
            target: "embedding" or "head".
            tensor: tensor-parallel size.
        """
        if target not in self.targets:
            return 0
        return self.rank * (model.hidden_size + model.vocab_size // tensor)

    def num_parameters(self, model: ModelConfig) -> int:
        """Return the number of adapter parameters in ``model``."""
        dense, expert = self.layer_parameters(model)
        layers = model.num_layers * (dense + model.num_experts * expert)
        vocabulary = [self.vocabulary_parameters(model, name) for name in ("embedding", "head")]
        return layers + sum(vocabulary)

    def difference(self, other: "AdapterConfig", model: ModelConfig) -> tuple[str, str, str] | None:
        """Compare the adapters of two configurations.

        Args:
            other: the other configuration.
            model: architecture.

        Returns:
            A key, its value here and its value in ``other``. None if shapes, scales and targets are
            the same, even if they are written differently.
        """
        settings = self._as_built(model)
        other_settings = other._as_built(model)
        for key, value in settings.items():
            if other_settings[key] != value:
                return f"adapter.{key}", value, other_settings[key]
        return None

    def _as_built(self, model: ModelConfig) -> dict[str, str]:
        """Return the values that decide shapes and scales; "none" for keys without effect."""
        has_experts = "experts" in self.targets
        has_others = set(self.targets) != {"experts"}
        # The order of targets and ranks of absent targets do not change any tensor.
        return {
            "targets": ", ".join(sorted(self.targets)),
            "rank": str(self.rank) if has_others else "none",
            "expert_rank": str(self.rank_of_experts(model)) if has_experts else "none",
            "alpha": str(self.alpha),
        }

    def check_base(self, quantization: Quantization | None) -> None:
        """Raise ValueError if adapters cannot stay unmerged on a base in this format.

        Args:
            quantization: format of the experts of the base; None for the model's precision.
        """
        if not self.merge_experts and quantization is None:
            raise ValueError(
                "adapter.merge_experts (false) supports only a base in MXFP4, but quantization is null. Set "
                "quantization=mxfp4, or leave merge_experts out"
            )

    def check_ranks(self, model: ModelConfig) -> None:
        """Raise ValueError if ``model`` lacks a target or a target is smaller than the rank.

        The message names the target.
        """
        # Experts have their own rank, so that the message must name another key for them.
        for target in self.targets:
            if target not in model.adapter_targets:
                available = ", ".join(model.adapter_targets) or "none"
                raise ValueError(
                    f"adapter.targets: {target} of a {model.model_type} model cannot be adapted. "
                    f"Available: {available}"
                )

            key, rank = "adapter.rank", self.rank
            if target == "experts":
                key, rank = "adapter.expert_rank", self.rank_of_experts(model)

            smaller_side = _smaller_side(target, model)
            if rank > smaller_side:
                raise ValueError(
                    f"{key} ({rank}) exceeds the smaller dimension ({smaller_side}) of "
                    f"target {target}. Use a smaller rank or remove the target"
                )


def _smaller_side(target: AdapterTarget, model: ModelConfig) -> int:
    """Return the smaller dimension of a target's matrix, which is its largest possible rank."""
    # One dimension of every matrix is the residual stream.
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
