"""A gathering of weights that fails at a chosen tensor."""

from __future__ import annotations

from typing import Any

from converters.gathering import WeightGathering


class OutOfMemoryError(RuntimeError):
    """Same class name as torch's error."""


def break_gathering(gathering: WeightGathering, fault: str) -> None:
    """Let the next gathering fail on this rank, at one of the places that allocate memory."""
    calls = 0

    def fail(original: Any, at: int) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == at:
                raise OutOfMemoryError(f"CUDA out of memory in {fault}")
            return original(*arguments, **options)

        return call

    if fault == "buffer":
        gathering.plan = fail(gathering.plan, 1)  # type: ignore[method-assign]
    elif fault.startswith("read"):
        local = gathering.local
        local.read = fail(local.read, int(fault[4:]))  # type: ignore[method-assign]
    elif fault.startswith("stack"):
        local = gathering.local
        local.read_stack = fail(local.read_stack, int(fault[5:]))  # type: ignore[method-assign]
