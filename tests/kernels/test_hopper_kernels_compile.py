"""CUDA sources compile without a GPU, and the driver gets correct arguments."""

import ctypes
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from gptoss_kernels import nvrtc
from gptoss_kernels.nvrtc import compile_cubin
from gptoss_kernels.sink_attention import hopper
from gptoss_kernels.sink_attention.hopper import (
    SOURCES,
    KernelShape,
    _items,
    macros,
    pad_heads,
    supported_heads_per_kv,
    unpad_heads,
)
from gptoss_kernels.sink_attention.layout import PackedLayout
from gptoss_kernels.sink_attention.reference import reference_backward, reference_forward

pytestmark = pytest.mark.skipif(
    torch.version.cuda is None, reason="torch without CUDA has no NVRTC"
)


KERNELS = ["window_forward", "window_backward_q", "backward_kv"]
FULL_KERNELS = ["full_forward", "full_backward_q", "backward_kv"]


@pytest.mark.parametrize(
    ("name", "heads_per_kv", "window"),
    [
        *((name, heads, window) for name in KERNELS for heads, window in ((1, 64), (8, 128))),
        *((name, heads, None) for name in FULL_KERNELS for heads in (1, 3, 12)),
        *(pytest.param(name, 4, 128, marks=pytest.mark.slow) for name in KERNELS),
        *(
            pytest.param(name, heads, None, marks=pytest.mark.slow)
            for name in FULL_KERNELS
            for heads in (2, 4, 8)
        ),
    ],
)
def test_kernel_compiles_for_all_head_groups_and_is_cached(
    name, heads_per_kv, window, monkeypatch, tmp_path
):
    monkeypatch.setenv("GPTOSS_KERNELS_CACHE", str(tmp_path))
    source = SOURCES / f"{name}.cu"
    defines = macros(name, KernelShape(heads_per_kv, window))
    first = compile_cubin(source, defines, "sm_90a")
    assert first[:4] == b"\x7fELF"
    cached = list(tmp_path.glob("*.cubin"))
    assert len(cached) == 1 and cached[0].read_bytes() == first
    cached[0].write_bytes(b"from the cache")
    assert compile_cubin(source, defines, "sm_90a") == b"from the cache"


@pytest.mark.parametrize(
    ("heads_per_kv", "window", "supported"),
    [
        *((8, 128, 8), (4, 128, 4), (3, 128, 4), (1, 128, 4), (7, 128, 8), (9, 128, 12)),
        *((1, 64, 1), (3, 64, 3), (3, None, 3), (8, 400, None)),
    ],
)
def test_heads_are_added_until_a_window_fits(heads_per_kv, window, supported):
    assert supported_heads_per_kv(heads_per_kv, window) == supported


def test_added_heads_change_no_output_and_no_gradient():
    torch.manual_seed(0)
    kv_heads, window, scale = 3, 5, 0.3
    layout = PackedLayout(torch.tensor([0, 9, 20]), longest=11)
    q, grad_o = torch.randn(2, 20, 9, 8, dtype=torch.float64)
    k, v = torch.randn(2, 20, kv_heads, 8, dtype=torch.float64)
    sinks = torch.randn(9, dtype=torch.float64)
    o, lse = reference_forward(q, k, v, sinks, layout, window, scale)
    want = reference_backward((q, k, v, sinks, o, lse), grad_o, layout, window, scale)

    def pad(x):
        return pad_heads(x, kv_heads, 4)

    def unpad(x):
        return unpad_heads(x, kv_heads, 3)

    padded_sinks = pad(sinks[None])[0]
    padded_o, padded_lse = reference_forward(pad(q), k, v, padded_sinks, layout, window, scale)
    assert torch.equal(unpad(padded_o), o) and torch.equal(unpad(padded_lse), lse)

    saved = (pad(q), k, v, padded_sinks, pad(o), pad(lse))
    got = reference_backward(saved, pad(grad_o), layout, window, scale)
    got = (unpad(got[0]), *got[1:3], unpad(got[3][None])[0])
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_compile_error_contains_the_compiler_message(tmp_path):
    broken = tmp_path / "broken.cu"
    broken.write_text("__global__ void kernel() { undeclared(); }")
    with pytest.raises(RuntimeError, match="undeclared"):
        compile_cubin(broken, {}, "sm_90a")


@pytest.mark.parametrize(
    ("name", "blocks"),
    [("full_forward", 4), ("full_backward_q", 4), ("backward_kv", 3)],
)
def test_shared_memory_fits_all_blocks_that_registers_allow(name, blocks):
    assert blocks * (KernelShape(8, None).shared_bytes(name) + 1024) <= 228 * 1024


def test_items_of_longest_sequence_are_first_and_adjacent():
    layout = PackedLayout(torch.tensor([0, 10, 40, 70]), 30)
    items, count = _items(layout, 16, torch.device("cpu"), "sequence")
    assert count == 5
    assert items.tolist() == [
        [40, 70, 56, 0],
        [40, 70, 40, 0],
        [10, 40, 26, 0],
        [10, 40, 10, 0],
        [0, 10, 0, 0],
    ]


@pytest.fixture
def encoding_calls(monkeypatch):
    """Record calls of cuTensorMapEncodeTiled, which returns ``encoding_calls.status``."""
    calls = SimpleNamespace(arguments=[], status=0)

    def encode(*arguments):
        calls.arguments.append(arguments)
        return calls.status

    driver = SimpleNamespace(cuTensorMapEncodeTiled=encode, cuGetErrorString=lambda status, text: 0)
    monkeypatch.setattr(nvrtc, "_driver", lambda: driver)
    nvrtc._encode.cache_clear()
    yield calls
    nvrtc._encode.cache_clear()


def test_tensor_map_is_aligned_and_has_sizes_strides_and_box(encoding_calls):
    tensor = torch.empty(1000, 16, 64, dtype=torch.bfloat16)
    tensor_map = nvrtc.tensor_map(tensor, (8, 8))

    ((where, _, dimensions, address, sizes, strides, box, steps, *_),) = encoding_calls.arguments
    assert dimensions == 3 and address.value == tensor.data_ptr()
    assert ctypes.addressof(where) % 64 == 0 and ctypes.sizeof(where) == 128
    assert (list(sizes), list(strides)) == ([64, 16, 1000], [128, 2048])
    assert (list(box), list(steps)) == ([64, 8, 8], [1, 1, 1])
    assert tensor_map.encoded is where


def test_tensor_map_is_encoded_once_and_keeps_its_tensor_alive(encoding_calls):
    tensor = torch.empty(1000, 16, 64, dtype=torch.bfloat16)
    first = nvrtc.tensor_map(tensor, (8, 8))
    assert nvrtc.tensor_map(tensor, (8, 8)).encoded is first.encoded
    assert nvrtc.tensor_map(tensor[:999], (8, 8)).encoded is not first.encoded
    assert len(encoding_calls.arguments) == 2

    # the map contains an address, so it must keep the tensor's memory alive
    alive = weakref.ref(tensor)
    del tensor
    gc.collect()
    assert alive() is first.tensor


def test_a_tensor_map_that_the_driver_rejects_is_described(encoding_calls):
    encoding_calls.status = 1
    tensor = torch.empty(1000, 16, 64, dtype=torch.bfloat16)
    with pytest.raises(
        RuntimeError, match=r"describe \[1000, 16, 64\] at 0x[0-9a-f]+ for boxes of \[8, 8\]"
    ):
        nvrtc.tensor_map(tensor, (8, 8))


def test_inputs_become_contiguous_and_16_byte_aligned():
    x = torch.arange(24, dtype=torch.bfloat16).view(4, 6)
    assert hopper._dense(x).data_ptr() == x.data_ptr()
    memory = torch.arange(25, dtype=torch.bfloat16)
    for view in (memory[1:].view(4, 6), x.t(), x[:, 2:]):
        dense = hopper._dense(view)
        assert torch.equal(dense, view)
        assert dense.is_contiguous()
        assert dense.data_ptr() % 16 == 0
