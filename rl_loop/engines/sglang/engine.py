"""RolloutEngine over many SGLang servers: routing, faults, exact tokens, log-probs and versions.

A turn is streamed. Whatever ends the stream early, the tokens that came are kept: after an
``abort`` they are the answer, and after the death of a server the turn goes on from them on
another one.
"""

import asyncio
import base64
import math
import uuid
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from megatron_gptoss.routes import route_dtype
from rl_loop.data.trajectory import FinishReason, WeightVersionSpan
from rl_loop.engines.protocol import (
    GenerateRequest,
    GenerateResult,
    check_routes,
    fault_in_ids,
    fault_in_log_probs,
)
from rl_loop.engines.sglang.client import RequestRejected, ServerFailed, SglangClient
from rl_loop.engines.sglang.scored_tokens import log_probs_of
from rl_loop.engines.sglang.server import ServerState, ServerStatus
from rl_loop.infrastructure import EngineFault, describe

FINISH_REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
}
STREAM_INTERVAL = 32
"""Tokens per chunk: what the death of a server can cost a turn."""
MAX_FAULTS = 20
"""Faults of one request; more are not the servers' bad luck."""
MAX_PAUSE = 1.0
"""Longest pause in seconds between two faults of one request; the pause doubles with each."""
REMEMBERED_EPISODES = 100_000
"""Episodes whose server is remembered, the latest ones."""
REFRESH_SECONDS = 1.0
"""How long the states of the servers are taken to hold."""


@dataclass(eq=False)
class _Turn:
    """A request under way, and what it has so far."""

    request: GenerateRequest
    result: GenerateResult = field(
        default_factory=lambda: GenerateResult([], [], FinishReason.ABORT)
    )
    aborted: bool = False
    limit: asyncio.Timeout = field(default_factory=lambda: asyncio.timeout(None))
    """Ends the turn some time after an abort, whatever its server does."""
    failures: Counter[str] = field(default_factory=Counter)
    """Faults that this turn met, by the server's address."""
    client: SglangClient | None = None
    """Of the server that works on the turn."""
    server_request_id: str = ""
    """The id of the turn's latest request to a server, which an abort names."""

    def next_body(self) -> dict[str, object]:
        """Build the body of a request that goes on from the tokens so far."""
        sampling = self.request.sampling
        output_ids = self.result.output_ids

        # Another id for every attempt: the one before may still run under the old one.
        self.server_request_id = f"{self.request.request_id}#{uuid.uuid4().hex[:12]}"
        return {
            "rid": self.server_request_id,
            "input_ids": self.request.input_ids + output_ids,
            "sampling_params": {
                "max_new_tokens": sampling.max_new_tokens - len(output_ids),
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "stop_token_ids": list(sampling.stop_token_ids),
                "sampling_seed": sampling.seed,
                "stream_interval": STREAM_INTERVAL,
            },
            "return_logprob": True,
            "return_routed_experts": self.request.return_routed_experts,
            "stream": True,
        }


@dataclass(frozen=True)
class _Chunk:
    """What one chunk of a stream adds to a turn, checked."""

    ids: list[int]
    log_probs: list[float]
    version: int
    """Of the weights that sampled the tokens."""
    finish: dict[str, Any] | None
    """Why the stream ends, ``{"type": ...}``; None if it goes on."""
    meta: dict[str, Any]
    """``meta_info`` as the server sent it."""


class SglangEngine:
    """Samples on whichever server holds the policy.

    Servers are not trusted: an answer that cannot be one is a fault, and the turn goes on
    elsewhere. A server that does not hold policy weights ``oldest_version`` or later is not used,
    and an answer that was made with other weights is thrown away.
    """

    def __init__(
        self,
        servers: Callable[[], Awaitable[list[ServerStatus]]],
        *,
        num_layers: int,
        top_k: int,
        num_experts: int,
        vocab_size: int,
        wait_seconds: float = 1800.0,
        abort_seconds: float = 5.0,
    ) -> None:
        """Prepare for generation; nothing is connected yet.

        Args:
            servers: tells the state of all servers; asked again after a second and after a fault.
            num_layers, top_k, num_experts: how routed experts are to be read.
            vocab_size: token ids are below this.
            wait_seconds: longest that a request waits for a server that holds the policy.
            abort_seconds: longest that a turn lives on after it was aborted.
        """
        self.oldest_version = 0
        self._routes_shape = (-1, num_layers, top_k)
        self._num_experts = num_experts
        self._vocab_size = vocab_size
        self._wait_seconds = wait_seconds
        self._abort_seconds = abort_seconds

        # What is known of the servers, and when (on the event loop's clock) they were asked.
        self._servers = servers
        self._statuses: list[ServerStatus] = []
        self._refreshed_at = -math.inf
        self._refreshing = asyncio.Lock()

        # By the server's address. The load is requests under way, of this worker only.
        self._clients: dict[str, SglangClient] = {}
        self._load: Counter[str] = Counter()

        self._homes: OrderedDict[str, str] = OrderedDict()
        """Episode -> address of the server that has its prefix cached."""
        self._turns: dict[str, _Turn] = {}

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Sample one continuation.

        Raises:
            ValueError: for a request that no server takes.
            EngineFault: after ``MAX_FAULTS`` faults, naming the last.
            RuntimeError: if no server held the policy for ``wait_seconds``.
        """
        if request.request_id in self._turns:
            name = f"request {request.request_id}"
            raise ValueError(f"{name} is already running: request ids must be unique")

        turn = _Turn(request)
        self._turns[request.request_id] = turn
        try:
            async with turn.limit:
                await self._sample(turn)
        except TimeoutError:  # only an abort sets a limit
            # Routes come with the last token, which will not come: the tokens are of no use.
            if request.return_routed_experts:
                return GenerateResult([], [], FinishReason.ABORT)
        finally:
            del self._turns[request.request_id]
        return turn.result

    async def _sample(self, turn: _Turn) -> None:
        """Let one server after another work on a turn, until one ends it."""
        while True:
            server = await self._route(turn.request.episode, turn.failures)
            # Aborted between two servers: what has come so far is the answer.
            if turn.aborted:
                return

            self._load[server.url] += 1
            try:
                await self._stream(turn, server)
                _check_routes_came(turn, server)
                return
            except ServerFailed as failure:
                # The tokens so far are kept. The server may be dead: its state is asked for anew.
                turn.failures[server.url] += 1
                faults = turn.failures.total()
                self._refreshed_at = -math.inf
                if faults == MAX_FAULTS:
                    what = f"met {faults} faults, the last: {failure}"
                    raise EngineFault(turn.request.request_id, what) from failure
                await asyncio.sleep(min(MAX_PAUSE, 0.01 * 2**faults))
            finally:
                turn.client = None
                self._load[server.url] -= 1

    async def _route(self, episode: str, failures: Counter[str]) -> ServerStatus:
        """Wait for a server that holds the policy, and choose one.

        ``failures`` are the faults that the turn met, by address.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._wait_seconds
        while True:
            await self._refresh()
            if (server := self._choose_server(episode, failures)) is not None:
                return server

            if loop.time() > deadline:
                states = "; ".join(
                    f"{status.url or 'a server'} is {status.state} {status.fault}"
                    for status in self._statuses
                )
                raise RuntimeError(
                    f"no SGLang server held policy weights {self.oldest_version} or later "
                    f"for {self._wait_seconds:.0f} seconds: {states}"
                )
            await asyncio.sleep(0.1)

    def _choose_server(self, episode: str, failures: Counter[str]) -> ServerStatus | None:
        """Choose the episode's server, or the one with least to do; None if none is ready."""
        ready = {
            status.url: status
            for status in self._statuses
            if status.state is ServerState.SYNCED and self._is_fresh(status.version)
        }
        if not ready:
            return None

        # An episode stays where its prefix is cached, unless that server failed more than another.
        home = self._homes.get(episode)
        fewest_failures = min(failures[url] for url in ready)
        if home not in ready or failures[home] > fewest_failures:
            home = min(ready, key=lambda url: (failures[url], self._load[url]))

        self._homes[episode] = home
        self._homes.move_to_end(episode)
        if len(self._homes) > REMEMBERED_EPISODES:
            self._homes.popitem(last=False)
        return ready[home]

    async def _refresh(self) -> None:
        """Ask for the servers' states if they are not known from just now."""
        # Many requests may come at once: one of them asks for all.
        async with self._refreshing:
            now = asyncio.get_running_loop().time()
            if now > self._refreshed_at + REFRESH_SECONDS:
                self._refreshed_at = now
                self._statuses = await self._servers()

    def _is_fresh(self, version: int | None) -> bool:
        return version is not None and version >= self.oldest_version

    def _client(self, url: str) -> SglangClient:
        return self._clients.setdefault(url, SglangClient(url))

    async def _stream(self, turn: _Turn, server: ServerStatus) -> None:
        """Let ``server`` go on with the turn to its end.

        Raises ServerFailed; what came before is kept.
        """
        turn.client = self._client(server.url)
        start = len(turn.result.output_ids)

        # A stream that is left early must be closed, or the server would go on sampling.
        async with aclosing(turn.client.generate(turn.next_body())) as chunks:
            async for content in chunks:
                # A server does not say when it began; with the first tokens at the latest.
                if turn.request.on_begin is not None:
                    turn.request.on_begin()

                try:
                    chunk = self._read_chunk(content, turn, start, server)
                except (LookupError, TypeError, ValueError, AttributeError) as error:
                    fault = f"a chunk cannot be read: {describe(error)}"
                    raise ServerFailed(f"{server.url}: {fault}") from error

                self._append(turn, chunk, server)
                if start == 0:
                    # Later attempts also find what the turn itself has sampled.
                    cached_tokens = chunk.meta.get("cached_tokens", turn.result.cached_tokens)
                    turn.result.cached_tokens = cached_tokens
                if chunk.finish is not None:
                    _end(turn, chunk.finish["type"], server)
                    return
        raise ServerFailed(f"{server.url}: the answer has no finish reason")

    def _read_chunk(
        self,
        content: dict[str, Any],
        turn: _Turn,
        start: int,
        server: ServerStatus,
    ) -> _Chunk:
        """Read one chunk of a stream that began when the turn had ``start`` tokens.

        Raises ServerFailed for one that cannot be true, or whatever reading nonsense raises.
        """
        meta = content["meta_info"]
        version = str(meta.get("weight_version"))
        if not version.isdigit() or not self._is_fresh(int(version)):
            raise ServerFailed(
                f"{server.url} answered with weights {version!r}, the policy is {self.oldest_version} or later"
            )

        if meta.get("id", turn.server_request_id) != turn.server_request_id:
            raise ServerFailed(f"{server.url} sent the answer to request {meta['id']!r}")

        # Checked in every chunk, also in one without tokens: _end looks the reason up.
        finish = meta.get("finish_reason")
        if finish is not None and finish["type"] not in FINISH_REASONS:
            raise ServerFailed(
                f"{server.url}: the answer ended by {finish['type']!r}, which is no reason"
            )

        ids = content["output_ids"]
        total = meta["completion_tokens"]
        received = len(turn.result.output_ids) - start
        if total == received:
            # A request that is aborted while it waits repeats its last token.
            return _Chunk([], [], int(version), finish, meta)

        # With --incremental-streaming-output a chunk has the new tokens only, and
        # completion_tokens counts those of all chunks: a lost or repeated chunk shows here.
        entries = meta["output_token_logprobs"]
        log_probs = [entry[0] for entry in entries]
        if received + len(ids) != total or [entry[1] for entry in entries] != ids:
            raise ServerFailed(
                f"{server.url}: {len(ids)} tokens and {len(entries)} log-probs after {received} "
                f"of {total} do not fit: does it run with --incremental-streaming-output?"
            )
        room = turn.request.sampling.max_new_tokens - len(turn.result.output_ids)
        if len(ids) > room:
            raise ServerFailed(f"{server.url}: {len(ids)} tokens came back, {room} were asked for")

        if ids:
            fault = fault_in_ids(ids, self._vocab_size) or fault_in_log_probs(log_probs)
            if fault is not None:
                raise ServerFailed(f"{server.url}, weights {version}: {fault}")
        return _Chunk(
            ids=[int(token) for token in ids],
            log_probs=[float(log_prob) for log_prob in log_probs],
            version=int(version),
            finish=finish,
            meta=meta,
        )

    def _append(self, turn: _Turn, chunk: _Chunk, server: ServerStatus) -> None:
        """Add a chunk to what the turn has. Raises ServerFailed if the server gave up in it."""
        result = turn.result
        if chunk.finish is not None:
            # The server's own failures come as an abort with the status that they would have had.
            is_abort = chunk.finish["type"] == "abort"
            if is_abort and (chunk.finish.get("status_code") or 0) >= 500:
                raise ServerFailed(f"{server.url}: {chunk.finish.get('message')}")

            if turn.request.return_routed_experts:
                tokens = len(turn.request.input_ids) + len(result.output_ids) + len(chunk.ids) - 1
                result.routed_experts = self._read_routes(chunk.meta, tokens)

        result.output_ids += chunk.ids
        result.output_log_probs += chunk.log_probs
        _extend_versions(result.weight_versions, len(chunk.ids), chunk.version)

    def _read_routes(self, meta: dict[str, Any], tokens: int) -> np.ndarray | None:
        """Decode the routes of so many tokens, uint8 or int16 [tokens, layers, top_k]; None if none
        came.

        Raises RuntimeError if there are routes that no router chose.
        """
        if tokens == 0 or "routed_experts" not in meta:
            return None

        try:
            data = base64.b64decode(meta["routed_experts"])
            routes = np.frombuffer(data, dtype=np.int32).reshape(self._routes_shape)
        except (TypeError, ValueError) as error:
            raise ServerFailed(f"routed experts cannot be read: {describe(error)}") from error
        if len(routes) != tokens:
            raise ServerFailed(
                f"routed experts of {len(routes)} tokens came back, expected {tokens}"
            )
        # Checked as they came: a smaller dtype would make experts of numbers that are none.
        return check_routes(routes, self._num_experts).astype(route_dtype(self._num_experts))

    async def score(self, input_ids: list[int], temperature: float = 1.0) -> list[float]:
        """Score on any server that holds the policy; see ``score_on``."""
        server = await self._route(episode="", failures=Counter())
        return await score_on(self._client(server.url), input_ids, temperature)

    async def abort(self, request_id: str | None = None) -> None:
        """Stop one request, or all.

        A turn ends ``abort_seconds`` later at the latest, whatever its server does about it.
        """
        now = asyncio.get_running_loop().time()
        calls = []
        for name, turn in self._turns.items():
            if request_id not in (None, name) or turn.aborted:
                continue

            # A server may still have tokens to send. Between servers there is nothing to wait for.
            turn.aborted = True
            if turn.client is None:
                turn.limit.reschedule(now)
                continue
            turn.limit.reschedule(now + self._abort_seconds)
            body = {"rid": turn.server_request_id, "abort_all": False}
            calls.append(turn.client.call("/abort_request", body, seconds=self._abort_seconds))

        await asyncio.gather(*calls, return_exceptions=True)

    async def sync_weights(
        self,
        named_tensors: Iterable[tuple[str, torch.Tensor]],
        version: int,
    ) -> None:
        """Refuse answers older than ``version`` from now on.

        The servers take their weights from the trainer (``weight_sender``), not from here.
        """
        self.oldest_version = version
        self._refreshed_at = -math.inf

    async def close(self) -> None:
        """Close all connections."""
        for client in self._clients.values():
            await client.close()


async def score_on(
    client: SglangClient,
    input_ids: list[int],
    temperature: float = 1.0,
) -> list[float]:
    """Compute log p(input_ids[i] | input_ids[:i]) for i >= 1, past the prefix cache.

    Raises:
        ServerFailed: if the server does not answer, or scored other tokens.
        ValueError: for another temperature than 1: SGLang knows no other one for prompts.
    """
    if temperature != 1:
        raise ValueError(f"SGLang scores at temperature 1 only, not {temperature}")
    if len(input_ids) < 2:
        return []

    body = {
        "input_ids": input_ids,
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        # From the first token on, which also keeps the prefix cache out of it.
        "logprob_start_len": 0,
    }
    answer = await client.call("/generate", body)
    return log_probs_of(answer["meta_info"]["input_token_logprobs"], input_ids, client.url)


def _check_routes_came(turn: _Turn, server: ServerStatus) -> None:
    """Raise RequestRejected if routes were asked for and tokens came without them."""
    asked = turn.request.return_routed_experts and turn.result.output_ids
    if asked and turn.result.routed_experts is None:
        raise RequestRejected(
            f"{server.url} returned no routed experts for request {turn.request.request_id}: "
            "does it run with --enable-return-routed-experts?"
        )


def _end(turn: _Turn, reason: str, server: ServerStatus) -> None:
    """Set the turn's finish reason. Raises ServerFailed if it has no token and was not aborted."""
    turn.result.finish_reason = FINISH_REASONS[reason]
    if not turn.result.output_ids and turn.result.finish_reason is not FinishReason.ABORT:
        raise ServerFailed(f"{server.url}: the answer has no token and ended by {reason!r}")


def _extend_versions(spans: list[WeightVersionSpan], tokens: int, version: int) -> None:
    """Add so many tokens of weights ``version`` to spans that follow one another."""
    if tokens == 0:
        return
    if spans and spans[-1].version == version:
        last = spans.pop()
        spans.append(WeightVersionSpan(last.start, last.end + tokens, version))
    else:
        start = spans[-1].end if spans else 0
        spans.append(WeightVersionSpan(start, start + tokens, version))
