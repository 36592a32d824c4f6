"""Parallel layouts with two ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

LAYOUTS = {
    "data": {},
    "expert": {"expert": 2},
    "pipeline": {"pipeline": 2},
    "interleaved": {"pipeline": 2, "virtual_pipeline": 2},
    "uneven pipeline": {"pipeline": 2, "last_stage_layers": 1},
    "tensor+sequence": {"tensor": 2},
    "tensor+sequence+expert": {"tensor": 2, "expert": 2},
    "context": {"context": 2},
}


def layout_cases(layouts: Iterable[str], slow: Iterable[str]) -> list[Any]:
    """Return parameters of a test. Those in ``slow`` combine what other layouts have, too."""
    slow = {*slow}
    return [pytest.param(name, marks=pytest.mark.slow if name in slow else ()) for name in layouts]


def selected_layouts(request: pytest.FixtureRequest) -> list[str]:
    """Return the values of the parameter ``layout`` in the selected tests of a module, in order."""
    selected = [
        item.callspec.params["layout"]
        for item in request.session.items
        if item.path == request.path
        and hasattr(item, "callspec")
        and "layout" in item.callspec.params
    ]
    return list(dict.fromkeys(selected))
