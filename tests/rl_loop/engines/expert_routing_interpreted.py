"""Compares the plugin's routing and sums with plain torch, in Triton's interpreter:

TRITON_INTERPRET=1 PYTHONPATH=rl_loop/engines/sglang/plugin python THIS_FILE
"""

import gptoss_expert_routing as routing
import torch
from torch import Tensor

SHAPES = [(1, 32, 4), (5, 4, 2), (64, 32, 4), (100, 32, 4), (256, 32, 4), (37, 128, 4), (2, 5, 3)]
"""Tokens, experts, experts of a token."""


def compare_routes(tokens: int, experts: int, top_k: int, dtype: torch.dtype) -> None:
    # A part of wider rows. Half of the tokens have logits of few values, so that many are equal.
    whole = torch.randn(tokens, experts + 3)
    whole[::2] = torch.randint(-6, 7, whole[::2].shape) / 4
    logits = whole.to(dtype)[:, :experts]
    routes = routing.route(logits, top_k)

    order = torch.argsort(logits.float(), dim=1, descending=True, stable=True)
    chosen = order[:, :top_k].sort(1).values
    assert torch.equal(routes.experts.long(), chosen)

    flat = chosen.flatten()
    by_expert = torch.argsort(flat, stable=True)
    assert torch.equal(routes.by_expert.long(), by_expert)
    assert torch.equal(routes.places.long(), torch.argsort(by_expert))
    sizes = torch.bincount(flat, minlength=experts)
    assert torch.equal(routes.sizes.long(), sizes)
    assert torch.equal(routes.starts.long(), with_total(sizes))

    gates = logits.float().gather(1, chosen).softmax(1).flatten()[by_expert]
    # The interpreter rounds to bf16 by cutting off: less than a unit in the last place.
    assert ((routes.gates.float() - gates).abs() <= 2**-7 * gates).all()

    for number in range(routing.BLOCK_SIZES):
        size = 1 << (routing.SMALLEST_BLOCK_LOG2 + number)
        blocks = -(-sizes // size)
        assert torch.equal(routes.block_starts[number].long(), with_total(blocks))
        planned = [
            (block << 16) + expert
            for expert in range(experts)
            for block in range(int(blocks[expert]))
        ]
        schedule = routes.schedule[number].tolist()
        assert schedule == planned + [-1] * (len(schedule) - len(planned))


def with_total(counts: Tensor) -> Tensor:
    """Return what precedes each count, and all of them."""
    return torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)])


def compare_sums(tokens: int, top_k: int, width: int) -> None:
    outputs = torch.randn(tokens, top_k, width).bfloat16()
    sums = torch.full((tokens, width), 7.0).bfloat16()
    routing.sum_experts(outputs, sums)
    expected = torch.zeros(tokens, width)
    for number in range(top_k):
        expected += outputs[:, number].float()
    assert torch.equal(sums.view(torch.int16), cut_off(expected))


def cut_off(numbers: Tensor) -> Tensor:
    """Return the bits of fp32 numbers in bf16, as the interpreter rounds them."""
    return (numbers.view(torch.int32) >> 16).to(torch.int16)


if __name__ == "__main__":
    torch.manual_seed(0)
    for sizes in SHAPES:
        for dtype in (torch.bfloat16, torch.float32):
            compare_routes(*sizes, dtype)
    compare_sums(3, 4, 2880)
    compare_sums(2, 1, 96)
    print(f"{len(SHAPES)} shapes")
