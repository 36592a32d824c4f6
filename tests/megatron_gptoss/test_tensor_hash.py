"""Hashes of tensors against SplitMix64 in Python's integers."""

from __future__ import annotations

import struct

import pytest
import torch

from megatron_gptoss import tensor_hash
from megatron_gptoss.tensor_hash import as_digits, digest_of_bits, digest_of_values

MASK = (1 << 64) - 1
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def splitmix(word: int) -> int:
    """Compute the finalizer of SplitMix64 (Steele, Lea and Flood, 2014)."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return word ^ (word >> 31)


def expected_of_bits(*contents: bytes) -> str:
    total = place = 0
    for content in contents:
        padded = content + bytes(-len(content) % 8)
        for (word,) in struct.iter_unpack("<Q", padded):
            total += splitmix((word + place * 0x9E3779B97F4A7C15) & MASK)
            place += 1
    return f"{splitmix((total ^ sum(map(len, contents))) & MASK):016x}"


def read_content(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shapes", [[(5,)], [(8, 3, 16), (8, 3)], [(7, 9), (1,), (64,)]])
def test_digest_of_bits_is_splitmix_of_all_words(
    shapes: list[tuple[int, ...]], dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Pieces end within tensors, and positions continue across pieces.
    monkeypatch.setattr(tensor_hash, "PIECE", 4)
    generator = torch.Generator().manual_seed(3)
    tensors = [(100 * torch.randn(shape, generator=generator)).to(dtype) for shape in shapes]
    expected = expected_of_bits(*map(read_content, tensors))
    assert digest_of_bits(*(tensor.to(device) for tensor in tensors)) == expected


def test_digest_of_bits_ignores_strides_and_offsets() -> None:
    experts = torch.arange(3 * 5 * 7, dtype=torch.uint8).view(3, 5, 7)
    for expert in experts:
        assert digest_of_bits(expert) == digest_of_bits(expert.clone())
        assert digest_of_bits(expert.mT) == digest_of_bits(expert.mT.contiguous())


def test_digest_of_bits_detects_swaps_padding_and_single_bits() -> None:
    tensor = torch.arange(64, dtype=torch.uint8)
    digests = {digest_of_bits(tensor), digest_of_bits(torch.cat([tensor, tensor.new_zeros(8)]))}
    for first, second in ((0, 1), (0, 8), (3, 60)):
        swapped = tensor.clone()
        swapped[[first, second]] = swapped[[second, first]]
        digests.add(digest_of_bits(swapped))
    for byte in range(64):
        for bit in range(8):
            changed = tensor.clone()
            changed[byte] ^= 1 << bit
            digests.add(digest_of_bits(changed))
    digests.add(digest_of_bits(tensor.bitwise_not()))
    assert len(digests) == 2 + 3 + 512 + 1


@pytest.mark.parametrize("device", DEVICES)
def test_digest_of_values_is_a_sum_in_any_layout(device: str) -> None:
    weight = torch.randn(6, 10, generator=torch.Generator().manual_seed(5)).bfloat16()
    total = sum(
        splitmix((struct.unpack("<i", struct.pack("<f", value))[0] + (4 << 32)) & MASK)
        for value in weight.flatten().tolist()
    )
    weight = weight.to(device)
    assert as_digits(digest_of_values(weight, 4)) == f"{total & MASK:016x}"
    parts = [digest_of_values(part, 4) for part in weight.float().mT.split(3)]
    assert torch.stack(parts).sum() == digest_of_values(weight, 4)
    assert digest_of_values(weight, 3) != digest_of_values(weight, 4)


def test_digest_of_values_differs_for_complements() -> None:
    bits = torch.tensor([0x3F800000], dtype=torch.int32)
    one, complement = bits.view(torch.float32), bits.bitwise_not().view(torch.float32)
    assert complement.item() == pytest.approx(-4.0)
    assert digest_of_values(one, 0) != digest_of_values(complement, 0)
