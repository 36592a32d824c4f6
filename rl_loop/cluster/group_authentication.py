"""Process groups that only processes with the run's token can join.

gloo has no authentication. A program that connects in place of a rank becomes that rank, and
collective calls on Python objects unpickle its messages. gloo's transport ``TCP_TLS`` does not help.
In torch 2.11 it reads the certificates and then makes plain connections
(``Context::createAndConnectAllPairs`` calls an overload of ``createPair`` that ``tls::Context`` does
not have). Therefore the first messages of a new group of gloo are a challenge: every two ranks prove
to each other that they know the token. A connection of gloo lasts as long as its group.

torch's TCPStore has no authentication either. It holds the addresses at which ranks of gloo listen,
and NCCL's unique id, whose random number admits a process to NCCL's bootstrap. Therefore its values
are encrypted with a key that is derived from the token.

The plugin of SGLang's servers loads this module by its path. It needs only torch and cryptography,
which SGLang's environment has.
"""

import functools
import hmac
import inspect
import os
import secrets
import struct
from collections.abc import MutableMapping
from datetime import timedelta
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"
"""Variable with the path of the run's token; Ray's processes have it."""
NONCE_BYTES = 32
PROOF_BYTES = 32
NONCE_TAG, PROOF_TAG = 0x6770, 0x6771
TIMEOUT = timedelta(seconds=120)
"""Time limit of each message. All ranks are connected when they begin."""
CIPHER_NONCE_BYTES = 12
"""Length that AES-GCM expects."""


class UnknownRankError(RuntimeError):
    """A process that does not know the run's token has connected as a rank."""


class EncryptedStore(dist.Store):
    """View of a store whose values only processes with the token can read and write.

    Every value is encrypted and authenticated together with its key, so a value cannot be moved to
    another key. Counters (``add``) are plain: torch uses them for barriers. Another process can
    delay a barrier or let it pass early, but learns nothing from it.

    torch's C++ code calls these methods, possibly from its own threads. The Python object must live
    as long as a process group uses it.
    """

    def __init__(self, store: dist.Store, token: bytes) -> None:
        super().__init__()
        self._store = store
        self._token = token
        # A separate key, because the token itself authenticates ranks.
        self._cipher = AESGCM(hmac.digest(token, b"values of a rendezvous store", "sha256"))
        self._clones: list[EncryptedStore] = []

    def set(self, key: str, value: str | bytes) -> None:
        """Encrypt and write a value."""
        plain = value.encode() if isinstance(value, str) else value
        # AES-GCM is broken by a repeated nonce. All processes share the key, so none of them can
        # count.
        nonce = secrets.token_bytes(CIPHER_NONCE_BYTES)
        encrypted = nonce + self._cipher.encrypt(nonce, plain, key.encode())
        # torch takes bytes here, though its annotations name only str.
        self._store.set(key, encrypted)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """Wait for a value, and decrypt it.

        Raises:
            UnknownRankError: if no process with the token has written the value.
        """
        encrypted = self._store.get(key)
        nonce = encrypted[:CIPHER_NONCE_BYTES]
        try:
            return self._cipher.decrypt(nonce, encrypted[CIPHER_NONCE_BYTES:], key.encode())
        except (InvalidTag, ValueError) as problem:
            raise UnknownRankError(
                f"rendezvous store: the value of {key} was written by a process that does not "
                "know the run's token. Find out which program connects to this machine"
            ) from problem

    def add(self, key: str, value: int) -> int:
        """Add to a counter, and return its value."""
        return self._store.add(key, value)

    def check(self, keys: list[str]) -> bool:
        """Return True if all keys exist."""
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys exist."""
        if timeout is None:
            self._store.wait(keys)
        else:
            self._store.wait(keys, timeout)

    def delete_key(self, key: str) -> bool:
        """Delete a key, and return whether it existed."""
        return self._store.delete_key(key)

    def num_keys(self) -> int:
        """Return the number of keys."""
        return self._store.num_keys()

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time limit of later waits."""
        self._store.set_timeout(timeout)

    def clone(self) -> "EncryptedStore":
        """Open another connection to the store. NCCL makes one for each of its threads."""
        store: Any = self._store
        clone = EncryptedStore(store.clone(), self._token)
        # C++ keeps its half of the object only.
        self._clones.append(clone)
        return clone


_stores: MutableMapping[dist.ProcessGroup, EncryptedStore] = WeakKeyDictionary()
"""Stores that process groups use. torch itself does not keep the Python objects."""


def authenticate_groups() -> None:
    """Let every process group that this process makes from now on check its ranks.

    All processes of a group must do so. Without a token groups are as torch makes them.
    """
    module: Any = dist.distributed_c10d
    make_group = module._new_process_group_helper
    # A second call must not check every group twice.
    if hasattr(make_group, "without_authentication"):
        return
    parameters = inspect.signature(make_group)

    @functools.wraps(make_group)
    def make_authenticated_group(*arguments: Any, **options: Any) -> Any:
        if TOKEN_PATH not in os.environ:
            return make_group(*arguments, **options)
        token = Path(os.environ[TOKEN_PATH]).read_bytes()

        # torch passes some arguments by position, so look the store up by its name.
        call = parameters.bind(*arguments, **options)
        # Only this kind of store listens on the network.
        if isinstance(_innermost(call.arguments["store"]), dist.TCPStore):
            call.arguments["store"] = EncryptedStore(call.arguments["store"], token)
        group = make_group(*call.args, **call.kwargs)

        # Ranks outside of the group get a placeholder.
        if isinstance(group[0], dist.ProcessGroup):
            if isinstance(call.arguments["store"], EncryptedStore):
                _stores[group[0]] = call.arguments["store"]
            if _uses_gloo(group[0]):
                check_ranks(group[0], token)
        return group

    make_authenticated_group.without_authentication = make_group  # type: ignore[attr-defined]
    module._new_process_group_helper = make_authenticated_group


def _innermost(store: dist.Store) -> dist.Store:
    """Return the store below all prefixes."""
    # Later groups get the store of the default group, which is encrypted already.
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def check_ranks(group: dist.ProcessGroup, token: bytes) -> None:
    """Exchange proofs with all other ranks of a group. Collective.

    Raises:
        UnknownRankError: naming the rank, if the process that connected as it does not know the token.
    """
    me = group.rank()
    peers = [rank for rank in range(group.size()) if rank != me]
    nonces = {peer: secrets.token_bytes(NONCE_BYTES) for peer in peers}
    received = _exchange(group, nonces, NONCE_BYTES, NONCE_TAG)
    proofs = {peer: _proof(token, group, me, peer, received[peer] + nonces[peer]) for peer in peers}
    answers = _exchange(group, proofs, PROOF_BYTES, PROOF_TAG)
    for peer in peers:
        expected = _proof(token, group, peer, me, nonces[peer] + received[peer])
        # This comparison takes equal time for all inputs, so its time reveals nothing.
        if not hmac.compare_digest(answers[peer], expected):
            raise UnknownRankError(
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
    # With sender and receiver in the proof, a process cannot send our proof back to us.
    place = struct.pack("<3I", group.size(), sender, receiver)
    return hmac.digest(token, place + nonces + group.group_name.encode(), "sha256")
