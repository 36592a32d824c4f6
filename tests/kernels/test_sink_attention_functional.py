"""Forward and backward as functions: queries at the end of longer key ranges, keys in parts."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from gptoss_kernels.sink_attention import dispatch, hopper, sink_attention
from gptoss_kernels.sink_attention.dispatch import ShapeClass, unsupported_reason
from gptoss_kernels.sink_attention.functional import (
    AttentionSettings,
    attention_backward,
    attention_forward,
)
from gptoss_kernels.sink_attention.layout import AttentionSegments

QUERIES, KEYS = [5, 40, 1, 7, 3], [9, 40, 33, 7, 100]
FULL = AttentionSettings(window=None, scale=0.3)


def dense(
    leaves: list[torch.Tensor], queries: list[int], keys: list[int], scale: float
) -> torch.Tensor:
    """Compute every segment with the complete score matrix and autograd."""
    q, k, v, sinks = leaves
    group = q.shape[1] // k.shape[1]
    out = []
    for x, key, value in zip(q.split(queries), k.split(keys), v.split(keys), strict=True):
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", x, key) * scale
        hidden = torch.ones(len(x), len(key), dtype=torch.bool, device=x.device).triu(
            len(key) - len(x) + 1
        )
        scores = scores.masked_fill(hidden, -torch.inf)
        with_sink = torch.cat((scores, sinks[:, None, None].expand(-1, len(x), 1)), dim=-1).softmax(
            -1
        )
        out.append(torch.einsum("hqk,khd->qhd", with_sink[..., :-1], value))
    return torch.cat(out)


def inputs(
    heads: int,
    kv_heads: int,
    head_size: int,
    queries: list[int],
    keys: list[int],
    device: str = "cpu",
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = (
        (sum(queries), heads),
        (sum(keys), kv_heads),
        (sum(keys), kv_heads),
        (sum(queries), heads),
    )
    q, k, v, grad_o = (
        torch.randn(*shape, head_size, dtype=torch.float64, device=device) for shape in shapes
    )
    return [q, k, v, torch.randn(heads, dtype=torch.float64, device=device), grad_o]


def test_queries_attend_to_all_keys_up_to_their_position() -> None:
    q, k, v, sinks, grad_o = inputs(4, 2, 8, QUERIES, KEYS)
    leaves = [x.clone().requires_grad_() for x in (q, k, v, sinks)]
    want = dense(leaves, QUERIES, KEYS, 0.3)
    segments = AttentionSegments.from_lengths(QUERIES, KEYS, torch.device("cpu"))
    o, lse = attention_forward(q, k, v, sinks, segments, FULL)
    torch.testing.assert_close(o, want.detach())
    grads = attention_backward((q, k, v, sinks, o, lse), grad_o, segments, FULL)
    for got, exact in zip(grads, torch.autograd.grad(want, leaves, grad_o), strict=True):
        torch.testing.assert_close(got, exact)


def test_key_parts_give_gradient_parts_with_complete_o_and_lse() -> None:
    length, near = 60, 25
    q, k, v, sinks, grad_o = inputs(4, 2, 8, [length], [length])
    whole = AttentionSegments.from_lengths([length], [length], q.device)
    o, lse = attention_forward(q, k, v, sinks, whole, FULL)
    dq, dk, dv, dsinks = attention_backward((q, k, v, sinks, o, lse), grad_o, whole, FULL)
    # attention among the last `near` tokens: exact shares of dQ, complete dK and dV
    last = slice(length - near, None)
    part = AttentionSegments.from_lengths([near], [near], q.device)
    shares = attention_backward(
        (q[last], k[last], v[last], sinks, o[last], lse[last]), grad_o[last], part, FULL
    )
    torch.testing.assert_close(shares[1], dk[last])
    torch.testing.assert_close(shares[2], dv[last])
    assert not torch.allclose(shares[0], dq[last])  # the share of the earlier keys must be missing
    # the gradient of the sink depends on the rows only, not on the keys
    first = slice(0, length - near)
    rest = AttentionSegments.from_lengths([length - near], [length - near], q.device)
    saved = q[first], k[first], v[first], sinks, o[first], lse[first]
    others = attention_backward(saved, grad_o[first], rest, FULL)
    torch.testing.assert_close(shares[3] + others[3], dsinks)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Record the names of launched kernels, on a Hopper GPU without FlashAttention.

    Only the launch and the description of the GPU are mocks. The outputs are not computed.
    """
    names: list[str] = []

    def load_kernel(name: str, *unused: Any) -> Any:
        return lambda *arguments: names.append(name)

    def reason(backend: str, shape: ShapeClass) -> str | None:
        if backend.startswith("flash"):
            return f"{backend} is not installed"
        return None

    monkeypatch.setattr(hopper, "_kernel", load_kernel)
    monkeypatch.setattr(hopper, "_tensor_map", lambda *unused, **also_unused: None)
    monkeypatch.setattr(dispatch, "unsupported_reason", reason)
    dispatch.choose_backend.cache_clear()
    yield names
    dispatch.choose_backend.cache_clear()


@pytest.mark.parametrize("backend", ["auto", "hopper"])
@pytest.mark.parametrize(
    ("width", "kernels"),
    [
        (None, ["full_forward", "full_backward_q", "backward_kv"]),
        (16, ["window_forward", "window_backward_q", "backward_kv"]),
    ],
)
@pytest.mark.parametrize("queries", [QUERIES, KEYS])
def test_both_passes_run_the_backend_that_is_named(
    launches: list[str],
    caplog: pytest.LogCaptureFixture,
    width: int | None,
    kernels: list[str],
    queries: list[int],
    backend: str,
) -> None:
    """A context-parallel rank that reports the kernels for short sequences also runs them."""
    q, k, v, sinks, grad_o = inputs(8, 1, 64, queries, KEYS)
    segments = AttentionSegments.from_lengths(queries, KEYS, q.device)
    settings = AttentionSettings(width, 0.3, backend)
    with caplog.at_level(logging.INFO):
        o, lse = attention_forward(q, k, v, sinks, segments, settings)
        attention_backward((q, k, v, sinks, o, lse), grad_o, segments, settings)
    assert launches == kernels
    assert backend == "hopper" or [record.args[-1] for record in caplog.records] == ["hopper"]

    if queries is KEYS:
        launches.clear()
        q.requires_grad_()
        offsets = segments.cu_seqlens_q
        out = sink_attention(
            q, k, v, sinks, cu_seqlens=offsets, max_seqlen=100, window=width, backend="hopper"
        )
        out.backward(grad_o)
        assert launches == kernels


@pytest.mark.parametrize(
    ("backend", "width", "message"),
    [
        ("flash5", None, "backend must be one of auto, reference, hopper, flash3, flash4"),
        (
            "hopper",
            16,
            "backend 'hopper' does not support these arguments: hopper needs a CUDA device",
        ),
        (
            "flash4",
            None,
            "backend 'flash4' does not support these arguments: flash4 needs a CUDA device",
        ),
    ],
)
def test_a_backend_that_cannot_compute_is_rejected(
    backend: str, width: int | None, message: str
) -> None:
    q, k, v, sinks, grad_o = inputs(4, 2, 8, KEYS, KEYS)
    segments = AttentionSegments.from_lengths(KEYS, KEYS, q.device)
    settings = AttentionSettings(width, 0.3, backend)
    with pytest.raises(ValueError, match=message):
        attention_forward(q, k, v, sinks, segments, settings)
    with pytest.raises(ValueError, match=message):
        attention_backward((q, k, v, sinks, q, q[..., 0]), grad_o, segments, settings)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("backend", "window"), [("flash4", None), ("hopper", 128), ("hopper", None)]
)
def test_gpu_backends_are_within_bf16_of_the_reference(backend: str, window: int | None) -> None:
    reason = unsupported_reason(
        backend, ShapeClass(torch.device("cuda", 0), torch.bfloat16, 64, 8, 64, window)
    )
    if reason:
        pytest.skip(reason)
    keys = [1000, 129, 2048, 77]
    queries = keys if window else [300, 129, 64, 1]
    q, k, v, sinks, grad_o = (x.bfloat16() for x in inputs(64, 8, 64, queries, keys, "cuda"))
    segments = AttentionSegments.from_lengths(queries, keys, q.device)
    settings = AttentionSettings(window=window, scale=0.125, backend=backend)
    reference = replace(settings, backend="reference")
    o, lse = attention_forward(q, k, v, sinks, segments, settings)
    got = o, lse, *attention_backward((q, k, v, sinks, o, lse), grad_o, segments, settings)
    exact = [x.double() for x in (q, k, v, sinks)]
    o, lse = attention_forward(*exact, segments, reference)
    want = o, lse, *attention_backward((*exact, o, lse), grad_o.double(), segments, reference)
    for name, bound, x, y in zip(
        ("o", "lse", "q", "k", "v", "s"), [3e-3] * 5 + [1e-2], got, want, strict=True
    ):
        assert (x.double() - y).norm() / y.norm() < bound, name


@pytest.mark.gpu
def test_a_slice_of_the_heads_needs_no_copy_first() -> None:
    reason = unsupported_reason(
        "flash4", ShapeClass(torch.device("cuda", 0), torch.bfloat16, 64, 8, 64, None)
    )
    if reason:
        pytest.skip(reason)
    queries, keys = [300, 64], [1000, 64]
    q, k, v, sinks, grad_o = (x.bfloat16() for x in inputs(64, 8, 64, queries, keys, "cuda"))
    segments = AttentionSegments.from_lengths(queries, keys, q.device)
    settings = AttentionSettings(window=None, scale=0.125, backend="flash4")
    o, lse = attention_forward(q, k, v, sinks, segments, settings)
    heads, kv_heads = slice(16, 32), slice(2, 4)
    part = q[:, heads], k[:, kv_heads].contiguous(), v[:, kv_heads].contiguous(), sinks[heads]
    part_o, part_lse = attention_forward(*part, segments, settings)
    assert torch.equal(part_o, o[:, heads])
    whole = attention_backward((q, k, v, sinks, o, lse), grad_o, segments, settings)
    grads = attention_backward((*part, part_o, part_lse), grad_o[:, heads], segments, settings)
    for x, y in zip(
        grads, (whole[0][:, heads], whole[1][:, kv_heads], whole[2][:, kv_heads]), strict=False
    ):
        assert (x.double() - y.double()).norm() / y.double().norm() < 3e-3
