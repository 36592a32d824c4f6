"""Long-running load on a gateway: many concurrent sessions, checked for mix-ups and leaks.

``python -m benchmarks.gateway load`` holds 200 sessions at a time for 20 minutes. A short test adds
``--sessions 20 --minutes 0.5 --think 0.5 --every 0.5``.

Needs no GPU. Every session has one conversation of ``--turns`` turns. OpenAI's client holds it in
another process, and every other session uses streaming. Between turns a client waits ``--think``
seconds on average. After the conversation, its captured trajectory is compared with the expected
one, the session is closed and a new session replaces it.

Each session has a unique word, which its questions contain. The engine is a mock: it reads the
words of its prompt and answers with the last word and the number of the turn. The log-probs follow
from both. Therefore, the client or the trajectory reveals an answer, token or log-prob of another
session.

Prints latencies, processor time and the growth of the server's process. Exits with code 1 if a
session got data of another one, if a request failed, or if memory, open files or threads grow.
"""

import asyncio
import json
import multiprocessing
import random
import re
import sys
import time
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from dataclasses import dataclass, field
from multiprocessing.queues import Queue
from pathlib import Path
from uuid import uuid4

import numpy as np
import openai
import psutil

from benchmarks.gateway.requests import ClockEngine
from rl_loop.config.episode import EpisodeLimits
from rl_loop.data.trajectory import FinishReason, WeightVersionSpan
from rl_loop.engines.protocol import GenerateRequest, GenerateResult, ModelShape, SamplingParams
from rl_loop.gateway.server import Gateway, GatewaySettings
from rl_loop.gateway.session import ConversationSession, SessionSettings
from rl_loop.harmony.codec import Harmony, ParsedMessage, PromptConfig
from rl_loop.harmony.vocabulary import GptOssVocabulary
from tests.faults.stability import BLOCKS, report, slopes

WORD = re.compile(r"session-[0-9a-f]{32}")
PADDING = "Explain how the third step follows from the second one, and what would break it. " * 10
MAX_REQUESTS = 1 << 20
"""Maximum number of requests whose seconds are kept."""
FLAT = 0.05
"""Largest accepted growth of a quantity per hour, as a fraction of its mean."""


# ---- expected contents of a session


def question(word: str, turn: int) -> str:
    """Return the message of the user."""
    return f"I am {word}, and this is turn {turn}. {PADDING}"


def answer(word: str, turn: int) -> str:
    """Return the answer of the engine."""
    return f"You are {word}, and this is answer {turn}."


def log_prob(word: str, turn: int) -> float:
    """Return the log-prob of all tokens of a turn. It is exact in float32."""
    return -((int(word[-3:], 16) % 512) + 1) / 64 - turn


class EchoEngine(ClockEngine):
    """Mock engine that answers with the last word of the prompt and the number of its turn."""

    def __init__(self, harmony: Harmony, seconds: float) -> None:
        super().__init__([], seconds)
        self._harmony = harmony

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        if request.on_begin is not None:
            request.on_begin()
        await asyncio.sleep(self._seconds)

        text = self._harmony.decode(request.input_ids)
        turn = text.count("<|start|>user")
        word = WORD.findall(text)[-1]
        said = ParsedMessage("final", None, None, answer(word, turn))
        ids = self._harmony.render_assistant([said], "<|return|>")
        return GenerateResult(
            output_ids=ids,
            output_log_probs=[log_prob(word, turn)] * len(ids),
            finish_reason=FinishReason.STOP,
            weight_versions=[WeightVersionSpan(0, len(ids), 0)],
            request_id=request.request_id,
        )


def find_error(session: ConversationSession, harmony: Harmony, word: str, turns: int) -> str:
    """Describe the first error in the captured data of a session; empty if there is none.

    Args:
        session: session to check.
        harmony: codec that decodes the captured tokens.
        word: word of the session.
        turns: expected number of turns.
    """
    captured = session.trajectories(word)
    if len(captured) != 1:
        return f"{len(captured)} trajectories were captured of one conversation"

    leaf, trajectory = captured[0]
    trajectory.validate()
    if len(leaf.path()) != turns:
        return f"{len(leaf.path())} of {turns} turns were captured"

    answers = ["".join(node.answer.texts) for node in leaf.path()]
    if answers != [answer(word, turn) for turn in range(1, turns + 1)]:
        return f"answers were captured that it did not get: {answers}"

    wanted = []
    for turn, node in enumerate(leaf.path(), 1):
        wanted += [log_prob(word, turn)] * len(node.sampled.output_ids)
    captured_log_probs = trajectory.rollout_log_probs[trajectory.loss_mask]
    if not np.array_equal(captured_log_probs, np.array(wanted, np.float32)):
        return "log-probs were captured that the engine did not give it"

    text = harmony.decode(trajectory.token_ids.tolist())
    others = set(WORD.findall(text)) - {word}
    if others or text.count(word) != 2 * turns:
        return (
            f"its {turns} turns name it {text.count(word)} times, and {len(others)} other sessions"
        )
    return ""


# ---- clients, in a separate process


@dataclass(frozen=True)
class Ticket:
    """A session that a client has to hold."""

    word: str
    api_key: str
    stream: bool


@dataclass
class Conversation:
    """Result of one conversation."""

    word: str
    seconds: list[float] = field(default_factory=list)
    """Latency of every request in seconds."""
    error: str = ""


def run_clients(
    options: Namespace,
    base_url: str,
    tickets: "Queue[Ticket | None]",
    done: "Queue[Conversation]",
) -> None:
    """Hold a conversation for every ticket until a ticket is None."""
    asyncio.run(_hold_all(options, base_url, tickets, done))


async def _hold_all(
    options: Namespace,
    base_url: str,
    tickets: "Queue[Ticket | None]",
    done: "Queue[Conversation]",
) -> None:
    running: set[asyncio.Task[None]] = set()
    # All sessions share this client. Otherwise every one would read certificates for itself.
    http = openai.DefaultAsyncHttpxClient(limits=openai.DEFAULT_CONNECTION_LIMITS)
    client = openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0, http_client=http)
    while (ticket := await asyncio.to_thread(tickets.get)) is not None:
        task = asyncio.create_task(
            _hold(options, client.with_options(api_key=ticket.api_key), ticket, done)
        )
        running.add(task)
        task.add_done_callback(running.discard)
    await asyncio.gather(*running)
    await client.close()


async def _hold(
    options: Namespace,
    client: openai.AsyncOpenAI,
    ticket: Ticket,
    done: "Queue[Conversation]",
) -> None:
    conversation = Conversation(ticket.word)
    messages: list[dict[str, str]] = []
    try:
        for turn in range(1, options.turns + 1):
            await asyncio.sleep(random.uniform(0, 2 * options.think))
            messages.append({"role": "user", "content": question(ticket.word, turn)})

            started = time.perf_counter()
            said = await _ask(client, messages, ticket.stream)
            conversation.seconds.append(time.perf_counter() - started)

            if said != answer(ticket.word, turn):
                raise ValueError(f"got an answer that is not its own: {said!r}")
            messages.append({"role": "assistant", "content": said})
    except Exception as error:
        conversation.error = f"{type(error).__name__}: {error}"
    done.put(conversation)


async def _ask(client: openai.AsyncOpenAI, messages: list[dict[str, str]], stream: bool) -> str:
    if not stream:
        completion = await client.chat.completions.create(model="any", messages=messages)  # type: ignore[arg-type]
        return completion.choices[0].message.content or ""
    text = ""
    async for chunk in await client.chat.completions.create(  # type: ignore[call-overload]
        model="any", messages=messages, stream=True
    ):
        if chunk.choices:
            text += chunk.choices[0].delta.content or ""
    return text


# ---- the gateway


class Load:
    """Keeps a fixed number of sessions open, and checks each session after its conversation."""

    def __init__(
        self,
        options: Namespace,
        gateway: Gateway,
        harmony: Harmony,
        tickets: "Queue[Ticket | None]",
        done: "Queue[Conversation]",
    ) -> None:
        self._options = options
        self._gateway = gateway
        self._harmony = harmony
        self._tickets = tickets
        self._done = done
        self._open: dict[str, ConversationSession] = {}
        self._opened = 0
        self.checked = 0
        self.errors: list[str] = []
        # Allocated and written in advance, because otherwise its pages would count as growth.
        self._seconds = np.full(MAX_REQUESTS, np.nan, np.float32)
        self._requests = 0

    @property
    def open_sessions(self) -> int:
        return len(self._open)

    @property
    def seconds(self) -> np.ndarray:
        """Latency of every answered request in seconds, float32."""
        return self._seconds[: self._requests]

    def open(self) -> None:
        """Open a session and pass it to the clients."""
        word = f"session-{uuid4().hex}"
        session = self._gateway.open_session(word)
        self._open[word] = session
        self._tickets.put(Ticket(word, session.api_key, stream=self._opened % 2 == 1))
        self._opened += 1

    async def check_next(self) -> None:
        """Wait for the end of a conversation, then check and close its session."""
        conversation = await asyncio.to_thread(self._done.get)
        session = self._open.pop(conversation.word)
        wrong = conversation.error or find_error(
            session, self._harmony, conversation.word, self._options.turns
        )
        if wrong:
            self.errors.append(f"{conversation.word}: {wrong}")
        await self._gateway.close_session(session)
        self.checked += 1

        first = self._requests
        self._requests += len(conversation.seconds)
        self._seconds[first : self._requests] = conversation.seconds


def take_sample(process: psutil.Process, load: Load) -> dict[str, float]:
    """Measure the server's process: memory, open files, threads and sessions."""
    return {
        "memory, MB": process.memory_full_info().uss / 1e6,
        "open files": process.num_fds(),
        "threads": process.num_threads(),
        "open sessions": load.open_sessions,
    }


async def hold(options: Namespace) -> tuple[Load, list[float], list[dict[str, float]], float]:
    """Serve clients for ``options.minutes``.

    Returns:
        The load, the times of the samples in hours, the samples, and processor seconds.
    """
    harmony = Harmony(GptOssVocabulary(), PromptConfig())
    limits = EpisodeLimits(
        max_turns=10**9, max_episode_tokens=131_072, max_episode_seconds=float("inf")
    )
    settings = SessionSettings(limits, SamplingParams(max_new_tokens=4096))
    engine = EchoEngine(harmony, options.engine_ms / 1e3)
    shape = ModelShape(harmony.vocabulary.size)
    gateway = Gateway(engine, harmony, shape, GatewaySettings(settings))
    await gateway.start()

    spawn = multiprocessing.get_context("spawn")
    tickets: Queue[Ticket | None] = spawn.Queue()
    done: Queue[Conversation] = spawn.Queue()
    load = Load(options, gateway, harmony, tickets, done)
    clients = spawn.Process(target=run_clients, args=(options, gateway.base_url, tickets, done))
    clients.start()

    times: list[float] = []
    samples: list[dict[str, float]] = []
    process = psutil.Process()
    began = time.monotonic()
    processor = time.process_time()

    async def watch() -> None:
        while True:
            samples.append(take_sample(process, load))
            times.append((time.monotonic() - began) / 3600)
            await asyncio.sleep(options.every)

    for _ in range(options.sessions):
        load.open()
    watching = asyncio.create_task(watch())
    try:
        while time.monotonic() - began < 60 * options.minutes:
            await load.check_next()
            load.open()
        watching.cancel()
        processor = time.process_time() - processor
        while load.open_sessions:
            await load.check_next()
    finally:
        tickets.put(None)
        await asyncio.to_thread(clients.join, 30)
        clients.kill()
        await gateway.close()
    return load, times, samples, processor


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=ArgumentDefaultsHelpFormatter)
    parser.add_argument("--sessions", type=int, default=200, help="open at a time")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--turns", type=int, default=6, help="of a session")
    parser.add_argument(
        "--think", type=float, default=10.0, help="seconds between turns, on average"
    )
    parser.add_argument(
        "--engine-ms", type=float, default=500.0, help="time of a turn in the engine"
    )
    parser.add_argument("--every", type=float, default=5.0, help="seconds between samples")
    parser.add_argument("--json", type=Path, help="write all samples to this file")
    options = parser.parse_args()

    load, times, samples, processor = asyncio.run(hold(options))
    added = 1e3 * load.seconds - options.engine_ms
    p50, p99 = np.quantile(added, [0.5, 0.99])
    print(
        f"{options.sessions} sessions at a time for {options.minutes:g} minutes: {load.checked} sessions "
        f"of {options.turns} turns, {len(added)} requests, {len(load.errors)} errors; time per "
        f"request beyond the engine's {options.engine_ms:g} ms: {p50:.1f} ms (median), {p99:.1f} ms (p99), "
        f"{added.max():.1f} ms (maximum); {1e3 * processor / len(added):.2f} ms of the server's processor\n"
    )
    fitted = {}
    if len(samples) >= 3 * BLOCKS:
        fitted = slopes(times, samples)
        print(report(fitted, FLAT))
    for line in load.errors[:20]:
        print(line)
    if options.json is not None:
        options.json.write_text(json.dumps({"hours": times, "samples": samples}))
    grows = [n for n, s in fitted.items() if s.per_hour > 0 and not s.is_flat(FLAT)]
    if load.errors or grows:
        sys.exit(1)
