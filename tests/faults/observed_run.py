"""A run under fault injection: its settings, its attempts, and its records."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import psutil

from rl_loop.config.load import load_config
from rl_loop.config.run import RlConfig
from rl_loop.harmony.codec import ParsedMessage
from rl_loop.run_parts import build_tasks
from rl_loop.tracking.episode_reader import EpisodeReader
from rl_loop.tracking.run_directory import RunDirectory, RunDirectoryError, read_json_lines
from tests.faults.options import Options

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs/rl/tiny_retool.yaml"
PYTHON = (sys.executable,)
"""Command that runs Python programs. A test replaces it."""
MARK = "GPTOSS_FAULT_RUN"
"""Environment variable of all processes of an attempt. Its value identifies the attempt."""
TASKS_PER_STEP = 2
SAMPLES_PER_TASK = 4
CHECKPOINT_EVERY = 2
RESERVED_STEPS = 60
"""Additional steps of a run, after the steps with faults.

A fast machine completes this many steps during a SIGSTOP of 20 s for one of two workers.
"""
BUCKET_BYTES = 40_000
"""Bucket size of a weight sync. The size is small, so that a sync has several buckets."""
FILE_SYSTEM_BYTES = 96 << 20
ENVIRONMENT = MappingProxyType(
    {
        # GPUs add in varying order, and the test compares runs bit by bit
        "CUDA_VISIBLE_DEVICES": "",
        # otherwise Ray starts an idle worker for each core in every attempt
        "RAY_prestart_worker_first_driver": "0",
    }
)
"""Environment variables of every attempt."""


class Numbers(NamedTuple):
    """Numbers of a step that must equal the undisturbed run."""

    loss: float
    entropy: float
    """Mean over the trained tokens. It distinguishes episodes if the rewards are equal.

    The loss of episodes with equal rewards is always 0.
    """


@dataclass(frozen=True)
class RecordedStep:
    """A line of ``metrics.jsonl`` of a step that was trained on."""

    step: int
    numbers: Numbers
    time: float
    """Seconds since the epoch."""


class Attempt:
    """A driver and all processes that it starts."""

    def __init__(
        self,
        config: Path,
        arguments: list[str],
        log: Path,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Start ``gptoss rl`` with a separate Ray.

        Args:
            config: configuration of the run.
            arguments: further arguments of the command.
            log: file for the output.
            environment: variables that replace or extend the environment of this process.
        """
        self.mark = uuid.uuid4().hex
        self.began = time.time()
        self._log = log
        with log.open("wb") as output:
            self.driver = subprocess.Popen(
                [*PYTHON, "-m", "launch", "rl", str(config), *arguments],
                cwd=ROOT,
                env={**own_environment(self.mark), **environment},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def has_ended(self) -> bool:
        return self.driver.poll() is not None

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def last_error(self, seconds: float = 0.0) -> str:
        """Return the last error line of a failed command; empty if none appears in ``seconds``.

        The wait is necessary if a node dies. A process that outlives the driver reports it.
        """
        deadline = time.monotonic() + seconds
        while True:
            lines = [line for line in self.output.splitlines() if line.startswith("gptoss: ")]
            if lines or time.monotonic() > deadline:
                return lines[-1] if lines else ""
            time.sleep(0.1)

    def processes(self, name: str = "") -> list[psutil.Process]:
        """List living processes of the attempt whose command line contains ``name``."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(MARK) != self.mark:
                    continue
                line = " ".join(process.cmdline())
                if line and name in line and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def leftovers(self, seconds: float) -> list[str]:
        """Wait up to ``seconds`` for all processes to exit. Kill and return the others."""
        deadline = time.monotonic() + seconds
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.5)
        lines = []
        for process in left:
            with suppress(psutil.Error):
                lines.append(" ".join(process.cmdline())[:80])
                process.kill()
        return lines

    def kill_everything(self) -> int:
        """Kill all processes of the attempt like a power failure, and return their number.

        The loop also kills processes that a killed process has just started.
        """
        killed = set()
        while alive := self.processes():
            for process in alive:
                with suppress(psutil.Error):
                    process.kill()
                    # A killed process may still be visible for a moment.
                    killed.add(process.pid)
            self.driver.poll()
        self.driver.wait()
        return len(killed)

    def stop_after_step(self, seconds: float) -> bool:
        """Request a stop after the current step. Return True if the run has stopped normally."""
        self.driver.terminate()
        with suppress(subprocess.TimeoutExpired):
            return self.driver.wait(seconds) in (0, 128 + signal.SIGTERM)
        return False


def own_environment(mark: str) -> dict[str, str]:
    """Return the environment of an attempt: that of this process, without the address of a Ray.

    Every attempt starts a separate Ray, so several tests can run concurrently.
    """
    paths = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        MARK: mark,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("RAY_ADDRESS", None)
    return environment


class ObservedRun:
    """A run under fault injection, from its first step. It may consist of several attempts."""

    def __init__(self, options: Options, directory: Path, further: Sequence[str] = ()) -> None:
        """Prepare the run. ``further`` has additional settings."""
        self.directory = directory
        self.orders = directory / "orders"
        self.orders.mkdir(parents=True, exist_ok=True)
        self.servers = options.servers
        self._overrides = [*overrides(options, directory, self.orders), *further]
        self.config = load_config(CONFIG, RlConfig, self._overrides)
        self.files = RunDirectory(self.config.directory)
        self.attempts: list[Attempt] = []

    def start(self, resume: bool = False) -> Attempt:
        """Start an attempt. ``resume`` continues the run if it has begun."""
        for stale in self.orders.iterdir():
            stale.unlink(missing_ok=True)
        log = self.directory.with_name(f"{self.directory.name}_{len(self.attempts)}.log")
        goes_on = resume and self.files.existing()
        arguments = [*self._overrides, *(["--resume"] if goes_on else [])]
        self.attempts.append(Attempt(CONFIG, arguments, log, ENVIRONMENT))
        return self.attempts[-1]

    def close(self) -> None:
        """Kill the processes of all attempts, for example after an interruption of the test."""
        for attempt in self.attempts:
            attempt.kill_everything()

    def wait_for_step(self, attempt: Attempt, seconds: float) -> bool:
        """Wait until this attempt has a step or has ended. Return True if it has a step."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.newest_time() > attempt.began:
                return True
            if attempt.has_ended:
                return False
            time.sleep(0.3)
        return False

    def recorded(self) -> list[RecordedStep]:
        """Return the recorded steps in the order of the file."""
        try:
            lines = read_json_lines(self.files.metrics)
        except RunDirectoryError:  # the file does not exist yet, or its last line is incomplete
            return []
        return [
            RecordedStep(line["step"], Numbers(line["loss"], line["entropy"]), float(line["time"]))
            for line in lines
            if line.get("loss") is not None
        ]

    def curve(self) -> dict[int, Numbers]:
        """Return the numbers of every recorded step."""
        return {step.step: step.numbers for step in self.recorded()}

    def is_finished(self) -> bool:
        """Return True if the run has completed all of its steps."""
        last = self.attempts[-1].driver
        return last.poll() == 0 and len(self.recorded()) == self.config.training.steps

    def newest_time(self) -> float:
        """Return the time of the newest step in seconds since the epoch, or 0 without steps."""
        return max((step.time for step in self.recorded()), default=0.0)

    def episodes(self) -> dict[int, Counter[str]]:
        """Count the episodes of every training step by task.

        If an episode was sampled with other weights than its step, its key names the weights.

        Raises:
            RunDirectoryError: a record is unreadable.
        """
        reader = EpisodeReader(self.files.episodes)
        reader.refresh()
        trained: dict[int, Counter[str]] = {}
        for row in reader.summary_table.to_pylist():
            if row["split"] != "train" or row["invalid"] is not None:
                continue
            name = row["task_id"]
            versions = (row["oldest_version"], row["newest_version"])
            # Step 1 is sampled with the weights of 0 updates.
            if versions != (row["step"] - 1, row["step"] - 1):
                name = f"{name} of weights {versions[0]} to {versions[1]}"
            trained.setdefault(row["step"], Counter())[name] += 1
        return trained

    def expected_episodes(self, steps: int) -> dict[int, Counter[str]]:
        """Count the episodes that the first ``steps`` steps should be trained on, by task."""
        tasks = build_tasks(self.config)
        return {
            step: Counter(
                {
                    task.task_id: SAMPLES_PER_TASK
                    for task in tasks.train((step - 1) * TASKS_PER_STEP, TASKS_PER_STEP)
                }
            )
            for step in range(1, steps + 1)
        }


def overrides(options: Options, directory: Path, orders: Path) -> list[str]:
    """Return the settings of the run."""
    small = [
        "model.num_layers=2",
        "model.hidden_size=32",
        "model.intermediate_size=48",
        "model.head_size=16",
        "initial_weights=null",
        f"rollout.workers={options.workers}",
        f"rollout.tasks_per_step={TASKS_PER_STEP}",
        f"rollout.samples_per_task={SAMPLES_PER_TASK}",
        f"rollout.max_sampled_tokens_per_turn={options.turn_tokens}",
        "reward.format_error=-2",
        "tasks.held_out_tasks=4",
        "evaluate_every=1000",
        f"training.steps={options.steps + RESERVED_STEPS}",
        f"training.checkpoint_every={CHECKPOINT_EVERY}",
        "training.keep_checkpoints=2",
        f"output_dir={directory}",
    ]
    tasks = build_tasks(load_config(CONFIG, RlConfig, small))
    call = ParsedMessage("analysis", "python", "code", "print(sum(range(100)))")
    answer = ParsedMessage("final", None, None, "\\boxed{1/2 + 1/3}")
    scripts = {
        "call": tasks.codec.render_assistant([call], "<|call|>"),
        "answer": tasks.codec.render_assistant([answer], "<|return|>"),
    }
    told = {**scripts, "orders": str(orders), "deterministic": options.deterministic}
    if options.servers:
        header = tasks.codec.assistant_header
        return [*small, *_server_overrides(options.servers, {**told, "header": header})]
    engine = {"type": "tests.faults.engine:FaultyBackend", "options": told}
    return [*small, f"rollout.engine={json.dumps(engine)}"]


def _server_overrides(servers: int, told: dict[str, Any]) -> list[str]:
    """Return the settings of a run with servers. ``told`` has the options of server.py."""
    paths = [ROOT / "tests/faults/sglang_process", ROOT, ROOT / "kernels"]
    environment = {
        "PYTHONPATH": os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")]),
        "POLICY_SERVER": json.dumps(told),
        "OMP_NUM_THREADS": "1",
    }
    engine = {
        "type": "sglang",
        "servers": servers,
        "python": sys.executable,
        "env": environment,
        "arguments": ["--device", "cpu"],
        "attention_backend": "intel_amx",
        "weight_sync": "gloo",
        "bucket_bytes": BUCKET_BYTES,
    }
    return [
        "rollout.routed_experts=true",
        "algorithm.routing_replay=R3",
        f"rollout.engine={json.dumps(engine)}",
    ]


@contextmanager
def small_file_system(directory: Path) -> Iterator[bool]:
    """Mount a file system of FILE_SYSTEM_BYTES at ``directory``. Yield False if forbidden."""
    directory.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={FILE_SYSTEM_BYTES}", "none", str(directory)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        yield False
        return

    try:
        yield True
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=False)
