"""Variants of benchmarks/experts/gemms.py, and the evaluation of their times."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.errors import TritonError

from rl_loop.engines.sglang.config import PLUGIN

ROOT = Path(__file__).parents[2]
SASS = """
 Function kernel:
  REG:{registers} STACK:{stack} SHARED:0 LOCAL:0
        /*0010*/                   LDS.128 R16, [R98] ;
        /*0020*/                   @P0 BRA 0x10 ;
        /*0100*/                   WARPGROUP.ARRIVE ;
        /*0110*/                   HGMMA.64x64x16.F32.BF16 R56, R88, gdesc[UR16], R56, gsb0 ;
        /*0120*/                   WARPGROUP.DEPBAR.LE gsb0, {first} ;
        /*0130*/                   HGMMA.64x64x16.F32.BF16 R24, R92, gdesc[UR16], R24, gsb0 ;
        /*0140*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0150*/                   @P1 BRA 0x100 ;
        /*0160*/                   @P2 BRA 0x10 ;
        /*0170*/                   EXIT ;
"""


@pytest.fixture
def gemms(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(PLUGIN))
    return importlib.import_module("benchmarks.experts.gemms")


@dataclass
class OptFlags:
    """Fields of triton_kernels' ``OptFlags`` that a variant uses."""

    block_m: int = 64
    block_n: int = 256
    block_k: int = 128
    num_warps: int = 8
    num_stages: int = 3
    target_kernel_kwargs: dict[str, int] = field(default_factory=lambda: {"maxnreg": 128})
    group_m: int = 8


@pytest.mark.parametrize(
    ("requests", "rows"), [(1, {16}), (64, {16}), (100, {16, 32}), (256, {32, 64})]
)
def test_variants_have_full_or_half_rows_and_fit_an_sm(
    gemms: ModuleType, requests: int, rows: set[int]
) -> None:
    variants = gemms.grid(requests)
    assert {variant.rows for variant in variants} == rows
    assert gemms.served_rows(requests) == max(rows)

    assert len(set(variants)) == len(variants) <= 40
    for variant in variants:
        assert variant.shared_memory() <= 227 * 1024
        # A warp of the scales' layout has 32 rows of scales. Rows of all warps are read at once.
        assert variant.columns % (32 * 4) == 0
        registers = variant.registers or 255
        assert 32 * variant.warps * registers <= 65536


def test_shared_memory_equals_allocation_of_triton(gemms: ModuleType) -> None:
    """Kernels of Triton 3.6 have rows of tokens for each stage, and codes for one stage less."""
    variant = gemms.Variant(64, 256, 128, warps=8, stages=4)
    assert variant.shared_memory() == 117_760
    assert gemms.Variant(16, 256, 64, warps=4, stages=4).shared_memory() == 34_304


def test_only_variants_replace_the_choice_of_triton_kernels(
    gemms: ModuleType,
) -> None:
    flags = gemms.ChosenFlags(lambda rows, *, columns: OptFlags(block_m=rows, block_n=columns))
    assert flags(16, columns=256) == OptFlags(block_m=16)
    assert flags.last == gemms.Variant(16, 256, 128, warps=8, stages=3, registers=128)

    flags.variant = gemms.Variant(32, 128, 64, warps=4, stages=5)
    expected = OptFlags(32, 128, 64, num_warps=4, num_stages=5, target_kernel_kwargs={})
    assert flags(16, columns=256) == expected
    assert flags.last == flags.variant


def test_programs_per_sm_depend_on_registers_and_shared_memory(
    gemms: ModuleType,
) -> None:
    compiled = gemms.Compiled(175, 0, 83_968, 413, is_serial=False, hazards=0)
    assert compiled.programs(warps=8) == 1
    assert replace(compiled, registers=128).programs(warps=8) == 2
    assert replace(compiled, registers=128, shared=117_760).programs(warps=8) == 1
    # Registers are allocated 8 at a time.
    assert replace(compiled, registers=168, shared=0).programs(warps=4) == 3
    assert replace(compiled, registers=169, shared=0).programs(warps=4) == 2

    variant = gemms.Variant(64, 256, 128, warps=8, stages=3)
    assert compiled.instructions_per_value(variant) == pytest.approx(413 / 128)


def test_main_loop_is_found_in_kernel_instructions(
    gemms: ModuleType,
) -> None:
    text = SASS.format(registers=175, stack=40, first="0x1")
    compiled = gemms.parse(text, shared=83_968)
    assert compiled == gemms.Compiled(175, 40, 83_968, 6, is_serial=False, hazards=0)

    serial = gemms.parse(SASS.format(registers=128, stack=0, first="0x0"), shared=0)
    assert serial.is_serial


def test_registers_written_too_early_are_counted(gemms: ModuleType) -> None:
    text = SASS.format(registers=175, stack=0, first="0x1").replace("gsb0, 0x0", "gsb0, 0x1")
    assert gemms.parse(text, shared=0).hazards == 0
    # The instructions from R92 on read the group that is in flight after the last wait.
    hazardous = text.replace("WARPGROUP.ARRIVE", "LDS R92, [R98]")
    assert gemms.parse(hazardous, shared=0).hazards > 0


def test_bytes_to_read_cover_only_experts_with_tokens(gemms: ModuleType) -> None:
    sizes = [[33, 0, 64, 65], [1, 0, 0, 0]]
    assert gemms.reads_of_matrices(sizes, 32) == (2 + 2 + 3 + 1) / 4
    assert gemms.reads_of_matrices(sizes, 64) == (1 + 1 + 2 + 1) / 4
    # 2 of 4 experts on average. 32 values and their scale have 17 bytes.
    assert gemms.bytes_to_read("down", sizes) == 2 * 2880 * 2880 / 32 * 17


class FakeGemm:
    """Mock GEMM whose outputs depend on the columns of a variant."""

    name = "gate_up"
    layers = (None, None)

    def __init__(self, gemms: ModuleType, outputs: dict[int, Tensor]) -> None:
        served = gemms.Variant(64, 256, 128, warps=8, stages=3, registers=128)
        self.flags = gemms.ChosenFlags(None)
        self.flags.last = served
        self.outputs = outputs
        self.timed: list[Any] = []

    def output(self, variant: Any) -> Tensor:
        return self.outputs[256] if variant is None else self._of(variant)

    def _of(self, variant: Any) -> Tensor:
        if variant.columns not in self.outputs:
            raise TritonError("out of resources")
        return self.outputs[variant.columns]

    def run_layers(self, variant: Any) -> None:
        self.timed.append(variant)

    def sizes(self) -> list[list[int]]:
        return [[40] * 32]


def test_variant_is_compared_with_servers_and_timed_per_layer(
    gemms: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def time_interleaved(
        variants: dict[str, Callable[[], None]], rounds: int, calls: int
    ) -> dict[str, float]:
        assert (rounds, calls) == (3, 1)
        for call in variants.values():
            call()
        return {name: 0.4 / (1 + number) for number, name in enumerate(variants)}

    monkeypatch.setattr(gemms, "time_interleaved", time_interleaved)
    correct = torch.tensor([3.0, 4.0])
    near, wrong = correct + torch.tensor([0.0, 0.01]), torch.tensor([3.0, math.nan])
    gemm = FakeGemm(gemms, {256: correct, 128: near, 64: wrong})
    served = gemm.flags.last
    variants = [served, *(replace(served, columns=columns) for columns in (128, 64, 32))]
    compiled = gemms.Compiled(128, 0, 0, 431, is_serial=True, hazards=0)
    kept = {(256, "gate_up", None): (served, compiled)}

    rows = gemms.measure(gemm, 256, variants, kept, bandwidth=4e12, rounds=3)
    assert [row.variant.columns for row in rows] == [256, 128, 64, 32]
    assert gemm.timed == [None, *variants[1:3]]
    # 0.4 ms for two layers, then 50% and 33% of it.
    assert [row.microseconds for row in rows] == pytest.approx([200, 100, 200 / 3, None])
    assert [row.is_served for row in rows] == [True, False, False, False]
    assert rows[0].compiled == compiled and rows[1].compiled is None
    assert rows[0].is_same and not rows[1].is_same
    assert rows[1].error == pytest.approx(0.01 / 5, rel=1e-3) and math.isnan(rows[2].error)
    assert rows[0].limit == pytest.approx(32 * 5760 * 2880 / 32 * 17 / 4e12 * 1e6)
    assert rows[0].reads == 1.0


def rows_of_two_gemms(gemms: ModuleType) -> list[Any]:
    """Return rows of both GEMMs: served, with 4 warps, and a fast one that is wrong."""
    served = gemms.Variant(64, 256, 128, warps=8, stages=3, registers=128)
    narrow = gemms.Variant(64, 128, 128, warps=4, stages=3)
    compiled = gemms.Compiled(128, 0, 83_968, 431, is_serial=True, hazards=96)
    row = gemms.Row(
        requests=256,
        gemm="gate_up",
        variant=served,
        is_served=True,
        compiled=compiled,
        microseconds=160.0,
        limit=64.0,
        error=0.0,
        is_same=True,
        reads=1.0,
    )
    other = replace(row, is_served=False, compiled=None)
    gate_up = [
        row,
        replace(other, variant=replace(served, stages=4), microseconds=150.0),
        replace(other, variant=narrow, microseconds=128.0, is_same=False, error=2e-4),
        replace(other, variant=replace(narrow, rows=32), microseconds=10.0, error=0.5),
        replace(other, variant=replace(narrow, rows=16), microseconds=None, error=math.nan),
    ]
    down = [
        replace(row, gemm="down", microseconds=80.0),
        replace(other, gemm="down", variant=narrow, microseconds=90.0),
    ]
    return [*gate_up, *down]


def test_table_sorts_by_time_and_lists_failed_variants(
    gemms: ModuleType,
) -> None:
    lines = gemms.table(rows_of_two_gemms(gemms)).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    shapes = [tuple(cell.strip() for cell in line.split("|")[2:4]) for line in lines[2:]]
    assert shapes == [
        ("gate_up", "32x128x128"),
        ("gate_up", "64x128x128"),
        ("gate_up", "64x256x128"),
        ("gate_up", "**64x256x128** (served)"),
        ("gate_up", "16x128x128"),
        ("down", "**64x256x128** (served)"),
        ("down", "64x128x128"),
    ]
    assert "| 128 of 128 | 2 | 3.37 | yes | 96 | 1.00 | 160.0 | 40% | same bits |" in lines[5]
    assert "| 128.0 | 50% | differs by 2.0e-04 |" in lines[3]
    assert "did not run" in lines[6]


def test_fastest_correct_variant_is_chosen(gemms: ModuleType) -> None:
    rows = rows_of_two_gemms(gemms)
    assert gemms.fastest(rows) == [rows[2], rows[5]]
    assert gemms.summary(rows) == (
        "256 requests, microseconds of a layer: served 240.0; "
        "fastest 208.0 (gate_up 64x128x128, 4 warps, 3 stages, "
        "down 64x256x128, 8 warps, 3 stages, 128 registers)"
    )
