"""The multi-process test helper returns results in rank order and shows the failure of a rank."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from tests.support.distributed import free_port, run_distributed


def sum_over_ranks(rank: int, port: int) -> torch.Tensor:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    value = torch.tensor([float(rank + 1), rank])
    dist.all_reduce(value[:1])
    dist.destroy_process_group()
    return value


def fail_on_rank_one(rank: int) -> None:
    if rank == 1:
        raise ValueError("a mistake of rank one")
    time.sleep(1000)


def sleep(rank: int) -> None:
    time.sleep(1000)


def test_results_come_back_in_rank_order() -> None:
    results = run_distributed(sum_over_ranks, 2, free_port())
    assert [result.tolist() for result in results] == [[3.0, 0.0], [3.0, 1.0]]


def test_failed_rank_shows_traceback_and_stops_the_others() -> None:
    started = time.monotonic()
    with pytest.raises(pytest.fail.Exception, match=r"rank 1 of 2(.|\n)*a mistake of rank one"):
        run_distributed(fail_on_rank_one, 2)
    assert time.monotonic() - started < 400


def test_ranks_that_hang_fail_the_test() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"ranks \[0\] not done after 3 s"):
        run_distributed(sleep, 1, timeout=3)
