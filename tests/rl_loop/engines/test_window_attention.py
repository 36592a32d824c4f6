"""The plugin's window attention: in Triton's interpreter, in SGLang and against FlashAttention."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_loop.engines.sglang.config import PLUGIN, SglangConfig
from tests.support.rl_loop.plugin_process import run_with_plugin, write_modules

ROOT = Path(__file__).parents[3]
WINDOW = 128

BACKEND = """
import torch

calls = []


def flash_attn_with_kvcache(q=None, *arguments, **options):
    calls.append((q, arguments, options))
    return "theirs"
"""
PROGRAM = """
import os
import torch
import gptoss_sglang
os.environ["GPTOSS_SGLANG_PATCHES"] = "fused_window_attention"
gptoss_sglang.register()
import gptoss_window_attention as attention
from sglang.srt.layers.attention import flashattention_backend as backend

REQUESTS, HEADS, KEY_HEADS, SIZE, SLOTS = 3, 16, 2, 64, 40
bf16, integers = {"dtype": torch.bfloat16}, {"dtype": torch.int32}
given = []
attention.attend_to_window = lambda *tensors, **options: given.append((tensors, options))
PLAIN = dict(
    q=torch.zeros(REQUESTS, HEADS, SIZE, **bf16),
    k_cache=torch.zeros(SLOTS, 1, KEY_HEADS, SIZE, **bf16),
    v_cache=torch.zeros(SLOTS, 1, KEY_HEADS, SIZE, **bf16),
    page_table=torch.zeros(REQUESTS, 9, **integers),
    cache_seqlens=torch.ones(REQUESTS, **integers),
    cu_seqlens_q=torch.arange(REQUESTS + 1, **integers),
    max_seqlen_q=1,
    softmax_scale=0.125,
    causal=True,
    window_size=(127, 0),
    softcap=0.0,
    return_softmax_lse=False,
    num_splits=0,
    out=None,
    ver=3,
    scheduler_metadata=None,
    sinks=torch.zeros(HEADS, **bf16),
)


def call(options):
    backend.calls.clear()
    given.clear()
    result = backend.flash_attn_with_kvcache(**options)
    assert len(given) + len(backend.calls) == 1
    if given:
        return "ours", result
    (q, arguments, others), = backend.calls
    assert arguments == () and q is options["q"]
    assert all(others[name] is options[name] for name in options.keys() - {"q"})
    return result, result


who, result = call(PLAIN)
(queries, keys, values, table, lengths, outputs), options = given[0]
print(who, result is outputs, outputs.shape == PLAIN["q"].shape, outputs.dtype)
print(queries is PLAIN["q"], table is PLAIN["page_table"], lengths is PLAIN["cache_seqlens"])
print(keys.shape == values.shape == (SLOTS, KEY_HEADS, SIZE))
print(keys.data_ptr() == PLAIN["k_cache"].data_ptr(), values.data_ptr() == PLAIN["v_cache"].data_ptr())
print(options["window"], options["scale"], options["sinks"] is PLAIN["sinks"])

out = torch.zeros(REQUESTS, HEADS, SIZE, **bf16)
print(call(PLAIN | {"out": out})[1] is out, given[0][0][5] is out)
print(call({name: value for name, value in PLAIN.items() if name != "sinks"})[0], given[0][1]["sinks"])
wider = torch.zeros(SLOTS, 1, KEY_HEADS + 1, SIZE, **bf16)[:, :, 1:]
for case in ({"window_size": (0, 0)}, {"window_size": (255, 0)}, {"num_splits": 1}, {"k_cache": wider}):
    assert call(PLAIN | case)[0] == "ours", case



def pools(shape):
    return {name: torch.zeros(shape, **bf16) for name in ("k_cache", "v_cache")}


print("cases for FlashAttention")
floats = torch.zeros(REQUESTS, HEADS, SIZE)
for case in (
    {"window_size": (-1, -1)},
    {"window_size": (-1, 0)},
    {"window_size": (127, 127)},
    {"window_size": (256, 0)},
    {"ver": 4},
    {"causal": False},
    {"softcap": 30.0},
    {"return_softmax_lse": True},
    {"scheduler_metadata": torch.zeros(4, **integers)},
    {"max_seqlen_q": 2},
    {"cache_seqlens": torch.ones(1, **integers)},
    {"cache_seqlens": torch.ones(REQUESTS, dtype=torch.int64)},
    {"cache_seqlens": torch.ones(2 * REQUESTS, **integers)[::2]},
    {"q": PLAIN["q"][:0], "cache_seqlens": PLAIN["cache_seqlens"][:0]},
    {"q": floats},
    {"q": torch.zeros(HEADS, REQUESTS, SIZE, **bf16).transpose(0, 1)},
    {"out": floats},
    {"out": torch.zeros(REQUESTS, HEADS * SIZE, **bf16)},
    {"sinks": torch.zeros(2 * HEADS, **bf16)[::2]},
    {"page_table": PLAIN["page_table"].long()},
    {"page_table": torch.zeros(9, REQUESTS, **integers).T},
    # pages of two tokens, fp8, values that are narrower than keys, heads of other sizes and numbers
    pools((SLOTS // 2, 2, KEY_HEADS, SIZE)),
    {"k_cache": PLAIN["k_cache"].to(torch.float8_e4m3fn)},
    {"v_cache": PLAIN["v_cache"].to(torch.float8_e4m3fn)},
    {"v_cache": torch.zeros(SLOTS, 1, KEY_HEADS, 32, **bf16)},
    {"q": torch.zeros(REQUESTS, 3, SIZE, **bf16)},
    pools((SLOTS, 1, KEY_HEADS, 96)) | {"q": torch.zeros(REQUESTS, HEADS, 96, **bf16)},
    pools((SLOTS, 1, KEY_HEADS, 256)) | {"q": torch.zeros(REQUESTS, HEADS, 256, **bf16)},
    pools((SLOTS, 1, KEY_HEADS, 8)) | {"q": torch.zeros(REQUESTS, HEADS, 8, **bf16)},
    {"k_descale": torch.ones(REQUESTS, KEY_HEADS)},
    {"cu_seqlens_k_new": None},  # a prefill
    {"qv": floats},
    {"score_mod": print},
):
    assert call(PLAIN | case)[0] == "theirs", case
without = {name: value for name, value in PLAIN.items() if name != "scheduler_metadata"}
print(call(without)[0])
print(backend.flash_attn_with_kvcache(*PLAIN.values()), len(backend.calls[-1][1]))
"""


def test_window_kernel_equals_float64_for_any_lengths_and_sinks() -> None:
    program = ROOT / "tests/support/rl_loop/engines/window_attention_interpreted.py"
    assert run_with_plugin(str(program), interpreted=True) == "5 shapes\n"


def test_window_kernel_fits_six_programs_on_a_hopper_sm() -> None:
    program = "tests.support.rl_loop.engines.window_attention_compiled"
    assert run_with_plugin("-m", program) == "compiled\n"


def test_window_kernel_serves_plain_windowed_decoding_only(
    tmp_path: Path,
) -> None:
    modules = {
        "sglang/srt/layers/attention/flashattention_backend.py": BACKEND,
        "sglang/version.py": '__version__ = "0.5.17"',
    }
    write_modules(tmp_path, modules)
    printed = run_with_plugin("-c", PROGRAM, packages=tmp_path)
    assert printed.splitlines() == [
        "ours True True torch.bfloat16",
        "True True True",
        "True",
        "True True",
        "128 0.125 True",
        "True True",
        "ours None",
        "cases for FlashAttention",
        "theirs",
        "theirs 16",
    ]


def test_window_kernel_is_the_default_where_supported() -> None:
    def patches(**settings: object) -> list[str]:
        return SglangConfig(**settings).environment["GPTOSS_SGLANG_PATCHES"].split(",")

    assert "fused_window_attention" in patches()
    assert "fused_window_attention" in patches(quantization="mxfp4")
    for settings in (
        {"attention_backend": "triton"},
        {"deterministic": True},
        {"arguments": ["--device", "cpu"]},
        {"arguments": ["--device=cpu"]},
    ):
        assert "fused_window_attention" not in patches(**settings), settings


# -- on a GPU -----------------------------------------------------------------------------------


@pytest.fixture
def attention(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(str(PLUGIN))
    return importlib.import_module("gptoss_window_attention")


def call_of_a_step(requests: int, key_heads: int, longest: int) -> dict[str, Any]:
    """Return the arguments from SGLang's backend for a step of random requests, on the GPU.

    The slots of a request are random positions of the pool. Keys and values outside its length and
    window are NaN.
    """
    generator = torch.Generator("cuda").manual_seed(requests)
    on_gpu = {"device": "cuda", "generator": generator}
    lengths = torch.randint(1, longest + 1, (requests,), **on_gpu, dtype=torch.int32)
    lengths[-1] = 1
    lengths[0] = longest
    slots = requests * longest + 1
    table = torch.randperm(slots, **on_gpu, dtype=torch.int32)[: requests * longest]
    table = table.view(requests, longest)
    position = torch.arange(longest, device="cuda")
    unseen = (position >= lengths[:, None]) | (position < lengths[:, None] - WINDOW)

    pool_shape = (slots, 1, key_heads, 64)
    keys = torch.randn(pool_shape, **on_gpu, dtype=torch.bfloat16)
    values = torch.randn(pool_shape, **on_gpu, dtype=torch.bfloat16)
    keys[table[unseen].long()] = float("nan")
    values[table[unseen].long()] = float("nan")
    heads = 8 * key_heads
    return {
        "q": 2 * torch.randn(requests, heads, 64, **on_gpu, dtype=torch.bfloat16),
        "k_cache": keys,
        "v_cache": values,
        "page_table": table,
        "cache_seqlens": lengths,
        "cu_seqlens_q": torch.arange(requests + 1, device="cuda", dtype=torch.int32),
        "max_seqlen_q": 1,
        "softmax_scale": 64**-0.5,
        "causal": True,
        "window_size": (WINDOW - 1, 0),
        "softcap": 0.0,
        "return_softmax_lse": False,
        "num_splits": 0,
        "out": None,
        "ver": 3,
        "scheduler_metadata": None,
        "sinks": torch.randn(heads, **on_gpu, dtype=torch.bfloat16),
    }


def attend_in_float64(call: dict[str, Any]) -> Tensor:
    """Return the outputs of a step, [requests, heads, 64], with sinks as keys of value 0."""
    outputs = []
    group = call["q"].shape[1] // call["k_cache"].shape[2]
    sinks = call["sinks"].double()[:, None]
    for request, length in enumerate(call["cache_seqlens"].tolist()):
        slots = call["page_table"][request, max(0, length - WINDOW) : length].long()
        keys = call["k_cache"][slots, 0].double().repeat_interleave(group, dim=1)
        values = call["v_cache"][slots, 0].double().repeat_interleave(group, dim=1)
        logits = torch.einsum("hd,khd->hk", call["q"][request].double(), keys)
        logits = torch.cat([logits * call["softmax_scale"], sinks], dim=1)
        outputs.append(torch.einsum("hk,khd->hd", logits.softmax(1)[:, :-1], values))
    return torch.stack(outputs)


def refuse(**options: Any) -> Tensor:
    raise AssertionError("a plain step is for us")


@pytest.fixture
def flash_attention() -> Callable[..., Tensor]:
    name = "sglang.kernels.ops.attention.flash_attention"
    module = pytest.importorskip(name, reason="SGLang is not installed")
    result: Callable[..., Tensor] = module.flash_attn_with_kvcache
    return result


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("requests", "key_heads", "longest"), [(1, 8, 700), (7, 8, 130), (256, 8, 640), (64, 2, 300)]
)
def test_window_kernel_is_as_accurate_as_flash_attention(
    attention: ModuleType,
    flash_attention: Callable[..., Tensor],
    requests: int,
    key_heads: int,
    longest: int,
) -> None:
    call = call_of_a_step(requests, key_heads, longest)
    expected = attend_in_float64(call)
    ours = attention.with_fused_windows(refuse)(**call)
    # FlashAttention multiplies masked values of a tile by 0, so they must not be NaN.
    theirs = flash_attention(
        **call | {name: call[name].nan_to_num(0.0) for name in ("k_cache", "v_cache")}
    )

    error = (ours - expected).abs()
    their_error = (theirs - expected).abs()
    assert error.mean() <= 1.2 * their_error.mean()
    assert error.max() <= 2 * their_error.max()  # the maximum varies more than the mean


@pytest.mark.gpu
def test_captured_step_reads_new_lengths_tables_and_queries(attention: ModuleType) -> None:
    call = call_of_a_step(requests=16, key_heads=8, longest=400)
    attend = attention.with_fused_windows(refuse)
    attend(**call)  # compile the kernel before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = attend(**call)

    other = call_of_a_step(requests=16, key_heads=8, longest=400)
    other["cache_seqlens"] = other["cache_seqlens"].flip(0)
    other["page_table"] = other["page_table"].flip(0)
    other["q"] = -other["q"]
    for name in ("cache_seqlens", "page_table", "q"):
        call[name].copy_(other[name])
    graph.replay()
    expected = attend_in_float64(call)
    assert not expected.isnan().any()
    assert (outputs - expected).abs().max() < 2e-2


@pytest.mark.gpu
def test_sglangs_backend_decodes_windows_with_the_kernel(
    attention: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call uses the page table of the windowed layers' pool, after new keys are saved."""
    name = "sglang.srt.layers.attention.flashattention_backend"
    backend = pytest.importorskip(name, reason="SGLang is not installed", exc_type=ImportError)
    layers = importlib.import_module("sglang.srt.layers.radix_attention")
    monkeypatch.setattr(backend, "flash_attn_with_kvcache", refuse)
    attention.install()

    call = call_of_a_step(requests=5, key_heads=8, longest=300)
    saved: list[Any] = []
    pool = SimpleNamespace(
        set_kv_buffer=lambda *arguments: saved.append(arguments),
        get_kv_buffer=lambda layer: (call["k_cache"][:, 0], call["v_cache"][:, 0]),
    )
    metadata = backend.FlashAttentionMetadata(
        cache_seqlens_int32=call["cache_seqlens"],
        cu_seqlens_q=call["cu_seqlens_q"],
        page_table=torch.full_like(call["page_table"], 2**31 - 1),
        swa_page_table=call["page_table"],
    )
    its_backend = SimpleNamespace(
        token_to_kv_pool=pool,
        forward_metadata=metadata,
        _mxfp8_sf_kwargs=lambda *unused: {},
        use_mla=False,
        kv_cache_is_mxfp8=False,
        kv_cache_dtype_str="auto",
        page_size=1,
        has_local_attention=False,
        topk=0,
        fa_impl_ver=3,
        num_splits=0,
        use_sliding_window_kv_pool=True,
        is_prefill_aware_swa=False,
    )
    layer = layers.RadixAttention(
        num_heads=64,
        head_dim=64,
        scaling=call["softmax_scale"],
        num_kv_heads=8,
        layer_id=0,
        sliding_window_size=WINDOW - 1,
    )
    batch = SimpleNamespace(out_cache_loc=None, spec_info=None, batch_size=5)
    key = torch.zeros(5, 8, 64, device="cuda", dtype=torch.bfloat16)
    outputs = backend.FlashAttentionBackend.forward_decode(
        its_backend, call["q"].flatten(1), key, key, layer, batch, sinks=call["sinks"]
    )

    assert len(saved) == 1
    assert (outputs.view(5, 64, 64) - attend_in_float64(call)).abs().max() < 2e-2
