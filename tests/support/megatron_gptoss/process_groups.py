"""A fixture with the process groups of one rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megatron_gptoss import distributed
from megatron_gptoss.config import ParallelConfig
from rl_loop.cluster.placement import free_port


@pytest.fixture(scope="module")
def process_groups() -> Iterator[None]:
    """Create Megatron's process groups of one rank in this process, for the tests of a module."""
    distributed.initialize(ParallelConfig(), port=free_port())
    yield
    distributed.shutdown()
