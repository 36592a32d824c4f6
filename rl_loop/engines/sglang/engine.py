"""RolloutEngine over many SGLang servers: routing, continuation after faults, exact tokens, log-probs and versions.

A turn is streamed. Whatever ends the stream early, its tokens so far are kept: after an ``abort`` they are the answer,
and after the death of a server the turn goes on from them on another one."""

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

from rl_loop.data.trajectory import FinishReason, WeightVersionSpan
from rl_loop.engines.protocol import (
    GenerateRequest,
    GenerateResult,
    check_routes,
    fault_in_ids,
    fault_in_log_probs,
)
from rl_loop.engines.sglang.client import RequestRejected, ServerFailed, SglangClient
from rl_loop.engines.sglang.server import ServerState, ServerStatus
from rl_loop.infrastructure import EngineFault, describe

FINISH_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}
STREAM_INTERVAL = 32  # tokens per chunk: what a death can cost a turn
MAX_FAULTS = 20  # of one request; more are not the servers' bad luck
MAX_PAUSE = 1.0  # seconds between two faults of one request; the pause doubles with each
REMEMBERED_EPISODES = 100_000


@dataclass(eq=False)
class _Turn:
    """A request on its way, and what it has so far."""

    request: GenerateRequest
    result: GenerateResult = field(default_factory=lambda: GenerateResult([], [], FinishReason.ABORT))
    aborted: bool = False
    limit: asyncio.Timeout = field(default_factory=lambda: asyncio.timeout(None))
    failed: Counter[str] = field(default_factory=Counter)  # faults of servers, by address
    client: SglangClient | None = None
    rid: str = ""

    def body(self) -> dict[str, object]:
        sampling, done = self.request.sampling, self.result.output_ids
        self.rid = f"{self.request.request_id}#{uuid.uuid4().hex[:12]}"
        params = {
            "max_new_tokens": sampling.max_new_tokens - len(done), "temperature": sampling.temperature,
            "top_p": sampling.top_p, "stop_token_ids": list(sampling.stop_token_ids), "sampling_seed": sampling.seed,
            "stream_interval": STREAM_INTERVAL,
        }  # fmt: skip
        return {
            "rid": self.rid, "input_ids": self.request.input_ids + done, "sampling_params": params,
            "return_logprob": True, "return_routed_experts": self.request.return_routed_experts, "stream": True,
        }  # fmt: skip


class SglangEngine:
    """``servers`` tells the state of all servers; it is asked again when a second has passed or a server failed.

    ``num_layers``, ``top_k``, ``num_experts`` say how routed experts are to be read; token ids are below
    ``vocab_size``. Servers are not believed: an answer that cannot be one is a fault, and the turn goes on elsewhere.
    A server that does not hold policy weights ``oldest_version`` or later is not used, and an answer that was made with
    other weights is thrown away."""

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
        self._servers = servers
        self._routes_shape = (-1, num_layers, top_k)
        self._num_experts = num_experts
        self._vocab_size = vocab_size
        self._wait_seconds, self._abort_seconds = wait_seconds, abort_seconds
        self.oldest_version = 0
        self._known: list[ServerStatus] = []
        self._asked = -math.inf
        self._asking = asyncio.Lock()
        self._clients: dict[str, SglangClient] = {}
        self._load: Counter[str] = Counter()
        self._homes: OrderedDict[str, str] = OrderedDict()  # episode -> server that has its prefix cached
        self._turns: dict[str, _Turn] = {}

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Sample one continuation. Raises ValueError for a request that no server takes, EngineFault naming the last
        fault after ``MAX_FAULTS`` of them, and RuntimeError if no server held the policy for ``wait_seconds``."""
        if request.request_id in self._turns:
            raise ValueError(f"request {request.request_id} is already running: request ids must be unique")
        turn = self._turns[request.request_id] = _Turn(request)
        try:
            async with turn.limit:
                await self._sample(turn)
        except TimeoutError:  # only an abort sets a limit
            if request.return_routed_experts:  # they come with the last token, which will not come
                return GenerateResult([], [], FinishReason.ABORT)
        finally:
            del self._turns[request.request_id]
        return turn.result

    async def _sample(self, turn: _Turn) -> None:
        while True:
            server = await self._route(turn.request.episode, turn.failed)
            if turn.aborted:
                return
            self._load[server.url] += 1
            try:
                await self._stream(turn, server)
                if turn.request.return_routed_experts and turn.result.output_ids and turn.result.routed_experts is None:
                    where = f"{server.url} returned no routed experts for request {turn.request.request_id}"
                    raise RequestRejected(f"{where}: does it run with --enable-return-routed-experts?")
                return
            except ServerFailed as failure:
                turn.failed[server.url] += 1
                faults = turn.failed.total()
                self._asked = -math.inf
                if faults == MAX_FAULTS:
                    what = f"met {faults} faults, the last: {failure}"
                    raise EngineFault(turn.request.request_id, what) from failure
                await asyncio.sleep(min(MAX_PAUSE, 0.01 * 2**faults))
            finally:
                turn.client = None
                self._load[server.url] -= 1

    async def _route(self, episode: str, failed: Counter[str]) -> ServerStatus:
        """The episode's own server unless it failed more than others, else the one that has least to do."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._wait_seconds
        while True:
            await self._ask()
            fit = {s.url: s for s in self._known if s.state is ServerState.SYNCED and self._is_fresh(s.version)}
            home = self._homes.get(episode)
            if fit:
                if home not in fit or failed[home] > min(failed[url] for url in fit):
                    home = min(fit, key=lambda url: (failed[url], self._load[url]))
                self._homes[episode] = home
                self._homes.move_to_end(episode)
                if len(self._homes) > REMEMBERED_EPISODES:
                    self._homes.popitem(last=False)
                return fit[home]
            if loop.time() > deadline:
                states = "; ".join(f"{s.url or 'a server'} is {s.state} {s.fault}" for s in self._known)
                wanted = f"policy weights {self.oldest_version} or later"
                raise RuntimeError(f"no SGLang server held {wanted} for {self._wait_seconds:.0f} seconds: {states}")
            await asyncio.sleep(0.1)

    async def _ask(self) -> None:
        async with self._asking:
            now = asyncio.get_running_loop().time()
            if now > self._asked + 1:
                self._asked = now
                self._known = await self._servers()

    def _is_fresh(self, version: int | None) -> bool:
        return version is not None and version >= self.oldest_version

    def _client(self, url: str) -> SglangClient:
        return self._clients.setdefault(url, SglangClient(url))

    async def _stream(self, turn: _Turn, server: ServerStatus) -> None:
        """Let ``server`` go on with the turn to its end. Raises ServerFailed; what came before is kept."""
        result = turn.result
        begin = len(result.output_ids)
        turn.client = self._client(server.url)
        async with aclosing(turn.client.generate(turn.body())) as chunks:  # what is left early must end at the server
            async for chunk in chunks:
                # a server does not say when it began; with the first tokens at the latest
                if turn.request.on_begin is not None:
                    turn.request.on_begin()
                room = turn.request.sampling.max_new_tokens - len(result.output_ids)
                try:
                    tokens, version = self._checked(chunk, len(result.output_ids) - begin, room, server)
                except (LookupError, TypeError, ValueError, AttributeError) as error:
                    raise ServerFailed(f"{server.url}: a chunk cannot be read: {describe(error)}") from error
                meta = chunk["meta_info"]
                finish = meta.get("finish_reason")
                if finish is not None and finish["type"] == "abort" and (finish.get("status_code") or 0) >= 500:
                    raise ServerFailed(f"{server.url}: {finish.get('message')}")
                if finish is not None and turn.request.return_routed_experts:
                    rows = len(turn.request.input_ids) + len(result.output_ids) + len(tokens) - 1
                    result.routed_experts = self._routes(meta, rows) if rows and "routed_experts" in meta else None
                result.output_ids += [token for _, token in tokens]
                result.output_log_probs += [log_prob for log_prob, _ in tokens]
                _extend(result.weight_versions, len(tokens), version)
                if not begin:
                    result.cached_tokens = meta.get("cached_tokens", result.cached_tokens)
                if finish is not None:
                    result.finish_reason = FINISH_REASONS[finish["type"]]
                    if not result.output_ids and result.finish_reason is not FinishReason.ABORT:
                        raise ServerFailed(f"{server.url}: the answer has no token and ended by {finish['type']!r}")
                    return
        raise ServerFailed(f"{server.url}: the answer has no finish reason")

    def _checked(
        self, chunk: dict[str, Any], have: int, room: int, server: ServerStatus
    ) -> tuple[list[tuple[float, int]], int]:
        """(log-prob, token) of a chunk and its weight version. ``have``: tokens of this answer so far; ``room``: those
        that may still come. Raises ServerFailed for an answer that cannot be one, or what reading nonsense raises."""
        meta = chunk["meta_info"]
        version = str(meta.get("weight_version"))
        if not version.isdigit() or not self._is_fresh(int(version)):
            wanted = f"the policy is {self.oldest_version} or later"
            raise ServerFailed(f"{server.url} answered with weights {version!r}, {wanted}")
        ids, total = chunk["output_ids"], meta["completion_tokens"]
        if total == have:  # a waiting request that is aborted repeats its last token
            return [], int(version)
        finish = meta.get("finish_reason")
        if finish is not None and finish["type"] not in FINISH_REASONS:
            raise ServerFailed(f"{server.url}: the answer ended by {finish['type']!r}, which is no reason")
        tokens = [(entry[0], entry[1]) for entry in meta["output_token_logprobs"]]
        if have + len(ids) != total or [token for _, token in tokens] != ids:
            given = f"{len(ids)} tokens and {len(tokens)} log-probs after {have} of {total}"
            advice = "does it run with --incremental-streaming-output?"
            raise ServerFailed(f"{server.url}: {given} do not fit: {advice}")
        if len(tokens) > room:
            raise ServerFailed(f"{server.url}: {len(tokens)} tokens came back, {room} were asked for")
        fault = fault_in_ids(ids, self._vocab_size) if ids else None
        fault = fault or (fault_in_log_probs([log_prob for log_prob, _ in tokens]) if tokens else None)
        if fault is not None:
            raise ServerFailed(f"{server.url}, weights {version}: {fault}")
        return [(float(log_prob), int(token)) for log_prob, token in tokens], int(version)

    def _routes(self, meta: dict[str, str], tokens: int) -> np.ndarray:
        """int16 [tokens, layers, top_k]. Raises RuntimeError if there are routes that no router chose."""
        try:
            flat = np.frombuffer(base64.b64decode(meta["routed_experts"]), dtype=np.int32)
            routes = flat.reshape(self._routes_shape).astype(np.int16)
        except (TypeError, ValueError) as error:
            raise ServerFailed(f"routed experts cannot be read: {describe(error)}") from error
        if len(routes) != tokens:
            raise ServerFailed(f"routed experts of {len(routes)} tokens came back, expected {tokens}")
        return check_routes(routes, self._num_experts)

    async def score(self, input_ids: list[int], temperature: float = 1.0) -> list[float]:
        """From any server that holds the policy."""
        server = await self._route("", Counter())
        return await score_on(self._client(server.url), input_ids, temperature)

    async def abort(self, request_id: str | None = None) -> None:
        """A turn ends ``abort_seconds`` later at the latest, whatever its server does about it."""
        now, asked = asyncio.get_running_loop().time(), []
        for name, turn in self._turns.items():
            if request_id in (None, name) and not turn.aborted:
                turn.aborted = True
                turn.limit.reschedule(now + (self._abort_seconds if turn.client else 0))
                if turn.client:
                    body = {"rid": turn.rid, "abort_all": False}
                    asked.append(turn.client.call("/abort_request", body, seconds=self._abort_seconds))
        await asyncio.gather(*asked, return_exceptions=True)

    async def sync_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """The servers take their weights from the trainer (``weight_sender``); now older answers are refused."""
        self.oldest_version = version
        self._asked = -math.inf

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()


async def score_on(client: SglangClient, input_ids: list[int], temperature: float = 1.0) -> list[float]:
    """log p(input_ids[i] | input_ids[:i]) for i >= 1, past the prefix cache. Raises ServerFailed, and ValueError for
    another temperature than 1: SGLang knows no other one for prompts."""
    if temperature != 1:
        raise ValueError(f"SGLang scores at temperature 1 only, not {temperature}")
    if len(input_ids) < 2:
        return []
    body: dict[str, Any] = {"input_ids": input_ids, "sampling_params": {"max_new_tokens": 0, "temperature": 1.0}}
    body |= {"return_logprob": True, "logprob_start_len": 0}
    entries = (await client.call("/generate", body))["meta_info"]["input_token_logprobs"]
    if [entry[1] for entry in entries] != input_ids:
        raise ServerFailed(f"{client.url}: the scored tokens are not those that were sent")
    return [float(entry[0]) for entry in entries[1:]]


def _extend(spans: list[WeightVersionSpan], tokens: int, version: int) -> None:
    end = spans[-1].end if spans else 0
    start = spans.pop().start if spans and spans[-1].version == version else end
    if end + tokens > start:
        spans.append(WeightVersionSpan(start, end + tokens, version))
