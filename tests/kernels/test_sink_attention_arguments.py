"""Attention rejects wrong arguments by name before a kernel runs."""

import pytest
import torch

from gptoss_kernels.sink_attention import describe, dispatch, sink_attention
from gptoss_kernels.sink_attention.dispatch import ShapeClass
from gptoss_kernels.sink_attention.layout import packed_layout

ON_GPU = ShapeClass(torch.device("cuda"), torch.bfloat16, 8, 2, 64, window=None)


@pytest.mark.parametrize(
    ("shape", "available", "is_slow"),
    [
        (ON_GPU, set(), True),
        (ON_GPU, {"flash3"}, False),
        (ON_GPU, {"hopper"}, False),
        (ON_GPU._replace(window=9), {"hopper"}, False),
        (ON_GPU._replace(window=9), {"reference"}, True),
        (ON_GPU._replace(dtype=torch.float32), set(), False),
        (ON_GPU._replace(device=torch.device("cpu")), set(), False),
    ],
)
def test_layer_is_slow_if_no_kernel_can_run(
    shape: ShapeClass, available: set[str], is_slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reason(backend: str, shape: ShapeClass) -> str | None:
        return None if backend in available else f"{backend} is missing"

    monkeypatch.setattr(dispatch, "unsupported_reason", reason)
    found = dispatch.slow_reason(shape)
    assert (found is not None) == is_slow
    if found is not None:
        assert "heads 8/2, head size 64" in found
        assert "flash4 is missing; flash3 is missing" in found


def good():
    return {
        "q": torch.zeros(10, 4, 8),
        "k": torch.zeros(10, 2, 8),
        "v": torch.zeros(10, 2, 8),
        "sinks": torch.zeros(4),
        "cu_seqlens": torch.tensor([0, 4, 10], dtype=torch.int32),
        "max_seqlen": 6,
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("q", torch.zeros(10, 4)),
        ("q", torch.zeros(10, 4, 8, dtype=torch.int32)),
        ("k", torch.zeros(9, 2, 8)),
        ("k", torch.zeros(10, 2, 8).double()),
        ("k", torch.zeros(10, 3, 8)),
        ("v", torch.zeros(10, 4, 8)),
        ("v", torch.zeros(10, 2, 6)),
        ("v", torch.zeros(10, 2, 8, device="meta")),
        ("sinks", torch.zeros(3)),
        ("sinks", torch.zeros(4, dtype=torch.int64)),
        ("cu_seqlens", torch.tensor([0, 6, 4, 10], dtype=torch.int32)),
        ("cu_seqlens", torch.tensor([1, 10], dtype=torch.int32)),
        ("cu_seqlens", torch.tensor([0, 9], dtype=torch.int32)),
        ("cu_seqlens", torch.tensor([0.0, 10.0])),
        ("cu_seqlens", torch.tensor([10], dtype=torch.int32)),
        ("max_seqlen", 5),
        ("window", 0),
        ("window", -3),
        ("window", 2.0),
        ("window", True),
        ("scale", 0.0),
        ("scale", float("nan")),
        ("backend", "fastest"),
        ("backend", "hopper"),
        ("backend", "flash4"),
    ],
)
def test_a_wrong_argument_is_named(name, value):
    with pytest.raises(ValueError, match=name):
        sink_attention(**{**good(), name: value})


def test_valid_arguments_are_accepted():
    assert sink_attention(**good()).shape == (10, 4, 8)


def test_changed_cu_seqlens_is_read_again():
    arguments = good()
    sink_attention(**arguments)
    arguments["cu_seqlens"][1] = 12
    with pytest.raises(ValueError, match="cu_seqlens"):
        sink_attention(**arguments)


@pytest.mark.parametrize("name", ["q", "k", "v", "sinks"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_debug_mode_finds_nan_and_inf(monkeypatch, name, value):
    arguments = good()
    arguments[name].view(-1)[3] = value
    sink_attention(**arguments)
    monkeypatch.setenv("GPTOSS_KERNELS_DEBUG", "1")
    with pytest.raises(ValueError, match=f"{name} holds 1 non-finite"):
        sink_attention(**arguments)


def test_mean_length_is_weighted_by_tokens():
    assert packed_layout(torch.tensor([0, 100, 1000])).mean_length == (100 * 100 + 900 * 900) / 1000
    assert packed_layout(torch.tensor([0, 0])).mean_length == 0


def test_the_diagnosis_names_every_backend():
    text = describe()
    for name in ("hopper", "flash4", "flash3", "reference"):
        assert name in text
