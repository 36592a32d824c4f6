"""The CUDA sources compile without a GPU."""

import pytest
import torch

from gptoss_kernels.nvrtc import compile_cubin
from gptoss_kernels.sink_attention.window import SOURCES, Shape, defines

pytestmark = pytest.mark.skipif(torch.version.cuda is None, reason="torch without CUDA has no NVRTC")


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("heads_per_kv", [1, 4, 8])
@pytest.mark.parametrize("name", ["window_forward", "window_backward_q", "window_backward_kv"])
def test_a_kernel_compiles_for_every_group_of_heads(name, heads_per_kv, architecture, monkeypatch, tmp_path):
    monkeypatch.setenv("GPTOSS_KERNELS_CACHE", str(tmp_path))
    shape = Shape(head_size=64, heads_per_kv=heads_per_kv, window=128)
    cubin = compile_cubin(SOURCES / f"{name}.cu", defines(name, shape), architecture)
    assert cubin[:4] == b"\x7fELF"


@pytest.mark.parametrize("heads_per_kv", [2, 8])
@pytest.mark.parametrize("name", ["window_forward_hopper", "window_backward_q_hopper", "window_backward_kv_hopper"])
def test_a_hopper_kernel_compiles_and_is_cached(name, heads_per_kv, monkeypatch, tmp_path):
    monkeypatch.setenv("GPTOSS_KERNELS_CACHE", str(tmp_path))
    source, macros = SOURCES / f"{name}.cu", defines(name, Shape(head_size=64, heads_per_kv=heads_per_kv, window=128))
    first = compile_cubin(source, macros, "sm_90a")
    cached = list(tmp_path.glob("*.cubin"))
    assert len(cached) == 1 and cached[0].read_bytes() == first
    cached[0].write_bytes(b"from the cache")
    assert compile_cubin(source, macros, "sm_90a") == b"from the cache"


def test_a_source_that_does_not_compile_shows_the_compilers_message(tmp_path):
    broken = tmp_path / "broken.cu"
    broken.write_text("__global__ void kernel() { undeclared(); }")
    with pytest.raises(RuntimeError, match="undeclared"):
        compile_cubin(broken, {}, "sm_90a")
