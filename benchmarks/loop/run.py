"""Time, memory and agreement of the whole RL loop, with random weights.

    python -m benchmarks.loop configs/rl/gpt-oss-20b_1x4.yaml --gpus 4 --steps 5
    python -m benchmarks.loop configs/rl/gpt-oss-20b_1x4.yaml --gpus 1 --layers 8 optimizer.lr=1e-6
    python -m benchmarks.loop configs/untested/rl/gpt-oss-20b_1x8.yaml --max-staleness 0 1 2 \\
        --steps 5 --seconds 570
    python -m benchmarks.loop configs/rl/tiny_retool.yaml --turn-tokens 12 --steps 2

Needs the GPUs of the configuration. The tiny configurations run on a CPU.

Runs the session of ``gptoss rl`` with the configuration and the overrides: Ray, the trainer's
ranks, the engines, rollout workers with the real sandbox, Harmony, multi-turn ReTool, and routing
replay (R3). Nothing is saved, evaluated at the end or exported.

Random weights are drawn, on the GPU if there is one, and written as a Hugging Face directory. The
directory is deleted after the trainer has read it, unless ``--weights`` names it. With adapters on
an MXFP4 base, experts are written as MXFP4 blocks, as in the released weights. See
``random_policy.py`` for the behavior of the weights: every turn is a call of Python that runs and
has ``--turn-tokens`` random tokens on average. Episodes end by their limits. Rewards carry no
information (``reward.tool_use_bonus`` makes them differ). Therefore, the benchmark does not measure
learning.

Prints Markdown tables. The first step compiles. It is also the only step that measures the
mismatch without routing replay. The other steps enter the medians. Memory is the maximum that
``nvidia-smi`` shows per GPU and phase, and the ranks' measurements next to the plan.

``--max-staleness`` compares values of ``algorithm.max_staleness`` in increasing order, with one start
of trainer and servers. Each value k has ``--steps`` steps and its own table. The first k + 1 steps
fill the pipeline and are not in the medians. Another table compares the values. Episodes that a
value starts beyond its last step run into the first step of the next value and are discarded. The
trainer is idle outside of syncs, estimates and updates. A server is idle while it has no request,
as sampled several times per second (``/v1/loads``).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import multiprocessing
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Any

from benchmarks.loop.rollout_split import RolloutSplit, split_rollouts
from benchmarks.sglang.server_log import decode_speeds
from megatron_gptoss.config.precision import torch_dtype
from rl_loop.config.load import load_rl_config
from rl_loop.config.run import RlConfig
from rl_loop.lifecycle import start_checks
from rl_loop.lifecycle.disk_checks import check_writable
from rl_loop.session import RlSession, build_loop
from rl_loop.tracking.metrics import MetricName
from rl_loop.tracking.run_directory import StartMode

if TYPE_CHECKING:
    import torch


MANY_STEPS = 1_000_000
"""Number of configured steps: larger than any run, because the last step would be saved."""
PHASES = ("rollout", "sync", "prepare", "estimate", "update")
"""Phases that the loop times."""
MEMORY_MILLISECONDS = 100
"""Interval between two samples of the GPUs' memory, in milliseconds."""
LOAD_SECONDS = 0.25
"""Interval between two samples of each server's requests, in seconds."""
MAX_STALENESS = "loop/max_staleness"
"""Metric with the value of max_staleness of a step."""


def main() -> None:
    options = parse_arguments()
    if options.scratch is not None:
        options.scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.scratch, prefix="loop_") as scratch:
        config = read_config(options, Path(scratch))
        began = time.monotonic()
        if options.weights is None or not options.weights.exists():
            # In a separate process, so that its GPU context is freed.
            spawn = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(1, spawn) as pool:
                pool.submit(write_weights, config, options.turn_tokens).result()
            print(f"random weights written in {time.monotonic() - began:.1f} s", flush=True)
        if options.steps == 0:
            return

        watch = Watch()
        end = math.inf if options.seconds is None else began + options.seconds
        values = options.max_staleness or [config.algorithm.max_staleness]
        try:
            run(config, values, options.steps, watch, end, keep_weights=options.weights is not None)
        finally:
            # After a failure, report the steps that have finished.
            keep_server_logs(config, options.out)
            if watch.steps:
                logs = [log.read_text(errors="replace") for log in server_logs(config)]
                show_report(watch, report_text(config, watch, logs), options.out)


def report_text(config: RlConfig, watch: Watch, logs: Sequence[str]) -> str:
    """Return the tables of a run, or those of each value of max_staleness with a comparison.

    Args:
        config: configuration of the run.
        watch: collected metrics and memory.
        logs: output of every server.
    """
    by_value: dict[int, list[dict[str, float]]] = defaultdict(list)
    for step in watch.steps:
        by_value[int(step[MAX_STALENESS])].append(step)
    if len(by_value) == 1:
        return Report(config, watch.steps, watch.memory, logs).text()

    reports = {
        value: Report(config, steps, watch.memory, logs, warm_up=value + 1)
        for value, steps in by_value.items()
    }
    first = next(iter(reports.values()))
    parts = [first.title(), "", comparison(list(reports.values())), ""]
    for value, report in reports.items():
        parts += [f"algorithm.max_staleness {value}:", "", *report.step_table()]
    parts += first.decoding() + Report(config, watch.steps, watch.memory).memory_tables()
    return "\n".join(parts) + "\n"


def show_report(watch: Watch, text: str, out: Path | None) -> None:
    """Print the tables, and write them and the metrics of all steps.

    Args:
        watch: collected metrics.
        text: the tables.
        out: Markdown file; None to only print. The metrics are written next to it as JSON.
    """
    print(text, flush=True)
    if out:
        out.write_text(text)
        out.with_suffix(".json").write_text(json.dumps(watch.steps, indent=1))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("config", type=Path, help="of `gptoss rl`")
    add("--layers", type=int, help="of the model; all of the configuration's by default")
    add("--gpus", type=int, help="ranks of expert parallelism and SGLang servers")
    add("--steps", type=int, default=4, help="the first one warms up; 0 only writes --weights")
    add(
        "--seconds", type=float, help="start no step that would end later, by the last one's length"
    )
    add(
        "--max-staleness",
        type=int,
        nargs="+",
        help="values of algorithm.max_staleness, rising, each for --steps steps; overrides of the "
        "configuration come before it",
    )
    add("--turn-tokens", type=int, default=300, help="mean length of a turn's text")
    add("--scratch", type=Path, help="directory for weights and the run, deleted afterwards")
    add(
        "--weights",
        type=Path,
        help="keep the random weights in this directory, or take those that a call with the same model and "
        "--turn-tokens left there",
    )
    add(
        "--out",
        type=Path,
        help="Markdown file for the table; the steps' metrics are written next to it",
    )
    add("overrides", nargs="*", help="key=value of the configuration")
    options = parser.parse_intermixed_args()
    if options.max_staleness and options.max_staleness != sorted(set(options.max_staleness)):
        # Episodes started for a larger value would occupy the servers in steps of a smaller one.
        parser.error("--max-staleness: values must rise, such as 0 1 2")
    if options.steps == 0 and options.weights is None:
        parser.error("--steps 0 writes weights: --weights says where")
    return options


def read_config(options: argparse.Namespace, scratch: Path) -> RlConfig:
    """Read the configuration with the benchmark's settings and the user's overrides."""
    overrides = [
        "name=loop",
        f"output_dir={scratch}",
        f"initial_weights={options.weights or scratch / 'weights'}",
        f"training.steps={MANY_STEPS}",
        f"training.checkpoint_every={MANY_STEPS}",
        f"evaluate_every={MANY_STEPS}",
        "tasks.held_out_tasks=4",
        "optimizer.schedule=constant",
        "rollout.routed_experts=true",
        "algorithm.routing_replay=R3",
        "reward.tool_use_bonus=true",
        # Random weights agree less than trained ones. The benchmark reports the difference.
        "canary_tolerance=10",
    ]
    if options.max_staleness is not None:
        # The largest value determines the memory for episodes.
        overrides.append(f"algorithm.max_staleness={max(options.max_staleness)}")
    if options.layers is not None:
        overrides.append(f"model.num_layers={options.layers}")
    if options.gpus is not None:
        overrides.append(f"parallel.world_size={options.gpus}")
        overrides.append(f"parallel.expert={options.gpus}")
        overrides.append(f"rollout.engine.servers={options.gpus}")
    return load_rl_config(options.config, overrides + options.overrides)


def write_weights(config: RlConfig, turn_tokens: int) -> None:
    """Write the random policy to the directory ``config.initial_weights``."""
    import torch

    from benchmarks.loop.random_policy import next_tokens, policy_weights
    from converters.hf_directory import write_hf_directory
    from rl_loop.tasks.codec import build_codec

    assert config.initial_weights is not None
    device = "cuda" if torch.cuda.is_available() else "cpu"
    following = next_tokens(build_codec(config), turn_tokens)
    dtype = torch_dtype(config.dtype)
    tensors = policy_weights(config.model, following, dtype, device, config.seed)
    packed = config.adapter is not None and config.quantization is not None
    if packed:
        tensors = quantize_to_blocks(tensors)
    on_host = ((name, tensor.cpu()) for name, tensor in tensors)
    write_hf_directory(config.initial_weights, config.model, on_host, quantized=packed)


def quantize_to_blocks(
    named_tensors: Iterator[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Quantize the experts' matrices to MXFP4 blocks and scales: 4.25 instead of 16 bits per value.

    Args:
        named_tensors: weights by Hugging Face name; matrices of experts are [experts, in, out].
    """
    import torch

    from converters.hf_layouts import is_expert_matrix
    from converters.mxfp4_tensors import stored_names
    from gptoss_kernels import mxfp4

    for name, tensor in named_tensors:
        if not is_expert_matrix(name):
            yield name, tensor
            continue

        # One expert at a time, because transposed copies of all experts would double the memory.
        packed = [mxfp4.quantize(expert.mT.contiguous().bfloat16()) for expert in tensor]
        blocks, scales = (torch.stack(parts) for parts in zip(*packed, strict=True))
        blocks_name, scales_name = stored_names(name)
        yield blocks_name, blocks
        yield scales_name, scales


def run(
    config: RlConfig,
    values: Sequence[int],
    steps: int,
    watch: Watch,
    end: float,
    *,
    keep_weights: bool,
) -> None:
    """Run steps with each value of max_staleness.

    Args:
        config: configuration of the run.
        values: values of max_staleness, in increasing order.
        steps: number of steps per value.
        watch: display that collects the metrics.
        end: time (``time.monotonic``) by which the last step has to end, estimated from the
            duration of the previous step. The values share the remaining time equally.
        keep_weights: whether to keep the random weights.
    """
    with ExitStack() as stack:
        stack.enter_context(no_checkpoints())
        stack.enter_context(timed_waking(watch))
        began = time.monotonic()
        session = stack.enter_context(RlSession(config, watch.show, StartMode.OVERWRITE))
        assert config.initial_weights is not None
        if not keep_weights:
            shutil.rmtree(config.initial_weights)

        session.rollouts.ready()
        watch.note(f"trainer and engines ready after {time.monotonic() - began:.1f} s")
        session.rollouts.pause = watch.timed(  # type: ignore[method-assign]
            "pause", session.rollouts.pause
        )

        urls, key = server_urls(session)
        if urls:
            watch.loads = stack.enter_context(ServerLoads(urls, key))

        for place, value in enumerate(values):
            now = time.monotonic()
            watch.max_staleness = value
            run_value(
                config, value, session, steps, watch, now + (end - now) / (len(values) - place)
            )


def run_value(
    config: RlConfig, value: int, session: RlSession, steps: int, watch: Watch, end: float
) -> None:
    """Run steps with one value of max_staleness, starting at the session's current step.

    Args:
        config: configuration of the run.
        value: value of max_staleness.
        session: running session.
        steps: number of steps.
        watch: display that collects the metrics.
        end: time (``time.monotonic``) by which the last step has to end.
    """
    algorithm = config.algorithm
    if algorithm.max_staleness != value:
        # Validate again: stale steps need log-probs before the update, on-policy steps do not.
        changed = algorithm.model_dump() | {"max_staleness": value}
        algorithm = type(algorithm).model_validate(changed)
    session.trainer.change_algorithm(algorithm)
    loop = build_loop(config.model_copy(update={"algorithm": algorithm}), session)

    try:
        for done in range(steps):
            if watch.steps and time.monotonic() + watch.steps[-1][MetricName.STEP_SECONDS] > end:
                watch.note(f"stopped after {done} steps: the time is up")
                break
            loop.run_step(loop.state.step)
            loop.state.step += 1
    finally:
        loop.collector.close()


def server_urls(session: RlSession) -> tuple[list[str], str | None]:
    """Return the addresses of the SGLang servers (empty for other engines) and their API key."""
    from rl_loop.engines.sglang.backend import SglangBackend
    from rl_loop.engines.sglang.server_actors import statuses

    backend = session.rollouts.backend
    if not isinstance(backend, SglangBackend):
        return [], None
    known = asyncio.run(statuses(backend.servers.actors))
    return [status.url for status in known], backend.servers.api_key


@contextmanager
def no_checkpoints() -> Iterator[None]:
    """Skip the check for disk space for checkpoints, because the benchmark does not write any."""
    original = start_checks.check_disk
    start_checks.check_disk = lambda directory, *unused: check_writable(directory)
    try:
        yield
    finally:
        start_checks.check_disk = original


@contextmanager
def timed_waking(watch: Watch) -> Iterator[None]:
    """Time how long servers need to restore their GPU memory, which is part of a sync."""
    from rl_loop.engines.sglang.fleet import SglangFleet

    original = SglangFleet._resume_memory

    def resume_memory(fleet: SglangFleet, urls: tuple[str, ...], tags: list[str]) -> None:
        began = time.monotonic()
        original(fleet, urls, tags)
        if urls:
            watch.seconds["resume"] += time.monotonic() - began

    SglangFleet._resume_memory = resume_memory  # type: ignore[method-assign]
    try:
        yield
    finally:
        SglangFleet._resume_memory = original  # type: ignore[method-assign]


@dataclass(frozen=True)
class LoadSample:
    """Number of requests on one server at one time."""

    running: int
    """Requests in its batch."""
    waiting: int
    """Requests in its queue."""

    @property
    def is_idle(self) -> bool:
        return self.running + self.waiting == 0


class ServerLoads:
    """Context that continuously samples the number of requests on SGLang servers."""

    def __init__(self, urls: Sequence[str], api_key: str | None = None) -> None:
        self._urls = urls
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._samples: list[LoadSample] = []
        self._lock = Lock()
        self._stop = Event()
        self._threads = [Thread(target=self._ask, args=(url,), daemon=True) for url in urls]

    def __enter__(self) -> ServerLoads:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def take(self) -> dict[str, float]:
        """Return the mean metrics of all servers since the last call; empty without samples."""
        with self._lock:
            samples, self._samples = self._samples, []
        if not samples:
            return {}
        return {
            "servers/idle": mean(sample.is_idle for sample in samples),
            "servers/running": mean(sample.running for sample in samples),
        }

    def _ask(self, url: str) -> None:
        while not self._stop.wait(LOAD_SECONDS):
            try:
                question = urllib.request.Request(
                    f"{url}/v1/loads?include=core", headers=self._headers
                )
                with urllib.request.urlopen(question, timeout=5) as answer:
                    sample = load_sample(json.load(answer))
            except OSError:
                # A server that is restarting does not answer.
                continue
            with self._lock:
                self._samples.append(sample)


def load_sample(answer: dict[str, Any]) -> LoadSample:
    """Parse the answer of ``/v1/loads`` (SGLang 0.5.17). It has an entry per data-parallel rank."""
    return LoadSample(
        running=sum(rank["num_running_reqs"] for rank in answer["loads"]),
        waiting=sum(rank["num_waiting_reqs"] for rank in answer["loads"]),
    )


class Watch:
    """Display of the run: prints, collects the metrics of steps, and samples GPU memory."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        """Metrics of every finished step.

        They include ``seconds/pause``, ``seconds/resume``, MAX_STALENESS and those of the servers.
        """
        self.max_staleness = 0
        """Value of max_staleness of the current steps."""
        self.loads: ServerLoads | None = None
        """Sampler of the servers' requests; None until the servers are ready."""
        self.memory: dict[str, dict[int, int]] = defaultdict(dict)
        """Largest used memory in MiB, by phase and GPU."""
        self.seconds: dict[str, float] = defaultdict(float)
        """Seconds of the current step, by name of the timed call."""
        self._phase = "start"

    @contextmanager
    def show(self, title: str, steps: int, first_step: int) -> Iterator[Watch]:
        """Sample GPU memory during the run."""
        command = [
            "nvidia-smi",
            "--query-gpu=index,memory.used",
            "--format=csv,noheader,nounits",
            f"--loop-ms={MEMORY_MILLISECONDS}",
        ]
        if shutil.which(command[0]) is None:
            yield self
            return
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            reader = Thread(target=self._read_memory, args=(process,), daemon=True)
            reader.start()
            try:
                yield self
            finally:
                process.terminate()
                reader.join()

    def phase(self, name: str) -> None:
        self._phase = name
        print(f"{time.strftime('%H:%M:%S')} {name}", flush=True)

    def episodes(self, ended: int, wanted: int) -> None: ...

    def note(self, message: str) -> None:
        print(message, flush=True)

    def step(self, step: int, values: dict[str, float]) -> None:
        """Record the metrics of a finished step."""
        if MetricName.STEP_SECONDS not in values:
            return  # an evaluation, which the loop reports separately
        values = {**values, MAX_STALENESS: self.max_staleness}
        if self.loads is not None:
            values |= self.loads.take()
        for name, seconds in self.seconds.items():
            values = {**values, f"seconds/{name}": seconds}
        self.seconds.clear()
        self.steps.append(values)
        print(
            f"step {step}: {values[MetricName.STEP_SECONDS]:.1f} s, "
            f"{values[MetricName.TOKENS_PER_SECOND]:,.0f} tokens/s",
            flush=True,
        )

    def timed(self, name: str, call: Callable[[], None]) -> Callable[[], None]:
        """Return ``call`` as a phase whose seconds are recorded under ``name``."""

        def timed_call() -> None:
            before = self._phase
            self.phase(name)
            began = time.monotonic()
            call()
            self.seconds[name] += time.monotonic() - began
            self._phase = before

        return timed_call

    def _read_memory(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            index, used = (int(cell) for cell in line.split(","))
            most = self.memory[self._phase]
            most[index] = max(used, most.get(index, 0))


class Report:
    """Tables of a run."""

    def __init__(
        self,
        config: RlConfig,
        steps: list[dict[str, float]],
        memory: dict[str, dict[int, int]],
        logs: Sequence[str] = (),
        warm_up: int = 1,
    ) -> None:
        """Store the measurements of a run.

        Args:
            config: configuration of the run.
            steps: metrics of the finished steps.
            memory: largest used memory in MiB, by phase and GPU.
            logs: output of every server.
            warm_up: number of first steps that the medians leave out.
        """
        self.config = config
        self.steps = steps
        self.memory = memory
        self.logs = logs
        self.warm_up = warm_up
        self.episodes = config.rollout.tasks_per_step * config.rollout.samples_per_task

    def text(self) -> str:
        """Return all tables as Markdown."""
        lines = [
            self.title(),
            "",
            *self.step_table(),
            *self.decoding(),
            *self.rollout_split(),
            *self.memory_tables(),
        ]
        return "\n".join(lines) + "\n"

    def title(self) -> str:
        """Return the description of the run."""
        model = self.config.model
        rollout = self.config.rollout
        return (
            f"{model.num_layers} layers, {model.num_experts} experts, GPUs: {self.gpus}, engine "
            f"{rollout.engine.type}, {self.episodes} episodes of at most {rollout.max_episode_tokens} tokens "
            f"and {rollout.max_turns} turns"
        )

    @property
    def gpus(self) -> int:
        """Number of GPUs of trainer and engines; number of ranks without GPUs."""
        processes = self.config.rollout.engine.server_processes
        if processes is None or self.config.rollout.engine.shares_trainer_gpus:
            return self.config.parallel.world_size
        return self.config.parallel.world_size + processes.count * processes.gpus_each

    def step_table(self) -> list[str]:
        """Return the lines of a table with a column for every step."""
        numbers = [f"step {number}" for number in range(1, len(self.steps) + 1)]
        after = "the first" if self.warm_up == 1 else f"the first {self.warm_up}"
        columns = len(numbers) + 2
        lines = [f"| | {' | '.join(numbers)} | median after {after} |", "|---" * columns + "|"]
        for title, read, form in self._rows():
            cells = [*(read(step) for step in self.steps), self.compute_median(read)]
            shown = [shown_value(value, form) for value in cells]
            lines.append(f"| {title} | {' | '.join(shown)} |")
        return [*lines, ""]

    def compute_median(self, read: Callable[[dict[str, float]], float | None]) -> float | None:
        """Return the median over the steps after warm-up that have the value; None without any."""
        values = [read(step) for step in self.steps[self.warm_up :]]
        known = [value for value in values if value is not None]
        return median(known) if known else None

    def row(self, title: str) -> tuple[Callable[[dict[str, float]], float | None], str]:
        """Return the value function and the format of the row with this title."""
        [found] = [(read, form) for name, read, form in self._rows() if name == title]
        return found

    def _rows(self) -> list[tuple[str, Callable[[dict[str, float]], float | None], str]]:
        """Return title, value function and format of every row."""

        def metric(name: str) -> Callable[[dict[str, float]], float | None]:
            return lambda step: step.get(name)

        return [
            ("sync, s", metric("seconds/sync"), ".2f"),
            ("of which servers resume", metric("seconds/resume"), ".2f"),
            ("rollout, s", metric("seconds/rollout"), ".2f"),
            ("servers go to sleep, s", metric("seconds/pause"), ".2f"),
            ("scoring without replay, s", metric("seconds/estimate"), ".2f"),
            ("update, s", metric("seconds/update"), ".2f"),
            ("rest, s", self._rest, ".2f"),
            ("whole step, s", metric(MetricName.STEP_SECONDS), ".2f"),
            ("trainer idle", self._trainer_idle, ".1%"),
            ("servers idle", metric("servers/idle"), ".1%"),
            ("requests running on a server", metric("servers/running"), ".1f"),
            ("staleness of a trained token, versions", metric("rollout/staleness_mean"), ".2f"),
            ("oldest trained token, versions", metric("rollout/staleness_max"), ".0f"),
            ("tokens of a step", self._tokens, ",.0f"),
            (
                "**tokens/s/GPU**",
                lambda step: step[MetricName.TOKENS_PER_SECOND] / self.gpus,
                ",.0f",
            ),
            ("sampled tokens", self._sampled_tokens, ",.0f"),
            ("sampled tokens/s/GPU in rollouts", self._sampling_speed, ",.0f"),
            ("tokens/s/GPU of the update", self._update_speed, ",.0f"),
            ("turns of an episode", metric(MetricName.TURNS), ".2f"),
            ("episodes with a tool call", metric(MetricName.TOOL_CALL_RATE), ".1%"),
            ("failed tool calls of an episode", metric("rollout/tool_errors"), ".3f"),
            ("prefix tokens from the cache", metric("rollout/cache_hit_rate"), ".1%"),
            ("entropy of a sampled token, nats", metric(MetricName.ENTROPY), ".2f"),
            ("mismatch k3 with R3", metric(MetricName.KL), ".2e"),
            ("mismatch k3 without R3", metric("routing/kl_k3_without_replay"), ".2e"),
            ("mean log-prob gap, nats", metric(MetricName.LOG_PROB_GAP), ".2e"),
            ("routes that agree", metric("routing/agreement"), ".1%"),
            ("largest deviation of the ratio", metric("ratio/deviation_max"), ".1e"),
        ]

    def _rest(self, step: dict[str, float]) -> float:
        """Return the seconds in no other row: preparing samples, writing metrics."""
        counted = [name for name in PHASES if name != "prepare"] + ["pause"]
        return step[MetricName.STEP_SECONDS] - sum(
            step.get(f"seconds/{name}", 0) for name in counted
        )

    @staticmethod
    def _trainer_idle(step: dict[str, float]) -> float:
        """Return the fraction of a step in which the trainer neither syncs nor computes."""
        works = sum(step.get(f"seconds/{name}", 0) for name in ("sync", "estimate", "update"))
        return 1 - works / step[MetricName.STEP_SECONDS]

    @staticmethod
    def _tokens(step: dict[str, float]) -> float:
        return step[MetricName.TOKENS_PER_SECOND] * step[MetricName.STEP_SECONDS]

    def _sampled_tokens(self, step: dict[str, float]) -> float:
        return step[MetricName.RESPONSE_TOKENS] * self.episodes

    def _sampling_speed(self, step: dict[str, float]) -> float:
        return self._sampled_tokens(step) / step["seconds/rollout"] / self.gpus

    def _update_speed(self, step: dict[str, float]) -> float:
        return self._tokens(step) / step["seconds/update"] / self.gpus

    def decoding(self) -> list[str]:
        """Return the decoding speed of servers under full load, from their logs."""
        speeds = [pair for log in self.logs for pair in decode_speeds(log)]
        if not speeds:
            return []
        most = max(running for running, _ in speeds)
        full = [(running, speed) for running, speed in speeds if running >= 0.9 * most]
        return [
            f"Decoding by the servers' logs: {median(speed for _, speed in full):,.0f} tokens/s per server at "
            f"{median(running for running, _ in full):.0f} running requests (of {len(full)} lines)",
            "",
        ]

    def rollout_split(self) -> list[str]:
        """Return the table of the servers' seconds by activity. Empty without servers."""
        if not self.logs:
            return []
        split: RolloutSplit | None = split_rollouts(self.logs, self.episodes / len(self.logs))
        return [] if split is None else split.table()

    def memory_tables(self) -> list[str]:
        """Return the tables of memory: by nvidia-smi, and the ranks' measurements with the plan."""
        lines = []
        if self.memory:
            indices = sorted({index for most in self.memory.values() for index in most})
            titles = " | ".join(f"GPU {index}, GB" for index in indices)
            lines += [f"| phase | {titles} |", "|---" * (len(indices) + 1) + "|"]
            for phase, most in self.memory.items():
                cells = [f"{most.get(index, 0) * 2**20 / 1e9:.1f}" for index in indices]
                lines.append(f"| {phase} | {' | '.join(cells)} |")
            lines.append("")

        phases = {name.split("/")[1] for step in self.steps for name in step if is_memory(name)}
        if phases:
            lines += [
                "| phase, most of all steps, GB | allocated | plan | off | reserved | whole GPU | plan | off |",
                "|---" * 8 + "|",
            ]
            lines += [f"| {phase} | {self._memory_cells(phase)} |" for phase in sorted(phases)]
        return lines

    def _memory_cells(self, phase: str) -> str:
        def most(figure: str) -> float | None:
            name = f"memory/{phase}/{figure}_gb"
            return max((step[name] for step in self.steps if name in step), default=None)

        cells = []
        for measured, predicted in (
            ("allocated", "predicted_allocated"),
            ("reserved", None),
            ("gpu", "predicted_gpu"),
        ):
            value = most(measured)
            cells.append(shown_value(value, ".1f"))
            if predicted is None:
                continue
            plan = most(predicted)
            off = None if value is None or plan is None else value / plan - 1
            cells += [shown_value(plan, ".1f"), shown_value(off, "+.1%")]
        return " | ".join(cells)


COMPARED = (
    "whole step, s",
    "rollout, s",
    "update, s",
    "**tokens/s/GPU**",
    "trainer idle",
    "servers idle",
    "requests running on a server",
    "staleness of a trained token, versions",
    "oldest trained token, versions",
    "mismatch k3 with R3",
)
"""Rows of a run's table that are columns of ``comparison``."""


def comparison(reports: Sequence[Report]) -> str:
    """Return a table with a row of medians for every value of max_staleness."""
    titles = ["max_staleness", "steps", *COMPARED]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for report in reports:
        steps = len(report.steps)
        cells = [
            f"{report.steps[0][MAX_STALENESS]:.0f}",
            f"{max(0, steps - report.warm_up)} of {steps}",
        ]
        for title in COMPARED:
            read, form = report.row(title)
            cells.append(shown_value(report.compute_median(read), form))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def shown_value(value: float | None, form: str) -> str:
    """Format a value; "-" for None."""
    return "-" if value is None else format(value, form)


def is_memory(name: str) -> bool:
    """Return True if a metric is the memory of a phase."""
    return name.startswith("memory/") and name.count("/") == 2


def keep_server_logs(config: RlConfig, out: Path | None) -> None:
    """Copy the servers' logs next to ``out``, also after a failure."""
    if out is None:
        return
    for log in server_logs(config):
        shutil.copy(log, out.with_name(f"{out.stem}_{log.name}"))


def server_logs(config: RlConfig) -> list[Path]:
    """Return the log files of the SGLang servers."""
    return sorted((config.directory / "engine").glob("server_*.log"))
