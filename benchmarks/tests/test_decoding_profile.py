"""Time of a decoding step by group of kernels, from a trace with the structure of real traces.

The trace is in tests/support/rl_loop/decoding_trace.py.
"""

from __future__ import annotations

import asyncio
import importlib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from rl_loop.engines.sglang.config import PLUGIN
from rl_loop.engines.sglang.engine import SglangEngine
from rl_loop.engines.sglang.server import ServerState, ServerStatus
from tests.support.rl_loop.decoding_trace import (
    COPY,
    ELEMENTWISE,
    PROJECTION,
    decoding_events,
    gpu_event,
    runtime_event,
    write_trace,
)
from tests.support.rl_loop.sglang_protocol import (
    SERVED_MODEL,
    LocalServer,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture
def profile(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return importlib.import_module("benchmarks.sglang.decoding_profile")


def test_every_microsecond_of_a_step_is_counted_once(profile: ModuleType, tmp_path: Path) -> None:
    write_trace(tmp_path / "a.trace.json.gz", decoding_events())
    step = profile.profile_steps(profile.read_trace(tmp_path / "a.trace.json.gz"))

    # Computed by hand from decoding_trace.py. The unknown kernel runs in one of two whole steps.
    assert step.steps == 2
    assert step.microseconds == {
        profile.EXPERTS: 10 + 8,  # an early kernel waits for the first one
        profile.COMBINE: 1 + 2,
        profile.ROUTING: 1 + 1,
        profile.RECORDING: 1,
        profile.ATTENTION: 6,
        profile.PROJECTIONS: 5 + 2,
        profile.NORMS: 2 + 1 + 1,
        profile.OUTPUT: 8 + 2,
        profile.SAMPLING: 6 + 3,  # the second stream's kernel, after the end of the first one
        profile.COPIES: 1 + 3,  # 4 more run concurrently with a kernel
        profile.OTHER: 0.5,
        profile.IDLE_INSIDE: 1,
        profile.IDLE_OUTSIDE: 1 + 33.5,
    }
    assert step.total == 100
    assert step.counts[profile.EXPERTS] == 2
    assert step.counts[profile.COPIES] == 2
    assert sum(step.counts.values()) == 15 + 2 + 2 + 0.5


def test_kernel_group_depends_on_position_in_the_graph(profile: ModuleType) -> None:
    experts = "fused_moe_kernel"
    names = [PROJECTION, COPY, "moe_align_block_size_kernel", COPY, experts, COPY, PROJECTION, COPY]
    assert profile._groups_inside(names) == [
        profile.PROJECTIONS,
        profile.NORMS,
        profile.ROUTING,
        profile.RECORDING,
        profile.EXPERTS,
        profile.COMBINE,
        profile.OUTPUT,
        profile.OUTPUT,
    ]
    # A second layer follows: the matrix product between the experts is not the output layer.
    assert profile._groups_inside([experts, PROJECTION, experts])[1] == profile.PROJECTIONS


@pytest.mark.parametrize(
    ("group", "name"),
    [
        ("EXPERTS", "_matmul_ogs_NNT_bf16xbf16xmxfp4_16x256x128x1_swiglu"),
        ("EXPERTS", "_p_matmul_ogs_NNT_bf16xbf16xbf16_64x256x64x1"),
        ("EXPERTS", "fused_moe_kernel"),
        ("EXPERTS", "marlin_moe::Marlin<(long)1125899906909960, 256, 1, 8, 8>(int4 const*)"),
        ("ROUTING", "fused_moe_router_cudacore_kernel"),
        ("ROUTING", "_bitmatrix_metadata_compute_stage2"),
        ("ROUTING", "_ragged_tensor_metadata_memset"),
        ("ROUTING", "moe_align_block_size_small_batch_expert_kernel<int, 256>(int const*)"),
        ("ROUTING", "(anonymous namespace)::topkGatingSoftmaxPack<8, 32, 4, 16>(float const*)"),
        ("COMBINE", "_reduce"),
        ("COMBINE", "_sum_kernel"),
        ("ROUTING", "_route_kernel"),
        ("COMBINE", "moe_sum_reduce_warp_per_token_vec_kernel<16>(c10::BFloat16 const*)"),
        ("ATTENTION", "flash::prepare_varlen_num_blocks_kernel<1, true>(int, int)"),
        (
            "ATTENTION",
            "cutlass::device_kernel<flash::FlashAttnFwdCombine<cute::tuple<cute::C<16>>>>",
        ),
        ("ATTENTION", "_fwd_grouped_kernel_stage1"),
        ("ATTENTION", "_attend_to_window_kernel"),
        ("NORMS", "(anonymous namespace)::store_kvcache<128l, 1l, true>(int)"),
        ("PROJECTIONS", "cublasLt::splitKreduce_kernel<32, 16, int, float>"),
        ("PROJECTIONS", "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64"),
        (None, ELEMENTWISE + "SigmoidFunctor, gemm_rope>"),
        (None, "triton_poi_fused_add_clamp_mul_sigmoid_slice_0"),
        (None, "a_kernel_of_no_known_name"),
    ],
)
def test_kernels_are_grouped_by_name(profile: ModuleType, group: str | None, name: str) -> None:
    assert profile._named_group(name) == (group and getattr(profile, group))


def test_our_sampling_kernels_are_grouped_by_name(profile: ModuleType) -> None:
    source = (PLUGIN / "gptoss_sampling.py").read_text()
    for name in ("_weigh_slices_kernel", "_choose_token_kernel"):
        assert f"\ndef {name}(" in source
        activity = profile.Activity(name, 0.0, 1.0, launch=None, is_copy=False)
        assert profile._group_outside(activity) == profile.SAMPLING


def test_a_trace_without_steps_is_rejected(profile: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "a.trace.json.gz"
    write_trace(path, [gpu_event("kernel", "_reduce", 0, 5, stream=7, correlation=1)])
    with pytest.raises(ValueError, match="0 launches of CUDA graphs"):
        profile.profile_steps(profile.read_trace(path))

    # A step has two graphs.
    small = [runtime_event("cudaGraphLaunch", 1290, 99)]
    small += [gpu_event("kernel", "_reduce", 1295, 1, stream=7, correlation=99)]
    write_trace(path, decoding_events() + small)
    with pytest.raises(ValueError, match=r"graphs of \[1, 15\] kernels"):
        profile.profile_steps(profile.read_trace(path))


def test_a_damaged_trace_is_named(profile: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "damaged.trace.json.gz"
    write_trace(path, decoding_events())
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ValueError, match=r"damaged\.trace\.json\.gz"):
        profile.read_trace(path)
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"damaged\.trace\.json\.gz"):
        profile.read_trace(path)


def test_table_compares_servers_and_lists_unknown_kernels(
    profile: ModuleType, tmp_path: Path
) -> None:
    path = tmp_path / "a.trace.json.gz"
    known = [event for event in decoding_events() if "no_known_name" not in event["name"]]
    profiles = {}
    for name, events in {"bf16": known, "mxfp4": decoding_events()}.items():
        write_trace(path, events)
        profiles[name] = profile.profile_steps(profile.read_trace(path))
    lines = profile.profile_table("A title", profiles, {"bf16": 0.09, "mxfp4": 0.08}).splitlines()

    assert lines[0] == "A title"
    assert "| idle outside of it | 35.0 |  | 34.5 |  |" in lines
    assert "| experts' matrix products | 18.0 | 2.0 | 18.0 | 2.0 |" in lines
    assert "| the step as timed without it | 90.0 |  | 80.0 |  |" in lines
    # The trace of bf16 has more names. The 10 longest are listed.
    start = lines.index("bf16, longest kernels, mean of 2 steps")
    longest = lines[start + 4 : lines.index("", start + 2)]
    assert len(longest) == 10
    assert longest[0].startswith("| 10.0 | 1.0 | experts' matrix products | `_matmul_ogs_")
    unknown = lines.index("mxfp4, kernels of no known name")
    assert lines[unknown + 4 :] == ["| 0.5 | 0.5 | other | `a_kernel_of_no_known_name` |"]
    assert "bf16, kernels of no known name" not in lines


def test_a_trace_is_rejected_if_requests_ended_before_it(
    profile: ModuleType, tmp_path: Path
) -> None:
    decoding = importlib.import_module("benchmarks.sglang.decoding")
    asyncio.run(_take_two_traces(decoding, profile, tmp_path))


async def _take_two_traces(decoding: ModuleType, profile: ModuleType, directory: Path) -> None:
    local = LocalServer(chunk=1)
    local.version = "1"
    status = ServerStatus(await local.start(), ServerState.SYNCED, incarnation=1, version=1)

    async def one_status() -> ServerStatus:
        return status

    async def statuses() -> list[ServerStatus]:
        return [status]

    engine = SglangEngine(statuses, SERVED_MODEL)
    server = SimpleNamespace(status=one_status)
    variant = decoding.Variant(
        "mxfp4", server, engine, mxfp4_experts=True, gpu=0, log=directory / "log"
    )
    prompts = [[1, 2, 3], [4, 5, 6]]
    try:
        local.token_seconds = 0.005
        path = await decoding.take_trace(variant, prompts, 0.001, directory)
        assert path == directory / "mxfp4_2-TP-0.trace.json.gz"
        assert profile.profile_steps(profile.read_trace(path)).total == 100
        assert local.profile["activities"] == ["GPU"]
        assert local.profile["with_stack"] is local.profile["record_shapes"] is False

        local.token_seconds = 0.0
        with pytest.raises(RuntimeError, match="2 of 2 requests ended before the trace"):
            await decoding.take_trace(variant, prompts, 0.05, directory)
    finally:
        await engine.close()
        await local.stop()
