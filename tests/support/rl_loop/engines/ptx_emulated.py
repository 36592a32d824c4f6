"""Emulates the inline assembly of the plugin's kernels on tensors of registers, without a GPU."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor

MASK = 0xFFFFFFFF


def run_assembly(assembly: str, outputs: int, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Run instructions on 32-bit registers.

    Args:
        assembly: text for ``tl.inline_asm_elementwise``. Operands from ``$0`` on are the outputs,
            then the inputs.
        outputs: number of outputs.
        inputs: int64 tensors of equal shape, from 0 to 2^32 - 1: one register of many threads each.

    Returns:
        The outputs in the format of the inputs.
    """
    registers = {f"${outputs + number}": value for number, value in enumerate(inputs)}

    def read_operand(operand: str) -> Tensor:
        if operand in registers:
            return registers[operand]
        return torch.full_like(inputs[0], int(operand, 0))

    for instruction in assembly.strip().strip("{}").split(";"):
        found = re.fullmatch(r"\s*(\S+)\s+(.*)", instruction, re.DOTALL)
        if found is None or found[1] == ".reg":
            continue
        target, *operands = [operand.strip() for operand in found[2].split(",")]
        values = [read_operand(operand) for operand in operands]
        registers[target] = _execute(found[1], values) & MASK
    return [registers[f"${number}"] for number in range(outputs)]


def _execute(name: str, values: list[Tensor]) -> Tensor:
    match name:
        case "and.b32":
            return values[0] & values[1]
        case "or.b32":
            return values[0] | values[1]
        case "add.u32":
            return values[0] + values[1]
        case "shl.b32":
            return values[0] << values[1]
        case "shr.u32":
            return values[0] >> values[1]
        case "shf.l.wrap.b32":
            # The highest bits of the first operand are shifted in from below.
            return (values[1] << values[2]) | (values[0] >> (32 - values[2]))
        case "prmt.b32":
            return _permute(*values)
    raise NotImplementedError(name)


def _permute(low: Tensor, high: Tensor, selector: Tensor) -> Tensor:
    """Build a register from 4 of the 8 bytes of two registers, selected by 4 hexadecimal digits."""
    both = low | (high << 32)
    result = torch.zeros_like(low)
    for place in range(4):
        digit = (selector >> (4 * place)) & 7
        result |= ((both >> (8 * digit)) & 0xFF) << (8 * place)
    return result


def as_bf16(registers: Tensor) -> Tensor:
    """Return the two bf16 numbers of every register, the lower one first, bf16 [..., 2]."""
    halves = torch.stack([registers & 0xFFFF, registers >> 16], -1)
    signed = halves - ((halves >> 15) << 16)
    return signed.to(torch.int16).view(torch.bfloat16)
