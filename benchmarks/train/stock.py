"""Megatron with its own layers, as Megatron-Bridge runs GPT-OSS, timed and compared with ours.

The settings are those of Megatron-Bridge's recipes of GPT-OSS in bf16:

- Transformer Engine's attention and grouped GEMMs, and Megatron's fused activation
- weight gradients that the GEMMs accumulate in fp32
- fused cross-entropy on whole logits
- a router in bf16

Packed rows need cuDNN 9.26. With an older one, Transformer Engine has no fused attention for packed
rows with sinks, and the result of a case may be the reason why it cannot run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams

from benchmarks.attention.chosen import chosen_attention
from benchmarks.train.release import release, release_module
from benchmarks.train.steps import TINY, VOCAB, measure_steps, random_samples, random_weights
from converters.model_weights import load_hf_weights
from converters.names import hf_shapes
from megatron_gptoss.config import ParallelConfig
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
from megatron_gptoss.model import build_model
from megatron_gptoss.named_random import named_generator
from megatron_gptoss.packing import PackedBatch, build_batch
from megatron_gptoss.planning.flops import forward_flops
from megatron_gptoss.scorer import LogProbScorer
from megatron_gptoss.transformer_settings import build_transformer_config

MAX_ERROR = 0.1
"""Largest error of log-probs in ``check_stock_case`` that is due to rounding to bf16.

Logits of two layers have errors of 0.023 with our layers and 0.028 with those of transformers
(docs/performance/training.md). Their difference is at most 0.05 with two layers and 0.1 with four.
"""


@dataclass(frozen=True)
class StockTrainer:
    """Megatron's model, data-parallel wrapper and optimizer."""

    module: GPTModel
    """The model."""
    model: list[Any]
    """The data-parallel wrapper of the model."""
    optimizer: Any
    """Megatron's optimizer with its defaults."""

    def step(
        self, rows: torch.Tensor, positions: torch.Tensor, packing: PackedSeqParams | None
    ) -> None:
        """Train one step on rows [micro-batches, 1, tokens]."""
        from megatron.core.distributed import finalize_model_grads

        (model,) = self.model
        model.zero_grad_buffer()
        self.optimizer.zero_grad()
        for i, row in enumerate(rows):
            # Gradients are reduced after the last micro-batch only.
            is_last = i == len(rows) - 1
            with contextlib.nullcontext() if is_last else model.no_sync():
                labels = row.roll(-1, 1)
                losses = model(row, positions, None, labels=labels, packed_seq_params=packing)
                losses.float().mean().backward()
        finalize_model_grads([model])
        self.optimizer.step()


def stock_case(args: argparse.Namespace, ceiling: float) -> dict[str, Any]:
    """Time training steps of stock Megatron. Unpacked rows have one sequence.

    ``attention`` of the result lists the kernels of all layers.

    Args:
        args: command line.
        ceiling: TFLOP/s of a matrix product, for MFU.
    """
    model_config = GptOssModelConfig(num_layers=args.layers, num_experts=args.experts)
    sequences = args.sequences if args.packed else 1
    ends = torch.arange(sequences + 1, device="cuda", dtype=torch.int32) * args.length
    packing = describe_row(ends, args.length) if args.packed else None
    shape = (args.micro_batches, 1, sequences * args.length)
    rows = torch.randint(0, VOCAB, shape, device="cuda")
    positions = torch.arange(args.length, device="cuda").repeat(sequences)[None]

    trainer = stock_trainer(args, model_config)
    kernels = record_attention(trainer.module)
    lengths = [args.length] * sequences * args.micro_batches
    flops = 3 * forward_flops(model_config, lengths)
    try:
        result = measure_steps(
            lambda: trainer.step(rows, positions, packing),
            args.steps,
            sum(lengths),
            flops,
            ceiling,
        )
    finally:
        release(trainer)
    return {**result, "attention": sorted(kernels), **attention_libraries()}


def attention_libraries() -> dict[str, Any]:
    """Return the kernels of Transformer Engine's last attention call and the version of cuDNN."""
    return {"last_attention": chosen_attention(), "cudnn": torch.backends.cudnn.version()}


def describe_row(ends: torch.Tensor, longest: int) -> PackedSeqParams:
    """Return Megatron's description of a packed row.

    Args:
        ends: int32 [sequences + 1], start of each sequence, and the number of tokens.
        longest: tokens of the longest sequence.
    """
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def measure_or_explain(
    measure: Callable[[argparse.Namespace, float], dict[str, Any]],
    args: argparse.Namespace,
    ceiling: float,
) -> dict[str, Any]:
    """Return the result of ``measure``, or the reason why it cannot run.

    With several ranks, errors are raised, because other ranks may wait for the failed one.

    Args:
        measure: function of a case.
        args: command line.
        ceiling: TFLOP/s of a matrix product, for MFU.
    """
    try:
        return measure(args, ceiling)
    except torch.cuda.OutOfMemoryError as error:
        if dist.get_world_size() > 1:
            raise
        reason = f"out of memory: {first_line(error)}"
    except (ValueError, RuntimeError, AssertionError) as error:
        if dist.get_world_size() > 1:
            raise
        reason = f"{type(error).__name__}: {first_line(error)}"
    return {
        "failed": reason,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
        **attention_libraries(),
    }


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return (str(error).splitlines() or [""])[0]


def stock_trainer(args: argparse.Namespace, model_config: GptOssModelConfig) -> StockTrainer:
    """Return Megatron's trainer with random weights."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    module = stock_module(args, model_config)
    random_weights(module)
    for layer in module.modules():
        if hasattr(layer, "fuse_wgrad_accumulation"):
            # The option of the configuration would also require Apex for the output layer.
            layer.fuse_wgrad_accumulation = True

    reduction = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        grad_reduce_in_fp32=True,
    )
    model = DistributedDataParallel(module.config, reduction, module)
    settings = OptimizerConfig(
        optimizer="adam",
        lr=1e-5,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
    )
    return StockTrainer(module, [model], get_megatron_optimizer(settings, [model]))


def stock_module(args: argparse.Namespace, model_config: GptOssModelConfig) -> GPTModel:
    """Return Megatron's model in bf16 with uninitialized weights."""
    settings = {
        "activation_func": quick_gelu,
        "bias_activation_fusion": True,
        "cross_entropy_loss_fusion": True,
        "moe_router_dtype": None,
        "calculate_per_token_loss": False,
        "moe_router_force_load_balancing": args.balanced,
        "perform_initialization": False,
    }
    config = build_transformer_config(
        model_config,
        ParallelConfig(world_size=dist.get_world_size(), expert=args.expert),
        torch.bfloat16,
        **(settings | json.loads(args.config)),
    )
    yarn = {
        "position_embedding_type": "yarn",
        "yarn_rotary_scaling_factor": 32.0,
        "yarn_original_max_position_embeddings": 4096,
        "yarn_beta_fast": 32.0,
        "yarn_beta_slow": 1.0,
        "yarn_mscale": None,
        "yarn_mscale_all_dim": None,
        "yarn_correction_range_round_to_int": False,
    }
    # GPTModel reads these values from the configuration, which does not declare them.
    for name, value in yarn.items():
        setattr(config, name, value)

    module = GPTModel(
        config,
        layer_spec(config),
        vocab_size=model_config.vocab_size,
        max_sequence_length=args.length,
        position_embedding_type="yarn",
        rotary_base=150_000,
        parallel_output=False,
    )
    return module.to("cuda" if torch.cuda.is_available() else "cpu", torch.bfloat16)


def layer_spec(config: Any) -> Any:
    """Return the specification of Megatron's layers with Transformer Engine."""
    return get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=True,
    )


# ---- comparison with our model


def check_stock_case(args: argparse.Namespace, ceiling: float) -> dict[str, Any]:
    """Compare the log-probs of stock Megatron with ours, for equal weights and one row.

    The row has sequences of different lengths. Every token uses all experts, because different
    routes would hide other errors. Errors are those of ``relative_error``.

    Args:
        args: command line. ``--packed`` is implied.
        ceiling: unused.

    Returns:
        Mean loss and error of stock Megatron with the packed row, and with one row per sequence.
        ``wrong_boundaries_error`` is a control: the error if the row is one sequence. ``equal`` is
        True if both errors are at most MAX_ERROR and the control is larger. ``attention`` lists the
        kernels of all layers with the packed row.
    """
    if args.sequences < 2:
        raise ValueError("--sequences must be at least 2, because one sequence has no boundary")
    sizes = TINY if args.tiny else {}
    model_config = GptOssModelConfig(
        num_layers=args.layers,
        num_experts=args.experts,
        experts_per_token=args.experts,
        **sizes,
    )
    batch = uneven_row(args.sequences, args.length, model_config.vocab_size)
    tensor = check_weights(model_config, seed=1)

    ours = build_model(model_config, ParallelConfig(), torch.bfloat16)
    load_hf_weights(ours, model_config, tensor)
    is_label = batch.loss_mask.bool()
    expected = LogProbScorer(ours).score([batch])[0].cpu()[is_label]
    release_module(ours)

    stock = stock_module(args, model_config)
    load_hf_weights(stock, model_config, tensor)
    kernels = record_attention(stock)
    sequences = batch.cu_seqlens.tolist()
    result: dict[str, Any] = {"tokens": len(expected), "loss": float(-expected.mean())}
    ways = {
        "packed": lambda: packed_log_probs(stock, batch),
        "unpacked": lambda: unpacked_log_probs(stock, batch, sequences),
        "wrong_boundaries": lambda: unpacked_log_probs(stock, batch, [0, batch.tokens]),
    }
    try:
        for name, log_probs in ways.items():
            found = log_probs().cpu()[is_label]
            result[f"{name}_loss"] = float(-found.mean())
            result[f"{name}_error"] = relative_error(found, expected)
            if name == "packed":
                result["attention"] = sorted(kernels)
    finally:
        release_module(stock)
    return {**result, "equal": is_equal(result), "cudnn": torch.backends.cudnn.version()}


def is_equal(errors: dict[str, Any]) -> bool:
    """Return True if the errors of ``check_stock_case`` are rounding, and wrong rows would differ."""
    largest = max(errors["packed_error"], errors["unpacked_error"])
    return bool(largest <= MAX_ERROR < errors["wrong_boundaries_error"])


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the RMS of the difference, relative to the standard deviation of ``expected``."""
    difference = (found.double() - expected.double()).square().mean().sqrt()
    return float(difference / expected.double().std(correction=0))


def uneven_row(sequences: int, length: int, vocabulary: int) -> PackedBatch:
    """Return a packed row of random sequences, from ``length`` down to about half of it."""
    lengths = [length * (2 * sequences - i) // (2 * sequences) for i in range(sequences)]
    return build_batch(random_samples(lengths, seed=0, vocabulary=vocabulary), align=8)


def check_weights(model_config: GptOssModelConfig, seed: int) -> Callable[[str], torch.Tensor]:
    """Return a function from Hugging Face name to a random fp32 tensor.

    Biases and sinks differ from 0, so that an implementation without them has other log-probs.
    """
    shapes = hf_shapes(model_config)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def draw(name: str) -> torch.Tensor:
        if "norm" in name:
            return torch.ones(shapes[name], device=device)
        # Products with weights of this size keep the variance of a normalized input.
        std = model_config.hidden_size**-0.5
        if name.endswith(("sinks", "bias")):
            std = 1.0 if name.endswith("sinks") else 0.1
        generator = torch.Generator(device).manual_seed(named_generator(seed, name).initial_seed())
        return std * torch.randn(shapes[name], generator=generator, device=device)

    return draw


def record_attention(stock: GPTModel) -> set[str | None]:
    """Return a set that receives the kernels of every attention call."""
    kernels: set[str | None] = set()
    for layer in stock.decoder.layers:
        layer.self_attention.core_attention.register_forward_hook(
            lambda *_: kernels.add(chosen_attention())
        )
    return kernels


def packed_log_probs(stock: GPTModel, batch: PackedBatch) -> torch.Tensor:
    """Return log p(labels), fp32 [tokens], of a packed row."""
    ends = batch.cu_seqlens.to(next(stock.parameters()).device)
    return stock_log_probs(stock, batch, slice(None), describe_row(ends, batch.max_seqlen))


def unpacked_log_probs(stock: GPTModel, batch: PackedBatch, ends: list[int]) -> torch.Tensor:
    """Return log p(labels), fp32 [tokens], of the parts of a row, each as one sequence.

    Args:
        stock: Megatron's model.
        batch: the row.
        ends: start of each part, and the number of tokens.
    """
    parts = [slice(start, end) for start, end in pairwise(ends)]
    return torch.cat([stock_log_probs(stock, batch, part, None) for part in parts])


@torch.no_grad()
def stock_log_probs(
    stock: GPTModel, batch: PackedBatch, part: slice, packing: PackedSeqParams | None
) -> torch.Tensor:
    """Return log p(labels), fp32 [tokens], of a part of a row."""
    device = next(stock.parameters()).device
    columns = (batch.token_ids, batch.position_ids, batch.labels)
    tokens, positions, labels = (column[None, part].to(device) for column in columns)
    losses = stock(tokens, positions, None, labels=labels, packed_seq_params=packing)
    return -losses[0].float()
