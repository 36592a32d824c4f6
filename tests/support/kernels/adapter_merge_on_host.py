"""Runs the adapter-merge kernel on the CPU: its source, compiled for the host, thread by thread."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import torch

from gptoss_kernels import adapter_merge

CALL_EVERY_THREAD = """
extern "C" void merge_on_host(int blocks, int threads, const void* base, const unsigned char* scales, const uint4* a,
                              const uint4* b, uint4* out, float update_scale, int experts, int rows, int groups,
                              int rank) {
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++)
            merge_adapters(base, scales, a, b, out, update_scale, experts, rows, groups, rank);
}
"""


def build(directory: Path, *, is_mxfp4: bool, rank: int) -> ctypes.CDLL:
    """Compile the kernel for this machine, with the same definitions as for a GPU."""
    macros = adapter_merge.macros(is_mxfp4=is_mxfp4, rank=rank)
    program = directory / f"on_host_{macros['MXFP4']}_{macros['ROWS']}.cpp"
    header = Path(__file__).with_name("cuda_on_host.h")
    program.write_text(
        f'#include "{header}"\n#include "{adapter_merge.SOURCE}"\n{CALL_EVERY_THREAD}'
    )
    library = program.with_suffix(".so")
    if library.exists():
        return ctypes.CDLL(str(library))
    defines = [f"-D{name}={value}" for name, value in macros.items()]
    flags = ["-O2", "-ffp-contract=off", "-Wno-unknown-pragmas", "-shared", "-fPIC"]
    subprocess.run(["c++", *flags, *defines, str(program), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def run(
    library: ctypes.CDLL,
    base: torch.Tensor,
    scales: torch.Tensor | None,
    a: torch.Tensor,
    b: torch.Tensor,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Call the kernel once per GPU thread."""
    arguments = adapter_merge.launch_arguments(base, scales, a, b, scale, out)
    library.merge_on_host(*[as_ctypes(argument) for argument in arguments])


def as_ctypes(
    argument: torch.Tensor | int | float,
) -> ctypes.c_void_p | ctypes.c_int | ctypes.c_float:
    if isinstance(argument, torch.Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    if isinstance(argument, int):
        return ctypes.c_int(argument)
    return ctypes.c_float(argument)
