"""Where weights come from, and who carries them. Imports neither torch nor Ray."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class SyncFailed(RuntimeError):
    """Engines may hold a mixture of old and new weights.

    Another try may succeed. Every trainer rank can begin one.
    """


class WeightMismatch(ValueError):
    """The weights do not belong to this model, or a server holds others than it was sent.

    The message names the tensor.
    """


class WeightSender(Protocol):
    """Carries weights to engines from the processes that have them. It is pickled and sent to
    every trainer rank."""

    @property
    def ranks(self) -> Sequence[int]:
        """Trainer ranks that call ``send``. Each gets all weights."""
        ...

    @property
    def transposed(self) -> bool:
        """True if ``send`` takes expert matrices as transposed views, which saves a copy
        (``names.hf_tensors``)."""
        ...

    @property
    def packed(self) -> bool:
        """True if ``send`` takes quantized experts as blocks and scales, by stored name."""
        ...

    def send(self, named: "Iterable[tuple[str, torch.Tensor]]", rank: int) -> None:
        """Send all tensors by Hugging Face name, from trainer rank ``rank``, to its engines.

        Raises SyncFailed if another try may succeed. ``named`` need not be read to its end then.
        """
        ...

    def send_from_driver(self, named: "Iterable[tuple[str, torch.Tensor]]") -> None:
        """Send all tensors from the driver, which has no GPU and is in no process group."""
        ...


class WeightSource(Protocol):
    """The policy's weights: the trainer, or tensors that were read from files."""

    def weights(self) -> "Mapping[str, torch.Tensor]":
        """Return all weights by Hugging Face name."""
        ...

    def packed_weights(self) -> "Mapping[str, torch.Tensor]":
        """Return all weights with the experts' matrices as MXFP4 blocks and scales, by stored name.

        Only of a run with ``quantization``.
        """
        ...

    def release_memory(self) -> None:
        """Release cached GPU memory, before engines on the same GPUs wake."""
        ...

    def send_weights(self, sender: WeightSender) -> None:
        """Let ``sender`` send all weights from the processes that have them."""
        ...


class LoadedWeights:
    """A WeightSource of tensors in this process."""

    def __init__(self, named: "Mapping[str, torch.Tensor]") -> None:
        self._named = named

    def weights(self) -> "Mapping[str, torch.Tensor]":
        return self._named

    def packed_weights(self) -> "dict[str, torch.Tensor]":
        from converters.mxfp4_tensors import pack_experts

        return pack_experts(self._named)

    def release_memory(self) -> None:
        return None

    def send_weights(self, sender: WeightSender) -> None:
        weights = self.packed_weights() if sender.packed else self._named
        sender.send_from_driver(weights.items())
