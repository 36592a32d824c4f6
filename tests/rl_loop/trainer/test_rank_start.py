"""Start of trainer ranks: progress, time limit, and the number of ranks per machine."""

from __future__ import annotations

import re

import pytest

from rl_loop.trainer import rank_start
from rl_loop.trainer.rank_start import (
    RankStartError,
    check_local_ranks,
    start_limit,
    wait_for_processes,
)


class Ray:
    """A mock ``ray.wait`` with a mock clock. Each call is the time in seconds of its answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(rank_start.time, "monotonic", lambda: self.now)
        monkeypatch.setattr("ray.wait", self.wait)

    def wait(
        self, calls: list[float], num_returns: int, timeout: float
    ) -> tuple[list[float], list[float]]:
        self.now = min(self.now + timeout, max(self.now, *(1000 + seconds for seconds in calls)))
        done = [seconds for seconds in calls if 1000 + seconds <= self.now]
        return done, [seconds for seconds in calls if seconds not in done]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Ray:
    return Ray(monkeypatch)


def test_slow_ranks_are_counted_as_they_start(clock: Ray, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        wait_for_processes([4.0 * rank for rank in range(1, 9)], limit=300)
    *news, end = caplog.messages
    assert end == "all 8 trainer ranks have started and load their weights"
    counts = [
        int(re.fullmatch(r"starting trainer ranks: (\d) of 8 after \d+ s", line)[1])
        for line in news
    ]
    assert len(counts) == 3
    assert counts == sorted(counts)
    assert counts[0] == 2


def test_fast_ranks_log_nothing(clock: Ray, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        wait_for_processes([0.5, 1.0], limit=300)
    assert caplog.messages == []


def test_start_limit_reports_how_many_ranks_started(
    clock: Ray, caplog: pytest.LogCaptureFixture
) -> None:
    told = r"3 of 4 trainer ranks started within 60 s .*parallel\.world_size"
    with caplog.at_level("INFO"), pytest.raises(RankStartError, match=told):
        wait_for_processes([1.0, 2.0, 3.0, 1e9], limit=60)
    assert clock.now - 1000 < 70
    assert len(caplog.messages) == 6


@pytest.mark.parametrize(("ranks", "cores", "lines"), [(1, 2, 0), (2, 2, 0), (3, 2, 1), (16, 2, 1)])
def test_ranks_that_share_cores_log_one_warning(
    ranks: int, cores: int, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    check_local_ranks(ranks, cores)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * lines
    for message in caplog.messages:
        assert f"{ranks} trainer ranks share {cores} cores" in message
        assert "\n" not in message


def test_far_too_many_ranks_are_rejected() -> None:
    with pytest.raises(
        RankStartError,
        match=r"parallel\.world_size is 64, but this machine has 2 cores and no GPUs",
    ):
        check_local_ranks(64, 2)


def test_start_limit_grows_with_ranks_per_core() -> None:
    assert start_limit(2, 2) == rank_start.START_SECONDS
    assert start_limit(16, 2) == rank_start.START_SECONDS + 7 * rank_start.SECONDS_PER_SHARED_RANK
