"""Compiles kernels of Triton for a Hopper GPU, on a machine without one."""

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
    """What a compiled kernel takes, and which one it is."""

    registers: int
    """Of a thread."""
    spilled: int
    """Bytes of a thread's memory for what found no register."""
    shared: int
    """Bytes of shared memory that its program takes."""
    variant: str
    """The same for what is compiled once."""
    loops: tuple[Loop, ...]
    """In which matrix instructions read registers."""


def compile_kernel(kernel: Any, *arguments: Any, **constants: Any) -> Resources:
    """Compile a kernel as if it were started with these arguments, tensors of the host."""
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
    """Stands for a kernel: compiles it instead of starting it."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.resources: list[Resources] = []

    def __getitem__(self, grid: object) -> Callable[..., None]:
        def start(*arguments: object, **constants: object) -> None:
            self.resources.append(compile_kernel(self.kernel, *arguments, **constants))

        return start
