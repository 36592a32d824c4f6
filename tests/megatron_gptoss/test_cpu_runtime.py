from __future__ import annotations

import importlib

import pytest
import torch

from megatron_gptoss import cpu_runtime


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="the shim is inactive where CUDA is available"
)
class TestShim:
    def test_every_patched_module_exists_and_has_the_proxy(self) -> None:
        cpu_runtime.enable_cpu_runtime()
        for name in cpu_runtime.PATCHED_MODULES:
            module = importlib.import_module(f"megatron.core.{name}")
            assert module.torch is not torch, f"megatron.core.{name} was not reached"
            assert module.torch.cuda.current_device() == torch.device("cpu")

    def test_nothing_outside_megatron_changes(self) -> None:
        cpu_runtime.enable_cpu_runtime()
        assert not torch.cuda.is_available()
        with pytest.raises((RuntimeError, AssertionError)):
            torch.zeros(1).cuda()
        with pytest.raises((RuntimeError, AssertionError)):
            torch.zeros(1, device="cuda")
        assert torch.zeros(1).type() == "torch.FloatTensor"

    def test_second_cpu_patch_call_changes_nothing(self) -> None:
        cpu_runtime.enable_cpu_runtime()
        before = torch.Tensor.type
        cpu_runtime.enable_cpu_runtime()
        assert torch.Tensor.type is before
