"""The reference run of a machine: the whole loop of reinforcement learning with random weights.

    python benchmarks/loop.py configs/rl/gpt-oss-20b_1x4.yaml --gpus 4 --steps 5
    python benchmarks/loop.py configs/rl/gpt-oss-20b_1x4.yaml --gpus 1 --layers 8 optimizer.lr=1e-6
    python benchmarks/loop.py configs/rl/tiny_retool.yaml --turn-tokens 12 --steps 2

What runs is the product's own session, as ``gptoss rl`` builds it from the configuration and the
overrides: Ray, the trainer's ranks, the engines, rollout workers with the real sandbox, Harmony,
multi-turn ReTool, routing replay (R3). Nothing is saved, evaluated at the end or exported.

Weights are drawn at random, on the GPU where there is one, and written as a Hugging Face directory
that is deleted once the trainer has read it. ``random_policy.py`` says what they do: every turn is
a call of Python that runs, of ``--turn-tokens`` random tokens on average, and episodes end by their
limits. So rewards teach nothing (``reward.tool_use`` makes them differ), and what is measured is
time, memory and agreement, not learning.

The first step compiles, and alone measures the mismatch without routing replay; medians are those
of the others. Memory is the most that ``nvidia-smi`` showed of each GPU in a phase of any step.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import re
import shutil
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from threading import Thread
from typing import Any

from rl_loop.config.load import load_rl_config
from rl_loop.config.run import RlConfig
from rl_loop.lifecycle import start_checks
from rl_loop.lifecycle.disk_checks import check_writable
from rl_loop.session import Session, build_loop, codec_settings
from rl_loop.tracking.metrics import Name
from rl_loop.tracking.run_directory import Start

MANY_STEPS = 1_000_000
"""More than are run, so that none is the last one, which is saved."""
PHASES = ("rollout", "sync", "prepare", "estimate", "train")
"""That the loop times itself."""
MEMORY_MILLISECONDS = 100
"""Between two looks at the GPUs' memory."""
DECODE_LINE = re.compile(r"#running-req: (\d+).*gen throughput \(token/s\): ([0-9.]+)")


def main() -> None:
    options = parse_arguments()
    with tempfile.TemporaryDirectory(dir=options.scratch, prefix="loop_") as scratch:
        config = read_config(options, Path(scratch))
        began = time.monotonic()
        # In a process of its own, whose context on the GPU goes with it.
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, spawn) as pool:
            pool.submit(write_weights, config, options.turn_tokens).result()
        print(f"random weights written in {time.monotonic() - began:.1f} s", flush=True)

        watch = Watch()
        end = math.inf if options.seconds is None else began + options.seconds
        try:
            run(config, options.steps, watch, end)
        finally:
            # A run that failed in its fourth step still has the figures of three.
            keep_server_logs(config, options.out)
            if watch.steps:
                show_report(Report(config, watch, server_speeds(config)), options.out)


def show_report(report: Report, out: Path | None) -> None:
    """Print the table, and write it and the steps' metrics to ``out``."""
    text = report.text()
    print(text, flush=True)
    if out:
        out.write_text(text)
        out.with_suffix(".json").write_text(json.dumps(report.steps, indent=1))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("config", type=Path, help="of `gptoss rl`")
    add("--layers", type=int, help="of the model; all of the configuration's by default")
    add("--gpus", type=int, help="ranks of expert parallelism and SGLang servers")
    add("--steps", type=int, default=4, help="the first one warms up")
    add(
        "--seconds", type=float, help="start no step that would end later, by the last one's length"
    )
    add("--turn-tokens", type=int, default=300, help="mean length of a turn's text")
    add("--scratch", type=Path, help="directory for weights and the run, deleted afterwards")
    add("--out", type=Path, help="Markdown file for the table; the steps' metrics lie beside it")
    add("overrides", nargs="*", help="key=value of the configuration")
    return parser.parse_intermixed_args()


def read_config(options: argparse.Namespace, scratch: Path) -> RlConfig:
    """Read the configuration with what the benchmark needs; the user's overrides come last."""
    overrides = [
        "name=loop",
        f"output_dir={scratch}",
        f"initial_weights={scratch / 'weights'}",
        f"training.steps={MANY_STEPS}",
        f"training.checkpoint_every={MANY_STEPS}",
        f"evaluate_every={MANY_STEPS}",
        "tasks.held_out_tasks=4",
        "optimizer.schedule=constant",
        "rollout.routed_experts=true",
        "algorithm.routing_replay=R3",
        "reward.tool_use=true",
        # Random weights agree less than trained ones; what is measured is reported.
        "canary_tolerance=10",
    ]
    if options.layers is not None:
        overrides.append(f"model.num_layers={options.layers}")
    if options.gpus is not None:
        overrides.append(f"parallel.world_size={options.gpus}")
        overrides.append(f"parallel.expert={options.gpus}")
        overrides.append(f"rollout.engine.servers={options.gpus}")
    return load_rl_config(options.config, overrides + options.overrides)


def write_weights(config: RlConfig, turn_tokens: int) -> None:
    """Write the random policy as the directory that the configuration starts from."""
    import torch
    from random_policy import next_tokens, policy_weights

    from converters.hf_directory import write_hf_directory
    from converters.mxfp4_tensors import rounded_to_mxfp4
    from rl_loop.tasks.codec import codec_of

    assert config.initial_weights is not None
    device = "cuda" if torch.cuda.is_available() else "cpu"
    following = next_tokens(codec_of(codec_settings(config)), turn_tokens)
    dtype = getattr(torch, config.dtype)
    tensors = policy_weights(config.model, following, dtype, device, config.seed)
    if config.parallel.base == "mxfp4":
        tensors = ((name, rounded_to_mxfp4(name, tensor)) for name, tensor in tensors)
    on_host = ((name, tensor.cpu()) for name, tensor in tensors)
    write_hf_directory(config.initial_weights, config.model, on_host)


def run(config: RlConfig, steps: int, watch: Watch, end: float) -> None:
    """Run the steps, which ``watch`` collects the metrics of.

    ``end``: seconds of ``time.monotonic`` that no step shall pass, by the length of the last one."""
    with ExitStack() as stack:
        stack.enter_context(no_checkpoints())
        stack.enter_context(timed_waking(watch))
        began = time.monotonic()
        session = stack.enter_context(Session(config, watch.show, Start.OVERWRITE))
        assert config.initial_weights is not None
        shutil.rmtree(config.initial_weights)

        assert session.rollouts is not None
        session.rollouts.ready()
        watch.note(f"trainer and engines ready after {time.monotonic() - began:.1f} s")
        session.rollouts.pause = watch.timed(  # type: ignore[method-assign]
            "sleep", session.rollouts.pause
        )

        loop = build_loop(config, session)
        stack.callback(loop.collector.close)
        for step in range(steps):
            if watch.steps and time.monotonic() + watch.steps[-1][Name.STEP_SECONDS] > end:
                watch.note(f"stopped after {step} steps: the time is up")
                break
            loop.run_step(step)
            loop.state.step += 1


@contextmanager
def no_checkpoints() -> Iterator[None]:
    """Ask for no room for checkpoints, as the benchmark writes none."""
    original = start_checks.check_disk
    start_checks.check_disk = lambda directory, *unused: check_writable(directory)
    try:
        yield
    finally:
        start_checks.check_disk = original


@contextmanager
def timed_waking(watch: Watch) -> Iterator[None]:
    """Time how long servers take to get their memory back, which is a part of a sync."""
    from rl_loop.engines.sglang.fleet import SglangFleet

    original = SglangFleet._change_memory

    def change_memory(fleet: SglangFleet, urls: Any, path: str, *arguments: Any) -> Any:
        is_waking = urls and "resume" in path
        began = time.monotonic()
        result = original(fleet, urls, path, *arguments)
        if is_waking:
            watch.seconds["wake"] += time.monotonic() - began
        return result

    SglangFleet._change_memory = change_memory  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        SglangFleet._change_memory = original  # type: ignore[method-assign]


class Watch:
    """The run's display: prints, collects the steps' metrics, and looks at the GPUs' memory."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        """Metrics of every finished step, and ``seconds/sleep`` and ``seconds/wake``."""
        self.memory: dict[str, dict[int, int]] = defaultdict(dict)
        """By phase and GPU: the most MiB in use."""
        self.seconds: dict[str, float] = defaultdict(float)
        """Of the step under way, by what was timed."""
        self._phase = "start"

    @contextmanager
    def show(self, title: str, steps: int, first_step: int) -> Iterator[Watch]:
        """Watch memory for as long as the run lasts."""
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
        """Take the metrics of a finished step."""
        for name, seconds in self.seconds.items():
            values = {**values, f"seconds/{name}": seconds}
        self.seconds.clear()
        self.steps.append(values)
        print(
            f"step {step}: {values[Name.STEP_SECONDS]:.1f} s, "
            f"{values[Name.TOKENS_PER_SECOND]:,.0f} tokens/s",
            flush=True,
        )

    def timed(self, name: str, call: Callable[[], None]) -> Callable[[], None]:
        """Return ``call`` as a phase whose seconds are counted."""

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
    """The table of a run."""

    def __init__(
        self,
        config: RlConfig,
        watch: Watch,
        speeds: list[tuple[int, float]],
    ) -> None:
        """Args:
        watch: with the metrics of the finished steps.
        speeds: running requests and tokens per second, from the servers' logs."""
        self.config = config
        self.steps = watch.steps
        self.memory = watch.memory
        self.speeds = speeds
        self.episodes = config.rollout.tasks_per_step * config.rollout.samples_per_task

    def text(self) -> str:
        """Return everything as Markdown."""
        model = self.config.model
        rollout = self.config.rollout
        lines = [
            f"{model.num_layers} layers, {model.num_experts} experts, GPUs: {self.gpus}, engine "
            f"{rollout.engine.type}, {self.episodes} episodes of at most {rollout.max_tokens} tokens "
            f"and {rollout.max_turns} turns",
            "",
            *self._step_table(),
            *self._decoding(),
            *self._memory_table(),
        ]
        return "\n".join(lines) + "\n"

    @property
    def gpus(self) -> int:
        """Of trainer and engines; ranks where there are no GPUs."""
        processes = self.config.rollout.engine.server_processes
        if processes is None or self.config.rollout.engine.shares_trainer_gpus:
            return self.config.parallel.world_size
        return self.config.parallel.world_size + processes.count * processes.gpus_each

    def _step_table(self) -> list[str]:
        numbers = [f"step {number}" for number in range(1, len(self.steps) + 1)]
        columns = len(numbers) + 2
        lines = [f"| | {' | '.join(numbers)} | median after the first |", "|---" * columns + "|"]
        for title, read, form in self._rows():
            values = [read(step) for step in self.steps]
            known = [value for value in values[1:] if value is not None]
            cells = [*values, median(known) if known else None]
            shown = ["-" if value is None else format(value, form) for value in cells]
            lines.append(f"| {title} | {' | '.join(shown)} |")
        return [*lines, ""]

    def _rows(self) -> list[tuple[str, Callable[[dict[str, float]], float | None], str]]:
        """Return title, value and format of every row."""

        def metric(name: str) -> Callable[[dict[str, float]], float | None]:
            return lambda step: step.get(name)

        return [
            ("sync, s", metric("seconds/sync"), ".2f"),
            ("of which servers wake", metric("seconds/wake"), ".2f"),
            ("rollout, s", metric("seconds/rollout"), ".2f"),
            ("servers go to sleep, s", metric("seconds/sleep"), ".2f"),
            ("scoring without replay, s", metric("seconds/estimate"), ".2f"),
            ("update, s", metric("seconds/train"), ".2f"),
            ("rest, s", self._rest, ".2f"),
            ("whole step, s", metric(Name.STEP_SECONDS), ".2f"),
            ("tokens of a step", self._tokens, ",.0f"),
            ("**tokens/s/GPU**", lambda step: step[Name.TOKENS_PER_SECOND] / self.gpus, ",.0f"),
            ("sampled tokens", self._sampled_tokens, ",.0f"),
            ("sampled tokens/s/GPU in rollouts", self._sampling_speed, ",.0f"),
            ("tokens/s/GPU of the update", self._update_speed, ",.0f"),
            ("turns of an episode", metric(Name.TURNS), ".2f"),
            ("episodes with a tool call", metric(Name.TOOL_CALL_RATE), ".1%"),
            ("failed tool calls of an episode", metric("rollout/tool_errors"), ".3f"),
            ("prefix tokens from the cache", metric("rollout/cache_hit"), ".1%"),
            ("entropy of a sampled token, nats", metric(Name.ENTROPY), ".2f"),
            ("mismatch k3 with R3", metric(Name.KL), ".2e"),
            ("mismatch k3 without R3", metric("routing/kl_k3_without_replay"), ".2e"),
            ("mean log-prob gap, nats", metric(Name.LOGPROB_GAP), ".2e"),
            ("routes that agree", metric("routing/agreement"), ".1%"),
            ("largest deviation of the ratio", metric("ratio/deviation_max"), ".1e"),
        ]

    def _rest(self, step: dict[str, float]) -> float:
        """Return what no row counts: preparing samples, writing metrics."""
        counted = [name for name in PHASES if name != "prepare"] + ["sleep"]
        return step[Name.STEP_SECONDS] - sum(step.get(f"seconds/{name}", 0) for name in counted)

    @staticmethod
    def _tokens(step: dict[str, float]) -> float:
        return step[Name.TOKENS_PER_SECOND] * step[Name.STEP_SECONDS]

    def _sampled_tokens(self, step: dict[str, float]) -> float:
        return step[Name.RESPONSE_TOKENS] * self.episodes

    def _sampling_speed(self, step: dict[str, float]) -> float:
        return self._sampled_tokens(step) / step["seconds/rollout"] / self.gpus

    def _update_speed(self, step: dict[str, float]) -> float:
        return self._tokens(step) / step["seconds/train"] / self.gpus

    def _decoding(self) -> list[str]:
        """Say how fast the servers decoded when they were full, by their own logs."""
        if not self.speeds:
            return []
        most = max(running for running, _ in self.speeds)
        full = [(running, speed) for running, speed in self.speeds if running >= 0.9 * most]
        return [
            f"Decoding by the servers' logs: {median(speed for _, speed in full):,.0f} tokens/s per server at "
            f"{median(running for running, _ in full):.0f} running requests (of {len(full)} lines)",
            "",
        ]

    def _memory_table(self) -> list[str]:
        metrics = {
            name: [step[name] for step in self.steps if name in step]
            for name in sorted({name for step in self.steps for name in step})
            if name.startswith("memory/")
        }
        lines = []
        if self.memory:
            indices = sorted({index for most in self.memory.values() for index in most})
            titles = " | ".join(f"GPU {index}, GB" for index in indices)
            lines += [f"| phase | {titles} |", "|---" * (len(indices) + 1) + "|"]
            for phase, most in self.memory.items():
                cells = [f"{most.get(index, 0) * 2**20 / 1e9:.1f}" for index in indices]
                lines.append(f"| {phase} | {' | '.join(cells)} |")
        for name, values in metrics.items():
            lines.append(f"- {name}: {', '.join(f'{value:.4g}' for value in values)}")
        return lines


def keep_server_logs(config: RlConfig, out: Path | None) -> None:
    """Copy the servers' logs beside ``out``, also of a run that failed."""
    if out is None:
        return
    for log in server_logs(config):
        shutil.copy(log, out.with_name(f"{out.stem}_{log.name}"))


def server_logs(config: RlConfig) -> list[Path]:
    """Find what SGLang's servers printed."""
    return sorted((config.directory / "engine").glob("server_*.log"))


def server_speeds(config: RlConfig) -> list[tuple[int, float]]:
    """Read running requests and tokens per second of decoding from the logs of SGLang's servers."""
    speeds = []
    for log in server_logs(config):
        for found in DECODE_LINE.finditer(log.read_text(errors="replace")):
            speeds.append((int(found[1]), float(found[2])))
    return speeds


if __name__ == "__main__":
    main()
