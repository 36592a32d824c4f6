"""The memory prediction against what GPUs used (docs/performance.md, "Training on GPUs")."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_gptoss.config import ModelConfig, OptimizerConfig, ParallelConfig
from megatron_gptoss.layers.transformer_engine_block import NoRecomputeLayer
from megatron_gptoss.planning import memory
from megatron_gptoss.planning.memory import parameters_per_gpu, predict, worst_stage
from megatron_gptoss.planning.memory_advice import (
    layouts_that_fit,
    memory_plan,
    out_of_memory_explained,
    smaller_settings,
)
from megatron_gptoss.planning.memory_inputs import MemoryInputs
from megatron_gptoss.transformer_config import build_transformer_config

GPT_OSS_20B = ModelConfig(num_layers=24, num_experts=32)
GPT_OSS_120B = ModelConfig(num_layers=36, num_experts=128)
BF16_MOMENTS = OptimizerConfig(moment_dtype="bf16")
THRIFTY = ParallelConfig(recompute=("moe_act", "layernorm"))


@pytest.mark.parametrize(
    ("layers", "experts", "tokens", "recompute", "measured"),
    [(4, 32, 16_384, (), 82.4), (4, 8, 16_384, (), 43.8), (4, 32, 32_768, ("moe_act",), 90.0)],
)
def test_measured_peaks_of_one_gpu_are_predicted_within_two_percent(
    layers: int,
    experts: int,
    tokens: int,
    recompute: tuple[str, ...],
    measured: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "EXPERT_LOAD", 1.0)  # no expert parallelism
    model = ModelConfig(num_layers=layers, num_experts=experts)
    total = predict(
        MemoryInputs(model, ParallelConfig(recompute=recompute), OptimizerConfig(), tokens)
    ).total
    assert total / 1e9 == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize(
    ("layers", "context", "tokens", "recompute", "measured"),
    [
        (24, 1, 16_384, ("moe_act", "layernorm"), 118.2),
        (24, 4, 32_768, ("moe_act",), 97.6),
        (4, 1, 16_384, (), 30.2),
    ],
)
def test_measured_peaks_of_four_gpus_are_predicted_within_four_percent(
    layers: int, context: int, tokens: int, recompute: tuple[str, ...], measured: float
) -> None:
    model = ModelConfig(num_layers=layers, num_experts=32)
    parallel = ParallelConfig(world_size=4, expert=4, context=context, recompute=recompute)
    assert predict(
        MemoryInputs(model, parallel, BF16_MOMENTS, tokens)
    ).total / 1e9 == pytest.approx(measured, rel=0.04)


@pytest.mark.parametrize(
    ("layers", "parallel", "optimizer", "tokens", "measured"),
    [
        (4, {"recompute": ("moe_act",), "recompute_layers": 2}, {}, 32_768, 90.7),
        (4, {}, {"offload": 1.0}, 16_384, 71.8),
        (8, {"world_size": 2, "pipeline": 2}, {"moment_dtype": "bf16"}, 4096, 51.8),
        (
            8,
            {"world_size": 2, "pipeline": 2, "virtual_pipeline": 2},
            {"moment_dtype": "bf16"},
            4096,
            52.9,
        ),
        (8, {"world_size": 2, "pipeline": 2}, {"moment_dtype": "bf16"}, 16_384, 66.6),
        (
            8,
            {"world_size": 2, "pipeline": 2, "virtual_pipeline": 2},
            {"moment_dtype": "bf16"},
            16_384,
            71.4,
        ),
        (
            8,
            {"world_size": 2, "pipeline": 2, "last_stage_layers": 3},
            {"moment_dtype": "bf16"},
            16_384,
            80.9,
        ),
        (8, {"recompute": ("moe_act",)}, {"moment_dtype": "bf16"}, 32_768, 127.2),
        (4, {"world_size": 2, "tensor": 2}, {"moment_dtype": "bf16"}, 16_384, 42.5),
    ],
)
def test_measured_peaks_of_other_settings_are_predicted_within_two_percent(
    layers: int,
    parallel: dict[str, Any],
    optimizer: dict[str, Any],
    tokens: int,
    measured: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "EXPERT_LOAD", 1.0)  # no expert parallelism
    model = ModelConfig(num_layers=layers, num_experts=32)
    training = MemoryInputs(model, ParallelConfig(**parallel), OptimizerConfig(**optimizer), tokens)
    assert worst_stage(training).total / 1e9 == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize(
    ("chunks", "micro_batches", "measured"),
    [(1, 4, 84.9), (2, 4, 85.2), (4, 4, 84.8), (1, 8, 85.0), (2, 8, 99.4)],
)
def test_a_pipeline_holds_no_more_micro_batches_than_there_are(
    chunks: int, micro_batches: int, measured: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "EXPERT_LOAD", 1.0)
    layout = ParallelConfig(world_size=4, pipeline=4, virtual_pipeline=chunks)
    training = MemoryInputs(
        ModelConfig(num_layers=16, num_experts=32), layout, BF16_MOMENTS, 16_384
    )
    assert worst_stage(replace(training, micro_batches=micro_batches)).total / 1e9 == pytest.approx(
        measured, rel=0.02
    )


@pytest.mark.parametrize(
    ("model", "total"), [(GPT_OSS_20B, 20_914_757_184), (GPT_OSS_120B, 116_829_156_672)]
)
def test_parameters_are_those_of_the_published_models(model: ModelConfig, total: int) -> None:
    assert sum(parameters_per_gpu(model, ParallelConfig())) == total


@pytest.mark.parametrize(
    ("model", "gpus"),
    [
        (GPT_OSS_20B, 4),
        (GPT_OSS_20B, 8),
        (GPT_OSS_20B, 16),
        (GPT_OSS_120B, 16),
        (GPT_OSS_120B, 32),
        (GPT_OSS_120B, 64),
    ],
)
def test_both_models_fit_where_they_should(model: ModelConfig, gpus: int) -> None:
    training = MemoryInputs(
        model, THRIFTY.model_copy(update={"world_size": gpus}), BF16_MOMENTS, 16_384
    )
    layouts = layouts_that_fit(training, 135)
    assert layouts
    for layout, needed in layouts:
        assert layout.world_size == gpus
        assert needed == worst_stage(replace(training, parallel=layout))


def test_120b_does_not_fit_on_eight_gpus() -> None:
    thrifty = THRIFTY.model_copy(update={"world_size": 8})
    assert not layouts_that_fit(MemoryInputs(GPT_OSS_120B, thrifty, BF16_MOMENTS, 16_384), 135)


def test_interleaving_keeps_the_activations_that_its_paper_says() -> None:
    plain = ParallelConfig(world_size=8, pipeline=4)
    chunks = plain.model_copy(update={"virtual_pipeline": 3})
    before, after = (
        predict(MemoryInputs(GPT_OSS_120B, layout, BF16_MOMENTS, 16_384)).activations
        for layout in (plain, chunks)
    )
    assert after / before == pytest.approx(1 + (4 - 1) / (4 * 3))  # arXiv 2205.05198, section 4.2.3


def test_layouts_without_a_pipeline_are_found_for_an_interleaved_one() -> None:
    base = ParallelConfig(world_size=64, pipeline=4, virtual_pipeline=3)
    training = MemoryInputs(GPT_OSS_120B, base, BF16_MOMENTS, 16_384)
    found = {layout.pipeline for layout, _ in layouts_that_fit(training, 135)}
    assert found == {1, 2, 4}


def test_each_suggestion_takes_less_than_the_one_before() -> None:
    parallel = ParallelConfig(world_size=4, expert=4)
    training = MemoryInputs(GPT_OSS_20B, parallel, OptimizerConfig(), 32_768)
    found = smaller_settings(training)
    totals = [worst_stage(training).total, *(m.total for _, m in found)]
    assert len(found) == 5 and totals == sorted(totals, reverse=True) and len(set(totals)) == 6
    bf16 = OptimizerConfig(moment_dtype="bf16", gradient_dtype="bf16")
    again = parallel.model_copy(update={"recompute": ("moe",)})
    first, last = smaller_settings(MemoryInputs(GPT_OSS_20B, again, bf16, 32_768))
    assert (first[0], last[0]) == (
        "training.max_tokens_per_micro_batch=16384",
        "optimizer.offload=1",
    )
    some = again.model_copy(update={"recompute_layers": 9})
    assert (
        smaller_settings(MemoryInputs(GPT_OSS_20B, some, bf16, 32_768))[0][0]
        == "parallel.recompute_layers=null"
    )


def test_layers_that_keep_their_activations_count_as_without_recomputation() -> None:
    def activations(
        layers: int | None, recompute: tuple[str, ...] = ("moe",), **sizes: int
    ) -> float:
        parallel = ParallelConfig(
            world_size=8, expert=4, recompute=recompute, recompute_layers=layers, **sizes
        )
        return predict(MemoryInputs(GPT_OSS_20B, parallel, OptimizerConfig(), 32_768)).activations

    none = activations(None, ())
    every = activations(None)
    assert activations(0) == pytest.approx(none)
    assert activations(6) == pytest.approx(0.75 * none + 0.25 * every)
    assert activations(24) == activations(99) == every
    chunks = {"pipeline": 2, "virtual_pipeline": 3}  # of four layers
    half = (activations(None, (), **chunks) + activations(None, **chunks)) / 2
    assert activations(2, **chunks) == pytest.approx(half)


@pytest.mark.parametrize(("tokens", "room"), [(32_768, True), (256, False)])
def test_offloaded_state_makes_room_for_activations_and_no_more(tokens: int, room: bool) -> None:
    parallel = ParallelConfig(world_size=4, expert=4)
    plain, offloaded = (
        predict(MemoryInputs(GPT_OSS_20B, parallel, OptimizerConfig(offload=share), tokens))
        for share in (0.0, 1.0)
    )
    assert offloaded.optimizer == 0 and (offloaded.fetched == 0) == room
    saved = plain.optimizer if room else plain.activations + plain.working
    assert offloaded.total == pytest.approx(plain.total - saved)


def test_a_critic_and_a_reference_policy_take_room_beside_the_policy() -> None:
    parallel = ParallelConfig(world_size=4, expert=4)
    training = MemoryInputs(GPT_OSS_20B, parallel, OptimizerConfig(), 16_384)
    alone = predict(training)
    reference = predict(replace(training, auxiliary_models=[None]))
    critic = predict(
        replace(training, auxiliary_models=[OptimizerConfig(gradient_dtype="bf16", offload=1)])
    )
    vocabulary = 201_088 * 2880
    assert reference.total - alone.total == alone.weights
    assert critic.weights - alone.weights == alone.weights - 2 * vocabulary
    assert critic.gradients - alone.gradients == (alone.gradients - 4 * vocabulary) / 2
    assert (critic.optimizer, critic.activations) == (alone.optimizer, alone.activations)
    plan = memory_plan(replace(training, auxiliary_models=[OptimizerConfig(), None]), 141)
    assert ", with the critic, with the reference policy: " in plan


def test_running_out_of_memory_prints_the_plan_and_what_to_set_next() -> None:
    parallel = ParallelConfig(world_size=4, expert=4, recompute=("moe_act",))
    training = MemoryInputs(GPT_OSS_20B, parallel, OptimizerConfig(), 32_768)
    with (
        pytest.raises(
            torch.OutOfMemoryError,
            match=r"(?s)^CUDA out of memory. Tried.*activations .*moment_dtype=bf16",
        ),
        out_of_memory_explained(training),
    ):
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 5 GiB\nlong advice about fragmentation"
        )
    assert "no layout of 4 GPUs fits; most goes to the" in memory_plan(training, 60)
    assert "tensor 1, pipeline 1, context 4, expert 4" in memory_plan(training, 141)


def test_a_layer_that_keeps_its_activations_leaves_the_others_configuration_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []
    monkeypatch.setattr(
        NoRecomputeLayer.__mro__[1], "__init__", lambda self, config, *_, **__: seen.append(config)
    )
    config = build_transformer_config(GPT_OSS_20B, ParallelConfig(), torch.bfloat16)
    config.recompute_granularity = "selective"
    config.recompute_modules = ["moe"]
    NoRecomputeLayer(config, submodules=None, layer_number=3)
    assert (config.recompute_granularity, config.recompute_modules) == ("selective", ["moe"])
    assert (seen[0].recompute_granularity, seen[0].recompute_modules) == (None, None)
    assert seen[0].hidden_size == config.hidden_size
