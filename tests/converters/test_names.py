"""The name table against an element-by-element definition of each layout."""

from __future__ import annotations

import pytest
import torch
from transformers import GptOssForCausalLM

from converters.families.gpt_oss.table import interleave_gate_up, separate_gate_up
from converters.mapping import ParameterMapping, merge_qkv, split_qkv
from converters.names import global_name, hf_shapes, hf_tensors, parameter_mappings
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
from tests.support.converters.models import TINY

TABLE = parameter_mappings(TINY)


def megatron_tensor(mapping: ParameterMapping, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    tensors = [weights[name] for name in mapping.hf_names]
    return mapping.to_megatron(
        *(t if mapping.expert is None else t[mapping.expert] for t in tensors)
    )


def test_hf_shapes_are_those_of_transformers(reference: GptOssForCausalLM) -> None:
    assert hf_shapes(TINY) == {
        name: tuple(tensor.shape) for name, tensor in reference.state_dict().items()
    }


@pytest.mark.parametrize(
    ("layers", "experts", "total"), [(24, 32, 20_914_757_184), (36, 128, 116_829_156_672)]
)
def test_released_models_have_published_parameter_counts(
    layers: int, experts: int, total: int
) -> None:
    config = GptOssModelConfig(num_layers=layers, num_experts=experts)
    assert sum(torch.Size(shape).numel() for shape in hf_shapes(config).values()) == total
    assert sum(torch.Size(m.shape).numel() for m in parameter_mappings(config).values()) == total


def test_every_megatron_tensor_has_its_declared_shape(weights: dict[str, torch.Tensor]) -> None:
    for mapping in TABLE.values():
        assert tuple(megatron_tensor(mapping, weights).shape) == mapping.shape, mapping.name


def test_mapping_round_trip_is_bit_exact_and_complete(weights: dict[str, torch.Tensor]) -> None:
    back = dict(hf_tensors(TINY, lambda mapping: megatron_tensor(mapping, weights)))
    assert list(back) == list(hf_shapes(TINY))
    assert all(torch.equal(back[name], weights[name]) for name in weights)


def test_qkv_holds_per_group_its_query_heads_then_key_then_value() -> None:
    groups, per_group, size = 2, 4, 3
    rows = {
        x: torch.arange(n * size).view(-1, 1) + 100 * i
        for i, (x, n) in enumerate({"q": 8, "k": 2, "v": 2}.items())
    }
    merged = merge_qkv(rows["q"], rows["k"], rows["v"], groups=groups).flatten().tolist()
    expected = []
    for group in range(groups):
        for head in range(group * per_group, (group + 1) * per_group):
            expected += [head * size + channel for channel in range(size)]
        expected += [100 + group * size + channel for channel in range(size)]
        expected += [200 + group * size + channel for channel in range(size)]
    assert merged == expected


def test_tensor_parallel_ranks_get_qkv_of_complete_groups() -> None:
    q, k, v = torch.randn(48, 5), torch.randn(12, 5), torch.randn(12, 5)
    mapping = TABLE["decoder.layers.0.self_attention.linear_qkv.weight"]
    full = merge_qkv(q, k, v, groups=2)
    for rank in range(2):
        shard = mapping.shard(full, rank, 2)
        own = split_qkv(shard, groups=1, head_size=6)
        for part, whole in zip(own, (q, k, v), strict=True):
            assert torch.equal(part, whole.chunk(2)[rank])
    assert torch.equal(mapping.unshard([mapping.shard(full, rank, 2) for rank in range(2)]), full)


@pytest.mark.parametrize("name", [name for name in TABLE if ".1." not in name])
def test_joined_shards_equal_the_full_tensor(name: str) -> None:
    mapping = TABLE[name]
    full = torch.randn(mapping.shape)
    shards = [mapping.shard(full, rank, 2) for rank in range(2)]
    assert all(tuple(shard.shape) == mapping.local_shape(2) for shard in shards)
    assert torch.equal(mapping.unshard(shards), full)


def test_output_projection_is_split_along_its_input() -> None:
    mapping = TABLE["decoder.layers.0.self_attention.linear_proj.weight"]
    assert mapping.local_shape(2) == (40, 24)
    full = torch.randn(40, 48)
    assert torch.equal(mapping.shard(full, 1, 2), full[:, 24:])


def test_gates_come_from_even_channels_and_ups_from_odd_ones() -> None:
    mixed = torch.tensor([10, 20, 11, 21, 12, 22])
    assert separate_gate_up(mixed).tolist() == [10, 11, 12, 20, 21, 22]
    assert torch.equal(interleave_gate_up(separate_gate_up(mixed)), mixed)


def test_expert_matrices_are_transposed(weights: dict[str, torch.Tensor]) -> None:
    # Compare values, because down_proj of the released models is square and its shape shows
    # nothing.
    down = weights["model.layers.1.mlp.experts.down_proj"]
    mapping = TABLE["decoder.layers.1.mlp.experts.local_experts.3.linear_fc2.weight"]
    assert megatron_tensor(mapping, weights)[7, 2] == down[3, 2, 7]
    gate_up = weights["model.layers.1.mlp.experts.gate_up_proj"]
    mapping = TABLE["decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight"]
    assert megatron_tensor(mapping, weights)[5, 9] == gate_up[3, 9, 10]
    assert megatron_tensor(mapping, weights)[24 + 5, 9] == gate_up[3, 9, 11]


@pytest.mark.parametrize(
    ("local", "expected"),
    [
        ("embedding.word_embeddings.weight", "embedding.word_embeddings.weight"),
        (
            "decoder.layers.1.input_layernorm.weight",
            "decoder.layers.13.self_attention.linear_qkv.layer_norm_weight",
        ),
        (
            "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight",
            "decoder.layers.13.self_attention.linear_qkv.layer_norm_weight",
        ),
        (
            "decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.bias",
            "decoder.layers.12.mlp.experts.local_experts.19.linear_fc1.bias",
        ),
        (
            "decoder.layers.0.mlp.experts.linear_fc2.weight3",
            "decoder.layers.12.mlp.experts.local_experts.19.linear_fc2.weight",
        ),
    ],
)
def test_local_names_of_every_layer_specification_become_global(local: str, expected: str) -> None:
    assert global_name(local, layer_offset=12, expert_offset=16) == expected
    assert expected in parameter_mappings(GptOssModelConfig(num_layers=24, num_experts=32))
