"""A fraction of a whole GPU becomes SGLang's fraction of free memory, or an error with a remedy."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch

from converters.hf_directory import written_shapes
from converters.names import hf_shapes
from megatron_gptoss.config import OptimizerConfig, ParallelConfig
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
from megatron_gptoss.planning.memory_inputs import EngineMemory, MemoryInputs
from megatron_gptoss.planning.sync_memory import sent_tensor_bytes
from rl_loop.engines.backend import BackendContext, EngineUnavailableError
from rl_loop.engines.sglang.config import SglangConfig
from rl_loop.engines.sglang.fleet import CurrentWeights, SglangFleet
from rl_loop.engines.sglang.gpu_memory import (
    CONTEXT_BYTES,
    USEFUL_CACHE_TOKENS,
    WORKING_BYTES,
    GpuMemory,
    NotEnoughGpuMemoryError,
    ServerNeeds,
    memory_fault,
    static_fraction,
    visible_gpus,
)
from rl_loop.engines.sglang.server_command import server_command
from rl_loop.engines.sglang.weight_endpoints import SglangSender
from rl_loop.weight_sync.transports import split_into_buckets

MODEL_20B = GptOssModelConfig(num_layers=24, num_experts=32)
TOTAL = 150_000_000_000
TWENTY_B = ServerNeeds.of(MODEL_20B, "bf16", 1)


def gpu(free_share: float, name: str = "GPU 0") -> GpuMemory:
    return GpuMemory(name, TOTAL, int(free_share * TOTAL))


def test_server_needs_equal_tensor_and_kv_cache_sizes() -> None:
    sizes = {
        name: shape[0] * (shape[1] if len(shape) > 1 else 1) * (shape[2] if len(shape) > 2 else 1)
        for name, shape in hf_shapes(MODEL_20B).items()
    }
    assert TWENTY_B.weights == 2 * sum(sizes.values())
    full_layers = 12 + 0.8 * 12
    assert TWENTY_B.cache == pytest.approx(65_536 * full_layers * 2 * 8 * 64 * 2, abs=1)
    assert USEFUL_CACHE_TOKENS == 65_536

    halves = ServerNeeds.of(MODEL_20B, "bf16", 2)
    assert halves.weights == TWENTY_B.weights // 2
    assert halves.cache == pytest.approx(TWENTY_B.cache / 2, abs=1)
    sixteenths = ServerNeeds.of(MODEL_20B, "bf16", 16)
    assert sixteenths.cache == pytest.approx(TWENTY_B.cache / 8, abs=1), "8 heads on 16 GPUs"


@pytest.mark.parametrize("free_share", [1.0, 0.8, 0.52])
def test_server_memory_is_its_share_of_the_whole_gpu(free_share: float) -> None:
    """SGLang gives weights and cache its fraction of the memory that is free after its start."""
    fraction = static_fraction(0.5, [gpu(free_share)], TWENTY_B)
    weights_and_cache = fraction * (free_share * TOTAL - CONTEXT_BYTES)
    assert weights_and_cache + CONTEXT_BYTES + WORKING_BYTES == pytest.approx(0.5 * TOTAL)


def test_tensor_parallel_needs_include_groups_and_buffers() -> None:
    halves = ServerNeeds.of(MODEL_20B, "bf16", 2)
    assert (TWENTY_B.context, TWENTY_B.working) == (CONTEXT_BYTES, WORKING_BYTES)
    # Server log on 2 H200: 1.07 GiB in process groups, about 1.7 GB with contexts.
    assert halves.context == pytest.approx(1.7e9, rel=0.05)

    # FlashInfer logs the end of both ranks' values in a buffer. There are two sets of 4 buffers:
    # one buffer, and three that alternate.
    assert halves.working - WORKING_BYTES == 2 * (1 + 3) * 23_592_960
    assert halves.all == halves.weights + halves.cache + halves.working + halves.context

    fraction = static_fraction(0.5, [gpu(0.9)] * 2, halves)
    weights_and_cache = fraction * (0.9 * TOTAL - halves.context)
    assert weights_and_cache + halves.context + halves.working == pytest.approx(0.5 * TOTAL)


def on_trainer_gpus(**settings: Any) -> EngineMemory:
    config = SglangConfig(colocated=True, weight_sync="cuda_ipc", **settings)
    memory = config.memory_on_trainer_gpus(MODEL_20B, "bf16")
    assert memory is not None
    return memory


@pytest.mark.parametrize(("ranks", "measured"), [(2, [2.9, 2.8]), (4, [5.1, 4.3])])
def test_sleeping_server_keeps_more_memory_with_every_rank(
    ranks: int, measured: list[float]
) -> None:
    """Differences in GB to a server of one rank, for the 120B's widths and for the 20B.

    Trainers and servers had equal numbers of ranks. The two figures of 4 ranks are of different GPUs.
    """
    more = on_trainer_gpus(tensor_parallel=ranks).paused_bytes - on_trainer_gpus().paused_bytes
    for gigabytes in measured:
        assert more / 1e9 == pytest.approx(gigabytes, abs=1)


def test_ranks_on_other_gpus_than_the_sender_copy_buckets() -> None:
    assert on_trainer_gpus(tensor_parallel=2).copies_buckets
    assert not on_trainer_gpus(servers=2).copies_buckets


@pytest.mark.parametrize("mxfp4_experts", [False, True], ids=["bf16", "mxfp4"])
@pytest.mark.parametrize("experts", [32, 128])
@pytest.mark.parametrize("limit", [1 << 28, 1 << 29, 1 << 30, 1 << 31])
def test_sender_holds_two_buckets_of_expert_tensors(
    mxfp4_experts: bool, experts: int, limit: int
) -> None:
    """Only tensors of experts count, because other tensors are the parameters themselves."""
    model = GptOssModelConfig(num_layers=9, num_experts=experts)
    sizes = []
    for bucket in split_into_buckets(sent_tensors(model, mxfp4_experts), limit):
        sizes.append(sum(tensor.nbytes for name, tensor in bucket if ".experts." in name))
    held = max(first + second for first, second in pairwise(sizes))

    quantization = "mxfp4" if mxfp4_experts else None
    engine = on_trainer_gpus(bucket_bytes=limit, quantization=quantization)
    inputs = MemoryInputs(model, ParallelConfig(), OptimizerConfig(), 16_384, engine=engine)
    sent = sent_tensor_bytes(inputs)
    if mxfp4_experts or limit >= 1 << 30:
        # A bucket may close half full and counts as full. Blocks and scales of a matrix are
        # allocated together.
        assert held / 1.001 <= sent <= 2.05 * held
    else:
        assert sent == pytest.approx(held, rel=0.01)


def sent_tensors(
    model: GptOssModelConfig, mxfp4_experts: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, shape in written_shapes(model, mxfp4_experts).items():
        is_mxfp4 = name.endswith(("_blocks", "_scales"))
        dtype = torch.uint8 if is_mxfp4 else torch.bfloat16
        yield name, torch.empty(shape, dtype=dtype, device="meta")


def test_mxfp4_buckets_are_larger_by_default() -> None:
    assert on_trainer_gpus().bucket_bytes == 1 << 30
    assert on_trainer_gpus(quantization="mxfp4").bucket_bytes == 1 << 31
    for quantization in (None, "mxfp4"):
        engine = on_trainer_gpus(quantization=quantization, bucket_bytes=1 << 29)
        assert engine.bucket_bytes == 1 << 29
    with pytest.raises(ValueError, match="greater than 0"):
        on_trainer_gpus(bucket_bytes=0)


@pytest.mark.parametrize(
    ("limit", "requests", "largest"), [(1 << 30, 20, 1.16), (1 << 31, 11, 1.79)]
)
def test_20b_mxfp4_sync_needs_fewer_requests_with_large_buckets(
    limit: int, requests: int, largest: float
) -> None:
    """docs/quantization.md lists these sizes in GB."""
    sizes = []
    for bucket in split_into_buckets(sent_tensors(MODEL_20B, mxfp4_experts=True), limit):
        sizes.append(sum(tensor.nbytes for _, tensor in bucket))
    assert len(sizes) == requests
    assert sum(sizes) / 1e9 == pytest.approx(13.76, abs=0.01)
    assert max(sizes) / 1e9 == pytest.approx(largest, abs=0.01)


@pytest.mark.parametrize(("quantization", "expected"), [(None, 1 << 30), ("mxfp4", 1 << 31)])
def test_sync_sends_the_number_of_buckets_in_the_plan(
    quantization: Literal["mxfp4"] | None,
    expected: int,
    tmp_path: Path,
) -> None:
    settings = SglangConfig(quantization=quantization)
    servers: Any = SimpleNamespace(actors=["server"], api_key="key")
    fleet = SglangFleet(servers, settings, BackendContext(MODEL_20B, "bf16", 0, tmp_path))

    senders: list[SglangSender] = []
    fleet._current = CurrentWeights(SimpleNamespace(send_weights=senders.append), 3)
    fleet._send_weights({"server": SimpleNamespace(url="http://server")}, compare=False)
    assert senders[0].plans[0].bucket_bytes == expected


def test_memory_fraction_follows_the_fullest_gpu_of_a_server() -> None:
    needs = ServerNeeds.of(MODEL_20B, "bf16", 2)
    both = static_fraction(0.5, [gpu(0.9), gpu(0.6)], needs)
    assert both == static_fraction(0.5, [gpu(0.6)], needs)


def test_unusable_memory_fraction_is_rejected_with_usable_ones() -> None:
    with pytest.raises(NotEnoughGpuMemoryError) as too_small:
        static_fraction(0.3, [gpu(0.9)], TWENTY_B)
    message = str(too_small.value)
    assert message.startswith(
        "rollout.engine.memory_fraction: 0.3 of GPU 0 is 45.0 GB, but a server needs "
    )
    assert "\n" not in message
    least, most = message.rpartition("Set it to ")[2].split(" to ")
    assert most == "0.90"
    static_fraction(float(least), [gpu(0.9)], TWENTY_B)
    with pytest.raises(NotEnoughGpuMemoryError):
        static_fraction(float(least) - 0.02, [gpu(0.9)], TWENTY_B)

    with pytest.raises(
        NotEnoughGpuMemoryError,
        match=r"only 60\.0 GB of 150\.0 GB are free\. Set it to .* to 0\.40$",
    ):
        static_fraction(0.5, [gpu(0.4)], TWENTY_B)
    static_fraction(0.4, [gpu(0.4)], TWENTY_B)


def test_gpu_without_enough_free_memory_is_rejected() -> None:
    with pytest.raises(
        NotEnoughGpuMemoryError,
        match=r"only 30\.0 GB of 150\.0 GB are free\. Reduce the trainer's memory",
    ):
        static_fraction(0.5, [gpu(0.2)], TWENTY_B)


@pytest.mark.parametrize(
    ("line", "value"),
    [
        (
            "ValueError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.42.",
            "Set rollout.engine.memory_fraction=0.45 or higher",
        ),
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.06 GiB.",
            "Set rollout.engine.memory_fraction=0.35 or lower, or stop other processes on the GPU",
        ),
    ],
)
def test_out_of_memory_log_gives_an_error_with_key_and_value(line: str, value: str) -> None:
    log = (
        f"[2026-11-23 16:00:00] Scheduler hit an exception: Traceback\n  File x\n{line}\n\nkilled\n"
    )
    assert memory_fault(log, 0.4) == f"{line} {value}"
    assert memory_fault("RuntimeError: no such kernel", 0.4) is None


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Machine whose nvidia-smi reports two GPUs with different free memory."""
    program = tmp_path / "bin/nvidia-smi"
    program.parent.mkdir()
    lines = ["0, GPU-8aa1-07, 43000, 100000", "1, GPU-8ab2-0f, 63000, 80000"]
    program.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ["GPU 0", "GPU 1"]),
        ("1,0", ["GPU 1", "GPU 0"]),
        (" 1 , 0", ["GPU 1", "GPU 0"]),
        ("GPU-8ab2-0f", ["GPU 1"]),
        ("GPU-8ab,GPU-8aa1", ["GPU 1", "GPU 0"]),
        ("", []),
        ("-1", []),
        ("1,-1,0", ["GPU 1"]),
        ("NoDevFiles", []),
    ],
)
def test_gpus_have_the_order_of_cuda_visible_devices(
    visible: str | None, names: list[str], two_gpus: None
) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    gpus = visible_gpus(environment)
    assert [gpu.name for gpu in gpus] == names
    assert all(gpu.total == 143_000 << 20 for gpu in gpus)
    assert all(gpu.free == (100_000 if gpu.name == "GPU 0" else 80_000) << 20 for gpu in gpus)


@pytest.mark.parametrize(
    ("visible", "message"),
    [
        (
            "7",
            "CUDA_VISIBLE_DEVICES=7: 7 matches none of the GPUs that nvidia-smi reports: 0 (GPU-8aa1-07), 1",
        ),
        ("0,GPU-8a", "CUDA_VISIBLE_DEVICES=0,GPU-8a: GPU-8a matches several of the GPUs"),
        ("MIG-5c8e", "MIG-5c8e matches none of the GPUs"),
        ("8aa1", "8aa1 matches none of the GPUs"),
    ],
)
def test_unknown_gpu_in_cuda_visible_devices_is_rejected(
    visible: str, message: str, two_gpus: None
) -> None:
    """CUDA ignores all GPUs after an invalid entry, so the share would be of other GPUs."""
    with pytest.raises(EngineUnavailableError, match=re.escape(message)):
        visible_gpus({"CUDA_VISIBLE_DEVICES": visible})


def test_machine_without_gpus_reports_no_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert visible_gpus({}) == []


def test_failed_gpu_query_is_an_error_and_not_zero_gpus(tmp_path: Path, two_gpus: None) -> None:
    program = tmp_path / "bin/nvidia-smi"
    program.write_text("#!/bin/sh\nexit 9\n")
    with pytest.raises(
        EngineUnavailableError, match=r"memory_fraction is a share .*failed: .*exit status 9"
    ):
        visible_gpus({})


def test_gpu_of_unknown_memory_is_named(tmp_path: Path, two_gpus: None) -> None:
    program = tmp_path / "bin/nvidia-smi"
    program.write_text("#!/bin/sh\necho '3, GPU-8ab2-0f, [N/A], [N/A]'\n")
    with pytest.raises(
        EngineUnavailableError,
        match=r"does not report the memory of GPU 3: memory.used is '\[N/A\]'",
    ):
        visible_gpus({})


def test_server_start_reads_the_memory_of_its_own_gpu(tmp_path: Path, two_gpus: None) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL_20B.to_hf_config(dtype="bfloat16")))

    def options(index: int, **settings: object) -> dict[str, str]:
        config = SglangConfig(memory_fraction=0.5, **settings)
        build = server_command(config, index, tmp_path, "bf16", routed_experts=False, seed=0)
        return dict(pairwise(build("127.0.0.1", 1)))

    def expected(free: int) -> float:
        share = 0.5 * (143_000 << 20) - CONTEXT_BYTES - WORKING_BYTES
        return share / ((free << 20) - CONTEXT_BYTES)

    colocated = {"colocated": True, "weight_sync": "cuda_ipc"}
    for index, gpu_number, free in ((0, "0", 100_000), (1, "1", 80_000), (2, "0", 100_000)):
        words = options(index, **colocated)
        assert words["--base-gpu-id"] == gpu_number, "server 2 is the first of another node"
        assert float(words["--mem-fraction-static"]) == pytest.approx(expected(free), abs=1e-4)
    own = options(1, env={"CUDA_VISIBLE_DEVICES": "1"})
    assert own["--base-gpu-id"] == "0"
    assert float(own["--mem-fraction-static"]) == pytest.approx(expected(80_000), abs=1e-4)
    on_a_cpu = options(0, arguments=["--device", "cpu"])
    assert float(on_a_cpu["--mem-fraction-static"]) == 0.5
    with pytest.raises(NotEnoughGpuMemoryError, match=r"rollout\.engine\.memory_fraction"):
        config = SglangConfig(memory_fraction=0.2)
        server_command(config, 0, tmp_path, "bf16", routed_experts=False, seed=0)("127.0.0.1", 1)
