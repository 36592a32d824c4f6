"""Layout of packed sequences, read from ``cu_seqlens`` once and shared by all layers of a step."""

import functools
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gptoss_kernels.device_copies import copy_to_device


@dataclass
class PackedLayout:
    """One packing of sequences, as seen by the host."""

    offsets: Tensor
    """[sequences + 1] int64 on the CPU: start of each sequence, then the number of tokens."""
    longest: int
    """Length of the longest sequence in tokens."""
    plans: dict[Any, Any] = field(default_factory=dict)
    """Tables that backends derive from the packing. Each backend chooses its keys."""

    @functools.cached_property
    def mean_length(self) -> float:
        """Mean sequence length in tokens, weighted by length.

        It is the mean over tokens of the sequence length.
        """
        # The weight is right for choosing a backend, because long sequences have most of the work
        # of full attention.
        lengths = self.offsets.diff()
        return float(lengths.square().sum() / max(1, self.tokens))

    @property
    def tokens(self) -> int:
        """Number of packed tokens."""
        return int(self.offsets[-1])

    def pieces(self, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """Cut the sequences into pieces of ``length`` tokens.

        Pieces are aligned to the start of their sequence; the last piece of a sequence may be
        shorter.

        Returns:
            Three int64 tensors [pieces] on the CPU: start of the piece's sequence, end of that
            sequence, and index of the piece in the sequence.
        """
        starts = self.offsets[:-1]
        ends = self.offsets[1:]
        counts = (ends - starts + length - 1) // length

        # Vectorized, because a pack may have thousands of pieces: index of each piece minus index
        # of the first piece of its sequence.
        sequence = torch.repeat_interleave(torch.arange(len(starts)), counts)
        first_piece = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
        number = torch.arange(len(sequence)) - first_piece
        return starts[sequence], ends[sequence], number


@dataclass(frozen=True)
class AttentionSegments:
    """Ranges of queries and keys. The queries of a segment are at its last keys.

    Keep one object per packing, because the first use may copy the offsets to the host.
    """

    cu_seqlens_q: Tensor
    """[segments + 1] int32 offsets of the queries."""
    cu_seqlens_k: Tensor
    """[segments + 1] int32 offsets of the keys.

    The same object as ``cu_seqlens_q`` if every key has a query.
    """
    max_seqlen_q: int
    """Largest number of queries in a segment, or an upper bound."""
    max_seqlen_k: int
    """Largest number of keys in a segment, or an upper bound."""

    @property
    def square(self) -> bool:
        """True if every key has a query."""
        # Identity instead of equality: comparing tensors on a GPU would wait for the stream.
        return self.cu_seqlens_k is self.cu_seqlens_q

    @functools.cached_property
    def padded(self) -> tuple[Tensor, "AttentionSegments"]:
        """Index of each query among the keys, int64 [queries], and segments with a query per key."""
        queries = packed_layout(self.cu_seqlens_q).offsets
        counts = queries.diff()

        # The queries of a segment belong to its last keys, so all of them move by the same distance.
        # `shifts` has one entry per segment.
        shifts = packed_layout(self.cu_seqlens_k).offsets[1:] - counts - queries[:-1]
        rows = torch.arange(int(queries[-1])) + torch.repeat_interleave(shifts, counts)

        # The same tensor twice marks the segments as square.
        square = AttentionSegments(
            cu_seqlens_q=self.cu_seqlens_k,
            cu_seqlens_k=self.cu_seqlens_k,
            max_seqlen_q=self.max_seqlen_k,
            max_seqlen_k=self.max_seqlen_k,
        )
        return copy_to_device(rows, self.cu_seqlens_k.device), square

    @classmethod
    def from_lengths(
        cls, query_lengths: list[int], key_lengths: list[int], device: torch.device
    ) -> "AttentionSegments":
        """Return segments with the given numbers of queries and keys.

        Args:
            query_lengths: queries per segment.
            key_lengths: keys per segment.
            device: device of the offsets.
        """
        cu_seqlens_q = _offsets(query_lengths, device)
        # The same object marks the segments as square.
        cu_seqlens_k = cu_seqlens_q
        if key_lengths != query_lengths:
            cu_seqlens_k = _offsets(key_lengths, device)

        return cls(
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=max(query_lengths, default=0),
            max_seqlen_k=max(key_lengths, default=0),
        )


def _offsets(lengths: list[int], device: torch.device) -> Tensor:
    """Return the offsets of ranges with these lengths, [ranges + 1] int32."""
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    cu_seqlens = copy_to_device(offsets.to(torch.int32), device)
    # Known here, so that attention need not read the offsets from the GPU.
    if lengths:
        _remember(cu_seqlens, PackedLayout(offsets, longest=max(lengths)))
    return cu_seqlens


# Keys are ids of cu_seqlens tensors, because tensors compare element by element. An id can be
# reused and a tensor can be modified. Each entry therefore has a weak reference and the version
# counter at the time of reading.
_layouts: dict[int, tuple[weakref.ref, int, PackedLayout]] = {}


def packed_layout(cu_seqlens: Tensor) -> PackedLayout:
    """Return the layout of ``cu_seqlens``, [sequences + 1] int32 or int64 on any device.

    The first call with a tensor copies it to the host, which waits for the stream on a GPU. Later
    calls with the same, unmodified tensor take a dictionary lookup.

    Raises:
        ValueError: the tensor is not a valid list of offsets.
    """
    known = _layouts.get(id(cu_seqlens))
    if known is not None:
        reference, known_version, layout = known
        if reference() is cu_seqlens and known_version == _version(cu_seqlens):
            return layout

    layout = _read(cu_seqlens)
    _remember(cu_seqlens, layout)
    return layout


def _remember(cu_seqlens: Tensor, layout: PackedLayout) -> None:
    """Store the layout of ``cu_seqlens`` as long as the tensor exists."""
    key = id(cu_seqlens)
    # The callback removes the entry with its tensor, so that the cache does not grow.
    reference = weakref.ref(cu_seqlens, lambda _: _layouts.pop(key, None))
    _layouts[key] = (reference, _version(cu_seqlens), layout)


def _version(tensor: Tensor) -> int:
    """Return the number of modifications of a tensor."""
    # Inference tensors have no version counter.
    return 0 if tensor.is_inference() else tensor._version


def _read(cu_seqlens: Tensor) -> PackedLayout:
    """Copy the offsets to the host and check them; raise ValueError if they are not offsets."""
    one_dimensional = cu_seqlens.dim() == 1 and cu_seqlens.numel() >= 2
    if not one_dimensional or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            "cu_seqlens must be a one-dimensional int32 or int64 tensor [sequences + 1], got "
            f"{cu_seqlens.dtype} {list(cu_seqlens.shape)}"
        )

    # The copy below waits for the stream, which CUDA forbids during a graph capture.
    if cu_seqlens.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "cu_seqlens has not been read yet: call once with this tensor before capturing a CUDA "
            "graph"
        )

    offsets = cu_seqlens.detach().to("cpu", torch.int64)
    lengths = offsets.diff()
    if int(offsets[0]) != 0:
        raise ValueError(f"cu_seqlens must start at 0, starts at {int(offsets[0])}")

    decreases = lengths < 0
    if bool(decreases.any()):
        first = int(decreases.nonzero()[0])
        before = int(offsets[first])
        after = int(offsets[first + 1])
        raise ValueError(f"cu_seqlens must not decrease: {before} then {after}")

    return PackedLayout(offsets=offsets, longest=int(lengths.max()))
