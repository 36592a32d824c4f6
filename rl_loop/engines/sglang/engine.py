"""RolloutEngine over many SGLang servers: routing, faults and aborts.

A turn is streamed. Whatever ends the stream early, the tokens that came are kept: after an
``abort`` they are the answer, and after the death of a server the turn goes on from them on
another one. What a turn asks of a server and how the answer is read is in ``turn``.
"""

import asyncio
import math
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import aclosing

from megatron_gptoss.config import ModelConfig
from rl_loop.data.trajectory import FinishReason
from rl_loop.engines.protocol import GenerateRequest, GenerateResult
from rl_loop.engines.sglang.client import ServerFailed, SglangClient
from rl_loop.engines.sglang.scored_tokens import log_probs_of
from rl_loop.engines.sglang.server import ServerState, ServerStatus
from rl_loop.engines.sglang.turn import AnswerReader, Turn, check_routes_came, end_turn
from rl_loop.infrastructure import EngineFault

MAX_FAULTS = 20
"""Faults of one request; more are not the servers' bad luck."""
MAX_PAUSE = 1.0
"""Longest pause in seconds between two faults of one request; the pause doubles with each."""
REMEMBERED_EPISODES = 100_000
"""Episodes whose server is remembered, the latest ones."""
REFRESH_SECONDS = 1.0
"""How long the states of the servers are taken to hold."""


class SglangEngine:
    """Samples on whichever server holds the policy.

    Servers are not trusted: an answer that cannot be one is a fault, and the turn goes on
    elsewhere. A server that does not hold policy weights ``min_version`` or later is not used,
    and an answer that was made with other weights is thrown away.
    """

    def __init__(
        self,
        servers: Callable[[], Awaitable[list[ServerStatus]]],
        model: ModelConfig,
        *,
        wait_seconds: float = 1800.0,
        abort_seconds: float = 5.0,
        api_key: str | None = None,
    ) -> None:
        """Prepare for generation; nothing is connected yet.

        Args:
            servers: returns the state of all servers; asked again after a second and after a fault.
            model: configuration that answers are read with.
            wait_seconds: longest that a request waits for a server that holds the policy.
            abort_seconds: longest that a turn lives on after it was aborted.
            api_key: key of the servers, if they have one.
        """
        self.min_version = 0
        self._reader = AnswerReader(model)
        self._wait_seconds = wait_seconds
        self._abort_seconds = abort_seconds
        self._api_key = api_key

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
        self._turns: dict[str, Turn] = {}

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

        turn = Turn(request)
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

    async def _sample(self, turn: Turn) -> None:
        """Let one server after another work on a turn, until one ends it."""
        while True:
            server = await self._route(turn.request.episode, turn.failures)
            # Aborted between two servers: what has come so far is the answer.
            if turn.aborted:
                return

            self._load[server.url] += 1
            try:
                await self._stream(turn, server)
                check_routes_came(turn, server.url)
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
                    f"no SGLang server held policy weights {self.min_version} or later "
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
        return version is not None and version >= self.min_version

    def _client(self, url: str) -> SglangClient:
        if url not in self._clients:
            self._clients[url] = SglangClient(url, api_key=self._api_key)
        return self._clients[url]

    async def _stream(self, turn: Turn, server: ServerStatus) -> None:
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

                chunk = self._reader.read(
                    content,
                    turn,
                    start=start,
                    url=server.url,
                    min_version=self.min_version,
                )
                self._reader.append(turn, chunk, server.url)
                if start == 0:
                    # Later attempts also find what the turn itself has sampled.
                    cached_tokens = chunk.meta.get("cached_tokens", turn.result.cached_tokens)
                    turn.result.cached_tokens = cached_tokens
                if chunk.finish is not None:
                    end_turn(turn, chunk.finish["type"], server.url)
                    return
        raise ServerFailed(f"{server.url}: the answer has no finish reason")

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

    def set_min_version(self, version: int) -> None:
        """Use only answers that were made with weights ``version`` or later.

        The servers get their weights from the trainer (``weight_endpoints``), not from here.
        """
        self.min_version = version
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
