"""Looks in compiled kernels for registers that are written while Hopper's tensor cores may still read them.

    python scripts/register_hazards.py                      # all that Triton has compiled here
    python scripts/register_hazards.py DIRECTORY FILE.cubin

A matrix instruction of Hopper (``HGMMA`` in machine code) may have its first matrix in registers. It
reads them after the program has gone on, and nothing but a wait for the instruction's group says that it
has. Until CUDA 13.3 ptxas writes such registers before that wait, in the next turn of a loop: triton
issue 9433 and pull request 11781. That of 13.5 does so in fewer kernels, but in some. Whether a wrong number
comes of it is a matter of time, so that tests may pass.

Each loop is followed for some turns. A group of matrix instructions is pending from the instruction that
closes it (``gsb0``) until a wait (``WARPGROUP.DEPBAR.LE gsb0, N``) leaves no more than N younger
groups. Whatever writes a register from which a pending group reads is counted, with how many instructions lie
between the two. Branches within a loop are followed as if none were taken, and code outside of loops is
not looked at.

Prints a line for each kernel that has such a loop; exits with 1 if a register is written too early. Reads
machine code with the cuobjdump that comes with Triton; no GPU is needed.
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
"""Of a loop: what is pending when the last one begins is what is always pending then."""
REGISTERS_OF_MATRIX = 4
"""That hold a thread's part of the first matrix."""

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
"""Instructions whose first register is none that they write."""


@dataclass(frozen=True)
class Instruction:
    address: int
    text: str
    """Without its predicate."""

    @property
    def written(self) -> range:
        """Return the numbers of the registers that it writes."""
        operation, _, operands = self.text.partition(" ")
        if operation.split(".")[0] in WRITES_NOTHING or operation.startswith("U"):
            return range(0)

        first, *others = operands.split(",")
        # A predicate may come before the register.
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
    """What was found in one loop with matrix instructions that read registers."""

    address: int
    instructions: int
    hazards: int
    """Instructions of a turn that write a register too early."""
    nearest: int | None
    """Fewest instructions between a group and one that writes its registers; None if there is none."""


@dataclass
class Group:
    """Matrix instructions that are waited for together."""

    registers: set[int]
    """From which they read."""
    issued: int
    """The number of the instruction that closes it."""


def read_instructions(machine_code: str) -> list[Instruction]:
    """Read what ``cuobjdump -sass`` prints of one kernel."""
    found = (INSTRUCTION.match(line) for line in machine_code.splitlines())
    return [Instruction(int(one[1], 16), PREDICATE.sub("", one[2])) for one in found if one]


def find_loops(instructions: list[Instruction]) -> list[list[Instruction]]:
    """Return the bodies of loops that have matrix instructions with registers, from a backward branch's target
    to the branch."""
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
    """Follow a loop, and count what its last turn writes too early."""
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
    """Return a kernel's machine code as text; SystemExit naming the file if it is none."""
    import triton

    program = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    done = subprocess.run([program, "-sass", cubin], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{cubin} is no kernel: {done.stderr.strip()}")
    return done.stdout


def find_cubins(paths: Iterable[Path]) -> list[Path]:
    """Return files, and those below directories that Triton has compiled."""
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
