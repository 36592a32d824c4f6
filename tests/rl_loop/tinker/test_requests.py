"""Order and repetition of requests, turns of tenants, and names of checkpoints."""

from __future__ import annotations

import asyncio
import stat
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_loop.gateway.errors import ApiError
from rl_loop.tinker.errors import ClientError
from rl_loop.tinker.futures import MAX_UNREAD_BYTES, Answer, RequestFutures
from rl_loop.tinker.owners import KEY_PREFIX, Owners, stored_key
from rl_loop.tinker.queue import MAX_WAITING_BYTES, TenantQueue, Work
from rl_loop.tinker.scheduler import MAX_BATCH, SampleOperation, Scheduler
from rl_loop.tinker.snapshots import SnapshotStore
from rl_loop.tinker.store import ABOUT, CheckpointFacts, CheckpointName, CheckpointStore

FACTS = CheckpointFacts(owner="me", base="base", rank=8, created=1.0)
TURN_TOKENS = 10
TENSORS = {"factor.a": torch.ones(2, 3)}


def note(log: list[str], text: str) -> Work:
    async def work() -> Answer:
        log.append(text)
        return {"ran": text}

    return work


def never(snapshot: Any, requests: Any) -> Any:
    raise AssertionError("no sampling request was added")


async def run_until_done(scheduler: Scheduler[Any, Any], futures: Sequence[Any]) -> None:
    task = asyncio.create_task(scheduler.run())
    await asyncio.wait_for(asyncio.gather(*(f.is_done.wait() for f in futures)), 30)
    task.cancel()


def test_requests_run_in_order_and_once() -> None:
    async def scenario() -> list[str]:
        log: list[str] = []
        futures = RequestFutures()
        queue = TenantQueue("s:train:0", "s")
        scheduler: Scheduler[Any, Any] = Scheduler(never, lambda: None, TURN_TOKENS)
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
        scheduler: Scheduler[Any, Any] = Scheduler(never, lambda: None, TURN_TOKENS)
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


def test_turns_end_after_a_number_of_tokens() -> None:
    """A pass of three parts has three turns, and other passes run up to the limit."""

    async def scenario() -> list[str]:
        log: list[str] = []
        futures = RequestFutures()
        giant, small = (TenantQueue(f"{name}:train:0", name) for name in "ab")
        scheduler: Scheduler[Any, Any] = Scheduler(never, lambda: None, TURN_TOKENS)
        parts = 0

        async def giant_pass() -> Answer | None:
            nonlocal parts
            parts += 1
            log.append(f"giant part {parts}")
            return {} if parts == 3 else None

        added = [giant.add(1, "x", giant_pass, futures, tokens=30)]
        for number in range(1, 5):
            work = note(log, f"small {number}")
            added.append(small.add(number, "x", work, futures, tokens=6))
        for queue in (giant, small):
            scheduler.notify(queue)
        await run_until_done(scheduler, added)
        return log

    assert asyncio.run(scenario()) == [
        "giant part 1", "small 1", "small 2", "giant part 2", "small 3", "small 4", "giant part 3",
    ]  # fmt: skip


def test_snapshots_take_turns_with_parts_of_requests() -> None:
    async def scenario() -> list[Any]:
        calls = []

        async def sample(snapshot: Any, requests: Sequence[str]) -> list[str | ClientError]:
            calls.append((snapshot, list(requests)))
            return [ClientError("no") if one == "2a" else one for one in requests]

        futures = RequestFutures()
        scheduler: Scheduler[str, str] = Scheduler(sample, lambda: None, TURN_TOKENS)
        added = []
        for number, snapshot in enumerate("xyxx"):
            added.append(futures.add(f"sample {number}", "s"))
            # Each part is as large as half of a batch.
            parts = [(f"{number}{part}", MAX_BATCH // 2) for part in "ab"]
            operation = SampleOperation(snapshot, parts, added[-1], lambda all: {"all": list(all)})
            scheduler.add_sample(operation)
        scheduler.cancel_sample("sample 3")
        await run_until_done(scheduler, added)
        answers = [future.answer for future in added]
        assert answers[:2] == [{"all": ["0a", "0b"]}, {"all": ["1a", "1b"]}]
        assert [answer["error"] for answer in answers[2:]] == ["no", "the request was canceled"]
        return calls

    # The other part of a failed request runs, because both were in one batch.
    assert asyncio.run(scenario()) == [
        ("x", ["0a", "0b"]),
        ("y", ["1a", "1b"]),
        ("x", ["2a", "2b"]),
    ]


def test_unread_answers_are_limited() -> None:
    async def scenario() -> None:
        futures = RequestFutures()
        queue = TenantQueue("s:train:0", "s")
        large = queue.add(1, "pass", note([], ""), futures)
        large.resolve(bytes(MAX_UNREAD_BYTES + 1))
        queue.remove_first()
        with pytest.raises(ApiError, match="fetch the answers") as refused:
            queue.add(2, "pass", note([], ""), futures)
        assert refused.value.status == 429
        for _ in range(2):
            large.mark_received()
        queue.add(2, "pass", note([], ""), futures)

    asyncio.run(scenario())


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
    store = CheckpointStore(tmp_path, 1000)
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
    assert [found for found, _ in store.list("me", "ab:train:0")] == [name]
    store.delete_expired()
    kept = sorted(path.name for path in tmp_path.glob("*/*/*"))
    assert kept == ["damaged", "one"]


def test_store_limits_the_size_of_each_owner(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 1000)
    first, second = (CheckpointName("ab:train:0", "weights", name) for name in ("a", "b"))
    large = {"factor.a": torch.ones(150)}
    store.save(first, FACTS, large)
    with pytest.raises(ClientError, match=r"needs 0\.000 GB, but .* use 0\.000"):
        store.save(second, FACTS, large)
    # Overwriting needs no room for both, and another owner has room.
    store.save(first, FACTS, large, overwrite=True)
    store.save(second, replace(FACTS, owner="other"), large)
    assert [name for name, _ in store.list("me")] == [first]


def test_store_removes_what_a_killed_process_left(tmp_path: Path) -> None:
    folder = tmp_path / "ab_train_0/weights"
    for name in ("a.partial", "b.old", "c", "c.old"):
        (folder / name).mkdir(parents=True)
        (folder / name / "file").write_text(name)
    CheckpointStore(tmp_path, 1000)
    assert sorted(path.name for path in folder.iterdir()) == ["b", "c"]
    assert (folder / "b/file").read_text() == "b.old"
    assert (folder / "c/file").read_text() == "c"


def test_key_is_kept_and_private(tmp_path: Path) -> None:
    file = tmp_path / "tinker/key"
    key = stored_key(file)
    assert stored_key(file) == key and key.startswith(KEY_PREFIX) and len(key) > 40
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [path.name for path in file.parent.iterdir()] == ["key"]
    owners = Owners([key, "tml-b"])
    assert owners.find(key) != owners.find("tml-b")
    assert owners.find("tml-c") is None and owners.find("") is None


def test_snapshot_files_live_as_long_as_snapshots(tmp_path: Path) -> None:
    left = tmp_path / "snapshots/left.safetensors"
    left.parent.mkdir()
    left.touch()
    snapshots = SnapshotStore(tmp_path / "snapshots")
    saved = snapshots.save(8, TENSORS)
    assert saved.file is not None
    linked = snapshots.link(8, saved.file)
    del saved
    assert len(list(left.parent.iterdir())) == 1
    read = linked.read()
    assert read is not None and torch.equal(read["factor.a"], TENSORS["factor.a"])
    del linked
    assert list(left.parent.iterdir()) == []
