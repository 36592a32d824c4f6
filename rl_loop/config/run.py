"""The whole configuration of a run: what YAML files in ``configs/`` say and ``gptoss`` commands override."""

from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from megatron_gptoss.config import ModelConfig, OptimizerConfig, ParallelConfig, StrictModel
from megatron_gptoss.planning.memory_inputs import MemoryInputs
from rl_loop.algorithms.config import GROUP_ADVANTAGES, AlgorithmConfig, refuse
from rl_loop.config.errors import ConfigError
from rl_loop.config.rollout import RolloutConfig
from rl_loop.config.tasks import TaskConfig
from rl_loop.config.training import AblationConfig, DemonstrationConfig, EvaluationConfig, TrainingConfig
from rl_loop.environments.base import RewardConfig
from rl_loop.harmony.codec import PromptConfig
from rl_loop.sandbox.config import SandboxConfig


class RunConfig(StrictModel):
    """What every run has."""

    command: ClassVar[str]
    """The ``gptoss`` command that runs it."""

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9._-]+$")
    """Name of the run; its directory is ``output_dir/name``."""
    output_dir: Path = Path("runs")
    """Where run directories are made."""
    seed: int = 0
    """Of everything random: initial weights, data order, sampling."""
    model: ModelConfig
    """The architecture; a string names a file of ``configs/model``."""
    initial_weights: Path | None = None
    """A Hugging Face directory, a Megatron checkpoint or a run directory to start from; null for random weights."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Precision of parameters and activations."""
    vocabulary: Literal["gptoss", "tiny"] = "gptoss"
    """``gptoss``: the 201,088 token ids of the released models. ``tiny``: those of them that generated tasks and their
    demonstrations need, and the Harmony special tokens; for models of a laptop."""
    prompt: PromptConfig = PromptConfig()
    """The Harmony system message."""
    tasks: TaskConfig = TaskConfig()
    """Training and held-out tasks."""
    parallel: ParallelConfig = ParallelConfig()
    """How the trainer is spread over ranks."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW."""
    training: TrainingConfig = TrainingConfig()
    """Length of the run."""
    rollout: RolloutConfig = RolloutConfig()
    """Episodes; of a supervised run only for its evaluation at the end."""
    sandbox: SandboxConfig = SandboxConfig()
    """Limits of model-written code."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """How ``gptoss eval`` measures."""
    reward: RewardConfig = RewardConfig()
    """What an episode earns."""

    ablation: AblationConfig = AblationConfig()
    """Faults on purpose."""

    @property
    def directory(self) -> Path:
        return self.output_dir / self.name

    @property
    def memory_inputs(self) -> MemoryInputs:
        """What ``megatron_gptoss.planning.memory`` predicts from."""
        row, longest = self.training.max_tokens_per_micro_batch, self.rollout.max_tokens
        return MemoryInputs(self.model, self.parallel, self.optimizer, row, longest_sequence=longest)

    @model_validator(mode="after")
    def _check_layout(self) -> Self:
        self.parallel.check_layout(self.model)
        rollout, ablation, row = self.rollout, self.ablation, self.training.max_tokens_per_micro_batch
        refuse({
            f"rollout.max_tokens ({rollout.max_tokens}) exceeds training.max_tokens_per_micro_batch ({row}): the "
            "longest episode would not fit a micro-batch": rollout.max_tokens > row,
            "ablation.engine_sinks and engine_noise need rollout.engine=transformers":
                rollout.engine == "sglang" and (not ablation.engine_sinks or ablation.engine_noise),
            f"rollout.purification scores at rollout.temperature ({rollout.temperature}), and SGLang scores "
            "at temperature 1 only: set rollout.temperature=1 or rollout.engine=transformers":
                rollout.purification and rollout.engine == "sglang" and rollout.temperature != 1,
            f"rollout.max_tokens ({rollout.max_tokens}) exceeds model.max_length ({self.model.max_length})":
                rollout.max_tokens > self.model.max_length,
        })  # fmt: skip
        return self


class RlConfig(RunConfig):
    """``gptoss rl``: on-policy reinforcement learning."""

    command: ClassVar[str] = "rl"

    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Advantages and the policy loss."""
    evaluate_every: int = Field(10, gt=0)
    """Steps between measurements of held-out accuracy; also before the first step and after the last."""
    canary_tolerance: float | None = Field(None, gt=0)
    """Largest mean |log-prob difference| between engine and trainer on a canary prompt after a sync, in nats. null:
    0.001 in float32, 0.02 in bfloat16. Stay above what ``gptoss doctor --engine`` shows of a good engine."""

    @property
    def memory_inputs(self) -> MemoryInputs:
        algorithm, rollout, inputs = self.algorithm, self.rollout, super().memory_inputs
        critic = [algorithm.critic.optimizer] if algorithm.critic else []
        engine = rollout.sglang.memory_fraction * (rollout.engine == "sglang" and rollout.sglang.colocated)
        return replace(
            inputs,
            auxiliary_models=[*critic, *([None] if algorithm.kl else [])],
            engine_share=engine,
            mini_batches=algorithm.mini_batches,
        ).with_sequences(rollout.tasks_per_step * rollout.samples_per_task)

    @model_validator(mode="after")
    def _check_groups(self) -> Self:
        algorithm, rollout, steps = self.algorithm, self.rollout, self.training.steps
        episodes = rollout.tasks_per_step * rollout.samples_per_task
        warmup_steps = algorithm.critic.warmup_steps if algorithm.critic else 0
        refuse({
            f"rollout.tasks_per_step x samples_per_task ({episodes}) gives fewer episodes than data-parallel ranks "
            f"x algorithm.mini_batches ({self.parallel.data} x {algorithm.mini_batches})":
                episodes < self.parallel.data * algorithm.mini_batches,
            f"algorithm.advantage {algorithm.advantage} compares the samples of a task, and rollout.samples_per_task "
            "is 1: use 2 or more, or advantage gae or reinforce":
                algorithm.advantage in GROUP_ADVANTAGES and rollout.samples_per_task == 1,
            f"algorithm.max_staleness {algorithm.max_staleness}: rollouts begin one step ahead of their training at "
            "most, so no token is ever older; use 1, or 0 to be strictly on-policy": algorithm.max_staleness > 1,
            "algorithm.max_staleness 1 generates while the trainer learns, and rollout.sglang.colocated gives its "
            "GPUs to one of them at a time: use 0, or servers on GPUs of their own":
                algorithm.max_staleness and rollout.engine == "sglang" and rollout.sglang.colocated,
            "algorithm.routing_replay R3 needs the engine's routes: set rollout.routed_experts":
                algorithm.routing_replay == "R3" and not rollout.routed_experts,
            f"algorithm.overlong_buffer ({algorithm.overlong_buffer}) must be below the longest response "
            f"({rollout.max_response_tokens}, the least of rollout.max_sampled_tokens, max_tokens and max_turns x "
            "max_new_tokens_per_turn), or every episode is punished for its length":
                (algorithm.overlong_buffer or 0) >= rollout.max_response_tokens,
            f"algorithm.critic.warmup_steps ({warmup_steps}) leaves none of the {steps} steps to the policy":
                warmup_steps >= steps,
        })  # fmt: skip
        return self


class SftConfig(RunConfig):
    """``gptoss sft``: supervised fine-tuning on generated demonstrations."""

    command: ClassVar[str] = "sft"

    demonstrations: DemonstrationConfig = DemonstrationConfig()
    """What the demonstrations are made of."""
    sequences_per_step: int = Field(64, gt=0)
    """Demonstrations (episodes) of one optimizer step."""


def check_reward_parts(config: RlConfig, parts: set[str]) -> None:
    """Raise ConfigError if gdpo is to weigh reward parts that no environment has. ``parts``: of all environments."""
    unknown = sorted(set(config.algorithm.reward_weights) - parts)
    if unknown:
        raise ConfigError(
            f"algorithm.reward_weights: no environment of tasks.sources has a reward part {', '.join(unknown)}; there "
            f"are {', '.join(sorted(parts))} (an environment's own are those that unfinished() returns)"
        )
