"""Independent reference: transformers' GptOssForCausalLM on the same weights, per document."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.models.gpt_oss import modeling_gpt_oss

from converters.model_weights import export_hf_weights
from megatron_gptoss.checkpoint.writer import CheckpointWriter
from megatron_gptoss.config import ModelConfig, ParallelConfig
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
from megatron_gptoss.packing import PackedBatch, pack
from megatron_gptoss.samples import TrainingSamples
from megatron_gptoss.scorer import alignment
from megatron_gptoss.step_results import LossFunction, LossOutput
from megatron_gptoss.trainer import PolicyTrainer

# hidden != intermediate, more key/value heads than ranks of any test, and a window that is shorter
# than the documents.
TINY = GptOssModelConfig(
    num_layers=4,
    num_experts=8,
    experts_per_token=4,
    hidden_size=64,
    intermediate_size=48,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_size=16,
    vocab_size=128,
    sliding_window=8,
)


def hf_model(
    config: GptOssModelConfig = TINY, std: float = 0.2, seed: int = 0
) -> GptOssForCausalLM:
    """Return an fp32 model with eager attention and all parameters random, sinks included."""
    torch.manual_seed(seed)
    model = (
        GptOssForCausalLM(GptOssConfig(**config.to_hf_config(), attn_implementation="eager"))
        .float()
        .eval()
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0, std)
            if "norm" in name:
                parameter.add_(1.0)
    return model


def documents(lengths: list[int], vocab_size: int = 128, seed: int = 1) -> TrainingSamples:
    """Return random samples. All tokens but the first are in the loss."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for n in lengths:
        token_ids = torch.randint(0, vocab_size, (n,), generator=generator)
        samples.append({"token_ids": token_ids.numpy(), "loss_mask": [0] + [1] * (n - 1)})
    return TrainingSamples.join(samples)


def local_batches(
    samples: TrainingSamples, max_tokens: int, parallel: ParallelConfig
) -> list[PackedBatch]:
    """Pack for all data-parallel ranks, and return this rank's micro-batches."""
    per_rank = pack(
        samples, max_tokens, parallel.data, alignment(), multiple=parallel.micro_batch_multiple
    )
    return per_rank[parallel_state.get_data_parallel_rank()]


def unpack(values: torch.Tensor, batch: PackedBatch) -> dict[int, np.ndarray]:
    """Split per-token values [T] or [T, ...] by sequence.

    Returns:
        {sample id: array with one entry per token of the sequence}. The entry of the first token,
        which is not predicted, is 0.
    """
    array = values.cpu().numpy()
    per_sample = {}
    for start, end in pairwise(batch.cu_seqlens.tolist()):
        sample_id = int(batch.sample_ids[start])
        if sample_id >= 0:
            nothing = np.zeros((1, *array.shape[1:]), array.dtype)
            per_sample[sample_id] = np.concatenate([nothing, array[start:end]])
    return per_sample


def hf_logits(model: GptOssForCausalLM, samples: TrainingSamples) -> torch.Tensor:
    """Return the logits [tokens, vocab_size] of all samples, each computed separately."""
    inputs = [torch.tensor(row[None, :-1]).long() for row in samples.rows("token_ids")]
    return torch.cat([model(row).logits[0] for row in inputs])


def hf_loss(model: GptOssForCausalLM, samples: TrainingSamples) -> torch.Tensor:
    """Return the mean cross-entropy over all labels."""
    labels = torch.cat([torch.tensor(row[1:]).long() for row in samples.rows("token_ids")])
    return torch.nn.functional.cross_entropy(hf_logits(model, samples), labels)


def mean_cross_entropy(tokens: int) -> LossFunction:
    """Return the same loss for the trainer."""

    def loss(log_probs: torch.Tensor, entropy: torch.Tensor, batch: object) -> LossOutput:
        total = -torch.where(batch.loss_mask, log_probs, 0.0).sum()
        return LossOutput(total / tokens, {"loss": total / tokens})

    return loss


@contextlib.contextmanager
def hf_norms_in_full_precision() -> Iterator[None]:
    """Compute RMSNorm in fp64 for fp64 comparisons. transformers always uses fp32."""
    original = modeling_gpt_oss.GptOssRMSNorm.forward

    def forward(self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (
            x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        )

    modeling_gpt_oss.GptOssRMSNorm.forward = forward
    try:
        yield
    finally:
        modeling_gpt_oss.GptOssRMSNorm.forward = original


@contextlib.contextmanager
def float64_training() -> Iterator[None]:
    """Let Megatron clip float64 gradients, whose type it rejects."""
    original = torch.Tensor.type

    def named_as_fp32(self: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        name = original(self, *arguments, **options)
        return "torch.cuda.FloatTensor" if name == "torch.DoubleTensor" else name

    torch.Tensor.type = named_as_fp32  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.Tensor.type = original  # type: ignore[method-assign]


def save_checkpoint(
    root: Path, trainer: PolicyTrainer, step: int, state: dict[str, Any], keep: int = 2
) -> Path:
    """Start a checkpoint and wait for it."""
    writer = CheckpointWriter(root, keep)
    path = writer.start(trainer, step, state)
    writer.finish()
    return path


def gradients(trainer: PolicyTrainer, config: ModelConfig) -> dict[str, torch.Tensor]:
    """Return the gradients of the last step by Hugging Face name, on rank 0. Collective."""
    weights = [parameter.data for parameter in trainer.module.parameters()]
    for parameter in trainer.module.parameters():
        parameter.data = parameter.main_grad
    exported = {name: tensor.clone() for name, tensor in export_hf_weights(trainer.module, config)}
    for parameter, weight in zip(trainer.module.parameters(), weights, strict=True):
        parameter.data = weight
    return exported
