"""Predicted memory and step time of adapters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch

from megatron_gptoss.config import (
    AdapterConfig,
    AdapterTarget,
    OptimizerConfig,
    ParallelConfig,
    Quantization,
)
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
from megatron_gptoss.layers.adapters import LowRank, named_adapters
from megatron_gptoss.model import build_model
from megatron_gptoss.planning.activation_memory import activation_bytes
from megatron_gptoss.planning.flops import forward_flops, training_flops
from megatron_gptoss.planning.memory import predict_stage_memory, predict_update_memory
from megatron_gptoss.planning.memory_advice import (
    Hardware,
    layouts_that_fit,
    memory_plan,
    smaller_settings,
)
from megatron_gptoss.planning.memory_inputs import MemoryInputs
from megatron_gptoss.planning.parameter_counts import adapter_parameters_per_gpu
from megatron_gptoss.planning.state_memory import merged_weight_bytes
from megatron_gptoss.planning.step_time import (
    MEMORY_BANDWIDTH,
    MERGE_RATE,
    StepTime,
    predict_step,
)
from tests.support.megatron_gptoss.adapted import MODEL

pytestmark = pytest.mark.usefixtures("process_groups")


GPT_OSS_20B = GptOssModelConfig(num_layers=24, num_experts=32)
GPT_OSS_120B = GptOssModelConfig(num_layers=36, num_experts=128)
ADAPTER = AdapterConfig(rank=32, alpha=32)
H200 = 150.1
EVERY_TARGET = get_args(AdapterTarget)


def build_inputs(model: GptOssModelConfig, **parallel: Any) -> MemoryInputs:
    layout = ParallelConfig(**parallel)
    return MemoryInputs(
        model, layout, OptimizerConfig(), 16_384, adapter=ADAPTER, quantization="mxfp4"
    )


@pytest.mark.parametrize(
    "targets", [*((target,) for target in EVERY_TARGET), EVERY_TARGET], ids=",".join
)
def test_planned_adapter_parameters_equal_the_model(targets: Any) -> None:
    adapter = AdapterConfig(rank=8, alpha=16, targets=targets)
    model = build_model(MODEL, ParallelConfig(), adapter=adapter)
    counted = sum(each.a.numel() + each.b.numel() for _, each in named_adapters(model))
    assert adapter.num_parameters(MODEL) == counted
    assert sum(adapter_parameters_per_gpu(MODEL, ParallelConfig(), adapter)) == counted


@pytest.mark.parametrize(("target", "split"), [("q", 0), ("k", 0), ("o", 1), ("router", None)])
def test_tensor_parallel_ranks_share_one_factor(target: Any, split: int | None) -> None:
    hidden = MODEL.hidden_size
    shapes = {
        "q": (MODEL.query_size, hidden),
        "k": (MODEL.key_size, hidden),
        "o": (hidden, MODEL.query_size),
        "router": (MODEL.num_experts, hidden),
    }
    factors = LowRank(*shapes[target], 8, 16, torch.float32, split=split, tensor_parallel_size=2)
    dense, expert = AdapterConfig(rank=8, targets=(target,)).layer_parameters(MODEL, tensor=2)
    assert dense == factors.a.numel() + factors.b.numel()
    assert expert == 0


@pytest.mark.parametrize(("model", "gigabytes"), [(GPT_OSS_20B, 13.76), (GPT_OSS_120B, 65.25)])
def test_frozen_mxfp4_base_has_size_of_released_weights(
    model: GptOssModelConfig, gigabytes: float
) -> None:
    inputs = build_inputs(model)
    adapters = ADAPTER.num_parameters(model)
    others = 2 * adapters + merged_weight_bytes(model, inputs.parallel)
    assert (predict_update_memory(inputs).weights - others) / 1e9 == pytest.approx(
        gigabytes, abs=0.01
    )

    dense = replace(inputs, quantization=None)
    all_bf16 = {GPT_OSS_20B.num_layers: 41.83, GPT_OSS_120B.num_layers: 233.66}
    expected = all_bf16[model.num_layers]
    assert (predict_update_memory(dense).weights - others) / 1e9 == pytest.approx(
        expected, abs=0.01
    )


def test_unmerged_experts_need_memory_for_a_copied_matrix() -> None:
    merged = build_inputs(GPT_OSS_20B)
    adapter = AdapterConfig(targets=("experts",), merge_experts=False)
    unmerged = replace(merged, adapter=adapter)
    merged = replace(merged, adapter=AdapterConfig(targets=("experts",)))
    more = predict_update_memory(unmerged).weights - predict_update_memory(merged).weights
    assert more == pytest.approx(2 * 32 * 5760 * 2880)


def test_only_adapters_have_gradients_and_optimizer_state() -> None:
    inputs = build_inputs(GPT_OSS_20B)
    adapters = ADAPTER.num_parameters(GPT_OSS_20B)
    memory = predict_update_memory(inputs)
    assert memory.gradients == 4 * adapters
    assert memory.optimizer == 10 * adapters  # 2 bytes of the master weight, two moments

    start = predict_stage_memory(inputs, H200).phase("start").trainer
    not_yet = merged_weight_bytes(GPT_OSS_20B, inputs.parallel)  # nothing is merged at the start
    assert start == memory.weights - not_yet + memory.gradients + 2 * adapters
    saved = predict_stage_memory(inputs, H200).phase("checkpoint").trainer - memory.persistent
    # A bucket of gathered state. A factor of all experts of a layer, the largest parameter, fills
    # it.
    assert saved == 2 * 4 * (40_000_000 + 32 * 8 * 5760)


def test_expert_parallel_ranks_share_experts_and_their_adapters() -> None:
    one = predict_update_memory(build_inputs(GPT_OSS_120B))
    four = predict_update_memory(build_inputs(GPT_OSS_120B, world_size=4, expert=4))
    # Experts and their biases are sharded. Attention, routers and vocabulary are not.
    base = (60.91 + 0.08) / 4 + 4.25
    assert four.weights / 1e9 == pytest.approx(base + 1.59 + 0.31, abs=0.02)
    assert one.gradients / four.gradients == pytest.approx(3.5, abs=0.1)


def test_critic_has_a_separate_base() -> None:
    alone = build_inputs(GPT_OSS_20B)
    critic = replace(alone, auxiliary_models=[OptimizerConfig()])
    vocabulary = 201_088 * 2880
    added = predict_update_memory(critic).weights - predict_update_memory(alone).weights
    buffer = merged_weight_bytes(GPT_OSS_20B, alone.parallel)
    assert added == predict_update_memory(alone).weights - buffer - 2 * vocabulary
    assert predict_update_memory(critic).optimizer == 2 * predict_update_memory(alone).optimizer


def test_plan_names_trained_parts_and_offers_mxfp4_if_frozen() -> None:
    inputs = replace(build_inputs(GPT_OSS_20B), quantization=None)
    plan = memory_plan(inputs, Hardware(H200))
    assert ", adapters of rank 32 on a base in bf16:" in plan.splitlines()[1]

    def offered(of: MemoryInputs) -> list[str]:
        return [override for override, _ in smaller_settings(of, H200)]

    assert "quantization=mxfp4" in offered(inputs)
    assert "quantization=mxfp4" not in offered(replace(inputs, adapter=None))
    assert "quantization=mxfp4" not in offered(build_inputs(GPT_OSS_20B))


@pytest.mark.parametrize(
    ("model", "gpus", "gigabytes"),
    [
        (GPT_OSS_20B, 1, H200),
        (GPT_OSS_20B, 1, 75.0),
        (GPT_OSS_120B, 4, H200),
        (GPT_OSS_120B, 8, 75.0),
    ],
)
def test_adapters_fit_where_full_training_does_not(
    model: GptOssModelConfig, gpus: int, gigabytes: float
) -> None:
    inputs = build_inputs(model, world_size=gpus, recompute=("moe",))
    layouts = [layout for layout, _ in layouts_that_fit(inputs, gigabytes)]
    assert ParallelConfig(world_size=gpus, expert=gpus, recompute=("moe",)) in layouts
    full = replace(inputs, adapter=None, parallel=ParallelConfig(world_size=gpus))
    assert not layouts_that_fit(full, gigabytes)


def test_frozen_weights_need_one_gemm_in_the_backward_pass() -> None:
    lengths = [4096] * 4
    forward = forward_flops(GPT_OSS_20B, lengths)
    assert training_flops(GPT_OSS_20B, lengths) == 3 * forward

    frozen = training_flops(GPT_OSS_20B, lengths, frozen_base=True)
    pairs = 12 * (4096 * 4097 // 2) + 12 * (128 * 129 // 2 + (4096 - 128) * 128)
    assert frozen == 2 * forward + 4 * GPT_OSS_20B.query_size * pairs * 4


MICRO_BATCH = [4096] * 4


def predicted_step(
    quantization: Quantization | None = "mxfp4",
    adapter: AdapterConfig | None = ADAPTER,
    layers: int = 24,
    recompute: tuple[str, ...] = ("moe_act", "layernorm"),
) -> StepTime:
    parallel = ParallelConfig(recompute=recompute)
    model = GptOssModelConfig(num_layers=layers, num_experts=32)
    return predict_step(
        model,
        parallel,
        OptimizerConfig(),
        MICRO_BATCH,
        1,
        adapter=adapter,
        quantization=quantization,
    )


# docs/performance/adapters.md, "Merge kernel": gate_up and down of a layer
@pytest.mark.parametrize(
    ("quantization", "expert_rank", "milliseconds"),
    [
        ("mxfp4", 8, 0.828 + 0.462),
        (None, 8, 0.754 + 0.438),
        ("mxfp4", 32, 1.550 + 0.851),
        (None, 32, 1.492 + 0.827),
    ],
)
def test_merge_time_prediction_is_within_8_percent(
    quantization: Quantization | None, expert_rank: int, milliseconds: float
) -> None:
    adapter = AdapterConfig(rank=32, expert_rank=expert_rank, targets=("experts",))
    # a layer merges in the forward and again in the backward pass
    measured = 2 * milliseconds / 1000
    step = predicted_step(quantization, adapter, layers=1)
    assert step.merging == pytest.approx(measured, rel=0.08)


def test_merge_time_is_linear_in_adapter_rank() -> None:
    merging = {
        rank: predicted_step(adapter=AdapterConfig(rank=rank, targets=("experts",))).merging
        for rank in (32, 64, 128)
    }
    assert AdapterConfig(rank=32).rank_of_experts(GPT_OSS_20B) == 8
    values = 24 * 32 * 3 * 2880 * 2880
    assert merging[64] - merging[32] == pytest.approx(2 * values * 8 / MERGE_RATE)
    assert merging[128] - merging[64] == pytest.approx(2 * values * 16 / MERGE_RATE)

    # without adapters for experts, their base is still dequantized
    dequantising = predicted_step(adapter=AdapterConfig(targets=("o",))).merging
    assert 0 < dequantising < merging[32]
    dense = predicted_step(None, adapter=AdapterConfig(targets=("o",))).merging
    assert dense < 0.1 * dequantising


def test_unmerged_experts_are_only_dequantized() -> None:
    """The rank costs no time. Inputs of both GEMMs and the matrices are copied twice."""
    lengths = [4096] * 4

    def step(rank: int, *, merge: bool) -> StepTime:
        adapter = AdapterConfig(expert_rank=rank, targets=("experts",), merge_experts=merge)
        return predict_step(
            GPT_OSS_20B, ParallelConfig(), OptimizerConfig(), lengths, 1, adapter, "mxfp4"
        )

    low, high, merged = step(8, merge=False), step(16, merge=False), step(8, merge=True)
    assert low.merging == high.merging < merged.merging
    rows = 4 * 4096 * 4
    moved = 2 * 2 * 24 * 2 * (rows * (2880 + 2880) + 32 * 3 * 2880 * 2880)
    assert low.adapters - merged.adapters == pytest.approx(moved / MEMORY_BANDWIDTH)
    assert replace(low, merging=0, adapters=0) == replace(merged, merging=0, adapters=0)


def test_full_training_merges_nothing_and_computes_all_gradients() -> None:
    adapted = predicted_step()
    full = predicted_step(None, adapter=None)
    assert full.merging == full.adapters == 0
    assert 0.66 < adapted.arithmetic / full.arithmetic < 0.75
    trained = ADAPTER.num_parameters(GPT_OSS_20B) / GPT_OSS_20B.num_parameters
    assert adapted.optimizer == pytest.approx(full.optimizer * trained)

    # The gradients of factors read the inputs and outputs of every GEMM twice.
    of_experts = 4 * (2880 + 5760 + 2880 + 2880)
    of_attention = 2880 + 5120 + 4096 + 2880
    read = 24 * 16_384 * 2 * 2 * (of_experts + of_attention)
    assert adapted.adapters == pytest.approx(read / MEMORY_BANDWIDTH)


def test_gpu_time_prediction_is_within_10_percent() -> None:
    # profiler time; the step took 1.129 s, because the host was too slow
    assert predicted_step().total == pytest.approx(0.88, rel=0.1)


# -- measured memory -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quantization", "layers", "expert_rank", "recompute", "gigabytes"),
    [
        ("mxfp4", 24, 8, ("moe_act", "layernorm"), 58.5),
        (None, 24, 8, ("moe_act", "layernorm"), 86.6),
        ("mxfp4", 24, 8, ("moe", "layernorm"), 32.3),
        ("mxfp4", 24, 32, ("moe_act", "layernorm"), 63.3),
        ("mxfp4", 4, 8, ("moe_act", "layernorm"), 14.6),
        (None, 4, 8, ("moe_act", "layernorm"), 19.3),
    ],
)
def test_measured_peaks_are_predicted_within_five_percent(
    quantization: Quantization | None,
    layers: int,
    expert_rank: int,
    recompute: tuple[str, ...],
    gigabytes: float,
) -> None:
    inputs = replace(
        build_inputs(GptOssModelConfig(num_layers=layers, num_experts=32), recompute=recompute),
        adapter=ADAPTER.model_copy(update={"expert_rank": expert_rank}),
        quantization=quantization,
    )
    assert predict_update_memory(inputs).total / 1e9 == pytest.approx(gigabytes, rel=0.05)


def test_peak_prediction_for_120b_on_2_gpus_is_within_3_percent() -> None:
    """The run probably had no FlashAttention, which keeps 2.7 GB of the estimate."""
    inputs = build_inputs(GPT_OSS_120B, world_size=2, expert=2, recompute=("moe_act", "layernorm"))
    assert predict_update_memory(inputs).total / 1e9 == pytest.approx(104.5, rel=0.03)


def test_norm_before_adapted_attention_is_recomputed() -> None:
    thrifty = ParallelConfig(recompute=("layernorm",))
    full = activation_bytes(GPT_OSS_20B, thrifty)
    assert full - activation_bytes(GPT_OSS_20B, thrifty, ADAPTER) == 2 * 2880
    only_output = AdapterConfig(targets=("o", "experts"))
    assert activation_bytes(GPT_OSS_20B, thrifty, only_output) == full
    keeping = ParallelConfig()
    assert activation_bytes(GPT_OSS_20B, keeping, ADAPTER) == activation_bytes(GPT_OSS_20B, keeping)


def test_recomputed_experts_use_memory_in_their_backward_pass() -> None:
    rows = 4 * 16_384
    temporary = {
        recompute: predict_update_memory(build_inputs(GPT_OSS_20B, recompute=recompute)).temporary
        for recompute in [(), ("moe_act",), ("moe",), ("moe", "moe_act")]
    }
    assert temporary[()] == temporary["moe_act",]
    assert temporary["moe",] - temporary[()] == 2 * rows * (2880 + 2880)
    assert temporary["moe", "moe_act"] - temporary["moe",] == 2 * rows * 2880
