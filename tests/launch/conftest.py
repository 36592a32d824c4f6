"""Fixtures of the launcher's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.launch.forked_command import ForkedCommand, forked_command


@pytest.fixture(scope="session")
def command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedCommand]:
    """Return a forked ``gptoss`` for tests that run it often and do not test its start-up."""
    with forked_command(tmp_path_factory.mktemp("said")) as command:
        yield command


@pytest.fixture(scope="session")
def slurm_command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedCommand]:
    """Return a forked ``gptoss`` with nemo-run imported, which takes 2.5 s, for Slurm jobs."""
    directory = tmp_path_factory.mktemp("said_of_slurm")
    with forked_command(directory, ["launch.slurm_job"]) as command:
        yield command
