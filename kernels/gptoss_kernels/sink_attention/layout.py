"""How sequences are packed: read from ``cu_seqlens`` once, shared by every layer of a step."""

import functools
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class PackedLayout:
    """The host's view of one packing."""

    offsets: Tensor
    """[sequences + 1] int64 on the CPU: where each sequence starts, and the total."""
    longest: int
    """Longest sequence in tokens."""
    plans: dict[Any, Any] = field(default_factory=dict)
    """What a backend derives from the packing (tables on the device), by a key of its own."""

    @functools.cached_property
    def mean_length(self) -> float:
        """Mean over the tokens of the length of the sequence that a token is in.

        Long sequences, where most of full attention's work is, so count by their length.
        """
        lengths = self.offsets.diff()
        return float(lengths.square().sum() / max(1, self.tokens))

    @property
    def tokens(self) -> int:
        """Number of packed tokens."""
        return int(self.offsets[-1])

    def pieces(self, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """Cut the sequences into pieces of ``length`` tokens, counted from each sequence's start.

        Returns, per piece, its sequence's start, its sequence's end and the piece's number in the
        sequence: three int64 tensors [pieces] on the CPU.
        """
        starts = self.offsets[:-1]
        ends = self.offsets[1:]
        counts = (ends - starts + length - 1) // length

        sequence = torch.repeat_interleave(torch.arange(len(starts)), counts)
        first_piece = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
        number = torch.arange(len(sequence)) - first_piece
        return starts[sequence], ends[sequence], number


@dataclass(frozen=True)
class Segments:
    """Ranges of queries, each with the range of keys whose last tokens the queries are.

    Keep one object per packing: the offsets are read back to the host when first seen.
    """

    cu_seqlens_q: Tensor
    """int32 [segments + 1]"""
    cu_seqlens_k: Tensor
    """int32 [segments + 1]; the same object as ``cu_seqlens_q`` when every key has its query"""
    max_seqlen_q: int
    """At least the most queries of a segment."""
    max_seqlen_k: int
    """At least the most keys of a segment."""

    @property
    def square(self) -> bool:
        """Whether every key has its query."""
        return self.cu_seqlens_k is self.cu_seqlens_q

    @classmethod
    def from_lengths(
        cls, query_lengths: list[int], key_lengths: list[int], device: torch.device
    ) -> "Segments":
        """Make segments of so many queries and keys each, with their offsets on ``device``."""
        cu_seqlens_q = _offsets(query_lengths, device)
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
    return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)


# By id of the cu_seqlens tensor. The weak reference tells whether the id is still that tensor's,
# and the version whether its contents are still those that were read.
_layouts: dict[int, tuple[weakref.ref, int, PackedLayout]] = {}


def packed_layout(cu_seqlens: Tensor) -> PackedLayout:
    """Read and check the layout of ``cu_seqlens``, [sequences + 1] int32 or int64 on any device.

    The first call for a tensor copies it to the host (on a GPU that waits for the stream); later
    calls with the same, unmodified tensor cost a dictionary lookup.

    Raises:
        ValueError: when it is not a valid list of offsets.
    """
    key = id(cu_seqlens)
    version = 0 if cu_seqlens.is_inference() else cu_seqlens._version
    known = _layouts.get(key)
    if known is not None:
        reference, known_version, layout = known
        if reference() is cu_seqlens and known_version == version:
            return layout

    layout = _read(cu_seqlens)
    reference = weakref.ref(cu_seqlens, lambda _: _layouts.pop(key, None))
    _layouts[key] = (reference, version, layout)
    return layout


def _read(cu_seqlens: Tensor) -> PackedLayout:
    one_dimensional = cu_seqlens.dim() == 1 and cu_seqlens.numel() >= 2
    if not one_dimensional or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            "cu_seqlens must be a one-dimensional int32 or int64 tensor [sequences + 1], got "
            f"{cu_seqlens.dtype} {list(cu_seqlens.shape)}"
        )

    # The copy below waits for the stream, which a capture does not allow.
    if cu_seqlens.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "cu_seqlens is new to this process: call once with this tensor before capturing a CUDA graph"
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
