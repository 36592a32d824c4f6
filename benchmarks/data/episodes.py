"""Recorded episodes: time to write them, and response times of the viewer.

``python -m benchmarks.data episodes write`` measures the cost of recording per step.
``python -m benchmarks.data episodes view`` starts ``gptoss view`` in a separate process and sends
the requests of a browser.
``python -m benchmarks.data episodes list`` measures the list of many runs.
``python -m benchmarks.data episodes report`` measures the creation of report.html.
Needs no GPU. Prints Markdown tables, and one line for ``report``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from launch.report import build_report
from megatron_gptoss.samples import TrainingSamples
from rl_loop.data.trajectory import FinishReason, Trajectory, TrajectoryGroup, Turn
from rl_loop.tracking.episode_recorder import EpisodeRecorder
from rl_loop.tracking.episode_table import SplitEpisodes

CONFIGS = Path(__file__).parents[2] / "configs"
EPISODES_PER_STEP = 64
SAMPLES_PER_TASK = 8
ENDINGS = [FinishReason.STOP] * 8 + [FinishReason.LENGTH, FinishReason.MAX_TURNS]


class RandomVocabulary:
    """A vocabulary of the size of GPT-OSS's with a random word per id."""

    size = 201_088

    def __init__(self) -> None:
        letters = np.array(list("etaoinshrdlu"))
        chosen = np.random.default_rng(0).choice(letters, (self.size, 4))
        self.words = [" " + "".join(row) for row in chosen]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.words[i] for i in ids)


def make_group(
    task: str, tokens: int, vocabulary: RandomVocabulary, random: np.random.Generator
) -> TrajectoryGroup:
    """Return the episodes of one task.

    In each episode, the first quarter is the prompt and two turns are sampled.

    Args:
        task: id of the task.
        tokens: tokens of an episode.
        vocabulary: decodes the tokens to text.
        random: source of tokens, log-probs and outcomes.
    """
    prompt = tokens // 4
    episodes = []
    for _ in range(SAMPLES_PER_TASK):
        # Zipf's distribution, as in natural language.
        ids = np.minimum(random.zipf(1.3, tokens), vocabulary.size - 1).astype(np.int32)
        mask = np.arange(tokens) >= prompt
        log_probs = np.where(mask, -random.exponential(0.3, tokens), 0).astype(np.float32)
        bounds = [0, prompt, (prompt + tokens) // 2, tokens]
        turns = []
        for role, start, end in zip(
            ("prompt", "assistant", "assistant"), bounds, bounds[1:], strict=False
        ):
            turns.append(Turn(role, start, end, vocabulary.decode(ids[start:end].tolist())))
        reward = float(random.choice([-1.0, 1.0]))
        episodes.append(
            Trajectory(
                task,
                token_ids=ids,
                loss_mask=mask,
                rollout_log_probs=log_probs,
                turns=turns,
                reward=reward,
                reward_parts={"correct": float(reward > 0), "format_error": 0.0},
                finish_reason=ENDINGS[random.integers(len(ENDINGS))],
                tool_calls=int(random.integers(4)),
                tool_errors=int(random.integers(10) == 0),
                answer=str(random.integers(1000)),
            )
        )
    return TrajectoryGroup(task, episodes)


def make_step(
    step: int, episodes: int, tokens: int, vocabulary: RandomVocabulary
) -> list[SplitEpisodes]:
    """Return the episodes of a step with the data of their tokens.

    Args:
        step: number of the step, which is also the seed.
        episodes: number of episodes.
        tokens: tokens of an episode.
        vocabulary: decodes the tokens to text.
    """
    random = np.random.default_rng(step)
    groups = [
        make_group(f"task-{step * 1000 + i}", tokens, vocabulary, random)
        for i in range(episodes // SAMPLES_PER_TASK)
    ]
    samples = TrainingSamples.join(
        [
            {
                "token_ids": episode.token_ids,
                "loss_mask": episode.loss_mask,
                "advantages": np.where(episode.loss_mask, episode.reward, 0).astype(np.float32),
                "rollout_log_probs": episode.rollout_log_probs,
            }
            for group in groups
            for episode in group.trajectories
        ]
    )
    return [SplitEpisodes("train", groups, samples)]


def measure_writing(repeats: int) -> None:
    """Print the time that recording a step takes in the loop and in the thread."""
    vocabulary = RandomVocabulary()
    print("| episodes x tokens | the loop waits | the thread works | on the disk |")
    print("|---|---|---|---|")
    for episodes, tokens in ((64, 150), (512, 4096)):
        split = make_step(0, episodes, tokens, vocabulary)
        with tempfile.TemporaryDirectory() as folder:
            in_loop, in_thread = [], []
            with EpisodeRecorder(Path(folder), vocabulary, "all") as recorder:
                for step in range(repeats + 1):
                    began = time.perf_counter()
                    recorder.record(step, split)
                    in_loop.append(time.perf_counter() - began)
                    recorder.finish_writing()
                    in_thread.append(time.perf_counter() - began)
            files = list(Path(folder).glob("0*.parquet"))
            size = sum(file.stat().st_size for file in files) / (repeats + 1)
        # The first step also writes the vocabulary, so it is left out.
        print(
            f"| {episodes} x {tokens:,} | {statistics.median(in_loop[1:]) * 1000:.1f} ms "
            f"| {statistics.median(in_thread[1:]):.3f} s "
            f"| {size / 1e6:.2f} MB, {size / (episodes * tokens):.1f} bytes per token |"
        )


def write_run(run: Path, episodes: int, tokens: int) -> None:
    """Record a run of at least ``episodes`` episodes."""
    vocabulary = RandomVocabulary()
    (run / "config.yaml").write_text("training: {steps: 100000}\n")
    with EpisodeRecorder(run / "episodes", vocabulary, "all") as recorder:
        for step in range(-(-episodes // EPISODES_PER_STEP)):
            recorder.record(step, make_step(step, EPISODES_PER_STEP, tokens, vocabulary))


def measure_viewing(episodes: int, tokens: int) -> None:
    """Print the response times of the viewer for pages of the table, and its peak memory."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        run.mkdir()
        write_run(run, episodes, tokens)
        files = list((run / "episodes").glob("0*.parquet"))
        size = sum(file.stat().st_size for file in files)
        print(f"{episodes:,} episodes of {tokens} tokens: {len(files)} files, {size / 1e6:,.0f} MB")

        with viewing(run) as (address, pid):
            ask_all(address, pid)
            print(f"| memory at its peak | {peak_megabytes(pid):,.0f} MB |")


def measure_list(runs: int, steps: int) -> None:
    """Print the times of the viewer's list of runs, and its peak memory."""
    metrics = {f"metric/{i}": i / 7 for i in range(70)} | {"reward": 0.5, "seconds/step": 2.0}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(runs):
            run = Path(folder) / f"run-{number}"
            run.mkdir()
            (run / "config.yaml").write_text((CONFIGS / "rl" / "tiny_retool.yaml").read_text())
            lines = [
                json.dumps({"step": step, "time": 1e9 + number, **metrics})
                for step in range(1, steps + 1)
            ]
            (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")

        with viewing(Path(folder)) as (address, pid):
            before = processor_seconds(pid)
            took, answer = seconds(f"{address}api/runs")
            spent = processor_seconds(pid) - before
            print(f"| list of {runs} runs with {steps} steps | seconds |")
            print("|---|---|")
            print(f"| first answer | {took:.3f} |")
            print(f"| processor time for it | {spent:.2f} |")
            began = time.perf_counter()
            while not all(run["is_checked"] for run in answer["runs"]):
                answer = seconds(f"{address}api/runs?known=none")[1]
            print(f"| until all metrics are read | {time.perf_counter() - began:.2f} |")
            took, _ = seconds(f"{address}api/runs?known={answer['version']}")
            print(f"| unchanged list | {took:.3f} |")
            print(f"| memory at its peak | {peak_megabytes(pid):,.0f} MB |")


@contextmanager
def viewing(path: Path) -> Iterator[tuple[str, int]]:
    """Run ``gptoss view`` and yield its address and its process id."""
    command = [sys.executable, "-m", "launch", "view", str(path), "--port", "0", "--no-token"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        yield server.stdout.readline().split()[0], server.pid
    finally:
        server.terminate()
        server.wait()


def peak_megabytes(pid: int) -> float:
    """Return the largest memory of a process until now in MB."""
    status = Path(f"/proc/{pid}/status").read_text()
    peak = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert peak is not None
    return int(peak[1]) / 1e3


def measure_report(episodes: int, tokens: int) -> None:
    """Print the processor time and the size of a run's report.html."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        run.mkdir()
        write_run(run, episodes, tokens)
        began = time.process_time()
        report = build_report(run)
        spent = time.process_time() - began
        print(f"{episodes:,} episodes of {tokens:,} tokens: report.html has ", end="")
        print(f"{report.stat().st_size / 1e6:.2f} MB and takes {spent:.2f} s of processor time")


def ask_all(address: str, pid: int) -> None:
    """Send the requests of the viewer's page and print their times."""
    base = f"{address}api/runs/run/episodes"
    print("| asked | seconds |")
    print("|---|---|")
    spent = processor_seconds(pid)
    print(f"| first page, as the server's first answer | {seconds(base)[0]:.3f} |")
    print(f"| processor time for it | {processor_seconds(pid) - spent:.2f} |")
    questions = {
        "first page again": "",
        "a page in the middle": "?offset=50000",
        "one step": "?step_from=500&step_to=500",
        "reward, tools and ending": "?reward_from=0&tools=errors&finish=length",
        "part of a task's name": "?task=77",
        "sorted by reward": "?sort=reward",
    }
    for name, question in questions.items():
        times = [seconds(base + question)[0] for _ in range(5)]
        print(f"| {name} | {statistics.median(times):.3f} |")

    spent = processor_seconds(pid)
    took, page = seconds(f"{base}?text=seton")
    # No episode contains the text, so the viewer searches all of them.
    print(f"| a text, first answer ({page['searched']:,} episodes searched) | {took:.3f} |")
    began = time.perf_counter()
    while page["searched"] < page["recorded"]:
        page = seconds(f"{base}?text=seton")[1]
    total = took + time.perf_counter() - began
    print(f"| the text in all {page['recorded']:,} ({page['total']:,} found) | {total:.2f} |")
    print(f"| processor time for it | {processor_seconds(pid) - spent:.2f} |")
    print(
        f"| the same text with another filter | {seconds(f'{base}?text=seton&tools=errors')[0]:.3f} |"
    )
    newest = seconds(base)[1]["rows"][0]["id"]
    print(f"| one whole episode | {seconds(f'{base}/{newest}')[0]:.3f} |")


def processor_seconds(pid: int) -> float:
    """Return the processor seconds of a process until now, of all its threads together."""
    figures = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    user, system = map(int, figures[11:13])
    return (user + system) / os.sysconf("SC_CLK_TCK")


def seconds(url: str) -> tuple[float, dict]:  # type: ignore[type-arg]
    """Request an address and return the seconds until the answer, and the answer."""
    began = time.perf_counter()
    with urllib.request.urlopen(url) as response:
        body = response.read()
    return time.perf_counter() - began, json.loads(body)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("write", "view", "list", "report"))
    parser.add_argument("--episodes", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=500, help="of an episode")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--steps", type=int, default=500, help="of a run in the list")
    arguments = parser.parse_args()
    if arguments.what == "write":
        measure_writing(arguments.repeats)
    elif arguments.what == "view":
        measure_viewing(arguments.episodes, arguments.tokens)
    elif arguments.what == "list":
        measure_list(arguments.runs, arguments.steps)
    else:
        measure_report(arguments.episodes, arguments.tokens)
