"""Predicted memory and step time of training through MXFP4."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_gptoss.config import OptimizerConfig, ParallelConfig
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
from megatron_gptoss.planning.memory import predict_update_memory
from megatron_gptoss.planning.memory_advice import Hardware, memory_plan
from megatron_gptoss.planning.memory_inputs import MemoryInputs
from megatron_gptoss.planning.step_time import MEMORY_BANDWIDTH, predict_step

GPT_OSS_20B = GptOssModelConfig(num_layers=24, num_experts=32)
LAYOUT = ParallelConfig(world_size=4, expert=4)
INPUTS = MemoryInputs(GPT_OSS_20B, LAYOUT, OptimizerConfig(), 16_384)
QUANTIZED = replace(INPUTS, quantization="mxfp4")
MATRIX_VALUES = 32 / 4 * 3 * 2880 * 2880
"""Number of expert matrix values of a layer on one rank."""


def test_plan_adds_rounded_matrices_of_one_layer_only() -> None:
    plain = predict_update_memory(INPUTS)
    quantized = predict_update_memory(QUANTIZED)
    assert quantized.weights - plain.weights == 2 * MATRIX_VALUES
    assert replace(quantized, weights=plain.weights) == plain


def test_rounding_time_is_bf16_traffic_of_forward_and_backward() -> None:
    lengths = [4096] * 4
    plain = predict_step(GPT_OSS_20B, LAYOUT, OptimizerConfig(), lengths, 3)
    quantized = predict_step(
        GPT_OSS_20B, LAYOUT, OptimizerConfig(), lengths, 3, quantization="mxfp4"
    )
    expected = 3 * 24 * 2 * MATRIX_VALUES * 4 / MEMORY_BANDWIDTH
    assert quantized.merging == pytest.approx(expected)
    assert replace(quantized, merging=0.0) == plain


def test_plan_names_quantization_of_experts() -> None:
    hardware = Hardware(gpu="H200", gigabytes=150.1)
    assert "experts trained through mxfp4" in memory_plan(QUANTIZED, hardware)
    assert "trained through" not in memory_plan(INPUTS, hardware)
