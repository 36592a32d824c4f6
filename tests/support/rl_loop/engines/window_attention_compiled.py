"""Compiles the plugin's window attention for a Hopper GPU:

PYTHONPATH=rl_loop/engines/sglang/plugin python -m tests.support.rl_loop.engines.window_attention_compiled
"""

from __future__ import annotations

import gptoss_window_attention as attention
import torch

from tests.support.rl_loop.engines.compiled_for_hopper import Compiling

SHARED_MEMORY = 227 * 1024
"""Shared memory of a Hopper multiprocessor that is available to programs, in bytes."""
REGISTERS = 65_536
PROGRAMS = 6
"""Programs that must fit on a multiprocessor.

Each has a window of 32 KB. Together, their keys and values exceed the data that the memory delivers
during its latency.
"""


def attend(
    requests: int, tokens: int, key_heads: int, group: int, head_size: int = 64, window: int = 128
) -> None:
    """Call the kernel on the CPU. It reads only the shapes of its tensors."""
    bf16 = {"dtype": torch.bfloat16}
    queries = torch.empty(requests, key_heads * group, head_size, **bf16)
    pool = torch.empty(64, key_heads, head_size, **bf16)
    table = torch.zeros(requests, tokens, dtype=torch.int32)
    attention.attend_to_window(
        queries,
        pool,
        pool,
        table,
        table[:, 0].contiguous(),
        queries,
        window=window,
        scale=head_size**-0.5,
        sinks=torch.empty(key_heads * group, **bf16),
    )


def main() -> None:
    kernel = Compiling(attention._attend_to_window_kernel)
    attention._attend_to_window_kernel = kernel

    # GPT-OSS: the same kernel for all numbers of requests, and for ranks with a part of the heads.
    for requests, tokens, key_heads in (
        (256, 131_072, 8),
        (1, 641, 8),
        (3, 1, 8),
        (64, 131_072, 4),
    ):
        attend(requests, tokens, key_heads, group=8)
    assert kernel.resources[0].variant == kernel.resources[1].variant == kernel.resources[2].variant
    for used in kernel.resources:
        threads = PROGRAMS * 32 * attention.WARPS
        assert used.spilled == 0 and used.registers * threads <= REGISTERS, used
        assert PROGRAMS * (used.shared + 1024) <= SHARED_MEMORY, used

    # The largest and the smallest supported size.
    attend(2, 300, 2, group=16, head_size=128, window=attention.MAX_WINDOW)
    attend(2, 300, 1, group=1, head_size=16, window=1)
    for used in kernel.resources[4:]:
        assert used.spilled == 0 and used.shared <= SHARED_MEMORY, used
    print("compiled")


if __name__ == "__main__":
    main()
