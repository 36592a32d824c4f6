"""The reference backend against an explicit softmax per sequence."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gptoss_kernels.sink_attention import reference, sink_attention


def written_out(q, k, v, sinks, lengths, window, scale=None):
    """Compute O and LSE from all scores. The sink is one more column."""
    group, outputs, lses, start = q.shape[1] // k.shape[1], [], [], 0
    for length in lengths:
        part = slice(start, start + length)
        start += length
        query, key, value = (x[part].transpose(0, 1) for x in (q, k, v))
        key, value = key.repeat_interleave(group, 0), value.repeat_interleave(group, 0)
        scores = query @ key.transpose(1, 2) * (q.shape[2] ** -0.5 if scale is None else scale)
        row, column = torch.arange(length)[:, None], torch.arange(length)
        hidden = column > row
        if window is not None:
            hidden |= column <= row - window
        scores = scores.masked_fill(hidden, -torch.inf)
        scores = torch.cat(
            (scores, sinks[:, None, None].to(scores.dtype).expand(-1, length, 1)), -1
        )
        outputs.append((scores.softmax(-1)[..., :-1] @ value).transpose(0, 1))
        lses.append(scores.logsumexp(-1).t())
    return torch.cat(outputs), torch.cat(lses)


def random_inputs(lengths, heads=4, kv_heads=2, head_size=8, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)

    def normal(*shape):
        return (
            torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        )

    leaves = (
        normal(tokens, heads, head_size),
        normal(tokens, kv_heads, head_size),
        normal(tokens, kv_heads, head_size),
    )
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    grad_o = torch.randn(tokens, heads, head_size, generator=generator, dtype=torch.float64).to(
        dtype
    )
    return (*leaves, normal(heads)), grad_o, {"cu_seqlens": cu_seqlens, "max_seqlen": max(lengths)}


def assert_matches_written_out(lengths, window, tolerance=1e-12, **shape):
    leaves, grad_o, packing = random_inputs(lengths, **shape)
    out, lse = sink_attention(*leaves, **packing, window=window, return_lse=True)
    expected, expected_lse = written_out(*leaves, [n for n in lengths if n], window)
    torch.testing.assert_close(out, expected, rtol=0, atol=tolerance)
    torch.testing.assert_close(lse, expected_lse.detach(), rtol=0, atol=tolerance)
    grads = torch.autograd.grad(out, leaves, grad_o)
    for grad, other in zip(grads, torch.autograd.grad(expected, leaves, grad_o), strict=True):
        torch.testing.assert_close(grad, other, rtol=0, atol=10 * tolerance)


@pytest.mark.parametrize("window", [None, 1, 2, 31, 32, 33, 500])
def test_output_lse_and_gradients_match_a_written_out_softmax(window):
    assert_matches_written_out([1, 5, 32, 33, 100, 64, 31, 0, 129], window)


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=8),
    window=st.one_of(st.none(), st.integers(1, 100)),
    kv_heads=st.sampled_from([1, 2, 6]),
)
def test_any_packing_matches_a_written_out_softmax(lengths, window, kv_heads):
    assert_matches_written_out(lengths, window, heads=6, kv_heads=kv_heads, head_size=4)


def test_gradcheck_in_fp64():
    leaves, _, packing = random_inputs([3, 1, 5], heads=2, kv_heads=1, head_size=3)
    assert torch.autograd.gradcheck(lambda *x: sink_attention(*x, **packing, window=3), leaves)
    assert torch.autograd.gradcheck(lambda *x: sink_attention(*x, **packing, scale=0.7), leaves)


@pytest.mark.parametrize("window", [None, 70])
def test_key_chunks_and_tile_batches_do_not_change_values(monkeypatch, window):
    monkeypatch.setattr(reference, "KEY_CHUNK", 32)
    monkeypatch.setattr(reference, "SCORES_PER_BATCH", 1)
    assert_matches_written_out([200, 3, 64], window)


@pytest.mark.parametrize("sink", [-1e4, 0.0, 30.0, -torch.inf])
def test_extreme_sinks_give_finite_correct_results(sink):
    (q, k, v, sinks), grad_o, packing = random_inputs([40, 1])
    sinks = torch.full_like(sinks, sink).requires_grad_()
    out, lse = sink_attention(q, k, v, sinks, **packing, return_lse=True)
    expected, expected_lse = written_out(q, k, v, sinks, [40, 1], None)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse.detach(), rtol=0, atol=1e-10)
    grads = torch.autograd.grad(out, (q, k, v, sinks), grad_o)
    assert all(torch.isfinite(grad).all() for grad in grads)


def test_large_sink_takes_almost_all_probability():
    (q, k, v, sinks), _, packing = random_inputs([16])
    plain = sink_attention(q, k, v, torch.full_like(sinks, -1e4), **packing)
    swallowed = sink_attention(q, k, v, torch.full_like(sinks, 30.0), **packing)
    assert swallowed.norm() < 1e-9 * plain.norm()


def test_bf16_accumulates_in_fp32():
    leaves, grad_o, packing = random_inputs([200, 77], dtype=torch.bfloat16, head_size=64)
    out, lse = sink_attention(*leaves, **packing, window=50, return_lse=True)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    expected, expected_lse = written_out(*exact, [200, 77], 50)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    assert (lse - expected_lse).abs().max() < 1e-5
    assert (out - expected).norm() < 3e-3 * expected.norm()
    grads = torch.autograd.grad(out, leaves, grad_o)
    others = torch.autograd.grad(expected, exact, grad_o.double())
    for grad, other in zip(grads, others, strict=True):
        assert (grad - other).norm() < 4e-3 * other.norm()


@pytest.mark.parametrize("window", [None, 40])
def test_sequence_does_not_attend_to_its_neighbors(window):
    leaves, _, packing = random_inputs([50, 60])
    out = sink_attention(*leaves, **packing, window=window)
    alone = [x[50:] if x.dim() == 3 else x for x in leaves]
    expected = sink_attention(
        *alone, cu_seqlens=torch.tensor([0, 60]), max_seqlen=60, window=window
    )
    torch.testing.assert_close(out[50:], expected, rtol=0, atol=1e-13)


def test_attention_works_without_sinks_and_with_invisible_chunks(monkeypatch):
    monkeypatch.setattr(reference, "KEY_CHUNK", 32)
    (q, k, v, sinks), _, packing = random_inputs([100])
    sinks = torch.full_like(sinks, -torch.inf)
    out = sink_attention(q, k, v, sinks, **packing, window=20)
    torch.testing.assert_close(out, written_out(q, k, v, sinks, [100], 20)[0], rtol=0, atol=1e-12)


def test_an_empty_pack_gives_empty_outputs():
    q = torch.zeros(0, 4, 8, requires_grad=True)
    k = torch.zeros(0, 2, 8)
    out = sink_attention(q, k, k, torch.zeros(4), cu_seqlens=torch.tensor([0, 0]), max_seqlen=0)
    assert out.shape == (0, 4, 8)


@pytest.mark.slow
def test_sequence_of_8192_tokens_needs_little_memory():
    import resource

    leaves, grad_o, packing = random_inputs(
        [8192], heads=8, kv_heads=1, head_size=64, dtype=torch.float32
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    torch.autograd.grad(sink_attention(*leaves, **packing), leaves, grad_o)
    assert (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 512 * 1024
    )  # KiB; the scores alone are 2 GiB
