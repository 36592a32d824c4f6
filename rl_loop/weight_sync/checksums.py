"""Checks that servers hold what they were sent: checksums of a sample, taken on both sides."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class RankChecksums:
    """Checksums of what one rank of a server holds."""

    rank: int
    """Tensor-parallel rank."""
    checksums: Mapping[str, str]
    """Checksum by parameter. One with a space in it says what is wrong with the parameter."""


class ServerLayout(Protocol):
    """Parameters of servers, and the tensors that they are made of."""

    def parameters(self, versions: range) -> dict[str, list[str]]:
        """Return the parameters to compare after syncs ``versions``, and the Hugging Face tensors
        that each is made of."""
        ...

    def checksums(self, parameter: str, parts: Sequence[torch.Tensor]) -> list[str]:
        """Return the checksum of a parameter on each rank.

        Args:
            parameter: name in the server.
            parts: its Hugging Face tensors, in the order of ``parameters``.
        """
        ...


class WeightSample:
    """Hashes the sampled tensors of a sync and compares them with the servers' checksums."""

    def __init__(self, layout: ServerLayout, versions: range) -> None:
        """Choose the sample.

        Args:
            layout: of the servers.
            versions: the samples of all of these are taken together.
        """
        self._layout = layout
        self._sources = layout.parameters(versions)
        self._parameters = {  # and back
            source: name for name, sources in self._sources.items() for source in sources
        }
        self._waiting: dict[str, torch.Tensor] = {}  # passed, but others of its parameter have not
        self._expected: dict[str, list[str]] = {}  # parameter -> checksum of each rank

    def watch(
        self,
        named: Iterable[tuple[str, torch.Tensor]],
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the same tensors. Those of the sample are hashed as they pass."""
        # On the way to the servers and not in a second pass: gathering the weights costs more than
        # hashing.
        for name, tensor in named:
            parameter = self._parameters.get(name)
            if parameter is not None:
                self._waiting[name] = tensor
                self._hash_if_complete(parameter)
            yield name, tensor
            del tensor  # or it would outlive its bucket

    def _hash_if_complete(self, parameter: str) -> None:
        sources = self._sources[parameter]
        if all(source in self._waiting for source in sources):
            parts = [self._waiting.pop(source) for source in sources]
            self._expected[parameter] = self._layout.checksums(parameter, parts)

    def first_difference(self, ranks: Iterable[RankChecksums]) -> str | None:
        """Name the Hugging Face tensors of the first parameter that differs on a server.

        Args:
            ranks: checksums of all ranks of the server.

        Returns:
            The names, and in parentheses what the server says is wrong; None if all parameters are
            as they were sent.
        """
        known = list(ranks)
        for parameter, expected in self._expected.items():
            for rank in known:
                found = rank.checksums.get(parameter)
                if found != expected[rank.rank]:
                    names = ", ".join(self._sources[parameter])
                    if found is not None and " " in found:
                        return f"{names} ({found})"
                    return names
        return None
