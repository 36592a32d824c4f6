"""The experts of one layer in the memory that a server computes with.

Tensors by Hugging Face's names are cut for a tensor-parallel rank, written into the layouts of
``gptoss_hopper_layout``, and read back as they came. Neither SGLang nor triton_kernels is needed.
"""

from dataclasses import dataclass

import gptoss_hopper_layout as layout
import torch
from torch import Tensor

BLOCK = 32
"""Values that share a scale."""
LARGEST_SCALE = 128
"""A scale byte e means 2^(e - 127); with larger ones ``gptoss_expert_values`` would make infinities. Values up
to 12 are far above what weights are."""
SOURCES = {
    "w13_weight": "gate_up_proj_blocks",
    "w13_weight_scale": "gate_up_proj_scales",
    "w13_weight_bias": "gate_up_proj_bias",
    "w2_weight": "down_proj_blocks",
    "w2_weight_scale": "down_proj_scales",
    "w2_weight_bias": "down_proj_bias",
}
"""SGLang's name of a tensor of the experts -> Hugging Face's. The trainer's side has the same table
(``server_layout``), which this process cannot import."""


class WrongWeights(ValueError):
    """A sync brought something else than the server's model has; the message names the tensor."""


@dataclass(frozen=True)
class Shard:
    """What a tensor-parallel rank holds of the experts' intermediate size."""

    first: int
    last: int
    """One behind it."""
    is_first_rank: bool

    @classmethod
    def of(cls, rank: int, ranks: int, intermediate_size: int) -> "Shard":
        """Cut whole blocks, as ``GptOssForCausalLM._load_mxfp4_experts_weights`` does."""
        per_rank = -(-intermediate_size // BLOCK // ranks) * BLOCK
        return cls(
            first=min(rank * per_rank, intermediate_size),
            last=min((rank + 1) * per_rank, intermediate_size),
            is_first_rank=rank == 0,
        )

    def cut(self, source: str, whole: Tensor) -> Tensor:
        """Return this rank's part of a tensor by the end of its Hugging Face name; blocks as
        [experts, rows, bytes]."""
        if source.endswith("_blocks"):
            whole = whole.flatten(-2)
        if source.startswith("gate_up"):
            # Rows of gate and up take turns.
            return whole[:, 2 * self.first : 2 * self.last]

        if source == "down_proj_bias":
            # The ranks' outputs are added up.
            return whole if self.is_first_rank else torch.zeros_like(whole)

        # Inputs are split: a byte of blocks has two of them, a scale 32.
        columns = 2 if source.endswith("_blocks") else BLOCK
        return whole[:, :, self.first // columns : self.last // columns]


@dataclass(frozen=True)
class Experts:
    """The experts of one layer on this rank, and where they are kept.

    The memory of ``storage`` never changes: CUDA graphs read it.
    """

    prefix: str
    """Of the names of their tensors, such as "model.layers.0.mlp.experts."."""
    storage: dict[str, Tensor]
    """By SGLang's name. Of values and scales [experts, *storage shape], contiguous uint8; of biases
    fp32."""
    shard: Shard
    intermediate_size: int
    """Of the whole model."""
    hidden_size: int
    padded_intermediate_size: int
    """On this rank, as SGLang pads it."""

    @property
    def count(self) -> int:
        return len(self.storage["w13_weight"])

    def whole_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of Hugging Face's tensor."""
        rows, inputs = 2 * self.intermediate_size, self.hidden_size
        if name.startswith("w2"):
            rows, inputs = self.hidden_size, self.intermediate_size
        if name.endswith("_bias"):
            return self.count, rows
        if name.endswith("_scale"):
            return self.count, rows, inputs // BLOCK
        return self.count, rows, inputs // BLOCK, BLOCK // 2

    def shape(self, name: str, *, padded: bool = False) -> tuple[int, int]:
        """Return rows and inputs on this rank of a matrix, without or with SGLang's padding."""
        inner = self.padded_intermediate_size if padded else self.shard.last - self.shard.first
        if name.startswith("w2"):
            return self.hidden_size, inner
        return 2 * inner, self.hidden_size

    def load(self, name: str, whole: Tensor) -> Tensor | None:
        """Write a tensor to where the server computes with it, without waiting until the GPU has.

        Returns:
            Of scales the largest byte, uint8 without dimensions on the storage's device, which must not be
            above ``LARGEST_SCALE``. None of other tensors.

        Raises:
            WrongWeights: if its shape or dtype is another.
        """
        source = SOURCES[name]
        is_bias = name.endswith("_bias")
        fits = whole.dtype.is_floating_point if is_bias else whole.dtype == torch.uint8
        if not fits or tuple(whole.shape) != self.whole_shape(name):
            expected = "floats" if is_bias else "uint8"
            raise WrongWeights(
                f"{self.prefix}{source} has {whole.dtype} {list(whole.shape)}, the server expects {expected} "
                f"{list(self.whole_shape(name))}"
            )

        storage = self.storage[name]
        whole = whole.to(storage.device)
        part = self.shard.cut(source, whole)
        # Padding, too: memory that a sleeping server gave back comes back with anything in it.
        if is_bias:
            storage.zero_()
            storage[:, : part.shape[1]].copy_(part)
        elif name.endswith("_scale"):
            rows, inputs = self.shape(name, padded=True)
            layout.swizzle_scales(part, (rows, inputs // BLOCK), storage)
            return whole.max()
        else:
            layout.swizzle_values(part, storage)
        return None

    def read(self, name: str) -> tuple[Tensor, int]:
        """Return this rank's part of a tensor as it came, and how many elements of its padding are
        not what ``load`` writes there."""
        # Not from a copy that was kept: what is hashed has to be what the kernels compute with.
        storage = self.storage[name]
        rows, inputs = self.shape(name)
        if name.endswith("_bias"):
            return storage[:, :rows].contiguous(), int(storage[:, rows:].count_nonzero())

        if name.endswith("_scale"):
            padded_rows, padded_inputs = self.shape(name, padded=True)
            padded = (padded_rows, padded_inputs // BLOCK)
            return layout.unswizzle_scales(storage, rows, inputs // BLOCK, padded)

        return layout.unswizzle_values(storage, rows, inputs // 2)
