"""Throughput and memory of reading, checking and rendering conversations.

    python -m benchmarks.data conversations                   # 100,000 conversations, 2 processes
    python -m benchmarks.data conversations --conversations 1000000
    python -m benchmarks.data conversations --history harmony --workers 1

Needs no GPU. The conversations are synthetic and all different. They have one or two turns of the
user. Half of them describe, call and answer a tool, and a third of the answers have thoughts. The
stream is read 64 samples at a time, as in a training step, but without training.

Prints conversations, samples and tokens per second, processor time and peak memory. Memory is the
sum of the proportional set sizes (PSS) of this process and its children, sampled 10 times per
second. Processor time is the sum over all processes. Prefer it on a machine with other load.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

TEXT = (
    "the report says that our latency grew by a factor of two after yesterday's deployment and nobody "
    "knows why yet so please look at the dashboard compare both versions list what changed and tell me "
    "in short sentences which service is slow whether it is the cache or the database and what to do next"
)
WORDS = TEXT.split()

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "read_metric",
        "description": "Reads one metric of a service.",
        "parameters": {
            "type": "object",
            "properties": {
                "service": {"type": "string", "description": "Name of the service."},
                "metric": {"type": "string", "enum": ["latency", "errors", "load"]},
            },
            "required": ["service", "metric"],
        },
    },
}


def sentence(rng: random.Random, words: int) -> str:
    """Return a sentence of ``words`` words with a unique number."""
    return " ".join(rng.choices(WORDS, k=words)) + f" ({rng.getrandbits(40):x})."


def conversation(rng: random.Random) -> dict[str, Any]:
    """Return one conversation in OpenAI's format."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You help engineers. Be brief."}
    ]
    has_tool = rng.random() < 0.5
    for _ in range(rng.choice((1, 1, 2))):
        messages.append({"role": "user", "content": sentence(rng, 25)})
        answer: dict[str, Any] = {"role": "assistant", "content": sentence(rng, 50)}
        if rng.random() < 1 / 3:
            answer["thinking"] = sentence(rng, 40)

        if has_tool:
            arguments = json.dumps({"service": f"s{rng.randrange(10_000)}", "metric": "latency"})
            call = {
                "id": "call_1",
                "type": "function",
                "function": {"name": "read_metric", "arguments": arguments},
            }
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
            messages.append(
                {"role": "tool", "tool_call_id": "call_1", "content": sentence(rng, 15)}
            )
        messages.append(answer)
    return {"messages": messages, "tools": [TOOL] if has_tool else None}


def write_conversations(path: Path, count: int) -> None:
    """Write ``count`` conversations, one per line."""
    rng = random.Random(0)
    with path.open("w") as file:
        for _ in range(count):
            file.write(json.dumps(conversation(rng)) + "\n")


class MemoryWatch:
    """Context that samples the memory of this process and of its children."""

    def __init__(self, seconds: float = 0.1) -> None:
        self.peak = 0
        """Largest sum over all processes, in bytes."""
        self.peak_here = 0
        """Largest memory of this process alone, in bytes."""
        self._seconds = seconds
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(self._seconds):
            here = psutil.Process()
            own = here.memory_full_info().pss
            total = own
            for child in here.children(recursive=True):
                try:
                    total += child.memory_full_info().pss
                except psutil.Error:
                    continue
            self.peak_here = max(self.peak_here, own)
            self.peak = max(self.peak, total)


@dataclass
class Result:
    """Result of streaming a file once."""

    samples: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    seconds: float = 0.0
    """Seconds to stream all samples, including ``seconds_to_first``."""
    seconds_to_first: float = 0.0
    processor_seconds: float = 0.0
    """Processor time of all processes, including their start."""


def stream_once(path: Path, history: str, workers: int) -> Result:
    """Stream every conversation of a file, in the vocabulary of the released models.

    Args:
        path: JSONL file of conversations.
        history: rendering of multi-turn conversations, as in ``DataConfig``.
        workers: number of processes that render.
    """
    from rl_loop.conversations.config import DataConfig
    from rl_loop.conversations.dataset import ConversationData
    from rl_loop.conversations.rejections import RejectionReport
    from rl_loop.harmony.codec import Harmony, PromptConfig
    from rl_loop.harmony.vocabulary import GptOssVocabulary

    values = {"path": str(path), "epochs": 1, "history": history, "workers": workers}
    config = DataConfig.model_validate(values)
    report = RejectionReport(write=lambda records: None, show=print)
    result = Result()
    began, processor_began = time.monotonic(), processor_seconds()

    with ConversationData(config, Harmony(GptOssVocabulary(), PromptConfig()), 16384) as data:
        stream = data.stream(report)
        result.seconds_to_first = time.monotonic() - began
        for _ in _steps(stream, result):
            pass
        result.seconds = time.monotonic() - began
    # A child's processor time is only known after its end.
    result.processor_seconds = processor_seconds() - processor_began
    return result


def processor_seconds() -> float:
    """Return the processor seconds of this process and of its children that have exited."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _steps(stream: Any, result: Result) -> Iterator[None]:
    """Take the samples of one step at a time, and count them."""
    while (samples := stream.take(64)) is not None:
        result.samples += len(samples)
        result.tokens += samples.tokens
        result.loss_tokens += int(samples.loss_mask.sum())
        yield


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--conversations", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--history", choices=["append", "harmony"], default="append")
    parser.add_argument("--file", type=Path, help="where they are kept; else in a temporary folder")
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as scratch:
        path = arguments.file or Path(scratch) / "conversations.jsonl"
        if not path.exists():
            write_conversations(path, arguments.conversations)

        with MemoryWatch() as memory:
            result = stream_once(path, arguments.history, arguments.workers)
        size = path.stat().st_size

    samples_per_second = result.samples / result.seconds
    print(f"{arguments.conversations:,} conversations, {size / 1e6:,.0f} MB of JSONL")
    print(
        f"{result.samples:,} samples, {result.tokens / result.samples:,.0f} tokens each, "
        f"{result.loss_tokens / result.tokens:.0%} in the loss"
    )
    print(
        f"{arguments.conversations / result.seconds:,.0f} conversations/s, {samples_per_second:,.0f} samples/s, "
        f"{result.tokens / result.seconds / 1e6:.2f} million tokens/s with {arguments.workers} processes "
        f"({result.seconds:.1f} s, the first sample after {result.seconds_to_first:.1f} s)"
    )
    print(
        f"{result.samples / result.processor_seconds:,.0f} samples per second of one processor "
        f"({result.processor_seconds:.1f} s)"
    )
    print(
        f"peak memory {memory.peak / 1e6:,.0f} MB of all processes, {memory.peak_here / 1e6:,.0f} MB of "
        "the one that takes samples"
    )
