"""The scoped shim with which Megatron runs without CUDA.

Eleven modules of megatron-core 0.19.2 (schedules, data parallelism, optimizer, checkpointing) call
``torch.cuda`` unconditionally. ``enable_cpu_runtime`` gives exactly those modules another object
under the name ``torch``: the same library, but its streams and synchronisation do nothing and
device "cuda" means the CPU. Two Tensor methods look at who calls them. Nothing outside
megatron-core notices, and where CUDA is available nothing happens at all.
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
"""Modules below megatron.core."""

FACTORIES = ("zeros", "ones", "empty", "tensor", "full", "arange")
"""Functions of torch that those modules call with a CUDA device."""

_CPU = torch.device("cpu")


class _NullStream:
    """A CUDA stream or event on which everything has already happened."""

    def __getattr__(self, name: str) -> Callable[..., Self]:
        return lambda *args, **kwargs: self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None: ...


class _Proxy(types.ModuleType):
    """A module that has the attributes of ``target``, but for those that are set on it."""

    def __init__(self, target: types.ModuleType) -> None:
        super().__init__(target.__name__)
        self.__dict__["_target"] = target

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_target"], name)


def _create_on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = _CPU
        return factory(*args, **kwargs)

    return create


def _torch_without_cuda() -> _Proxy:
    """Build the object that Megatron's modules get as ``torch``."""
    stream = _NullStream()
    cuda = _Proxy(torch.cuda)
    for name in ("synchronize", "empty_cache"):
        setattr(cuda, name, lambda *args, **kwargs: None)
    for name in ("current_stream", "stream", "Stream", "Event"):
        setattr(cuda, name, lambda *args, **kwargs: stream)
    cuda.current_device = lambda: _CPU  # type: ignore[attr-defined]

    # Only the modules that get this object see it: torch itself stays as it is.
    proxy = _Proxy(torch)
    proxy.cuda = cuda  # type: ignore[attr-defined]
    for name in FACTORIES:
        setattr(proxy, name, _create_on_cpu(getattr(torch, name)))
    return proxy


def _called_from(path: str) -> bool:
    """Return whether the function that called this one's caller is in a file below ``path``."""
    return path in sys._getframe(2).f_code.co_filename


_original_cuda = torch.Tensor.cuda
_original_type = torch.Tensor.type


def _cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Replace Tensor.cuda: the identity for Megatron, an error as before for everyone else."""
    if _called_from("/megatron/core/"):
        return self
    return _original_cuda(self, *args, **kwargs)


def _type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Replace Tensor.type: for Megatron's optimizers, tensors have the types of CUDA tensors.

    They compare with "torch.cuda.FloatTensor" to tell parameters apart.
    """
    result = _original_type(self, *args, **kwargs)
    if args or kwargs or not _called_from("/megatron/core/optimizer/"):
        return result
    return result.replace("torch.", "torch.cuda.", 1)


def enable_cpu_runtime() -> None:
    """Install the shim; does nothing where CUDA is available or when called again."""
    if torch.cuda.is_available() or torch.Tensor.cuda is _cuda:
        return

    # Modules have looked torch up by its name when they were imported; that name is replaced.
    proxy = _torch_without_cuda()
    for name in PATCHED_MODULES:
        module = importlib.import_module(f"megatron.core.{name}")
        module.torch = proxy  # type: ignore[attr-defined]
    torch.Tensor.cuda = _cuda  # type: ignore[method-assign,assignment]
    torch.Tensor.type = _type  # type: ignore[method-assign,assignment]
