"""The CUDA sources compile without a GPU, and what the host does before it launches them."""

import pytest
import torch

from gptoss_kernels.nvrtc import compile_cubin
from gptoss_kernels.sink_attention import window
from gptoss_kernels.sink_attention.window import SOURCES, Shape, defines

pytestmark = pytest.mark.skipif(torch.version.cuda is None, reason="torch without CUDA has no NVRTC")


KERNELS = ["window_forward", "window_backward_q", "window_backward_kv"]
FULL_KERNELS = ["full_forward", "full_backward_q", "window_backward_kv"]


@pytest.mark.parametrize(
    ("name", "heads_per_kv", "window"),
    [
        *((name, heads, window) for name in KERNELS for heads, window in ((1, 64), (4, 128), (8, 128))),
        *((name, heads, None) for name in FULL_KERNELS for heads in (1, 2, 8)),
    ],
)
def test_a_kernel_compiles_for_every_group_of_heads_and_is_cached(name, heads_per_kv, window, monkeypatch, tmp_path):
    monkeypatch.setenv("GPTOSS_KERNELS_CACHE", str(tmp_path))
    source, macros = SOURCES / f"{name}.cu", defines(name, Shape(heads_per_kv, window))
    first = compile_cubin(source, macros, "sm_90a")
    assert first[:4] == b"\x7fELF"
    cached = list(tmp_path.glob("*.cubin"))
    assert len(cached) == 1 and cached[0].read_bytes() == first
    cached[0].write_bytes(b"from the cache")
    assert compile_cubin(source, macros, "sm_90a") == b"from the cache"


def test_a_source_that_does_not_compile_shows_the_compilers_message(tmp_path):
    broken = tmp_path / "broken.cu"
    broken.write_text("__global__ void kernel() { undeclared(); }")
    with pytest.raises(RuntimeError, match="undeclared"):
        compile_cubin(broken, {}, "sm_90a")


def test_inputs_are_made_contiguous_and_moved_to_an_address_that_copies_of_16_bytes_can_take():
    x = torch.arange(24, dtype=torch.bfloat16).view(4, 6)
    assert window._dense(x).data_ptr() == x.data_ptr()
    memory = torch.arange(25, dtype=torch.bfloat16)
    for view in (memory[1:].view(4, 6), x.t(), x[:, 2:]):
        dense = window._dense(view)
        assert torch.equal(dense, view)
        assert dense.is_contiguous()
        assert dense.data_ptr() % 16 == 0
