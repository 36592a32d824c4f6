"""Multiplies tokens with MXFP4 experts by the plugin's kernel in Triton's interpreter.

The interpreter has no inline assembly, so Triton operations replace it.

    TRITON_INTERPRET=1 PYTHONPATH=rl_loop/engines/sglang/plugin \\
        python -m tests.support.rl_loop.engines.expert_matmul_interpreted
"""

# Triton reads parameter annotations as its own
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from dataclasses import dataclass
from types import SimpleNamespace

import gptoss_hopper_layout as layout
import gptoss_small_batch_moe as matmul
import torch
import triton
import triton.language as tl
from gptoss_expert_values import _in_order
from gptoss_routing_kernels import ExpertAssignment, route

CODES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
EXPERTS, TOP_K = 4, 2
BLOCK_SIZES = (16, 32, 64, 128)


@triton.jit
def interpreted_values(x, scale, mx_axis: tl.constexpr):
    """Compute ``gptoss_expert_values.scaled_values`` in fp32: bf16 is not supported here."""
    rows: tl.constexpr = x.shape[0]
    words: tl.constexpr = x.shape[1] // 4
    low, high = tl.split(x.to(tl.uint32).reshape(rows, words, 2, 2).trans(0, 1, 3, 2))
    first, second = tl.split(low)
    third, fourth = tl.split(high)
    word = first | (second << 8) | (third << 16) | (fourth << 24)

    one = _pair(word & 0x81C081C0)
    two = _pair((word << 4) & 0x81C081C0)
    three = _pair(((word << 10) | (word >> 22)) & 0x81C081C0)
    four = _pair(((word << 6) & 0x80C080C0) | ((word >> 2) & 0x01000100))
    # [rows, words, number of the pair, place in it], then in the order of ``scaled_values``.
    pairs = tl.join(tl.join(one, three), tl.join(two, four)).trans(0, 1, 3, 4, 2)
    numbers = _in_order(pairs.reshape(rows, words * 8))

    # 2^(e - 1), stored as its exponent.
    factor = (scale.to(tl.uint32) << 23).to(tl.float32, bitcast=True)
    factor = factor.expand_dims(2).broadcast_to(scale.shape[0], scale.shape[1], 32)
    return numbers * factor.reshape(numbers.shape)


@triton.jit
def _pair(word):
    """Return the bf16 numbers in the halves of a word, in fp32, along a new dimension."""
    lower = (word << 16).to(tl.float32, bitcast=True)
    upper = (word & 0xFFFF0000).to(tl.float32, bitcast=True)
    return tl.join(lower, upper)


@dataclass
class Ragged:
    """The part of triton_kernels' ``RaggedTensorMetadata`` that the kernel uses."""

    routes: ExpertAssignment

    def __post_init__(self) -> None:
        self.slice_sizes, self.slice_offs = self.routes.sizes, self.routes.starts

    def block_offs(self, size: int) -> torch.Tensor:
        return self.routes.block_starts[BLOCK_SIZES.index(size)]

    def block_schedule(self, size: int) -> torch.Tensor:
        return self.routes.schedule[BLOCK_SIZES.index(size)]


class Matrices:
    """Random matrices in storage layout, and their values."""

    def __init__(self, outputs: int, inputs: int, generator: torch.Generator) -> None:
        def draw(low: int, high: int, *shape: int) -> torch.Tensor:
            return torch.randint(low, high, shape, dtype=torch.uint8, generator=generator)

        packed = draw(0, 256, EXPERTS, outputs, inputs // 2)
        scales = draw(112, 122, EXPERTS, outputs, inputs // 32)
        self.bias = 5 * torch.randn(EXPERTS, outputs, generator=generator)  # some beyond the limit
        self.values = packed.new_empty(EXPERTS, *layout.value_storage_shape(outputs, inputs // 2))
        layout.swizzle_values(packed, self.values)
        self.scales = packed.new_empty(EXPERTS, *layout.scale_storage_shape(outputs, inputs // 32))
        layout.swizzle_scales(scales, (outputs, inputs // 32), self.scales)

        codes = torch.stack([packed & 15, packed >> 4], -1).flatten(2).long()
        factors = (2.0 ** (scales.double() - 127)).repeat_interleave(32, 2)
        self.dense = CODES.double()[codes] * factors

    def multiply(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        return x.double() @ self.dense[expert].T + self.bias[expert].double()


def check(tokens: int, favored: list[float]) -> None:
    """Compare both GEMMs of a layer with their definition.

    Args:
        tokens: number of tokens.
        favored: added to the logits of each expert, to give experts different numbers of tokens.
    """
    width, hidden = 160, 288
    generator = torch.Generator().manual_seed(tokens)
    logits = torch.randn(tokens, EXPERTS, generator=generator) + torch.tensor(favored)
    routes = route(logits, TOP_K)
    data = SimpleNamespace(
        expt_data=Ragged(routes),
        n_expts_tot=EXPERTS,
        n_expts_act=TOP_K,
        n_blocks=lambda entries, rows: len(routes.schedule[0]),
    )
    of_entry = torch.repeat_interleave(torch.arange(EXPERTS), routes.sizes.long())
    entries = routes.by_expert.long()
    seen.update((matmul.program_for(len(entries), EXPERTS).rows, int(n)) for n in routes.sizes)

    x = torch.randn(tokens, hidden, generator=generator).bfloat16()
    gate_up = Matrices(2 * width, hidden, generator)
    rows = torch.full((tokens * TOP_K, width), torch.nan, dtype=torch.bfloat16)
    swiglu = matmul.Swiglu(alpha=1.702, limit=7.0)
    weights = (gate_up.values, gate_up.scales, gate_up.bias)
    matmul.multiply(x.float(), *weights, data, routes.by_expert, rows, swiglu=swiglu)

    for position, expert in enumerate(of_entry.tolist()):
        product = gate_up.multiply(x[entries[position] // TOP_K], expert)
        gate, up = product[0::2].clamp(max=7), product[1::2].clamp(-7, 7)
        expected = gate * torch.sigmoid(1.702 * gate) * (up + 1)
        compare(rows[position], expected, ("first", tokens, position))

    down = Matrices(hidden, width, generator)
    out = torch.full((tokens * TOP_K, hidden), torch.nan, dtype=torch.bfloat16)
    weights = (down.values, down.scales, down.bias)
    matmul.multiply(rows.float(), *weights, data, routes.by_expert, out, gates=routes.gates)
    for position, expert in enumerate(of_entry.tolist()):
        expected = down.multiply(rows[position], expert) * routes.gates[position].double()
        compare(out[entries[position]], expected, ("second", tokens, position))


def compare(found: torch.Tensor, expected: torch.Tensor, what: object) -> None:
    error = float((found.double() - expected).norm() / expected.norm())
    assert error < 8e-3, (what, error)  # bf16, to which the interpreter does not round to nearest


seen: set[tuple[int, int]] = set()
"""Observed pairs of a program's block rows and an expert's number of tokens."""


def main() -> None:
    matmul.scaled_values = interpreted_values
    check(3, [0, 0, 0, 0])
    check(20, [0, 0, -9, 1])  # an expert without a token
    check(41, [0, 2, 0, 0])
    check(60, [9, 0, 0, 0])
    check(100, [9, 0, -1, -2])  # one with more than a block
    of_many = {size for rows, size in seen if rows == 64}
    for low, high in ((1, 16), (17, 32), (33, 48), (49, 64), (81, 100)):
        assert any(low <= size <= high for size in of_many), (low, high, seen)
    assert any(rows == 16 and size > 0 for rows, size in seen), seen
    print("both products are what they mean")


if __name__ == "__main__":
    main()
