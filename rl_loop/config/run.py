"""Complete configurations of runs, which YAML files in ``configs/`` and overrides define."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Self

from pydantic import Field, model_validator

from megatron_gptoss.config import ModelConfig, OptimizerConfig
from megatron_gptoss.families.registry import read_hf_config
from megatron_gptoss.planning.memory_inputs import MemoryInputs
from megatron_gptoss.samples import NO_TEACHER
from rl_loop.algorithms.choices import AnySupervisedLoss, CrossEntropyLoss, DistillationLoss
from rl_loop.algorithms.config import GROUP_ADVANTAGES, AlgorithmConfig
from rl_loop.config.errors import ConfigError
from rl_loop.config.every_run import RunConfig
from rl_loop.config.training import SFT_EPISODES, DemonstrationConfig
from rl_loop.conversations.config import CorpusConfig, DataConfig
from rl_loop.environments.registry import environment_class

TEACHER_KEY = "algorithm.distillation.teacher"
TEACHERS_KEY = "algorithm.distillation.teachers"


class RlConfig(RunConfig):
    """``gptoss rl``: reinforcement learning."""

    command: ClassVar[str] = "rl"

    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Advantages, policy loss and corrections."""
    vocabulary_data: CorpusConfig | None = None
    """Conversations from which a tiny vocabulary is built: the sources of ``data`` in the ``gptoss
    sft`` run of the initial policy. null: the vocabulary is built from ``tasks``."""
    evaluate_every: int = Field(10, gt=0)
    """Number of steps between measurements of held-out accuracy. It is also measured before the
    first step and after the last."""
    canary_tolerance: float | None = Field(None, gt=0)
    """Maximum mean |log-prob difference| between engine and trainer on a canary prompt after a
    weight sync, in nats. null: 0.001 in fp32, 0.02 in bf16. Engines in the rollout workers
    measure the effect of rounding on their log-probs, and with null they may differ by up to 3
    times this effect. Set it above the value that ``gptoss doctor --engine`` reports for a correct
    engine. An episode with a mean difference above 100 times the tolerance ends an on-policy run,
    because the policy has not sampled it."""

    @property
    def objective(self) -> AlgorithmConfig:
        """Advantages and the policy loss."""
        return self.algorithm

    @property
    def training_temperature(self) -> float:
        """Sampling temperature."""
        return self.rollout.temperature

    @property
    def vocabulary_conversations(self) -> CorpusConfig | None:
        """Value of ``vocabulary_data``."""
        return self.vocabulary_data

    @property
    def teacher_paths(self) -> dict[str, Path]:
        """Teachers of the sources that are trained on, by configuration key."""
        distillation = self.algorithm.distillation
        if distillation is None:
            return {}
        paths = {}
        for name in self._trained_sources:
            path = distillation.of_source(name)
            if path is not None:
                has_entry = name in distillation.teachers
                paths[f"{TEACHERS_KEY}.{name}" if has_entry else TEACHER_KEY] = path
        return paths

    @property
    def teacher_of_source(self) -> dict[str, int] | None:
        """Index in ``teachers`` by source, or NO_TEACHER. None if all sources have one teacher."""
        distillation = self.algorithm.distillation
        if distillation is None:
            return None
        paths = {name: distillation.of_source(name) for name in self._trained_sources}
        if len(set(paths.values())) == 1:
            return None
        teachers = self.teachers
        return {
            name: NO_TEACHER if path is None else teachers.index(path)
            for name, path in paths.items()
        }

    @property
    def _trained_sources(self) -> list[str]:
        """Names of the task sources that are not for evaluation only."""
        return [name for name, source in self.tasks.sources.items() if source.weight > 0]

    @property
    def _teacher_top_k(self) -> int:
        """Tokens of which a teacher gives the log-probs. 0 without a divergence in the loss."""
        divergence = self.algorithm.divergence
        return 0 if divergence is None else divergence.top_k

    @property
    def memory_inputs(self) -> MemoryInputs:
        """Memory inputs with the additional models and the engine of reinforcement learning."""
        # One entry per additional model on the GPU: its optimizer, or None if it is frozen. With
        # adapters the base of the policy is the reference policy.
        auxiliary_models: list[OptimizerConfig | None] = []
        if self.algorithm.critic:
            auxiliary_models.append(self.algorithm.critic.optimizer(self.optimizer))
        # The base of adapters serves as reference policy, so it needs no second copy.
        if self.algorithm.kl and self.adapter is None:
            auxiliary_models.append(None)  # The reference policy is frozen.

        inputs = replace(
            super().memory_inputs,
            longest_sequence=self.rollout.max_episode_tokens,
            auxiliary_models=auxiliary_models,
            engine=self.engine_memory,
            mini_batches=self.algorithm.mini_batches,
        )
        inputs = replace(
            inputs, teachers=read_models(self.teachers), teacher_top_k=self._teacher_top_k
        )
        return inputs.with_sequences(self.rollout.tasks_per_step * self.rollout.samples_per_task)

    @model_validator(mode="after")
    def _record_replayed_routes(self) -> Self:
        replays = self.algorithm.routing_replay == "R3"
        # An explicit ``routed_experts: false`` stays, and ``_check_algorithm_needs`` rejects it.
        if replays and "routed_experts" not in self.rollout.model_fields_set:
            self.rollout = self.rollout.model_copy(update={"routed_experts": True})
        return self

    @model_validator(mode="after")
    def _check_rl_sections_together(self) -> Self:
        self._check_lengths()
        self._check_groups()
        self._check_staleness()
        self._check_algorithm_needs()
        self._check_external_agents()
        self._check_unmerged_experts()
        self._check_teachers()
        _check_top_k("algorithm.distillation.loss", self._teacher_top_k, self.model.vocab_size)
        return self

    def _check_lengths(self) -> None:
        longest = self.rollout.max_episode_tokens
        row = self.training.max_tokens_per_micro_batch
        # An episode is not split over micro-batches.
        if longest > row:
            raise ValueError(
                f"rollout.max_episode_tokens ({longest}) exceeds training.max_tokens_per_micro_batch "
                f"({row}), so the longest episode would not fit into a micro-batch. Lower the "
                "first or raise the second"
            )
        if longest > self.model.max_length:
            raise ValueError(
                f"rollout.max_episode_tokens ({longest}) exceeds model.max_length "
                f"({self.model.max_length}). Lower it"
            )

    def _check_groups(self) -> None:
        algorithm = self.algorithm
        rollout = self.rollout
        episodes = rollout.tasks_per_step * rollout.samples_per_task
        # Each rank needs at least one episode in each mini-batch.
        if episodes < self.parallel.data * algorithm.mini_batches:
            raise ValueError(
                f"rollout.tasks_per_step x samples_per_task ({episodes} episodes) is less than "
                f"data-parallel ranks x algorithm.mini_batches ({self.parallel.data} x "
                f"{algorithm.mini_batches}). Sample more episodes, or use fewer ranks or "
                "mini-batches"
            )

        # Sequences that share prefixes are in one mini-batch.
        shares = self.training.share_prefixes
        if shares != "off" and rollout.tasks_per_step < algorithm.mini_batches:
            raise ValueError(
                f"training.share_prefixes ({shares}) keeps the samples of a task in one mini-batch, "
                f"but algorithm.mini_batches ({algorithm.mini_batches}) exceeds "
                f"rollout.tasks_per_step ({rollout.tasks_per_step}). Lower mini_batches, or set "
                "share_prefixes to off"
            )

        # In a group of one, the advantage relative to the group is always 0.
        if algorithm.advantage.type in GROUP_ADVANTAGES and rollout.samples_per_task == 1:
            raise ValueError(
                f"algorithm.advantage {algorithm.advantage.type} compares the samples of a task, "
                "but rollout.samples_per_task is 1. Use 2 or more samples, or advantage gae or "
                "reinforce"
            )

    def _check_staleness(self) -> None:
        """Refuse settings in which engines could not sample while the trainer updates."""
        staleness = self.algorithm.max_staleness
        if staleness > 0 and self.rollout.engine.shares_trainer_gpus:
            raise ValueError(
                f"algorithm.max_staleness ({staleness}) samples while the trainer updates, but "
                "rollout.engine.colocated lets only one of them use the GPUs at a time. Set "
                "max_staleness=0, or run servers on separate GPUs"
            )

    def _check_external_agents(self) -> None:
        """Refuse settings that environments with an external agent do not support."""
        for name, source in self.tasks.sources.items():
            # This program sends its own messages and runs its own tools.
            if not environment_class(source.environment).uses_external_agent:
                continue

            if self.vocabulary == "tiny" and self.vocabulary_data is None:
                raise ValueError(
                    "vocabulary=tiny is made from texts that are known before the run, but the "
                    f"external agent of tasks.sources.{name} sends its own texts. Set vocabulary_data "
                    "to the conversations that the policy was fine-tuned on"
                )
            if self.rollout.purification is not None:
                raise ValueError(
                    "rollout.purification replays tool calls, but the external agent of "
                    f"tasks.sources.{name} runs its own tools. Set rollout.purification=null"
                )

    def _check_teachers(self) -> None:
        """Refuse sources without a teacher, unless they are meant to have none."""
        distillation = self.algorithm.distillation
        self._check_hints()
        if distillation is None:
            return

        unknown = sorted(distillation.teachers.keys() - self.tasks.sources.keys())
        if unknown:
            raise ValueError(
                f"{TEACHERS_KEY} names {', '.join(unknown)}, but tasks.sources has "
                f"{', '.join(self.tasks.sources)}. Correct the name"
            )

        for name in self._trained_sources:
            if distillation.of_source(name) is not None:
                continue
            if name not in distillation.teachers:
                raise ValueError(
                    f"algorithm.distillation: tasks.sources.{name} has no teacher. Set "
                    f"{TEACHER_KEY} or {TEACHERS_KEY}.{name}, which is null if the source learns "
                    "from rewards alone"
                )
            if self.algorithm.advantage.type == "none":
                raise ValueError(
                    f"{TEACHERS_KEY}.{name} is null, and advantage none ignores the rewards, so "
                    "nothing would be learned from this source. Set a teacher, another advantage, or "
                    f"tasks.sources.{name}.weight=0"
                )
        if not self.teachers:
            raise ValueError(
                f"{TEACHERS_KEY} is null for all sources. Set a teacher, or algorithm.distillation "
                "to null"
            )

    def _check_hints(self) -> None:
        """Refuse hints that no teacher would see."""
        distillation = self.algorithm.distillation
        for name, source in self.tasks.sources.items():
            if source.teacher_hint is None or source.weight == 0:
                continue
            key = f"tasks.sources.{name}.teacher_hint"
            if distillation is None or distillation.of_source(name) is None:
                raise ValueError(
                    f"{key} is for a teacher, but the source has none. Set algorithm.distillation, or "
                    "leave the hint out"
                )
            if environment_class(source.environment).uses_external_agent:
                raise ValueError(
                    f"{key} changes the prompt for the teacher, but an external agent writes the "
                    "prompts of this environment. Leave the hint out"
                )

    def _check_algorithm_needs(self) -> None:
        algorithm = self.algorithm
        rollout = self.rollout
        # Replay prescribes the experts of routers, which dense models do not have.
        if algorithm.routing_replay != "none" and self.model.num_experts == 0:
            raise ValueError(
                f"algorithm.routing_replay ({algorithm.routing_replay}): a "
                f"{self.model.model_type} model has no experts. Set it to none"
            )
        # Only the engine knows the experts that it chose while it sampled.
        if algorithm.routing_replay == "R3" and not rollout.routed_experts:
            raise ValueError(
                "algorithm.routing_replay=R3 needs the engine's routes. Set "
                "rollout.routed_experts=true"
            )

        # The penalty begins where the buffer does: at the longest response minus the buffer.
        longest = rollout.max_response_tokens
        if (
            algorithm.overlong_buffer_tokens is not None
            and algorithm.overlong_buffer_tokens >= longest
        ):
            raise ValueError(
                f"algorithm.overlong_buffer_tokens ({algorithm.overlong_buffer_tokens}) must be "
                f"less than the longest response ({longest}, the minimum of rollout.max_sampled_tokens, "
                "max_episode_tokens and max_turns x max_sampled_tokens_per_turn), because the length "
                "penalty would otherwise apply to every episode. Lower it"
            )

        steps = self.training.steps
        # The policy is not updated during the critic's warmup.
        if algorithm.critic and algorithm.critic.warmup_steps >= steps:
            raise ValueError(
                f"algorithm.critic.warmup_steps ({algorithm.critic.warmup_steps}) must be less "
                f"than training.steps ({steps}), because the policy would otherwise never be "
                "trained. Lower it"
            )


class SftConfig(RunConfig):
    """``gptoss sft``: supervised fine-tuning on conversations, or on generated demonstrations."""

    command: ClassVar[str] = "sft"

    data: DataConfig | None = None
    """Conversations to train on. null for demonstrations on ``tasks``."""
    demonstrations: DemonstrationConfig = DemonstrationConfig()
    """Mixture of demonstrations."""
    loss: AnySupervisedLoss = CrossEntropyLoss()
    """Loss: ``cross_entropy``, or ``distillation`` from a teacher. {type: NAME, ...}, or a plain
    NAME."""
    sequences_per_step: int = Field(64, gt=0)
    """Demonstrations (episodes), or samples of ``data``, per optimizer step."""
    load_balancing_loss: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Coefficient of a loss of every router that falls as the experts' loads become even (arXiv
    2101.03961). 0 for none, for example 0.01. The validation loss and ``loss`` do not contain it."""

    @model_validator(mode="after")
    def _record_few_conversations(self) -> Self:
        if "episodes" not in self.tracking.model_fields_set:
            self.tracking = self.tracking.model_copy(update={"episodes": SFT_EPISODES})
        return self

    @model_validator(mode="after")
    def _check_pass_rates(self) -> Self:
        """Refuse a selection that needs sampled episodes."""
        for name, source in self.tasks.sources.items():
            if source.pass_rate is not None and source.pass_rate.retry is not None:
                raise ValueError(
                    f"tasks.sources.{name}.pass_rate.retry measures the policy's episodes, but gptoss "
                    "sft samples none. Leave it out"
                )
        return self

    @property
    def load_balancing(self) -> float:
        """Value of ``load_balancing_loss``."""
        return self.load_balancing_loss

    @property
    def exports(self) -> bool:
        """True if the run ends with a Hugging Face checkpoint.

        Runs on conversations and runs with adapters do.
        """
        # Another run cannot start from a checkpoint of adapters, which has no base.
        return self.adapter is not None or self.data is not None

    @property
    def samples(self) -> bool:
        """True if validations sample turns of conversations."""
        return self.data is not None and self.data.sampled_conversations > 0

    @property
    def distillation(self) -> DistillationLoss | None:
        """Value of ``loss``, if it is distillation."""
        return self.loss if isinstance(self.loss, DistillationLoss) else None

    @property
    def trains_all_tokens(self) -> bool:
        """True if every token is in the loss."""
        return self.distillation is not None and self.distillation.all_tokens

    @property
    def vocabulary_conversations(self) -> CorpusConfig | None:
        """Conversations to train on."""
        return self.data

    @property
    def longest_sample(self) -> int:
        """Maximum tokens per sample of ``data``."""
        # The last token of a sequence is not an input, so a row can hold one token more.
        limit = min(self.training.max_tokens_per_micro_batch + 1, self.model.max_length)
        if self.data is None or self.data.max_tokens is None:
            return limit
        return self.data.max_tokens

    @property
    def memory_inputs(self) -> MemoryInputs:
        """Memory inputs with a teacher, for sequences of ``data``'s maximum length."""
        # ``super()`` assumes that a sample can fill a micro-batch.
        inputs = replace(super().memory_inputs, engine=self.engine_memory)
        if self.distillation is not None:
            inputs = replace(
                inputs, teachers=read_models(self.teachers), teacher_top_k=self.distillation.top_k
            )
        if self.data is None:
            return inputs
        # The last token of a sequence takes no position in a row.
        return replace(inputs, longest_sequence=min(self.longest_sample, inputs.tokens))

    @model_validator(mode="after")
    def _check_engine_of_validations(self) -> Self:
        if self.samples:
            self._check_unmerged_experts()
        return self

    @model_validator(mode="after")
    def _check_distillation(self) -> Self:
        if self.distillation is not None:
            _check_top_k("loss", self.distillation.top_k, self.model.vocab_size)
        return self

    @model_validator(mode="after")
    def _check_load_balancing(self) -> Self:
        if self.load_balancing_loss == 0:
            return self
        value = f"load_balancing_loss ({self.load_balancing_loss:g})"
        if self.model.num_experts == 0:
            raise ValueError(
                f"{value}: a {self.model.model_type} model has no experts. Leave it out"
            )
        # The loss would otherwise change other parts so that frozen routers choose evenly.
        if self.adapter is not None and "router" not in self.adapter.targets:
            raise ValueError(
                f"{value} needs trained routers. Add router to adapter.targets, or leave it out"
            )
        if "experts" in self.ablation.freeze:
            raise ValueError(
                f"{value} needs trained routers. Remove experts from ablation.freeze, or leave it "
                "out"
            )
        return self

    @model_validator(mode="after")
    def _check_data(self) -> Self:
        if self.data is None or self.data.max_tokens is None:
            return self
        row, longest = self.training.max_tokens_per_micro_batch, self.model.max_length
        if self.data.max_tokens > min(row + 1, longest):
            raise ValueError(
                f"data.max_tokens ({self.data.max_tokens}) exceeds "
                f"training.max_tokens_per_micro_batch ({row}) or model.max_length ({longest}), "
                "so the longest sample would not fit. Lower it"
            )
        return self


def _check_top_k(section: str, top_k: int, vocab_size: int) -> None:
    if top_k > vocab_size:
        raise ValueError(
            f"{section}.top_k ({top_k}) exceeds model.vocab_size ({vocab_size}). Lower it"
        )


def read_models(directories: Sequence[Path]) -> tuple[ModelConfig, ...]:
    """Return the architectures of those Hugging Face directories that have a ``config.json``."""
    models = (read_model(directory) for directory in directories)
    return tuple(model for model in models if model is not None)


def read_model(directory: Path) -> ModelConfig | None:
    """Return the architecture of a Hugging Face directory. None if it has no ``config.json``.

    Raises:
        ValueError: the file describes no supported model.
    """
    if not (directory / "config.json").exists():
        return None
    return read_hf_config(directory)


def check_reward_parts(config: RlConfig, parts: set[str]) -> None:
    """Raise ConfigError if the algorithm uses reward parts that no environment has.

    Args:
        config: configuration of the run.
        parts: reward parts of all environments.
    """
    # A misspelled part would weigh nothing, without an error.
    unknown = sorted(config.algorithm.used_reward_parts - parts)
    if unknown:
        key = "advantage.reward_weights" if config.algorithm.reward_weights else "shaping"
        raise ConfigError(
            f"algorithm.{key}: no environment of tasks.sources has the reward "
            f"part {', '.join(unknown)}. Known parts: {', '.join(sorted(parts))}. An environment "
            "declares its parts in end_truncated()"
        )
