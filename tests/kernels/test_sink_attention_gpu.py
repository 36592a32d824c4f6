"""GPU backends against the fp64 reference, determinism, and invariance to the batch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gptoss_kernels.sink_attention import flash, sink_attention
from gptoss_kernels.sink_attention.autograd import SinkAttentionFunction
from gptoss_kernels.sink_attention.dispatch import ShapeClass, choose_backend, unsupported_reason
from gptoss_kernels.sink_attention.hopper import hopper_backward, hopper_forward
from gptoss_kernels.sink_attention.layout import AttentionSegments, packed_layout
from gptoss_kernels.sink_attention.reference import reference_backward, reference_forward
from tests.support.kernels.plain_flash4 import flash4_kernels

pytestmark = pytest.mark.gpu

UNEVEN = [300, 77, 647, 129, 1, 16, 17, 128, 15, 700]


def random_inputs(lengths, heads=64, kv_heads=8, seed=0):
    head_size = 64
    generator = torch.Generator("cuda").manual_seed(seed)
    tokens = sum(lengths)

    def normal(*shape):
        return torch.randn(*shape, device="cuda", generator=generator)

    q, k, v = (
        normal(tokens, heads, head_size),
        normal(tokens, kv_heads, head_size),
        normal(tokens, kv_heads, head_size),
    )
    sinks = normal(heads) * 1.5 + 1
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int().cuda()
    return (
        q.bfloat16(),
        k.bfloat16(),
        v.bfloat16(),
        sinks,
        normal(tokens, heads, head_size).bfloat16(),
        cu_seqlens,
    )


def run(backend, q, k, v, sinks, grad_o, cu_seqlens, window):
    leaves = [x.detach().requires_grad_() for x in (q, k, v, sinks)]
    longest = packed_layout(cu_seqlens).longest
    if backend == "added_sink":
        segments = AttentionSegments(cu_seqlens, cu_seqlens, longest, longest)
        passes = flash.passes_with_added_sink(
            flash4_kernels(), segments, window, q.shape[2] ** -0.5
        )
        out, lse = SinkAttentionFunction.apply(*leaves, passes)
    else:
        packing = {"cu_seqlens": cu_seqlens, "max_seqlen": longest}
        out, lse = sink_attention(
            *leaves, **packing, window=window, backend=backend, return_lse=True
        )
    return out.detach(), lse, *torch.autograd.grad(out, leaves, grad_o)


def error(x, exact):
    return ((x.double() - exact).norm() / exact.norm()).item()


def assert_close_to_fp64(results, q, k, v, sinks, grad_o, cu_seqlens, window):
    layout, scale = packed_layout(cu_seqlens), q.shape[2] ** -0.5
    exact = [x.double() for x in (q, k, v, sinks)]
    o, lse = reference_forward(*exact, layout, window, scale)
    grads = reference_backward((*exact, o, lse), grad_o.double(), layout, window, scale)
    out, out_lse, *out_grads = results
    assert error(out, o) <= 3e-3
    assert (out_lse - lse).abs().max() <= 1e-5
    for name, bound, x, y in zip("qkvs", (3e-3, 3e-3, 3e-3, 4e-3), out_grads, grads, strict=True):
        assert torch.isfinite(x).all(), f"d{name}"
        if y.norm() > 0:
            assert error(x, y) <= bound, f"d{name}"


OURS = pytest.mark.parametrize(("backend", "window"), [("hopper", 128), ("hopper", None)])


def need(backend, window):
    name = "flash4" if backend == "added_sink" else backend
    device = torch.device("cuda", torch.cuda.current_device())
    reason = unsupported_reason(name, ShapeClass(device, torch.bfloat16, 64, 8, 64, window))
    if reason:
        pytest.skip(reason)


@pytest.mark.parametrize("window", [1, 2, 17, 127, 128, 129, 137, None])
def test_our_kernels_are_within_bf16_of_fp64(window):
    inputs = random_inputs(UNEVEN)
    assert_close_to_fp64(run("hopper", *inputs, window), *inputs, window)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "window"),
    [
        *((32, 8, 128), (16, 1, 128), (12, 1, 128), (6, 3, 100), (8, 8, 64)),
        # The kernels add heads of zeros.
        *((9, 3, 128), (7, 7, 128), (14, 2, 128)),
    ],
)
def test_our_kernels_take_any_grouping_of_heads(heads, kv_heads, window):
    inputs = random_inputs(UNEVEN, heads, kv_heads)
    assert_close_to_fp64(run("hopper", *inputs, window), *inputs, window)
    assert_close_to_fp64(run("hopper", *inputs, None), *inputs, None)


def test_rows_may_have_o_and_lse_of_more_keys():
    # the sequence is cut, and rows of the second part attend to keys of the first part
    length, cut, window = 400, 150, 128
    q, k, v, sinks, grad_o, cu_seqlens = random_inputs([length])
    o, lse = hopper_forward(q, k, v, sinks, packed_layout(cu_seqlens), window, 0.125)
    layout = packed_layout(torch.tensor([0, length - cut], dtype=torch.int32, device="cuda"))
    part = [x[cut:].contiguous() for x in (q, k, v, o, lse, grad_o)]
    grads = hopper_backward((*part[:3], sinks, *part[3:5]), part[5], layout, window, 0.125)
    exact = [x.double() for x in part]
    expected = reference_backward(
        (*exact[:3], sinks.double(), *exact[3:5]), exact[5], layout, window, 0.125
    )
    for bound, x, y in zip((3e-3, 3e-3, 3e-3, 4e-3), grads, expected, strict=True):
        assert error(x, y) <= bound


@pytest.mark.parametrize("backend", ["flash4", "added_sink", "flash3"])
@pytest.mark.parametrize("window", [None, 128])
def test_flash_backends_are_within_bf16_of_fp64(backend, window):
    need(backend, window)
    inputs = random_inputs(UNEVEN)
    assert_close_to_fp64(run(backend, *inputs, window), *inputs, window)


@pytest.mark.parametrize(
    ("backend", "window"), [("hopper", 128), ("hopper", None), ("added_sink", 128)]
)
@pytest.mark.parametrize("sink", [-1e4, 0.0, 30.0])
def test_extreme_sinks_give_finite_correct_results(backend, window, sink):
    need(backend, window)
    q, k, v, sinks, grad_o, cu_seqlens = random_inputs(UNEVEN)
    inputs = q, k, v, torch.full_like(sinks, sink), grad_o, cu_seqlens
    assert_close_to_fp64(run(backend, *inputs, window), *inputs, window)


@pytest.mark.parametrize("lengths", [[1], [2], [129], [1] * 100 + [127], [131072]], ids=str)
def test_our_kernels_from_one_token_to_131072(lengths):
    inputs = random_inputs(lengths, heads=8, kv_heads=1)
    assert_close_to_fp64(run("hopper", *inputs, 128), *inputs, 128)
    if lengths[0] < 10_000:
        assert_close_to_fp64(run("hopper", *inputs, None), *inputs, None)


def test_pack_of_4096_sequences_matches_reference():
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 40, (4096,), generator=generator).tolist()
    inputs = random_inputs(lengths, heads=8, kv_heads=1)
    assert_close_to_fp64(run("hopper", *inputs, 128), *inputs, 128)


@settings(max_examples=20, deadline=None)
@given(lengths=st.lists(st.integers(40, 400), min_size=1, max_size=12), seed=st.integers(0, 1000))
def test_any_packing_matches_fp64_reference(lengths, seed):
    inputs = random_inputs(lengths, heads=16, kv_heads=2, seed=seed)
    assert_close_to_fp64(run("hopper", *inputs, 128), *inputs, 128)
    assert_close_to_fp64(run("hopper", *inputs, None), *inputs, None)


def test_every_output_element_is_written():
    q, k, v, sinks, grad_o, cu_seqlens = random_inputs(UNEVEN)
    layout = packed_layout(cu_seqlens)
    for window in (128, None):  # torch.empty reuses freed memory, which is full of NaN here
        poison = [torch.full_like(x, torch.nan) for x in (q, q, k, v)]
        poison += [torch.full((q.shape[0], 64, n), torch.nan, device="cuda") for n in (1, 2)]
        del poison
        o, lse = hopper_forward(q, k, v, sinks, layout, window, 0.125)
        grads = hopper_backward((q, k, v, sinks, o, lse), grad_o, layout, window, 0.125)
        assert all(torch.isfinite(x).all() for x in (o, lse, *grads))


@OURS
def test_our_kernels_give_the_same_bits_every_time(backend, window):
    inputs = random_inputs(UNEVEN)
    first = run(backend, *inputs, window)
    for _ in range(5):
        assert all(
            torch.equal(x, y) for x, y in zip(first, run(backend, *inputs, window), strict=True)
        )


@OURS
def test_sequence_bits_are_independent_of_the_pack(backend, window):
    q, k, v, sinks, grad_o, cu_seqlens = random_inputs(UNEVEN)
    packed = run(backend, q, k, v, sinks, grad_o, cu_seqlens, window)
    start = 0
    for length in UNEVEN:
        part = slice(start, start + length)
        start += length
        cu = torch.tensor([0, length], dtype=torch.int32, device="cuda")
        alone = run(backend, q[part], k[part], v[part], sinks, grad_o[part], cu, window)
        for x, y in zip(packed[:5], alone[:5], strict=True):
            assert torch.equal(x[part], y)


@OURS
@pytest.mark.parametrize(("heads", "kv_heads"), [(16, 2), (12, 1)])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_non_finite_values_stay_in_their_sequence(backend, window, heads, kv_heads, poison):
    lengths = [5, 70, 33, 129, 1, 64, 300, 7, 191, 16, 8, 63]
    q, k, v, sinks, grad_o, cu_seqlens = random_inputs(lengths, heads, kv_heads)
    clean = run(backend, q, k, v, sinks, grad_o, cu_seqlens, window)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).cuda()
    for parity in (0, 1):  # every second sequence contains NaN
        rows = sequence % 2 == parity
        spoilt = [x.masked_fill(rows[:, None, None], poison) for x in (q, k, v, grad_o)]
        results = run(backend, *spoilt[:3], sinks, spoilt[3], cu_seqlens, window)
        for x, y in zip(results[:5], clean[:5], strict=True):
            assert torch.equal(x[~rows], y[~rows])


@OURS
def test_inputs_may_start_at_any_memory_offset(backend, window):
    def moved(x):
        memory = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
        return memory[1:].view(x.shape).copy_(x)

    q, k, v, sinks, grad_o, cu_seqlens = random_inputs([200, 56])
    odd = run(
        backend, moved(q), moved(k), moved(v), moved(sinks), moved(grad_o), cu_seqlens, window
    )
    for x, y in zip(odd, run(backend, q, k, v, sinks, grad_o, cu_seqlens, window), strict=True):
        assert torch.equal(x, y)


def test_graph_of_full_attention_backward_replays_on_new_values():
    first, second = random_inputs(UNEVEN), random_inputs(UNEVEN, seed=1)
    layout = packed_layout(first[5])
    saved = [x.clone() for x in first[:5]]

    def passes():
        o, lse = hopper_forward(*saved[:4], layout, None, 0.125)
        return hopper_backward((*saved[:4], o, lse), saved[4], layout, None, 0.125)

    passes()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = passes()
    for x, y in zip(saved, second, strict=False):
        x.copy_(y)
    graph.replay()
    for x, y in zip(captured, passes(), strict=True):
        assert torch.equal(x, y)


def test_inputs_need_not_be_contiguous():
    q, k, v, sinks, grad_o, cu_seqlens = random_inputs([200, 56])
    wide = torch.cat((q, k, v), 1)
    views = wide.split([64, 8, 8], 1)
    for x, y in zip(
        run("hopper", *views, sinks, grad_o, cu_seqlens, 128),
        run("hopper", q, k, v, sinks, grad_o, cu_seqlens, 128),
        strict=True,
    ):
        assert torch.equal(x, y)


def test_auto_uses_our_kernels_for_windows_and_short_sequences():
    device = torch.device("cuda", torch.cuda.current_device())
    windowed = ShapeClass(device, torch.bfloat16, 64, 8, 64, 128)
    full = windowed._replace(window=None)
    assert choose_backend(windowed, short=False) == "hopper"
    assert choose_backend(full, short=True) == "hopper"
    in_order = ("flash4", "flash3", "hopper")
    first = next(name for name in in_order if unsupported_reason(name, full) is None)
    assert choose_backend(full, short=False) == first
    assert choose_backend(windowed._replace(dtype=torch.float32), short=False) == "reference"


def test_bf16_sinks_are_accepted_and_get_a_bf16_gradient():
    q, k, v, sinks, grad_o, cu_seqlens = random_inputs([200, 56])
    results = run("hopper", q, k, v, sinks.bfloat16(), grad_o, cu_seqlens, 128)
    assert results[-1].dtype == torch.bfloat16
