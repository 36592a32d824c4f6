"""A process without the run's token cannot take the place of a rank of a gloo group."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from rl_loop.cluster.group_authentication import (
    TOKEN_PATH,
    EncryptedStore,
    UnknownRankError,
    authenticate_groups,
)
from rl_loop.cluster.tokens import write_token
from tests.support.distributed import run_distributed
from tests.support.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).parents[3]

VALUES = (1.0, 666.0)
"""Object that each rank sends."""


def join(rank: int, place: Path | int, environments: list[dict[str, str]]) -> str:
    """Join a group of two, and send the other rank an object. Return the outcome as text.

    Args:
        rank: 0 for the victim, 1 for the other process.
        place: file for a store, or port of a TCPStore on loopback.
        environments: environment of each rank.
    """
    os.environ.pop(TOKEN_PATH, None)
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "LIMIT": "300", **environments[rank]}
    authenticate_groups()
    limit = timedelta(seconds=int(os.environ["LIMIT"]))
    try:
        store: dist.Store
        if isinstance(place, int):
            store = dist.TCPStore("127.0.0.1", place, timeout=limit)
        else:
            store = dist.FileStore(str(place), 2)
            store.set_timeout(timedelta(seconds=300))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
        objects = [None, None]
        dist.all_gather_object(objects, VALUES[rank])
        groups = [dist.new_group(ranks, timeout=limit) for ranks in ([0, 1], [0], [1])]
        dist.all_gather_object(objects, VALUES[rank], group=groups[0])
    except Exception:
        return traceback.format_exc()
    hosts = {c.laddr.ip for c in psutil.Process().net_connections("inet")}
    return " ".join(["joined:", str(objects[1 - rank]), *sorted(hosts)])


def exchange(place: Path | int, victim: dict[str, str], other: dict[str, str]) -> tuple[str, str]:
    """Let two processes join a group and send each other objects. Return the outcome of each.

    Args:
        place: directory for a store in a file, or port of a TCPStore on loopback.
        victim: environment of rank 0.
        other: environment of rank 1.
    """
    where = place / "store" if isinstance(place, Path) else place
    first, second = run_distributed(join, 2, where, [victim, other])
    return first, second


def build_environment(folder: Path, name: str) -> dict[str, str]:
    write_token(folder / name)
    return {TOKEN_PATH: str(folder / name)}


def test_process_joins_a_group_without_authentication(tmp_path: Path) -> None:
    """Control: a program that knows the addresses of the ranks can be a rank."""
    victim, attacker = exchange(tmp_path, {}, {})
    assert "joined: 666.0" in victim
    assert "joined: 1.0" in attacker


def test_ranks_with_the_token_join_on_loopback(tmp_path: Path) -> None:
    environment = build_environment(tmp_path, "token")
    first, second = exchange(tmp_path, environment, environment)
    assert first == "joined: 666.0 127.0.0.1"
    assert second == "joined: 1.0 127.0.0.1"


def test_group_rejects_a_process_with_another_token(tmp_path: Path) -> None:
    """The attacker can read and write the rendezvous store of the ranks."""
    victim, other = exchange(
        tmp_path, build_environment(tmp_path, "token"), build_environment(tmp_path, "another")
    )
    assert "joined" not in victim and "joined" not in other
    assert "connected as rank 1 does not know the run's token" in victim


def test_group_rejects_a_process_without_token(tmp_path: Path) -> None:
    """The victim unpickles no data. It waits for a challenge from the attacker, which gives up."""
    victim, other = exchange(tmp_path, build_environment(tmp_path, "token"), {"LIMIT": "10"})
    assert "joined" not in victim and "joined" not in other
    assert "check_ranks" in victim


def plain_values(environment: dict[str, str]) -> dict[str, bytes]:
    """Let two ranks join through a TCPStore. Return the values that a third process reads there."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first, second = exchange(store.port, environment, environment)
    assert "joined: 666.0" in first and "joined: 1.0" in second
    return {key: store.get(key) for key in store.list_keys()}


def test_store_shows_addresses_of_ranks_without_token() -> None:
    """Control: another process reads the addresses at which ranks listen."""
    values = [value for value in plain_values({}).values() if not value.isdigit()]
    assert len(values) == 6
    assert all(bytes([127, 0, 0, 1]) in value for value in values)


def test_store_is_unreadable_without_the_token(tmp_path: Path) -> None:
    environment = build_environment(tmp_path, "token")
    values = plain_values(environment)
    encrypted = {key: value for key, value in values.items() if not value.isdigit()}
    assert len(encrypted) == 6
    for key, value in encrypted.items():
        assert bytes([127, 0, 0, 1]) not in value
        reader = dist.HashStore()
        reader.set(key, value)  # type: ignore[arg-type]
        token = Path(environment[TOKEN_PATH]).read_bytes()
        # Later groups share the store of the first one, so values are encrypted once.
        assert bytes([127, 0, 0, 1]) in EncryptedStore(reader, token).get(key)


@pytest.mark.parametrize("forged", [b"", b"short", b"x" * 200])
def test_store_rejects_a_value_of_another_process(forged: bytes) -> None:
    inner = dist.HashStore()
    store = EncryptedStore(inner, b"token")
    store.set("0/1", b"address")
    inner.set("0/0", forged)  # type: ignore[arg-type]
    with pytest.raises(
        UnknownRankError, match="value of 0/0 was written by a process that does not"
    ):
        store.get("0/0")


def test_store_rejects_a_value_at_another_key() -> None:
    inner = dist.HashStore()
    store = EncryptedStore(inner, b"token")
    store.set("0/1", b"address")
    inner.set("0/0", inner.get("0/1"))  # type: ignore[arg-type]
    assert store.get("0/1") == b"address"
    with pytest.raises(UnknownRankError, match="value of 0/0"):
        store.get("0/0")


def test_clone_of_a_store_survives_in_cpp() -> None:
    """NCCL keeps clones in C++ threads. Only the first store refers to their Python objects."""
    store = EncryptedStore(dist.HashStore(), b"token")
    prefixed = dist.PrefixStore("0", store)
    clone = prefixed.clone()
    gc.collect()
    prefixed.set("key", "value")
    assert clone.get("key") == b"value"


def test_waiting_for_a_value_ends_with_the_time_limit() -> None:
    store = EncryptedStore(dist.HashStore(), b"token")
    with pytest.raises(dist.DistStoreError):
        store.wait(["absent"], timedelta(milliseconds=10))
    store.set_timeout(timedelta(milliseconds=10))
    with pytest.raises(dist.DistStoreError):
        store.get("absent")


NCCL_RANK = """
import sys
import traceback
from datetime import timedelta
import torch, torch.distributed as dist
from rl_loop.cluster.group_authentication import authenticate_groups
port, rank, world = map(int, sys.argv[1:])
authenticate_groups()
torch.cuda.set_device(rank)
limit = timedelta(seconds=120)
store = dist.TCPStore("127.0.0.1", port, timeout=limit)
dist.init_process_group("nccl", store=store, rank=rank, world_size=world, timeout=limit)
ones = torch.ones(8, device="cuda")
dist.all_reduce(ones)
both = dist.new_group(list(range(world)), timeout=limit)
dist.all_reduce(ones, group=both)
dist.barrier()
print("sum:", ones[0].item(), flush=True)
dist.destroy_process_group()
print("left", flush=True)
"""


@pytest.mark.gpu
def test_nccl_initializes_over_an_encrypted_store(tmp_path: Path) -> None:
    world = min(2, torch.cuda.device_count())
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {
        **os.environ,
        **build_environment(tmp_path, "token"),
        "NCCL_SOCKET_IFNAME": "lo",
        # Packages may lie outside the interpreter's directories, as on machines without a registry.
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels"), *sys.path]),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", NCCL_RANK, str(store.port), str(rank), str(world)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    for rank in ranks:
        printed, _ = rank.communicate(timeout=PATIENCE_SECONDS)
        assert f"sum: {float(world**2)}\nleft" in printed, printed
        assert rank.returncode == 0, printed

    # NCCL's unique id has 128 bytes, mostly zeros.
    values = [store.get(key) for key in store.list_keys()]
    assert any(len(value) > 128 for value in values)
    assert not any(bytes(8) in value for value in values)
