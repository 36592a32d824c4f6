"""Runs a function on several local processes, as the ranks of one gloo job."""

from __future__ import annotations

import io
import multiprocessing
import multiprocessing.connection
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rl_loop.cluster.placement import free_port as free_port
from tests.support.frozen_heap import keep_frozen

PRELOADED = [
    "tests.support.uncollected_imports",
    "megatron_gptoss.checkpoint.writer",
    "megatron_gptoss.model",
    "rl_loop.gateway.server",
    "rl_loop.rollout.group_stream",
    "rl_loop.session",
    "rl_loop.trainer.group",
    "tests.support.megatron_gptoss.reference",
    "tests.support.frozen_imports",
]
"""Modules that ``run_distributed`` functions import.

Without the fork server, every rank would spend 3 s of processor time on them. The first one and the
last one exempt them from garbage collection.
"""


def run_distributed(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 480,
    keeps_imports_frozen: bool = True,
) -> list[Any]:
    """Return ``[function(rank, *args) for rank in range(world_size)]``, each in a new process.

    The processes run concurrently. ``function`` must be importable and creates its process group
    itself. If a rank raises, all are stopped and the test fails with that rank's traceback. The
    test also fails after ``timeout`` seconds. With ``keeps_imports_frozen``, imported objects stay
    exempt from garbage collection.
    """
    # A fork server imports slow modules only once. A process with CUDA cannot be forked.
    context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
    context.set_forkserver_preload(PRELOADED)
    channels, processes = {}, []
    for rank in range(world_size):
        receiver, sender = context.Pipe(duplex=False)
        arguments = (sender, function, rank, args, keeps_imports_frozen)
        process = context.Process(target=_child, args=arguments, daemon=False)
        process.start()
        sender.close()
        channels[receiver] = rank
        processes.append(process)
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    try:
        while len(results) < world_size:
            waiting = [channel for channel, rank in channels.items() if rank not in results]
            ready = multiprocessing.connection.wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                missing = sorted(set(range(world_size)) - set(results))
                pytest.fail(
                    f"{function.__name__}: ranks {missing} not done after {timeout} s",
                    pytrace=False,
                )
            for channel in ready:
                rank = channels[channel]
                try:
                    answer, error = torch.load(io.BytesIO(channel.recv_bytes()), weights_only=False)
                except EOFError:
                    processes[rank].join(5)
                    answer, error = (
                        None,
                        f"the process ended with exit code {processes[rank].exitcode}",
                    )
                if error is not None:
                    pytest.fail(
                        f"{function.__name__}: rank {rank} of {world_size}: {error}", pytrace=False
                    )
                results[rank] = answer
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
    return [results[rank] for rank in range(world_size)]


def _fork_checkpoint_writers() -> None:
    """Fork the process that writes checkpoints. A new interpreter spends 3 s on imports."""
    if torch.cuda.is_available():
        return
    caller = sys.modules["megatron.core.dist_checkpointing.strategies.async_utils"]
    get_process = caller.PersistentAsyncCaller._get_process.__func__
    caller.PersistentAsyncCaller._get_process = classmethod(
        lambda cls, rank: get_process(cls, rank, mp_mode="fork")
    )


def _child(
    sender: Any,
    function: Callable[..., Any],
    rank: int,
    args: tuple[Any, ...],
    keeps_imports_frozen: bool,
) -> None:
    torch.set_num_threads(1)
    _fork_checkpoint_writers()
    if keeps_imports_frozen:
        keep_frozen()
    try:
        message = (function(rank, *args), None)
    except BaseException:
        message = (None, traceback.format_exc())
    # Bytes instead of tensors, because a shared tensor would end with this process.
    buffer = io.BytesIO()
    torch.save(message, buffer)
    sender.send_bytes(buffer.getvalue())
    sender.close()
    if message[1] is not None:
        os._exit(
            1
        )  # a failed rank must not wait for its peers in the destructor of a process group
