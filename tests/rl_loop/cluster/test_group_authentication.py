"""A process without the run's token cannot take the place of a rank of a gloo group."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from rl_loop.cluster.group_authentication import TOKEN_PATH
from rl_loop.cluster.tokens import write_token
from tests.support.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).parents[3]

RANK = """
import os, sys
from datetime import timedelta
import psutil, torch, torch.distributed as dist
from rl_loop.cluster.group_authentication import authenticate_groups
file, rank, value = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
authenticate_groups()
store, limit = dist.FileStore(file, 2), timedelta(seconds=int(os.environ["LIMIT"]))
store.set_timeout(timedelta(seconds=300))
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
objects = [None, None]
dist.all_gather_object(objects, value)
both = [dist.new_group(ranks, timeout=limit) for ranks in ([0, 1], [0], [1])][0]
dist.all_gather_object(objects, value, group=both)
hosts = {c.laddr.ip for c in psutil.Process().net_connections("inet")}
print("joined:", objects[1 - rank], *sorted(hosts), flush=True)
"""


def exchange(folder: Path, victim: dict[str, str], other: dict[str, str]) -> tuple[str, str]:
    """Let two processes meet as ranks and send each other objects. Return what each printed."""
    clean = {name: value for name, value in os.environ.items() if name != TOKEN_PATH}
    clean |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "LIMIT": "300"}
    clean["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(folder / "store"), str(rank), value],
            env=clean | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, value, environment in ((0, "1", victim), (1, "666", other))
    ]
    try:
        printed = [rank.communicate(timeout=PATIENCE_SECONDS)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return printed[0], printed[1]


def environment_of(folder: Path, name: str) -> dict[str, str]:
    write_token(folder / name)
    return {TOKEN_PATH: str(folder / name)}


def test_process_joins_a_group_without_authentication(tmp_path: Path) -> None:
    """The control: a program that knows the addresses of the ranks is a rank."""
    victim, attacker = exchange(tmp_path, {}, {})
    assert "joined: 666.0" in victim
    assert "joined: 1.0" in attacker


def test_ranks_with_the_token_meet_on_loopback(tmp_path: Path) -> None:
    environment = environment_of(tmp_path, "token")
    first, second = exchange(tmp_path, environment, environment)
    assert "joined: 666.0 127.0.0.1\n" in first
    assert "joined: 1.0 127.0.0.1\n" in second


def test_group_refuses_a_process_with_another_token(tmp_path: Path) -> None:
    """The attacker even reads and writes the store in which the ranks meet."""
    victim, other = exchange(
        tmp_path, environment_of(tmp_path, "token"), environment_of(tmp_path, "another")
    )
    assert "joined" not in victim and "joined" not in other
    assert "connected as rank 1 does not know the run's token" in victim


def test_group_refuses_a_process_without_token(tmp_path: Path) -> None:
    """The victim unpickles nothing: it waits for the challenge of the attacker, which gives up."""
    victim, other = exchange(tmp_path, environment_of(tmp_path, "token"), {"LIMIT": "10"})
    assert "joined" not in victim and "joined" not in other
    assert "check_ranks" in victim
