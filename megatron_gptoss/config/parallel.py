"""Configuration of the parallel layout, and checks of the layout against a model."""

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from megatron_gptoss.config.adapter import PART_OF_TARGET, AdapterConfig
from megatron_gptoss.config.model import ModelConfig
from megatron_gptoss.config.strict_model import StrictModel


class ParallelConfig(StrictModel):
    """Distribution of the policy over trainer ranks."""

    world_size: int = Field(1, gt=0)
    """Number of trainer ranks. The data-parallel size is world_size / (tensor * pipeline *
    context).
    """
    tensor: int = Field(1, gt=0)
    """Tensor-parallel size. Above 1, sequence parallelism is on (Megatron requires it for
    mixtures of experts).
    """
    pipeline: int = Field(1, gt=0)
    """Number of pipeline stages."""
    last_stage_layers: int | None = Field(None, gt=0)
    """Layers of the last pipeline stage. The other stages divide the rest evenly. null for the same
    number in all stages. The last stage also has the output layer, which takes the time of about 4
    layers.
    """
    virtual_pipeline: int = Field(1, gt=0)
    """Model chunks per pipeline rank. Values above 1 use the interleaved schedule: pipeline bubbles
    become shorter and messages more frequent by this factor. The number of micro-batches of each
    rank is rounded up to a multiple of ``pipeline``.
    """
    context: int = Field(1, gt=0)
    """Context-parallel size: number of ranks that split the tokens of a packed batch. Any number is
    possible. Prefer a power of 2.
    """
    context_scheme_full: Literal["auto", "all_to_all", "all_gather"] = "auto"
    """Communication scheme of full-attention layers under context parallelism. auto: the scheme
    with the lowest predicted cost for each packed row, on H200 with NVLink. ``gptoss plan`` prints
    it.
    """
    context_scheme_window: Literal["auto", "all_to_all", "halo"] = "auto"
    """Communication scheme of sliding-window layers under context parallelism."""
    expert: int = Field(1, gt=0)
    """Expert-parallel size: number of ranks over which the experts of a layer are split."""
    expert_dispatcher: Literal["alltoall", "deepep"] = "alltoall"
    """Communication of tokens to experts and back. deepep permutes and sends in one kernel, for
    experts on several nodes. It needs GPUs and https://github.com/deepseek-ai/DeepEP, which is not
    installed by default.
    """
    recompute: tuple[Literal["moe_act", "layernorm", "core_attn", "moe"], ...] = ()
    """Parts of layers that the backward pass computes again, on GPUs. moe_act (the activation of
    experts) saves 1/6 of the activation memory at almost no cost. layernorm saves less. moe saves
    most and costs most time.
    """
    recompute_layers: int | None = Field(None, ge=0)
    """Number of layers that recompute, counted from the first layer of each model chunk. null for
    all layers.
    """

    @property
    def data(self) -> int:
        """Data-parallel size, for parameters outside of experts."""
        return self.world_size // (self.tensor * self.pipeline * self.context)

    @property
    def micro_batch_multiple(self) -> int:
        """Divisor of each data-parallel rank's number of micro-batches."""
        # Megatron's interleaved schedule requires whole groups of this size.
        return self.pipeline if self.virtual_pipeline > 1 else 1

    @property
    def sizes(self) -> str:
        """Sizes for messages, such as "tensor 2, pipeline 1, context 1, expert 8"."""
        names = ("tensor", "pipeline", "context", "expert")
        return ", ".join(f"{name} {getattr(self, name)}" for name in names)

    def for_teacher(self, teacher: ModelConfig) -> "ParallelConfig":
        """Return the layout of a frozen model on the ranks of the policy.

        It has no options of the backward pass, and for a dense model none of experts.
        """
        updates: dict[str, Any] = {"recompute": (), "recompute_layers": None}
        if not teacher.num_experts:
            updates |= {"expert": 1, "expert_dispatcher": "alltoall"}
        return self.model_copy(update=updates)

    def layers_of_stage(self, stage: int, model: ModelConfig) -> int:
        """Return a pipeline stage's number of layers.

        Args:
            stage: index of the stage.
            model: architecture.
        """
        # The stages before the last divide the remaining layers evenly (see check_layout).
        last = self.last_stage_layers or model.num_layers // self.pipeline
        if stage == self.pipeline - 1:
            return last
        return (model.num_layers - last) // (self.pipeline - 1)

    def check_layout(
        self,
        model: ModelConfig,
        adapter: AdapterConfig | None = None,
        frozen: Sequence[str] = (),
    ) -> None:
        """Raise an error if the layout is impossible for ``model``.

        Args:
            model: architecture.
            adapter: trained adapters; None if all parameters are trained.
            frozen: parts of layers that are not trained, as in ``ablation.freeze``.

        Raises:
            ValueError: the layout is impossible. The message names the key.
        """
        # The order matters for messages: later checks assume that earlier ones have passed.
        self._check_ranks()
        self._check_options(model)
        _check_divides(
            "parallel.tensor", self.tensor, "num_key_value_heads", model.num_key_value_heads
        )
        _check_divides("parallel.tensor", self.tensor, "vocab_size", model.vocab_size)
        self._check_pipeline(model)
        self._check_experts(model)
        if self.virtual_pipeline > 1 and self.pipeline == 1:
            raise ValueError(
                f"parallel.virtual_pipeline ({self.virtual_pipeline}) needs parallel.pipeline "
                "above 1"
            )
        self._check_context_schemes(model)
        self._check_stages(adapter, frozen)

    def _check_ranks(self) -> None:
        """Raise ValueError if the ranks cannot be divided evenly."""
        dense_ranks = self.tensor * self.pipeline * self.context
        if self.world_size % dense_ranks:
            usable_ranks = max(1, self.world_size // dense_ranks) * dense_ranks
            raise ValueError(
                f"parallel.world_size ({self.world_size}) must be a multiple of "
                f"parallel.tensor x parallel.pipeline x parallel.context "
                f"({self.tensor} x {self.pipeline} x {self.context} = {dense_ranks}): use "
                f"{usable_ranks} ranks, or another parallel.context"
            )

        # Experts are split over all ranks of a stage, across tensor, context and data parallelism.
        stage_ranks = self.world_size // self.pipeline
        if stage_ranks % self.expert:
            raise ValueError(
                f"parallel.expert ({self.expert}) must divide "
                f"parallel.world_size / parallel.pipeline ({stage_ranks})"
            )

    def _check_experts(self, model: ModelConfig) -> None:
        """Raise ValueError for options of experts if the model has none."""
        if model.num_experts:
            _check_divides("parallel.expert", self.expert, "num_experts", model.num_experts)
            return

        if self.expert > 1:
            raise ValueError(
                f"parallel.expert ({self.expert}) must be 1: a {model.model_type} model has no "
                "experts"
            )
        # Dense layers have only core_attn of the parts that can be recomputed.
        without_effect = [part for part in self.recompute if part != "core_attn"]
        if without_effect:
            raise ValueError(
                f"parallel.recompute {', '.join(without_effect)} has no effect: a "
                f"{model.model_type} model has no experts, and its norms are part of its linear "
                "layers"
            )

    def _check_options(self, model: ModelConfig) -> None:
        """Raise ValueError for options that have no effect."""
        if self.recompute_layers is not None and not self.recompute:
            raise ValueError(
                "parallel.recompute_layers has no effect, because parallel.recompute is empty. Set "
                "parallel.recompute, or remove parallel.recompute_layers"
            )
        if self.expert_dispatcher == "deepep" and self.expert == 1:
            raise ValueError(
                "parallel.expert_dispatcher deepep has no effect, because parallel.expert is 1. "
                "Use alltoall"
            )

        last = self.last_stage_layers
        layers = model.num_layers
        if last is not None and (self.pipeline == 1 or self.virtual_pipeline > 1 or last >= layers):
            raise ValueError(
                f"parallel.last_stage_layers ({last}) needs parallel.pipeline above 1, "
                f"parallel.virtual_pipeline 1 and a value below num_layers ({layers})"
            )

    def _check_pipeline(self, model: ModelConfig) -> None:
        """Raise ValueError if layers cannot be divided evenly over stages and chunks."""
        layers = model.num_layers
        if self.last_stage_layers is None:
            chunks = self.pipeline * self.virtual_pipeline
            _check_divides("parallel.pipeline", self.pipeline, "num_layers", layers)
            _check_divides(
                "parallel.pipeline x parallel.virtual_pipeline", chunks, "num_layers", layers
            )
        else:
            _check_divides(
                "parallel.pipeline - 1",
                self.pipeline - 1,
                "num_layers - parallel.last_stage_layers",
                layers - self.last_stage_layers,
            )

    def _check_context_schemes(self, model: ModelConfig) -> None:
        """Raise ValueError if all_to_all is requested and heads cannot be divided over ranks."""
        heads = model.num_attention_heads // self.tensor
        if heads % self.context == 0:
            return

        alternatives = {"full": "all_gather", "window": "halo"}
        for kind, alternative in alternatives.items():
            if getattr(self, f"context_scheme_{kind}") != "all_to_all":
                continue
            divisors = [size for size in range(1, self.context + 1) if heads % size == 0]
            sizes = ", ".join(str(size) for size in divisors)
            raise ValueError(
                f"parallel.context_scheme_{kind} all_to_all needs parallel.context "
                f"({self.context}) to divide num_attention_heads / parallel.tensor ({heads}): "
                f"use parallel.context {sizes}, or scheme {alternative}"
            )

    def _check_stages(self, adapter: AdapterConfig | None, frozen: Sequence[str]) -> None:
        """Raise ValueError if a pipeline stage has nothing to train."""
        # Such a stage would have no gradients and no optimizer. It would not take part in the
        # collectives over all gradients.
        trained = adapter.trained_parts() if adapter else set(PART_OF_TARGET.values())
        trained -= set(frozen)
        cause = []
        if adapter is not None:
            cause.append(f"adapter.targets ({', '.join(adapter.targets)})")
        if frozen:
            cause.append(f"ablation.freeze ({', '.join(frozen)})")
        if not trained:
            raise ValueError(
                f"{' with '.join(cause)}: nothing is trained. Remove ablation.freeze, or add an "
                "adapter target in another part of the layers"
            )

        # Every stage has layers. The embedding is on the first stage and the head on the last.
        stages = set(range(self.pipeline))
        if trained & {"attention", "experts"}:
            return
        if "embedding" in trained:
            stages.discard(0)
        if "head" in trained:
            stages.discard(self.pipeline - 1)
        if not stages or self.pipeline == 1:
            return
        usable = 2 if {"embedding", "head"} <= trained else 1
        plural = "s" if len(stages) > 1 else ""
        raise ValueError(
            f"{' with '.join(cause)}: pipeline stage{plural} "
            f"{', '.join(str(stage) for stage in sorted(stages))} would have nothing to train "
            f"(parallel.pipeline {self.pipeline}). Set parallel.pipeline to {usable}, or train "
            "another part of the layers"
        )


def _check_divides(divisor: str, size: int, name: str, count: int) -> None:
    """Raise ValueError if the size of ``divisor`` does not divide the count of ``name``.

    Args:
        divisor: keys in full from which ``size`` is computed.
        size: the divisor's value.
        name: what is divided.
        count: the value of ``name``.
    """
    if count % size:
        raise ValueError(f"{divisor} ({size}) must divide {name} ({count})")
