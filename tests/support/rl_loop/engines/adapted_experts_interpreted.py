"""Multiplies tokens with MXFP4 experts and unmerged adapters in Triton's interpreter.

Compares both GEMMs of a layer with their definition in fp64, and the second one with the trainer's
product in bf16, of which it prints the largest share of different outputs.

    TRITON_INTERPRET=1 PYTHONPATH=rl_loop/engines/sglang/plugin:. \\
        python -m tests.support.rl_loop.engines.adapted_experts_interpreted
"""

# Triton reads parameter annotations as its own
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from types import SimpleNamespace
from typing import Any

import gptoss_adapted_moe as adapted
import gptoss_small_batch_moe as matmul
import torch
import triton
import triton.language as tl
from gptoss_expert_routing import route

from megatron_gptoss.layers.unmerged import unmerged_product
from tests.support.rl_loop.engines.expert_matmul_interpreted import (
    EXPERTS,
    TOP_K,
    Matrices,
    Ragged,
    interpreted_values,
)

LAYER_SCALE = 10 / 3
"""Not a power of two, so that each rounding matters."""
LAYER_RANK = 5
HIDDEN, WIDTH = 800, 160
"""More than two parts of either kind for the first GEMM, and a rest of a step."""


@triton.jit
def interpreted_bf16(x):
    """Round to bf16, to the nearest even number, in fp32: the interpreter would truncate."""
    bits = x.to(tl.uint32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return bits.to(tl.float32, bitcast=True)


class Factors:
    """Random adapters of all experts, and the memory of a server for them."""

    def __init__(self, outputs: int, inputs: int, generator: torch.Generator) -> None:
        draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
        self.a = (draw(EXPERTS, LAYER_RANK, inputs) / inputs**0.5).bfloat16()
        self.b = (0.05 * draw(EXPERTS, outputs, LAYER_RANK)).bfloat16()
        pad = torch.nn.functional.pad
        missing = adapted.RANK - LAYER_RANK
        self.memory = adapted.ExpertAdapter(
            pad(self.a, (0, 0, 0, missing)).float(), pad(self.b, (0, missing)).float(), LAYER_SCALE
        )

    def multiply(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        """Return the update's product without any rounding."""
        low = x.double() @ self.a[expert].double().T
        return LAYER_SCALE * (low @ self.b[expert].double().T)


def compare(found: torch.Tensor, expected: torch.Tensor, limit: float, what: object) -> None:
    error = float((found.double() - expected).norm() / expected.norm())
    assert error < limit, (what, error)


def check(tokens: int, favored: list[float]) -> float:
    """Check both GEMMs, and return the share of the second one's outputs that differ from training.

    Args:
        tokens: number of tokens.
        favored: added to the logits of each expert, to give experts different numbers of tokens.
    """
    generator = torch.Generator().manual_seed(tokens)
    logits = torch.randn(tokens, EXPERTS, generator=generator) + torch.tensor(favored)
    routes = route(logits, TOP_K)
    data = SimpleNamespace(
        expt_data=Ragged(routes),
        n_expts_tot=EXPERTS,
        n_expts_act=TOP_K,
        n_blocks=lambda entries, rows: len(routes.schedule[0]),
    )
    counts = routes.sizes.tolist()
    of_entry = torch.repeat_interleave(torch.arange(EXPERTS), routes.sizes.long()).tolist()
    entries = routes.by_expert.long()

    x = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
    gate_up = Matrices(2 * WIDTH, HIDDEN, generator)
    factors = Factors(2 * WIDTH, HIDDEN, generator)
    rows = torch.full((tokens * TOP_K, WIDTH), torch.nan)
    weights = (gate_up.values, gate_up.scales, gate_up.bias)
    first: dict[str, Any] = {"swiglu": matmul.Swiglu(alpha=1.702, limit=7.0)}
    matmul.multiply(
        x.float(), *weights, data, routes.by_expert, rows, adapter=factors.memory, **first
    )
    for position, expert in enumerate(of_entry):
        token = x[entries[position] // TOP_K]
        product = gate_up.multiply(token, expert) + factors.multiply(token, expert)
        gate, up = product[0::2].clamp(max=7), product[1::2].clamp(-7, 7)
        expected = gate * torch.sigmoid(1.702 * gate) * (up + 1)
        compare(rows[position], expected, 5e-3, ("first", tokens, position))

    down = Matrices(HIDDEN, WIDTH, generator)
    factors = Factors(HIDDEN, WIDTH, generator)
    out = torch.full((tokens * TOP_K, HIDDEN), torch.nan)
    weights = (down.values, down.scales, down.bias.bfloat16().float())
    gates = torch.ones(tokens * TOP_K)
    matmul.multiply(
        rows, *weights, data, routes.by_expert, out, gates=gates, adapter=factors.memory
    )
    trained = unmerged_product(
        rows.bfloat16(),
        factors.a,
        factors.b,
        lambda: down.dense.bfloat16(),
        counts,
        LAYER_SCALE,
        down.bias.bfloat16(),
    )
    update = torch.stack([factors.multiply(rows[i], e) for i, e in enumerate(of_entry)])
    exact = torch.stack([down.multiply(rows[i], e) for i, e in enumerate(of_entry)]) + update
    compare(out[entries], exact, 5e-3, ("second", tokens))
    assert update.norm() > 0.01 * exact.norm(), "the adapters are too small to be seen"
    return float((out[entries] != trained.float()).float().mean())


def main() -> None:
    matmul.scaled_values = interpreted_values
    for module in (matmul, adapted):
        module.to_bf16 = interpreted_bf16
    shares = [
        check(3, [0, 0, 0, 0]),
        check(20, [0, 0, -9, 1]),  # an expert without a token
        check(70, [9, 0, -1, -2]),  # one with more than a block
    ]
    print(f"largest share of different outputs: {max(shares):.5f}")


if __name__ == "__main__":
    main()
