"""Tensors that go through Ray's store as bytes."""

import pickle

import pytest
import torch

from rl_loop.data.tensor_bytes import StoredTensors, TensorBytes

TENSORS = {
    "fp32": torch.randn(3, 5),
    "bf16": torch.randn(4, 6).bfloat16(),
    "MXFP4 experts": torch.arange(24, dtype=torch.uint8).reshape(2, 3, 4),
    "of seven bytes": torch.arange(7, dtype=torch.uint8),
    "of no dimension": torch.tensor(2.5, dtype=torch.float64),
    "of no entry": torch.zeros(0, 7),
    "transposed": torch.randn(5, 3).T,
    "with a gradient": torch.randn(2, 2, requires_grad=True),
}


@pytest.mark.parametrize("names", [*([name] for name in TENSORS), list(TENSORS)], ids=str)
def test_tensors_survive_pickling_unchanged(names: list[str]) -> None:
    sent = {name: TENSORS[name] for name in names}
    restored = pickle.loads(pickle.dumps(TensorBytes.of(sent))).tensors()

    assert list(restored) == names
    for name, tensor in sent.items():
        assert restored[name].dtype == tensor.dtype
        assert restored[name].shape == tensor.shape
        assert torch.equal(restored[name], tensor.detach())
        assert not restored[name].requires_grad


def test_tensor_bytes_are_one_out_of_band_buffer() -> None:
    """Ray writes such buffers to shared memory without a copy."""
    weights = {str(number): torch.randn(64, 64) for number in range(20)}
    out_of_band: list[pickle.PickleBuffer] = []
    rest = pickle.dumps(TensorBytes.of(weights), protocol=5, buffer_callback=out_of_band.append)

    assert [len(buffer.raw()) for buffer in out_of_band] == [20 * 64 * 64 * 4]
    assert len(rest) < 20 * 200


def test_restored_tensors_are_writable_copies_of_the_store() -> None:
    content = TensorBytes.of({"a": torch.zeros(8)})
    content.content.flags.writeable = False  # like an array in Ray's store
    restored = content.tensors()

    restored["a"] += 1
    assert not content.content.any()


def test_stored_bytes_do_not_change_with_the_parameters() -> None:
    """The next update changes parameters in place, which must not change the bytes."""
    parameter = torch.zeros(8)
    content = TensorBytes.of({"a": parameter})
    parameter += 1
    assert not content.tensors()["a"].any()


def test_stored_tensors_are_restored_on_first_access() -> None:
    stored = StoredTensors(lambda: TensorBytes.of(TENSORS))
    assert not vars(stored).keys() & {"stored", "_tensors"}
    assert list(stored) == list(TENSORS)
    assert len(stored) == len(TENSORS)
    assert torch.equal(stored["bf16"], TENSORS["bf16"])
    assert stored["bf16"] is stored["bf16"]
