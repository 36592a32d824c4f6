"""Interfaces of weight sources and weight senders. Imports neither torch nor Ray."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class SyncError(RuntimeError):
    """Engines may hold a mixture of old and new weights.

    The sync may be repeated, because no trainer rank waits for another one.
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
        """Trainer ranks that call ``send``. Each of them iterates over all weights, which are
        gathered from the other ranks on the way."""
        ...

    @property
    def transposed(self) -> bool:
        """True if ``send`` expects expert matrices as transposed views, which saves a copy.

        See ``names.hf_tensors``.
        """
        ...

    @property
    def mxfp4_experts(self) -> bool:
        """True if ``send`` expects quantized experts as blocks and scales, by the names of an MXFP4
        checkpoint (``..._blocks``, ``..._scales``)."""
        ...

    @property
    def adapters_only(self) -> bool:
        """True if ``send`` expects only the tensors that training changes.

        They are unmerged adapters, and weights into which adapters are merged. The servers hold the
        frozen base from an earlier sync.
        """
        ...

    def send(self, named_tensors: "Iterable[tuple[str, torch.Tensor]]", rank: int) -> None:
        """Send all tensors from one trainer rank to its engines.

        Args:
            named_tensors: (Hugging Face name, tensor with the shape that Hugging Face stores under
                this name, see ``names.hf_shapes``). Need not be read to its end after an error.
            rank: trainer rank of this process.

        Raises:
            SyncError: if another attempt may succeed.
        """
        ...

    def send_from_driver(self, named_tensors: "Iterable[tuple[str, torch.Tensor]]") -> None:
        """Send all tensors from the driver, which has no GPU and is in no process group.

        Args:
            named_tensors: (Hugging Face name, tensor with the shape of Hugging Face).
        """
        ...


class WeightSource(Protocol):
    """The policy's weights: the trainer, or tensors from files."""

    def weights(self) -> "Mapping[str, torch.Tensor]":
        """Return all weights by Hugging Face name, with the shapes of Hugging Face."""
        ...

    def mxfp4_weights(self) -> "Mapping[str, torch.Tensor]":
        """Return all weights by the names of an MXFP4 checkpoint.

        The experts' matrices are blocks (``..._blocks``) and scales (``..._scales``).

        Blocks: uint8 [experts, rows, inputs / 32, 16]. Scales: uint8 [experts, rows, inputs / 32].
        Only available in a run with ``quantization``.
        """
        ...

    def release_memory(self) -> None:
        """Release cached GPU memory before servers on the same GPUs resume."""
        ...

    def send_weights(self, sender: WeightSender) -> None:
        """Let ``sender`` send all weights from the processes that have them."""
        ...


class LoadedWeights:
    """WeightSource for tensors in this process."""

    def __init__(self, named_tensors: "Mapping[str, torch.Tensor]") -> None:
        self._named = named_tensors

    def weights(self) -> "Mapping[str, torch.Tensor]":
        """Return the tensors by Hugging Face name, with the shapes of Hugging Face."""
        return self._named

    def mxfp4_weights(self) -> "dict[str, torch.Tensor]":
        """Return the tensors with the names and shapes of ``WeightSource.mxfp4_weights``."""
        # Imported here, because it loads torch.
        from converters.mxfp4_tensors import quantize_experts

        return quantize_experts(self._named)

    def release_memory(self) -> None:
        return None

    def send_weights(self, sender: WeightSender) -> None:
        # One process holds all tensors, so there is nothing to gather.
        weights = self.mxfp4_weights() if sender.mxfp4_experts else self._named
        sender.send_from_driver(weights.items())
