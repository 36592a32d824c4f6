"""Stores by which the processes of a group find each other.

torch's stores have no authentication. A program that can connect to a store can join the group, and
collective calls on Python objects unpickle its messages. Therefore a TCP store listens on a single
address, and processes on one machine can use a file instead.
"""

import socket
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist


def tcp_store(
    host: str, port: int, world_size: int, *, is_master: bool, timeout: timedelta
) -> dist.TCPStore:
    """Connect to a store at an address. The master also serves it.

    Args:
        host: address of the master.
        port: free port at that address.
        world_size: number of processes.
        is_master: whether this process serves the store.
        timeout: time limit of every wait.
    """
    # torch's server would listen on all addresses of the node. Pass it a socket that is bound to
    # one address.
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
    """Open a store in a file, for processes on one machine.

    Only users who can access the file can join.

    Args:
        file: path of the file.
        world_size: number of processes.
        timeout: time limit of every wait.
    """
    store = dist.FileStore(str(file), world_size)
    store.set_timeout(timeout)
    return store


def rank_store(
    world_size: int, rank: int, host: str, port: int, file: Path | None, timeout: timedelta
) -> dist.Store:
    """Return the store of trainer ranks.

    Args:
        world_size: number of ranks.
        rank: index of this rank.
        host: address of rank 0.
        port: free port at that address.
        file: path of a file that only this user can read, for ranks on one machine; None for ranks
            on several machines.
        timeout: time limit of every wait.
    """
    # A single rank needs no other process, so it opens no port.
    if world_size == 1:
        return dist.HashStore()
    if file is not None:
        return file_store(file, world_size, timeout)
    return tcp_store(host, port, world_size, is_master=rank == 0, timeout=timeout)
