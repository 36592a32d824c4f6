"""Weights are loaded into and read from a running Megatron model exactly, in every layout."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from converters.errors import ConversionError
from converters.gathering import WeightGathering
from converters.model_weights import export_hf_weights, load_hf_weights
from converters.names import hf_shapes
from converters.random_weights import random_hf_weights
from megatron_gptoss import distributed
from megatron_gptoss.config import ParallelConfig
from megatron_gptoss.model import build_model
from tests.support.converters.live import OutOfMemoryError, break_gathering
from tests.support.converters.models import TINY, tiny_weights
from tests.support.distributed import free_port, run_distributed

Weights = dict[str, torch.Tensor]
TWO = {
    "data": {},
    "expert": {"expert": 2},
    "pipeline": {"pipeline": 2},
    "tensor": {"tensor": 2},
    "tensor+expert": {"tensor": 2, "expert": 2},
    "context": {"context": 2},
}
FOUR = {"pipeline+tensor+expert": {"pipeline": 2, "tensor": 2, "expert": 2}}


def load_and_export(
    rank: int, world_size: int, layouts: dict[str, Any], dtype: torch.dtype, ports: list[int]
) -> Any:
    torch.set_num_threads(1)
    weights = tiny_weights()
    result = {}
    for (name, layout), port in zip(layouts.items(), ports, strict=True):
        parallel = ParallelConfig(world_size=world_size, **layout)
        distributed.initialize(parallel, rank, port=port)
        model = build_model(TINY, parallel, dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan"))
        load_hf_weights(model, TINY, weights.__getitem__)
        finite = all(parameter.isfinite().all() for parameter in model.parameters())
        exported = {key: tensor.clone() for key, tensor in export_hf_weights(model, TINY)}
        held = sum(parameter.numel() for parameter in model.parameters())
        result[name] = finite, held, exported
        distributed.shutdown()
    return result


@pytest.fixture(scope="module")
def two_ranks() -> list[Any]:
    return run_distributed(load_and_export, 2, 2, TWO, torch.float32, [free_port() for _ in TWO])


def check(ranks: list[Any], layout: str, expected: Weights) -> None:
    assert all(rank[layout][0] for rank in ranks), "not every parameter was filled"
    exported = ranks[0][layout][2]
    assert list(exported) == list(hf_shapes(TINY))
    for name, tensor in expected.items():
        assert exported[name].dtype == tensor.dtype
        assert torch.equal(exported[name], tensor), name
    assert not any(rank[layout][2] for rank in ranks[1:])


@pytest.mark.parametrize("layout", TWO)
def test_export_of_two_ranks_is_bit_exact(
    layout: str, two_ranks: list[Any], weights: Weights
) -> None:
    check(two_ranks, layout, weights)


def test_four_rank_export_in_bf16_is_exact_in_mixed_layouts(
    weights: Weights,
) -> None:
    ranks = run_distributed(
        load_and_export, 4, 4, FOUR, torch.bfloat16, [free_port() for _ in FOUR]
    )
    for layout in FOUR:
        bf16 = {
            name: tensor if name.endswith("router.bias") else tensor.bfloat16()
            for name, tensor in weights.items()
        }
        check(ranks, layout, bf16)  # the router's bias is an fp32 parameter


def test_model_parallel_ranks_hold_only_their_part(two_ranks: list[Any], weights: Weights) -> None:
    total = sum(tensor.numel() for tensor in weights.values())
    experts = sum(tensor.numel() for name, tensor in weights.items() if ".experts." in name)
    assert [rank["data"][1] for rank in two_ranks] == [total, total]
    assert sum(rank["pipeline"][1] for rank in two_ranks) == total
    assert [rank["expert"][1] for rank in two_ranks] == [total - experts // 2] * 2


def gather_for_several(
    rank: int, world_size: int, layouts: dict[str, Any], dtype: torch.dtype, ports: list[int]
) -> Any:
    """Return the tensors that this rank receives, by layout and receivers."""
    torch.set_num_threads(1)
    weights = tiny_weights()
    result = {}
    for (name, layout), port in zip(layouts.items(), ports, strict=True):
        parallel = ParallelConfig(world_size=world_size, **layout)
        distributed.initialize(parallel, rank, port=port)
        model = build_model(TINY, parallel, dtype)
        load_hf_weights(model, TINY, weights.__getitem__)
        gathering = WeightGathering(model, TINY)
        for receivers in ((0, 1), (1,)):
            gathered = gathering.begin(receivers)
            result[name, receivers] = {key: tensor.clone() for key, tensor in gathered}
        distributed.shutdown()
    return result


@pytest.fixture(scope="module")
def gathered_by_two() -> list[Any]:
    return run_distributed(gather_for_several, 2, 2, TWO, torch.float32, [free_port() for _ in TWO])


@pytest.mark.parametrize("layout", TWO)
@pytest.mark.parametrize("receivers", [(0, 1), (1,)])
def test_every_receiver_gets_all_weights_and_no_other_rank_any(
    layout: str, receivers: tuple[int, ...], gathered_by_two: list[Any], weights: Weights
) -> None:
    for rank, results in enumerate(gathered_by_two):
        gathered = results[layout, receivers]
        if rank not in receivers:
            assert gathered == {}
            continue
        assert list(gathered) == list(hf_shapes(TINY))
        for name, tensor in weights.items():
            assert torch.equal(gathered[name], tensor), (rank, name)


def gather_on_four(rank: int, port: int) -> Any:
    """Two of four ranks receive, as for two servers on the GPUs of four trainer ranks."""
    torch.set_num_threads(1)
    parallel = ParallelConfig(world_size=4, pipeline=2, tensor=2, expert=2)
    distributed.initialize(parallel, rank, port=port)
    model = build_model(TINY, parallel)
    load_hf_weights(model, TINY, tiny_weights().__getitem__)
    gathered = {key: tensor.clone() for key, tensor in WeightGathering(model, TINY).begin((0, 2))}
    distributed.shutdown()
    return gathered


def test_two_of_four_ranks_receive_all_weights_in_mixed_layouts(
    weights: Weights,
) -> None:
    ranks = run_distributed(gather_on_four, 4, free_port())
    assert ranks[1] == ranks[3] == {}
    for gathered in (ranks[0], ranks[2]):
        assert all(torch.equal(gathered[name], tensor) for name, tensor in weights.items())


def send_in_pace(rank: int, port: int) -> list[float]:
    """Let rank 0 pause after every tensor. Return its request times, or rank 1's send times."""
    torch.set_num_threads(1)
    distributed.initialize(ParallelConfig(world_size=2, expert=2), rank, port=port)
    gathering = WeightGathering(build_model(TINY, ParallelConfig(world_size=2, expert=2)), TINY)

    times = []
    asked = 0.0
    send, receive = dist.send, dist.recv

    def timed_send(*arguments: Any, **options: Any) -> None:
        times.append(time.monotonic())
        send(*arguments, **options)

    def timed_receive(*arguments: Any, **options: Any) -> None:
        times.append(asked)
        receive(*arguments, **options)

    dist.send, dist.recv = timed_send, timed_receive  # type: ignore[assignment]
    gathered = gathering.begin((0,), paced=True)
    while True:
        asked = time.monotonic()
        if next(gathered, None) is None:
            break
        time.sleep(0.01)
    distributed.shutdown()
    return times


def test_a_rank_sends_nothing_before_the_receiver_asks_for_it() -> None:
    asked, sent = run_distributed(send_in_pace, 2, free_port())
    assert len(asked) == len(sent) >= TINY.num_layers
    assert all(first <= then for first, then in zip(asked, sent, strict=True))


def gather_with_faults(rank: int, world_size: int, port: int, faults: list[Any]) -> list[Any]:
    """Try each fault, then retry. Return (error or None, tensors by name) of both attempts."""
    torch.set_num_threads(1)
    distributed.initialize(ParallelConfig(world_size=world_size, expert=2), rank, port=port)
    model = build_model(TINY, ParallelConfig(world_size=world_size, expert=2))
    load_hf_weights(model, TINY, tiny_weights().__getitem__)
    gathering = WeightGathering(model, TINY)
    results = []
    for fault, broken_rank, receivers in faults:
        if rank == broken_rank:
            break_gathering(gathering, fault)
        for _ in range(2):
            error = None
            tensors: Weights = {}
            try:
                # Weight syncs use the same arguments.
                gathered = gathering.begin(receivers, paced=len(receivers) == 1)
                for name, tensor in gathered:
                    tensors[name] = tensor.clone()
                    if rank == broken_rank and fault == f"consumer{len(tensors)}":
                        fault = "consumed"
                        gathered.finish()
                        raise OutOfMemoryError("CUDA out of memory in consumer")
            except RuntimeError as failure:
                error = f"{type(failure).__name__}: {failure}"
            results.append((error, tensors))
        vars(gathering).pop("read", None)
        vars(gathering).pop("plan", None)
    distributed.shutdown()
    return results


GATHERING_FAULTS = [
    (fault, rank, receivers)
    for fault in ("buffer", "read1", "read9", "read20", "consumer1", "consumer25")
    for rank in (0, 1)
    for receivers in ((0, 1), (0,))
    # if rank 0 receives, rank 1 consumes no tensors, and rank 1 has only 16 parameters to send
    if rank == 0 or receivers == (0, 1) or fault in ("buffer", "read1", "read9")
]


def test_gathering_works_again_after_a_failed_rank(
    weights: Weights,
) -> None:
    ranks = run_distributed(gather_with_faults, 2, 2, free_port(), GATHERING_FAULTS, timeout=120)
    for number, (fault, broken_rank, receivers) in enumerate(GATHERING_FAULTS):
        first_errors = [results[2 * number][0] for results in ranks]
        if fault == "buffer":
            assert all(
                error.startswith(
                    f"GatheringAbortedError: rank {broken_rank} cannot allocate memory"
                )
                for error in first_errors
            )
        else:
            expected = f"OutOfMemoryError: CUDA out of memory in {fault.rstrip('0123456789')}"
            assert first_errors[broken_rank].startswith(expected), (fault, first_errors)
            assert first_errors[1 - broken_rank] is None

        for rank in receivers:
            error, tensors = ranks[rank][2 * number + 1]
            assert error is None
            assert all(torch.equal(tensors[name], tensor) for name, tensor in weights.items())


def test_expert_weights_may_keep_the_layout_of_megatron(
    process_groups: None, weights: Weights
) -> None:
    model = build_model(TINY, ParallelConfig())
    load_hf_weights(model, TINY, weights.__getitem__)
    for name, tensor in export_hf_weights(model, TINY, transposed=True):
        assert torch.equal(tensor, weights[name]), name
        turned = name.endswith(("gate_up_proj", "down_proj"))
        assert tensor.is_contiguous() != turned, name
        assert (tensor.mT if turned else tensor).is_contiguous(), name


def test_a_missing_tensor_is_named(process_groups: None, weights: Weights) -> None:
    name = "model.layers.1.self_attn.k_proj.bias"
    incomplete = {key: tensor for key, tensor in weights.items() if key != name}
    with pytest.raises(ValueError, match=f"tensor {name} is missing"):
        load_hf_weights(build_model(TINY, ParallelConfig()), TINY, incomplete.__getitem__)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(
    process_groups: None, weights: Weights
) -> None:
    name = "model.layers.0.mlp.experts.down_proj"
    untransposed = weights | {name: weights[name].transpose(1, 2)}
    with pytest.raises(ConversionError, match=rf"{name} has shape \[4, 40, 24\], .* \[4, 24, 40\]"):
        load_hf_weights(build_model(TINY, ParallelConfig()), TINY, untransposed.__getitem__)


def test_a_parameter_without_counterpart_is_named(process_groups: None, weights: Weights) -> None:
    model = build_model(TINY, ParallelConfig())
    model.decoder.layers[1].adapter = torch.nn.Linear(2, 2)
    with pytest.raises(
        ConversionError, match=r"decoder\.layers\.1\.adapter\.weight .* has no counterpart"
    ):
        load_hf_weights(model, TINY, weights.__getitem__)


def test_a_model_of_another_size_is_named(process_groups: None, weights: Weights) -> None:
    model = build_model(TINY.model_copy(update={"vocab_size": 48}), ParallelConfig())
    with pytest.raises(
        ConversionError,
        match=r"embedding\.word_embeddings\.weight has shape \[48, 40\] on this rank",
    ):
        load_hf_weights(model, TINY, weights.__getitem__)


def test_random_weights_depend_on_seed_and_name_only() -> None:
    first, again, other = (random_hf_weights(TINY, seed) for seed in (1, 1, 2))
    name = "model.layers.0.self_attn.q_proj.weight"
    again("lm_head.weight")  # a repeated call has no effect
    assert torch.equal(first(name), again(name))
    assert not torch.equal(first(name), other(name))
    assert not torch.equal(first(name), first("model.layers.1.self_attn.q_proj.weight"))
    assert first(name).std().item() == pytest.approx(TINY.initializer_std, rel=0.1)
    assert {key: tuple(first(key).shape) for key in hf_shapes(TINY)} == hf_shapes(TINY)
