"""Adapters of MXFP4 experts that are not merged: their memory, and the first of their two products.

A server computes x W^T + (s x A^T) B^T. This module computes parts of x A^T in a kernel of its own.
``gptoss_small_batch_moe`` sums the parts, multiplies them with B, and starts its fp32 accumulators
with the result. It rounds s x A^T to bf16 where the trainer does
(``megatron_gptoss/layers/unmerged.py``), and both round the sum of the products and the bias once.

x A^T has only 16 columns. A program per block of tokens would leave most of a GPU idle and would
wait for every step of 2,880 inputs. Therefore several programs share the inputs of a block.
"""

# Triton interprets parameter annotations, so its kernels have none.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

import json
import os
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

RANK = 16
"""Columns of A and B in memory. Products of tensor cores have at least 16 inputs."""
FACTORS = tl.constexpr(RANK)
INPUTS = 128
"""Inputs per step of a program's loop."""
FEW_ROWS_PART = 3 * INPUTS
"""Inputs of a program with few rows."""
MANY_ROWS_PART = 6 * INPUTS
"""Inputs of a program with many rows, of which there are more programs."""
ADAPTER = "gptoss_adapter"
"""Attribute of a matrix's PrecisionConfig with its ``ServedAdapter``."""
SETTINGS = "GPTOSS_EXPERT_ADAPTER"
"""Environment variable with the fields of ``AdapterSettings`` as a JSON object."""


@dataclass(frozen=True)
class ServedAdapter:
    """Adapters of one of a layer's two expert matrices, for all experts.

    Addresses never change, because CUDA graphs contain them.
    """

    a: Tensor
    """bf16 [experts, RANK, inputs], with zeros after the adapter's rank."""
    b: Tensor
    """bf16 [experts, outputs, RANK], with zeros after the adapter's rank."""
    scale: float
    """Scale s of the update."""


@dataclass(frozen=True)
class AdapterSettings:
    """Settings of all expert adapters of a server."""

    rank: int
    """Rank of the adapters, at most RANK."""
    scale: float
    """Scale s of their updates."""

    @classmethod
    def of_environment(cls) -> "AdapterSettings | None":
        """Return the settings of this process; None for a server without unmerged adapters.

        Raises:
            ValueError: if the rank is not supported.
        """
        text = os.environ.get(SETTINGS)
        if text is None:
            return None
        settings = cls(**json.loads(text))
        if not 0 < settings.rank <= RANK:
            raise ValueError(
                f"{SETTINGS}: ranks from 1 to {RANK} are supported, not {settings.rank}"
            )
        return settings


def allocate_adapter(
    settings: AdapterSettings, shape: tuple[int, int, int], device: torch.device
) -> ServedAdapter:
    """Allocate adapters of zeros for one of a layer's two matrices.

    Args:
        settings: settings of the server.
        shape: experts, rows and inputs of the matrices, with SGLang's padding.
        device: device of the factors.
    """
    experts, rows, inputs = shape
    place: Any = {"dtype": torch.bfloat16, "device": device}
    return ServedAdapter(
        a=torch.zeros(experts, RANK, inputs, **place),
        b=torch.zeros(experts, rows, RANK, **place),
        scale=settings.scale,
    )


@dataclass(frozen=True)
class Projection:
    """Parts of x A^T, and the factors of the second product."""

    parts: Tensor
    """fp32 [parts, entries, RANK]. Their sum is x A^T."""
    adapter: ServedAdapter


def project(
    x: Tensor,
    adapter: ServedAdapter,
    routes: Any,
    entries: Tensor,
    placement: tuple[Tensor, Tensor, Tensor, Tensor],
    *,
    rows: int,
    gathers: bool,
) -> Projection:
    """Multiply tokens with A of their experts.

    Args:
        x: bf16, contiguous: [tokens, inputs], or [entries, inputs] sorted by expert.
        adapter: adapters of the matrix.
        routes: ``RoutingData`` of triton_kernels.
        entries: int32 [entries], sorted by expert: ``token * top_k + slot`` of each entry.
        placement: sizes and starts of experts, and starts and schedule of blocks of ``rows``.
        rows: token rows per block.
        gathers: True if ``x`` has tokens, False if it has entries.
    """
    size = x.shape[1]
    part = FEW_ROWS_PART if rows == 16 else MANY_ROWS_PART
    parts = triton.cdiv(size, part)
    low = torch.empty(parts, len(entries), RANK, dtype=torch.float32, device=x.device)
    _project_kernel[(routes.n_blocks(len(entries), rows), parts)](
        x,
        adapter.a,
        low,
        entries,
        *placement,
        routes.n_expts_tot,
        len(entries),
        SIZE=size,
        TOP_K=routes.n_expts_act,
        GATHERS=gathers,
        ROWS=rows,
        PART=part,
        INPUTS=INPUTS,
        num_warps=4,
        num_stages=3,
    )
    return Projection(low, adapter)


# Addresses may have any alignment, as in ``gptoss_small_batch_moe``.
@triton.jit(
    do_not_specialize=["total"],
    do_not_specialize_on_alignment=["entries", "sizes", "starts", "blocks", "schedule"],
)
def _project_kernel(
    x,
    a,
    low,
    entries,
    sizes,
    starts,
    blocks,
    schedule,
    experts,
    total,
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    GATHERS: tl.constexpr,
    ROWS: tl.constexpr,
    PART: tl.constexpr,
    INPUTS: tl.constexpr,
):
    # Grid: the maximum number of token blocks, times the parts of the inputs. The number of blocks
    # depends on the routes, which stay on the GPU.
    program = tl.program_id(0)
    if program >= tl.load(blocks + experts):
        return
    part = tl.program_id(1)
    planned = tl.load(schedule + program)
    expert = (planned & 0xFFFF).to(tl.int64)
    row = (planned >> 16) * ROWS + tl.arange(0, ROWS)
    size = tl.load(sizes + expert)
    start = tl.load(starts + expert)

    # Rows after the last one repeat earlier ones and are not stored.
    x_row = start + row % size
    if GATHERS:
        x_row = tl.load(entries + x_row) // TOP_K
    place = part * PART + tl.arange(0, INPUTS)
    x_at = x_row.to(tl.int64)[:, None] * SIZE + place[None, :]
    rank = tl.arange(0, FACTORS)
    a_at = rank[:, None] * SIZE + place[None, :]
    a += expert * FACTORS * SIZE

    sums = tl.zeros((ROWS, FACTORS), dtype=tl.float32)
    for done in range(0, PART, INPUTS):
        is_input = (place + done < SIZE)[None, :]
        tokens = tl.load(x + x_at + done, mask=is_input, other=0.0)
        factors = tl.load(a + a_at + done, mask=is_input, other=0.0)
        sums = tl.dot(tokens, factors.trans(), sums)

    at = (part.to(tl.int64) * total + start + row)[:, None] * FACTORS + rank[None, :]
    tl.store(low + at, sums, mask=(row < size)[:, None])


@triton.jit
def start_sums(
    parts, b, scale, entry, total, first_column, outputs,
    PARTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return the update of a block of outputs: fp32 [COLUMNS, entries].

    Args:
        parts: address of fp32 [PARTS, total, RANK].
        b: address of the expert's factors, bf16 [outputs, RANK].
        scale: scale of the update.
        entry: entries of the block, [entries].
        total: number of all entries.
        first_column: first output of the block.
        outputs: number of all outputs.
        PARTS: number of parts.
        COLUMNS: outputs of the block.
    """
    rank = tl.arange(0, FACTORS)
    at = entry.to(tl.int64)[:, None] * FACTORS + rank[None, :]
    low = tl.load(parts + at)
    # In a fixed order. Programs that add their parts with atomics would give other bits in every
    # run.
    for _ in tl.static_range(1, PARTS):
        parts += total.to(tl.int64) * FACTORS
        low += tl.load(parts + at)

    # The trainer rounds before and after the multiplication by the scale.
    low = to_bf16(to_bf16(low).to(tl.float32) * scale)
    column = first_column + tl.arange(0, COLUMNS)
    b_at = column[:, None] * FACTORS + rank[None, :]
    factors = tl.load(b + b_at, mask=(column < outputs)[:, None], other=0.0)
    return tl.dot(factors, low.trans())


@triton.jit
def to_bf16(x):
    """Round fp32 numbers to the nearest bf16 numbers."""
    return x.to(tl.bfloat16)
