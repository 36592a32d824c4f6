"""The plugin's limit on registers of expert products, in triton_kernels' place and against it."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch

from rl_loop.engines.sglang.config import SglangConfig
from tests.rl_loop.plugin_process import plugin_module, run_with_plugin

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
    module = tmp_path / "triton_kernels/matmul_ogs.py"
    module.parent.mkdir()
    module.write_text(MATMUL)
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
    layers = importlib.import_module("gptoss_expert_layers")
    matmul_ogs = importlib.import_module("triton_kernels.matmul_ogs")
    monkeypatch.setattr(matmul_ogs, "make_opt_flags", matmul_ogs.make_opt_flags)

    before = layer_of_experts(layers, matmul_ogs, tokens)
    products.install()
    assert torch.equal(layer_of_experts(layers, matmul_ogs, tokens), before)
    assert before.isfinite().all() and before.any()


def layer_of_experts(layers: ModuleType, matmul_ogs: ModuleType, tokens: int) -> torch.Tensor:
    """Return what the experts make of random tokens, the same every time: bf16 [tokens, width]."""
    from triton_kernels.numerics import InFlexData
    from triton_kernels.swiglu import swiglu_fn

    routing = importlib.import_module("gptoss_expert_routing")
    layout = importlib.import_module("gptoss_hopper_layout")
    generator = torch.Generator("cuda").manual_seed(tokens)
    experts, width = 32, 2880

    def random_bytes(*shape: int, low: int = 0, high: int = 256) -> torch.Tensor:
        return torch.randint(
            low, high, shape, dtype=torch.uint8, device="cuda", generator=generator
        )

    def matrices(rows: int) -> tuple[object, object]:
        values = random_bytes(experts, *layout.value_storage_shape(rows, width // 2))
        shape = layout.scale_storage_shape(rows, width // 32)
        scales = random_bytes(experts, *shape, low=116, high=120)
        values, scales = layers.wrap(values, scales, (experts, rows, width // 2))
        flex = matmul_ogs.FlexCtx(rhs_data=InFlexData())
        return values, matmul_ogs.PrecisionConfig(weight_scale=scales, flex_ctx=flex)

    rows = torch.randn(tokens, width, device="cuda", generator=generator).bfloat16()
    logits = torch.randn(tokens, experts, device="cuda", generator=generator).bfloat16()
    topk = importlib.import_module("sglang.srt.layers.moe.topk")
    if routing.fits(logits):
        data, gather, scatter = routing.as_routing_data(topk, routing.route(logits, 4), 4)
    else:
        data, gather, scatter = topk.routing(logits, 4)

    swiglu = matmul_ogs.FusedActivation(
        matmul_ogs.FnSpecs("swiglu", swiglu_fn, ("alpha", "limit"), reduction_n=2), (1.702, 7.0)
    )
    bias = torch.zeros(experts, 2 * width, device="cuda")
    gate_up, config = matrices(2 * width)
    hidden = matmul_ogs.matmul_ogs(
        rows,
        gate_up,
        bias,
        data,
        gather_indx=gather,
        precision_config=config,
        fused_activation=swiglu,
    )
    down, config = matrices(width)
    return matmul_ogs.matmul_ogs(
        hidden, down, bias[:, :width].contiguous(), data, scatter_indx=scatter, precision_config=config,
        gammas=data.gate_scal,
    )  # fmt: skip
