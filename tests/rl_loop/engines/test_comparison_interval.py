"""Compared syncs cover every layer, whatever the number of layers."""

import pytest

from rl_loop.engines.sglang.fleet import MIN_VERSIONS_BETWEEN_COMPARISONS, comparison_interval

MAX_OUTSIDE_LAYERS = 3


@pytest.mark.parametrize("num_layers", [2, 24, 28, 30, 32, 36, 64, 77, 80])
def test_compared_versions_choose_every_layer(num_layers: int) -> None:
    interval = comparison_interval(num_layers)
    assert MIN_VERSIONS_BETWEEN_COMPARISONS <= interval <= 13
    compared = range(0, interval * num_layers * MAX_OUTSIDE_LAYERS, interval)
    assert {version % num_layers for version in compared} == set(range(num_layers))
    for parameters in range(1, MAX_OUTSIDE_LAYERS + 1):
        assert {version % parameters for version in compared} == set(range(parameters))
