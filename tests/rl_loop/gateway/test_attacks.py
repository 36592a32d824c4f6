"""Delay of other clients and memory of a gateway that is attacked."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.rl_loop.gateway.attacks import BODIES, HELD

# These tests take minutes, because a server takes seconds to reject some of the requests.
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
LONGEST_DELAY = 0.05
"""Longest delay in seconds that requests of one client may cause for other clients."""
MEMORY = 512 * 1024**2
"""Maximum bytes that all attacks may add in total."""
ATTACK_SECONDS = 0.5
HEADERS_END = 15.0
"""Seconds after which the server has closed every connection without a request."""


@dataclass
class Attacked:
    """A server in a separate process."""

    process: subprocess.Popen[str]
    port: int

    def state(self) -> tuple[int, int, float]:
        """Return the state of the server.

        Returns:
            The peak memory in bytes, the number of open files, and the longest delay since the
            last call in seconds.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        peak, files, delay = self.process.stdout.readline().split()
        return int(peak), int(files), float(delay)


@contextmanager
def server() -> Iterator[Attacked]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.rl_loop.gateway.attacked_server"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    try:
        yield Attacked(process, int(process.stdout.readline()))
    finally:
        process.terminate()
        process.wait(timeout=30)


@pytest.fixture(scope="module")
def attacked() -> Iterator[Attacked]:
    with server() as started:
        yield started


@pytest.fixture(scope="module")
def control() -> Iterator[Attacked]:
    """A server that is not attacked. Its delays show the load of the machine."""
    with server() as started:
        yield started


def be_served(attacked: Attacked, attack: subprocess.Popen[str]) -> None:
    """Send the requests of another client until an attack is over."""
    headers = {"Authorization": "Bearer sk-victim"}
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8})
    while attack.poll() is None:
        for method, path, data in (
            ("GET", "/v1/models", None),
            ("POST", "/v1/chat/completions", body),
        ):
            client = http.client.HTTPConnection("127.0.0.1", attacked.port, timeout=60)
            client.request(method, path, data, headers)
            assert client.getresponse().status == 200
            client.close()
        time.sleep(0.01)


def begin(attacked: Attacked, name: str, seconds: float) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "tests.support.rl_loop.gateway.attacks",
        str(attacked.port),
        name,
    ]
    return subprocess.Popen([*command, str(seconds)], stdout=subprocess.PIPE, text=True, cwd=ROOT)


def statuses(attack: subprocess.Popen[str]) -> dict[str, Any]:
    assert attack.stdout is not None
    counted: dict[str, Any] = json.loads(attack.stdout.read().splitlines()[-1])
    return counted


@pytest.mark.parametrize("name", BODIES)
def test_other_clients_are_served_in_time_during_an_attack(
    attacked: Attacked, control: Attacked, name: str
) -> None:
    control.state()
    before, _, _ = attacked.state()
    attack = begin(attacked, name, ATTACK_SECONDS)
    be_served(attacked, attack)
    assert statuses(attack)
    after, _, delay = attacked.state()
    _, _, delay_of_machine = control.state()
    assert delay - delay_of_machine < LONGEST_DELAY
    assert after - before < MEMORY


def test_connections_without_a_request_are_closed(attacked: Attacked, control: Attacked) -> None:
    control.state()
    _, before, _ = attacked.state()
    attacks = [begin(attacked, name, HEADERS_END) for name in HELD]
    time.sleep(2)
    _, meanwhile, _ = attacked.state()
    assert meanwhile - before < 300
    for attack in attacks:
        be_served(attacked, attack)
    assert [statuses(attack) for attack in attacks] == [{"open": 0}] * len(HELD)
    assert attacked.state()[2] - control.state()[2] < LONGEST_DELAY
