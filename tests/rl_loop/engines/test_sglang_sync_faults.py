"""Fault injection in weight syncs: 2 trainer ranks, 2 server processes, one fault per sync.

The next try succeeds, or the sync ends with its cause, and no rank hangs.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from rl_loop.config.load import load_config
from rl_loop.config.run import RlConfig
from rl_loop.engines.backend import BackendContext
from rl_loop.engines.sglang.fleet import SglangFleet
from rl_loop.engines.sglang.server import ServerState
from rl_loop.engines.sglang.server_actors import ServerActors, statuses
from rl_loop.lifecycle.failures import explain
from rl_loop.run_parts import build_trainer
from rl_loop.trainer.group import TrainerGroup
from rl_loop.weight_sync import gather
from rl_loop.weight_sync.source import SyncError
from tests.support.forked_workers import local_ray
from tests.support.rl_loop.engines.scored_weights import MODEL, ROOT, TEXT, scores_under
from tests.support.waiting import wait_until

LIMIT_SECONDS = 60.0
"""Time limit for a failed sync to succeed or end."""
HANG_SECONDS = 6.0
"""Time without a response after which a server counts as failed."""

UPDATES = {
    "shared_memory": "/update_weights_from_tensor",
    "gloo": "/update_weights_from_distributed",
}
KINDS_OF_SERVER = ("die", "hang", "cut", "refuse")
KINDS_OF_SENDER = ("begin", "read", "assemble", "send")

IN_DTYPE = gather._in_dtype
"""Original function, without a fault."""

pytestmark = pytest.mark.slow  # minutes; ``pytest -m slow`` on this file


@dataclass(frozen=True)
class Fault:
    """Fault of one sync."""

    kind: str
    """"die", "hang", "cut" or "refuse" for a server. Other kinds: a rank runs out of memory."""
    path: str
    """Path of the HTTP call at which a server fails."""
    call: int
    """Number of the call, tensor or read at which the fault occurs."""
    rank: int
    """Trainer rank of the fault."""

    @property
    def is_of_server(self) -> bool:
        return self.kind in KINDS_OF_SERVER


def choose_fault(seed: int, transport: str, asleep: bool) -> Fault:
    """Return a fault. Eight consecutive seeds give all kinds; the place in the sync is random."""
    generator = random.Random(seed)
    kind = (*KINDS_OF_SERVER, *KINDS_OF_SENDER)[seed % 8]
    paths = [UPDATES[transport]] * 3 + [
        "/pause_generation",
        "/flush_cache",
        "/update_weight_version",
    ]
    if asleep:
        paths.append("/resume_memory_occupation")
    path = generator.choice(paths)
    call = 1
    if path == UPDATES[transport]:
        call = generator.randint(1, 4)
    if kind in KINDS_OF_SENDER:
        call = generator.randint(1, 8)  # rank 1 has 8 parameters that rank 0 lacks
    # With gloo only rank 0 sends to servers. Rank 1 sends its experts to rank 0.
    sends = transport == "shared_memory" or kind in ("begin", "read")
    return Fault(kind, path, call, rank=generator.randrange(2) if sends else 0)


@pytest.fixture(scope="module")
def one_ray() -> Iterator[None]:
    with local_ray(num_cpus=2, object_store_bytes=100 << 20):
        yield


@dataclass
class Run:
    """A trainer of two expert-parallel ranks and a fleet of two servers."""

    trainer: TrainerGroup
    fleet: SglangFleet
    transport: str
    fault_file: Path
    version: int = 0

    @property
    def ranks(self) -> list[Any]:
        return self.trainer.ranks.actors  # type: ignore[attr-defined, no-any-return]

    def learn(self) -> None:
        """Change all weights, as a training step does."""
        ray.get([rank.__ray_call__.remote(_add_to_weights) for rank in self.ranks])
        self.version += 1

    def order(self, fault: Fault) -> None:
        if fault.is_of_server:
            self.fault_file.write_text(f"{fault.kind} {fault.path}:{fault.call}")
        else:
            ray.get(self.ranks[fault.rank].__ray_call__.remote(_inject_fault(fault, once=True)))

    def was_met(self, fault: Fault) -> bool:
        if fault.is_of_server:
            return not self.fault_file.exists()
        return ray.get(self.ranks[fault.rank].__ray_call__.remote(_take_met))  # type: ignore[no-any-return]

    def wait_until_all_serve(self) -> None:
        """Recover restarted servers, as the loop does during rollouts."""

        def all_serve() -> bool:
            self.fleet.recover_engines()
            known = asyncio.run(statuses(self.fleet.servers.actors))
            return all((s.state, s.version) == (ServerState.SYNCED, self.version) for s in known)

        wait_until(all_serve)
        held = {name: tensor.bfloat16() for name, tensor in self.trainer.weights().items()}
        assert self.fleet.score(TEXT, 1.0) == [scores_under(held)] * 2


def make_run(tmp_path: Path, transport: str) -> Run:
    stub = f"{ROOT / 'tests/support/rl_loop/sglang_process'}:{ROOT}:{ROOT / 'kernels'}"
    config = load_config(
        ROOT / "configs/rl/tiny_retool.yaml",
        RlConfig,
        [
            f"output_dir={tmp_path}",
            "rollout.engine.type=sglang",
            "rollout.engine.servers=2",
            f"rollout.engine.weight_sync={transport}",
            f"rollout.engine.colocated={transport == 'shared_memory'}",
        ],
    )
    settings = config.rollout.engine.model_copy(
        update={
            "python": sys.executable,
            "env": {
                "PYTHONPATH": stub,
                "FAULT_FILE": str(tmp_path / "fault"),
                "OMP_NUM_THREADS": "1",
            },
            "sync_seconds": HANG_SECONDS,
            "bucket_bytes": 10_000,
        }
    )
    config = config.model_copy(
        update={
            "model": MODEL,
            "dtype": "bf16",
            "initial_weights": None,
            "parallel": config.parallel.model_copy(update={"world_size": 2, "expert": 2}),
        }
    )
    trainer = build_trainer(config)
    context = BackendContext(MODEL, config.dtype, config.seed, config.directory / "engine")
    fleet = SglangFleet(ServerActors(settings, context), settings, context)
    return Run(trainer, fleet, transport, tmp_path / "fault")


@pytest.fixture(params=["shared_memory", "gloo"])
def run(request: pytest.FixtureRequest, tmp_path: Path, one_ray: None) -> Iterator[Run]:
    started = make_run(tmp_path, request.param)
    try:
        started.trainer.ready()
        started.fleet.servers.ready()
        yield started
    finally:
        started.fleet.servers.close()
        started.trainer.close()


def sync_with_faults(run: Run, seeds: range) -> None:
    for seed in seeds:
        run.learn()
        # In every second step the servers sleep before the sync, like after an update.
        asleep = seed % 2 == 1 and run.transport == "shared_memory"
        if asleep:
            run.fleet.pause()

        fault = choose_fault(seed, run.transport, asleep)
        run.order(fault)
        began = time.monotonic()
        run.fleet.sync(run.trainer, run.version)
        seconds = time.monotonic() - began

        assert run.was_met(fault), (seed, fault)
        assert seconds < LIMIT_SECONDS, (seed, fault)
        run.wait_until_all_serve()


def test_failed_sync_is_repeated_and_no_rank_hangs(run: Run) -> None:
    sync_with_faults(run, range(4, 7))


@pytest.mark.parametrize("run", ["shared_memory"], indirect=True)
def test_server_dead_during_training_returns_with_the_next_sync(run: Run) -> None:
    run.learn()
    run.fleet.sync(run.trainer, run.version)
    run.fault_file.write_text("die /release_memory_occupation:1")
    run.fleet.pause()
    assert not run.fault_file.exists()
    asleep = asyncio.run(statuses(run.fleet.servers.actors))
    assert sorted(status.state for status in asleep) == [ServerState.DEAD, ServerState.UNSYNCED]

    # Servers that are killed asleep do not restart either, because the trainer uses the memory.
    ray.get(
        [
            actor.__ray_call__.remote(lambda server: server._kill())
            for actor in run.fleet.servers.actors
        ]
    )
    time.sleep(3)
    known = asyncio.run(statuses(run.fleet.servers.actors))
    assert all(status.state is ServerState.DEAD and not status.given_up for status in known)

    run.learn()
    run.fleet.sync(run.trainer, run.version)
    run.wait_until_all_serve()


def test_twenty_failed_syncs_are_repeated_and_no_rank_hangs(run: Run) -> None:
    sync_with_faults(run, range(20))


def test_sync_that_always_fails_ends_with_its_cause_in_one_line(run: Run, tmp_path: Path) -> None:
    run.learn()
    # The fault is on all ranks that may send. The next attempt begins as soon as one of two servers
    # is back. The rank of the other server then sends nothing.
    senders = run.ranks if run.transport == "shared_memory" else run.ranks[:1]
    for number, rank in enumerate(senders):
        fault = Fault("assemble", "", call=5, rank=number)
        ray.get(rank.__ray_call__.remote(_inject_fault(fault, once=False)))
    began = time.monotonic()
    with pytest.raises(SyncError) as failure:
        run.fleet.sync(run.trainer, run.version)
    assert time.monotonic() - began < LIMIT_SECONDS
    line = explain(failure.value, tmp_path)
    assert line.startswith(
        f"SyncError: weights {run.version} did not reach all servers: CUDA out of memory"
    )
    assert "\n" not in line

    ray.get([rank.__ray_call__.remote(_heal_rank) for rank in senders])
    run.fleet.sync(run.trainer, run.version)
    run.wait_until_all_serve()


# -- in the process of a trainer rank -------------------------------------------------------------


def _add_to_weights(rank: Any) -> None:
    with torch.no_grad():
        for parameter in rank.worker.model.parameters():
            parameter.add_(0.01)


def _inject_fault(fault: Fault, once: bool) -> Callable[[Any], None]:
    """Let the next gathering (``once``), or all of them, run out of memory at ``fault``."""

    def plant(rank: Any) -> None:
        worker = rank.worker
        gathering = worker._gathering
        original_begin = gathering.begin
        original_read = gathering.local.read
        worker.met = False
        reads = 0

        def fail() -> None:
            worker.met = True
            if once:
                _heal_rank(rank)
            raise torch.OutOfMemoryError("CUDA out of memory, on purpose")

        def begin(*arguments: Any, **options: Any) -> Any:
            gathered = original_begin(*arguments, **options)
            if fault.kind == "assemble":
                gathered._assembled = failing(gathered._assembled)
            return gathered

        def failing(assembled: Any) -> Any:
            for number, item in enumerate(assembled, 1):
                if number == fault.call:
                    fail()
                yield item

        def read(name: str) -> Any:
            nonlocal reads
            reads += 1
            if reads == fault.call:
                fail()
            return original_read(name)

        def in_dtype(*arguments: Any) -> Any:
            return failing(IN_DTYPE(*arguments))

        match fault.kind:
            case "begin":
                gathering.plan = lambda receivers, *, mxfp4_experts: fail()
            case "read":
                gathering.local.read = read
            case "send":
                gather._in_dtype = in_dtype
            case "assemble":
                gathering.begin = begin

    return plant


def _heal_rank(rank: Any) -> None:
    worker = rank.worker
    for name in ("begin", "plan"):
        vars(worker._gathering).pop(name, None)
    vars(worker._gathering.local).pop("read", None)
    gather._in_dtype = IN_DTYPE


def _take_met(rank: Any) -> bool:
    return bool(rank.worker.met)
