"""Replacement of CUDA calls in Megatron, for machines without a GPU.

11 modules of megatron-core 0.19.2 (schedules, data parallelism, optimizer, checkpointing) call
``torch.cuda`` unconditionally. ``enable_cpu_runtime`` replaces the name ``torch`` in these modules
by a proxy. Its streams and synchronization do nothing, and its device "cuda" is the CPU. Two
methods of Tensor check their caller. Code outside of megatron-core is not affected. Nothing changes
on machines with CUDA.
"""

import importlib
import sys
import types
from collections.abc import Callable
from typing import Any, Self

import torch

PATCHED_MODULES = (
    "tensor_parallel.mappings",
    "tensor_parallel.layers",
    "utils",
    "pipeline_parallel.schedules",
    "pipeline_parallel.p2p_communication",
    "distributed.param_and_grad_buffer",
    "optimizer.optimizer",
    "optimizer.clip_grads",
    "optimizer.distrib_optimizer",
    "dist_checkpointing.strategies.state_dict_saver",
    "dist_checkpointing.strategies.filesystem_async",
)
"""Modules of megatron.core whose ``torch`` is replaced."""

FACTORIES = ("zeros", "ones", "empty", "tensor", "full", "arange")
"""Functions of torch that these modules call with a CUDA device."""

_CPU = torch.device("cpu")


class _NullStream:
    """CUDA stream or event without pending work. All methods do nothing."""

    def __getattr__(self, name: str) -> Callable[..., Self]:
        return lambda *args, **kwargs: self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None: ...


class _Proxy(types.ModuleType):
    """Module with the attributes of ``target``, except those that are set on the proxy."""

    def __init__(self, target: types.ModuleType) -> None:
        super().__init__(target.__name__)
        self.__dict__["_target"] = target

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_target"], name)


def _create_on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return ``factory`` with CUDA devices replaced by the CPU."""

    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = _CPU
        return factory(*args, **kwargs)

    return create


def _torch_without_cuda() -> _Proxy:
    """Return the proxy for ``torch``."""
    stream = _NullStream()
    cuda = _Proxy(torch.cuda)
    for name in ("synchronize", "empty_cache"):
        setattr(cuda, name, lambda *args, **kwargs: None)
    for name in ("current_stream", "stream", "Stream", "Event"):
        setattr(cuda, name, lambda *args, **kwargs: stream)
    cuda.current_device = lambda: _CPU  # type: ignore[attr-defined]

    # Attributes are set on the proxy, so torch itself does not change.
    proxy = _Proxy(torch)
    proxy.cuda = cuda  # type: ignore[attr-defined]
    for name in FACTORIES:
        setattr(proxy, name, _create_on_cpu(getattr(torch, name)))
    return proxy


def _called_from(path: str) -> bool:
    """Return True if the caller of the calling function is in a file below ``path``."""
    return path in sys._getframe(2).f_code.co_filename


_original_cuda = torch.Tensor.cuda
_original_type = torch.Tensor.type


def _cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Replacement of Tensor.cuda: the identity for Megatron, the original for other callers."""
    if _called_from("/megatron/core/"):
        return self
    return _original_cuda(self, *args, **kwargs)


def _type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Replacement of Tensor.type that returns CUDA types to Megatron's optimizers."""
    # The optimizers sort parameters by comparing with names such as "torch.cuda.FloatTensor".
    result = _original_type(self, *args, **kwargs)
    if args or kwargs or not _called_from("/megatron/core/optimizer/"):
        return result
    return result.replace("torch.", "torch.cuda.", 1)


def enable_cpu_runtime() -> None:
    """Install the replacements. Does nothing if CUDA is available, or when called again."""
    if torch.cuda.is_available() or torch.Tensor.cuda is _cuda:
        return

    # Each module has its own global name ``torch``, which can be replaced for this module only.
    proxy = _torch_without_cuda()
    for name in PATCHED_MODULES:
        module = importlib.import_module(f"megatron.core.{name}")
        module.torch = proxy  # type: ignore[attr-defined]
    torch.Tensor.cuda = _cuda  # type: ignore[method-assign,assignment]
    torch.Tensor.type = _type  # type: ignore[method-assign,assignment]
