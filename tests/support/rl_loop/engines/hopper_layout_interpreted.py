"""Compares the plugin's kernels with its torch code, in Triton's interpreter:

TRITON_INTERPRET=1 PYTHONPATH=rl_loop/engines/sglang/plugin python THIS_FILE
"""

import gptoss_hopper_layout as layout
import torch

SHAPES = [(2, 96, 80), (1, 33, 17)]


def compare(experts: int, rows: int, row_bytes: int) -> None:
    # A slice of longer rows, as a tensor-parallel rank has it.
    whole = torch.randint(0, 256, (experts, rows, 2 * row_bytes), dtype=torch.uint8)
    packed = whole[:, :, row_bytes:]
    shape = (experts, *layout.value_storage_shape(rows, row_bytes))
    expected = torch.full(shape, 3, dtype=torch.uint8)
    layout.swizzle_values(packed, expected)
    storage = torch.full(shape, 7, dtype=torch.uint8)
    layout._launch(layout._swizzle_kernel, packed, storage, packed)
    assert torch.equal(storage, expected)

    storage[0, -1] ^= 0x5A
    back = torch.empty(experts, rows, row_bytes, dtype=torch.uint8)
    wrong = torch.zeros((), dtype=torch.int32)
    layout._launch(layout._unswizzle_kernel, back, storage, wrong)
    expected_back, expected_wrong = layout.unswizzle_values(storage, rows, row_bytes)
    assert torch.equal(back, expected_back)
    assert int(wrong) == expected_wrong


if __name__ == "__main__":
    torch.manual_seed(0)
    for sizes in SHAPES:
        compare(*sizes)
    print(f"{len(SHAPES)} shapes")
