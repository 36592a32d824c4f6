"""Running shell sandboxes for the tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.rl_loop.sandbox.shells import Shells


@pytest.fixture(scope="session")
def image_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the image store of the suite. Its workers share it."""
    folder = tmp_path_factory.getbasetemp()
    return (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "shell-images"


@pytest.fixture(scope="session")
def shells(image_store: Path) -> Iterator[Shells]:
    """Return a running fork server. It fails with the reason if this machine has no isolation."""
    running = Shells(image_store)
    yield running
    running.close()
