"""Replaces SGLang's compiled kernels, which need AMX or a GPU. Calls raise an error."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> None:
        raise NotImplementedError(f"{name} has no stand-in for CPUs")

    return missing
