"""Times the two GEMMs of a layer's MXFP4 experts in other tile shapes than servers use.

    python -m benchmarks.experts gemms
    python -m benchmarks.experts gemms --requests 256 --gemms gate_up --rounds 25
    python -m benchmarks.experts gemms --compile-only

Needs one Hopper GPU, except with ``--compile-only``. Runs in SGLang's Python environment, without a
server. PYTHONPATH must have this repository, ``kernels`` and the packages of SGLang, such as
triton_kernels.

A decoding step of GPT-OSS-20B multiplies each request's hidden state with the matrices of 4 of 32
experts: first gate and up (with the activation), then down. The GEMMs run as in a server with the
plugin: its kernels route the tokens and sum the outputs, and the weights have its layout. Several
layers alternate, so that the L2 cache holds no weights. Each layer has its own random weights and
routes. Every variant has a CUDA graph. The graphs are replayed interleaved, and the medians are
printed.

A variant is a tile shape of the kernel (``Variant``). The served variant is the choice of
triton_kernels and the plugin. The other variants are in ``PROMISING``. Each variant's output is
compared with the served one. The reading limit is the time to read once the experts that have a
token, at the bandwidth of summing 4 GB on this GPU.

Variants are compiled in advance in ``--precompile`` processes, which need no GPU. Compiling in
sequence takes minutes. ``--compile-only`` prints the compiler's results and exits. It also accepts
numbers of requests that occur only in a prefill. TRITON_PTXAS_PATH selects the assembler, which
decides whether registers are written too early (docs/quantization.md).

triton_kernels 3.6 does not support the following for MXFP4 on Hopper, so there are no such
variants:

- persistent kernels (NotImplementedError),
- split K (``can_use_split_k``),
- subtiles of the epilogue, which only persistent kernels have.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.errors import TritonError

from benchmarks.harness import read_bandwidth, time_interleaved
from scripts.register_hazards import inspect_kernel
from tests.support.rl_loop.engines.hopper_driver import HopperDriver

PLUGIN = Path(__file__).resolve().parents[2] / "rl_loop/engines/sglang/plugin"
if str(PLUGIN) not in sys.path:
    sys.path.append(str(PLUGIN))

import gptoss_expert_layers  # noqa: E402
import gptoss_expert_routing  # noqa: E402
import gptoss_expert_values  # noqa: E402
import gptoss_hopper_layout as layout  # noqa: E402
import gptoss_moe_occupancy  # noqa: E402
import gptoss_routing_kernels  # noqa: E402

EXPERTS, TOP_K, WIDTH = 32, 4, 2880
"""Experts, experts per token, and hidden (= intermediate) size of GPT-OSS-20B."""
GEMMS = {"gate_up": 2 * WIDTH, "down": WIDTH}
"""Output features of each GEMM."""
SCALE_BYTES = (118, 122)
"""Lowest scale byte of random weights, and one above the highest."""
MAX_ERROR = 1e-2

PROCESSORS = 132
"""Streaming multiprocessors (SM) of an H100 or H200."""
REGISTERS = 65536
"""Registers of an SM."""
SHARED_MEMORY = 228 * 1024
"""Shared memory of an SM, in bytes."""
RESERVED_SHARED_MEMORY = 1024
"""Shared memory that every thread block takes in addition to its own, in bytes."""
MAX_SHARED_MEMORY = 227 * 1024
"""Maximum shared memory of a thread block, in bytes."""


@dataclass(frozen=True)
class Variant:
    """Tile shape of ``_matmul_ogs`` of triton_kernels."""

    rows: int
    """Token rows of a tile. An expert with more rows is read once per tile."""
    columns: int
    """Output features of a tile."""
    inputs: int
    """Input features per step of the loop (K)."""
    warps: int
    stages: int
    """Pipeline stages: steps that fit into shared memory at a time."""
    registers: int | None = None
    """Maximum registers of a thread; None for the compiler's choice."""

    @classmethod
    def of(cls, flags: Any) -> Variant:
        """Return the variant of triton_kernels' ``OptFlags``."""
        return cls(
            rows=flags.block_m,
            columns=flags.block_n,
            inputs=flags.block_k,
            warps=flags.num_warps,
            stages=flags.num_stages,
            registers=flags.target_kernel_kwargs.get("maxnreg"),
        )

    def applied_to(self, flags: Any) -> Any:
        """Return triton_kernels' ``flags`` with the shape of this variant."""
        launch = {} if self.registers is None else {"maxnreg": self.registers}
        return replace(
            flags,
            block_m=self.rows,
            block_n=self.columns,
            block_k=self.inputs,
            num_warps=self.warps,
            num_stages=self.stages,
            target_kernel_kwargs=launch,
        )

    def shared_memory(self) -> int:
        """Return the bytes of shared memory that the loop takes in Triton 3.6.

        Codes and scales need 1 stage less than the tokens' rows, because a thread holds the codes
        and scales of the current step in registers. The tensor cores read the rows from shared
        memory.
        """
        rows = 2 * self.rows * self.inputs
        codes = self.columns * self.inputs // 2
        scales = self.columns * self.inputs // 32
        return self.stages * rows + (self.stages - 1) * (codes + scales)


def shapes(rows: int, *others: tuple[int, int, int, int, int | None]) -> list[Variant]:
    """Return variants with ``rows`` rows.

    Args:
        rows: token rows of the tiles.
        others: columns, inputs, warps, stages and registers of each variant.
    """
    return [Variant(rows, *other) for other in others]


PROMISING = {
    16: shapes(
        16,
        (256, 128, 8, 4, None),
        (256, 128, 8, 4, 128),
        (256, 128, 8, 3, 128),
        (256, 128, 8, 5, 128),
        (256, 64, 8, 6, 80),
        (128, 128, 4, 3, 128),
        (128, 128, 4, 4, None),
        (128, 128, 4, 4, 128),
        (128, 128, 4, 5, 128),
        (128, 128, 8, 4, None),
        (128, 64, 4, 5, 96),
        (256, 64, 4, 4, 128),
        (256, 64, 4, 5, 128),
        (256, 128, 4, 4, None),
    ),
    32: shapes(
        32,
        (256, 128, 8, 3, 128),
        (256, 128, 8, 4, 128),
        (128, 128, 4, 3, 168),
        (128, 128, 4, 4, 168),
        (128, 64, 4, 5, 96),
        (128, 128, 8, 4, 80),
        (256, 64, 4, 4, None),
    ),
    64: shapes(
        64,
        (256, 128, 8, 3, 128),
        (256, 128, 8, 3, None),
        (256, 128, 8, 4, None),
        (256, 128, 8, 5, None),
        (256, 128, 8, 2, 128),
        (256, 64, 8, 4, 128),
        (128, 128, 4, 3, 168),
        (128, 128, 4, 4, None),
        (128, 64, 4, 3, 128),
        (128, 64, 4, 4, 128),
        (256, 64, 4, 3, None),
        (256, 64, 4, 4, None),
        (128, 128, 8, 3, 104),
        (128, 128, 8, 3, 80),
        (128, 64, 8, 4, 80),
        (256, 128, 16, 3, 128),
        (256, 128, 16, 4, 128),
    ),
}
"""Variants to try, by rows.

With Triton 3.6 for sm90, only one of them spills (2 registers in its loop). Each one has an
advantage over the served variants: more warps per SM, fewer waits for the tensor cores, fewer
instructions per value, or deeper prefetching (docs/design/mxfp4_kernels.md).
"""


def grid(requests: int) -> list[Variant]:
    """Return the variants to try: with the rows that servers use, and with half of them."""
    rows = served_rows(requests)
    return PROMISING[rows] + PROMISING.get(rows // 2, [])


def served_rows(requests: int) -> int:
    """Return the rows that triton_kernels chooses: twice the mean rows of an expert, rounded up."""
    mean = max(1, requests * TOP_K // EXPERTS)
    return max(16, min(64, 1 << (2 * mean - 1).bit_length()))


# -- inputs of triton_kernels ---------------------------------------------------------------------


class ChosenFlags:
    """Wraps ``make_opt_flags`` of triton_kernels, and replaces its choice by a variant."""

    def __init__(self, original: Any) -> None:
        self.original = original
        self.variant: Variant | None = None
        """Variant to run; None for the choice of triton_kernels and the plugin."""
        self.last: Variant | None = None
        """Variant of the last GEMM."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        flags = self.original(*arguments, **options)
        if self.variant is not None:
            flags = self.variant.applied_to(flags)
        self.last = Variant.of(flags)
        return flags


def install() -> ChosenFlags:
    """Run GEMMs as servers with the plugin do, and return the object that selects variants."""
    matmul_ogs: Any = import_module("triton_kernels.matmul_ogs")
    gptoss_moe_occupancy.install()
    gptoss_expert_values.install()
    matmul_ogs.reduce = gptoss_expert_routing.fused_reduce(matmul_ogs.reduce)
    flags = ChosenFlags(matmul_ogs.make_opt_flags)
    matmul_ogs.make_opt_flags = flags
    return flags


@dataclass
class Matrices:
    """Matrices of one GEMM of one layer, in the format of triton_kernels."""

    values: Any
    config: Any
    """``PrecisionConfig`` with the scales."""
    bias: Tensor


def make_matrices(gemm: str, generator: torch.Generator) -> Matrices:
    """Return random matrices of a GEMM, on the generator's device. Any bytes are valid values."""
    outputs = GEMMS[gemm]
    draw = partial(torch.randint, dtype=torch.uint8, device=generator.device, generator=generator)
    values = draw(0, 256, (EXPERTS, *layout.value_storage_shape(outputs, WIDTH // 2)))
    scales = draw(*SCALE_BYTES, (EXPERTS, *layout.scale_storage_shape(outputs, WIDTH // 32)))
    scales += layout.SCALE_BIAS
    bias = torch.randn(EXPERTS, outputs, device=generator.device, generator=generator)
    return describe_to_kernels(gemm, values, scales, bias)


def describe_to_kernels(gemm: str, values: Tensor, scales: Tensor, bias: Tensor) -> Matrices:
    """Return matrices in memory in the format of triton_kernels.

    Args:
        gemm: one of ``GEMMS``.
        values: uint8 [experts, *value_storage_shape].
        scales: uint8 [experts, *scale_storage_shape].
        bias: fp32 [experts, outputs].
    """
    from triton_kernels.matmul_ogs import FlexCtx, PrecisionConfig
    from triton_kernels.numerics import InFlexData

    shape = (EXPERTS, GEMMS[gemm], WIDTH // 2)
    wrapped_values, wrapped_scales = gptoss_expert_layers.wrap(values, scales, shape)
    config = PrecisionConfig(weight_scale=wrapped_scales, flex_ctx=FlexCtx(rhs_data=InFlexData()))
    return Matrices(wrapped_values, config, bias)


class Gemm:
    """One of the two GEMMs of several layers, for a fixed number of requests."""

    def __init__(
        self,
        name: str,
        requests: int,
        layers: list[Matrices],
        flags: ChosenFlags,
        generator: torch.Generator,
    ) -> None:
        self.name = name
        self.layers = layers
        self.flags = flags
        device = generator.device
        draw = partial(torch.randn, device=device, dtype=torch.bfloat16, generator=generator)
        rows = requests * TOP_K
        self.logits = [draw(requests, EXPERTS) for _ in layers]
        self.inputs = draw(requests if name == "gate_up" else rows, WIDTH)
        outputs = (1, rows if name == "gate_up" else requests, WIDTH)
        self.outputs = torch.empty(outputs, device=device, dtype=torch.bfloat16)
        self.routes = [route(logits) for logits in self.logits]

    def run(self, layer: int, variant: Variant | None) -> None:
        """Multiply with one layer's matrices.

        The call equals ``triton_kernel_fused_experts_with_bias`` of SGLang 0.5.17.

        Args:
            layer: index of the layer.
            variant: tile shape; None for the served one.
        """
        from triton_kernels.matmul_ogs import FnSpecs, FusedActivation, matmul_ogs
        from triton_kernels.swiglu import swiglu_fn

        matrices = self.layers[layer]
        data, gather, scatter = self.routes[layer]
        options: dict[str, Any]
        if self.name == "gate_up":
            swiglu = FnSpecs("swiglu", swiglu_fn, ("alpha", "limit"), reduction_n=2)
            activation = FusedActivation(swiglu, (1.702, 7.0))
            options = {"gather_indx": gather, "fused_activation": activation}
        else:
            options = {"scatter_indx": scatter, "gammas": data.gate_scal}

        self.flags.variant = variant
        matmul_ogs(
            self.inputs,
            matrices.values,
            matrices.bias,
            data,
            precision_config=matrices.config,
            y=self.outputs,
            **options,
        )

    def run_layers(self, variant: Variant | None) -> None:
        """Multiply with the matrices of all layers in sequence."""
        for layer in range(len(self.layers)):
            self.run(layer, variant)

    def output(self, variant: Variant | None) -> Tensor:
        """Return the output of a variant for the first layer."""
        # NaN reveals elements that the kernel does not write.
        self.outputs.fill_(torch.nan)
        self.run(0, variant)
        return self.outputs.clone()

    def sizes(self) -> list[list[int]]:
        """Return the number of tokens of each expert, by layer."""
        return [data.expt_hist.tolist() for data, _, _ in self.routes]


def route(logits: Tensor) -> Any:
    """Route logits [tokens, experts] with the plugin's kernel and return the routing data.

    Raises:
        ValueError: if servers use another kernel for this number of tokens.
    """
    if not gptoss_routing_kernels.fits(logits):
        raise ValueError(f"{len(logits)} requests: servers route so many by other kernels")
    matmul_ogs = import_module("triton_kernels.matmul_ogs")
    routes = gptoss_routing_kernels.route(logits, TOP_K)
    return gptoss_expert_routing.as_routing_data(matmul_ogs, routes, TOP_K)


# -- compiling ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compiled:
    """Result of compiling a variant."""

    registers: int
    """Registers of a thread."""
    spilled: int
    """Bytes of memory that a thread uses for spilled registers."""
    shared: int
    """Shared memory of a thread block, in bytes."""
    instructions: int
    """Instructions of a warp in one step of the loop."""
    is_serial: bool
    """True if a warp waits for each of its matrix instructions before it continues."""
    hazards: int
    """Registers written while tensor cores may still read them, by ``register_hazards.py``."""

    def programs(self, warps: int) -> int:
        """Return the number of thread blocks that an SM holds."""
        # Registers are allocated per warp, 256 at a time.
        of_program = warps * 32 * (math.ceil(self.registers / 8) * 8)
        return min(REGISTERS // of_program, SHARED_MEMORY // (self.shared + RESERVED_SHARED_MEMORY))

    def instructions_per_value(self, variant: Variant) -> float:
        """Return a thread's instructions per MXFP4 value that it unpacks."""
        return self.instructions * 32 * variant.warps / (variant.columns * variant.inputs)


Work = tuple[int, str, Variant | None]
"""Requests, gemm and variant."""


def compile_all(work: list[Work], jobs: int) -> dict[Work, tuple[Variant, Compiled]]:
    """Compile all variants in parallel. Triton keeps the results in its cache on disk.

    Args:
        work: items to compile.
        jobs: number of processes.

    Returns:
        Compiled variant and result, by item. Items that do not compile are left out.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as processes:
        shares = processes.map(compile_share, [work[job::jobs] for job in range(jobs)])
        return {item: made for share in shares for item, made in share}


def compile_share(work: list[Work]) -> list[tuple[Work, tuple[Variant, Compiled]]]:
    """Compile for a Hopper GPU without using one. Must run in a separate process.

    Returns:
        Each item with its compiled variant and the result.
    """
    kernels = compile_instead_of_starting()
    flags = install()
    done = []
    for item in work:
        requests, name, variant = item
        gemm = Gemm(name, requests, [empty_matrices(name)], flags, torch.Generator())
        kernels.clear()
        try:
            gemm.run(0, variant)
        except (TritonError, RuntimeError) as error:
            print(f"{variant} does not compile: {error}", flush=True)
            continue
        assert flags.last is not None
        done.append((item, (flags.last, inspect(kernels[0]))))
    return done


def compile_instead_of_starting() -> list[Any]:
    """Make this process compile GEMMs for a Hopper GPU instead of launching them.

    Other kernels are neither compiled nor launched.

    Returns:
        List to which compiled kernels are appended.
    """
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    driver.set_active(HopperDriver())
    hopper = SimpleNamespace(
        multi_processor_count=PROCESSORS, shared_memory_per_block_optin=MAX_SHARED_MEMORY
    )
    torch.cuda.get_device_properties = lambda *device: hopper  # type: ignore[assignment]
    torch.cuda.get_device_capability = lambda *device: (9, 0)
    # Nothing is routed, so the number of requests may be as large as in a prefill.
    gptoss_routing_kernels.fits = lambda logits: True

    kernels = []
    original = JITFunction.run

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if "matmul_ogs" not in self.__name__:
            return None
        kernels.append(original(self, *arguments, grid=grid, warmup=True, **options))
        return kernels[-1]

    JITFunction.run = run
    return kernels


def empty_matrices(gemm: str) -> Matrices:
    """Return matrices in host memory. Only their shapes are used."""
    outputs = GEMMS[gemm]
    values = layout.value_storage_shape(outputs, WIDTH // 2)
    scales = layout.scale_storage_shape(outputs, WIDTH // 32)
    empty = partial(torch.empty, dtype=torch.uint8)
    bias = torch.empty(EXPERTS, outputs)
    return describe_to_kernels(gemm, empty(EXPERTS, *values), empty(EXPERTS, *scales), bias)


def inspect(kernel: Any) -> Compiled:
    """Return the properties of a compiled kernel."""
    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [cuobjdump, "--dump-resource-usage", "-sass", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return parse(text, kernel.metadata.shared)


def parse(text: str, shared: int) -> Compiled:
    """Parse the output of ``cuobjdump --dump-resource-usage -sass``.

    Args:
        text: the output.
        shared: shared memory of a thread block, in bytes.
    """
    usage = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert usage is not None, text
    loop = find_matrix_loop(text)
    return Compiled(
        registers=int(usage[1]),
        spilled=int(usage[2]),
        shared=shared,
        instructions=len(loop),
        is_serial=sum("WARPGROUP.DEPBAR.LE gsb0, 0x0" in line for line in loop) > 1,
        hazards=sum(loop.hazards for loop in inspect_kernel(text)),
    )


def find_matrix_loop(text: str) -> list[str]:
    """Return the instructions of the smallest loop that multiplies matrices."""
    code = [
        (int(address, 16), instruction)
        for address, instruction in re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);", text)
    ]
    loops = []
    for end, instruction in code:
        branch = re.search(r"BRA.* 0x([0-9a-f]+)", instruction)
        if branch is None or int(branch[1], 16) >= end:
            continue
        body = [line for address, line in code if int(branch[1], 16) <= address <= end]
        if any("GMMA" in line for line in body):
            loops.append(body)
    return min(loops, key=len)


# -- measuring ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A row of the table."""

    requests: int
    gemm: str
    variant: Variant
    is_served: bool
    compiled: Compiled | None
    microseconds: float | None
    """Time of one layer's GEMM; None if it did not run."""
    limit: float
    """Reading limit in microseconds."""
    error: float
    """Norm of the difference from the served output, relative to the norm of that output."""
    is_same: bool
    """True if the output equals the served one bit for bit."""
    reads: float
    """Number of times that a matrix is read, averaged over the experts that have tokens."""


def reads_of_matrices(sizes: list[list[int]], rows: int) -> float:
    """Return the number of tiles per expert, averaged over the experts that have tokens.

    Args:
        sizes: number of tokens of each expert, by layer.
        rows: token rows of a tile.
    """
    used = [size for layer in sizes for size in layer if size > 0]
    return sum(math.ceil(size / rows) for size in used) / len(used)


def bytes_to_read(gemm: str, sizes: list[list[int]]) -> float:
    """Return the bytes of the matrices of experts that have tokens, averaged over the layers."""
    used = sum(size > 0 for layer in sizes for size in layer) / len(sizes)
    return used * GEMMS[gemm] * WIDTH * 17 / 32


def measure(
    gemm: Gemm,
    requests: int,
    variants: list[Variant],
    compiled: dict[Work, tuple[Variant, Compiled]],
    bandwidth: float,
    rounds: int,
) -> list[Row]:
    """Check and time variants of a GEMM. The served one comes first.

    Args:
        gemm: GEMM to measure.
        requests: number of requests.
        variants: tile shapes. The served one is added if it is missing.
        compiled: results of ``compile_all``.
        bandwidth: read bandwidth of the GPU in bytes per second.
        rounds: measured rounds.
    """
    expected = gemm.output(None).float()
    assert gemm.flags.last is not None
    served = gemm.flags.last
    sizes = gemm.sizes()
    limit = bytes_to_read(gemm.name, sizes) / bandwidth * 1e6

    rows, calls = [], {}
    for variant in (None, *(variant for variant in variants if variant != served)):
        shape = variant or served
        made = compiled.get((requests, gemm.name, variant))
        row = Row(
            requests=requests,
            gemm=gemm.name,
            variant=shape,
            is_served=variant is None,
            compiled=None if made is None else made[1],
            microseconds=None,
            limit=limit,
            error=math.nan,
            is_same=False,
            reads=reads_of_matrices(sizes, shape.rows),
        )
        try:
            output = gemm.output(variant).float()
        except TritonError as error:
            print(f"{shape} does not run: {error}", flush=True)
        else:
            difference = float((output - expected).norm() / expected.norm())
            row = replace(row, error=difference, is_same=torch.equal(output, expected))
            calls[str(len(rows))] = partial(gemm.run_layers, variant)
        rows.append(row)

    times = time_interleaved(calls, rounds=rounds, calls=1)
    for number, milliseconds in times.items():
        microseconds = milliseconds * 1000 / len(gemm.layers)
        rows[int(number)] = replace(rows[int(number)], microseconds=microseconds)
    return rows


HEADER = (
    "| requests | gemm | rows x columns x inputs | warps | stages | registers | programs | "
    "instructions a value | waits for each product | registers written too early | reads | microseconds | "
    "reading limit | output |"
)


def table(rows: list[Row]) -> str:
    """Return a Markdown table of all rows, sorted by time for each GEMM."""
    lines = [HEADER, "|" + "---|" * (HEADER.count("|") - 1)]
    order = {key: number for number, key in enumerate(dict.fromkeys(map(row_key, rows)))}
    for row in sorted(rows, key=lambda row: (order[row_key(row)], sortable_microseconds(row))):
        lines.append("| " + " | ".join(cells(row)) + " |")
    return "\n".join(lines)


def row_key(row: Row) -> tuple[int, str]:
    return row.requests, row.gemm


def cells(row: Row) -> list[str]:
    variant = row.variant
    shape = f"{variant.rows}x{variant.columns}x{variant.inputs}"
    if row.is_served:
        shape = f"**{shape}** (served)"
    if row.microseconds is None:
        time, share = "did not run", ""
    else:
        time = f"{row.microseconds:.1f}"
        share = f"{row.limit / row.microseconds:.0%}"

    return [
        str(row.requests),
        row.gemm,
        shape,
        str(variant.warps),
        str(variant.stages),
        *compiled_cells(variant, row.compiled),
        f"{row.reads:.2f}",
        time,
        share,
        "same bits" if row.is_same else f"differs by {row.error:.1e}",
    ]


def compiled_cells(variant: Variant, compiled: Compiled | None) -> list[str]:
    """Return the cells for registers, thread blocks, instructions, waiting and hazards."""
    limit = "" if variant.registers is None else f" of {variant.registers}"
    if compiled is None:
        return [limit.removeprefix(" of "), "", "", "", ""]
    spilled = f", {compiled.spilled} bytes spilled" if compiled.spilled else ""
    return [
        f"{compiled.registers}{limit}{spilled}",
        str(compiled.programs(variant.warps)),
        f"{compiled.instructions_per_value(variant):.2f}",
        "yes" if compiled.is_serial else "no",
        str(compiled.hazards),
    ]


def fastest(rows: list[Row]) -> list[Row]:
    """Return the fastest row for each number of requests and GEMM.

    Rows that are wrong or did not run are ignored.
    """
    chosen: dict[tuple[int, str], Row] = {}
    for row in rows:
        if row.microseconds is None or not row.error < MAX_ERROR:
            continue
        best = chosen.get(row_key(row))
        if best is None or sortable_microseconds(row) < sortable_microseconds(best):
            chosen[row_key(row)] = row
    return list(chosen.values())


def summary(rows: list[Row]) -> str:
    """Return the time of both GEMMs by number of requests, served and with the fastest shapes."""
    served = [row for row in rows if row.is_served]
    chosen = fastest(rows)
    lines = []
    for requests in dict.fromkeys(row.requests for row in rows):
        names = ", ".join(describe(row) for row in chosen if row.requests == requests)
        lines.append(
            f"{requests} requests, microseconds of a layer: served {total(served, requests):.1f}; "
            f"fastest {total(chosen, requests):.1f} ({names})"
        )
    return "\n".join(lines)


def total(rows: list[Row], requests: int) -> float:
    return sum(sortable_microseconds(row) for row in rows if row.requests == requests)


def sortable_microseconds(row: Row) -> float:
    return math.inf if row.microseconds is None else row.microseconds


def describe(row: Row) -> str:
    variant = row.variant
    limit = "" if variant.registers is None else f", {variant.registers} registers"
    shape = f"{variant.rows}x{variant.columns}x{variant.inputs}"
    return f"{row.gemm} {shape}, {variant.warps} warps, {variant.stages} stages{limit}"


def compiled_table(compiled: dict[Work, tuple[Variant, Compiled]]) -> str:
    """Return a Markdown table of the compiler's results."""
    names = [name.strip() for name in HEADER.strip("| ").split("|")[:10]]
    lines = ["| " + " | ".join([*names, "shared memory"]) + " |", "|" + "---|" * (len(names) + 1)]
    for (requests, gemm, asked), (variant, made) in compiled.items():
        shape = f"{variant.rows}x{variant.columns}x{variant.inputs}"
        if asked is None:
            shape = f"**{shape}** (served)"
        sizes = [str(requests), gemm, shape, str(variant.warps), str(variant.stages)]
        row = [*sizes, *compiled_cells(variant, made), f"{made.shared:,}"]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, nargs="+", default=[256, 64, 8])
    parser.add_argument("--gemms", nargs="+", choices=list(GEMMS), default=list(GEMMS))
    parser.add_argument("--layers", type=int, default=3, help="in turn")
    parser.add_argument("--rounds", type=int, default=25, help="of which the median is taken")
    parser.add_argument(
        "--precompile",
        type=int,
        default=min(16, os.cpu_count() or 1),
        help="processes; 0 does without",
    )
    parser.add_argument("--compile-only", action="store_true")
    options = parser.parse_args()

    work: list[Work] = [
        (requests, gemm, variant)
        for requests in options.requests
        for gemm in options.gemms
        for variant in (None, *grid(requests))
    ]
    jobs = max(options.precompile, int(options.compile_only))
    compiled = compile_all(work, jobs) if jobs else {}
    if options.compile_only:
        in_order = {item: compiled[item] for item in work if item in compiled}
        print(compiled_table(in_order))
        return

    flags = install()
    generator = torch.Generator("cuda").manual_seed(0)
    bandwidth = read_bandwidth()
    print(f"{torch.cuda.get_device_name()}, reads {bandwidth / 1e12:.2f} TB/s", flush=True)
    rows = []
    for name in options.gemms:
        layers = [make_matrices(name, generator) for _ in range(options.layers)]
        for requests in options.requests:
            gemm = Gemm(name, requests, layers, flags, generator)
            variants = grid(requests)
            if compiled:
                variants = [each for each in variants if (requests, name, each) in compiled]
            rows += measure(gemm, requests, variants, compiled, bandwidth, options.rounds)

    rows.sort(key=lambda row: options.requests.index(row.requests))
    print(table(rows))
    print(summary(rows))
    if not all(row.error < MAX_ERROR for row in rows if row.microseconds is not None):
        sys.exit("a variant computes something else")
