"""Parallel layouts with two ranks."""

from __future__ import annotations

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
