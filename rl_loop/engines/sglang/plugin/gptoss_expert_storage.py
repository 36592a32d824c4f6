"""The experts of one layer in the memory that a server computes with.

Tensors with Hugging Face's names are sharded for a tensor-parallel rank, written into the layouts
of ``gptoss_hopper_layout``, and read back in their original format. This module needs neither
SGLang nor triton_kernels.
"""

from dataclasses import dataclass

import gptoss_hopper_layout as layout
import torch
from torch import Tensor

BLOCK = 32
"""Number of values that share a scale."""
MAX_SCALE = 128
"""Largest accepted scale byte. A byte e means the scale 2^(e - 127).

``gptoss_expert_values`` would turn larger bytes into infinities. This byte allows values up to 12,
far above real weights.
"""
HF_NAMES = {
    "w13_weight": "gate_up_proj_blocks",
    "w13_weight_scale": "gate_up_proj_scales",
    "w13_weight_bias": "gate_up_proj_bias",
    "w2_weight": "down_proj_blocks",
    "w2_weight_scale": "down_proj_scales",
    "w2_weight_bias": "down_proj_bias",
}
"""Hugging Face's name by SGLang's name of an expert tensor.

The trainer's side has an equal table (``server_layout``), which this process cannot import.
"""

ADAPTER_SYNC_NAMES = {
    "w13_lora_a": "gate_up_proj.lora_A",
    "w13_lora_b": "gate_up_proj.lora_B",
    "w2_lora_a": "down_proj.lora_A",
    "w2_lora_b": "down_proj.lora_B",
}
"""Name in a sync of each factor of unmerged adapters, for servers that have adapters.

A is [experts, rank, inputs] and B is [experts, outputs, rank], with the rows of the matrix.
"""


class WrongWeightsError(ValueError):
    """A tensor of a sync does not fit the server's model. The message names the tensor."""


@dataclass(frozen=True)
class ExpertShard:
    """A tensor-parallel rank's part of the experts' intermediate size: [start, end)."""

    start: int
    """First channel of the part."""
    end: int
    """Channel after the last one."""
    is_first_rank: bool

    @classmethod
    def of(cls, rank: int, ranks: int, intermediate_size: int) -> "ExpertShard":
        """Return a rank's part, in whole blocks.

        SGLang computes the same part in ``GptOssForCausalLM._load_mxfp4_experts_weights``.
        """
        # Floor divisions of a negative number round up. The last ranks may have fewer blocks, or
        # none.
        per_rank = -(-intermediate_size // BLOCK // ranks) * BLOCK
        return cls(
            start=min(rank * per_rank, intermediate_size),
            end=min((rank + 1) * per_rank, intermediate_size),
            is_first_rank=rank == 0,
        )

    def cut(self, source: str, whole: Tensor) -> Tensor:
        """Return this rank's part of a tensor.

        Args:
            source: end of the tensor's Hugging Face name.
            whole: tensor of all ranks, [*whole_shape(name)].

        Returns:
            The part. Blocks are flattened to [experts, rows, bytes].
        """
        if source.endswith("_blocks"):
            whole = whole.flatten(-2)
        if source.startswith("gate_up"):
            # Rows of gate and up alternate. Each rank has all inputs, and with them the whole A.
            if source.endswith("lora_A"):
                return whole
            return whole[:, 2 * self.start : 2 * self.end]

        if source == "down_proj_bias":
            # The outputs of the ranks are summed, so only one rank adds the bias.
            return whole if self.is_first_rank else torch.zeros_like(whole)

        # Inputs are sharded. Each rank has all outputs, and with them the whole B. The ranks'
        # products are summed after B.
        if source.endswith("lora_B"):
            return whole
        if source.endswith("lora_A"):
            return whole[:, :, self.start : self.end]

        # A byte of blocks holds 2 inputs, a scale belongs to 32.
        columns = 2 if source.endswith("_blocks") else BLOCK
        return whole[:, :, self.start // columns : self.end // columns]


@dataclass(frozen=True)
class LayerExperts:
    """The experts of one layer on this rank, and their memory.

    Addresses in ``storage`` never change, because CUDA graphs contain them.
    """

    prefix: str
    """Name prefix of their tensors, such as "model.layers.0.mlp.experts."."""
    storage: dict[str, Tensor]
    """Memory by SGLang's name.

    Values and scales: contiguous uint8 [experts, *storage shape]. Biases: fp32. With adapters:
    ``ADAPTER_SYNC_NAMES``, bf16 with rows, columns and ranks padded by zeros.
    """
    shard: ExpertShard
    intermediate_size: int
    """Intermediate size of the whole model."""
    hidden_size: int
    padded_intermediate_size: int
    """Intermediate size on this rank, with SGLang's padding."""
    adapter_rank: int | None = None
    """Rank of the unmerged adapters; None without them."""

    @property
    def sources(self) -> dict[str, str]:
        """Name in a sync by name in ``storage``, after ``prefix``."""
        return HF_NAMES if self.adapter_rank is None else HF_NAMES | ADAPTER_SYNC_NAMES

    @property
    def count(self) -> int:
        """Number of experts."""
        return len(self.storage["w13_weight"])

    def whole_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the Hugging Face tensor."""
        rows, inputs = 2 * self.intermediate_size, self.hidden_size
        if name.startswith("w2"):
            rows, inputs = self.hidden_size, self.intermediate_size
        if name.endswith("_bias"):
            return self.count, rows
        if name in ADAPTER_SYNC_NAMES:
            return self.count, *self._factor_shape(name, (rows, inputs))
        if name.endswith("_scale"):
            return self.count, rows, inputs // BLOCK
        return self.count, rows, inputs // BLOCK, BLOCK // 2

    def shape(self, name: str, *, padded: bool = False) -> tuple[int, int]:
        """Return rows and inputs of this rank's matrix, without or with SGLang's padding."""
        inner = self.padded_intermediate_size if padded else self.shard.end - self.shard.start
        if name.startswith("w2"):
            return self.hidden_size, inner
        return 2 * inner, self.hidden_size

    def _factor_shape(self, name: str, matrix: tuple[int, int]) -> tuple[int, int]:
        """Return the shape of an adapter's factor for a matrix of these rows and inputs."""
        rows, inputs = matrix
        assert self.adapter_rank is not None
        return (self.adapter_rank, inputs) if name.endswith("_a") else (rows, self.adapter_rank)

    def load(self, name: str, whole: Tensor) -> Tensor | None:
        """Write a tensor into the memory that the server computes with. Does not wait for the GPU.

        Args:
            name: SGLang's name of the tensor.
            whole: tensor of all ranks, [*whole_shape(name)]. uint8, or floats for biases and
                adapters.

        Returns:
            For scales: the largest byte, a uint8 scalar on the device of the storage. The caller
            checks that it is at most ``MAX_SCALE``. For other tensors: None.

        Raises:
            WrongWeightsError: if shape or dtype differ from the model's.
        """
        source = self.sources[name]
        is_bias = name.endswith("_bias")
        is_float = is_bias or name in ADAPTER_SYNC_NAMES
        fits = whole.dtype.is_floating_point if is_float else whole.dtype == torch.uint8
        if not fits or tuple(whole.shape) != self.whole_shape(name):
            expected = "floats" if is_float else "uint8"
            raise WrongWeightsError(
                f"{self.prefix}{source} has {whole.dtype} {list(whole.shape)}, but the server "
                f"expects {expected} {list(self.whole_shape(name))}"
            )

        storage = self.storage[name]
        whole = whole.to(storage.device)
        part = self.shard.cut(source, whole)
        # Also write the padding: the memory of a server that slept comes back with arbitrary bytes.
        if is_bias:
            storage.zero_()
            storage[:, : part.shape[1]].copy_(part)
        elif name in ADAPTER_SYNC_NAMES:
            storage.zero_()
            storage[:, : part.shape[1], : part.shape[2]].copy_(part)
        elif name.endswith("_scale"):
            rows, inputs = self.shape(name, padded=True)
            layout.swizzle_scales(part, (rows, inputs // BLOCK), storage)
            # The maximum of the whole tensor, so that all ranks reject the same scales.
            return whole.max()
        else:
            layout.swizzle_values(part, storage)
        return None

    def read(self, name: str) -> tuple[Tensor, int]:
        """Return this rank's part of a tensor in its original format, and count wrong padding.

        Returns:
            The part, and the number of padding elements that differ from those that ``load``
            writes. Blocks are uint8 [experts, rows, inputs / 2], scales uint8 [experts, rows,
            inputs / 32], biases fp32 [experts, rows], factors of adapters bf16.
        """
        # Read from the kernels' memory, not from a copy, because the hash must cover that memory.
        storage = self.storage[name]
        rows, inputs = self.shape(name)
        if name.endswith("_bias"):
            return storage[:, :rows].contiguous(), int(storage[:, rows:].count_nonzero())

        if name in ADAPTER_SYNC_NAMES:
            rows, columns = self._factor_shape(name, (rows, inputs))
            part = storage[:, :rows, :columns].contiguous()
            # Bits, because a negative zero is stale, too.
            bits = [tensor.view(torch.int16).count_nonzero() for tensor in (storage, part)]
            return part, int(bits[0] - bits[1])

        if name.endswith("_scale"):
            padded_rows, padded_inputs = self.shape(name, padded=True)
            padded = (padded_rows, padded_inputs // BLOCK)
            return layout.unswizzle_scales(storage, rows, inputs // BLOCK, padded)

        return layout.unswizzle_values(storage, rows, inputs // 2)
