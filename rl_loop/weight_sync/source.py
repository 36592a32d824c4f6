"""Interfaces of weight sources and weight senders. Imports neither torch nor Ray."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class SyncError(RuntimeError):
    """Engines may hold a mixture of old and new weights.

    Another attempt may succeed. Every trainer rank is able to begin it.
    """


class WeightMismatchError(ValueError):
    """The weights do not belong to this model, or a server holds others than were sent.

    The message names the tensor.
    """


class WeightSender(Protocol):
    """Sender of weights from the processes that have them to engines.

    It is pickled and sent to every trainer rank.
    """

    @property
    def ranks(self) -> Sequence[int]:
        """Trainer ranks that call ``send``. Each rank receives all weights."""
        ...

    @property
    def transposed(self) -> bool:
        """True if ``send`` expects expert matrices as transposed views, which saves a copy.

        See ``names.hf_tensors``.
        """
        ...

    @property
    def mxfp4_experts(self) -> bool:
        """True if ``send`` expects quantized experts as blocks and scales, by stored name."""
        ...

    @property
    def adapters_only(self) -> bool:
        """True if ``send`` expects only unmerged adapters and the weights with merged adapters."""
        ...

    def send(self, named: "Iterable[tuple[str, torch.Tensor]]", rank: int) -> None:
        """Send all tensors from one trainer rank to its engines.

        Args:
            named: (Hugging Face name, tensor in the shape of this name). Need not be read to its
                end after an error.
            rank: trainer rank of this process.

        Raises:
            SyncError: if another attempt may succeed.
        """
        ...

    def send_from_driver(self, named: "Iterable[tuple[str, torch.Tensor]]") -> None:
        """Send all tensors from the driver, which has no GPU and is in no process group.

        Args:
            named: (Hugging Face name, tensor in the shape of this name).
        """
        ...


class WeightSource(Protocol):
    """The policy's weights: the trainer, or tensors from files."""

    def weights(self) -> "Mapping[str, torch.Tensor]":
        """Return all weights by Hugging Face name, in the shapes of their names."""
        ...

    def mxfp4_weights(self) -> "Mapping[str, torch.Tensor]":
        """Return all weights by stored name: the experts' matrices are MXFP4 blocks and scales.

        Blocks: uint8 [experts, rows, inputs / 32, 16]. Scales: uint8 [experts, rows, inputs / 32].
        Only available in a run with ``quantization``.
        """
        ...

    def release_memory(self) -> None:
        """Release cached GPU memory before engines on the same GPUs wake."""
        ...

    def send_weights(self, sender: WeightSender) -> None:
        """Let ``sender`` send all weights from the processes that have them."""
        ...


class LoadedWeights:
    """WeightSource for tensors in this process."""

    def __init__(self, named: "Mapping[str, torch.Tensor]") -> None:
        self._named = named

    def weights(self) -> "Mapping[str, torch.Tensor]":
        """Return the tensors by Hugging Face name, in the shapes of their names."""
        return self._named

    def mxfp4_weights(self) -> "dict[str, torch.Tensor]":
        """Return the tensors by stored name, with the shapes of ``WeightSource.mxfp4_weights``."""
        # Imported here, because it loads torch.
        from converters.mxfp4_tensors import quantize_experts

        return quantize_experts(self._named)

    def release_memory(self) -> None:
        return None

    def send_weights(self, sender: WeightSender) -> None:
        # One process holds all tensors, so there is nothing to gather.
        weights = self.mxfp4_weights() if sender.mxfp4_experts else self._named
        sender.send_from_driver(weights.items())
