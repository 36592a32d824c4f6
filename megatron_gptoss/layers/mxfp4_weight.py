"""Frozen MXFP4 weights that are read as bf16."""

import torch
from torch import Tensor

from gptoss_kernels import mxfp4
from gptoss_kernels.mxfp4.api import BLOCK
from megatron_gptoss.layers.scratch_memory import scratch_memory


class Mxfp4Weight(torch.nn.Module):
    """Matrix [rows, columns] in MXFP4: 17 bytes per 32 values.

    It is not a parameter and has no gradient. Checkpoints leave it out, because it never changes.
    """

    blocks: Tensor
    """[rows, columns / 32, 16] uint8 codes."""
    scales: Tensor
    """[rows, columns / 32] uint8 scales."""

    def __init__(
        self,
        rows: int,
        columns: int,
        device: torch.device | None = None,
    ) -> None:
        """Allocate the matrix, uninitialized.

        Args:
            rows: number of rows.
            columns: number of columns.
            device: device of the tensors; None for torch's default device.

        Raises:
            ValueError: ``columns`` is not a multiple of 32.
        """
        super().__init__()
        if columns % BLOCK:
            raise ValueError(f"columns must be a multiple of {BLOCK} for MXFP4, got {columns}")

        # Buffers instead of parameters: they move with the model, and no optimizer sees them.
        self.shape = torch.Size((rows, columns))
        self.dtype = torch.bfloat16
        blocks = torch.empty(rows, columns // BLOCK, BLOCK // 2, dtype=torch.uint8, device=device)
        scales = torch.empty(rows, columns // BLOCK, dtype=torch.uint8, device=device)
        self.register_buffer("blocks", blocks, persistent=False)
        self.register_buffer("scales", scales, persistent=False)

    @torch.no_grad()
    def load(self, weight: Tensor) -> None:
        """Pack ``weight`` [rows, columns] of any float dtype. Its values must be MXFP4 values.

        Raises:
            ValueError: a value would change.
        """
        # Pack on the device of this module: a GPU takes seconds for a large model, a CPU minutes.
        weight = weight.to(self.blocks.device)
        blocks, scales = mxfp4.quantize(weight.to(torch.bfloat16))
        packed = mxfp4.dequantize(blocks, scales)

        # Compare in the dtype of the given weight, which may be wider than bf16.
        is_wrong = packed.to(weight.dtype) != weight
        if is_wrong.any():
            raise ValueError(
                f"{int(is_wrong.sum())} of {is_wrong.numel()} values are not MXFP4 values. Use the "
                "released MXFP4 weights, or an MXFP4 export of `gptoss convert export`"
            )
        self.blocks.copy_(blocks)
        self.scales.copy_(scales)

    def read(self) -> Tensor:
        """Return the weight, [rows, columns] bf16, in memory that the next read overwrites."""
        memory = scratch_memory("dequantized", self.blocks.device, self.dtype)
        return mxfp4.dequantize(self.blocks, self.scales, out=memory.lease(self.shape).tensor)
