"""The HTTP server: sessions by API key, three dialects of OpenAI's API, and rewards.

The server runs on the event loop of its caller, next to the engine.
"""

import logging
import secrets
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from aiohttp import web

from rl_loop.chat.codec import ChatCodec
from rl_loop.engines.protocol import ModelShape, RolloutEngine, constrains_tokens
from rl_loop.gateway.body import MAX_BODY_BYTES, SHORT_BODY_BYTES, parse_json, read_body
from rl_loop.gateway.chat import ChatCall
from rl_loop.gateway.completions import CompletionCall
from rl_loop.gateway.connections import OpenConnections, server_options
from rl_loop.gateway.constraint import prepare_constraints
from rl_loop.gateway.errors import ApiError, ErrorCode
from rl_loop.gateway.jobs import ReadJob, RequestWorkers
from rl_loop.gateway.node import TurnNode
from rl_loop.gateway.responses import ResponsesCall
from rl_loop.gateway.reward import read_reward
from rl_loop.gateway.send import (
    DialectCall,
    EventStream,
    StreamedTurns,
    count_turns,
    send_whole,
)
from rl_loop.gateway.session import ConversationSession, SessionSettings
from rl_loop.infrastructure import describe

LOOPBACK = "127.0.0.1"
MAX_IN_FLIGHT = 1024
"""Maximum concurrent requests of one key."""
CLOSING_STATUSES = (401, 408, 413, 415, 429)
"""Status codes after which a connection is closed, because the body is not read."""
MAX_BODIES_BYTES = 32 * MAX_BODY_BYTES
"""Maximum bytes of one key's concurrent request bodies."""
STOP_SECONDS = 5.0
"""Time in seconds for requests to end when the server stops."""
RETRY_HEADER = "x-stainless-retry-count"
"""Header with an OpenAI client's number of earlier attempts."""

SESSION = web.RequestKey("session", ConversationSession)
"""Session of a request with a valid key."""
BODY_BYTES = web.RequestKey("body_bytes", int)
"""Received bytes of a request's body."""

logger = logging.getLogger(__name__)


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
        """Create a server that does not listen yet.

        Args:
            engine: engine of the policy.
            codec: chat format and vocabulary of the policy.
            shape: shape of the model, with which the engine's results are checked.
            settings: address, name and settings of sessions.
        """
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

    def find_session(self, request: web.Request) -> ConversationSession:
        """Return the session whose key a request has. Raises ApiError."""
        kind, _, key = request.headers.get("Authorization", "").partition(" ")
        session = self._sessions.get(key.strip())
        if kind.lower() != "bearer" or session is None:
            raise ApiError(401, "invalid_api_key", "Incorrect API key provided")
        # Counted before the limit is checked, because ``_handle`` subtracts every counted request.
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
        if constrains_tokens(self._engine):
            prepare_constraints(self._codec)
        # Clients append the path to ``base_url``, which ends with /v1.
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._handle])
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._completions)
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
    async def _handle(
        self,
        request: web.Request,
        handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    ) -> web.StreamResponse:
        """Call the handler of a request. Turn every exception into an error of OpenAI's API."""
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

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._respond(request, CompletionCall)

    async def _responses(self, request: web.Request) -> web.StreamResponse:
        return await self._respond(request, ResponsesCall)

    async def _respond(
        self, request: web.Request, kind: Callable[[Any, str], DialectCall[Any]]
    ) -> web.StreamResponse:
        """Sample the turns of a request and send them.

        Args:
            request: the request.
            kind: dialect of the request.
        """
        session = self.find_session(request)
        call = await self._read_call(request, session, kind)

        response_id = f"{call.id_prefix}{secrets.token_hex(16)}"
        # OpenAI's clients count their attempts from 0.
        is_retry = request.headers.get(RETRY_HEADER, "0") != "0"
        stream = EventStream(request, call)
        streamed = StreamedTurns(stream, call, self._codec, session, response_id)
        try:
            with _count_choices(session, count_turns(call)):
                if call.stream:
                    nodes = await streamed.sample(is_retry=is_retry)
                else:
                    nodes = await session.respond_choices(
                        call.requests, response_id, call.choices, is_retry=is_retry
                    )
            with _delivering(nodes):
                if call.stream:
                    return await streamed.send_rest(nodes)
                return await send_whole(request, call, nodes)
        except ConnectionResetError:
            raise
        except Exception as error:
            # Before the first event, ``_handle`` can still send an error with a status code.
            if not stream.has_begun:
                raise
            return await streamed.send_error(_api_error(request, error))

    async def _read_call(
        self,
        request: web.Request,
        session: ConversationSession,
        kind: Callable[[Any, str], DialectCall[Any]],
    ) -> DialectCall[Any]:
        """Read a request. Raises ApiError."""
        body = await read_body(request, partial(_count_body, request, session))
        job = ReadJob(body, kind, self._settings.model)
        return await session.run(job, is_short=len(body) <= SHORT_BODY_BYTES)

    async def _rewards(self, request: web.Request) -> web.Response:
        session = self.find_session(request)
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
        self.find_session(request)
        return web.json_response({"object": "list", "data": [self._describe_model()]})

    async def _model(self, request: web.Request) -> web.Response:
        """Handle ``GET /v1/models/NAME``."""
        self.find_session(request)
        name = request.match_info["name"]
        if name != self._settings.model:
            known = self._settings.model
            message = f"The model {name!r} does not exist. Use {known!r}"
            raise ApiError(404, "model_not_found", message)
        return web.json_response(self._describe_model())

    def _describe_model(self) -> dict[str, Any]:
        """Return the description of the served model."""
        name = self._settings.model
        return {"id": name, "object": "model", "created": 0, "owned_by": "megatron-gptoss"}


def _check_in_flight(session: ConversationSession) -> None:
    """Raise ApiError if a key has too many requests in flight."""
    if session.in_flight > MAX_IN_FLIGHT:
        message = f"this key has more than {MAX_IN_FLIGHT} requests in flight"
        raise ApiError(429, "too_many_requests", message)


@contextmanager
def _count_choices(session: ConversationSession, choices: int) -> Iterator[None]:
    """Count each further choice of a request as a request in flight. Raises ApiError."""
    session.in_flight += choices - 1
    try:
        _check_in_flight(session)
        yield
    finally:
        session.in_flight -= choices - 1


@contextmanager
def _delivering(nodes: Sequence[TurnNode]) -> Iterator[None]:
    """Set ``delivered`` of turns that are sent to a client in the context."""
    try:
        yield
        for node in nodes:
            node.delivered = True
    finally:
        # After an exception, ``delivered`` is still None: the connection was lost. A repeated
        # request of the client gets the stored answer.
        for node in nodes:
            if node.delivered is None:
                node.delivered = False


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


def _error_response(error: ApiError) -> web.Response:
    """Return the HTTP response for an error."""
    # OpenAI's clients repeat a request after 408, 409, 429 and from 500 on, unless this header
    # forbids it. The gateway has repeated requests to the engine already, so a repetition by the
    # client would only take time.
    headers = {"x-should-retry": "false"}
    response = web.json_response(error.body(), status=error.status, headers=headers)
    if error.status in CLOSING_STATUSES:
        response.force_close()
    return response
