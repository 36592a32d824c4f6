"""The HTTP server: sessions by API key, two dialects of OpenAI's API, and rewards.

The server runs on the event loop of its caller, next to the engine.
"""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from aiohttp import web

from rl_loop.chat.codec import ChatCodec
from rl_loop.engines.protocol import ModelShape, RolloutEngine
from rl_loop.gateway.body import MAX_BODY_BYTES, SHORT_BODY_BYTES, parse_json, read_body
from rl_loop.gateway.chat import ChatCall
from rl_loop.gateway.connections import OpenConnections, server_options
from rl_loop.gateway.errors import ApiError, ErrorCode
from rl_loop.gateway.jobs import ReadJob, RequestWorkers
from rl_loop.gateway.node import TokenUsage, TurnNode, total_usage
from rl_loop.gateway.request import TurnRequest
from rl_loop.gateway.responses import ResponsesCall
from rl_loop.gateway.reward import read_reward
from rl_loop.gateway.session import ConversationSession, SessionSettings
from rl_loop.infrastructure import describe

LOOPBACK = "127.0.0.1"
MAX_IN_FLIGHT = 1024
"""Maximum concurrent requests of one key."""
CLOSING_STATUSES = (401, 408, 413, 415, 429)
"""Status codes after which a connection is closed, because the body is not read."""
MAX_BODIES_BYTES = 32 * MAX_BODY_BYTES
"""Maximum bytes of one key's concurrent request bodies."""
LONG_ANSWER_BYTES = 65_536
"""Bytes of a stream that are sent at a time. A longer event is sent at once."""
STOP_SECONDS = 5.0
"""Time in seconds for requests to end when the server stops."""
RETRY_HEADER = "x-stainless-retry-count"
"""Header with an OpenAI client's number of earlier attempts."""

SESSION = web.RequestKey("session", ConversationSession)
"""Session of a request with a valid key."""
BODY_BYTES = web.RequestKey("body_bytes", int)
"""Received bytes of a request's body."""

logger = logging.getLogger(__name__)


class DialectCall(Protocol):
    """One request of a dialect."""

    id_prefix: str
    ends_with_done: bool
    stream: bool
    request: TurnRequest
    choices: int
    """Number of turns to sample."""

    def answer(self, nodes: Sequence[TurnNode], usage: TokenUsage) -> dict[str, Any]: ...

    def events(self, nodes: Sequence[TurnNode], usage: TokenUsage) -> Iterator[dict[str, Any]]: ...

    def to_json(self, value: dict[str, Any]) -> bytes:
        """Return an answer or an event as JSON."""
        ...


@dataclass(frozen=True)
class GatewaySettings:
    """Address and name of a gateway, and the settings of its sessions."""

    session: SessionSettings
    model: str = "policy"
    """Name of the policy in answers and in ``/v1/models``."""
    host: str = LOOPBACK
    """Address to listen on. Keys are sent unencrypted, so other addresses than loopback need a
    proxy or a trusted network."""
    port: int = 0
    """Port to listen on. 0 for any free port."""


class Gateway:
    """Serves one policy."""

    def __init__(
        self,
        engine: RolloutEngine,
        codec: ChatCodec,
        shape: ModelShape,
        settings: GatewaySettings,
    ) -> None:
        """Create a server that does not listen yet. ``shape`` checks the engine's results."""
        self._engine = engine
        self._codec = codec
        self._shape = shape
        self._settings = settings
        self._sessions: dict[str, ConversationSession] = {}
        """Sessions by API key."""
        self._connections = OpenConnections()
        self._workers = RequestWorkers(codec)
        self._runner: web.AppRunner | None = None
        self._url = ""

    # ---- sessions

    def open_session(
        self,
        name: str,
        api_key: str | None = None,
        settings: SessionSettings | None = None,
    ) -> ConversationSession:
        """Begin a session. The client needs its ``api_key``.

        Args:
            name: name that is unique among all sessions of the engine.
            api_key: key of the client. None to generate one.
            settings: settings of the session. None for the settings of the gateway.

        Raises:
            ValueError: the key is in use.
        """
        session = ConversationSession(
            name,
            self._engine,
            self._codec,
            self._shape,
            settings or self._settings.session,
            api_key,
            self._workers,
        )
        if session.api_key in self._sessions:
            raise ValueError(f"session {name}: its API key already belongs to another session")
        self._sessions[session.api_key] = session
        return session

    async def close_session(self, session: ConversationSession) -> None:
        """End a session. Its key becomes invalid and its turns in flight are stopped."""
        self._sessions.pop(session.api_key, None)
        await session.close()

    def session_of(self, request: web.Request) -> ConversationSession:
        """Return the session whose key a request has. Raises ApiError."""
        kind, _, key = request.headers.get("Authorization", "").partition(" ")
        session = self._sessions.get(key.strip())
        if kind.lower() != "bearer" or session is None:
            raise ApiError(401, "invalid_api_key", "Incorrect API key provided")
        # Counted before the limit is checked, because ``_answer`` subtracts every counted request.
        if SESSION not in request:
            request[SESSION] = session
            session.in_flight += 1
            self._connections.begin_request(request.protocol)
        _check_in_flight(session)
        return session

    # ---- the server

    @property
    def base_url(self) -> str:
        """The ``base_url`` of clients, such as ``http://127.0.0.1:40123/v1``."""
        return f"{self._url}/v1"

    async def start(self) -> None:
        """Listen. Raises OSError naming the address if that is not possible."""
        # Clients append the path to ``base_url``, which ends with /v1.
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._answer])
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/responses", self._responses)
        app.router.add_post("/v1/rewards", self._rewards)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name:.+}", self._model)

        # A client that leaves cancels its handler, and with it a turn that no other client waits
        # for.
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=STOP_SECONDS,
            **server_options(),
        )
        await self._runner.setup()
        assert self._runner.server is not None
        # The server exists after setup. It must be watched before it accepts connections.
        self._connections.watch(self._runner.server)
        await web.TCPSite(self._runner, self._settings.host, self._settings.port).start()

        # Starting a process blocks, and the event loop may serve an engine already.
        await asyncio.to_thread(self._workers.start)
        # The bound address has the actual port for port 0. IPv6 addresses have two more fields.
        host, port = self._runner.addresses[0][:2]
        # URLs have IPv6 addresses in brackets.
        if ":" in host:
            host = f"[{host}]"
        self._url = f"http://{host}:{port}"

    async def close(self) -> None:
        """End all sessions and stop listening. Calling it again does nothing."""
        # Sessions first: clients that wait get an error instead of a lost connection.
        for session in list(self._sessions.values()):
            await self.close_session(session)
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        await self._workers.close()

    # ---- requests

    @web.middleware
    async def _answer(
        self,
        request: web.Request,
        handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    ) -> web.StreamResponse:
        """Answer a request. Every failure has the format of the API's errors."""
        try:
            return await handler(request)
        except ConnectionResetError:
            # The client left while its answer was sent, so it cannot read an error.
            raise
        except Exception as error:
            return _error_response(_api_error(request, error))

        finally:
            session = request.get(SESSION)
            if session is not None:
                session.in_flight -= 1
                session.body_bytes -= request.get(BODY_BYTES, 0)
                self._connections.end_request(request.protocol)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._respond(request, ChatCall)

    async def _responses(self, request: web.Request) -> web.StreamResponse:
        return await self._respond(request, ResponsesCall)

    async def _respond(
        self, request: web.Request, kind: Callable[[Any, str], DialectCall]
    ) -> web.StreamResponse:
        """Sample the turns of a request and send them.

        A stream begins when the turn is complete. Therefore earlier failures are errors with a
        status, and clients do not notice a weight sync during the turn.

        Args:
            request: the request.
            kind: dialect of the request.
        """
        session = self.session_of(request)
        call = await self._read_call(request, session, kind)

        response_id = f"{call.id_prefix}{secrets.token_hex(16)}"
        # OpenAI's clients count their attempts from 0.
        is_retry = request.headers.get(RETRY_HEADER, "0") != "0"
        with _counted_choices(session, call.choices):
            nodes = await session.respond_choices(
                call.request, response_id, call.choices, is_retry=is_retry
            )

        send = _send_events if call.stream else _send_whole
        try:
            response = await send(request, call, nodes)
            for node in nodes:
                node.delivered = True
            return response
        finally:
            # The connection was lost. A repeated request gets this answer.
            for node in nodes:
                if node.delivered is None:
                    node.delivered = False

    async def _read_call(
        self,
        request: web.Request,
        session: ConversationSession,
        kind: Callable[[Any, str], DialectCall],
    ) -> DialectCall:
        """Read a request. Raises ApiError."""
        body = await read_body(request, partial(_count_body, request, session))
        job = ReadJob(body, kind, self._settings.model)
        return await session.run(job, is_short=len(body) <= SHORT_BODY_BYTES)

    async def _rewards(self, request: web.Request) -> web.Response:
        session = self.session_of(request)
        reward = read_reward(parse_json(await self._short_body(request, session)))
        session.add_reward(reward)
        return web.json_response({"object": "reward", "response_id": reward.response_id})

    async def _short_body(self, request: web.Request, session: ConversationSession) -> bytes:
        """Return the body of a request that is never long. Raises ApiError."""
        body = await read_body(request, partial(_count_body, request, session))
        if len(body) > SHORT_BODY_BYTES:
            raise ApiError(
                413, "invalid_request", f"the body has more than {SHORT_BODY_BYTES} bytes"
            )
        return body

    async def _models(self, request: web.Request) -> web.Response:
        self.session_of(request)
        return web.json_response({"object": "list", "data": [self._describe_model()]})

    async def _model(self, request: web.Request) -> web.Response:
        self.session_of(request)
        name = request.match_info["name"]
        if name != self._settings.model:
            known = self._settings.model
            message = f"The model {name!r} does not exist. Use {known!r}"
            raise ApiError(404, "model_not_found", message)
        return web.json_response(self._describe_model())

    def _describe_model(self) -> dict[str, Any]:
        name = self._settings.model
        return {"id": name, "object": "model", "created": 0, "owned_by": "megatron-gptoss"}


def _check_in_flight(session: ConversationSession) -> None:
    """Raise ApiError if a key has too many requests in flight."""
    if session.in_flight > MAX_IN_FLIGHT:
        message = f"this key has more than {MAX_IN_FLIGHT} requests in flight"
        raise ApiError(429, "too_many_requests", message)


@contextmanager
def _counted_choices(session: ConversationSession, choices: int) -> Iterator[None]:
    """Count each further choice of a request as a request in flight. Raises ApiError."""
    session.in_flight += choices - 1
    try:
        _check_in_flight(session)
        yield
    finally:
        session.in_flight -= choices - 1


def _count_body(request: web.Request, session: ConversationSession, size: int) -> None:
    """Count bytes of a body that have arrived. Raises ApiError if the key has too many."""
    request[BODY_BYTES] = request.get(BODY_BYTES, 0) + size
    session.body_bytes += size
    if session.body_bytes > MAX_BODIES_BYTES:
        megabytes = MAX_BODIES_BYTES // 1024**2
        message = f"the requests in flight of this key have more than {megabytes} MiB"
        raise ApiError(429, "too_many_requests", message)


def _api_error(request: web.Request, error: Exception) -> ApiError:
    """Return the client's error for an exception of a handler. Unknown exceptions are logged."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, web.HTTPException):
        message = f"{request.method} {request.path}: {error.reason}"
        code: ErrorCode = "not_found" if error.status in (404, 405) else "invalid_request"
        return ApiError(error.status, code, message)
    logger.error("%s %s failed", request.method, request.path, exc_info=error)
    return ApiError(500, "internal_error", describe(error))


async def _send_whole(
    request: web.Request, call: DialectCall, nodes: Sequence[TurnNode]
) -> web.StreamResponse:
    """Send turns as one JSON object."""
    body = call.to_json(call.answer(nodes, total_usage(nodes)))
    response = web.Response(body=body, content_type="application/json", charset="utf-8")
    # Sent here, not by aiohttp after the handler, so that the caller notices a lost connection.
    await response.prepare(request)
    await response.write_eof()
    return response


async def _send_events(
    request: web.Request, call: DialectCall, nodes: Sequence[TurnNode]
) -> web.StreamResponse:
    """Send turns as server-sent events."""
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    )
    await response.prepare(request)

    lines: list[bytes] = []
    size = 0
    for event in call.events(nodes, total_usage(nodes)):
        # Events of Responses have a type, chunks of chat completions do not.
        if "type" in event:
            lines.append(f"event: {event['type']}\n".encode())
        lines += [b"data: ", call.to_json(event), b"\n\n"]
        size += len(lines[-2])
        # A long answer is sent in pieces, so that other requests are served between them.
        if size > LONG_ANSWER_BYTES:
            await response.write(b"".join(lines))
            await asyncio.sleep(0)
            lines, size = [], 0
    if call.ends_with_done:
        lines.append(b"data: [DONE]\n\n")

    await response.write(b"".join(lines))
    await response.write_eof()
    return response


def _error_response(error: ApiError) -> web.Response:
    # OpenAI's clients repeat a request after 408, 409, 429 and from 500 on, unless this header
    # forbids it.
    # The request was repeated already. A further repetition by the client would only take time.
    headers = {"x-should-retry": "false"}
    response = web.json_response(error.body(), status=error.status, headers=headers)
    if error.status in CLOSING_STATUSES:
        response.force_close()
    return response
