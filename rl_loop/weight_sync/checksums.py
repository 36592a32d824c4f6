"""Comparison of sent and received weights: checksums of a sample, computed on both sides."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class RankChecksums:
    """Checksums of the parameters on one rank of a server."""

    rank: int
    """Tensor-parallel rank."""
    checksums: Mapping[str, str]
    """Checksum by parameter. An entry with a space is a description of a fault."""


class ServerLayout(Protocol):
    """Parameters of servers and their source tensors."""

    def parameters(self, versions: range) -> dict[str, list[str]]:
        """Return the parameters to compare after the syncs ``versions``.

        Returns:
            {parameter: names of the Hugging Face tensors that it consists of}.
        """
        ...

    def checksums(self, parameter: str, parts: Sequence[torch.Tensor]) -> list[str]:
        """Return the checksum of a parameter on each rank.

        Args:
            parameter: name in the server.
            parts: its Hugging Face tensors in their shapes, in the order of ``parameters``.
        """
        ...


class WeightSample:
    """Sampled tensors of a sync, which are hashed and compared with the servers' checksums."""

    def __init__(self, layout: ServerLayout, versions: range) -> None:
        """Choose the sample.

        Args:
            layout: layout of the servers.
            versions: weight versions of this sync. The sample is the union of their samples.
        """
        self._layout = layout
        self._sources = layout.parameters(versions)
        self._parameters = {  # the inverse
            source: name for name, sources in self._sources.items() for source in sources
        }
        self._waiting: dict[str, torch.Tensor] = {}  # until all tensors of a parameter have come
        self._expected: dict[str, list[str]] = {}  # parameter -> checksum of each rank

    def watch(
        self,
        named_tensors: Iterable[tuple[str, torch.Tensor]],
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the same tensors, and hash those of the sample.

        Args:
            named_tensors: (Hugging Face name, tensor in its Hugging Face shape).
        """
        # Hashed during the transfer, because a second pass would have to gather the weights again,
        # which costs more than hashing.
        for name, tensor in named_tensors:
            parameter = self._parameters.get(name)
            if parameter is not None:
                self._waiting[name] = tensor
                self._hash_if_complete(parameter)
            yield name, tensor
            del tensor  # otherwise it would outlive its bucket

    def _hash_if_complete(self, parameter: str) -> None:
        # A server may fuse several tensors into one parameter. They can come in different buckets,
        # so keep each one until the last one is here.
        sources = self._sources[parameter]
        if all(source in self._waiting for source in sources):
            parts = [self._waiting.pop(source) for source in sources]
            self._expected[parameter] = self._layout.checksums(parameter, parts)

    def first_difference(self, ranks: Iterable[RankChecksums]) -> str | None:
        """Return the Hugging Face tensors of the first parameter that differs on a server.

        Args:
            ranks: checksums of all server ranks.

        Returns:
            The names, with the server's fault description in parentheses if there is one. None if
            all parameters are equal.
        """
        # Read several times below.
        known = list(ranks)
        for parameter, expected in self._expected.items():
            for rank in known:
                # A parameter without a checksum on the server is a difference, too.
                actual = rank.checksums.get(parameter)
                if actual != expected[rank.rank]:
                    names = ", ".join(self._sources[parameter])
                    if actual is not None and " " in actual:
                        return f"{names} ({actual})"
                    return names
        return None
