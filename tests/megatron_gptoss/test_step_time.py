"""Predicted step time against measurements on GPUs (docs/performance/training.md)."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_gptoss.config import OptimizerConfig, ParallelConfig
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
from megatron_gptoss.planning.parameter_counts import parameters_per_gpu
from megatron_gptoss.planning.step_time import HOST_BANDWIDTH, predict_step

GPT_OSS_120B = GptOssModelConfig(num_layers=36, num_experts=128)
BF16_MOMENTS = OptimizerConfig(moment_dtype="bf16")


@pytest.mark.parametrize(
    (
        "layers",
        "experts",
        "layout",
        "optimizer",
        "lengths",
        "micro_batches",
        "tokens_per_second_per_gpu",
    ),
    [
        (24, 32, {"world_size": 4, "expert": 4}, BF16_MOMENTS, [4096] * 4, 2, 16_226),
        (24, 32, {"world_size": 4, "expert": 4}, BF16_MOMENTS, [4096] * 4, 2, 15_289),
        (24, 32, {"world_size": 4, "expert": 4, "context": 4}, BF16_MOMENTS, [32_768], 2, 10_169),
        (4, 32, {"world_size": 4, "expert": 4}, BF16_MOMENTS, [4096] * 4, 1, 56_351),
        (4, 32, {"world_size": 4}, BF16_MOMENTS, [4096] * 4, 1, 44_427),
        (4, 32, {"world_size": 4, "expert": 4, "context": 4}, BF16_MOMENTS, [131_072], 1, 31_247),
        (8, 128, {"world_size": 4, "expert": 4}, BF16_MOMENTS, [4096] * 4, 1, 24_736),
        (4, 32, {}, OptimizerConfig(), [4096] * 4, 1, 48_075),
        (4, 32, {}, OptimizerConfig(), [32_768], 1, 49_366),
        (8, 32, {}, BF16_MOMENTS, [4096] * 8, 1, 39_073),
        (8, 32, {}, BF16_MOMENTS, [16_384] * 2, 1, 35_577),
        (8, 32, {}, BF16_MOMENTS, [32_768], 1, 30_917),
        (4, 32, {"world_size": 2}, BF16_MOMENTS, [4096] * 4, 1, 48_700),
        (4, 32, {"world_size": 2, "expert": 2}, BF16_MOMENTS, [4096] * 4, 1, 53_879),
        (8, 32, {"world_size": 2, "pipeline": 2}, BF16_MOMENTS, [4096] * 4, 4, 26_846),
        (
            8,
            32,
            {"world_size": 2, "pipeline": 2, "virtual_pipeline": 2},
            BF16_MOMENTS,
            [4096] * 4,
            4,
            26_680,
        ),
        (
            8,
            32,
            {"world_size": 2, "pipeline": 2, "last_stage_layers": 3},
            BF16_MOMENTS,
            [4096] * 4,
            4,
            27_032,
        ),
        (8, 32, {"world_size": 4, "pipeline": 4}, BF16_MOMENTS, [4096], 8, 10_436),
        (16, 32, {"world_size": 4, "pipeline": 4}, BF16_MOMENTS, [4096] * 4, 4, 10_132),
        (16, 32, {"world_size": 4, "pipeline": 4}, BF16_MOMENTS, [4096] * 4, 8, 12_128),
        (
            16,
            32,
            {"world_size": 4, "pipeline": 4, "virtual_pipeline": 2},
            BF16_MOMENTS,
            [4096] * 4,
            4,
            11_534,
        ),
        (
            16,
            32,
            {"world_size": 4, "pipeline": 4, "virtual_pipeline": 2},
            BF16_MOMENTS,
            [4096] * 4,
            8,
            12_533,
        ),
        (
            16,
            32,
            {"world_size": 4, "pipeline": 4, "virtual_pipeline": 4},
            BF16_MOMENTS,
            [4096] * 4,
            4,
            11_844,
        ),
    ],
)
def test_measured_steps_are_predicted_within_ten_percent(
    layers: int,
    experts: int,
    layout: dict[str, Any],
    optimizer: OptimizerConfig,
    lengths: list[int],
    micro_batches: int,
    tokens_per_second_per_gpu: float,
) -> None:
    parallel = ParallelConfig(**layout)
    model = GptOssModelConfig(num_layers=layers, num_experts=experts)
    step = predict_step(model, parallel, optimizer, lengths, micro_batches)
    tokens = sum(lengths) * micro_batches / (parallel.context * parallel.pipeline)
    assert tokens / step.total == pytest.approx(tokens_per_second_per_gpu, rel=0.1)


def test_experts_spread_over_nodes_cost_more_than_within_one() -> None:
    within, beyond = (
        predict_step(
            GPT_OSS_120B, ParallelConfig(world_size=32, expert=expert), BF16_MOMENTS, [4096] * 4, 8
        ).experts
        for expert in (8, 16)
    )
    assert beyond > 2 * within


def test_offloaded_state_crosses_the_bus_twice_in_every_step() -> None:
    model = GptOssModelConfig(num_layers=24, num_experts=32)
    parallel = ParallelConfig(world_size=4, expert=4)
    here, away = (
        predict_step(model, parallel, OptimizerConfig(offload_fraction=share), [4096], 1).optimizer
        for share in (0.0, 1.0)
    )
    dense, expert = parameters_per_gpu(model, parallel)
    assert away - here == pytest.approx(2 * 10 * (dense / 4 + expert) / HOST_BANDWIDTH)


def test_shorter_last_stage_compensates_for_the_output_layer() -> None:
    even = ParallelConfig(world_size=32, expert=8, pipeline=4)
    fewer = even.model_copy(update={"last_stage_layers": 6})
    steps = [
        predict_step(GPT_OSS_120B, layout, BF16_MOMENTS, [16_384], 64) for layout in (even, fewer)
    ]
    assert [fewer.layers_of_stage(stage, GPT_OSS_120B) for stage in range(4)] == [10, 10, 10, 6]
    assert steps[1].arithmetic < 0.9 * steps[0].arithmetic


def test_bubble_shrinks_with_more_micro_batches_and_chunks() -> None:
    parallel = ParallelConfig(world_size=32, expert=8, pipeline=4)
    interleaved = parallel.model_copy(update={"virtual_pipeline": 3})
    few, many = (predict_step(GPT_OSS_120B, parallel, BF16_MOMENTS, [4096] * 4, n) for n in (4, 32))
    assert few.bubble == pytest.approx(many.bubble)
    # Three of four stages wait. The share is lower, because the last stage also has the output
    # layer.
    assert 0.5 < few.bubble / (few.arithmetic + few.experts) < 0.65
    assert many.bubble / many.total < 0.1
    chunks = predict_step(GPT_OSS_120B, interleaved, BF16_MOMENTS, [4096] * 4, 4)
    assert chunks.bubble == pytest.approx(few.bubble / 3)
