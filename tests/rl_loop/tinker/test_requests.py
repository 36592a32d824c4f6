"""Order and repetition of requests, turns of tenants, and names of checkpoints."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_loop.gateway.errors import ApiError
from rl_loop.tinker.errors import ClientError
from rl_loop.tinker.futures import Answer, RequestFutures
from rl_loop.tinker.queue import MAX_WAITING_BYTES, TenantQueue, Work
from rl_loop.tinker.scheduler import SampleOperation, Scheduler
from rl_loop.tinker.store import ABOUT, CheckpointFacts, CheckpointName, CheckpointStore

FACTS = CheckpointFacts(base="base", rank=8, created=1.0)
TENSORS = {"factor.a": torch.ones(2, 3)}


def note(log: list[str], text: str) -> Work:
    async def work() -> Answer:
        log.append(text)
        return {"ran": text}

    return work


def never(snapshot: Any, requests: Any) -> Any:
    raise AssertionError("no sampling request was added")


async def run_until_done(scheduler: Scheduler[Any], futures: Sequence[Any]) -> None:
    task = asyncio.create_task(scheduler.run())
    await asyncio.wait_for(asyncio.gather(*(f.is_done.wait() for f in futures)), 30)
    task.cancel()


def test_requests_run_in_order_and_once() -> None:
    async def scenario() -> list[str]:
        log: list[str] = []
        futures = RequestFutures()
        queue = TenantQueue("s:train:0", "s")
        scheduler: Scheduler[Any] = Scheduler(never, lambda: None)
        added = []
        for number in (3, 2, 3, 1, 2):
            added.append(queue.add(number, "pass", note(log, str(number)), futures))
            scheduler.notify(queue)
        assert added[0] is added[2] and added[1] is added[4]
        await run_until_done(scheduler, added)
        # A repeated request gets the answer that exists.
        assert queue.add(2, "pass", note(log, "again"), futures).answer == {"ran": "2"}
        futures.drop_session("s")
        with pytest.raises(ApiError, match="carried out before"):
            queue.add(2, "pass", note(log, "again"), futures)
        return log

    assert asyncio.run(scenario()) == ["1", "2", "3"]


def test_turns_end_with_a_step_and_errors_stay_apart() -> None:
    async def scenario() -> tuple[list[str], Any]:
        log: list[str] = []
        futures = RequestFutures()
        queues = [TenantQueue(f"{name}:train:0", name) for name in "ab"]
        scheduler: Scheduler[Any] = Scheduler(never, lambda: None)
        added = []
        for queue in queues:
            for number in range(1, 5):
                work = note(log, f"{queue.session_id}{number}")
                added.append(queue.add(number, "x", work, futures, ends_turn=number % 2 == 0))
            scheduler.notify(queue)

        async def broken() -> Answer:
            raise ClientError("no such loss")

        failed = queues[0].add(5, "x", broken, futures)
        await run_until_done(scheduler, [*added, failed])
        return log, failed.answer

    log, answer = asyncio.run(scenario())
    assert log == ["a1", "a2", "b1", "b2", "a3", "a4", "b3", "b4"]
    assert answer == {"error": "no such loss", "category": "user"}


def test_samples_of_one_snapshot_run_together() -> None:
    async def scenario() -> list[Any]:
        calls = []

        async def sample(snapshot: Any, requests: Sequence[str]) -> list[Answer]:
            calls.append((snapshot, list(requests)))
            return [{"text": request} for request in requests]

        futures = RequestFutures()
        scheduler: Scheduler[str] = Scheduler(sample, lambda: None)
        added = []
        for number, snapshot in enumerate("xyxy"):
            added.append(futures.add(f"sample {number}", "s"))
            scheduler.add_sample(SampleOperation(snapshot, str(number), added[-1]))
        scheduler.cancel_sample("sample 3")
        await run_until_done(scheduler, added[:3])
        assert [future.answer for future in added[:3]] == [{"text": str(n)} for n in range(3)]
        return calls

    assert asyncio.run(scenario()) == [("x", ["0", "2"]), ("y", ["1"])]


def test_full_queue_refuses_all_but_the_next_request() -> None:
    async def scenario() -> None:
        futures = RequestFutures()
        queue = TenantQueue("s:train:0", "s")
        queue.add(2, "pass", note([], ""), futures, size=MAX_WAITING_BYTES)
        with pytest.raises(ApiError, match="too many requests") as refused:
            queue.add(3, "pass", note([], ""), futures, size=1)
        assert refused.value.status == 429
        queue.add(1, "pass", note([], ""), futures, size=1)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "text",
    [
        "tinker://ab:train:0/weights/..", "tinker://ab:train:0/weights/.hidden", "tinker://ab:train:0/weights/a/b",
        "tinker://../weights/a", "tinker://ab:train:0/../a", "tinker://ab:train:0/weights/a.partial",
        "tinker://ab:train:0/weights/", "/etc/passwd", "tinker://ab:train:0/weights/a\n",
    ],
)  # fmt: skip
def test_names_that_could_leave_the_directory_are_refused(text: str) -> None:
    with pytest.raises(ApiError) as refused:
        CheckpointName.parse(text)
    assert refused.value.status == 400


def test_store_writes_whole_checkpoints_and_deletes_expired_ones(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    name = CheckpointName.parse("tinker://ab:train:0/weights/one")
    store.save(name, FACTS, TENSORS)
    facts, tensors = store.load(name, "base")
    assert facts == FACTS and torch.equal(tensors["factor.a"], TENSORS["factor.a"])
    with pytest.raises(ClientError, match="exists"):
        store.save(name, FACTS, TENSORS)
    store.save(name, replace(FACTS, rank=4), TENSORS, overwrite=True)
    assert store.load(name, "base")[0].rank == 4
    with pytest.raises(ClientError, match="another base"):
        store.load(name, "other")

    short = CheckpointName("ab:train:0", "sampler_weights", "short")
    store.save(short, replace(FACTS, expires=time.time() - 1), TENSORS)
    damaged = CheckpointName("ab:train:0", "weights", "damaged")
    store.save(damaged, FACTS, TENSORS)
    (tmp_path / "ab_train_0/weights/damaged" / ABOUT).write_text("{")
    with pytest.raises(ClientError, match="no checkpoint"):
        store.load(short, "base")
    with pytest.raises(ClientError, match=rf"damaged: {ABOUT} is damaged"):
        store.load(damaged, "base")
    assert [found for found, _ in store.list("ab:train:0")] == [name]
    store.delete_expired()
    kept = sorted(path.name for path in tmp_path.glob("*/*/*"))
    assert kept == ["damaged", "one"]
