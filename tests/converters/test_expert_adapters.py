"""Gathering of unmerged expert adapters, with their base in MXFP4, and without it."""

from __future__ import annotations

import pytest
import torch

from converters.expert_adapters import changed_names, expert_adapter_shapes
from converters.gathering import WeightGathering
from converters.hf_directory import written_shapes
from converters.mxfp4_tensors import quantize_experts
from megatron_gptoss import distributed
from megatron_gptoss.config import AdapterConfig, ParallelConfig
from tests.support.distributed import free_port, run_distributed
from tests.support.megatron_gptoss.adapted import MODEL, adapted_model, base_weights

pytestmark = pytest.mark.usefixtures("process_groups")


ADAPTER = AdapterConfig(
    rank=8, alpha=16, targets=("q", "o", "experts"), merge_experts=False, expert_rank=3
)
SCALE = 16 / 3
EXPERTS = "model.layers.1.mlp.experts"


def gathered(model: torch.nn.Module, **options: bool) -> dict[str, torch.Tensor]:
    weights = WeightGathering(model, MODEL).begin(**options)
    return {name: tensor.clone() for name, tensor in weights}


def unmerged_model(parallel: ParallelConfig, **options: bool) -> torch.nn.Module:
    return adapted_model(parallel, ADAPTER, quantization="mxfp4", **options)


@pytest.mark.parametrize("grouped", [True, False])
def test_base_and_factors_make_the_merged_weights(grouped: bool) -> None:
    """In fp32, base + s B A of an MXFP4 gathering equals the merged weight of another gathering."""
    model = unmerged_model(ParallelConfig(), moe_grouped_gemm=grouped)
    packed = gathered(model, mxfp4_experts=True)
    merged = gathered(model)
    base = base_weights()
    for matrix in ("gate_up_proj", "down_proj"):
        name = f"{EXPERTS}.{matrix}"
        expected = quantize_experts({name: base[name]})
        for stored, tensor in expected.items():
            assert torch.equal(packed[stored], tensor), stored
        update = SCALE * (packed[f"{name}.lora_B"] @ packed[f"{name}.lora_A"]).mT
        assert update.abs().max() > 0.01
        torch.testing.assert_close(base[name] + update, merged[name], rtol=0, atol=1e-5)

    shapes = written_shapes(MODEL, True) | expert_adapter_shapes(MODEL, 3)
    assert {name: tuple(tensor.shape) for name, tensor in packed.items()} == shapes


def test_sync_of_adapters_has_only_what_training_changes() -> None:
    model = unmerged_model(ParallelConfig())
    everything = gathered(model, mxfp4_experts=True)
    some = gathered(model, mxfp4_experts=True, adapters_only=True)
    expected = changed_names(MODEL, ADAPTER) | expert_adapter_shapes(MODEL, 3).keys()
    assert some.keys() == expected
    # q has an adapter, and the trainer holds q, k and v as one weight.
    assert "model.layers.0.self_attn.k_proj.weight" in some
    assert not any("router" in name or "norm" in name or "blocks" in name for name in some)
    for name, tensor in some.items():
        assert torch.equal(tensor, everything[name]), name


LAYOUTS = {
    "experts": ParallelConfig(world_size=2, expert=2),
    "layers": ParallelConfig(world_size=2, pipeline=2),
    "matrices": ParallelConfig(world_size=2, tensor=2),
}


def gather_in_layouts(rank: int, ports: list[int]) -> dict[str, list[dict[str, torch.Tensor]]]:
    """Gather everything, and the adapters alone, on both ranks."""
    torch.set_num_threads(1)
    found = {}
    for (name, parallel), port in zip(LAYOUTS.items(), ports, strict=True):
        distributed.initialize(parallel, rank, port=port)
        try:
            gathering = WeightGathering(unmerged_model(parallel), MODEL)
            found[name] = []
            for adapters_only in (False, True):
                weights = gathering.begin((0, 1), mxfp4_experts=True, adapters_only=adapters_only)
                found[name].append({key: tensor.clone() for key, tensor in weights})
        finally:
            distributed.shutdown()
    return found


def test_every_layout_sends_the_same_tensors() -> None:
    model = unmerged_model(ParallelConfig())
    expected = [gathered(model, mxfp4_experts=True, adapters_only=some) for some in (False, True)]
    ports = [free_port() for _ in LAYOUTS]
    for rank in run_distributed(gather_in_layouts, 2, ports):
        for layout, found in rank.items():
            for ours, theirs in zip(found, expected, strict=True):
                assert list(ours) == list(theirs), layout
                for name, tensor in ours.items():
                    assert torch.equal(tensor, theirs[name]), (layout, name)
