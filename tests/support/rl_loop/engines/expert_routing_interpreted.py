"""Compares the plugin's routing and sums with plain torch, in Triton's interpreter:

TRITON_INTERPRET=1 PYTHONPATH=rl_loop/engines/sglang/plugin python -m \
    tests.support.rl_loop.engines.expert_routing_interpreted
"""

import gptoss_routing_kernels as routing
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.support.rl_loop.engines.routing_logits import KINDS, choose_experts, make_logits

SHAPES = [(1, 32, 4), (5, 4, 2), (256, 32, 4), (37, 128, 4), (2, 5, 3)]
"""Number of tokens, of experts, and of experts per token, with bf16 logits.

The interpreter's time grows with the number of experts.
"""
FP32_SHAPES = [(5, 4, 2), (100, 32, 4), (2, 5, 3)]
SHAPES_OF_EVERY_KIND = [(8, 16, 4), (17, 12, 1)]


def compare_routes(logits: Tensor, top_k: int) -> None:
    """Route ``logits`` [tokens, experts] with the kernel and with torch."""
    experts = logits.shape[1]
    routes = routing.route(logits, top_k)

    chosen = choose_experts(logits, top_k)
    assert torch.equal(routes.experts.long(), chosen)

    flat = chosen.flatten()
    by_expert = torch.argsort(flat, stable=True)
    assert torch.equal(routes.by_expert.long(), by_expert)
    assert torch.equal(routes.places.long(), torch.argsort(by_expert))
    sizes = torch.bincount(flat, minlength=experts)
    assert torch.equal(routes.sizes.long(), sizes)
    assert torch.equal(routes.starts.long(), with_total(sizes))

    gates = logits.float().gather(1, chosen).softmax(1).flatten()[by_expert]
    # The interpreter truncates to bf16: less than 1 unit in the last place. In fp32, the order of
    # the sum and the exponential function differ.
    allowed = 2**-7 if logits.dtype == torch.bfloat16 else 2**-20
    assert ((routes.gates.float() - gates).abs() <= allowed * gates).all()

    for number in range(routing.BLOCK_SIZES):
        size = 1 << (routing.MIN_BLOCK_LOG2 + number)
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
    """Return the cumulative counts before each expert, and the total."""
    return torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)])


def compare_order_of_a_gates_sum() -> None:
    """Check the summation order for 8 tokens: neighbors first, then halves.

    Sums are compared to the last bit. The number of rows is large enough to reveal another order.
    """
    rows, experts = 256, 32
    raised = torch.rand(rows, experts)
    sums = raised[:, ::2] + raised[:, 1::2]
    in_another_order = sums
    for half in (8, 4, 2, 1):
        sums = sums[:, :half] + sums[:, half:]
        in_another_order = in_another_order[:, ::2] + in_another_order[:, 1::2]
    assert not torch.equal(sums, in_another_order)

    added = torch.zeros(rows)
    in_turn = routing._sequential_sum_size(8, experts, raised.element_size())
    add_rows[(1,)](raised, added, ROWS=rows, COLUMNS=experts, ADDED_IN_TURN=in_turn)
    assert torch.equal(added, sums[:, 0])


@triton.jit
def add_rows(table, sums, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ADDED_IN_TURN: tl.constexpr):
    row = tl.arange(0, ROWS)
    entries = tl.load(table + row[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :])
    tl.store(sums + row, routing._add_groups(entries, ROWS, COLUMNS, ADDED_IN_TURN))


def compare_sums(tokens: int, top_k: int, width: int) -> None:
    outputs = torch.randn(tokens, top_k, width).bfloat16()
    sums = torch.full((tokens, width), 7.0).bfloat16()
    routing.sum_experts(outputs, sums)
    expected = torch.zeros(tokens, width)
    for number in range(top_k):
        expected += outputs[:, number].float()
    assert torch.equal(sums.view(torch.int16), cut_off(expected))


def cut_off(numbers: Tensor) -> Tensor:
    """Return the bits of fp32 numbers truncated to bf16, like the interpreter."""
    return (numbers.view(torch.int32) >> 16).to(torch.int16)


if __name__ == "__main__":
    torch.manual_seed(0)
    for tokens, experts, top_k in SHAPES:
        compare_routes(make_logits("few values", tokens, experts, torch.bfloat16), top_k)
    for tokens, experts, top_k in FP32_SHAPES:
        compare_routes(make_logits("few values", tokens, experts, torch.float32), top_k)
    for tokens, experts, top_k in SHAPES_OF_EVERY_KIND:
        for kind in KINDS[1:]:
            compare_routes(make_logits(kind, tokens, experts, torch.bfloat16), top_k)
    compare_routes(make_logits("one token's", 255, 32, torch.bfloat16), 4)
    compare_order_of_a_gates_sum()
    compare_sums(3, 4, 2880)
    compare_sums(2, 1, 96)
    print(f"{len(SHAPES + FP32_SHAPES)} shapes and {len(KINDS)} kinds of logits")
