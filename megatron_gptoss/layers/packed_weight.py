"""Frozen weights that stay in four bits and are read as bf16."""

import torch
from torch import Tensor

from gptoss_kernels import mxfp4
from gptoss_kernels.mxfp4.api import BLOCK
from megatron_gptoss.layers.shared_memory import shared_memory


class PackedWeight(torch.nn.Module):
    """A matrix [rows, columns] in MXFP4: 17 bytes for every 32 values of a row.

    It has no gradient and is no parameter. Checkpoints leave it out: it never changes.
    """

    blocks: Tensor
    """uint8 [rows, columns / 32, 16]."""
    scales: Tensor
    """uint8 [rows, columns / 32]."""

    def __init__(
        self,
        rows: int,
        columns: int,
        device: torch.device | None = None,
    ) -> None:
        """Allocate the matrix, uninitialised, on ``device``, by default torch's.

        Raises:
            ValueError: if rows cannot be cut into blocks of 32 values.
        """
        super().__init__()
        if columns % BLOCK:
            raise ValueError(f"rows of {columns} values cannot be cut into blocks of {BLOCK}")

        self.shape = torch.Size((rows, columns))
        self.dtype = torch.bfloat16
        blocks = torch.empty(rows, columns // BLOCK, BLOCK // 2, dtype=torch.uint8, device=device)
        scales = torch.empty(rows, columns // BLOCK, dtype=torch.uint8, device=device)
        self.register_buffer("blocks", blocks, persistent=False)
        self.register_buffer("scales", scales, persistent=False)

    @torch.no_grad()
    def load(self, weight: Tensor) -> None:
        """Pack ``weight`` [rows, columns], which must hold MXFP4 values.

        Raises:
            ValueError: if a value would change.
        """
        # Where this weight lies: of a large model, a GPU packs in seconds what takes a CPU minutes.
        weight = weight.to(self.blocks.device)
        blocks, scales = mxfp4.quantize(weight.to(torch.bfloat16))
        packed = mxfp4.dequantize(blocks, scales)

        is_wrong = packed.to(weight.dtype) != weight
        if is_wrong.any():
            raise ValueError(
                f"{int(is_wrong.sum())} of {is_wrong.numel()} values are not MXFP4 values: a base in "
                "four bits takes the released MXFP4 weights, or what `convert export` wrote as MXFP4"
            )
        self.blocks.copy_(blocks)
        self.scales.copy_(scales)

    def read(self) -> Tensor:
        """Dequantise to bf16 [rows, columns], in memory that the next read overwrites."""
        memory = shared_memory("dequantised", self.blocks.device, self.dtype)
        return mxfp4.dequantize(self.blocks, self.scales, out=memory.lend(self.shape).tensor)
