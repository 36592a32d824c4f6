"""Megatron's functions without torch's compiler, where there is no GPU to fuse them for.

Megatron-core decorates some 30 functions with ``torch.compile`` when it is imported. That imports
the compiler, which takes a quarter of the processor time of a trainer's start. On a CPU the functions
give the same bits as they are."""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

PACKAGE = "megatron.core"
"""Which imports what it decorates."""


def _leave_as_it_is(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Stand for ``torch.compile``, as a decorator with or without options."""
    if function is None:
        return _leave_as_it_is
    return function


class _UncompiledLoader(Loader):
    """Imports that package while nothing is compiled."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Megatron imports it anyway, but this file is read where nothing needs torch.
        import torch

        if torch.cuda.is_available():
            self._loader.exec_module(module)
            return
        original = torch.compile
        torch.compile = _leave_as_it_is  # type: ignore[assignment]
        try:
            self._loader.exec_module(module)
        finally:
            torch.compile = original


class _PackageFinder(MetaPathFinder):
    """Finds that package, and nothing else."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != PACKAGE:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _UncompiledLoader(spec.loader)
        return spec


def compile_only_on_gpus() -> None:
    """See to it that Megatron-core, imported later, uses torch's compiler only where CUDA is
    available. Does nothing when called again."""
    if not any(isinstance(finder, _PackageFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _PackageFinder())
