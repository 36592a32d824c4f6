"""Stores in which the processes of a group find each other.

torch's stores have no authentication. A program that reaches one can take the place of a process.
Collective calls on Python objects unpickle the messages of the other processes."""

import socket
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist


def tcp_store(
    host: str, port: int, world_size: int, *, is_master: bool, timeout: timedelta
) -> dist.TCPStore:
    """Connect to a store at an address of the master's node, and serve it there as the master.

    torch's own server would listen on every address of the node."""
    if not is_master:
        return dist.TCPStore(host, port, world_size, is_master=False, timeout=timeout)
    listener = socket.create_server((host, port))
    return dist.TCPStore(
        host,
        port,
        world_size,
        is_master=True,
        timeout=timeout,
        master_listen_fd=listener.detach(),
    )


def file_store(file: Path, world_size: int, timeout: timedelta) -> dist.FileStore:
    """Open a store in a file, for processes on one machine. Only users who can read it can join."""
    store = dist.FileStore(str(file), world_size)
    store.set_timeout(timeout)
    return store


def rank_store(
    world_size: int, rank: int, host: str, port: int, file: Path | None, timeout: timedelta
) -> dist.Store:
    """Return the store of trainer ranks.

    Args:
        world_size: number of ranks; a single rank needs no other process and opens no port.
        rank: index of this rank.
        host: address of rank 0.
        port: free port there.
        file: path of a file that only this user can read, for ranks on one machine; None for ranks
            on several.
        timeout: time limit of every wait.
    """
    if world_size == 1:
        return dist.HashStore()
    if file is not None:
        return file_store(file, world_size, timeout)
    return tcp_store(host, port, world_size, is_master=rank == 0, timeout=timeout)
