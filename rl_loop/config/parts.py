"""Parts of a run's configuration: what trainer ranks and rollout workers know of it.

A part is a base class of ``RunConfig``. The ranks and workers get the whole object, and their code
knows only the type of the part.
"""

from pathlib import Path
from typing import Literal

from pydantic import Field

from megatron_gptoss.config import (
    AdapterConfig,
    OptimizerConfig,
    ParallelConfig,
    Quantization,
    StrictModel,
)
from megatron_gptoss.families.registry import AnyModelConfig
from megatron_gptoss.planning.memory_inputs import MemoryInputs
from rl_loop.algorithms.config import AlgorithmConfig
from rl_loop.chatml.prompt_config import ChatMlConfig
from rl_loop.config.rollout import RolloutConfig
from rl_loop.config.tasks import TaskConfig
from rl_loop.config.training import AblationConfig, TrainingConfig
from rl_loop.conversations.config import CorpusConfig
from rl_loop.environments.base import RewardConfig
from rl_loop.harmony.codec import PromptConfig
from rl_loop.sandbox.config import SandboxConfig


class PolicyConfig(StrictModel):
    """The policy, and where its run writes."""

    name: str = Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")
    """Name of the run; its directory is ``output_dir/name``."""
    output_dir: Path = Path("runs")
    """Where run directories are made."""
    seed: int = 0
    """Seed of everything random: initial weights, data order, sampling."""
    model: AnyModelConfig
    """The architecture. A string is a name in ``configs/model``, or the path of a Hugging Face
    directory or its ``config.json``."""
    initial_weights: Path | None = None
    """A Hugging Face directory, a Megatron checkpoint or a run directory to start from;
    null for random weights. With an adapter they are its base, and stay as they are."""

    @property
    def directory(self) -> Path:
        """The directory of the run."""
        return self.output_dir / self.name


class TrainerConfig(PolicyConfig):
    """How the policy is spread over ranks, and how it learns."""

    adapter: AdapterConfig | None = None
    """Low-rank adapters to train on frozen weights; null to train all weights."""
    initial_adapter: Path | None = None
    """Adapters to start from, on the base that they were trained on: the directory of a run, one of
    its checkpoints, or an adapter in PEFT's format; null for fresh ones, which change nothing."""
    quantization: Quantization | None = None
    """Format of the policy's experts. ``mxfp4``: four bits, which are trained, sampled and exported
    (docs/quantization.md). With ``adapter`` the frozen base is held in MXFP4, in a quarter of the
    memory, and its weights must have MXFP4 values. null: ``dtype``."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Precision of parameters and activations."""
    parallel: ParallelConfig = ParallelConfig()
    """How the trainer is spread over ranks."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Settings of AdamW."""
    training: TrainingConfig = TrainingConfig()
    """Length of the run, micro-batches and checkpoints."""
    ablation: AblationConfig = AblationConfig()
    """Injected faults, for experiments."""

    @property
    def trained_quantization(self) -> Quantization | None:
        """Format that experts are trained through. None with adapters: the sum of a base and its
        adapters has no MXFP4 values."""
        return self.quantization if self.adapter is None else None

    @property
    def objective(self) -> AlgorithmConfig:
        """Objective of updates. Supervised runs have the default, which needs no other model."""
        return AlgorithmConfig()

    @property
    def training_temperature(self) -> float:
        """Temperature at which log-probs are computed; 1 for supervised runs, which sample nothing."""
        return 1.0

    @property
    def longest_episode(self) -> int:
        """Tokens of the longest episode; Dr. GRPO divides sums by it."""
        return self.memory_inputs.longest_sequence

    @property
    def memory_inputs(self) -> MemoryInputs:
        """Input of ``megatron_gptoss.planning.memory``."""
        return MemoryInputs(
            self.model,
            self.parallel,
            self.optimizer,
            self.training.max_tokens_per_micro_batch,
            adapter=self.adapter,
            frozen=self.ablation.freeze,
            quantization=self.quantization,
            longest_sequence=self.training.max_tokens_per_micro_batch,
        )


class EpisodesConfig(PolicyConfig):
    """How episodes are rendered, played and rewarded."""

    vocabulary: Literal["gptoss", "tokenizer", "tiny"] = "gptoss"
    """``gptoss``: the 201,088 token ids of the released models. ``tokenizer``: those of the
    tokenizer that a dense model comes with, for which it is the default. ``tiny``: the tokens of the
    released models that generated tasks and their demonstrations need, and the special tokens of the
    chat format; for models of a laptop."""
    tokenizer: Path | None = None
    """Where vocabulary ``tokenizer`` is: a directory with tokenizer.json, or a run with an export.
    null: in ``initial_weights``."""
    prompt: PromptConfig = PromptConfig()
    """The Harmony system message. Vocabulary ``tiny`` has an empty one by default."""
    chatml: ChatMlConfig = ChatMlConfig()
    """The ChatML system message, of dense models. Vocabulary ``tiny`` has none by default."""
    tasks: TaskConfig = TaskConfig()
    """Training and held-out tasks."""
    rollout: RolloutConfig = RolloutConfig()
    """Episodes. Without effect on a supervised run, which samples none."""
    sandbox: SandboxConfig = SandboxConfig()
    """Limits of model-written code."""
    reward: RewardConfig = RewardConfig()
    """Rewards of an episode."""

    @property
    def tokenizer_source(self) -> Path | None:
        """Where vocabulary ``tokenizer`` is looked for."""
        return self.tokenizer or self.initial_weights

    @property
    def vocabulary_conversations(self) -> CorpusConfig | None:
        """Conversations that a tiny vocabulary is made for; None to make it for ``tasks``."""
        return None
