"""Ray's workers, forked from a process that has imported what they import.

A worker that is a rank or a rollout worker spends five seconds of processor time on imports, more than most tests let
it work. So a local Ray of the tests starts ``ask_for_fork.py`` in the place of its worker program, which asks
``server.py``, a process of this one, for a fork; the fork goes on as Ray's program. Workers of the ``gptoss`` commands
that tests run start as users' do.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
import torch

from rl_loop.cluster.placement import end_with_parent
from rl_loop.cluster.ray_session import local_environment, start_local_ray

HERE = Path(__file__).parent
ADDRESS = "GPTOSS_TEST_FORKED_WORKERS"
"""In the environment of Ray: the abstract name of the server's socket, without the zero byte before it."""

_servers: list[subprocess.Popen[bytes]] = []
"""The server, once a first Ray has started; the kernel ends it with this process."""


@contextmanager
def local_ray(num_cpus: int, object_store_bytes: int) -> Iterator[None]:
    """Start a Ray on this machine whose workers are forked, and end it."""
    with forking_workers():
        start_local_ray(num_cpus=num_cpus, object_store_bytes=object_store_bytes)
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def forking_workers() -> Iterator[None]:
    """While inside, a Ray that starts in this process has forked workers."""
    if torch.cuda.is_available():  # a process that has used CUDA cannot be forked
        yield
        return

    if not _servers:
        _servers.append(_start_server())

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


def _environment_of_server() -> dict[str, str]:
    """Return what Ray gives a worker. OpenMP reads it when torch is loaded, which is in the server.

    Ours come last: Ray finds the place of a worker's title by the first variable, which must be one that a
    worker keeps."""
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    return {**os.environ, "OMP_NUM_THREADS": threads, **local_environment()}


def _start_server() -> subprocess.Popen[bytes]:
    """Start the server. Who asks it waits while it imports; when it ends, its socket refuses."""
    address = f"forked-workers-{uuid.uuid4().hex}"
    os.environ[ADDRESS] = address
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0" + address)
        listener.listen(64)
        # In a session of its own: an interrupt that a test sends is meant for this process.
        return subprocess.Popen(
            [sys.executable, str(HERE / "server.py"), str(listener.fileno())],
            pass_fds=[listener.fileno()],
            env=_environment_of_server(),
            preexec_fn=end_with_parent,
            start_new_session=True,
        )
