"""Tensors that go through Ray's store as bytes."""

import pickle

import pytest
import torch

from rl_loop.data.tensor_bytes import TensorBytes, to_bytes, to_tensors

TENSORS = {
    "fp32": torch.randn(3, 5),
    "bf16": torch.randn(4, 6).bfloat16(),
    "packed experts": torch.arange(24, dtype=torch.uint8).reshape(2, 3, 4),
    "of no dimension": torch.tensor(2.5, dtype=torch.float64),
    "of no entry": torch.zeros(0, 7),
    "transposed": torch.randn(5, 3).T,
    "with a gradient": torch.randn(2, 2, requires_grad=True),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_comes_back_as_it_was(name: str) -> None:
    tensor = TENSORS[name]
    restored = to_tensors(pickle.loads(pickle.dumps(to_bytes({name: tensor}))))[name]

    assert restored.dtype == tensor.dtype
    assert restored.shape == tensor.shape
    assert torch.equal(restored, tensor.detach())
    assert not restored.requires_grad


def test_bytes_are_pickled_beside_the_rest() -> None:
    """What Ray writes to shared memory without a copy."""
    weights = {str(number): torch.randn(64, 64) for number in range(20)}
    beside: list[pickle.PickleBuffer] = []
    rest = pickle.dumps(to_bytes(weights), protocol=5, buffer_callback=beside.append)

    assert sum(len(buffer.raw()) for buffer in beside) == 20 * 64 * 64 * 4
    assert len(rest) < 20 * 200


def test_what_is_restored_may_be_written_and_the_store_is_not() -> None:
    original = torch.zeros(8)
    content = TensorBytes.of(original)
    content.content.flags.writeable = False  # as in the store
    restored = content.tensor()

    restored += 1
    assert not original.any()
