"""MXFP4 experts sent to SGLang servers: bytes, layouts, faults.

The plugin's code runs as in a server, in main memory. Its Triton kernels run in the interpreter.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from converters.random_weights import random_hf_weights
from gptoss_kernels import mxfp4
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
from rl_loop.config.load import load_config
from rl_loop.config.run import RlConfig
from rl_loop.engines.sglang.config import PLUGIN, SglangConfig
from rl_loop.engines.sglang.gpu_memory import ServerNeeds, mxfp4_expert_bytes
from rl_loop.engines.sglang.server_command import server_command
from rl_loop.engines.sglang.server_layout import MXFP4_EXPERT_PARAMETERS
from rl_loop.engines.sglang.weight_endpoints import SglangServers, send_weights
from rl_loop.weight_sync import send
from rl_loop.weight_sync.source import SyncError, WeightMismatchError
from tests.support.distributed import free_port, run_distributed
from tests.support.rl_loop.mxfp4_server import (
    Mxfp4Server,
    ServedModel,
    SyncedModel,
    expert_storage,
    layout,
    plugin,
)
from tests.support.rl_loop.mxfp4_sync import MODEL, mxfp4_weights, plan_for, run_with_server
from tests.support.rl_loop.plugin_process import run_with_plugin, write_modules
from tests.support.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).parents[3]
ODD_SHAPES = [(2, 160, 176), (1, 64, 64), (2, 33, 17), (1, 520, 48)]


def random_bytes(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


# -- layouts --------------------------------------------------------------------------------------


def split_codes(byte: int) -> tuple[int, int]:
    return byte & 15, byte >> 4


@pytest.mark.parametrize(("experts", "rows", "row_bytes"), ODD_SHAPES)
def test_codes_of_a_word_become_bf16_by_shifts_and_masks(
    experts: int, rows: int, row_bytes: int
) -> None:
    """A word holds 4 bytes of 2 codes. Rotated by 0, 4 and 10 bits, it has codes in bf16's bits.

    A code is a sign, two bits of the exponent and one bit of the mantissa. The fourth byte is in
    two pieces.
    """
    packed = random_bytes(experts, rows, row_bytes)
    storage = random_bytes(experts, *layout.value_storage_shape(rows, row_bytes), seed=1)
    layout.swizzle_values(packed, storage)

    mask = 0b1000000111000000
    words = storage.view(torch.int32).tolist()
    for expert in range(experts):
        for storage_row in range(0, storage.shape[1], 3):
            for column in range(0, storage.shape[2] // 4, 5):
                row = 16 * (storage_row // 4) + 2 * (storage_row % 4) + column // 16 % 2
                byte = 32 * (column // 32) + 8 * (column % 4) + column // 4 % 4
                word = words[expert][storage_row][column] & 0xFFFFFFFF
                fourth = (word << 6 & 0x80C080C0) | (word >> 2 & 0x01000100)
                numbers = (word, word << 4, word << 10 | word >> 22, fourth)
                for place, pair in enumerate(numbers):
                    for half in range(2):
                        number = pair >> (16 * half) & mask
                        code = (number >> 15 << 3) | (number >> 6 & 7)
                        at = (row + 8 * (place % 2), byte + 4 * (place // 2))
                        expected = 0
                        if at[0] < rows and at[1] < row_bytes:
                            expected = split_codes(int(packed[expert, at[0], at[1]]))[half]
                        assert code == expected, (expert, at, half)


@pytest.mark.parametrize(("experts", "rows", "blocks"), [(2, 160, 11), (1, 256, 2), (2, 33, 3)])
def test_scales_have_the_layout_of_4_warp_tiles(experts: int, rows: int, blocks: int) -> None:
    padded = (rows + 10, blocks + 1)
    scales = random_bytes(experts, rows, blocks)
    storage = random_bytes(experts, *layout.scale_storage_shape(*padded), seed=1)
    layout.swizzle_scales(scales, padded, storage)

    for m in range(32 * storage.shape[1]):
        a, b, w, c, d = m // 128, m // 64 % 2, m // 16 % 4, m // 8 % 2, m % 8
        for k in range(storage.shape[2] // 32):
            e, f = divmod(k, 2)
            expected = 127 if m < padded[0] and k < padded[1] else 0
            if m < rows and k < blocks:
                expected = int(scales[0, m, k])
            expected = (expected + 126) % 256
            column = (((2 * e + b) * 8 + d) * 2 + f) * 2 + c
            assert int(storage[0, 4 * a + w, column]) == expected, (m, k)


@pytest.mark.parametrize(("experts", "rows", "row_bytes"), ODD_SHAPES)
def test_layouts_match_triton_kernels_except_word_bits_and_bias(
    experts: int, rows: int, row_bytes: int
) -> None:
    values = pytest.importorskip(
        "triton_kernels.tensor_details.layout_details.hopper_value",
        reason="sglang-kernel, which has triton_kernels, is not installed",
    )
    scales = pytest.importorskip("triton_kernels.tensor_details.layout_details.hopper_scale")

    packed = random_bytes(experts, rows, row_bytes)
    theirs = values.HopperMXValueLayout(packed.mT.shape, mx_axis=1).swizzle_data(packed.mT)
    ours = random_bytes(experts, *layout.value_storage_shape(rows, row_bytes), seed=1)
    layout.swizzle_values(packed, ours)
    assert torch.equal(layout.to_plugin_bit_order(theirs.mT), ours)

    blocks = max(1, row_bytes // 16)
    some = packed[:, :, :blocks].contiguous()
    its_layout = scales.HopperMXScaleLayout(some.mT.shape, mx_axis=1, num_warps=4)
    theirs = its_layout.swizzle_data(some.mT).mT
    ours = random_bytes(experts, *layout.scale_storage_shape(rows, blocks), seed=1)
    layout.swizzle_scales(some, (rows, blocks), ours)
    assert torch.equal(theirs + 126, ours[:, : theirs.shape[1]])
    # The rest pads the rows to whole programs of 256 rows.
    assert (ours[:, theirs.shape[1] :] == 126).all()


@pytest.mark.parametrize(("experts", "rows", "row_bytes"), ODD_SHAPES)
def test_layout_round_trips_and_counts_wrong_padding(
    experts: int, rows: int, row_bytes: int
) -> None:
    packed = random_bytes(experts, rows, row_bytes)
    storage = random_bytes(experts, *layout.value_storage_shape(rows, row_bytes), seed=1)
    layout.swizzle_values(packed, storage)
    back, wrong = layout.unswizzle_values(storage, rows, row_bytes)
    assert torch.equal(back, packed)
    assert wrong == 0

    # A change of every second byte of the storage changes a bit of the matrix or of its padding.
    storage[0, -1, 1::2] ^= 1
    back, wrong = layout.unswizzle_values(storage, rows, row_bytes)
    changed = int((back != packed).sum())
    assert changed + wrong > 0
    assert wrong == 0 or rows % 64 or row_bytes % 64


def test_layout_kernels_round_trip_in_tritons_interpreter() -> None:
    program = ROOT / "tests/support/rl_loop/engines/hopper_layout_interpreted.py"
    assert run_with_plugin(str(program), interpreted=True) == "2 shapes\n"


def test_plugin_loads_the_experts_that_sglang_loads() -> None:
    for package in ("sglang", "triton_kernels"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    program = ROOT / "tests/support/rl_loop/engines/sglang_own_loading.py"
    path = os.pathsep.join([str(PLUGIN), *sys.path])
    done = subprocess.run(
        [sys.executable, str(program)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "6 ranks"


# -- ranks ----------------------------------------------------------------------------------------


def test_trainer_and_server_name_experts_equally() -> None:
    assert expert_storage.HF_NAMES == MXFP4_EXPERT_PARAMETERS


@pytest.mark.parametrize("ranks", [1, 2])
def test_expert_shards_of_all_ranks_make_the_whole(ranks: int) -> None:
    weights = mxfp4_weights(1)
    parts: list[dict[str, torch.Tensor]] = []
    for rank in range(ranks):
        synced = SyncedModel(ServedModel(MODEL, rank, ranks))
        for _ in synced.load_experts(weights.items()):
            pass
        experts = synced.experts[0]
        read = {name: experts.read(name) for name in expert_storage.HF_NAMES}
        assert all(wrong == 0 for _, wrong in read.values())
        parts.append({name: tensor for name, (tensor, _) in read.items()})

    prefix = "model.layers.0.mlp.experts."
    for name, dimension in {"w13_weight": 1, "w2_weight": 2}.items():
        source = expert_storage.HF_NAMES[name]
        whole = torch.cat([part[name] for part in parts], dimension)
        assert torch.equal(whole, weights[prefix + source].flatten(-2))
        whole = torch.cat([part[f"{name}_scale"] for part in parts], dimension)
        assert torch.equal(whole, weights[prefix + expert_storage.HF_NAMES[f"{name}_scale"]])
    biases = torch.cat([part["w13_weight_bias"] for part in parts], 1)
    assert torch.equal(biases, weights[f"{prefix}gate_up_proj_bias"].float())
    # The outputs of the ranks are summed, so the biases are, too.
    assert torch.equal(
        sum(part["w2_weight_bias"] for part in parts), weights[f"{prefix}down_proj_bias"].float()
    )


def test_five_blocks_are_sharded_as_three_and_two() -> None:
    shards = [expert_storage.ExpertShard.of(rank, 2, 160) for rank in range(2)]
    assert [(shard.start, shard.end) for shard in shards] == [(0, 96), (96, 160)]


# -- syncs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("transport", ["shared_memory", "disk"])
def test_servers_hold_the_blocks_and_scales_of_our_quantizer(
    transport: str, ranks: int, tmp_path: Path
) -> None:
    get = random_hf_weights(MODEL, 1)
    weights = mxfp4_weights(1)

    async def work(server: Mxfp4Server) -> None:
        plan = plan_for(server.url, ranks, transport=transport, directory=tmp_path / "weights")
        await send_weights(weights.items(), MODEL, plan)
        assert server.version == "2"
        everything = replace(plan, transport="none")
        await send_weights(weights.items(), MODEL, everything)
        name = "model.layers.1.mlp.experts.down_proj"
        matrix = get(name).to(torch.bfloat16)[2].mT.contiguous()
        blocks, scales = mxfp4.quantize(matrix)
        assert torch.equal(server.weights[f"{name}_blocks"][2], blocks)
        assert torch.equal(server.weights[f"{name}_scales"][2], scales)
        with pytest.raises(WeightMismatchError, match="but its content differs in model"):
            await send_weights(mxfp4_weights(2).items(), MODEL, everything)

    run_with_server(ranks, work)


def test_sleeping_server_keeps_addresses_and_reloads_experts() -> None:
    weights = mxfp4_weights(1)

    async def work(server: Mxfp4Server) -> None:
        def addresses() -> list[int]:
            stored = [experts.storage for experts in server.synced[0].experts]
            return [tensor.data_ptr() for kept in stored for tensor in kept.values()]

        before = addresses()
        servers = SglangServers(MODEL, plan_for(server.url))
        await send_weights(weights.items(), MODEL, plan_for(server.url))
        await servers.call("/release_memory_occupation", {})
        with pytest.raises(WeightMismatchError, match="but its content differs in model"):
            await send_weights(weights.items(), MODEL, plan_for(server.url, transport="none"))
        await servers.call("/resume_memory_occupation", {})
        await send_weights(weights.items(), MODEL, plan_for(server.url))
        await send_weights(weights.items(), MODEL, plan_for(server.url, transport="none"))
        assert addresses() == before
        await servers.close()

    run_with_server(1, work)


# -- faults ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [0, 3, -1])
def test_lost_bucket_is_named_and_the_server_does_not_serve(
    lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = send.split_into_buckets
    names: list[str] = []

    def some(named: Any, limit: int) -> Iterator[Any]:
        buckets = list(original(named, limit))
        bucket = buckets.pop(lost)
        names.extend(name for name, _ in bucket)
        yield from buckets

    async def work(server: Mxfp4Server) -> None:
        monkeypatch.setattr(send, "split_into_buckets", some)
        with pytest.raises(SyncError) as failure:
            await send_weights(mxfp4_weights(1).items(), MODEL, plan_for(server.url))
        first = sorted(names)[0]
        assert f"the first is {first}" in str(failure.value)
        assert server.version == "default"
        assert not server.paused.is_set()

    run_with_server(1, work)


def test_swapped_scale_is_named_and_the_server_does_not_serve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "model.layers.0.mlp.experts.down_proj_scales"
    original = send.split_into_buckets

    def changed(named: Any, limit: int) -> Iterator[Any]:
        for bucket in original(named, limit):
            for at, (its_name, tensor) in enumerate(bucket):
                if its_name == name:
                    other = tensor.clone()
                    other[1, 5] = tensor[1, 6]
                    other[1, 6] = tensor[1, 5]
                    assert not torch.equal(other, tensor)
                    bucket[at] = (name, other)
            yield bucket

    async def work(server: Mxfp4Server) -> None:
        monkeypatch.setattr(send, "split_into_buckets", changed)
        with pytest.raises(WeightMismatchError, match=f"but its content differs in {name}$"):
            await send_weights(mxfp4_weights(1).items(), MODEL, plan_for(server.url))
        assert server.version == "default"
        assert not server.paused.is_set()

    run_with_server(1, work)


@pytest.mark.parametrize("name", list(expert_storage.HF_NAMES))
def test_wrong_byte_of_padding_is_named(name: str) -> None:
    weights = mxfp4_weights(1)

    async def work(server: Mxfp4Server) -> None:
        await send_weights(weights.items(), MODEL, plan_for(server.url, ranks=2))
        experts = server.synced[1].experts[0]
        rows, inputs = experts.shape(name, padded=True)
        tensor = experts.storage[name]
        if name == "w2_weight_bias":
            return  # this bias has no padding
        if name.endswith("_bias"):
            tensor[0, -1] = 1
        elif name.endswith("_scale"):
            tensor[0, -1, -1] ^= 1
        else:
            # Change the last byte of the padded matrix through the layout.
            padded, _ = layout.unswizzle_values(tensor, rows, inputs // 2)
            padded[0, -1, -1] = 1
            layout.swizzle_values(padded, tensor)
        plan = plan_for(server.url, ranks=2, transport="none")
        source = expert_storage.HF_NAMES[name]
        with pytest.raises(WeightMismatchError, match=rf"{source} \(wrong padding: 1 elements\)"):
            await send_weights(weights.items(), MODEL, plan)

    run_with_server(2, work)


def mock_sglang_classes() -> Any:
    """Install mocks of the classes that the plugin patches.

    Returns:
        The scheduler's class. Like SGLang's class, it returns an error as the result of its rank.
    """
    checker = ModuleType("weight_checker")
    checker.WeightChecker = type(
        "WeightChecker",
        (),
        {
            "__init__": lambda self, model: setattr(self, "_get_model", lambda: model),
            "handle": lambda self, action: None,
            "_compute_checksum": lambda self: {"checksums": {}},
        },
    )

    class SchedulerWeightUpdaterManager:
        def __init__(self, model: Any, group: Any) -> None:
            self.checker = checker.WeightChecker(model)
            self.tp_cpu_group = group

        def check_weights(self, request: Any) -> Any:
            try:
                self.checker.handle(request.action)
            except Exception as error:
                return SimpleNamespace(success=False, message=str(error))
            return SimpleNamespace(success=True, message="Success.")

    updater = ModuleType("weight_updater")
    updater.SchedulerWeightUpdaterManager = SchedulerWeightUpdaterManager
    packages = {
        "sglang.srt.utils": {"weight_checker": checker},
        "sglang.srt.managers.scheduler_components": {"weight_updater": updater},
    }
    for name, modules in packages.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:end]), ModuleType(parts[end - 1]))
        vars(sys.modules[name]).update(modules)
    return SchedulerWeightUpdaterManager


FAULTY_RANKS = (None, 0, 1)
LAST = "model.layers.0.mlp.experts.down_proj_scales"


def sync_on_two_ranks(rank: int, port: int) -> list[tuple[bool, str]]:
    """Run syncs on one of two ranks and return the results of their ends.

    The first sync has no fault. Others have a fault on one rank, or a scale on the second rank that
    is too large.
    """
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    manager_class = mock_sglang_classes()
    plugin._install_checker()
    plugin._install_answers_of_all_ranks()

    def sync(load: Callable[[SyncedModel], None]) -> tuple[bool, str]:
        model = ServedModel(MODEL, rank, 2)
        manager = manager_class(model, dist.group.WORLD)
        assert manager.check_weights(SimpleNamespace(action=plugin.BEGIN_SYNC)).success
        load(plugin.synced(model))
        answer = manager.check_weights(SimpleNamespace(action=plugin.END_SYNC))
        return answer.success, answer.message

    answers = []
    for faulty_rank in FAULTY_RANKS:
        answers.append(sync(partial(load_with_fault, is_faulty=rank == faulty_rank)))
    weights = weights_with_a_large_scale() if rank == 1 else mxfp4_weights(1)
    answers.append(sync(lambda known: list(known.load_experts(weights.items()))))
    dist.destroy_process_group()
    return answers


def load_with_fault(known: SyncedModel, is_faulty: bool) -> None:
    """Load the weights of a sync. On a faulty rank the last tensor fails, like out of memory."""
    weights = mxfp4_weights(1)
    weights[LAST] = weights.pop(LAST)
    if is_faulty:
        del known.experts[0].storage["w2_weight_scale"]
    try:
        list(known.load_experts(weights.items()))
    except KeyError:
        assert is_faulty


def test_fault_on_any_rank_of_a_server_ends_the_sync() -> None:
    lost = f"the sync is incomplete: 1 tensors are missing, the first is {LAST}"
    for answers in run_distributed(sync_on_two_ranks, 2, free_port()):
        assert answers == [
            (True, "Success."),
            (False, f"tensor-parallel rank 0 of 2: {lost}"),
            (False, f"tensor-parallel rank 1 of 2: {lost}"),
            (False, f"tensor-parallel rank 1 of 2: {TOO_LARGE}"),
        ]


def change_dtype(weights: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], str]:
    name = "model.layers.0.mlp.experts.down_proj_scales"
    return {name: weights[name].float()}, r"has torch.float32 .* expects uint8 \[3, 96, 6\]"


def send_bf16(weights: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], str]:
    name = "model.layers.0.mlp.experts.down_proj"
    return {name: torch.zeros(3, 192, 96)}, f"the server's model has no tensor {name}"


def cut_rows(weights: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], str]:
    name = "model.layers.1.mlp.experts.gate_up_proj_blocks"
    return {name: weights[name][:, 1:]}, r"gate_up_proj_blocks has torch.uint8 \[3, 383, 3, 16\]"


@pytest.mark.parametrize("change", [change_dtype, send_bf16, cut_rows])
def test_tensor_unknown_to_the_server_is_rejected(change: Any) -> None:
    sent, message = change(mxfp4_weights(1))
    synced = SyncedModel(ServedModel(MODEL))
    with pytest.raises(expert_storage.WrongWeightsError, match=message):
        list(synced.load_experts(sent.items()))


def test_tensor_sent_twice_is_rejected_until_the_next_sync() -> None:
    weights = mxfp4_weights(1)
    synced = SyncedModel(ServedModel(MODEL))
    others = [name for name, _ in synced.load_experts(weights.items())]
    assert others == [name for name in weights if ".experts." not in name]
    synced.end_sync()
    list(synced.load_experts(weights.items()))
    with pytest.raises(expert_storage.WrongWeightsError, match="was sent twice"):
        list(synced.load_experts(weights.items()))
    synced.begin_sync()
    with pytest.raises(
        expert_storage.WrongWeightsError, match=f"{len(weights)} tensors are missing"
    ):
        synced.end_sync()


class NoWaiting(TorchDispatchMode):
    """Mode in which reading a value of a tensor fails, because on a GPU it would synchronize."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def weights_with_a_large_scale() -> dict[str, torch.Tensor]:
    weights = mxfp4_weights(1)
    weights[LAST][2, 7, 3] = 130
    return weights


TOO_LARGE = f"{LAST} has the scale byte 130, which means values of up to 48, but servers support scale bytes up to 128"


def test_too_large_scale_is_rejected_at_the_end_of_a_sync() -> None:
    synced = SyncedModel(ServedModel(MODEL))
    with NoWaiting():
        list(synced.load_experts(weights_with_a_large_scale().items()))
    with pytest.raises(expert_storage.WrongWeightsError, match=f"^{TOO_LARGE}$"):
        synced.end_sync()

    # A failed or interrupted sync does not affect the next sync.
    list(synced.load_experts(mxfp4_weights(1).items()))
    synced.end_sync()
    list(synced.load_experts({LAST: weights_with_a_large_scale()[LAST]}.items()))
    synced.begin_sync()
    with pytest.raises(expert_storage.WrongWeightsError, match="tensors are missing"):
        synced.end_sync()


@pytest.mark.parametrize("largest", [128, 129])
def test_largest_supported_scale_is_served_and_the_next_is_not(
    largest: int,
) -> None:
    synced = SyncedModel(ServedModel(MODEL))
    weights = mxfp4_weights(1)
    name = "model.layers.1.mlp.experts.gate_up_proj_scales"
    weights[name][0, 0, 0] = largest
    list(synced.load_experts(weights.items()))
    if largest == expert_storage.MAX_SCALE:
        synced.end_sync()
    else:
        with pytest.raises(expert_storage.WrongWeightsError, match=f"^{name} has"):
            synced.end_sync()


@pytest.mark.parametrize("transport", ["shared_memory", "disk"])
def test_server_with_a_too_large_scale_serves_after_a_new_sync(
    transport: str, tmp_path: Path
) -> None:
    async def work(server: Mxfp4Server) -> None:
        plan = plan_for(server.url, ranks=2, transport=transport, directory=tmp_path / "weights")
        with pytest.raises(SyncError) as failure:
            await send_weights(weights_with_a_large_scale().items(), MODEL, plan)
        assert TOO_LARGE in str(failure.value)
        assert server.version == "default"
        assert not server.paused.is_set()

        await send_weights(mxfp4_weights(1).items(), MODEL, plan)
        assert server.version == "2"

    run_with_server(2, work)


# -- SGLang's classes and the start of a server ----------------------------------------------------

TOPK = """
import types, torch
calls = []
def triton_kernels_topk(logits, k):
    return types.SimpleNamespace(indx=logits.topk(k).indices.to(torch.int16).sort(-1).values)
def routing(logits, k):
    return triton_kernels_topk(logits, k)
def capture_routed_experts_if_allowed(config, layer_id, indices):
    calls.append((config, layer_id, indices.tolist()))
class TopK:
    topk_config, layer_id = "config", 7
    def forward_cuda(self, hidden, logits, kernel):
        if kernel == "triton_kernel":
            routing(logits, 2)
        return kernel
"""
CAPTURE = """
import gptoss_mxfp4_experts as plugin, torch
plugin._install_routes()
from sglang.srt.layers.moe import topk
logits = torch.tensor([[0.0, 3.0, 1.0, 2.0], [9.0, 0.0, 1.0, 5.0]])
print([topk.TopK().forward_cuda(None, logits, kernel) for kernel in ("triton_kernel", "other")])
print(topk.calls)
"""


def run_in_stub(tmp_path: Path, source: str, code: str) -> str:
    write_modules(tmp_path, {"sglang/srt/layers/moe/topk.py": source})
    return run_with_plugin("-c", code, packages=tmp_path)


def test_routes_are_recorded_for_triton_kernels(tmp_path: Path) -> None:
    printed = run_in_stub(tmp_path, TOPK, CAPTURE).splitlines()
    assert printed == [
        "['triton_kernel', 'other']",
        "[('config', 7, [[1, 3], [0, 3]])]",  # once, because SGLang records for the other kernel
    ]


def test_mxfp4_servers_require_mxfp4_training(tmp_path: Path) -> None:
    path = ROOT / "configs/rl/tiny_retool.yaml"
    options = ["rollout.engine.type=sglang", "rollout.engine.quantization=mxfp4"]
    with pytest.raises(ValueError, match="train all weights with quantization=mxfp4"):
        load_config(path, RlConfig, options)
    engine = load_config(path, RlConfig, [*options, "quantization=mxfp4"]).rollout.engine
    assert isinstance(engine, SglangConfig)
    assert engine.environment["GPTOSS_SGLANG_PATCHES"] == (
        "hidden_key,bound_store"
        ",mxfp4_experts,ptxas_override,fused_routing,moe_occupancy,small_batch_moe,fast_abort"
        ",fused_sampling,fused_window_attention,fp32_logits"
    )

    description = engine.describe_model(MODEL, "bf16")
    assert description["quantization_config"]["quant_method"] == "mxfp4"
    (tmp_path / "config.json").write_text(json.dumps(description))
    words = server_command(engine, 0, tmp_path, "bf16", routed_experts=True, seed=0)("host", 1)
    assert words[words.index("--moe-runner-backend") + 1] == "triton_kernel"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"arguments": ["--moe-runner-backend", "marlin"]}, "triton_kernel and without expert"),
        ({"arguments": ["--ep-size=2"]}, "triton_kernel and without expert"),
        ({"attention_backend": "trtllm_mha"}, "on Hopper GPUs"),
    ],
)
def test_servers_with_unsupported_layouts_are_rejected(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        SglangConfig(quantization="mxfp4", **settings)


@pytest.mark.parametrize(("ranks", "measured"), [(1, 13.32), (2, 6.86)])
def test_estimated_weights_of_a_20b_server_equal_sglangs(ranks: int, measured: float) -> None:
    """The values are GiB per rank on H200 (docs/quantization.md)."""
    model = GptOssModelConfig(num_layers=24, num_experts=32)
    needs = ServerNeeds.of(model, "bf16", ranks, mxfp4_experts=True)
    assert needs.weights / (1 << 30) == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_estimated_experts_of_a_rank_equal_the_plugins(ranks: int) -> None:
    model = GptOssModelConfig(num_layers=3, num_experts=32)
    # SGLang pads the columns of a rank to a multiple of 64.
    inner = -(-model.intermediate_size // ranks // 64) * 64
    kept = 0
    for rows, inputs in ((2 * inner, model.hidden_size), (model.hidden_size, inner)):
        for shape in (
            layout.value_storage_shape(rows, inputs // 2),
            layout.scale_storage_shape(rows, inputs // 32),
        ):
            kept += shape[0] * shape[1]
    assert mxfp4_expert_bytes(model, ranks) == 3 * 32 * kept


def test_other_sglang_version_is_rejected_for_mxfp4_experts(tmp_path: Path) -> None:
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang/version.py").write_text('__version__ = "0.5.18"\n')
    settings = SglangConfig(quantization="mxfp4", env={"PYTHONPATH": str(tmp_path)})
    code = "import gptoss_sglang; gptoss_sglang.register()"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env=os.environ | settings.environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 1
    expected = "this is 0.5.18. Either leave rollout.engine.quantization out"
    assert expected in done.stderr
