"""Packed batches: the one layout of training, scoring and supervised fine-tuning.

Sequences of different lengths lie end to end in one row of tokens ("THD"); ``cu_seqlens`` says
where each begins. The only padding, which makes the row divisible among ranks, is a sequence of
its own and never enters loss or metrics.
"""

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
    """One sequence to train on or to score. Per-token lists have the length of ``token_ids``.

    Entry i of the per-token lists is about token i as a *label*: entry 0 is unused, as nothing
    predicts it.
    """

    token_ids: Sequence[int]
    loss_mask: Sequence[int]
    """1 where the label was sampled by the policy (RL) or is to be learned (SFT)."""
    advantages: Sequence[float] | None = None
    rollout_log_probs: Sequence[float] | None = None
    """Of the engine that sampled the tokens."""
    old_log_probs: Sequence[float] | None = None
    """Of the trainer's policy when the batch was sampled; None when the batch is used for one
    update only."""
    reference_log_probs: Sequence[float] | None = None
    """Of the frozen policy that a KL penalty refers to."""
    values: Sequence[float] | None = None
    """The critic's, before the update."""
    returns: Sequence[float] | None = None
    """What the critic learns to predict."""
    staleness: Sequence[int] | None = None
    """How many weight versions before the current one a token was sampled with, or GRAFTED; None:
    all current."""
    routed_experts: np.ndarray | None = None
    """int16 [len - 1, layers, top_k]; -1 where the trainer is to choose for itself."""
    sample_id: int = -1
    """Where the sample stood in the caller's list; set by ``pack``."""

    @property
    def num_labels(self) -> int:
        """How many tokens of a row the sample fills: all but one, which nothing predicts."""
        return len(self.token_ids) - 1


OPTIONAL_COLUMNS = {
    "old_log_probs": torch.float32,
    "reference_log_probs": torch.float32,
    "values": torch.float32,
    "returns": torch.float32,
    "staleness": torch.int32,
}
"""Columns that a batch has if any of its samples has them; the others then count as 0."""


@dataclass
class PackedBatch:
    """One micro-batch of T input tokens.

    Its n sequences include the padding tail if there is one. A sequence of m tokens contributes
    m - 1 inputs (all but its last) and m - 1 labels (all but its first).
    """

    input_ids: torch.Tensor
    """int64 [T]."""
    labels: torch.Tensor
    """int64 [T]: the next token of the same sequence."""
    position_ids: torch.Tensor
    """int64 [T]: from 0 in each sequence."""
    loss_mask: torch.Tensor
    """float32 [T]: 1 where the label was sampled by the policy (RL) or is to be learned (SFT)."""
    advantages: torch.Tensor
    """float32 [T], 0 where unset."""
    rollout_log_probs: torch.Tensor
    """float32 [T], 0 where unset."""
    sample_ids: torch.Tensor
    """int64 [T]: Sample.sample_id of each token, -1 in the padding tail."""
    cu_seqlens: torch.Tensor
    """int32 [n + 1]: where each sequence begins, and T."""
    max_seqlen: int
    """Tokens of the longest sequence."""
    old_log_probs: torch.Tensor | None = None
    """float32 [T], and so are the next three."""
    reference_log_probs: torch.Tensor | None = None
    values: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    staleness: torch.Tensor | None = None
    """int32 [T]."""
    routed_experts: torch.Tensor | None = None
    """int16 [T, layers, top_k]."""
    context_layout: ContextLayout | None = None
    """Of the row of which this is one rank's shard; None for a whole row."""

    @property
    def tokens(self) -> int:
        """T."""
        return len(self.input_ids)

    def packed_seq_params(self) -> "PackedSequence":
        """Describe the row to Megatron's layers."""
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
        """Return which of ``size`` context-parallel ranks holds which tokens of this row."""
        return balanced_layout(tuple(self.cu_seqlens.tolist()), size)

    def context_parallel_shard(self, rank: int, size: int) -> Self:
        """Take the tokens that one of ``size`` context-parallel ranks holds.

        ``cu_seqlens`` stays that of the whole row. Values of all ranks' tokens, concatenated, come
        back into the order of the row through ``context_layout.inverse``.
        """
        if size == 1:
            return self

        # cu_seqlens is the one tensor that is not per token.
        layout = self.context_layout_over(size)
        tokens = layout.rank_tokens(rank).to(self.input_ids.device)
        per_token = self._tensors()
        del per_token["cu_seqlens"]
        shard = {name: column[tokens] for name, column in per_token.items()}
        return replace(self, context_layout=layout, **shard)

    def to(self, device: torch.device | str) -> Self:
        """Copy all columns to a device."""
        columns = self._tensors()
        moved = {name: column.to(device, non_blocking=True) for name, column in columns.items()}
        return replace(self, **moved)

    def _tensors(self) -> dict[str, Any]:
        columns = {}
        for field in fields(self):
            column = getattr(self, field.name)
            if isinstance(column, torch.Tensor):
                columns[field.name] = column
        return columns


@dataclass
class PackedSequence(PackedSeqParams):
    """Megatron's description of a packed row, and what our attention needs besides."""

    position_ids: torch.Tensor | None = None
    """Of every local token in its own sequence."""
    context_layout: ContextLayout | None = None
    """None without context parallelism."""


def build_batch(samples: Sequence[Sample], align: int = 1) -> PackedBatch:
    """Lay samples end to end and pad the row to a multiple of ``align`` tokens.

    Raises:
        ValueError: naming the sample that is too short or has a column of another length.
    """
    for sample in samples:
        _check_sample(sample)

    # The padding is a sequence of its own, so that it attends to nothing and nothing to it.
    lengths = [sample.num_labels for sample in samples]
    padding = -sum(lengths) % align
    sequences = lengths + ([padding] if padding else [])

    def column(values: list[np.ndarray], dtype: torch.dtype, fill: float = 0) -> torch.Tensor:
        row = np.concatenate([*values, np.full(padding, fill)])
        return torch.from_numpy(row).to(dtype)

    def float_column(name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Join what the samples have of one field, with 0 where they have nothing."""
        values = []
        for sample, length in zip(samples, lengths, strict=True):
            per_token = getattr(sample, name)
            if per_token is None:
                values.append(np.zeros(length))
            else:
                values.append(np.asarray(per_token[1:], dtype=np.float64))
        return column(values, dtype)

    optional: dict[str, Any] = {}
    for name, dtype in OPTIONAL_COLUMNS.items():
        if any(getattr(sample, name) is not None for sample in samples):
            optional[name] = float_column(name, dtype)

    ids = [np.asarray(sample.token_ids, dtype=np.int64) for sample in samples]
    masks = [np.asarray(sample.loss_mask[1:]) for sample in samples]
    sample_ids = [np.full(sample.num_labels, sample.sample_id) for sample in samples]
    positions = [np.arange(length) for length in sequences]
    return PackedBatch(
        input_ids=column([sequence[:-1] for sequence in ids], torch.int64),
        labels=column([sequence[1:] for sequence in ids], torch.int64),
        position_ids=torch.from_numpy(np.concatenate(positions)),
        loss_mask=column(masks, torch.float32),
        advantages=float_column("advantages"),
        rollout_log_probs=float_column("rollout_log_probs"),
        sample_ids=column(sample_ids, torch.int64, fill=-1),
        cu_seqlens=torch.tensor([0, *np.cumsum(sequences)], dtype=torch.int32),
        max_seqlen=max(sequences),
        routed_experts=_routes_column(samples, padding),
        **optional,
    )


def _check_sample(sample: Sample) -> None:
    name = f"sample {sample.sample_id}"
    tokens = len(sample.token_ids)
    if tokens < 2:
        raise ValueError(f"{name} has {tokens} tokens; at least 2 are needed to predict one")

    for column in ("loss_mask", "advantages", "rollout_log_probs", *OPTIONAL_COLUMNS):
        values = getattr(sample, column)
        if values is not None and len(values) != tokens:
            raise ValueError(f"{name}: {column} has {len(values)} entries for {tokens} tokens")

    routes = sample.routed_experts
    if routes is not None and len(routes) != tokens - 1:
        raise ValueError(f"{name}: routed_experts has {len(routes)} rows, expected {tokens - 1}")


def _routes_column(samples: Sequence[Sample], padding: int) -> torch.Tensor | None:
    """Join the samples' routes; the trainer chooses for the padding."""
    routes = [sample.routed_experts for sample in samples if sample.routed_experts is not None]
    if not routes:
        return None
    if len(routes) != len(samples):
        raise ValueError(
            "some samples carry routed_experts and some do not; a batch needs all or none"
        )

    tail = np.full((padding, *routes[0].shape[1:]), -1, dtype=np.int16)
    return torch.from_numpy(np.concatenate([*routes, tail]).astype(np.int16))


def pack(
    samples: Sequence[Sample],
    max_tokens: int,
    data_parallel_size: int = 1,
    align: int = 1,
    work: Callable[[int], float] = float,
    multiple: int = 1,
) -> list[list[PackedBatch]]:
    """Distribute samples over data-parallel ranks and micro-batches.

    The most costly sample comes first, into the micro-batch that has least to do among those with
    room. Where samples are too few, a micro-batch has one token, outside of every loss.

    Args:
        samples: what to train on or to score.
        max_tokens: of one micro-batch.
        data_parallel_size: number of ranks.
        align: rows are padded to a multiple of so many tokens.
        work: what a sequence of so many tokens costs.
        multiple: of how many micro-batches each rank takes a multiple.

    Returns:
        One list of micro-batches per rank, all of the same length: a mixture of experts
        communicates in every micro-batch, so ranks must take the same number of steps. Those that
        ranks take at the same time cost about the same.

    Raises:
        ValueError: when there are no samples, or naming one that is longer than ``max_tokens``.
    """
    if not samples:
        raise ValueError("there are no samples to pack")
    numbered = [replace(sample, sample_id=i) for i, sample in enumerate(samples)]
    for sample in numbered:
        if sample.num_labels > max_tokens:
            raise ValueError(
                f"sample {sample.sample_id} has {len(sample.token_ids)} tokens, more than "
                f"max_tokens_per_micro_batch ({max_tokens}) allows; "
                f"raise it to {sample.num_labels} or more and share the row over more "
                f"ranks (parallel.context: each holds 1 / context of it)"
            )

    # The smallest number of micro-batches that could hold all tokens may not do: sequences are
    # not cut.
    longest_first = sorted(numbered, key=lambda sample: -sample.num_labels)
    total = sum(sample.num_labels for sample in numbered)
    step = data_parallel_size * multiple
    count = max(1, -(-total // (max_tokens * step))) * step
    micro_batches = _fill(longest_first, count, max_tokens, work)
    while micro_batches is None:
        count += step
        micro_batches = _fill(longest_first, count, max_tokens, work)

    idle = _idle_sample(numbered[0])
    batches = [build_batch(micro_batch or [idle], align) for micro_batch in micro_batches]
    return [batches[rank::data_parallel_size] for rank in range(data_parallel_size)]


def _idle_sample(sample: Sample) -> Sample:
    """Return one token that passes through the model for the sake of the other ranks.

    It has the columns that ``sample`` has: ranks must agree on them.
    """
    columns = {}
    for name in OPTIONAL_COLUMNS:
        values = getattr(sample, name)
        if values is not None:
            columns[name] = values[:2]

    routes = None
    if sample.routed_experts is not None:
        routes = np.full_like(sample.routed_experts[:1], -1)
    return Sample(sample.token_ids[:2], loss_mask=[0, 0], routed_experts=routes, **columns)


def _fill(
    longest_first: list[Sample],
    count: int,
    max_tokens: int,
    work: Callable[[int], float],
) -> list[list[Sample]] | None:
    """Distribute samples over ``count`` micro-batches; None if they are too few.

    The most costly micro-batch comes first.
    """
    micro_batches: list[list[Sample]] = [[] for _ in range(count)]
    tokens = [0] * count
    cost = [0.0] * count
    for sample in longest_first:
        # By cost and not by length: attention makes one long sequence dearer than several short
        # ones.
        length = sample.num_labels
        roomy = [i for i in range(count) if tokens[i] + length <= max_tokens]
        if not roomy:
            return None
        chosen = min(roomy, key=cost.__getitem__)
        micro_batches[chosen].append(sample)
        tokens[chosen] += length
        cost[chosen] += work(length)

    by_cost = sorted(range(count), key=cost.__getitem__, reverse=True)
    return [micro_batches[i] for i in by_cost]


def unpack(values: torch.Tensor, batch: PackedBatch) -> dict[int, list[float]]:
    """Split per-token values [T] by sample.

    Returns:
        {sample_id: list as long as token_ids}, with 0.0 for the first token, which nothing
        predicts.
    """
    per_sample = {}
    for start, end in pairwise(batch.cu_seqlens.tolist()):
        sample_id = int(batch.sample_ids[start])
        if sample_id >= 0:
            per_sample[sample_id] = [0.0, *values[start:end].tolist()]
    return per_sample
