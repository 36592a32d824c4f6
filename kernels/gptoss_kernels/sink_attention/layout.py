"""What a ``cu_seqlens`` tensor says, checked and read once, then shared by every layer of a step."""

import functools
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch

Saved = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""What a forward pass leaves to its backward pass: q, k, v, sinks, O and LSE."""


@dataclass
class PackedLayout:
    """Host view of one packing. ``plans`` holds what a backend derives from it (tile tables on the device)."""

    offsets: torch.Tensor
    """[sequences + 1] int64 on the CPU: where each sequence starts, and the total."""
    longest: int
    """Longest sequence in tokens."""
    plans: dict[Any, Any] = field(default_factory=dict)

    @functools.cached_property
    def mean_length(self) -> float:
        """Of the sequence that a token is in: long ones, where most of full attention's work is, count by length."""
        lengths = self.offsets.diff()
        return float(lengths.square().sum() / max(1, self.tokens))

    @property
    def tokens(self) -> int:
        return int(self.offsets[-1])

    def pieces(self, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The sequences cut into pieces of ``length`` tokens: per piece its sequence's start and end, and its number in
        the sequence; int64 on the CPU."""
        begin, lengths = self.offsets[:-1], self.offsets.diff()
        counts = (lengths + length - 1) // length
        sequence = torch.repeat_interleave(torch.arange(len(begin)), counts)
        number = torch.arange(len(sequence)) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
        return begin[sequence], self.offsets[1:][sequence], number


@dataclass(frozen=True)
class Segments:
    """Ranges of queries and the ranges of keys whose last tokens those queries are; keep one object per packing."""

    cu_seqlens_q: torch.Tensor
    """int32 [segments + 1]"""
    cu_seqlens_k: torch.Tensor
    """int32 [segments + 1]; the same object as ``cu_seqlens_q`` when the queries are all of the keys"""
    max_seqlen_q: int
    max_seqlen_k: int

    @property
    def square(self) -> bool:
        return self.cu_seqlens_k is self.cu_seqlens_q

    @classmethod
    def of(cls, query_lengths: list[int], key_lengths: list[int], device: torch.device) -> "Segments":
        def offsets(lengths: list[int]) -> torch.Tensor:
            return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)

        cu_seqlens_q = offsets(query_lengths)
        cu_seqlens_k = cu_seqlens_q if key_lengths == query_lengths else offsets(key_lengths)
        return cls(cu_seqlens_q, cu_seqlens_k, max(query_lengths, default=0), max(key_lengths, default=0))


_layouts: dict[int, tuple[weakref.ref, int, PackedLayout]] = {}


def packed_layout(cu_seqlens: torch.Tensor) -> PackedLayout:
    """The layout of ``cu_seqlens`` ([sequences + 1], int32 or int64, any device).

    The first call for a tensor copies it to the host (on a GPU that waits for the stream); later calls with the same,
    unmodified tensor cost a dictionary lookup. Raises ValueError when it is not a valid list of offsets."""
    key = id(cu_seqlens)
    version = 0 if cu_seqlens.is_inference() else cu_seqlens._version
    known = _layouts.get(key)
    if known is not None and known[0]() is cu_seqlens and known[1] == version:
        return known[2]
    layout = _read(cu_seqlens)
    reference = weakref.ref(cu_seqlens, lambda _: _layouts.pop(key, None))
    _layouts[key] = (reference, version, layout)
    return layout


def _read(cu_seqlens: torch.Tensor) -> PackedLayout:
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            "cu_seqlens must be a one-dimensional int32 or int64 tensor [sequences + 1], got "
            f"{cu_seqlens.dtype} {list(cu_seqlens.shape)}"
        )
    if cu_seqlens.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ValueError("cu_seqlens is new to this process: call once with this tensor before capturing a CUDA graph")
    offsets = cu_seqlens.detach().to("cpu", torch.int64)
    lengths = offsets.diff()
    if int(offsets[0]) != 0:
        raise ValueError(f"cu_seqlens must start at 0, starts at {int(offsets[0])}")
    if bool((lengths < 0).any()):
        first = int((lengths < 0).nonzero()[0])
        raise ValueError(f"cu_seqlens must not decrease: {int(offsets[first])} then {int(offsets[first + 1])}")
    return PackedLayout(offsets, int(lengths.max()))
