"""Check that a sync sends the tensors of the model, with correct names, shapes and dtypes.

Dtypes are checked only for MXFP4 tensors, which must be bytes.
"""

from collections.abc import Iterable, Iterator, Mapping

import torch

from converters.hf_layouts import Shape
from rl_loop.weight_sync.source import WeightMismatchError

MXFP4_ENDINGS = ("_blocks", "_scales")
"""Name endings of MXFP4 tensors, which are uint8."""


class ExpectedTensors:
    """The tensors of a model, each of which a sync must send once."""

    def __init__(self, shapes: Mapping[str, Shape], model: str) -> None:
        """Prepare the check of one sync.

        Args:
            shapes: shape by Hugging Face name.
            model: description of the model for messages.
        """
        self._shapes = shapes
        self._model = model
        self._came: set[str] = set()

    def fault_in(self, name: str, tensor: torch.Tensor) -> str | None:
        """Record the next tensor. Return a description of its fault, None if it is expected.

        The shape must be the one of its name. MXFP4 blocks and scales must be uint8.
        """
        expected = self._shapes.get(name)
        if expected is None:
            return f"tensor {name} is not in {self._model}"
        if name in self._came:
            return f"tensor {name} was sent twice"

        # Record it before the checks of shape and dtype. Otherwise a wrong tensor would be reported
        # a second time, as missing.
        self._came.add(name)
        if tuple(tensor.shape) != tuple(expected):
            return (
                f"tensor {name} has shape {list(tensor.shape)}, but the engine expects "
                f"{list(expected)}"
            )
        if name.endswith(MXFP4_ENDINGS) and tensor.dtype != torch.uint8:
            return f"tensor {name} has dtype {tensor.dtype}, but the engine expects torch.uint8"
        return None

    def missing(self) -> list[str]:
        """Return the names of the tensors that have not come."""
        return [name for name in self._shapes if name not in self._came]

    def faults(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
        """Record all tensors. Return a description of every missing one or wrong shape or dtype."""
        found = [self.fault_in(name, tensor) for name, tensor in named_tensors]
        faults = [fault for fault in found if fault is not None]
        return faults + [f"tensor {name} is missing" for name in self.missing()]

    def check_each(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the same tensors.

        Args:
            named_tensors: (Hugging Face name, tensor in the shape of this name).

        Raises:
            WeightMismatchError: at the first unexpected tensor, or at the end if one is missing.
        """
        # Checked while sending, so that a wrong tensor stops the sync before a server can serve
        # with it.
        for name, tensor in named_tensors:
            fault = self.fault_in(name, tensor)
            if fault is not None:
                raise WeightMismatchError(fault)
            yield name, tensor
            del tensor  # otherwise it would outlive its bucket

        missing = self.missing()
        if missing:
            others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise WeightMismatchError(
                f"the weights of {self._model} lack the tensor {missing[0]}{others}"
            )
