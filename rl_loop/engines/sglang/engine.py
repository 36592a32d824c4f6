"""RolloutEngine that uses several SGLang servers: routing, faults and aborts.

A turn is streamed. If the stream ends early, the received tokens are kept. After an ``abort`` they
are the result. After the death of a server, the turn continues from them on another server. The
module ``turn`` builds request bodies and reads responses.
"""

import asyncio
import math
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import aclosing

from megatron_gptoss.config import ModelConfig
from rl_loop.data.trajectory import FinishReason
from rl_loop.engines.protocol import GenerateRequest, GenerateResult
from rl_loop.engines.sglang.client import ServerError, SglangClient
from rl_loop.engines.sglang.scored_tokens import parse_log_probs
from rl_loop.engines.sglang.server import ServerState, ServerStatus
from rl_loop.engines.sglang.turn import (
    ResponseReader,
    StreamedTurn,
    check_routes_present,
    end_turn,
)
from rl_loop.infrastructure import EngineError

MAX_FAULTS = 20
"""Number of faults after which a request fails: the servers are unlikely to cause more."""
MAX_RETRY_DELAY = 1.0
"""Longest delay of a retry in seconds. The delay doubles with each fault of a request."""
MAX_TRACKED_PREFIXES = 100_000
"""Number of episodes or tasks whose server is remembered. The oldest are dropped."""
REFRESH_SECONDS = 1.0
"""Seconds after which the states of the servers are requested again."""


class SglangEngine:
    """Client that samples on any server that holds the policy.

    Servers are not trusted: an impossible response is a fault, and the turn continues on another
    server. Servers with weights older than ``min_version`` are not used, and tokens that older
    weights sampled are rejected.
    """

    def __init__(
        self,
        servers: Callable[[], Awaitable[list[ServerStatus]]],
        model: ModelConfig,
        *,
        wait_seconds: float = 1800.0,
        abort_seconds: float = 5.0,
        api_key: str | None = None,
        keep_groups: bool = False,
    ) -> None:
        """Prepare for generation without connecting.

        Args:
            servers: returns the state of all servers. Called again after 1 s and after a fault.
            model: configuration that is needed to check responses.
            wait_seconds: longest time that a request waits for a server that holds the policy.
            abort_seconds: longest time that a turn runs after its abort.
            api_key: key of the servers, if any.
            keep_groups: whether all episodes of a task use the same server. A prompt in its cache
                has the same experts in all of them.
        """
        self.min_version = 0
        self._reader = ResponseReader(model)
        self._wait_seconds = wait_seconds
        self._abort_seconds = abort_seconds
        self._api_key = api_key
        self._keep_groups = keep_groups

        # Latest states of the servers, and time of that request on the event loop's clock.
        self._servers = servers
        self._statuses: list[ServerStatus] = []
        self._refreshed_at = -math.inf
        self._refreshing = asyncio.Lock()

        # By the server's address. The load is the number of this worker's requests in flight.
        self._clients: dict[str, SglangClient] = {}
        self._load: Counter[str] = Counter()

        self._homes: OrderedDict[str, str] = OrderedDict()
        """Address of the server that has a prefix cached, by episode or task."""
        self._turns: dict[str, StreamedTurn] = {}

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Sample one continuation.

        Raises:
            ValueError: if the request id is not unique, or servers reject the request.
            EngineError: after ``MAX_FAULTS`` faults. The message names the last.
            RuntimeError: if no server held the policy for ``wait_seconds``.
        """
        if request.request_id in self._turns:
            name = f"request {request.request_id}"
            raise ValueError(f"{name} is already running. Request ids must be unique")

        turn = StreamedTurn(request)
        self._turns[request.request_id] = turn
        try:
            async with turn.limit:
                await self._sample(turn)
        except TimeoutError:  # only an abort sets a limit
            # Expert indices come with the last token. Without them the tokens are useless.
            if request.return_routed_experts:
                return GenerateResult([], [], FinishReason.ABORT)
        finally:
            del self._turns[request.request_id]
        return turn.result

    async def _sample(self, turn: StreamedTurn) -> None:
        """Let servers work on a turn, in sequence, until one ends it."""
        while True:
            request = turn.request
            prefix = request.group if self._keep_groups else request.episode
            server = await self._route(prefix, turn.failures)
            # Aborted between two servers: the tokens so far are the result.
            if turn.aborted:
                return

            self._load[server.url] += 1
            try:
                await self._stream(turn, server)
                check_routes_present(turn, server.url)
                return
            except ServerError as failure:
                # The tokens so far are kept. Request the states again: the server may be dead.
                turn.failures[server.url] += 1
                faults = turn.failures.total()
                self._refreshed_at = -math.inf
                if faults == MAX_FAULTS:
                    what = f"had {faults} faults, the last: {failure}"
                    raise EngineError(turn.request.request_id, what) from failure
                await asyncio.sleep(min(MAX_RETRY_DELAY, 0.01 * 2**faults))
            finally:
                turn.client = None
                self._load[server.url] -= 1

    async def _route(self, prefix: str, failures: Counter[str]) -> ServerStatus:
        """Wait for a server that holds the policy and return the best one.

        Args:
            prefix: episode or task of the request.
            failures: number of faults that the turn met, by server address.

        Raises:
            RuntimeError: if no server held the policy for ``wait_seconds``.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._wait_seconds
        while True:
            await self._refresh()
            if (server := self._choose_server(prefix, failures)) is not None:
                return server

            if loop.time() > deadline:
                states = "; ".join(
                    f"{status.url or 'a server'} is {status.state} {status.fault}"
                    for status in self._statuses
                )
                raise RuntimeError(
                    f"no SGLang server had policy weights {self.min_version} or later for "
                    f"{self._wait_seconds:.0f} seconds: {states}"
                )
            await asyncio.sleep(0.1)

    def _choose_server(self, prefix: str, failures: Counter[str]) -> ServerStatus | None:
        """Return the server of a prefix, else the least loaded one. None if none is ready."""
        ready = {
            status.url: status
            for status in self._statuses
            if status.state is ServerState.SYNCED and self._is_fresh(status.version)
        }
        if not ready:
            return None

        # A prefix stays where it is cached, unless another server failed less often.
        home = self._homes.get(prefix)
        fewest_failures = min(failures[url] for url in ready)
        if home not in ready or failures[home] > fewest_failures:
            home = min(ready, key=lambda url: (failures[url], self._load[url]))

        self._homes[prefix] = home
        self._homes.move_to_end(prefix)
        if len(self._homes) > MAX_TRACKED_PREFIXES:
            self._homes.popitem(last=False)
        return ready[home]

    async def _refresh(self) -> None:
        """Request the servers' states if the known ones are older than ``REFRESH_SECONDS``."""
        # Only the first of several concurrent requests asks. The others wait for its result.
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

    async def _stream(self, turn: StreamedTurn, server: ServerStatus) -> None:
        """Let ``server`` continue the turn to its end.

        Raises:
            ServerError: if the server fails. The tokens before are kept.
        """
        turn.client = self._client(server.url)
        start = len(turn.result.output_ids)

        # Close a stream that is left early, because the server would continue to sample.
        async with aclosing(turn.client.generate(turn.next_body())) as chunks:
            async for content in chunks:
                # A server does not report that it has begun. The first tokens show it.
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
                    # In later attempts the cache also contains tokens that the turn has sampled.
                    cached_tokens = chunk.meta.get("cached_tokens", turn.result.cached_tokens)
                    turn.result.cached_tokens = cached_tokens
                if chunk.finish is not None:
                    end_turn(turn, chunk.finish["type"], server.url)
                    return
        raise ServerError(f"{server.url}: the response has no finish reason")

    async def score(self, input_ids: list[int], temperature: float = 1.0) -> list[float]:
        """Score a text on any server that holds the policy (see ``score_on``)."""
        # A scored text belongs to no episode.
        server = await self._route(prefix="", failures=Counter())
        return await score_on(self._client(server.url), input_ids, temperature)

    async def abort(self, request_id: str | None = None) -> None:
        """Abort one request, or all if ``request_id`` is None.

        The turn ends after at most ``abort_seconds``, even if its server does not respond.
        """
        now = asyncio.get_running_loop().time()
        calls = []
        for name, turn in self._turns.items():
            if request_id not in (None, name) or turn.aborted:
                continue

            # The server may still send tokens. Between two servers there is no reason to wait.
            turn.aborted = True
            if turn.client is None:
                turn.limit.reschedule(now)
                continue
            turn.limit.reschedule(now + self._abort_seconds)
            body = {"rid": turn.server_request_id, "abort_all": False}
            calls.append(turn.client.call("/abort_request", body, seconds=self._abort_seconds))

        # A failed call needs no answer: the time limit ends the turn.
        await asyncio.gather(*calls, return_exceptions=True)

    def set_min_version(self, version: int) -> None:
        """Use only tokens that weights ``version`` or later have sampled.

        The trainer sends weights to the servers (``weight_endpoints``), not to this client.
        """
        self.min_version = version
        # The known states are from before the sync.
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
    """Return log p(input_ids[i] | input_ids[:i]) for i >= 1, computed without the prefix cache.

    Args:
        client: client of the server.
        input_ids: text.
        temperature: must be 1, because SGLang has no temperature for prompts.

    Raises:
        ServerError: if the server fails or scored different tokens.
        RequestRejectedError: if the server rejects the request.
        ValueError: if ``temperature`` is not 1.
    """
    if temperature != 1:
        raise ValueError(f"SGLang scores at temperature 1 only (got {temperature})")
    if len(input_ids) < 2:
        return []

    body = {
        "input_ids": input_ids,
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        # Log-probs from the first token on. This also disables the prefix cache.
        "logprob_start_len": 0,
    }
    response = await client.call("/generate", body)
    return parse_log_probs(response["meta_info"]["input_token_logprobs"], input_ids, client.url)
