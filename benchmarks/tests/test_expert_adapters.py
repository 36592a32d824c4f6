"""GEMMs of benchmarks/experts/adapters.py in Triton's interpreter."""

from __future__ import annotations

from tests.support.rl_loop.plugin_process import run_with_plugin

PROGRAM = """
import torch
from benchmarks.experts import adapters
from tests.support.rl_loop.engines.adapted_experts import interpreted_bf16
from tests.support.rl_loop.engines.expert_matmul_interpreted import interpreted_values

adapters.moe.scaled_values = interpreted_values
for module in (adapters.moe, adapters.adapted):
    module.to_bf16 = interpreted_bf16

sizes = (4, 2, 160)
generator = torch.Generator().manual_seed(0)
layers = adapters.make_layers(2, sizes, 3, generator)
factors = [matrices.adapter for layer in layers for matrices in layer]
for adapter in factors:
    adapter.a.data, adapter.b.data = adapter.a.float(), adapter.b.float()

steps = [adapters.Step(requests, layers, sizes, generator, torch.float32) for requests in (3, 40)]
bases = [step.run(False).clone() for step in steps]
for step, base in zip(steps, bases):
    change = float((step.run(True) - base).norm() / base.norm())
    print(bool(base.isfinite().all()), 0 < change < 0.1)
for adapter in factors:
    adapter.b.zero_()
for step, base in zip(steps, bases):
    print(torch.equal(step.run(True), base))
"""


def test_adapters_change_the_timed_step() -> None:
    """The output differs from the base's, and equals it if B is zero."""
    said = run_with_plugin("-c", PROGRAM, interpreted=True)
    assert said.split("\n") == ["True True", "True True", "True", "True", ""]
