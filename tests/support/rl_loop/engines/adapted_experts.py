"""Compares the plugin's GEMMs with unmerged adapters with their definition and with the trainer's product.

Runs in Triton's interpreter, and on a GPU in the trainer's environment. The plugin must be in the import path. In the
interpreter:

    TRITON_INTERPRET=1 PYTHONPATH=rl_loop/engines/sglang/plugin:. \\
        python -m tests.support.rl_loop.engines.adapted_experts
"""

# Triton reads parameter annotations as its own
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import gptoss_adapted_moe as adapted
import gptoss_small_batch_moe as matmul
import torch
import triton
import triton.language as tl
from gptoss_routing_kernels import max_blocks, route

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
"""Sizes in the interpreter: more than two parts of either kind for the first GEMM, and a rest of a step."""
ON_GPU_SIZES = {"hidden": 2880, "width": 960}
"""Hidden size of GPT-OSS, and a third of its intermediate size, because the CPU draws the matrices."""


@triton.jit
def interpreted_bf16(x):
    """Round to bf16, to the nearest even number, in fp32: the interpreter would truncate."""
    bits = x.to(tl.uint32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return bits.to(tl.float32, bitcast=True)


@dataclass(frozen=True)
class Place:
    """Device, and dtype of the kernels' tensors: fp32 in the interpreter, which has no bf16."""

    device: str
    dtype: torch.dtype

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device, self.dtype)


IN_INTERPRETER = Place("cpu", torch.float32)
ON_GPU = Place("cuda", torch.bfloat16)


class Factors:
    """Random adapters of all experts, and the memory of a server for them."""

    def __init__(self, outputs: int, inputs: int, generator: torch.Generator, place: Place) -> None:
        draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
        self.a = (draw(EXPERTS, LAYER_RANK, inputs) / inputs**0.5).bfloat16().to(place.device)
        self.b = (0.05 * draw(EXPERTS, outputs, LAYER_RANK)).bfloat16().to(place.device)
        pad = torch.nn.functional.pad
        missing = adapted.RANK - LAYER_RANK
        a, b = pad(self.a, (0, 0, 0, missing)), pad(self.b, (0, missing))
        self.memory = adapted.ServedAdapter(place.tensor(a), place.tensor(b), LAYER_SCALE)

    def multiply(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        """Return the update's product without any rounding."""
        low = x.double() @ self.a[expert].double().T
        return LAYER_SCALE * (low @ self.b[expert].double().T)


def compare(found: torch.Tensor, expected: torch.Tensor, limit: float, what: object) -> None:
    error = float((found.double() - expected).norm() / expected.norm())
    assert error < limit, (what, error)


def matrices(
    outputs: int, inputs: int, generator: torch.Generator, place: Place
) -> tuple[Matrices, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return random matrices, and the arguments of ``multiply`` that describe them."""
    drawn = Matrices(outputs, inputs, generator)
    # The trainer's biases are bf16.
    drawn.bias = drawn.bias.bfloat16().float()
    for name in ("values", "scales", "bias", "dense"):
        setattr(drawn, name, getattr(drawn, name).to(place.device))
    return drawn, (drawn.values, drawn.scales, drawn.bias)


def check(
    tokens: int, favored: list[float], place: Place, hidden: int = HIDDEN, width: int = WIDTH
) -> float:
    """Check both GEMMs, and return the share of the second one's outputs that differ from training.

    Args:
        tokens: number of tokens.
        favored: added to the logits of each expert, to give experts different numbers of tokens.
        place: device and dtype.
        hidden: hidden size.
        width: intermediate size.
    """
    generator = torch.Generator().manual_seed(tokens)
    logits = torch.randn(tokens, EXPERTS, generator=generator) + torch.tensor(favored)
    routes = route(logits.to(place.device), TOP_K)
    data = SimpleNamespace(
        expt_data=Ragged(routes),
        n_expts_tot=EXPERTS,
        n_expts_act=TOP_K,
        n_blocks=lambda entries, rows: max_blocks(entries, EXPERTS),
    )
    counts = routes.sizes.tolist()
    of_entry = torch.repeat_interleave(torch.arange(EXPERTS), routes.sizes.cpu().long()).tolist()
    entries = routes.by_expert.long()

    x = torch.randn(tokens, hidden, generator=generator).bfloat16().to(place.device)
    gate_up, weights = matrices(2 * width, hidden, generator, place)
    factors = Factors(2 * width, hidden, generator, place)
    rows = place.tensor(torch.full((tokens * TOP_K, width), torch.nan))
    first: dict[str, Any] = {"swiglu": matmul.Swiglu(alpha=1.702, limit=7.0)}
    matmul.multiply(
        place.tensor(x), *weights, data, routes.by_expert, rows, adapter=factors.memory, **first
    )
    for position, expert in enumerate(of_entry):
        token = x[entries[position] // TOP_K]
        product = gate_up.multiply(token, expert) + factors.multiply(token, expert)
        gate, up = product[0::2].clamp(max=7), product[1::2].clamp(-7, 7)
        expected = gate * torch.sigmoid(1.702 * gate) * (up + 1)
        compare(rows[position], expected, 5e-3, ("first", tokens, position))

    down, weights = matrices(hidden, width, generator, place)
    factors = Factors(hidden, width, generator, place)
    out = place.tensor(torch.full((tokens * TOP_K, hidden), torch.nan))
    gates = torch.ones(tokens * TOP_K, device=place.device)
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
    compare(trained, exact, 5e-3, ("trained", tokens))
    assert update.norm() > 0.01 * exact.norm(), "the adapters are too small to be seen"
    return float((out[entries] != trained.to(out.dtype)).float().mean())


CASES = [
    (3, [0.0, 0.0, 0.0, 0.0]),
    (20, [0.0, 0.0, -9.0, 1.0]),  # an expert without a token
    (70, [9.0, 0.0, -1.0, -2.0]),  # one with more than a block
]
"""Numbers of tokens, and what is added to the logits of each expert."""


def largest_share_on_gpu() -> float:
    """Return the largest result of ``check`` on a GPU, also for a prefill. Print all."""
    cases = [*CASES, (1500, [1.0, 0.0, -1.0, -2.0])]
    shares = [check(tokens, favored, ON_GPU, **ON_GPU_SIZES) for tokens, favored in cases]
    print("share of different outputs, by number of tokens:")
    for (tokens, _), share in zip(cases, shares, strict=True):
        print(f"  {tokens}: {share:.5f}")
    return max(shares)


def main() -> None:
    matmul.scaled_values = interpreted_values
    for module in (matmul, adapted):
        module.to_bf16 = interpreted_bf16
    shares = [check(tokens, favored, IN_INTERPRETER) for tokens, favored in CASES]
    print(f"largest share of different outputs: {max(shares):.5f}")


if __name__ == "__main__":
    main()
