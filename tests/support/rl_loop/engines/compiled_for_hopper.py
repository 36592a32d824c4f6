"""Compiles Triton kernels for a Hopper GPU on a machine without one."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.runtime import driver

from scripts.register_hazards import Loop, inspect_kernel
from tests.support.rl_loop.engines.hopper_driver import HopperDriver

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


@dataclass(frozen=True)
class Resources:
    """Resource usage of a compiled kernel, and its variant."""

    registers: int
    """Registers per thread."""
    spilled: int
    """Spilled memory per thread, in bytes."""
    shared: int
    """Shared memory per program, in bytes."""
    variant: str
    """Key that is equal for arguments that share a compiled kernel."""
    loops: tuple[Loop, ...]
    """Loops whose matrix instructions read registers."""


def compile_kernel(kernel: Any, *arguments: Any, **constants: Any) -> Resources:
    """Compile a kernel for these arguments, which are CPU tensors."""
    driver.set_active(HopperDriver())
    compiled = kernel.run(*arguments, grid=(1,), warmup=True, **constants)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        used = subprocess.run(
            [CUOBJDUMP, "--dump-resource-usage", "-sass", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", used)
    assert found is not None, used
    return Resources(
        registers=int(found[1]),
        spilled=int(found[2]),
        shared=compiled.metadata.shared,
        variant=compiled.hash,
        loops=tuple(inspect_kernel(used)),
    )


class Compiling:
    """Replaces a kernel, and compiles it instead of launching it."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.resources: list[Resources] = []

    def __getitem__(self, grid: object) -> Callable[..., None]:
        def start(*arguments: object, **constants: object) -> None:
            self.resources.append(compile_kernel(self.kernel, *arguments, **constants))

        return start
