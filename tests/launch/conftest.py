"""What several tests of this room need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.launch.forked_command import ForkedCommand, forked_command


@pytest.fixture(scope="session")
def command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedCommand]:
    """``gptoss``, for tests that run it often and are not about how it starts."""
    with forked_command(tmp_path_factory.mktemp("said")) as command:
        yield command
