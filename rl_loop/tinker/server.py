"""HTTP server of the Tinker API. It runs on the event loop of its caller."""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from aiohttp import web

from rl_loop.gateway.body import parse_json, read_body
from rl_loop.gateway.connections import OpenConnections, server_options
from rl_loop.gateway.errors import ApiError
from rl_loop.infrastructure import describe
from rl_loop.tinker.checkpoint_calls import CheckpointCalls
from rl_loop.tinker.downloads import Downloads
from rl_loop.tinker.errors import ClientError, bad_request, error_response
from rl_loop.tinker.fields import read, read_metadata
from rl_loop.tinker.futures import RequestFuture
from rl_loop.tinker.owners import Owners
from rl_loop.tinker.sampling_calls import SamplingCalls
from rl_loop.tinker.state import Session, TinkerState
from rl_loop.tinker.training_calls import TrainingCalls
from rl_loop.tinker.wire import CONTENT_TYPE

PREFIX = "/api/v1/"
"""Beginning of all paths."""
KEY_HEADER = "X-API-Key"
"""Header with the key of a client."""
OWNER = web.RequestKey("owner", str)
"""Key under which a request keeps its owner. Empty for downloads without a key."""
FILES = f"{PREFIX}files/"
"""Beginning of the paths of downloads. Their URLs are signed, and need no key."""
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Maximum bytes of a message. The SDK cuts larger passes."""
MAX_JSON_VALUES = 1_000_000
"""Maximum number of values in a JSON body, which may have a prompt of as many tokens."""
CHUNK_DATUMS = 16_384
"""Datums after which the SDK cuts a pass. One request is packed together."""
POLL_SECONDS = 25.0
"""Time in seconds for which a poll waits. The SDK waits 45 s."""
INLINE_BYTES = 1024 * 1024
"""Size in bytes above which an answer is announced first, if the client wants that."""
STOP_SECONDS = 5.0
"""Time in seconds for requests to end when the server stops."""

logger = logging.getLogger(__name__)


class TinkerServer:
    """Serves one policy to the SDK."""

    def __init__(self, state: TinkerState, owners: Owners, notice: str) -> None:
        """Create a server that does not listen yet.

        Args:
            state: sessions and policy.
            owners: keys of clients.
            notice: message that every client logs.
        """
        self._state = state
        self._owners = owners
        self._notice = notice
        self._training = TrainingCalls(state)
        self._sampling = SamplingCalls(state)
        self._downloads = Downloads(state.store, FILES)
        self._checkpoints = CheckpointCalls(state, self._downloads)
        self._connections = OpenConnections()
        self._runner: web.AppRunner | None = None
        self._task: asyncio.Task[None] | None = None

    # -- the server -------------------------------------------------------------------------------

    async def start(self, host: str, port: int) -> str:
        """Listen, and return the URL. Raises OSError naming the address if that is not possible."""
        self._runner = web.AppRunner(
            self._application(),
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=STOP_SECONDS,
            **server_options(),
        )
        await self._runner.setup()
        assert self._runner.server is not None
        self._connections.watch(self._runner.server)
        await web.TCPSite(self._runner, host, port).start()
        self._task = asyncio.create_task(self._state.scheduler.run())
        # The bound address has the actual port for port 0.
        host, port = self._runner.addresses[0][:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def close(self) -> None:
        """Stop after the running operation."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        if self._runner is not None:
            await self._runner.cleanup()

    def _application(self) -> web.Application:
        """Return the application with all calls."""
        app = web.Application(client_max_size=MAX_MESSAGE_BYTES, middlewares=[self._answer])
        for path, call in self._json_calls().items():
            app.router.add_post(PREFIX + path, _json_handler(call))

        # Their bodies are protobuf, or their answers are.
        app.router.add_post(f"{PREFIX}forward_backward", self._forward_backward)
        app.router.add_post(f"{PREFIX}retrieve_future", self._retrieve)
        app.router.add_post(f"{PREFIX}sessions/{{session}}/finish", self._finish)

        for path, answer in self._queries().items():
            app.router.add_get(PREFIX + path, _query_handler(answer))
        checkpoint = f"{PREFIX}training_runs/{{model}}/checkpoints/{{checkpoint:[^/]+/[^/]+}}"
        app.router.add_delete(checkpoint, self._delete_checkpoint)
        app.router.add_put(f"{checkpoint}/ttl", self._set_lifetime)
        app.router.add_get(f"{checkpoint}/external_weights_urls", self._download_urls)
        app.router.add_get(f"{FILES}{{resource:.+}}", self._download)
        return app

    def _json_calls(self) -> dict[str, Callable[..., Any]]:
        """Return the calls with a JSON body, by path."""
        return {
            "client/config": self._client_config,
            "client/dynamic_config": lambda owner, body: {"sample_cancel_enabled": True},
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "telemetry": lambda owner, body: {"status": "accepted"},
            "create_model": self._promised(self._training.create_model),
            "get_info": self._training.get_info,
            "optim_step": self._promised(self._training.optim_step),
            "save_weights": self._promised(self._training.save_weights),
            "load_weights": self._promised(self._training.load_weights),
            "save_weights_for_sampler": self._promised(self._training.save_weights_for_sampler),
            "save_weights_external": self._promised(self._training.save_weights_external),
            "create_sampling_session": self._sampling.create_session,
            "asample": self._sample,
            "cancel_future": self._cancel,
            "weights_info": self._checkpoints.weights_info,
        }

    def _queries(self) -> dict[str, Callable[[str, web.Request], Any]]:
        """Return the calls without a body, by path. A part in braces is a variable."""
        checkpoints, sampling = self._checkpoints, self._sampling
        run = "training_runs/{name}"
        return {
            "healthz": lambda owner, request: {"status": "ok"},
            "get_server_capabilities": self._capabilities,
            "samplers/{name}": _named(sampling.describe),
            "sessions": lambda owner, request: checkpoints.list_sessions(owner, request.query),
            "sessions/{name}": _named(checkpoints.describe_session),
            "checkpoints": (
                lambda owner, request: checkpoints.list_all_checkpoints(owner, request.query)
            ),
            "training_runs": lambda owner, request: checkpoints.list_runs(owner, request.query),
            run: _named(checkpoints.describe_run),
            f"{run}/checkpoints": _named(checkpoints.list_checkpoints),
        }

    @web.middleware
    async def _answer(
        self,
        request: web.Request,
        handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    ) -> web.StreamResponse:
        """Check the key and answer a request. Every failure has the format of the API's errors."""
        owner = self._owners.find(request.headers.get(KEY_HEADER, ""))
        if owner is None and not request.path.startswith(FILES):
            return error_response(
                ApiError(401, "invalid_api_key", f"wrong or missing {KEY_HEADER}")
            )
        request[OWNER] = owner or ""
        self._connections.begin_request(request.protocol)
        try:
            return await handler(request)
        except ConnectionResetError:
            raise
        except ApiError as error:
            return error_response(error)
        except ClientError as error:
            return error_response(bad_request(str(error)))
        except web.HTTPException as error:
            message = f"{request.method} {request.path[:200]} is not served here: {error.reason}"
            return error_response(ApiError(error.status, "not_found", message))
        except Exception as error:
            logger.exception("%s %s failed", request.method, request.path)
            return error_response(ApiError(500, "internal_error", describe(error)))
        finally:
            self._connections.end_request(request.protocol)

    # -- sessions ---------------------------------------------------------------------------------

    def _client_config(self, owner: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the flags of the SDK that differ from their defaults."""
        return {
            # On the loopback interface, compression only takes time.
            "proto_compress_fwdbwd": False,
            "fwdbwd_max_chunk_len": CHUNK_DATUMS,
            # The SDK's estimate of a size is approximate.
            "fwdbwd_max_chunk_bytes_count": MAX_MESSAGE_BYTES // 2,
            "fwdbwd_dispatch_bytes_semaphore_size": 4 * MAX_MESSAGE_BYTES,
        }

    def _capabilities(self, owner: str, request: web.Request) -> dict[str, Any]:
        model = self._state.model
        described = {
            "model_name": model.api_name,
            "max_context_length": model.max_tokens,
            "trainable": True,
            "sampleable": True,
        }
        return {"supported_models": [described]}

    def _create_session(self, owner: str, body: Mapping[str, Any]) -> dict[str, Any]:
        session_id = secrets.token_hex(8)
        self._state.sessions[session_id] = Session(owner, read_metadata(body))
        return {
            "type": "create_session",
            "session_id": session_id,
            "warning_message": self._notice,
        }

    def _heartbeat(self, owner: str, body: Mapping[str, Any]) -> dict[str, Any]:
        session = self._state.sessions.get(read(body, "session_id", str))
        if session is None or session.owner != owner:
            raise ApiError(410, "session_over", "this session has ended")
        session.seen = time.monotonic()
        return {"type": "session_heartbeat"}

    async def _finish(self, request: web.Request) -> web.Response:
        """End a session. A repeated call has no effect."""
        session_id = request.match_info["session"]
        session = self._state.sessions.get(session_id)
        if session is not None and session.owner == request[OWNER]:
            self._state.end_session(session_id)
        return web.json_response({})

    # -- futures ----------------------------------------------------------------------------------

    def _promised(
        self, call: Callable[[str, Mapping[str, Any]], RequestFuture]
    ) -> Callable[[str, Mapping[str, Any]], dict[str, Any]]:
        """Return a call that answers with the name of its future."""
        return lambda owner, body: {"request_id": call(owner, body).request_id}

    async def _forward_backward(self, request: web.Request) -> web.Response:
        if request.content_type != CONTENT_TYPE:
            raise ApiError(415, "invalid_request", f"send a message of type {CONTENT_TYPE}")
        content = await read_body(request, max_bytes=MAX_MESSAGE_BYTES)
        future = self._training.forward_backward(request[OWNER], content)
        return web.json_response({"request_id": future.request_id})

    def _sample(self, owner: str, body: Mapping[str, Any]) -> dict[str, Any]:
        future, sequence_ids = self._sampling.sample(owner, body)
        return {"request_id": future.request_id, "sample_sequence_ids": sequence_ids}

    def _cancel(self, owner: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Fail a sampling request that waits."""
        request_id = read(body, "request_id", str)
        if self._find_future(owner, request_id) is not None:
            self._state.scheduler.cancel_sample(request_id)
        return {}

    def _find_future(self, owner: str, request_id: str) -> RequestFuture | None:
        """Return an owner's future. None if there is none."""
        future = self._state.futures.find(request_id)
        if future is None or self._state.sessions[future.session_id].owner != owner:
            return None
        return future

    async def _retrieve(self, request: web.Request) -> web.Response:
        """Return an answer, or ask the client to poll again."""
        body = _read_object(await read_body(request))
        request_id = read(body, "request_id", str)
        future = self._find_future(request[OWNER], request_id)
        if future is None:
            message = f"there is no request {request_id[:200]!r}. The server may have restarted"
            raise ApiError(410, "not_found", message)
        try:
            await asyncio.wait_for(future.is_done.wait(), POLL_SECONDS)
        except TimeoutError:
            waiting = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
            return web.json_response(waiting, status=408)
        answer = future.answer
        assert answer is not None
        is_large = isinstance(answer, bytes) and len(answer) > INLINE_BYTES
        if is_large and body.get("allow_metadata_only"):
            size = {"status": "complete_metadata", "response_payload_size": len(answer)}
            return web.json_response(size)
        future.mark_received()
        if isinstance(answer, bytes):
            return web.Response(body=answer, content_type=CONTENT_TYPE)
        return web.json_response(answer)

    # -- checkpoints ------------------------------------------------------------------------------

    async def _delete_checkpoint(self, request: web.Request) -> web.Response:
        parts = request.match_info
        self._checkpoints.delete(request[OWNER], parts["model"], parts["checkpoint"])
        return web.json_response({})

    async def _set_lifetime(self, request: web.Request) -> web.Response:
        body, parts = _read_object(await read_body(request)), request.match_info
        self._checkpoints.set_lifetime(request[OWNER], parts["model"], parts["checkpoint"], body)
        return web.json_response({})

    async def _download_urls(self, request: web.Request) -> web.Response:
        parts = request.match_info
        urls = self._checkpoints.download_urls(
            request[OWNER], parts["model"], parts["checkpoint"], str(request.url.origin())
        )
        return web.json_response(urls)

    async def _download(self, request: web.Request) -> web.StreamResponse:
        """Send a file of a signed URL."""
        return web.FileResponse(self._downloads.find(request.match_info["resource"], request.query))


def _read_object(content: bytes) -> Mapping[str, Any]:
    """Return the JSON object of a body. Raises ApiError."""
    body = parse_json(content or b"{}", MAX_JSON_VALUES)
    if not isinstance(body, dict):
        raise bad_request("the body must be a JSON object")
    return body


def _json_handler(
    call: Callable[[str, Mapping[str, Any]], Any],
) -> Callable[[web.Request], Awaitable[web.Response]]:
    """Return a handler that passes owner and JSON of a request to a call, and sends its result."""

    async def handle(request: web.Request) -> web.Response:
        body = _read_object(await read_body(request))
        return web.json_response(call(request[OWNER], body))

    return handle


def _query_handler(
    call: Callable[[str, web.Request], dict[str, Any]],
) -> Callable[[web.Request], Awaitable[web.Response]]:
    """Return a handler that sends the result of a call."""

    async def handle(request: web.Request) -> web.Response:
        return web.json_response(call(request[OWNER], request))

    return handle


def _named(
    call: Callable[[str, str], dict[str, Any]],
) -> Callable[[str, web.Request], dict[str, Any]]:
    """Return a query that passes the name in its path to a call."""
    return lambda owner, request: call(owner, request.match_info["name"])
