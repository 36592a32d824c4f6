"""Packed batches: the one layout of training, scoring and supervised fine-tuning.

Sequences of different lengths lie end to end in one row of tokens ("THD"); ``cu_seqlens`` says where each begins. The
only padding, which makes the row divisible among ranks, is a sequence of its own and never enters loss or metrics."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, Self

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_gptoss.context_parallel import ContextLayout, balanced_layout

GRAFTED = -1
"""As ``staleness``: the token was put here from another context."""


@dataclass
class Sample:
    """One sequence to train on or to score. All per-token lists have the length of ``token_ids``.

    Position i of the per-token lists speaks of token i as a *label*: entry 0 is unused, as nothing predicts it."""

    token_ids: Sequence[int]
    loss_mask: Sequence[int]
    advantages: Sequence[float] | None = None
    rollout_log_probs: Sequence[float] | None = None
    old_log_probs: Sequence[float] | None = None
    """Of the trainer's policy when the batch was sampled; None when the batch is used for one update only."""
    reference_log_probs: Sequence[float] | None = None
    """Of the frozen policy that a KL penalty refers to."""
    values: Sequence[float] | None = None
    """The critic's, before the update."""
    returns: Sequence[float] | None = None
    staleness: Sequence[int] | None = None
    """How many weight versions before the current one a token was sampled with, or GRAFTED; None: all current."""
    routed_experts: np.ndarray | None = None
    """int16 [len - 1, layers, top_k]; -1 where the trainer is to choose for itself"""
    sample_id: int = -1
    """Where the sample stood in the caller's list; set by ``pack``."""


OPTIONAL = {
    "old_log_probs": torch.float32,
    "reference_log_probs": torch.float32,
    "values": torch.float32,
    "returns": torch.float32,
    "staleness": torch.int32,
}
"""Columns that a batch has if any of its samples has them; the others then count as 0."""


@dataclass
class PackedBatch:
    """One micro-batch. T tokens (inputs), n sequences including the padding tail if there is one.

    A sequence of m tokens contributes m - 1 inputs (all but its last) and m - 1 labels (all but its first)."""

    input_ids: torch.Tensor  # int64 [T]
    labels: torch.Tensor  # int64 [T]: the next token of the same sequence
    position_ids: torch.Tensor  # int64 [T]: from 0 in each sequence
    loss_mask: torch.Tensor  # float32 [T]: 1 where the label was sampled by the policy (RL) or is to be learned (SFT)
    advantages: torch.Tensor  # float32 [T], 0 where unset
    rollout_log_probs: torch.Tensor  # float32 [T], 0 where unset
    sample_ids: torch.Tensor  # int64 [T]: Sample.sample_id of each token, -1 in the padding tail
    cu_seqlens: torch.Tensor  # int32 [n + 1]
    max_seqlen: int
    old_log_probs: torch.Tensor | None = None  # float32 [T], and so are the next three
    reference_log_probs: torch.Tensor | None = None
    values: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    staleness: torch.Tensor | None = None  # int32 [T]
    routed_experts: torch.Tensor | None = None  # int16 [T, layers, top_k]
    context_layout: ContextLayout | None = None  # of the row that this is one rank's part of; None for a whole row

    @property
    def tokens(self) -> int:
        return len(self.input_ids)

    def packed_seq_params(self) -> "PackedSequence":
        return PackedSequence(
            qkv_format="thd",
            cu_seqlens_q=self.cu_seqlens,
            cu_seqlens_kv=self.cu_seqlens,
            max_seqlen_q=self.max_seqlen,
            max_seqlen_kv=self.max_seqlen,
            position_ids=self.position_ids,
            context_layout=self.context_layout,
        )

    def context_layout_over(self, size: int) -> ContextLayout:
        """Which of ``size`` context-parallel ranks holds which tokens of this row."""
        return balanced_layout(tuple(self.cu_seqlens.tolist()), size)

    def context_parallel_shard(self, rank: int, size: int) -> Self:
        """The tokens that one of ``size`` context-parallel ranks holds, as ``balanced_layout`` shares them out.

        ``cu_seqlens`` stays that of the whole row. Values of all ranks' tokens, concatenated, come back into the order
        of the row through ``context_layout.inverse``."""
        if size == 1:
            return self
        layout = self.context_layout_over(size)
        part = layout.rank_tokens(rank).to(self.input_ids.device)
        per_token = self._tensors()
        del per_token["cu_seqlens"]
        return replace(self, context_layout=layout, **{name: value[part] for name, value in per_token.items()})

    def to(self, device: torch.device | str) -> Self:
        return replace(self, **{k: value.to(device, non_blocking=True) for k, value in self._tensors().items()})

    def _tensors(self) -> dict[str, Any]:
        return {f.name: x for f in fields(self) if isinstance(x := getattr(self, f.name), torch.Tensor)}


@dataclass
class PackedSequence(PackedSeqParams):
    """Megatron's description of a packed row, with the position of every local token in its own sequence."""

    position_ids: torch.Tensor | None = None
    context_layout: ContextLayout | None = None


def build_batch(samples: Sequence[Sample], align: int = 1) -> PackedBatch:
    """Lay samples end to end and pad the row to a multiple of ``align`` tokens."""
    lengths = [len(s.token_ids) - 1 for s in samples]
    for sample, length in zip(samples, lengths, strict=True):
        if length < 1:
            raise ValueError(f"sample {sample.sample_id} has {length + 1} tokens; at least 2 are needed to predict one")
        for name in ("loss_mask", "advantages", "rollout_log_probs", *OPTIONAL):
            values = getattr(sample, name)
            if values is not None and len(values) != length + 1:
                raise ValueError(f"sample {sample.sample_id}: {name} has {len(values)} entries for {length + 1} tokens")
        if sample.routed_experts is not None and len(sample.routed_experts) != length:
            raise ValueError(
                f"sample {sample.sample_id}: routed_experts has {len(sample.routed_experts)} rows, expected {length}"
            )
    padding = -sum(lengths) % align
    segments = lengths + ([padding] if padding else [])

    def column(values: list[np.ndarray], dtype: torch.dtype, fill: float = 0) -> torch.Tensor:
        row = np.concatenate([*values, np.full(padding, fill)])
        return torch.from_numpy(row).to(dtype)

    def optional(name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        values = zip((getattr(s, name) for s in samples), lengths, strict=True)
        parts = [np.zeros(n) if v is None else np.asarray(v[1:], dtype=np.float64) for v, n in values]
        return column(parts, dtype)

    routed = None
    with_routes = [s.routed_experts for s in samples if s.routed_experts is not None]
    if with_routes:
        if len(with_routes) != len(samples):
            raise ValueError("some samples carry routed_experts and some do not; a batch needs all or none")
        tail = np.full((padding, *with_routes[0].shape[1:]), -1, dtype=np.int16)
        routed = torch.from_numpy(np.concatenate([*with_routes, tail]).astype(np.int16))
    ids = [np.asarray(s.token_ids, dtype=np.int64) for s in samples]
    present = [name for name in OPTIONAL if any(getattr(s, name) is not None for s in samples)]
    columns: dict[str, Any] = {name: optional(name, OPTIONAL[name]) for name in present}
    return PackedBatch(
        input_ids=column([x[:-1] for x in ids], torch.int64),
        labels=column([x[1:] for x in ids], torch.int64),
        position_ids=torch.from_numpy(np.concatenate([np.arange(n) for n in segments])),
        loss_mask=column([np.asarray(s.loss_mask[1:]) for s in samples], torch.float32),
        advantages=optional("advantages"),
        rollout_log_probs=optional("rollout_log_probs"),
        sample_ids=column([np.full(n, s.sample_id) for s, n in zip(samples, lengths, strict=True)], torch.int64, -1),
        cu_seqlens=torch.tensor([0, *np.cumsum(segments)], dtype=torch.int32),
        max_seqlen=max(segments),
        routed_experts=routed,
        **columns,
    )


def pack(
    samples: Sequence[Sample],
    max_tokens: int,
    data_parallel_size: int = 1,
    align: int = 1,
    work: Callable[[int], float] = float,
    multiple: int = 1,
) -> list[list[PackedBatch]]:
    """Distribute samples over data-parallel ranks and micro-batches of at most ``max_tokens`` tokens each.

    ``work`` says what a sequence of so many tokens costs. Most costly first into the micro-batch that has least to do
    among those with room. Returns one list of micro-batches per rank, all of the same length (a mixture of experts
    communicates in every micro-batch, so ranks must take the same number of steps), which is a multiple of
    ``multiple``; those that ranks take at the same time cost about the same. Where samples are too few for that, a
    micro-batch has one token, outside of every loss. Raises ValueError where there are none, and naming a sample that
    is longer than ``max_tokens``."""
    if not samples:
        raise ValueError("there are no samples to pack")
    numbered = [replace(sample, sample_id=i) for i, sample in enumerate(samples)]
    for sample in numbered:
        if len(sample.token_ids) - 1 > max_tokens:
            raise ValueError(
                f"sample {sample.sample_id} has {len(sample.token_ids)} tokens, more than max_tokens_per_micro_batch "
                f"({max_tokens}) allows; raise it to {len(sample.token_ids) - 1} or more and share the row over more "
                f"ranks (parallel.context: each holds 1 / context of it)"
            )
    longest_first = sorted(numbered, key=lambda s: -len(s.token_ids))
    total = sum(len(s.token_ids) - 1 for s in numbered)
    step = data_parallel_size * multiple
    count = max(1, -(-total // (max_tokens * step))) * step
    while (bins := _fill(longest_first, count, max_tokens, work)) is None:
        count += step
    batches = [build_batch(b or [_idle(numbered[0])], align) for b in bins]
    return [batches[rank::data_parallel_size] for rank in range(data_parallel_size)]


def _idle(sample: Sample) -> Sample:
    """One token to pass through the model for the sake of the other ranks, with the columns of ``sample``."""
    columns = {name: value[:2] for name in OPTIONAL if (value := getattr(sample, name)) is not None}
    routes = None if sample.routed_experts is None else np.full_like(sample.routed_experts[:1], -1)
    return Sample(sample.token_ids[:2], [0, 0], routed_experts=routes, **columns)


def _fill(
    longest_first: list[Sample], count: int, max_tokens: int, work: Callable[[int], float]
) -> list[list[Sample]] | None:
    """``count`` micro-batches, the most costly first; None if they are too few."""
    bins: list[list[Sample]] = [[] for _ in range(count)]
    tokens, cost = [0] * count, [0.0] * count
    for sample in longest_first:
        length = len(sample.token_ids) - 1
        roomy = [i for i in range(count) if tokens[i] + length <= max_tokens]
        if not roomy:
            return None
        chosen = min(roomy, key=cost.__getitem__)
        bins[chosen].append(sample)
        tokens[chosen] += length
        cost[chosen] += work(length)
    return [bins[i] for i in sorted(range(count), key=cost.__getitem__, reverse=True)]


def unpack(values: torch.Tensor, batch: PackedBatch) -> dict[int, list[float]]:
    """Per-token values [T] -> {sample_id: list of len(token_ids)}, 0.0 for the first token, which nothing predicts."""
    out = {}
    for start, end in pairwise(batch.cu_seqlens.tolist()):
        sample_id = int(batch.sample_ids[start])
        if sample_id >= 0:
            out[sample_id] = [0.0, *values[start:end].tolist()]
    return out
