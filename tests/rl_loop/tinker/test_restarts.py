"""The command is killed in every state and started again. 2,000 samples need no more memory."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.processor_speed import slowness
from tests.support.rl_loop.tinker_client import DATA, MODEL, TOKENS, datum, log_probs_of, tinker
from tests.support.rl_loop.tinker_server import KEY, SMALLER, running_server

pytestmark = pytest.mark.slow


class Killable:
    """A server in another process."""

    def __init__(self, directory: Path) -> None:
        command = [sys.executable, "-m", "launch", "tinker", "tiny", *SMALLER, "--port=0"]
        self.process = subprocess.Popen(
            [*command, f"output_dir={directory}", "tinker.turn_tokens=512"],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        lines = [self.process.stdout.readline() for _ in range(3)]
        self.url, self.key = (line.strip().partition("=")[2] for line in lines[1:])

    def client(self) -> Any:
        return tinker.ServiceClient(base_url=self.url, api_key=self.key)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def resident_megabytes(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+) kB", status)
        assert found is not None
        return int(found[1]) / 1024


@contextmanager
def running(directory: Path) -> Iterator[Killable]:
    server = Killable(directory)
    try:
        yield server
    finally:
        with suppress(ProcessLookupError):
            os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()


def step(train: Any, number: int) -> list[float]:
    """Take a step that depends on its number, and return the log-probs before it."""
    tokens = [(3 * number + 5 * i) % 90 for i in range(8)]
    rows = [datum(tokens, weights=[1.0] * 7), datum(TOKENS, **DATA)]
    passed = train.forward_backward(rows, "cross_entropy")
    train.optim_step(tinker.AdamParams(learning_rate=0.02)).result()
    return [value for row in log_probs_of(passed.result()) for value in row.tolist()]


GIANT = [datum(TOKENS, **DATA)] * 3000


def during_a_pass(train: Any, directory: Path) -> None:
    train.forward_backward(GIANT, "cross_entropy")
    time.sleep(0.3)


def between_pass_and_step(train: Any, directory: Path) -> None:
    train.forward_backward([datum(TOKENS, **DATA)], "cross_entropy").result()


def with_a_full_queue(train: Any, directory: Path) -> None:
    for _ in range(20):
        train.forward_backward([datum(TOKENS, **DATA)], "cross_entropy")
        train.optim_step(tinker.AdamParams())


def during_a_save(train: Any, directory: Path) -> None:
    """Wait for the directory of an unfinished checkpoint."""
    for number in range(300):
        train.save_state(f"other-{number % 2}", overwrite=True)
    deadline = time.monotonic() + 20 * slowness()
    while not any(directory.glob("*/tinker/*/weights/*.partial")):
        assert time.monotonic() < deadline, "no save was seen"


def during_sampling(train: Any, directory: Path) -> None:
    sampler = train.save_weights_and_get_sampling_client().result()
    options = tinker.SamplingParams(max_tokens=200, stop=[])
    sampler.sample(tinker.ModelInput.from_ints(TOKENS), 64, options)
    time.sleep(0.3)


STATES: list[Callable[[Any, Path], None]] = [
    during_a_pass,
    between_pass_and_step,
    with_a_full_queue,
    during_a_save,
    during_sampling,
]


def test_killed_server_goes_on_from_checkpoints(tmp_path: Path) -> None:
    """Each state is one process. Its step after a resume has the bits of uninterrupted training."""
    with running(tmp_path / "whole") as server:
        train = server.client().create_lora_training_client(base_model=MODEL, rank=8, seed=1)
        expected = [step(train.result(), number) for number in range(len(STATES) + 1)]

    found = []
    path = key = None
    for number, reach in enumerate(STATES):
        with running(tmp_path) as server:
            assert key in (None, server.key)
            key = server.key
            client = server.client()
            if path is None:
                train = client.create_lora_training_client(base_model=MODEL, rank=8, seed=1)
            else:
                train = client.create_training_client_from_state_with_optimizer(path)
            found.append(step(train.result(), number))
            path = train.result().save_state(f"step-{number}").result().path
            reach(train.result(), tmp_path)
            server.kill()
    with running(tmp_path) as server:
        assert not any(tmp_path.glob("*/tinker/*/weights/*.partial"))
        client = server.client()
        resumed = client.create_training_client_from_state_with_optimizer(path).result()
        found.append(step(resumed, len(STATES)))
        assert found == expected
        # Checkpoints that were overwritten at the time are whole.
        rest = tinker.RestClient(base_url=server.url, api_key=server.key)
        checkpoints = rest.list_user_checkpoints(limit=100).result().checkpoints
        assert len(checkpoints) >= len(STATES)
        for checkpoint in checkpoints:
            resumed.load_state(checkpoint.tinker_path).result()


def test_2000_samples_at_once_need_no_more_memory(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        client = server.client()
        train = client.create_lora_training_client(base_model=MODEL, rank=8, seed=1).result()
        sampler = train.save_weights_and_get_sampling_client().result()
        options = tinker.SamplingParams(max_tokens=2, stop=[])
        prompt = tinker.ModelInput.from_ints(TOKENS * 20)
        used = []
        for _ in range(4):
            futures = [sampler.sample(prompt, 1, options) for _ in range(2000)]
            answers = [future.result() for future in futures]
            assert all(len(one.sequences[0].tokens) == 2 for one in answers)
            used.append(server.resident_megabytes())
        print("resident MB after each burst:", used)
        # The first burst fills caches. Answers are kept for a while.
        assert used[-1] - used[0] < 60


def test_two_ranks_train_as_one(tmp_path: Path) -> None:
    """Two passes and a step of data-parallel ranks, and a step after a resume."""
    norms = []
    for world in (1, 2):
        overrides = [*SMALLER, f"parallel.world_size={world}"]
        with running_server(tmp_path / str(world), overrides) as server:
            client = tinker.ServiceClient(base_url=server.url, api_key=KEY)
            train = client.create_lora_training_client(base_model=MODEL, rank=8, seed=1).result()
            settings = tinker.AdamParams(learning_rate=0.02)
            found = []
            for _ in range(2):
                for _ in range(2):
                    train.forward_backward([datum(TOKENS, **DATA)] * 3, "cross_entropy")
                found.append(train.optim_step(settings).result().metrics["grad_norm"])
                path = train.save_state("state", overwrite=True).result().path
                train = client.create_training_client_from_state_with_optimizer(path).result()
            sampler = train.save_weights_and_get_sampling_client().result()
            scores = sampler.compute_logprobs(tinker.ModelInput.from_ints(TOKENS)).result()
            norms.append([*found, *scores[1:]])
            client.close("success").result()
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
