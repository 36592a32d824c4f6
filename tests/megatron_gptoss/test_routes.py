"""Experts as numbers of one or two bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_gptoss.routes import ROUTE_DTYPES, route_dtype, unknown_route
from megatron_gptoss.routing_replay import expert_numbers


@pytest.mark.parametrize(
    ("num_experts", "dtype"),
    [(8, np.uint8), (128, np.uint8), (255, np.uint8), (256, np.int16), (257, np.int16)],
)
def test_one_byte_holds_255_experts_and_the_unknown_value(num_experts: int, dtype: type) -> None:
    assert route_dtype(num_experts) == dtype
    # The number for an unknown expert is not an expert.
    assert unknown_route(route_dtype(num_experts)) not in range(num_experts)
    assert num_experts - 1 <= np.iinfo(dtype).max


@pytest.mark.parametrize("dtype", ROUTE_DTYPES, ids=str)
def test_both_dtypes_widen_to_equal_experts_with_minus_1_unknown(
    dtype: np.dtype,
) -> None:
    routes = np.array([[0, 127], [128, 254], [unknown_route(dtype)] * 2]).astype(dtype)
    wide = expert_numbers(torch.from_numpy(routes))
    assert wide.dtype == torch.int64
    assert wide.tolist() == [[0, 127], [128, 254], [-1, -1]]


def test_expert_255_of_a_larger_model_is_an_expert() -> None:
    assert expert_numbers(torch.tensor([255, -1], dtype=torch.int16)).tolist() == [255, -1]
