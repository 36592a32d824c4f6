"""Finds registers in compiled kernels that are written while Hopper's tensor cores may read them.

    python scripts/register_hazards.py                      # all kernels in Triton's cache
    python scripts/register_hazards.py DIRECTORY FILE.cubin

A matrix instruction of Hopper (``HGMMA`` in machine code) may have its first matrix in registers.
It reads them asynchronously. Only a wait for the instruction's group guarantees that it has read
them. Before CUDA 13.3, ptxas writes such registers before that wait, in the next iteration of a
loop (triton issue 9433 and pull request 11781). Version 13.5 still does so in some kernels. Wrong
results depend on timing, so tests may pass.

The program follows each loop for a few iterations. A group of matrix instructions is pending from
the instruction that closes it (``gsb0``) until a wait (``WARPGROUP.DEPBAR.LE gsb0, N``) leaves at
most N younger groups. Every write to a register that a pending group reads is counted, with the
number of instructions since the group. Branches within a loop count as not taken. Code outside of
loops is ignored.

The program prints a line per kernel with such a loop. It exits with 1 if a register is written too
early. It reads machine code with Triton's cuobjdump and needs no GPU.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

TURNS = 3
"""Iterations to follow. All later ones would have the same pending groups as the last one."""
REGISTERS_OF_MATRIX = 4
"""Registers that hold a thread's part of the first matrix."""

INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;")
NAME = re.compile(r"^\s*Function : (\S+)", re.MULTILINE)
PREDICATE = re.compile(r"^@!?U?P\w+ ")
BRANCH = re.compile(r"\bBRA\b.*?(0x[0-9a-f]+)")
MATRIX = re.compile(r"HGMMA\S* R\d+, R(\d+), gdesc")
WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x[0-9a-f]+)")
PREDICATE_OPERAND = re.compile(r"\s*U?P[T0-9]")
FIRST_REGISTER = re.compile(r"\s*R(\d+)")
# fmt: off
WRITES_NOTHING = [
    "BAR", "BRA", "BSSY", "BSYNC", "CCTL", "DEPBAR", "ERRBAR", "EXIT", "FSETP", "HGMMA", "HSETP2", "ISETP",
    "LDGDEPBAR", "LDGSTS", "MEMBAR", "NOP", "PLOP3", "RED", "ST", "STG", "STL", "STS", "WARPGROUP", "WARPSYNC",
]
# fmt: on
"""Instructions whose first register is not written."""


@dataclass(frozen=True)
class Instruction:
    address: int
    text: str
    """Text without its predicate."""

    @property
    def written(self) -> range:
        """Return the numbers of the registers that the instruction writes."""
        operation, _, operands = self.text.partition(" ")
        if operation.split(".")[0] in WRITES_NOTHING or operation.startswith("U"):
            return range(0)

        first, *others = operands.split(",")
        # A predicate may precede the register.
        if PREDICATE_OPERAND.match(first) and others:
            first = others[0]
        found = FIRST_REGISTER.match(first)
        if not found:
            return range(0)
        return range(int(found[1]), int(found[1]) + self._count(operation))

    @staticmethod
    def _count(operation: str) -> int:
        if ".128" in operation:
            return 4
        return 2 if ".64" in operation or "WIDE" in operation else 1


@dataclass(frozen=True)
class Loop:
    """Result for one loop with matrix instructions that read registers."""

    address: int
    instructions: int
    hazards: int
    """Number of instructions per iteration that write a register too early."""
    nearest: int | None
    """Smallest number of instructions between a group and such a write; None without hazards."""


@dataclass
class Group:
    """Matrix instructions with a common wait."""

    registers: set[int]
    """Registers that they read."""
    issued: int
    """Number of the instruction that closes the group."""


def read_instructions(machine_code: str) -> list[Instruction]:
    """Parse the output of ``cuobjdump -sass`` for one kernel."""
    found = (INSTRUCTION.match(line) for line in machine_code.splitlines())
    return [Instruction(int(one[1], 16), PREDICATE.sub("", one[2])) for one in found if one]


def find_loops(instructions: list[Instruction]) -> list[list[Instruction]]:
    """Return the bodies of loops with matrix instructions that read registers.

    A loop extends from the target of a backward branch to the branch.
    """
    bodies = []
    for branch in instructions:
        found = BRANCH.search(branch.text)
        if not found or int(found[1], 16) >= branch.address:
            continue
        begin = int(found[1], 16)
        body = [one for one in instructions if begin <= one.address <= branch.address]
        if any(MATRIX.search(one.text) for one in body):
            bodies.append(body)
    return bodies


def inspect_loop(body: list[Instruction]) -> Loop:
    """Follow a loop, and count the writes of its last iteration that are too early."""
    pending: list[Group] = []
    open_registers: set[int] = set()
    number = 0
    distances: list[int] = []

    for turn in range(TURNS):
        for instruction in body:
            number += 1
            if "HGMMA" in instruction.text:
                if found := MATRIX.search(instruction.text):
                    first = int(found[1])
                    open_registers |= set(range(first, first + REGISTERS_OF_MATRIX))
                if "gsb0" in instruction.text:
                    pending.append(Group(open_registers, number))
                    open_registers = set()

            elif found := WAIT.search(instruction.text):
                left = int(found[1], 16)
                pending = pending[len(pending) - left :] if len(pending) > left else pending

            elif turn == TURNS - 1:
                written = set(instruction.written)
                too_early = [group for group in pending if written & group.registers]
                distances += [number - group.issued for group in too_early]

    return Loop(body[0].address, len(body), len(distances), min(distances, default=None))


def inspect_kernel(machine_code: str) -> list[Loop]:
    """Inspect all loops of one kernel."""
    return [inspect_loop(body) for body in find_loops(read_instructions(machine_code))]


def disassemble(cubin: Path) -> str:
    """Return a kernel's machine code as text. Exit with an error if the file is invalid."""
    import triton

    program = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    done = subprocess.run([program, "-sass", cubin], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{cubin} is no kernel: {done.stderr.strip()}")
    return done.stdout


def find_cubins(paths: Iterable[Path]) -> list[Path]:
    """Return the given files, and the compiled kernels below the given directories."""
    cubins: list[Path] = []
    for path in paths:
        cubins += sorted(path.rglob("*.cubin")) if path.is_dir() else [path]
    return cubins


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cache = Path(os.environ.get("TRITON_CACHE_DIR", Path.home() / ".triton/cache"))
    parser.add_argument("paths", nargs="*", type=Path, default=[cache])
    paths = parser.parse_args().paths
    cubins = find_cubins(paths)
    if not cubins:
        parser.error(f"no .cubin in {', '.join(map(str, paths))}")

    has_hazards = False
    with_loops = 0
    for cubin in cubins:
        machine_code = disassemble(cubin)
        loops = inspect_kernel(machine_code)
        if not loops:
            continue
        with_loops += 1
        name = NAME.search(machine_code)
        hazards = sum(loop.hazards for loop in loops)
        line = (
            f"{name[1] if name else '?'}: {len(loops)} loops, {hazards} registers written too early"
        )
        if hazards:
            has_hazards = True
            nearest = min(loop.nearest for loop in loops if loop.nearest is not None)
            line += f", the nearest {nearest} instructions behind"
        print(f"{line} ({cubin})", flush=True)
    print(
        f"{len(cubins)} kernels, {with_loops} with matrices in registers within loops", flush=True
    )
    return 1 if has_hazards else 0


if __name__ == "__main__":
    sys.exit(main())
