"""Compares the MXFP4 rounding kernel in Triton's interpreter, on the CPU, with the codec.

TRITON_INTERPRET=1 python -m tests.support.kernels.fake_quantize_interpreted

Compares all bits, prints the cases that differ and exits with 1 if there are any. Needs a separate
process, because Triton decides at a kernel's definition whether to interpret it.
"""

import sys

import torch

from gptoss_kernels.mxfp4 import dequantize, gpu, quantize


def finite_numbers(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Return random bits: finite numbers of every exponent, subnormals, zeros of both signs."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(1 << 15), 1 << 15, (rows, columns), generator=generator)
    x = bits.to(torch.int16).view(torch.bfloat16)
    return torch.where(x.isfinite(), x, torch.zeros_like(x))


def blocks_of_every_scale() -> torch.Tensor:
    """Return for each exponent a block around every code and every tie, bf16 [exponents, 64]."""
    halves = torch.arange(0, 25).repeat_interleave(2) / 4.0
    signed = halves * torch.tensor([1.0, -1.0]).repeat(25)
    values = torch.cat([signed, torch.full((14,), 6.0)])
    exponents = torch.arange(-133, 126).double()
    return (values.double() * torch.exp2(exponents)[:, None]).bfloat16()


def cases() -> list[list[torch.Tensor]]:
    # Rows that are not a multiple of a program's rows; several matrices at separate addresses.
    random = [finite_numbers(41, 160, seed) for seed in range(3)]
    normal = [torch.randn(300, 64).bfloat16() for _ in range(2)]
    return [random, normal, [blocks_of_every_scale()], [torch.zeros(3, 32).bfloat16()]]


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    wrong = {}
    for i, matrices in enumerate(cases()):
        out = torch.full((len(matrices), *matrices[0].shape), torch.nan).bfloat16()
        gpu.launch_fake_quantize(matrices, out)
        expected = torch.stack([dequantize(*quantize(matrix)) for matrix in matrices])
        count = int((out.view(torch.int16) != expected.view(torch.int16)).sum())
        if count:
            wrong[i] = count
    print(f"values that differ, by case: {wrong}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
