"""The plugin's small-batch MoE kernel: its results, and the calls of SGLang that use it."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from rl_loop.engines.sglang.config import PLUGIN, SglangConfig
from tests.support.rl_loop.engines.expert_layer_process import hashes_of_products, runs_that_differ
from tests.support.rl_loop.plugin_process import run_with_plugin, write_modules

LAYER = "sglang/srt/layers/moe/fused_moe_triton/triton_kernels_moe.py"
PROGRAM = """
from types import SimpleNamespace as S
import gptoss_small_batch_moe as ours
import torch

said = []
ours.multiply = lambda x, *weights, **kind: said.append(("ours", sorted(kind)))
ours.sum_experts = lambda of_experts, sums: said.append((list(of_experts.shape), list(sums.shape)))
ours.install()
from sglang.srt.layers.moe.fused_moe_triton import triton_kernels_moe as layer


class HopperMXScaleLayout:
    num_warps = 4


def call(tokens, *, kind, **changes):
    entries, experts, width = 2 * tokens, 4, 64
    index = S(src_indx=torch.zeros(entries), dst_indx=torch.zeros(entries))
    routes = S(n_expts_tot=experts, n_expts_act=2, gate_scal=torch.zeros(entries))
    storage = S(layout=HopperMXScaleLayout(), data=torch.zeros(1, 1, 1))
    options = {"precision_config": S(weight_scale=S(storage=storage)), "y": torch.zeros(1, tokens, width)}
    if kind == "first":
        options |= {"gather_indx": index, "fused_activation": S(fn_args=(1.7, 7.0)), "gammas": None}
    else:
        options |= {"scatter_indx": index, "gammas": torch.zeros(entries)}
    options |= changes
    x = options.pop("x", torch.zeros(entries, width))
    said.clear()
    result = layer.matmul_ogs(x, S(storage=storage), torch.zeros(experts, width), routes, **options)
    assert result is options["y"] or result == "theirs", result
    print(kind, tokens, *changes, *said, "" if said else result)


for kind in ("first", "second"):
    call(1, kind=kind)
    call(128, kind=kind)
    call(130, kind=kind)
call(1, kind="second", gammas=None)
call(1, kind="first", gammas=torch.zeros(2))
call(1, kind="first", y=None)
call(1, kind="first", x=torch.zeros(64, 2).T)
call(1, kind="first", precision_config=S(weight_scale=None))
call(0, kind="first")
adapted = S(weight_scale=S(storage=S(layout=HopperMXScaleLayout(), data=torch.zeros(1, 1, 1))))
adapted.gptoss_adapter = "an adapter"
call(130, kind="first", precision_config=adapted)
call(130, kind="second", precision_config=adapted)
call(0, kind="first", precision_config=adapted)
try:
    call(1, kind="first", precision_config=adapted, gammas=torch.zeros(2))
except RuntimeError as error:
    print(error)
"""


def test_moe_kernel_takes_only_small_batches_of_moe_layers(tmp_path: Path) -> None:
    theirs = 'def matmul_ogs(x, w, bias, routing_data, **options):\n    return "theirs"\n'
    write_modules(tmp_path, {LAYER: theirs})
    lines = run_with_plugin("-c", PROGRAM, packages=tmp_path).splitlines()
    assert [line.strip() for line in lines] == [
        "first 1 ('ours', ['adapter', 'swiglu'])",
        "first 128 ('ours', ['adapter', 'swiglu'])",
        "first 130 theirs",
        "second 1 ('ours', ['adapter', 'gates']) ([1, 2, 64], [1, 64])",
        "second 128 ('ours', ['adapter', 'gates']) ([128, 2, 64], [128, 64])",
        "second 130 theirs",
        "second 1 gammas theirs",
        "first 1 gammas theirs",
        "first 1 y theirs",
        "first 1 x theirs",
        "first 1 precision_config theirs",
        "first 0 theirs",
        # with adapters, which triton_kernels would leave out
        "first 130 precision_config ('ours', ['adapter', 'swiglu'])",
        "second 130 precision_config ('ours', ['adapter', 'gates']) ([130, 2, 64], [130, 64])",
        "first 0 precision_config theirs",
        "a product of MXFP4 experts would leave out their adapters",
    ]


def test_moe_kernel_equals_dequantized_products() -> None:
    said = run_with_plugin(
        "-m", "tests.support.rl_loop.engines.expert_matmul_interpreted", interpreted=True
    )
    assert said == "both products are what they mean\n"


def test_moe_kernel_adds_adapters_as_the_trainer_does() -> None:
    """Both GEMMs with adapters are what they mean, and at most 2% of outputs differ from training."""
    said = run_with_plugin("-m", "tests.support.rl_loop.engines.adapted_experts", interpreted=True)
    share = float(said.removeprefix("largest share of different outputs: "))
    assert share <= 0.02, share


COMPILED = "tests.support.rl_loop.engines.expert_matmul_compiled"


def test_moe_kernel_compiles_for_hopper() -> None:
    assert run_with_plugin("-m", COMPILED) == "compiled 2 variants\n"


@pytest.mark.slow
def test_moe_kernel_has_eight_variants_for_hopper() -> None:
    assert run_with_plugin("-m", COMPILED, "all") == "compiled 8 variants\n"


def test_mxfp4_servers_use_the_moe_kernel() -> None:
    patches = SglangConfig(quantization="mxfp4").environment["GPTOSS_SGLANG_PATCHES"].split(",")
    assert "small_batch_moe" in patches
    assert "small_batch_moe" not in SglangConfig().environment["GPTOSS_SGLANG_PATCHES"]


@pytest.mark.gpu
def test_moe_kernel_adds_adapters_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreted test with the real kernels and Transformer Engine's grouped GEMMs, also for a prefill."""
    monkeypatch.syspath_prepend(str(PLUGIN))
    adapted_experts = importlib.import_module("tests.support.rl_loop.engines.adapted_experts")
    share = adapted_experts.largest_share_on_gpu()
    print(f"largest share of different outputs: {share:.5f}")
    assert share <= 0.02, share


@pytest.mark.gpu
def test_moe_kernel_is_bitwise_equal_to_triton_kernels() -> None:
    """The products of both matrices equal those of triton_kernels, at the width of GPT-OSS."""
    pytest.importorskip("triton_kernels", reason="sglang-kernel is not installed")
    ours = hashes_of_products("gptoss_expert_values", "gptoss_small_batch_moe")
    assert ours == hashes_of_products()


@pytest.mark.gpu
def test_moe_kernel_is_deterministic() -> None:
    """A register that is overwritten before a tensor core reads it changes only some runs.

    See docs/quantization.md.
    """
    pytest.importorskip("triton_kernels", reason="sglang-kernel is not installed")
    patches = ("gptoss_ptxas", "gptoss_expert_values", "gptoss_moe_occupancy")
    for few_tokens in ((), ("gptoss_small_batch_moe",)):
        differing = runs_that_differ(*patches, *few_tokens, runs=400, tokens=(8, 64, 256))
        assert not any(differing), differing
