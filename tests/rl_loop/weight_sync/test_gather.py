"""Collective sending of weights to engines: failures of a rank, and the next attempt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from converters.errors import GatheringAbortedError
from converters.gathering import WeightGathering
from converters.model_weights import load_hf_weights
from converters.names import hf_shapes
from megatron_gptoss import distributed
from megatron_gptoss.config import ParallelConfig
from megatron_gptoss.model import build_model
from rl_loop.weight_sync.gather import send_gathered
from rl_loop.weight_sync.source import SyncError
from tests.support.converters.models import TINY, tiny_weights
from tests.support.distributed import free_port, run_distributed


@dataclass
class Sender:
    """A sender on one or both ranks that stores its tensors and may fail after some."""

    ranks: Sequence[int]
    fails_after: int | None = None
    sent: dict[str, torch.Tensor] = field(default_factory=dict)
    transposed = False
    mxfp4_experts = False
    adapters_only = False

    def send(self, named: Iterable[tuple[str, torch.Tensor]], rank: int) -> None:
        for name, tensor in named:
            if len(self.sent) == self.fails_after:
                raise ConnectionError("a server is gone")
            self.sent[name] = tensor.clone()


def read_badly(name: str) -> Any:
    raise RuntimeError(f"no memory for {name}")


def send_with_faults(rank: int, port: int) -> list[str]:
    """Send with a fault in either rank and then without. Return the result of each attempt."""
    torch.set_num_threads(1)
    parallel = ParallelConfig(world_size=2, expert=2)
    distributed.initialize(parallel, rank, port=port)
    model = build_model(TINY, parallel)
    weights = tiny_weights()
    load_hf_weights(model, TINY, weights.__getitem__)
    gathering = WeightGathering(model, TINY)

    def attempt(sender: Sender) -> str:
        try:
            failure = send_gathered(gathering, sender, torch.bfloat16)
        except SyncError as error:
            return f"raised: {error}"
        return repr(failure)

    said = [attempt(Sender([0], fails_after=3)), attempt(Sender([0, 1], fails_after=3))]

    if rank == 1:
        gathering.local.read = read_badly  # type: ignore[method-assign, assignment]
    said.append(attempt(Sender([0])))
    if rank == 1:
        del gathering.local.read

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise GatheringAbortedError("rank 1 has no memory for weights of others")

    gathering.begin = refuse  # type: ignore[method-assign]
    said.append(attempt(Sender([0])))
    del gathering.begin

    sender = Sender([0])
    said.append(attempt(sender))
    if rank == 0:
        assert sender.sent.keys() == hf_shapes(TINY).keys()
        for name, tensor in sender.sent.items():
            assert torch.equal(tensor, weights[name].bfloat16()), name
    else:
        assert sender.sent == {}
    distributed.shutdown()
    return said


def test_failing_rank_reports_its_error_and_the_next_send_works() -> None:
    first, second = run_distributed(send_with_faults, 2, free_port())
    gone = "ConnectionError('a server is gone')"
    assert first[:2] == [gone, gone]
    assert second[:2] == ["None", gone]

    assert first[2] == "None"
    assert second[2].startswith("SyncError('rank 1 has no weights: no memory for ")

    refused = "raised: rank 1 has no memory for weights of others"
    assert (first[3], second[3]) == (refused, refused)
    assert (first[4], second[4]) == ("None", "None")
