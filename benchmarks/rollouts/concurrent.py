"""Load and fault-injection test of rollouts: hundreds of concurrent episodes on one machine.

    python -m benchmarks.rollouts concurrent
    python -m benchmarks.rollouts concurrent --tasks 25 --token 0.1 --faults 0.2

Needs no GPU. Pool, collector, rollout workers, agent loop and the fleet of servers are real, in
separate processes. The servers implement SGLang's protocol and sample scripted turns instead of
running a model. The trainer sleeps. Tools take the published times, multiplied by ``--gaps``.
Injected faults:

    malformed answer  a fraction --faults of the requests: broken connections, status 500, invalid
                      tokens and log-probs
    tool failure      a fraction --faults of the calls fails once. The tools of a fraction
                      --faults / 2 of the tasks always fail.
    dead server       one is killed in every odd step, and one exits during a weight sync
    dead worker       one is killed in every even step except the first

The benchmark fails unless all of the following hold:

- Every group is trained on in its step, complete and once.
- Exactly those episodes are invalid that called a tool that always fails.
- No token is older than k versions.

Prints a table of the episodes, the faults and the driver's processor time, which counts from the
first weight sync to the last group and includes all threads of the driver.
"""

import argparse
import json
import os
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch

from benchmarks.rollouts.slow_tools import draw_call_count
from converters.names import hf_shapes
from converters.random_weights import random_hf_weights
from megatron_gptoss.config import ModelConfig
from rl_loop.cluster.ray_session import ray_session
from rl_loop.config.load import load_config
from rl_loop.config.run import RlConfig
from rl_loop.data.trajectory import Trajectory, TrajectoryGroup
from rl_loop.harmony.codec import ParsedMessage
from rl_loop.rollout.collector import RolloutCollector, TrainingRequests
from rl_loop.rollout.pool import RolloutPool
from rl_loop.run_parts import build_rollouts, build_tasks
from rl_loop.tasks.source import TaskMixture
from rl_loop.weight_sync.source import LoadedWeights

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs/rl/tiny_retool.yaml"
SYNC_FAULT = "die /update_weights_from_disk:1"
"""Order in the fault file of a server (``tests/support/rl_loop/sglang_protocol.py``)."""


@dataclass(frozen=True)
class Load:
    """Size of the test and rate of faults."""

    tasks: int = 125
    """Number of tasks of a step."""
    samples: int = 5
    """Number of episodes of a task."""
    steps: int = 6
    max_staleness: int = 3
    workers: int = 2
    servers: int = 2
    gap_scale: float = 0.01
    """Factor of the published seconds of tools."""
    token_seconds: float = 0.5
    """Time of a token on a server, in seconds."""
    training_seconds: float = 5.0
    """Training time of a step, in seconds."""
    faults: float = 0.05
    """Fraction of requests, and of tool calls, that fail."""


@dataclass
class Faults:
    """Number of injected faults."""

    workers_killed: int = 0
    servers_killed: int = 0
    syncs_broken: int = 0
    malformed_answers: Counter[str] = field(default_factory=Counter)
    tool_failures: int = 0
    """Number of failed calls in episodes that finished."""


@dataclass
class Outcome:
    """Results of the test."""

    faults: Faults
    trained: int
    invalid: int
    wall_seconds: float
    driver_seconds: float
    """Processor seconds of the driver, including its threads."""
    in_flight_mean: float
    in_flight_max: int

    @property
    def driver_share(self) -> float:
        """Number of cores that the driver uses per 100 episodes in flight."""
        return self.driver_seconds / self.wall_seconds / (self.in_flight_mean / 100)


# -- the run --------------------------------------------------------------------------------------


def configuration(load: Load, directory: Path) -> RlConfig:
    """Return the configuration of a run with scripted servers."""
    tools = {"gap_scale": load.gap_scale, "failing": load.faults, "unavailable": load.faults / 2}
    environment = "benchmarks.rollouts.slow_tools:UnreliableTools"
    overrides = [
        f"output_dir={directory}",
        "initial_weights=null",
        "dtype=bf16",
        "model.num_layers=2",
        "model.hidden_size=32",
        "model.intermediate_size=48",
        "model.head_size=16",
        f"tasks.sources.tools={{environment: '{environment}', options: {json.dumps(tools)}}}",
        "tasks.sources.retool.weight=0",
        f"rollout.workers={load.workers}",
        f"rollout.tasks_per_step={load.tasks}",
        f"rollout.samples_per_task={load.samples}",
        "rollout.max_turns=8",
        f"algorithm.max_staleness={load.max_staleness}",
        f"training.steps={load.steps}",
        "rollout.engine.type=sglang",
        f"rollout.engine.servers={load.servers}",
        "rollout.engine.weight_sync=disk",
    ]
    config = load_config(CONFIG, RlConfig, overrides)
    paths = [ROOT / "benchmarks/rollouts/scripted_server", ROOT, ROOT / "kernels"]
    environment_of_servers = {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "SCRIPT": str(directory / "script.json"),
        "FAULT_FILE": str(directory / "fault"),
        "OMP_NUM_THREADS": "1",
    }
    engine = config.rollout.engine.model_copy(
        update={"python": sys.executable, "env": environment_of_servers}
    )
    rollout = config.rollout.model_copy(update={"engine": engine})
    return config.model_copy(update={"rollout": rollout})


def write_script(load: Load, tasks: TaskMixture, directory: Path) -> None:
    """Write the script of the servers.

    Args:
        load: size of the test.
        tasks: source with the codec of the turns.
        directory: directory of the script and of the log of faults.
    """
    harmony = tasks.codec
    call = ParsedMessage("analysis", "python", "code", "print(1)")
    answer = ParsedMessage("final", None, None, "1")
    script = {
        "header": harmony.assistant_header,
        "call": harmony.render_assistant([call], "<|call|>"),
        "answer": harmony.render_assistant([answer], "<|return|>"),
        "token_seconds": load.token_seconds,
        "faults": load.faults,
        "fault_log": str(directory / "faults.log"),
    }
    (directory / "script.json").write_text(json.dumps(script))


def random_weights(model: ModelConfig) -> LoadedWeights:
    """Return weights with the names and shapes of the model. The script ignores their values."""
    get = random_hf_weights(model, seed=0)
    return LoadedWeights({name: get(name).to(torch.bfloat16) for name in hf_shapes(model)})


@contextmanager
def started_pool(config: RlConfig) -> Iterator[RolloutPool]:
    """Start servers and workers."""
    pool = build_rollouts(config)
    try:
        pool.ready()
        yield pool
    finally:
        pool.close()


def run(load: Load, directory: Path) -> Outcome:
    """Train ``load.steps`` steps with injected faults.

    Args:
        load: size of the test.
        directory: directory for the run.

    Raises:
        AssertionError: if an episode is lost, duplicated or too old.
    """
    config = configuration(load, directory)
    tasks = build_tasks(config)
    write_script(load, tasks, directory)
    weights = random_weights(config.model)

    faults = Faults()
    with ray_session(), started_pool(config) as pool:
        requests = TrainingRequests(tasks, config.rollout, config.seed)
        collector = RolloutCollector(pool, requests, config.algorithm, steps=load.steps)
        episode_log = EpisodeLog(
            load, tasks, seeds_of=lambda number: requests.for_group(number, number).seeds
        )
        began, processor_began = time.time(), processor_seconds()
        for step in range(load.steps):
            if step == load.steps // 2:
                (directory / "fault").write_text(SYNC_FAULT)
                faults.syncs_broken += 1
            pool.sync_weights(weights, step)
            collector.begin(step)
            kill_process(step, faults)
            episode_log.enter(step, collector.collect(step).train)
            with pool.updating_weights(step + 1):
                time.sleep(load.training_seconds)
        wall_seconds = time.time() - began
        driver_seconds = processor_seconds() - processor_began
        assert not (directory / "fault").exists(), "no server died during a sync"

    log = directory / "faults.log"
    faults.malformed_answers = Counter(log.read_text().split("\n")[:-1] if log.exists() else [])
    faults.tool_failures = episode_log.tool_failures
    mean, most = episode_log.in_flight(began, began + wall_seconds)
    return Outcome(
        faults=faults,
        trained=len(episode_log.trained),
        invalid=episode_log.invalid,
        wall_seconds=wall_seconds,
        driver_seconds=driver_seconds,
        in_flight_mean=mean,
        in_flight_max=most,
    )


def processor_seconds() -> float:
    """Return the processor seconds of this process until now, in user and kernel mode."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def kill_process(step: int, faults: Faults) -> None:
    """Kill a server in odd steps, and a worker in even steps except the first."""
    if step == 0:
        return
    wanted = "sglang.launch_server" if step % 2 else "ray::RolloutWorker"
    for process in psutil.Process().children(recursive=True):
        try:
            if wanted in " ".join(process.cmdline()):
                process.send_signal(signal.SIGKILL)
                break
        except psutil.NoSuchProcess:
            continue
    else:
        # The process that was killed last is still restarting.
        return
    if step % 2:
        faults.servers_killed += 1
    else:
        faults.workers_killed += 1


# -- checks and results ---------------------------------------------------------------------------


class EpisodeLog:
    """Record of all episodes."""

    def __init__(
        self, load: Load, tasks: TaskMixture, seeds_of: Callable[[int], Sequence[int]]
    ) -> None:
        """Create an empty record.

        Args:
            load: size of the test.
            tasks: source of the expected tasks.
            seeds_of: function that returns the seeds of a group by its number.
        """
        self._load = load
        self._tasks = tasks
        self._seeds_of = seeds_of
        self.trained: list[Trajectory] = []
        self.invalid = 0
        self._names: set[str] = set()

    def enter(self, step: int, groups: Sequence[TrajectoryGroup]) -> None:
        """Record the groups that a step trains on.

        Args:
            step: number of the step.
            groups: groups of the step.

        Raises:
            AssertionError: unless the groups belong to the step, and are complete and new.
        """
        load = self._load
        first = step * load.tasks
        expected = self._tasks.train(first, load.tasks)
        assert [group.task_id for group in groups] == [task.task_id for task in expected]

        for number, (task, group) in enumerate(zip(expected, groups, strict=True), start=first):
            assert len(group.trajectories) + len(group.invalid) == load.samples, "not whole"
            # Only episodes that call an unavailable tool are invalid.
            spoiled = 0
            if task.metadata["unavailable"]:
                seeds = self._seeds_of(number)
                spoiled = sum(draw_call_count(f"{task.task_id}/{seed}") > 0 for seed in seeds)
            assert len(group.invalid) == spoiled, [episode.invalid for episode in group.invalid]
            self.invalid += len(group.invalid)
            for episode in group.trajectories:
                self._enter_episode(step, episode)

    def _enter_episode(self, step: int, episode: Trajectory) -> None:
        assert episode.answer is not None
        assert episode.answer not in self._names, f"{episode.answer} is trained on twice"
        self._names.add(episode.answer)
        self.trained.append(episode)

        versions = [span.version for span in episode.weight_versions]
        assert versions == sorted(versions), versions
        assert step - self._load.max_staleness <= versions[0] <= versions[-1] <= step, versions

    @property
    def tool_failures(self) -> int:
        return int(sum(episode.reward_parts["tool_failures"] for episode in self.trained))

    def in_flight(self, began: float, ended: float) -> tuple[float, int]:
        """Return the mean and the maximum of concurrent episodes, among those trained on.

        Invalid and restarted episodes are left out, so the real numbers are higher.

        Args:
            began: start of the test, in seconds since the epoch.
            ended: end of the test, in seconds since the epoch.
        """
        changes: list[tuple[float, int]] = []
        seconds = 0.0
        for episode in self.trained:
            parts = episode.reward_parts
            changes += [(parts["began"], 1), (parts["ended"], -1)]
            seconds += parts["ended"] - parts["began"]

        running = most = 0
        for _, change in sorted(changes):
            running += change
            most = max(most, running)
        return seconds / (ended - began), most


def report(load: Load, outcome: Outcome) -> str:
    """Return the results as a Markdown table."""
    faults = outcome.faults
    rows = {
        "episodes trained, each once": f"{outcome.trained:,}",
        "invalid, all by tools that stay away": f"{outcome.invalid:,}",
        "in flight, mean and most": f"{outcome.in_flight_mean:,.0f}, {outcome.in_flight_max:,}",
        "requests with a malformed answer": f"{faults.malformed_answers.total():,}",
        "tool calls that failed and were repeated": f"{faults.tool_failures:,}",
        "servers killed while they generated": f"{faults.servers_killed}",
        "servers that died during a sync": f"{faults.syncs_broken}",
        "workers killed": f"{faults.workers_killed}",
        "wall clock": f"{outcome.wall_seconds:.0f} s",
        "driver's processor time": f"{outcome.driver_seconds:.1f} s",
        "of one core per 100 episodes in flight": f"{outcome.driver_share:.2%}",
    }
    lines = [f"| {load.steps} steps of {load.tasks} x {load.samples} | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in rows.items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--tasks", type=int, default=Load.tasks, help="of a step")
    add("--samples", type=int, default=Load.samples, help="episodes of a task")
    add("--steps", type=int, default=Load.steps)
    add(
        "--max-staleness",
        type=int,
        default=Load.max_staleness,
        help="k: steps whose episodes run during an update",
    )
    add("--workers", type=int, default=Load.workers)
    add("--servers", type=int, default=Load.servers)
    add("--gaps", type=float, default=Load.gap_scale, help="factor of the seconds of tools")
    add("--token", type=float, default=Load.token_seconds, help="seconds of a sampled token")
    add("--training", type=float, default=Load.training_seconds, help="seconds of a step")
    add("--faults", type=float, default=Load.faults, help="share of requests and calls that fail")
    options = parser.parse_args()

    load = Load(
        tasks=options.tasks,
        samples=options.samples,
        steps=options.steps,
        max_staleness=options.max_staleness,
        workers=options.workers,
        servers=options.servers,
        gap_scale=options.gaps,
        token_seconds=options.token,
        training_seconds=options.training,
        faults=options.faults,
    )
    with tempfile.TemporaryDirectory() as directory:
        print(report(load, run(load, Path(directory))))
