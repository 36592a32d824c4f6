"""Fixtures of the tests of the launcher."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.launch.forked_command import ForkedCommand, forked_command


@pytest.fixture(scope="session")
def command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedCommand]:
    """``gptoss`` for tests that run it often and do not test its start."""
    with forked_command(tmp_path_factory.mktemp("said")) as command:
        yield command


@pytest.fixture(scope="session")
def slurm_command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedCommand]:
    """``gptoss`` for commands that write a Slurm job, with nemo-run imported: 2.5 s."""
    directory = tmp_path_factory.mktemp("said_of_slurm")
    with forked_command(directory, ["launch.slurm_job"]) as command:
        yield command
