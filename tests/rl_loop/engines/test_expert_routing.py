"""The plugin's routing and sums: in Triton's interpreter, in SGLang and against triton_kernels."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from tests.support.rl_loop.engines.routing_logits import KINDS, make_logits
from tests.support.rl_loop.plugin_process import plugin_module, run_with_plugin, write_modules

TOPK = """
from dataclasses import dataclass
from types import SimpleNamespace
import torch

calls = []
recorded = []


@dataclass
class RoutingData:
    gate_scal: torch.Tensor
    expt_hist: torch.Tensor
    n_expts_tot: int
    n_expts_act: int
    expt_data: object = None


@dataclass
class GatherIndx:
    src_indx: torch.Tensor
    dst_indx: torch.Tensor


class ScatterIndx(GatherIndx):
    pass


def triton_kernels_topk(logits, k):
    return SimpleNamespace(indx=logits.topk(k).indices.to(torch.int16).sort(-1).values)


def routing(logits, n_expts_act, sm_first=False, n_rows=None):
    calls.append((tuple(logits.shape), sm_first, n_rows))
    triton_kernels_topk(logits, n_expts_act)
    return None, None, None


def capture_routed_experts_if_allowed(config, layer_id, indices):
    recorded.append(indices.tolist())


class TopK:
    topk_config, layer_id = "config", 7

    def forward_cuda(self, hidden, logits, **options):
        data, gather, scatter = routing(logits, 2, **options)
        return SimpleNamespace(routing_data=data, gather_indx=gather, scatter_indx=scatter)
"""
MATMUL = """
reduced = []


def reduce(x, dim, **options):
    reduced.append((tuple(x.shape), dim))
    return "theirs", None
"""
CHOICE = """
import torch


def make_empty(offset, shape, dtype, device, all_gather):
    buffer = torch.empty(shape, dtype=dtype, device=device)
    return (buffer,), buffer, offset + 1
"""
TENSOR = """
from dataclasses import dataclass


@dataclass
class RaggedTensorMetadata:
    slice_sizes: object
    slice_offs: object
    block_offs_data: object
    block_schedule_data: object
"""
PROGRAM = """
import torch
import gptoss_expert_routing, gptoss_mxfp4_experts
gptoss_mxfp4_experts._install_routes()
gptoss_expert_routing.install()
from sglang.srt.layers.moe import topk
from triton_kernels import matmul_ogs

logits = torch.tensor([[0.0, 3.0, 1.0, 2.0], [9.0, 0.0, 1.0, 5.0]])
layer = topk.TopK()
quick = layer.forward_cuda(None, logits, sm_first=False)
data, metadata = quick.routing_data, quick.routing_data.expt_data
print(topk.calls, data.n_expts_tot, data.n_expts_act, data.expt_hist.tolist())
print(quick.gather_indx.src_indx.tolist(), quick.scatter_indx.src_indx.tolist())
print(quick.gather_indx.dst_indx.tolist(), quick.scatter_indx.dst_indx.tolist())
print(metadata.slice_sizes.tolist(), metadata.slice_offs.tolist())
print(metadata.block_offs_data[0].tolist(), metadata.block_schedule_data[0].tolist())

for options in ({"sm_first": True}, {"n_rows": 1}):
    layer.forward_cuda(None, logits, **options)
layer.forward_cuda(None, torch.zeros(4096, 4))
print(topk.calls, topk.recorded[:3], len(topk.recorded))

outputs = torch.tensor([[[1.0, 2.0], [3.0, 5.0]]]).bfloat16()
sums = torch.zeros(1, 2).bfloat16()
result, scales = matmul_ogs.reduce(outputs, dim=1, y=sums, mask=None, x_mxscale=None, y_has_mx=False)
print(result.tolist(), result is sums, scales, matmul_ogs.reduced)
matmul_ogs.reduce(outputs, dim=0, y=sums)
matmul_ogs.reduce(outputs, dim=1, y=sums, y_has_mx=True)
matmul_ogs.reduce(outputs.float(), dim=1, y=sums)
print(len(matmul_ogs.reduced))

from triton_kernels import topk
for dtype, gathered in ((torch.uint32, False), (torch.uint32, True), (torch.int16, False)):
    (buffer,), bits, offset = topk.make_empty(5, (4, 608), dtype, "cpu", all_gather=gathered)
    print(buffer.data_ptr() == bits.data_ptr(), tuple(bits.shape), bits.stride(), offset)
"""


def test_routing_and_sum_kernels_equal_torch() -> None:
    program = "tests.support.rl_loop.engines.expert_routing_interpreted"
    printed = run_with_plugin("-m", program, interpreted=True)
    assert printed == "8 shapes and 5 kinds of logits\n"


COMPILED = "tests.support.rl_loop.engines.expert_routing_compiled"


def test_routing_kernels_compile_for_hopper_without_spills() -> None:
    """Runs without a GPU. The interpreter accepts some programs that the compiler rejects.

    Numbers of tokens with the same next power of 2 share a compiled variant.
    """
    assert run_with_plugin("-m", COMPILED) == "4 tables in 3 variants\n"


@pytest.mark.slow
def test_routing_kernels_compile_for_all_tables() -> None:
    assert run_with_plugin("-m", COMPILED, "all") == "13 tables in 12 variants\n"


def test_routing_kernel_serves_only_small_batches(tmp_path: Path) -> None:
    modules = {
        "sglang/srt/layers/moe/topk.py": TOPK,
        "triton_kernels/matmul_ogs.py": MATMUL,
        "triton_kernels/tensor.py": TENSOR,
        "triton_kernels/topk.py": CHOICE,
    }
    write_modules(tmp_path, modules)
    printed = run_with_plugin("-c", PROGRAM, packages=tmp_path, interpreted=True)
    # Token 0 uses experts 1 and 3 (entries 0, 1), token 1 uses experts 0 and 3 (entries 2, 3).
    assert printed.splitlines() == [
        "[] 4 2 [1, 1, 0, 2]",
        "[2, 0, 1, 3] [1, 2, 0, 3]",
        "[1, 2, 0, 3] [2, 0, 1, 3]",
        "[1, 1, 0, 2] [0, 1, 2, 2, 4]",
        "[0, 1, 2, 2, 3] [0, 1, 3, -1]",
        "[((2, 4), True, None), ((2, 4), False, 1), ((4096, 4), False, None)] "
        "[[[1, 3], [0, 3]], [[1, 3], [0, 3]], [[1, 3], [0, 3]]] 4",
        "[[4.0, 7.0]] True None []",
        "3",
        # Kernels are compiled for the first stride of bits, which are uint32.
        "True (4, 608) (1024, 1) 6",
        "True (4, 608) (608, 1) 6",
        "True (4, 608) (608, 1) 6",
    ]


@pytest.fixture
def routing(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return plugin_module("gptoss_expert_routing", monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tokens", "experts"),
    [
        (1, 32),
        (2, 32),
        (8, 32),
        (16, 32),
        (63, 32),
        (64, 32),
        (127, 32),
        (255, 32),
        (256, 32),
        (1, 128),
        (8, 128),
        (63, 128),
        (64, 128),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_routes_equal_those_of_triton_kernels(
    routing: ModuleType, tokens: int, experts: int, kind: str
) -> None:
    from triton_kernels.tensor import make_ragged_tensor_metadata
    from triton_kernels.topk import topk

    torch.manual_seed(tokens)
    logits = make_logits(kind, tokens, experts, torch.bfloat16).cuda().contiguous()
    theirs = topk(logits, 4, apply_softmax=True)
    metadata = make_ragged_tensor_metadata(theirs.mask_metadata.col_sum, 4 * tokens)
    by_expert = theirs.mask_metadata.col_sorted_indx

    ours = routing.route(logits, 4)
    assert torch.equal(ours.experts.short(), theirs.indx)
    assert torch.equal(ours.by_expert, by_expert)
    assert torch.equal(ours.places, theirs.mask_metadata.row_sorted_indx)
    assert torch.equal(ours.sizes, metadata.slice_sizes)
    assert torch.equal(ours.starts, metadata.slice_offs)
    assert torch.equal(ours.block_starts, metadata.block_offs_data)
    assert torch.equal(ours.schedule, metadata.block_schedule_data)
    gates = theirs.vals.flatten()[by_expert].float()
    # The order of summation differs, so a few values round to the adjacent bf16 number.
    assert ((ours.gates.float() - gates).abs() <= 2**-7 * gates).all()
    differing = int((ours.gates != gates).sum())
    assert differing <= max(1, 0.05 * len(gates))


@pytest.mark.gpu
@pytest.mark.parametrize("experts", [32, 128])
def test_prefills_share_compiled_variants(
    routing: ModuleType, experts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = importlib.import_module("triton_kernels.topk")
    sums = importlib.import_module(
        "triton_kernels.tensor_details.bitmatrix_details.sum_bitmatrix_rows"
    )
    kernels = choice._topk_forward, sums._sum_bitmatrix_rows

    def count_variants() -> list[int]:
        return [sum(len(cache[0]) for cache in kernel.device_caches.values()) for kernel in kernels]

    def route(tokens: int) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(tokens)
        chosen = choice.topk(torch.randn(tokens, experts, device="cuda").bfloat16(), 4)
        metadata = chosen.mask_metadata
        return chosen.indx, metadata.col_sum, metadata.col_sorted_indx, metadata.row_sorted_indx

    def route_without_variants(sizes: Iterable[int]) -> list[tuple[torch.Tensor, ...]]:
        # Other tests may have compiled variants of these kernels.
        for kernel in kernels:
            kernel.device_caches.clear()
        return [route(tokens) for tokens in sizes]

    sizes = range(1040, 2048, 160)
    expected = route_without_variants(sizes)
    # triton_kernels compiles both kernels for every size.
    assert count_variants() == [len(sizes), len(sizes)]

    monkeypatch.setattr(choice, "make_empty", routing.with_common_strides(choice.make_empty))
    padded = route_without_variants(sizes)
    # Triton compiles the sums also for numbers of tiles that are divisible by 16.
    assert count_variants() == [1, 2]
    for outputs, others in zip(padded, expected, strict=True):
        assert all(map(torch.equal, outputs, others))


@pytest.mark.gpu
def test_sums_are_bitwise_equal_to_triton_kernels(routing: ModuleType) -> None:
    from triton_kernels.reduce import reduce

    outputs = torch.randn(37, 4, 2880, device="cuda").bfloat16()
    expected, _ = reduce(outputs, dim=1)
    sums = torch.empty_like(expected)
    quick = routing.fused_reduce(lambda *unused, **options: SimpleNamespace())
    quick(outputs, dim=1, y=sums)
    assert torch.equal(sums, expected)
