"""The sections of a configuration that the trainer's ranks need."""

from dataclasses import dataclass
from pathlib import Path

from megatron_gptoss.config import (
    AdapterConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    Quantization,
)
from megatron_gptoss.planning.memory_inputs import MemoryInputs
from rl_loop.algorithms.config import AlgorithmConfig
from rl_loop.config.training import AblationConfig, TrainingConfig


@dataclass(frozen=True)
class TrainerSettings:
    """What the policy is, how it is spread over ranks, and how it learns. Sent to every rank."""

    model: ModelConfig
    """The architecture."""
    parallel: ParallelConfig
    """How it is spread over ranks."""
    dtype: str
    """``float32`` or ``bfloat16``."""
    seed: int
    """Of random initial weights."""
    initial_weights: Path | None
    """Hugging Face directory, Megatron checkpoint or run directory to start from;
    None for random weights."""
    adapter: AdapterConfig | None
    """What is trained, on the initial weights as a frozen base; None to train all weights."""
    initial_adapter: Path | None
    """Run directory, checkpoint of adapters or PEFT directory to start from; None for fresh
    adapters."""
    quantization: Quantization | None
    """What the experts are trained through; None for their weights as they are."""
    optimizer: OptimizerConfig
    """AdamW of the policy."""
    algorithm: AlgorithmConfig
    """Which models there are besides the policy. Supervised fine-tuning has the
    default, which needs none."""
    training: TrainingConfig
    """Length of the run, size of micro-batches, checkpoints."""
    temperature: float
    """Sampling temperature, at which log-probs are computed. 1 for supervised fine-tuning."""
    max_episode_tokens: int
    """The longest episode; Dr. GRPO divides sums by it."""
    ablation: AblationConfig
    """Faults on purpose in the model."""
    directory: Path
    """Of the run."""
    memory_inputs: MemoryInputs
    """What an out-of-memory error is explained with."""
