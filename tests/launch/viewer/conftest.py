"""Fixtures of the tests in Chromium. All of them use one browser."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.launch.viewer.served import ExampleRun, Served, served


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="see tests/launch/viewer/install.sh")
    executable = shutil.which("chromium")
    if executable is None:
        pytest.skip("there is no chromium: see tests/launch/viewer/install.sh")
    with api.sync_playwright() as playwright:
        # Root cannot use Chromium's sandbox, and tests in containers run as root.
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield browser
        browser.close()


def two_runs(folder: Path) -> ExampleRun:
    """Create a growing run, next to a finished one."""
    other = ExampleRun(folder / "ended", steps=12)
    other.directory.write_summary(held_out_accuracy_rl=0.75)
    other.close()
    return ExampleRun(folder / "growing", steps=20)


@pytest.fixture(scope="session")
def viewer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Serve two runs that no test changes."""
    folder = tmp_path_factory.mktemp("viewed")
    two_runs(folder).close()
    with served(folder) as server:
        yield server


@pytest.fixture
def run(tmp_path: Path) -> Iterator[ExampleRun]:
    """Create two runs for a test that changes the growing one."""
    growing = two_runs(tmp_path / "runs")
    yield growing
    growing.close()


@pytest.fixture
def run_viewer(run: ExampleRun) -> Iterator[Served]:
    """Serve the run of this test."""
    with served(run.directory.path.parent) as server:
        yield server
