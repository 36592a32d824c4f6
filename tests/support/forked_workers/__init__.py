"""Ray workers and test processes that are forked from a process with all imports done.

A trainer rank or rollout worker spends 5 s of processor time on imports, more than it works in most
tests. Therefore a local Ray of the tests starts ``ask_for_fork.py`` instead of its worker program.
That program requests a fork from ``server.py``, and the fork continues as Ray's worker. All
processes of pytest-xdist share a server, and are its forks, too (``conftest.py``). Workers of
``gptoss`` commands in tests start normally, unless the command starts with ``python_with_forks`` or
``forked_python``.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from glob import glob
from pathlib import Path
from threading import Thread
from typing import Any

from rl_loop.cluster.placement import exit_with_parent
from rl_loop.cluster.ray_session import local_environment, start_local_ray
from tests.support.forked_workers.ask_for_fork import ADDRESS, MARKS, MARKS_BYTES

HERE = Path(__file__).parent


@contextmanager
def local_ray(num_cpus: int, object_store_bytes: int) -> Iterator[None]:
    """Run a local Ray whose workers are forked."""
    with forking_workers():
        start_local_ray(num_cpus=num_cpus, object_store_bytes=object_store_bytes)
    import ray

    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def forking_workers() -> Iterator[None]:
    """Let Ray instances that start in this process fork their workers."""
    if not _can_fork():
        yield
        return

    _ensure_server()
    import ray

    node_class: Any = ray._private.node.Node
    start_raylet = node_class.start_raylet

    def start_raylet_with_forked_workers(node: Any, *arguments: Any, **options: Any) -> None:
        node._ray_params.setup_worker_path = str(HERE / "ask_for_fork.py")
        start_raylet(node, *arguments, **options)

    node_class.start_raylet = start_raylet_with_forked_workers
    try:
        yield
    finally:
        node_class.start_raylet = start_raylet


def python_with_forks() -> list[str]:
    """Return a command that runs a Python program (FILE or -m MODULE) whose Ray forks its workers.

    The program needs the root directory in its path.
    """
    if not _can_fork():
        return [sys.executable]
    _ensure_server()
    return [sys.executable, "-m", __name__]


def forked_python() -> list[str]:
    """Return a command that runs a Python program (-c CODE, -m MODULE or FILE) in a fork.

    The server has imported torch, Megatron-Core and transformers. The program's Ray forks its
    workers. The command forwards signals, but the fork has no terminal and another process id.
    """
    if not _can_fork():
        return [sys.executable]
    _ensure_server()
    return [sys.executable, "-S", str(HERE / "fork_program.py")]


def offer_server() -> None:
    """Let the children of this process share a server, which starts with their first request."""
    listener = _listen()

    def start() -> None:
        select.select([listener], [], [])
        # The kernel would end the server with this thread.
        _start_server(listener).wait()

    Thread(target=start, daemon=True).start()


def _can_fork() -> bool:
    """Return False if there are GPUs, because a process that has used CUDA cannot be forked.

    pytest's main process asks, too. It does not import torch.
    """
    return not glob("/dev/nvidia[0-9]*")


def _ensure_server() -> None:
    if ADDRESS not in os.environ:
        _start_server(_listen())


def _listen() -> socket.socket:
    """Return a socket, and put its name into this process's environment."""
    address = f"forked-workers-{uuid.uuid4().hex}"
    os.environ[ADDRESS] = address
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("\0" + address)
    listener.listen(64)
    return listener


def _environment_of_server() -> dict[str, str]:
    """Return the environment that Ray gives a worker.

    OpenMP reads it when torch is loaded, which happens in the server. This process's variables come
    last: Ray finds the memory of a worker's title by the first variable, which must be one that a
    worker keeps.
    """
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    room = {MARKS: " " * MARKS_BYTES}
    return {**os.environ, "OMP_NUM_THREADS": threads, **local_environment(), **room}


def _start_server(listener: socket.socket) -> subprocess.Popen[bytes]:
    """Start the server. Clients wait while it imports, and fail to connect after its end."""
    with listener:
        # A separate session: interrupts sent by a test are meant for this process only. The kernel
        # ends the server with this process.
        return subprocess.Popen(
            [sys.executable, str(HERE / "server.py"), str(listener.fileno())],
            pass_fds=[listener.fileno()],
            env=_environment_of_server(),
            preexec_fn=exit_with_parent,
            start_new_session=True,
        )
