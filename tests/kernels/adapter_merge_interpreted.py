"""Runs the kernel that merges adapters in Triton's interpreter, on the CPU, and compares all bits.

TRITON_INTERPRET=1 python tests/kernels/adapter_merge_interpreted.py

Prints the cases that differ from the sum in torch and exits with 1 if there was one. A process of its own, because
Triton decides when a kernel is defined whether it is interpreted."""

import sys

import torch

from gptoss_kernels import adapter_merge, mxfp4
from megatron_gptoss.layers.merge import merge
from tests.kernels.adapter_merge_cases import Case, packed_case

CASES = [
    # rows and pairs of columns that are no multiples of what a program takes
    packed_case(experts=2, rows=41, columns=160, rank=3),
    packed_case(experts=1, rows=5, columns=32, rank=0),
    packed_case(experts=1, rows=33, columns=64, rank=8),
]


def differing_bits(case: Case, is_packed: bool) -> int:
    """How many values the kernel gets wrong."""
    weight = mxfp4.dequantize(case.blocks, case.scales)
    expected = merge(weight, case.a, case.b, case.scale)
    out = torch.full_like(expected, torch.nan)
    if is_packed:
        adapter_merge.launch(case.blocks, case.scales, case.a, case.b, case.scale, out)
    else:
        words = weight.view(torch.int32)
        adapter_merge.launch(words, None, case.a, case.b, case.scale, out)
    return int((out.view(torch.int16) != expected.view(torch.int16)).sum())


def main() -> None:
    torch.set_num_threads(1)
    wrong = {}
    for i, case in enumerate(CASES):
        for is_packed in (True, False):
            count = differing_bits(case, is_packed)
            if count:
                wrong[i, is_packed] = count
    print(f"values that differ, by case and whether it is packed: {wrong}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
