"""Sections that every run has, with their common checks."""

from typing import Any, ClassVar, Self

from pydantic import BaseModel, model_validator

from megatron_gptoss.config import AdapterConfig, check_quantization
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
from megatron_gptoss.planning.memory_inputs import EngineMemory
from rl_loop.config.partial_configs import EpisodesConfig, TrainerConfig
from rl_loop.config.training import EvaluationConfig, TrackingConfig

SHORTEST_PROMPT = {
    "model_identity": None,
    "knowledge_cutoff": None,
    "reasoning_effort": None,
    "channels": False,
    "describe_builtin_tools": False,
}
SHORTEST_CHATML = {"system": None, "describe_tools": False}
"""Values that leave out the system message. They are the defaults of a tiny vocabulary, because its
policies are not trained on system messages."""


def _shorten[Section: BaseModel](section: Section, shortest: dict[str, Any]) -> Section:
    """Return a section with the values of ``shortest`` for keys that are not set."""
    # Compare with the keys that are set, because a user may set a default value explicitly.
    unset = {key: value for key, value in shortest.items() if key not in section.model_fields_set}
    return section.model_copy(update=unset)


class RunConfig(EpisodesConfig, TrainerConfig):
    """Sections of every run."""

    command: ClassVar[str]
    """The ``gptoss`` command that runs it."""

    tracking: TrackingConfig = TrackingConfig()
    """Records of the run."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Settings of ``gptoss eval``."""

    @property
    def exports(self) -> bool:
        """True if the run ends with a Hugging Face checkpoint."""
        return True

    @property
    def samples(self) -> bool:
        """True if the run has engines that sample."""
        return True

    @property
    def engine_memory(self) -> EngineMemory | None:
        """Memory of the engine on each of the trainer's GPUs. None if it takes none."""
        if not self.samples:
            return None
        # Colocated servers take memory of the trainer's GPUs. Others take none.
        return self.rollout.engine.memory_on_trainer_gpus(
            self.model, self.dtype, self.unmerged_adapter
        )

    @model_validator(mode="after")
    def _choose_vocabulary(self) -> Self:
        if "vocabulary" not in self.model_fields_set:
            self.vocabulary = self.model.default_vocabulary
        # GPT-OSS has Harmony's system message, dense models have ChatML's.
        if self.vocabulary == "tiny" and isinstance(self.model, GptOssModelConfig):
            self.prompt = _shorten(self.prompt, SHORTEST_PROMPT)
        elif self.vocabulary == "tiny":
            self.chatml = _shorten(self.chatml, SHORTEST_CHATML)
        return self

    @model_validator(mode="after")
    def _choose_for_model(self) -> Self:
        engine = self.rollout.engine.for_model(self.model)
        # ``for_model`` returns the same object if the model changes nothing.
        if engine is not self.rollout.engine:
            self.rollout = self.rollout.model_copy(update={"engine": engine})
        return self

    @model_validator(mode="after")
    def _check_sections_together(self) -> Self:
        # Check here, because an engine or a rank would find such a mistake late in a run.
        self.parallel.check_layout(self.model, self.adapter, self.ablation.freeze)
        check_quantization("quantization", self.quantization, self.model)
        self._check_adapter()
        self._check_dense()
        self._check_engine()
        self._check_shared_prefixes()
        return self

    def _check_shared_prefixes(self) -> None:
        """Refuse settings under which tokens with equal prefixes are not equal, or not supported."""
        if self.training.share_prefixes == "off":
            return

        for kind in ("full", "window"):
            if getattr(self.parallel, f"context_scheme_{kind}") == "all_to_all":
                raise ValueError(
                    f"parallel.context_scheme_{kind}=all_to_all does not support training.share_prefixes "
                    f"({self.training.share_prefixes}). Set the scheme to auto, or share_prefixes "
                    "to off"
                )
        if self.ablation.router_noise > 0:
            raise ValueError(
                f"ablation.router_noise ({self.ablation.router_noise:g}) draws other experts for "
                "each copy of a token, so training.share_prefixes "
                f"({self.training.share_prefixes}) would change the result. Set one of them to its "
                "default"
            )

    def _check_adapter(self) -> None:
        if self.adapter is None:
            if self.initial_adapter is not None:
                raise ValueError(
                    f"initial_adapter ({self.initial_adapter}) has no effect while adapter is "
                    "null. Set adapter to the settings that the adapters were trained with"
                )
            if self.training.keep_adapters:
                raise ValueError(
                    "training.keep_adapters has no effect while adapter is null. Set it to "
                    "false, or set adapter. training.keep_checkpoints is the number of full "
                    "checkpoints to keep"
                )
            return

        self.adapter.check_ranks(self.model)
        self.adapter.check_base(self.quantization)
        self._check_unmerged_rank(self.adapter)

    def _check_unmerged_rank(self, adapter: AdapterConfig) -> None:
        """Refuse expert adapters of a rank that MXFP4 servers do not support."""
        engine = self.rollout.engine
        rank = adapter.rank_of_experts(self.model)
        if (
            engine.has_mxfp4_experts
            and not adapter.merge_experts
            and rank > engine.max_unmerged_rank
        ):
            raise ValueError(
                f"adapter.expert_rank ({rank}) exceeds {engine.max_unmerged_rank}, the largest rank of unmerged "
                f"adapters on {engine.type} servers with rollout.engine.quantization="
                f"{engine.experts_format}. Lower it, or set adapter.merge_experts=true and leave "
                "rollout.engine.quantization out"
            )

    def _check_unmerged_experts(self) -> None:
        """Refuse engines with another policy than unmerged training, and ``keep_weights`` without effect."""
        engine = self.rollout.engine
        if engine.keeps_weights and self.unmerged_adapter is None:
            raise ValueError(
                "rollout.engine.keep_weights: weight syncs send all weights unless adapter.merge_experts is false. "
                "Leave it out"
            )
        # Merging in fp32 loses less than training can notice.
        if self.unmerged_adapter is None or engine.has_mxfp4_experts or self.dtype == "fp32":
            return
        raise ValueError(
            f"adapter.merge_experts (false): {engine.type} engines would hold merged experts in {self.dtype}, which "
            "is another policy than the trained one. Set rollout.engine.type=sglang and "
            "rollout.engine.quantization=mxfp4, or adapter.merge_experts=true"
        )

    def _check_dense(self) -> None:
        """Refuse settings that have no effect on a model without experts and sinks."""
        if self.model.num_experts > 0:
            return

        # A setting without effect is an error, because a user would rely on it.
        ablation = self.ablation
        family = self.model.model_type
        if self.rollout.routed_experts:
            raise ValueError(
                f"rollout.routed_experts: a {family} model has no experts. Leave it out"
            )
        if ablation.router_noise > 0:
            raise ValueError(f"ablation.router_noise: a {family} model has no router. Leave it out")

        if ablation.without:
            raise ValueError(
                f"ablation.without: a {family} model has no attention sinks. Leave it out"
            )

    def _check_engine(self) -> None:
        engine = self.rollout.engine
        # An ablation changes tensors in the driver. Other transports do not pass them through it.
        if self.ablation.changes_engine_weights and not engine.takes_tensors:
            raise ValueError(
                "ablation.without=[engine_sinks] and ablation.engine_noise change tensors on "
                f"their way to the engine, but engine {engine.type} receives its tensors another "
                "way. Set rollout.engine.type=embedded"
            )
        self._check_engine_quantization()

        temperature = self.rollout.temperature
        if self.rollout.purification and temperature != 1 and not engine.scores_at_any_temperature:
            raise ValueError(
                f"rollout.purification needs log-probs at rollout.temperature ({temperature}), "
                f"but engine {engine.type} scores at temperature 1 only. Set "
                "rollout.temperature=1 or rollout.engine.type=embedded"
            )

    def _check_engine_quantization(self) -> None:
        """Refuse a format that the engine does not support, and noise on MXFP4 experts."""
        engine = self.rollout.engine
        check_quantization("rollout.engine.quantization", engine.experts_format, self.model)
        # MXFP4 servers get the bits of quantized training or of a base. They cannot quantize other weights.
        exists = self.trained_quantization is not None or self.unmerged_adapter is not None
        if engine.has_mxfp4_experts and not exists:
            trained, remedy = "quantization is null", "train all weights with quantization=mxfp4"
            if self.adapter is not None:
                trained = "adapter.merge_experts (true) changes the values of experts"
                remedy = "set quantization=mxfp4 and adapter.merge_experts=false"
            raise ValueError(
                f"rollout.engine.quantization ({engine.experts_format}): {engine.type} servers "
                f"can hold only experts that were trained in this format, and {trained}. Leave "
                f"it out, or {remedy}"
            )

        noise = self.ablation.engine_noise
        # Noise on MXFP4 values has no MXFP4 code.
        if noise > 0 and self.trained_quantization is not None:
            raise ValueError(
                f"ablation.engine_noise ({noise:g}) cannot be added to experts in "
                f"{self.quantization}. Leave quantization out"
            )
