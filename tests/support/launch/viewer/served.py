"""A listening viewer, for tests of its server and its pages."""

import asyncio
import http.client
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from launch.viewer.server import open_server
from rl_loop.tracking.metrics import MetricName, MetricsWriter, StepMetrics
from rl_loop.tracking.run_directory import RunDirectory, start_run
from tests.support.recorded_episodes import record_steps


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Served:
    """Address and runs of the viewer."""

    address: str
    port: int

    def get(
        self, path: str, headers: Mapping[str, str] | None = None, method: str = "GET"
    ) -> Answer:
        """Request a path without normalizing it."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, path, headers=dict(headers or {}))
        response = connection.getresponse()
        answer = Answer(response.status, dict(response.getheaders()), response.read())
        connection.close()
        return answer


@contextmanager
def served(*paths: Path, host: str = "127.0.0.1", ask_for_token: bool = False) -> Iterator[Served]:
    """Serve runs in a thread of this process."""
    server = open_server(list(paths), host, 0, ask_for_token)
    loop = asyncio.new_event_loop()
    runner = web.AppRunner(server.viewer.application(), access_log=None, shutdown_timeout=1)

    async def begin() -> None:
        await runner.setup()
        await web.SockSite(runner, server.listener).start()

    thread = threading.Thread(target=loop.run_forever, name="viewer")
    thread.start()
    asyncio.run_coroutine_threadsafe(begin(), loop).result(60)
    try:
        yield Served(server.address, server.listener.getsockname()[1])
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()


CONFIG = "training:\n  steps: {steps}\nalgorithm:\n  mini_batches: 1\n"


class ExampleRun:
    """A run that grows on request."""

    def __init__(
        self,
        path: Path,
        steps: int = 0,
        of: int = 100,
        config: str = CONFIG,
        episodes: int | None = None,
    ) -> None:
        """Start a run.

        Args:
            path: directory of the run.
            steps: finished steps.
            of: planned steps.
            config: configuration, with "{steps}" for the planned steps.
            episodes: number of first steps whose episodes are recorded; None for all.
        """
        self.directory: RunDirectory = start_run(path, config.format(steps=of))
        self._recorded = episodes
        self._writer = MetricsWriter(self.directory)
        self._step = 0
        self.add(steps)

    def add(self, steps: int, **values: float) -> None:
        """Add finished steps. ``values`` replace the default metrics."""
        first = self._step
        self._step += steps
        steps = range(first + 1, self._step + 1)
        recorded = [step for step in steps if self._recorded is None or step <= self._recorded]
        if recorded:
            record_steps(self.directory.episodes, recorded)
        for step in steps:
            metrics = StepMetrics(step)
            usual = {
                MetricName.REWARD: (step - 1) / 20 - 1,
                MetricName.ACCURACY: min(1.0, (step - 1) / 40),
                MetricName.LOG_PROB_GAP: 1e-6,
                "ratio/deviation_max": 0.0,
                MetricName.GRAD_NORM: 0.5,
                MetricName.ENTROPY: 1.0,
                MetricName.STEP_SECONDS: 2.0,
                "seconds/rollout": 1.2,
                "seconds/update": 0.6,
                "rollout/invalid_fraction/sandbox": 0.0,
                MetricName.ZERO_ADVANTAGE_FRACTION: 0.1,
            }
            for name, value in (usual | values).items():
                metrics.add(name, value, "last")
            self._writer.write(metrics)

    def evaluate(self, **values: float) -> None:
        """Record an evaluation at the current step."""
        metrics = StepMetrics(self._step)
        for name, value in values.items():
            metrics.add(name, value, "last")
        self._writer.write(metrics)

    def close(self) -> None:
        self._writer.close()
