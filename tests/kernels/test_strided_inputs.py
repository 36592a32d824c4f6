"""Kernels that compute addresses without strides copy inputs that are not contiguous."""

from tests.support.kernels.interpreted import run_interpreted


def test_kernels_give_equal_results_for_strided_inputs() -> None:
    run_interpreted("strided_inputs_interpreted")
