"""Placement of Ray actors on nodes, and free ports for their servers.

Without a launcher an actor runs anywhere. ``gptoss launch`` assigns actors to nodes: each node offers
a custom resource for every actor planned on it, such as ``trainer_rank_3``, and its processes have
GPTOSS_PLACED in their environment.
"""

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

# Linux assigns ports from 32768 on to outgoing connections. Such a connection could take a port
# before its server opens it.
FIRST_PORT = 11_000
LAST_PORT = 31_999

_libc = ctypes.CDLL(None)


def has_placement() -> bool:
    """Return True if ``gptoss launch`` assigned actors to nodes."""
    return "GPTOSS_PLACED" in os.environ


def is_in_slurm_job() -> bool:
    """Return True in a Slurm job, which signals every process: of ``gptoss launch`` or the user's."""
    return "SLURM_JOB_ID" in os.environ


def placement_options(role: str, index: int) -> dict[str, Any]:
    """Return options for ``actor.options(...)`` that place an actor on its planned node."""
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


class NodeLostError(UserError):
    """The node on which an actor was planned has died."""


def check_node(role: str, index: int) -> None:
    """Check that a living node offers the resource of an actor. Otherwise Ray would wait forever.

    Raises:
        NodeLostError: if the node has died.
    """
    if not has_placement():
        return

    import ray

    nodes = ray.nodes()
    place = f"{role}_{index}"
    if not any(node["Alive"] and place in node["Resources"] for node in nodes):
        dead = sorted(node["NodeName"] for node in nodes if not node["Alive"])
        raise NodeLostError(
            f"{role.replace('_', ' ')} {index} cannot be restarted, because its node has died "
            f"({', '.join(dead)}). Continue with --resume"
        )


def ignore_sigterm(actor: Any) -> None:
    """Ignore SIGTERM in the calling process, which runs ``actor``, in a job.

    Slurm sends SIGTERM to every process before it takes the nodes back. Ray's workers would exit
    before the checkpoint is saved. ``launch.node`` or the end of a local Ray stops them later.
    """
    if has_placement() or is_in_slurm_job():
        # Python sets signal handlers only in the main thread, but methods of async actors run in
        # other threads. libc has no such limit.
        _libc.signal(int(signal.SIGTERM), ctypes.c_void_p(int(signal.SIG_IGN)))


def shield_from_slurm() -> None:
    """Keep Slurm's signals from this child process and its children.

    Call it between fork and exec. Slurm signals every process of a job, and neither Ray nor its
    children may end before the driver has saved. A blocked signal stays blocked through exec.
    SIGUSR1 is only ignored, because a driver sets its own handler for it.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def exit_with_parent() -> None:
    """Let the kernel kill this child process when its parent exits for any reason.

    Call it between fork and exec.
    """
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def free_port() -> int:
    """Return a port that is free on all addresses of this machine."""
    # The run's seeded generator would choose the same port in two processes.
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
    """Return an address of this node that other nodes reach, and a free port there.

    Without a launcher the address is loopback.
    """
    if not has_placement():
        return "127.0.0.1", free_port()

    # Imported here, because nodes of a job are checked before they load Ray.
    import ray

    return ray.util.get_node_ip_address(), free_port()


def master_address() -> tuple[str, int]:
    """Call ``free_address`` on the node of trainer rank 0."""
    if not has_placement():
        return free_address()
    import ray

    # Without CPUs, so that the task also runs on a node whose CPUs are all reserved.
    task = ray.remote(free_address).options(num_cpus=0, **placement_options(TRAINER_RANK, 0))
    return ray.get(task.remote())
