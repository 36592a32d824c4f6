"""Cost of moving a step's tokens from the rollout workers to the trainer's ranks.

    python -m benchmarks.data plane                  # 512 x 32,768 and 1,024 x 8,192 tokens
    python -m benchmarks.data plane --scale 0.1      # 10% of the episodes
    python -m benchmarks.data plane --shapes 512x32768 --layers 36 --ranks 64 --passes estimates

Needs no GPU. The default needs 12 GB of memory and 10 minutes.

Ray is real, and so is all code that handles tokens:

- Rollout workers (one process) put groups of episodes and their routes into Ray's store.
- The driver computes samples and advantages and sends its part to every data-parallel rank
  (TrainerGroup).
- Ranks read their part, build micro-batches and return results (TrainerWorker).

Only the models are missing: log-probs and values are zeros, and an update does nothing.

A few processes act as all ranks. Each process receives and answers for its ranks in sequence.
Therefore, no process waits for a processor, which 64 machines would have. The sum of the driver's
seconds and the seconds of the slowest rank is the cost of a step. Reading over a network is not
included.

Prints one line of JSON per case with the median of ``--rounds``. The first rounds also pay for
touching pages of the store for the first time, as a run does once.

- driver_seconds: wall time by stage, without the time in which the driver waits for ranks. The
  transfer of their results is included. Stages:
    - fetch: episodes from the store
    - samples: columns of the episodes
    - estimate: pass for values and reference log-probs
    - advantages
    - train: rank inputs and statistics
    - check: agreement of engine and trainer on every episode
- driver_cpu_seconds, rank_cpu_seconds: processor time of the driver and of the slowest rank in all
  passes, including Ray's threads.
- together_seconds: their sum. share_of_step: the sum as a fraction of the time of a step, taken as
  STEP_SECONDS for STEP_TOKENS.
- wire_bytes_per_token: rank inputs of all passes.
- answer_bytes_per_token: results of the ranks.
- route_bytes_per_token: routes that rollout workers store and ranks read. They bypass the driver.
- driver_peak: largest anonymous memory (RssAnon) of the driver in all rounds beyond its value
  before the first round, divided by the bytes of the columns. It includes the texts of episodes and
  memory kept between rounds. It does not include the store's pages, because they are shared.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import ray
import torch

from megatron_gptoss import distributed
from megatron_gptoss.config import ParallelConfig
from megatron_gptoss.packing import PackedBatch, RecordedRoutes
from megatron_gptoss.routes import route_dtype
from megatron_gptoss.samples import TrainingSamples
from megatron_gptoss.step_results import StepStatistics
from rl_loop.algorithms.objectives import RETURNED_VALUES
from rl_loop.cluster.placement import free_address
from rl_loop.cluster.ray_session import start_local_ray
from rl_loop.config.load import load_config
from rl_loop.config.partial_configs import TrainerConfig
from rl_loop.config.run import RlConfig
from rl_loop.data.credit import assign_advantages
from rl_loop.data.response_check import check_sampled_by_policy
from rl_loop.data.samples import to_samples
from rl_loop.data.stored_routes import StoredRoutes
from rl_loop.data.trajectory import Trajectory, TrajectoryGroup, Turn, WeightVersionSpan
from rl_loop.lifecycle.start_checks import store_need
from rl_loop.lifecycle.store_size import check_local_store, store_bytes
from rl_loop.process_memory import keep_freed_memory
from rl_loop.trainer.group import TrainerGroup
from rl_loop.trainer.rank_state import RankPosition
from rl_loop.trainer.worker import TrainerWorker

ROOT = Path(__file__).parents[2]
SAMPLES_PER_TASK = 8
TURNS = 8
"""Turns of an episode. Half of its tokens are sampled."""
TEXT = "word "
"""Text of one token in the episode's turns."""
STEP_SECONDS = 36.0
"""Reference time of a step of STEP_TOKENS, in seconds."""
STEP_TOKENS = 512 * 32_768

PASSES = {
    "plain": [],
    "R2": ["algorithm.routing_replay=R2", "algorithm.old_log_probs=forward"],
    "estimates": [
        "algorithm=ppo",
        "algorithm.whiten_advantages=null",
        "algorithm.critic.warmup_steps=0",
        "algorithm.kl.coefficient=0.001",
    ],
}
"""Overrides of the configuration for each kind of step.

"R2" replays the routes that the ranks record in a first pass. "estimates" has a critic and a KL
penalty, so it needs a pass before the advantages.
"""


@dataclass(frozen=True)
class Case:
    """Shape of one step."""

    episodes: int
    length: int
    """Number of tokens of every episode."""
    layers: int
    """Layers of the routes that the engine records and the trainer replays (R3); 0 for none."""
    ranks: int
    """Number of data-parallel ranks."""
    passes: str
    """Key in PASSES."""

    def config(self) -> RlConfig:
        """Return the configuration of a run with this step."""
        replays = ["algorithm.routing_replay=R3", "rollout.routed_experts=true"]
        return load_config(
            ROOT / "configs/untested/rl/gpt-oss-20b_1x8.yaml",
            RlConfig,
            [
                "initial_weights=null",
                f"model.num_layers={self.layers or 24}",
                "model.num_experts=128",
                "parallel.expert=1",
                f"parallel.world_size={self.ranks}",
                f"training.max_tokens_per_micro_batch={max(self.length, 32_768)}",
                f"rollout.max_episode_tokens={self.length}",
                f"rollout.tasks_per_step={self.episodes // SAMPLES_PER_TASK}",
                f"rollout.samples_per_task={SAMPLES_PER_TASK}",
                *(replays if self.layers else []),
                *PASSES[self.passes],
            ],
        )


# -- rollout workers ------------------------------------------------------------------------------


class DummyRolloutWorker:
    """Creates episodes without an engine, and sends them like a RolloutWorker."""

    def __init__(self) -> None:
        self._routes: np.ndarray | None = None

    def run_group(self, case: Case, task: int) -> TrajectoryGroup:
        """Return the episodes of one task. Their routes are in the store."""
        task_id = f"task-{task}"
        trajectories = [
            self._episode(case, task_id, reward=float(number % 2))
            for number in range(SAMPLES_PER_TASK)
        ]
        return TrajectoryGroup(task_id, trajectories)

    def _episode(self, case: Case, task_id: str, reward: float) -> Trajectory:
        turns, spans = [], []
        loss_mask = np.zeros(case.length, np.bool_)
        bounds = np.linspace(0, case.length, 2 * TURNS + 1).astype(int).tolist()
        for number, (start, end) in enumerate(pairwise(bounds)):
            is_sampled = number % 2 == 1
            turns.append(
                Turn("assistant" if is_sampled else "tool", start, end, TEXT * (end - start))
            )
            if is_sampled:
                loss_mask[start:end] = True
                spans.append(WeightVersionSpan(start, end, version=0))

        generator = np.random.default_rng(0)
        log_probs = -generator.random(case.length, np.float32)
        return Trajectory(
            task_id=task_id,
            token_ids=generator.integers(0, 200_000, case.length, np.int32),
            loss_mask=loss_mask,
            rollout_log_probs=np.where(loss_mask, log_probs, np.float32(0)),
            weight_versions=spans,
            turns=turns,
            routed_experts=self._store_routes(case),
            reward=reward,
        )

    def _store_routes(self, case: Case) -> StoredRoutes | None:
        if not case.layers:
            return None

        # Created once, because the contents of routes do not affect the measurement.
        model = case.config().model
        shape = (case.length - 1, model.num_layers, model.experts_per_token)
        if self._routes is None or self._routes.shape != shape:
            generator = np.random.default_rng(0)
            dtype = route_dtype(model.num_experts)
            self._routes = generator.integers(0, model.num_experts, shape, dtype)
        return StoredRoutes(ray.put(self._routes), self._routes.shape, self._routes.dtype)


# -- trainer ranks --------------------------------------------------------------------------------


class DummyReplay:
    """Mock RoutingReplay that has recorded routes for every micro-batch."""

    def __init__(self) -> None:
        self.micro_batches = 0

    def start_recording(self) -> None:
        self.micro_batches = 0

    def recorded(self) -> list[RecordedRoutes]:
        return [RecordedRoutes([]) for _ in range(self.micro_batches)]

    def agreement(self) -> dict[str, float]:
        return {}


def build_zeros(batches: Sequence[PackedBatch]) -> list[torch.Tensor]:
    """Return 0 for every token."""
    return [torch.zeros(batch.tokens) for batch in batches]


class DummyModel:
    """Mock trainer, critic or reference policy that computes zeros."""

    def __init__(self, replay: DummyReplay | None = None) -> None:
        self.replay = replay

    def score(self, batches: Sequence[PackedBatch], temperature: float) -> list[torch.Tensor]:
        if self.replay is not None:
            self.replay.micro_batches += len(batches)
        return build_zeros(batches)


class DummyRank(TrainerWorker):
    """A trainer rank without models. It loads, packs and returns like a rank that trains."""

    def __init__(self, settings: TrainerConfig) -> None:
        self.use(settings)
        torch.set_num_threads(1)
        distributed.initialize(ParallelConfig(), 0, *free_address())

    def use(self, settings: TrainerConfig) -> None:
        """Change to a rank of another group."""
        algorithm = settings.objective
        self.settings = settings
        self.algorithm = algorithm
        self.trainer: Any = DummyModel(
            DummyReplay() if algorithm.routing_replay != "none" else None
        )
        self.critic: Any = DummyModel() if algorithm.critic else None
        self.reference: Any = DummyModel() if algorithm.kl else None

    def _update(
        self, trainer: Any, batches: Sequence[PackedBatch], *arguments: Any
    ) -> StepStatistics:
        token_values = {}
        if trainer is self.trainer:
            token_values = {name: build_zeros(batches) for name in RETURNED_VALUES}
        return StepStatistics(
            sums={},
            maxima={},
            grad_norm=0.0,
            learning_rate=0.0,
            parameters_updated=False,
            token_values=token_values,
        )

    def call(
        self, method: str, inputs: list[Any], is_asked: bool, arguments: Sequence[Any]
    ) -> tuple[Any, float]:
        """Call a method and measure its processor time.

        Args:
            method: name of the method.
            inputs: list with the reference of RankInputs. In a list, Ray does not load it early.
            is_asked: whether to return the result.
            arguments: further arguments of the method.

        Returns:
            The result (None unless ``is_asked``) and the processor time in seconds.
        """
        started = time.process_time()
        result = getattr(self, method)(ray.get(inputs[0]), *arguments)
        seconds = time.process_time() - started
        return (result if is_asked else None), seconds


class DummyRanks:
    """All data-parallel ranks in a few processes (``rl_loop.trainer.group.TrainerRanks``)."""

    def __init__(self, processes: Sequence[Any], ranks: int) -> None:
        self.processes = processes
        self.count = ranks
        self.rank_seconds = np.zeros(self.count)
        self.shipped: list[Any] = []
        self.answered: list[Any] = []
        self.waiting = StageTime()

    def ready(self) -> list[RankPosition]:
        return [RankPosition(data=rank, returns_results=True) for rank in range(self.count)]

    def store(self, value: Any) -> Any:
        reference = ray.put(value)
        self.shipped.append(reference)
        return reference

    def call(
        self, method: str, arguments: Sequence[tuple[Any, ...]], result_ranks: Sequence[int]
    ) -> list[Any]:
        calls = []
        for rank, (inputs, *others) in enumerate(arguments):
            process = self.processes[rank % len(self.processes)]
            calls.append(process.call.remote(method, [inputs], rank in result_ranks, others))
        with self.waiting.measured():
            ray.wait(calls, num_returns=len(calls))

        results, seconds = zip(*ray.get(calls), strict=True)
        self.rank_seconds += seconds
        self.answered += calls
        return [results[rank] for rank in result_ranks]

    def close(self) -> None:
        pass


def stored_bytes(references: Sequence[Any]) -> int:
    """Return the total size of objects in the store. Small ones are elsewhere and count as 0."""
    locations = ray.experimental.get_object_locations(references)
    return sum(location.get("object_size") or 0 for location in locations.values())


# -- measuring ------------------------------------------------------------------------------------


@dataclass
class StageTime:
    """Seconds that this process has spent in one stage."""

    wall: float = 0.0
    cpu: float = 0.0

    @contextmanager
    def measured(self) -> Iterator[None]:
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        self.wall += time.perf_counter() - wall
        self.cpu += time.process_time() - cpu


@dataclass
class PeakMemory:
    """Peak of this process's anonymous memory, beyond its value at the start."""

    bytes: int = 0
    _ended: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def sampled(self) -> Iterator[None]:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        before = anonymous_bytes()

        def sample() -> None:
            while not self._ended.wait(0.005):
                self.bytes = max(self.bytes, anonymous_bytes() - before)

        thread = threading.Thread(target=sample, daemon=True)
        thread.start()
        yield
        self._ended.set()
        thread.join()


def anonymous_bytes() -> int:
    """Return this process's resident memory that is neither file-backed nor shared."""
    status = Path("/proc/self/status").read_text()
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024


def run_step(
    references: Sequence[Any], config: RlConfig, group: TrainerGroup
) -> tuple[dict[str, StageTime], TrainingSamples]:
    """Run one step like RlLoop.

    Args:
        references: references of the groups in the store.
        config: configuration of the run.
        group: trainer with dummy ranks.

    Returns:
        The time of each stage, and the samples.
    """
    algorithm = config.algorithm
    names = ("fetch", "samples", "estimate", "advantages", "train", "check")
    stages = {name: StageTime() for name in names}
    with stages["fetch"].measured():
        groups = [ray.get(reference) for reference in references]
    with stages["samples"].measured():
        samples = to_samples(groups, algorithm, version=0)
    if algorithm.estimates:
        with stages["estimate"].measured():
            estimates = group.compute_estimates(samples)
            samples = samples.with_columns(**estimates)
    with stages["advantages"].measured():
        rollout = config.rollout
        samples = assign_advantages(
            samples, groups, algorithm, rollout.max_response_tokens, rollout.max_episode_tokens
        )
    with stages["train"].measured():
        updates = group.rl_step(samples, step=0)
    with stages["check"].measured():
        check_sampled_by_policy(samples, updates.tokens, limit=np.inf, step=0)
    return stages, samples


def measure_step(case: Case, references: Sequence[Any], processes: Sequence[Any]) -> dict[str, Any]:
    """Run one step and return its numbers."""
    config = case.config()
    settings = config
    ray.get([process.use.remote(settings) for process in processes])
    ranks = DummyRanks(processes, case.ranks)
    group = TrainerGroup(settings, ranks)
    group.ready()

    stages, samples = run_step(references, config, group)

    tokens = samples.tokens
    driver_cpu = sum(spent.cpu for spent in stages.values()) - ranks.waiting.cpu
    rank_cpu = float(ranks.rank_seconds.max())
    routes = samples.routed_experts or []
    return {
        **{f"{name}_seconds": spent.wall for name, spent in stages.items()},
        "driver_seconds": sum(spent.wall for spent in stages.values()) - ranks.waiting.wall,
        "driver_cpu_seconds": driver_cpu,
        "rank_cpu_seconds": rank_cpu,
        "together_seconds": driver_cpu + rank_cpu,
        "share_of_step": (driver_cpu + rank_cpu) / (STEP_SECONDS * tokens / STEP_TOKENS),
        "wire_bytes_per_token": stored_bytes(ranks.shipped) / tokens,
        "answer_bytes_per_token": stored_bytes(ranks.answered) / tokens,
        "route_bytes_per_token": sum(row.nbytes for row in routes) / tokens,
        "column_bytes": samples.bytes,
    }


def measure(case: Case, rounds: int, references: Sequence[Any], processes: Sequence[Any]) -> None:
    """Print the medians of a case."""
    peak = PeakMemory()
    with peak.sampled():
        steps = [measure_step(case, references, processes) for _ in range(rounds)]

    medians = {name: round(median(step[name] for step in steps), 4) for name in steps[0]}
    medians["driver_peak"] = round(peak.bytes / medians["column_bytes"], 4)
    tokens = case.episodes * case.length
    print(json.dumps({**vars(case), "tokens": tokens, **medians}), flush=True)


# -- the program ----------------------------------------------------------------------------------


def build_cases(options: argparse.Namespace) -> list[Case]:
    """Return the cases, ordered for comparable measurements.

    Cases with the same episodes are consecutive. Cases with estimates come last, because they
    change the allocator's settings, which a run without estimates does not.
    """
    cases = []
    for shape in options.shapes:
        episodes, length = map(int, shape.split("x"))
        tasks = max(1, round(episodes * options.scale / SAMPLES_PER_TASK))
        ranks_of_all = [ranks for ranks in options.ranks if ranks <= tasks * SAMPLES_PER_TASK]
        for layers in options.layers:
            for passes in options.passes:
                # Routes of the engine and of R2 exclude each other.
                if passes == "R2" and layers:
                    continue
                cases += [
                    Case(tasks * SAMPLES_PER_TASK, length, layers, ranks, passes)
                    for ranks in ranks_of_all
                ]
    return sorted(cases, key=lambda case: case.passes == "estimates")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shapes", nargs="+", default=["512x32768", "1024x8192"], metavar="EPISODESxTOKENS"
    )
    parser.add_argument(
        "--layers", nargs="+", type=int, default=[0, 24, 36], help="of routes; 0: none"
    )
    parser.add_argument("--ranks", nargs="+", type=int, default=[4, 16, 64], help="data-parallel")
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=list(PASSES))
    parser.add_argument("--scale", type=float, default=1.0, help="share of the episodes")
    parser.add_argument("--processes", type=int, default=1, help="that are the ranks in turn")
    parser.add_argument("--rounds", type=int, default=9, help="of which the median counts")
    options = parser.parse_args()

    cases = build_cases(options)
    needs = [store_need(case.config()) for case in cases]
    largest = max(needs, key=lambda need: need.step)
    check_local_store(largest)
    start_local_ray(num_cpus=2, object_store_bytes=store_bytes(largest))
    try:
        worker = ray.remote(num_cpus=0)(DummyRolloutWorker).remote()
        settings = cases[0].config()
        rank_class = ray.remote(num_cpus=0)(DummyRank)
        processes = [rank_class.remote(settings) for _ in range(options.processes)]

        references: list[Any] = []
        made_for = None
        for case in cases:
            episodes = (case.episodes, case.length, case.layers)
            if episodes != made_for:
                references = []  # the store has no space for the episodes of two cases
                tasks = range(case.episodes // SAMPLES_PER_TASK)
                references = [worker.run_group.remote(case, task) for task in tasks]
                ray.wait(references, num_returns=len(references))
                made_for = episodes
            if case.passes == "estimates":
                keep_freed_memory()  # as run_rl does
            measure(case, options.rounds, references, processes)
    finally:
        ray.shutdown()
