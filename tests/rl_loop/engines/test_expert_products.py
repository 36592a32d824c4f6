"""The plugin's limit on registers of expert products, in triton_kernels' place and against it."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch

from rl_loop.engines.sglang.config import SglangConfig
from tests.rl_loop.engines.expert_layer import layer_of_experts
from tests.rl_loop.plugin_process import plugin_module, run_with_plugin, write_modules

MATMUL = """
from dataclasses import dataclass, field


@dataclass
class OptFlags:
    block_m: int
    num_stages: int = 4
    target_kernel_kwargs: dict = field(default_factory=dict)


def make_opt_flags(out_dtype, lhs_dtype, rhs_dtype, precision_config, batch_size, m, n, *, block_k):
    assert (out_dtype, lhs_dtype, rhs_dtype, batch_size, n, block_k) == (1, 2, 3, 4, 5, 6)
    return OptFlags(m)
"""
PROGRAM = """
from types import SimpleNamespace as S
import gptoss_expert_products
gptoss_expert_products.install()
from triton_kernels import matmul_ogs


class HopperMXScaleLayout:
    def __init__(self, num_warps):
        self.num_warps = num_warps


class StridedLayout:
    pass


def scales(layout):
    return S(weight_scale=S(storage=S(layout=layout)))


laid_out = scales(HopperMXScaleLayout(8))
others = [scales(HopperMXScaleLayout(4)), scales(StridedLayout()), S(weight_scale=None)]
cases = [(rows, laid_out) for rows in (16, 32, 64, 128)] + [(16, other) for other in others]
for rows, config in cases:
    flags = matmul_ogs.make_opt_flags(1, 2, 3, config, 4, rows, 5, block_k=6)
    print(flags.block_m, flags.num_stages, flags.target_kernel_kwargs)
"""


def test_products_of_few_rows_are_limited_and_others_are_as_they_were(tmp_path: Path) -> None:
    write_modules(tmp_path, {"triton_kernels/matmul_ogs.py": MATMUL})
    assert run_with_plugin("-c", PROGRAM, packages=tmp_path).splitlines() == [
        "16 4 {'maxnreg': 128}",
        "32 4 {'maxnreg': 128}",
        "64 3 {'maxnreg': 128}",
        "128 4 {}",
        "16 4 {}",
        "16 4 {}",
        "16 4 {}",
    ]


@pytest.mark.parametrize("deterministic", [False, True])
def test_servers_of_packed_experts_have_it(deterministic: bool) -> None:
    settings = SglangConfig(quantization="mxfp4", deterministic=deterministic)
    mends = settings.environment["GPTOSS_SGLANG_MENDS"].split(",")
    assert "quick_products" in mends
    assert ("quick_routing" in mends) == (not deterministic)
    assert "quick_products" not in SglangConfig().environment["GPTOSS_SGLANG_MENDS"]


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return plugin_module("gptoss_expert_products", monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 64, 100, 256, 4096])
def test_limited_products_are_the_same_to_the_last_bit(
    products: ModuleType, monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    """Of both matrices of a layer of GPT-OSS's width."""
    matmul_ogs = importlib.import_module("triton_kernels.matmul_ogs")
    monkeypatch.setattr(matmul_ogs, "make_opt_flags", matmul_ogs.make_opt_flags)

    before = layer_of_experts(tokens)
    products.install()
    assert torch.equal(layer_of_experts(tokens), before)
    assert before.isfinite().all() and before.any()
