"""Detection of registers that are written while tensor cores may still read them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import register_hazards as hazards

ROOT = Path(__file__).parents[3]
PROGRAM = ROOT / "scripts/register_hazards.py"

MULTIPLY = "HGMMA.64x32x16.F32.BF16 R24, R{first}, gdesc[UR8], R24{end}"
AGAIN = "@P0 BRA 0x100"


def machine_code(*instructions: str) -> str:
    """Return the output of cuobjdump for instructions from address 0x100 on."""
    lines = ["\t\tFunction : kernel"]
    for number, text in enumerate(instructions):
        lines.append(f"        /*{0x100 + 16 * number:04x}*/    {text} ;    /* 0x0 */")
        lines.append("                                             /* 0x1 */")
    return "\n".join(lines)


def multiply(first: int, *, closes: bool = True) -> str:
    """Return a matrix instruction that reads four registers from ``first`` on."""
    return MULTIPLY.format(first=first, end=", gsb0" if closes else "")


def wait(left: int) -> str:
    return f"WARPGROUP.DEPBAR.LE gsb0, {left:#x}"


def inspect(*instructions: str) -> tuple[int, int | None]:
    """Return the number of hazards of a loop, and the distance of the nearest."""
    (loop,) = hazards.inspect_kernel(machine_code(*instructions, AGAIN))
    assert loop.instructions == len(instructions) + 1
    return loop.hazards, loop.nearest


def test_registers_written_before_the_wait_are_counted() -> None:
    assert inspect("LDS R40, [R4]", multiply(40), wait(0)) == (0, None)
    # The groups of the two previous iterations are pending when the third iteration writes.
    assert inspect("LDS R40, [R4]", multiply(40)) == (2, 2)
    assert inspect("LDS R40, [R4]", multiply(40), wait(1)) == (1, 3)
    assert inspect("LDS R44, [R4]", multiply(40), wait(1)) == (0, None)


def test_wait_leaves_the_youngest_groups_in_flight() -> None:
    two_groups = ("MOV R40, R1", multiply(40), wait(1), "MOV R50, R1", multiply(50))
    # Each wait follows the group that reads the other registers.
    assert inspect(*two_groups, wait(1)) == (0, None)
    assert inspect("MOV R50, R1", *two_groups, wait(1)) == (1, 3)


def test_registers_of_a_group_are_those_of_all_its_instructions() -> None:
    both = (multiply(40, closes=False), multiply(60))
    assert inspect("MOV R41, R1", "MOV R63, R1", *both, wait(1)) == (2, 3)
    assert inspect("MOV R39, R1", "MOV R44, R1", "MOV R64, R1", *both, wait(1)) == (0, None)


@pytest.mark.parametrize(
    ("instruction", "writes"),
    [
        ("@!P1 LDS.128 R37, [R2]", True),
        ("LDS.64 R38, [R2]", False),
        ("IMAD.WIDE R39, R2, R3, R4", True),
        ("IADD3 R40, P1, R23, R0, RZ", True),
        ("LOP3.LUT P2, R40, R1, R2, RZ, 0xc0, !PT", True),
        ("R2UR UR4, R40", False),
        ("STS [R40], R41", False),
        ("ISETP.GE.AND P0, PT, R40, R2, PT", False),
        ("UMOV UR40, UR4", False),
    ],
)
def test_instructions_that_write_a_register_are_recognized(instruction: str, writes: bool) -> None:
    found, _ = inspect(instruction, multiply(40), wait(1))
    assert found == writes


def test_loops_without_matrices_in_registers_are_ignored() -> None:
    from_shared_memory = "HGMMA.64x32x16.F32.BF16 R24, gdesc[UR4], R24, gsb0"
    assert hazards.inspect_kernel(machine_code("MOV R40, R1", from_shared_memory, AGAIN)) == []
    assert hazards.inspect_kernel(machine_code("MOV R40, R1", multiply(40))) == []


def test_compiled_kernel_with_a_register_hazard_is_reported(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    compiling = [sys.executable, "-m", "tests.support.rl_loop.engines.hazardous_product"]
    subprocess.run(compiling, env=environment, cwd=ROOT, check=True, capture_output=True)

    program = [sys.executable, PROGRAM, tmp_path]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    of_kernel, summary = done.stdout.splitlines()
    assert of_kernel.startswith("hazardous_kernel: 1 loops, ")
    assert " registers written too early, the nearest " in of_kernel
    assert summary == "1 kernels, 1 with matrices in registers within loops"


def test_missing_or_invalid_kernel_files_are_named(tmp_path: Path) -> None:
    def run(path: Path) -> tuple[int, str]:
        program = [sys.executable, PROGRAM, path]
        done = subprocess.run(program, capture_output=True, text=True, check=False)
        return done.returncode, done.stderr

    code, said = run(tmp_path)
    assert code == 2 and f"no .cubin in {tmp_path}" in said

    file = tmp_path / "kernel.cubin"
    file.write_text("none")
    code, said = run(tmp_path)
    assert code == 1 and said.startswith(f"{file} is no kernel: ")
