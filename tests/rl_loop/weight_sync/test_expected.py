"""Names, shapes and dtypes of the tensors of a sync."""

from __future__ import annotations

import pytest
import torch

from rl_loop.weight_sync.expected import ExpectedTensors
from rl_loop.weight_sync.source import WeightMismatchError

SHAPES = {"a": (2, 3), "b_blocks": (4,), "c": (1,)}
GOOD = [
    ("a", torch.zeros(2, 3)),
    ("b_blocks", torch.zeros(4, dtype=torch.uint8)),
    ("c", torch.zeros(1)),
]


def expected() -> ExpectedTensors:
    return ExpectedTensors(SHAPES, "a small model")


def test_checked_yields_all_tensors_of_the_model() -> None:
    assert list(expected().check_each(GOOD)) == GOOD


@pytest.mark.parametrize(
    ("place", "name", "tensor", "message"),
    [
        (1, "d", torch.zeros(1), "tensor d is not in a small model"),
        (1, "a", torch.zeros(2, 3), "tensor a was sent twice"),
        (
            0,
            "a",
            torch.zeros(3, 2),
            r"tensor a has shape \[3, 2\], but the engine expects \[2, 3\]",
        ),
        (1, "b_blocks", torch.zeros(4), "tensor b_blocks has dtype torch.float32"),
    ],
)
def test_checked_raises_before_the_wrong_tensor_leaves(
    place: int, name: str, tensor: torch.Tensor, message: str
) -> None:
    sent = []
    with pytest.raises(WeightMismatchError, match=message):
        for item in expected().check_each([*GOOD[:place], (name, tensor), *GOOD[place:]]):
            sent.append(item)
    assert sent == GOOD[:place]


def test_checked_raises_at_the_end_if_tensors_are_missing() -> None:
    with pytest.raises(WeightMismatchError, match=r"a small model lack the tensor a and 1 more"):
        list(expected().check_each(GOOD[1:2]))


def test_faults_lists_everything_that_is_wrong() -> None:
    wrong = [("a", torch.zeros(2, 2)), *GOOD[1:2], *GOOD[1:2], ("d", torch.zeros(1))]
    assert expected().faults(wrong) == [
        "tensor a has shape [2, 2], but the engine expects [2, 3]",
        "tensor b_blocks was sent twice",
        "tensor d is not in a small model",
        "tensor c is missing",
    ]
