"""Import of Megatron-core without torch.compile on machines without a GPU.

Megatron-core decorates about 30 functions with ``torch.compile`` at import. That imports the
compiler, which takes 25% of the CPU time of a trainer's start. On a CPU the functions give the same
bits without it.
"""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

PACKAGE = "megatron.core"
"""Package whose import imports all decorated functions."""


def _uncompiled(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Replacement of ``torch.compile`` that returns the function, with or without options."""
    if function is None:
        return _uncompiled
    return function


class _UncompiledLoader(Loader):
    """Loader that executes PACKAGE with ``torch.compile`` replaced."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Create the module as usual."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module, without a GPU with ``torch.compile`` replaced."""
        # Import torch here: this file is also imported by code that does not need torch.
        import torch

        if torch.cuda.is_available():
            self._loader.exec_module(module)
            return
        original = torch.compile
        torch.compile = _uncompiled  # type: ignore[assignment]
        try:
            self._loader.exec_module(module)
        finally:
            torch.compile = original


class _PackageFinder(MetaPathFinder):
    """Import finder for PACKAGE only."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the specification of PACKAGE with the special loader; None for other modules."""
        if fullname != PACKAGE:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _UncompiledLoader(spec.loader)
        return spec


def compile_only_on_gpus() -> None:
    """Disable torch.compile for a later import of Megatron-core, if CUDA is not available.

    Does nothing when called again.
    """
    if not any(isinstance(finder, _PackageFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _PackageFinder())
