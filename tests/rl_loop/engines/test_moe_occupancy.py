"""The plugin's kernel shapes for expert GEMMs: their choice, and results against triton_kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_loop.engines.sglang.config import SglangConfig
from tests.support.rl_loop.engines.expert_layer_process import hashes_of_products
from tests.support.rl_loop.plugin_process import run_with_plugin, write_modules

MATMUL = """
from dataclasses import dataclass, field


@dataclass
class OptFlags:
    block_m: int
    block_n: int = 1
    block_k: int = 2
    num_warps: int = 3
    num_stages: int = 9
    target_kernel_kwargs: dict = field(default_factory=lambda: {"other": 0})


def make_opt_flags(out_dtype, lhs_dtype, rhs_dtype, precision_config, batch_size, m, n, k, *, last):
    assert (out_dtype, lhs_dtype, rhs_dtype, batch_size, k, last) == (1, 2, 3, 4, 5, 6)
    return OptFlags(m)
"""
PROGRAM = """
from types import SimpleNamespace as S
import gptoss_moe_occupancy
gptoss_moe_occupancy.install()
from triton_kernels import matmul_ogs
from triton_kernels.matmul_ogs_details import _matmul_ogs
assert _matmul_ogs.unswizzle_mxfp4_scale_hopper is gptoss_moe_occupancy.scales_of_program


class HopperMXScaleLayout:
    def __init__(self, num_warps):
        self.num_warps = num_warps


class StridedLayout:
    pass


def scales(layout):
    return S(weight_scale=S(storage=S(layout=layout)))


ours = scales(HopperMXScaleLayout(4))
others = [scales(HopperMXScaleLayout(8)), scales(StridedLayout()), S(weight_scale=None)]
cases = [(rows, outputs, ours) for rows in (16, 32, 64, 128, 8) for outputs in (5760, 2880)]
for rows, outputs, config in cases + [(16, 2880, other) for other in others]:
    flags = matmul_ogs.make_opt_flags(1, 2, 3, config, 4, rows, outputs, 5, last=6)
    shape = (flags.block_m, flags.block_n, flags.block_k, flags.num_warps, flags.num_stages)
    assert flags.target_kernel_kwargs.pop("other") == 0
    print(outputs, *shape, flags.target_kernel_kwargs)
"""


def test_expert_gemms_of_our_layout_only_get_tuned_shapes(
    tmp_path: Path,
) -> None:
    modules = {
        "triton_kernels/matmul_ogs.py": MATMUL,
        "triton_kernels/matmul_ogs_details/_matmul_ogs.py": "unswizzle_mxfp4_scale_hopper = None\n",
    }
    write_modules(tmp_path, modules)
    assert run_with_plugin("-c", PROGRAM, packages=tmp_path).splitlines() == [
        "5760 16 256 64 4 4 {'maxnreg': 128}",
        "2880 16 128 128 4 4 {'maxnreg': 128}",
        "5760 32 256 64 4 4 {}",
        "2880 32 128 128 4 4 {'maxnreg': 168}",
        "5760 64 256 64 4 4 {}",
        "2880 64 128 128 4 4 {}",
        "5760 128 256 128 8 4 {}",
        "2880 128 256 128 8 4 {}",
        # 8 rows and other layouts keep the shapes of triton_kernels.
        "5760 8 1 2 3 9 {}",
        "2880 8 1 2 3 9 {}",
        *["2880 16 1 2 3 9 {}"] * 3,
    ]


def test_expert_gemms_find_their_scales_for_any_number_of_warps() -> None:
    said = run_with_plugin(
        "-m", "tests.support.rl_loop.engines.expert_scales_interpreted", interpreted=True
    )
    assert said == "every scale is where the matrix has it\n"


@pytest.mark.parametrize("deterministic", [False, True])
def test_mxfp4_servers_use_the_tuned_gemm_shapes(deterministic: bool) -> None:
    settings = SglangConfig(quantization="mxfp4", deterministic=deterministic)
    patches = settings.environment["GPTOSS_SGLANG_PATCHES"].split(",")
    assert "moe_occupancy" in patches
    assert ("fused_routing" in patches) == (not deterministic)
    assert "moe_occupancy" not in SglangConfig().environment["GPTOSS_SGLANG_PATCHES"]


@pytest.mark.gpu
def test_tuned_gemms_are_bitwise_equal_to_triton_kernels() -> None:
    """The products equal those with triton_kernels' shapes, at the width of GPT-OSS."""
    pytest.importorskip("triton_kernels", reason="sglang-kernel is not installed")
    assert hashes_of_products("gptoss_moe_occupancy") == hashes_of_products()
