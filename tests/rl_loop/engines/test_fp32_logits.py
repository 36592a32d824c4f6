"""Logits of SGLang's servers in fp32: the plugin's product and its supported output layers."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch

from rl_loop.engines.sglang.config import PLUGIN, SglangConfig
from tests.support.rl_loop.plugin_process import run_with_plugin, write_modules

LOGITS_PROCESSOR = """
import torch


def should_apply_lm_head_quant_method(lm_head, quant_method):
    return quant_method is not None


class LogitsProcessor(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.use_fp32_lm_head, self.rl_on_policy_target = False, None

    def _compute_lm_head(self, hidden_states, lm_head, embedding_bias=None):
        return "SGLang's"
"""
PROGRAM = """
import os
from types import SimpleNamespace
import torch
import gptoss_sglang

os.environ["GPTOSS_SGLANG_PATCHES"] = "fp32_logits"
gptoss_sglang.register()
from sglang.srt.layers.logits_processor import LogitsProcessor

torch.manual_seed(0)
hidden = torch.randn(5, 64).bfloat16()
weight = (8 * torch.randn(40, 64)).bfloat16()


def compute(bias=None, weight=weight, attributes=(), **parts):
    processor = LogitsProcessor()
    for name, value in dict(attributes).items():
        setattr(processor, name, value)
    head = SimpleNamespace(weight=weight, quant_method=None)
    for name, value in parts.items():
        setattr(head, name, value)
    return processor._compute_lm_head(hidden, head, bias)


logits = compute()
exact = hidden.double() @ weight.double().T
print(logits.dtype, ((logits - exact).abs().max() / exact.abs().max()).item() < 1e-6)

for case in (
    dict(bias=torch.zeros(40)),
    dict(weight=weight.float()),
    dict(apply_lora=print),
    dict(quant_method=object()),
    dict(attributes=dict(use_fp32_lm_head=True)),
    dict(attributes=dict(rl_on_policy_target="fsdp")),
):
    assert compute(**case) == "SGLang's", case
print("others are SGLang's")
"""


def test_fp32_logits_serve_plain_output_layers_only(tmp_path: Path) -> None:
    modules = {
        "sglang/srt/layers/logits_processor.py": LOGITS_PROCESSOR,
        "sglang/version.py": '__version__ = "0.5.17"',
    }
    write_modules(tmp_path, modules)
    printed = run_with_plugin("-c", PROGRAM, packages=tmp_path)
    assert printed.splitlines() == ["torch.float32 True", "others are SGLang's"]


def test_fp32_logits_are_the_default_on_gpus() -> None:
    def has_patch(**settings: object) -> bool:
        patches = SglangConfig(**settings).environment["GPTOSS_SGLANG_PATCHES"].split(",")
        return "fp32_logits" in patches

    assert has_patch()
    assert has_patch(attention_backend="triton")
    assert has_patch(colocated=True, weight_sync="cuda_ipc", quantization="mxfp4")
    assert has_patch(fp32_logits=True)
    assert not has_patch(fp32_logits=False)
    assert not has_patch(attention_backend="triton", deterministic=True)
    assert not has_patch(attention_backend="triton", arguments=["--device", "cpu"])


def test_fp32_logits_are_rejected_where_unsupported() -> None:
    with pytest.raises(ValueError, match=r"rollout\.engine\.fp32_logits.* deterministic"):
        SglangConfig(fp32_logits=True, deterministic=True)
    with pytest.raises(ValueError, match=r"starts servers on CPUs\. Leave fp32_logits out"):
        SglangConfig(fp32_logits=True, arguments=["--device", "cpu"])


@pytest.fixture
def logits_module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(PLUGIN))
    return importlib.import_module("gptoss_logits")


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 64, 256])
def test_fp32_product_is_not_rounded_on_a_gpu(logits_module: ModuleType, tokens: int) -> None:
    """The error is that of an fp32 sum. The error of a bf16 result would be 1000x larger."""
    hidden_size, vocabulary = 2880, 20_000
    generator = torch.Generator("cuda").manual_seed(tokens)
    hidden = torch.randn(tokens, hidden_size, device="cuda", generator=generator).bfloat16()
    weight = torch.randn(vocabulary, hidden_size, device="cuda", generator=generator).bfloat16()
    exact = hidden.double() @ weight.double().t()

    logits = logits_module.fp32_product(hidden, weight)

    assert logits.dtype == torch.float32
    # Each rounding is at most 2^-24 of a partial sum. The sum of absolute products bounds it.
    magnitude = hidden.double().abs() @ weight.double().abs().t()
    bound = hidden_size * 2.0**-24 * magnitude
    assert ((logits - exact).abs() <= bound).all()
    assert ((logits.bfloat16() - exact).abs() > bound).any()
