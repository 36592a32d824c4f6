"""Parts of a run's configuration for trainer ranks and rollout workers.

A part is a base class of ``RunConfig``. The ranks and workers get the whole object, but their code
uses only the type of the part.
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
from megatron_gptoss.config.precision import Precision
from megatron_gptoss.families.registry import AnyModelConfig
from megatron_gptoss.planning.memory_inputs import MemoryInputs
from rl_loop.algorithms.choices import DistillationLoss
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
    """Policy and output directory of a run."""

    # A path separator, or "-" or "." at the beginning, would be unsafe in the directory of the run.
    name: str = Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")
    """Name of the run. Its directory is ``output_dir/name``."""
    output_dir: Path = Path("runs")
    """Parent directory of run directories."""
    seed: int = 0
    """Seed of initial weights, data order and sampling."""
    model: AnyModelConfig
    """Model architecture. A string is a name in ``configs/model``, or the path of a Hugging Face
    directory or its ``config.json``."""
    initial_weights: Path | None = None
    """Weights to start from: a Hugging Face directory, a Megatron checkpoint or a run directory.
    null for random weights. With an adapter they are its frozen base."""

    @property
    def directory(self) -> Path:
        """Directory of the run."""
        return self.output_dir / self.name


class TrainerConfig(PolicyConfig):
    """Settings of the trainer: distribution over ranks, format of weights, and optimizer."""

    adapter: AdapterConfig | None = None
    """Low-rank adapters to train on frozen weights. null to train all weights."""
    initial_adapter: Path | None = None
    """Adapters to start from, for the base with which they were trained: the directory of a run,
    one of its checkpoints, or an adapter in PEFT's format. null for new adapters, which do not
    change the output."""
    quantization: Quantization | None = None
    """Format of the policy's experts. ``mxfp4``: experts are trained, sampled and exported in 4
    bits (docs/quantization.md). With ``adapter``, the frozen base is kept in MXFP4, with 1/4 of the
    memory, and its weights must have MXFP4 values. null: ``dtype``."""
    dtype: Precision = "bf16"
    """Precision of parameters and activations."""
    gpu_gb: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Total memory of one GPU in GB (1e9 bytes), for the memory plan. null for 150.1 (H200).
    Training ignores it. ``gptoss plan`` uses it without ``--gpu`` and ``--gpu-gb`` on a machine
    without a GPU. ``gptoss launch --dry-run`` uses it if the cluster file does not set
    ``gpu_gb``."""
    parallel: ParallelConfig = ParallelConfig()
    """Distribution of the trainer over ranks."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Settings of AdamW."""
    training: TrainingConfig = TrainingConfig()
    """Length of the run, micro-batches and checkpoints."""
    ablation: AblationConfig = AblationConfig()
    """Injected faults, for experiments."""

    @property
    def trained_quantization(self) -> Quantization | None:
        """Format to which experts are rounded in training. None with adapters."""
        # MXFP4 cannot represent the sum of a base and its adapters. An adapter is trained in
        # ``dtype``, and its base is frozen.
        return self.quantization if self.adapter is None else None

    @property
    def unmerged_adapter(self) -> AdapterConfig | None:
        """Value of ``adapter`` if experts are not merged with their adapters, else None."""
        is_unmerged = self.adapter is not None and not self.adapter.merge_experts
        return self.adapter if is_unmerged else None

    @property
    def objective(self) -> AlgorithmConfig:
        """Objective of updates. Supervised runs have the default, without additional models."""
        return AlgorithmConfig()

    @property
    def distillation(self) -> DistillationLoss | None:
        """Distillation as the loss of supervised fine-tuning. None for other losses."""
        return None

    @property
    def teacher_paths(self) -> dict[str, Path]:
        """Hugging Face directories of teachers by configuration key. Empty without distillation."""
        return {} if self.distillation is None else {"loss.teacher": self.distillation.teacher}

    @property
    def teachers(self) -> tuple[Path, ...]:
        """Directories of the teachers, each once. Other code refers to a teacher by its index."""
        return tuple(dict.fromkeys(self.teacher_paths.values()))

    @property
    def load_balancing(self) -> float:
        """Coefficient of the load-balancing loss. 0 for RL, whose objective has no such loss."""
        return 0.0

    @property
    def training_temperature(self) -> float:
        """Temperature of log-probs. 1 for supervised runs, which do not sample."""
        return 1.0

    @property
    def longest_episode(self) -> int:
        """Length of the longest episode in tokens. Dr. GRPO divides sums by it."""
        return self.memory_inputs.longest_sequence

    @property
    def memory_inputs(self) -> MemoryInputs:
        """Inputs of ``megatron_gptoss.planning.memory``."""
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
    """Rendering, sampling and rewards of episodes."""

    vocabulary: Literal["gptoss", "tokenizer", "tiny"] = "gptoss"
    """Set of token ids. ``gptoss``: the 201,088 ids of the released models, the default for models
    of this size. ``tokenizer``: the ids of the checkpoint's tokenizer, the default for other
    models. Its special tokens also select the chat format. ``tiny``: the released models' tokens
    that tasks and their demonstrations need, and the special tokens of the chat format,
    for small models."""
    tokenizer: Path | None = None
    """Source of vocabulary ``tokenizer``: a directory with tokenizer.json, or a run with an export.
    null: ``initial_weights``."""
    prompt: PromptConfig = PromptConfig()
    """Harmony system message. Empty by default with vocabulary ``tiny``."""
    chatml: ChatMlConfig = ChatMlConfig()
    """ChatML system message. None by default with vocabulary ``tiny``."""
    tasks: TaskConfig = TaskConfig()
    """Training and held-out tasks."""
    rollout: RolloutConfig = RolloutConfig()
    """Sampling of episodes. Supervised training ignores it. ``gptoss play`` uses it."""
    sandbox: SandboxConfig = SandboxConfig()
    """Limits for model-written code."""
    reward: RewardConfig = RewardConfig()
    """Rewards of an episode."""

    @property
    def tokenizer_source(self) -> Path | None:
        """Source of vocabulary ``tokenizer``."""
        return self.tokenizer or self.initial_weights

    @property
    def vocabulary_conversations(self) -> CorpusConfig | None:
        """Conversations from which a tiny vocabulary is built. None to build it from ``tasks``."""
        return None
