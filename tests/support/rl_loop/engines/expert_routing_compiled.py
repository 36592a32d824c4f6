"""Compiles the plugin's routing kernels for a Hopper GPU, for every table that a program can have:

PYTHONPATH=rl_loop/engines/sglang/plugin python -m tests.support.rl_loop.engines.expert_routing_compiled [all]
"""

import sys

import gptoss_routing_kernels as routing
import torch

from tests.support.rl_loop.engines.compiled_for_hopper import Compiling

TABLES = [(17, 32), (32, 32), (64, 128)]
ALL_TABLES = [
    (1, 32),
    (8, 32),
    (16, 32),
    (17, 32),
    (64, 32),
    (100, 32),
    (256, 32),
    (8, 128),
    (16, 128),
    (64, 128),
]
"""Number of tokens and of experts, with bf16 logits."""
FP32_TABLES = [(256, 32)]
ALL_FP32_TABLES = [(8, 32), (256, 32), (64, 128)]


if __name__ == "__main__":
    route, add = Compiling(routing._route_kernel), Compiling(routing._sum_kernel)
    routing._route_kernel, routing._sum_kernel = route, add
    tables, fp32_tables = TABLES, FP32_TABLES
    if "all" in sys.argv:
        tables, fp32_tables = ALL_TABLES, ALL_FP32_TABLES
    for tokens, experts in tables:
        routing.route(torch.zeros(tokens, experts, dtype=torch.bfloat16), 4)
    for tokens, experts in fp32_tables:
        routing.route(torch.zeros(tokens, experts), 4)
    routing.sum_experts(
        torch.zeros(2, 4, 2880, dtype=torch.bfloat16), torch.zeros(2, 2880, dtype=torch.bfloat16)
    )
    for kernel in (route, add):
        for used in kernel.resources:
            assert used.spilled == 0, used
    variants = {used.variant for used in route.resources}
    print(f"{len(route.resources)} tables in {len(variants)} variants")
