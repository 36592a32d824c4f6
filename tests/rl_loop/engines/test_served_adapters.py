"""Unmerged adapters from training steps to log-probs of a server, with the plugin's storage and kernels on a CPU."""

from __future__ import annotations

import json

import pytest

from tests.support.rl_loop.plugin_process import run_with_plugin


@pytest.fixture(scope="module")
def gaps() -> dict[str, dict[str, float]]:
    program = "tests.support.rl_loop.engines.served_adapters"
    said = run_with_plugin("-m", program, interpreted=True)
    found: dict[str, dict[str, float]] = json.loads(said.splitlines()[-1])
    return found


@pytest.mark.parametrize("step", [0, 1])
def test_server_has_the_log_probs_of_the_trainer(
    step: int, gaps: dict[str, dict[str, float]]
) -> None:
    """In fp32 both compute the same sums. The first sync has the base, the second has not."""
    assert gaps[f"step {step}"]["largest"] < 1e-5


def test_rounding_of_a_server_changes_log_probs_little(gaps: dict[str, dict[str, float]]) -> None:
    # The server rounds each expert's output to bf16, by at most 2**-9, in 2 layers.
    assert 1e-5 < gaps["rounded"]["mean"] < 4e-3


def test_log_probs_differ_until_the_sync(gaps: dict[str, dict[str, float]]) -> None:
    assert gaps["before the sync"]["mean"] > 0.1
