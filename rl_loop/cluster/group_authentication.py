"""Process groups of gloo that only processes with the run's token can join.

gloo has no authentication: a program that connects in place of a rank becomes that rank, and
collective calls on Python objects unpickle what it sends. gloo's transport ``TCP_TLS`` is no remedy.
In torch 2.11 it reads the certificates and then makes plain connections
(``Context::createAndConnectAllPairs`` calls an overload of ``createPair`` that ``tls::Context`` does
not have).

So the first messages of a new group are a challenge: every two ranks prove to each other that they
know the token. A connection of gloo lasts as long as its group.

This file needs torch and the standard library only. The plugin of SGLang's servers loads it by its
path.
"""

import functools
import hmac
import os
import secrets
import struct
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"
"""Variable with the path of the run's token; Ray's processes have it."""
NONCE_BYTES = 32
PROOF_BYTES = 32
NONCE_TAG, PROOF_TAG = 0x6770, 0x6771
TIMEOUT = timedelta(seconds=120)
"""Time limit of each message. All ranks are connected when they begin."""


class UnknownRank(RuntimeError):
    """A process that does not know the run's token has connected as a rank."""


def authenticate_groups() -> None:
    """Let every gloo group that this process makes from now on check its ranks.

    All processes of a group must do so. Without a token groups are as torch makes them.
    """
    module: Any = dist.distributed_c10d
    make_group = module._new_process_group_helper
    if hasattr(make_group, "without_authentication"):
        return

    @functools.wraps(make_group)
    def make_authenticated_group(*arguments: Any, **options: Any) -> Any:
        made = make_group(*arguments, **options)
        is_member = isinstance(made[0], dist.ProcessGroup)
        if is_member and _uses_gloo(made[0]) and TOKEN_PATH in os.environ:
            check_ranks(made[0], Path(os.environ[TOKEN_PATH]).read_bytes())
        return made

    make_authenticated_group.without_authentication = make_group  # type: ignore[attr-defined]
    module._new_process_group_helper = make_authenticated_group


def check_ranks(group: dist.ProcessGroup, token: bytes) -> None:
    """Exchange proofs with all other ranks of a group. Collective.

    Raises:
        UnknownRank: naming the rank, if the process that connected as it does not know the token.
    """
    me = group.rank()
    peers = [rank for rank in range(group.size()) if rank != me]
    nonces = {peer: secrets.token_bytes(NONCE_BYTES) for peer in peers}
    received = _exchange(group, nonces, NONCE_BYTES, NONCE_TAG)
    proofs = {peer: _proof(token, group, me, peer, received[peer] + nonces[peer]) for peer in peers}
    answers = _exchange(group, proofs, PROOF_BYTES, PROOF_TAG)
    for peer in peers:
        expected = _proof(token, group, peer, me, nonces[peer] + received[peer])
        if not hmac.compare_digest(answers[peer], expected):
            raise UnknownRank(
                f"process group {group.group_name}: the process that connected as rank {peer} does "
                "not know the run's token. Find out which program connects to this machine"
            )


def _uses_gloo(group: dist.ProcessGroup) -> bool:
    cpu = torch.device("cpu")
    return cpu in group._device_types and "gloo" in group._get_backend(cpu).name()


def _exchange(
    group: dist.ProcessGroup, messages: dict[int, bytes], size: int, tag: int
) -> dict[int, bytes]:
    """Send each peer its message, and return the messages of all peers."""
    incoming = {peer: torch.empty(size, dtype=torch.uint8) for peer in messages}
    outgoing = [torch.frombuffer(bytearray(m), dtype=torch.uint8) for m in messages.values()]
    works = [group.recv([tensor], peer, tag) for peer, tensor in incoming.items()]
    works += [
        group.send([tensor], peer, tag) for peer, tensor in zip(messages, outgoing, strict=True)
    ]
    for work in works:
        work.wait(TIMEOUT)
    return {peer: tensor.numpy().tobytes() for peer, tensor in incoming.items()}


def _proof(
    token: bytes, group: dist.ProcessGroup, sender: int, receiver: int, nonces: bytes
) -> bytes:
    """Return the proof of ``sender``. ``nonces``: of the receiver, then of the sender."""
    place = struct.pack("<3I", group.size(), sender, receiver)
    return hmac.digest(token, place + nonces + group.group_name.encode(), "sha256")
