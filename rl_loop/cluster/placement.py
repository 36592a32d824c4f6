"""Where a Ray actor runs: anywhere, or on the node that ``gptoss launch`` planned for it. Such a node offers a custom
resource for each place, such as ``trainer_rank_3``, and its processes have GPTOSS_PLACED in their environment."""

import ctypes
import os
import random
import signal
import socket
from typing import Any

TRAINER_RANK = "trainer_rank"
ROLLOUT_WORKER = "rollout_worker"
ENGINE_SERVER = "engine_server"
PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def is_placed() -> bool:
    return "GPTOSS_PLACED" in os.environ


def place_of(role: str, index: int) -> dict[str, Any]:
    """Options for ``actor.options(...)``."""
    return {"resources": {f"{role}_{index}": 1}} if is_placed() else {}


def outlive_sigterm(actor: Any) -> None:
    """Called in an actor's process on a cluster: Slurm sends SIGTERM to every process when it wants the nodes back, and
    Ray's workers would end before the checkpoint is saved. ``launch.node`` decides when they do."""
    # through libc: Python sets signal handlers only in the main thread, where no method of an async actor runs
    if is_placed():
        _libc.signal(int(signal.SIGTERM), ctypes.c_void_p(int(signal.SIG_IGN)))


def end_with_parent() -> None:
    """Called in a child between fork and exec: the kernel kills it when this process ends, however it does."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def free_port() -> int:
    """A port that nothing on this machine uses on any of its addresses."""
    # from below those that Linux gives to outgoing connections: one of them would take the port before its server does
    while True:
        port = random.SystemRandom().randrange(11_000, 32_000)  # the run's seed must not choose the same for two
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port


def free_address() -> tuple[str, int]:
    """An address of this node that the other nodes reach, and a port that is free on it."""
    if not is_placed():
        return "127.0.0.1", free_port()

    # Imported here, because a node of a job is checked before anything of Ray is loaded.
    import ray

    return ray.util.get_node_ip_address(), free_port()


def master_address() -> tuple[str, int]:
    """``free_address`` of the node of trainer rank 0."""
    if not is_placed():
        return free_address()
    import ray

    task = ray.remote(free_address).options(num_cpus=0, **place_of(TRAINER_RANK, 0))
    return ray.get(task.remote())
