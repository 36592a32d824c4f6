"""Where a Ray actor runs: anywhere, or on the node that ``gptoss launch`` planned for it.

A planned node offers a custom resource for each place on it, such as ``trainer_rank_3``, and its
processes have GPTOSS_PLACED in their environment."""

import ctypes
import os
import random
import signal
import socket
from typing import Any

from megatron_gptoss.user_error import UserError

TRAINER_RANK = "trainer_rank"
ROLLOUT_WORKER = "rollout_worker"
ENGINE_SERVER = "engine_server"

PR_SET_PDEATHSIG = 1  # linux/prctl.h

# Linux gives ports from 32768 on to outgoing connections: one of them would take a port before its
# server does
FIRST_PORT = 11_000
LAST_PORT = 31_999

_libc = ctypes.CDLL(None)


def has_placement() -> bool:
    """Whether ``gptoss launch`` planned where actors run."""
    return "GPTOSS_PLACED" in os.environ


def placement_options(role: str, index: int) -> dict[str, Any]:
    """Options for ``actor.options(...)`` that put an actor where it was planned to be."""
    if not has_placement():
        return {}
    return {"resources": {f"{role}_{index}": 1}}


def ranks_are_here(world_size: int) -> bool:
    """Return True if all trainer ranks run on the machine of this process."""
    if not has_placement():
        return True
    import ray

    places = {f"{TRAINER_RANK}_{rank}" for rank in range(world_size)}
    nodes = {node["NodeID"] for node in ray.nodes() if places & node["Resources"].keys()}
    return nodes == {ray.get_runtime_context().get_node_id()}


class PlaceLost(UserError):
    """The node on which an actor was planned has died."""


def check_place(role: str, index: int) -> None:
    """Raise PlaceLost if no living node offers the place of an actor, which Ray would wait for
    without end."""
    if not has_placement():
        return

    import ray

    nodes = ray.nodes()
    place = f"{role}_{index}"
    if not any(node["Alive"] and place in node["Resources"] for node in nodes):
        dead = sorted(node["NodeName"] for node in nodes if not node["Alive"])
        raise PlaceLost(
            f"{role.replace('_', ' ')} {index} cannot be started again: its node has died "
            f"({', '.join(dead)}). Go on with --resume"
        )


def outlive_sigterm(actor: Any) -> None:
    """Make an actor's process, in which this is called, ignore SIGTERM on a cluster.

    Slurm sends SIGTERM to every process when it wants the nodes back, and Ray's workers would end
    before the checkpoint is saved. ``launch.node`` decides when they do."""
    if has_placement():
        # through libc: Python sets signal handlers only in the main thread, where no method of an
        # async actor runs
        _libc.signal(int(signal.SIGTERM), ctypes.c_void_p(int(signal.SIG_IGN)))


def end_with_parent() -> None:
    """Have the kernel kill this child when its parent ends, however it does. Called between fork
    and exec."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def free_port() -> int:
    """Find a port that nothing on this machine uses on any of its addresses."""
    # not the run's seeded generator, which would choose the same port for two processes
    generator = random.SystemRandom()
    while True:
        port = generator.randrange(FIRST_PORT, LAST_PORT + 1)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port


def free_address() -> tuple[str, int]:
    """Find an address of this node that the other nodes reach, and a port that is free on it."""
    if not has_placement():
        return "127.0.0.1", free_port()

    # imported here, because a node of a job is checked before anything of Ray is loaded
    import ray

    return ray.util.get_node_ip_address(), free_port()


def master_address() -> tuple[str, int]:
    """Call ``free_address`` on the node of trainer rank 0."""
    if not has_placement():
        return free_address()
    import ray

    task = ray.remote(free_address).options(num_cpus=0, **placement_options(TRAINER_RANK, 0))
    return ray.get(task.remote())
