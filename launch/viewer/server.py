"""Web server of the viewer: static files of this package, and JSON from run directories.

The server is read-only. Sampled text is sent as JSON and inserted as text, never as markup. The
page may load only its own scripts and styles.
"""

import asyncio
import hashlib
import hmac
import json
import math
import secrets
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from aiohttp import web

from launch.metric_labels import LABELS
from launch.viewer.config_facts import compare_configs
from launch.viewer.conversation import split_episode
from launch.viewer.episode_query import MAX_NUMBER, EpisodeQuery, run_query
from launch.viewer.run_view import RunView, find_runs
from megatron_gptoss.user_error import UserError

LOOPBACK = ("127.0.0.1", "localhost", "::1")

COOKIE = "gptoss_view"

OVERVIEW_SECONDS = 0.2
"""Time to read the metrics of runs for the first answer of a page, in seconds."""

READING_SECONDS = 1.0
"""Time to read the metrics of further runs for each later answer, in seconds."""

MAX_COMPARED = 12
"""Maximum number of configurations to compare."""

SECURITY_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}

CONTENT_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Viewer:
    """Serves the runs at some paths. New runs appear automatically."""

    def __init__(self, paths: list[Path], token: str | None = None, loopback: bool = True) -> None:
        """Create a viewer.

        Args:
            paths: run directories, or directories that contain them.
            token: token that browsers must send; None for no authentication.
            loopback: whether the Host header must be a loopback name. It keeps other web pages from
                reaching the server under their own host name (DNS rebinding).
        """
        self._paths = paths
        self._token = token
        self._loopback = loopback
        self._runs: dict[str, RunView] = {}

    def application(self) -> web.Application:
        """Create the aiohttp application."""
        # The outer one is first: errors get the security headers, too.
        app = web.Application(middlewares=[self._secured, _errors_as_json])
        app.router.add_get("/", self._index)
        # Only GET: the server is read-only.
        app.router.add_get("/static/{name}", _static_file)
        app.router.add_get("/api/runs", self._list_runs)
        app.router.add_get("/api/compare", self._compare)
        app.router.add_get("/api/runs/{run}/curves", self._curves)
        app.router.add_get("/api/runs/{run}/config", self._config)
        app.router.add_get("/api/runs/{run}/episodes", self._episodes)
        app.router.add_get("/api/runs/{run}/episodes/{id}", self._episode)
        return app

    # -- access -----------------------------------------------------------------------------------

    @web.middleware
    async def _secured(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        response: web.StreamResponse
        if self._loopback and not _names_loopback(request.host):
            response = _error(
                403, "this server only accepts the host names localhost and 127.0.0.1"
            )
        elif not self._is_known(request):
            response = _error(403, "open the address printed by gptoss view, which has the token")
        else:
            response = await handler(request)
        response.headers.update(SECURITY_HEADERS)
        return response

    def _is_known(self, request: web.Request) -> bool:
        if self._token is None:
            return True
        given = [request.cookies.get(COOKIE, "")]
        # Only here: tokens in other addresses would be logged and copied with links.
        if request.path == "/":
            given.append(request.query.get("token", ""))
        # For scripts, which have no cookies.
        given.append(request.headers.get("Authorization", "").removeprefix("Bearer "))
        expected = self._token.encode()
        # compare_digest takes equally long for every wrong token, so timing does not reveal it.
        return any(hmac.compare_digest(text.encode(errors="replace"), expected) for text in given)

    async def _index(self, request: web.Request) -> web.StreamResponse:
        if "token" in request.query and self._token is not None:
            # The redirect removes the token from the address bar, history and screenshots.
            redirect = web.Response(status=303, headers={"Location": "/"})
            redirect.set_cookie(COOKIE, self._token, httponly=True, samesite="Strict")
            return redirect
        return _file("index.html")

    # -- data -------------------------------------------------------------------------------------

    async def _list_runs(self, request: web.Request) -> web.Response:
        # Files are read in a thread, so that a slow disk does not block other requests.
        known = request.query.get("known")
        seconds = OVERVIEW_SECONDS if known is None else READING_SECONDS
        runs = await asyncio.to_thread(self._overviews, seconds)
        answer = {"runs": runs, "labels": LABELS}
        digest = hashlib.blake2b(json.dumps(answer).encode(), digest_size=8).hexdigest()
        # The page asks every 2 s, and the list of many runs is large.
        if known == digest:
            return _json({"version": digest})
        return _json(answer | {"version": digest})

    def _overviews(self, seconds: float) -> list[dict[str, Any]]:
        """Return the overviews of all runs, by name.

        Args:
            seconds: time to read runs that were not read before, the newest first.
        """
        self._find_runs()
        runs = dict(self._runs)
        deadline = time.monotonic() + seconds
        overviews = {
            run.name: run.overview(reads_all=time.monotonic() < deadline)
            for run in sorted(runs.values(), key=RunView.modified, reverse=True)
        }
        return [overviews[name] for name in runs]

    def _find_runs(self) -> None:
        found = find_runs(self._paths)
        runs = {}
        for name, path in found.items():
            known = self._runs.get(name)
            # Keep known runs, whose metrics and episodes are already read.
            is_same = known is not None and known.directory.path == path
            runs[name] = known if known is not None and is_same else RunView(name, path)
        self._runs = runs

    async def _curves(self, request: web.Request) -> web.Response:
        run = await self._run(request)
        generation = _whole_number(request, "generation", -1)
        after = _whole_number(request, "after", 0)
        return _json(await asyncio.to_thread(run.curves, generation, after))

    async def _config(self, request: web.Request) -> web.Response:
        run = await self._run(request)
        text = await asyncio.to_thread(run.config_text)
        return _json({"config": text, "summary": await asyncio.to_thread(run.summary)})

    async def _compare(self, request: web.Request) -> web.Response:
        names = request.query.getall("run", [])
        if not 2 <= len(names) <= MAX_COMPARED:
            raise UserError(f"run: give 2 to {MAX_COMPARED} runs to compare")
        runs = [await self._named_run(name) for name in names]
        configs = [await asyncio.to_thread(run.config_values) for run in runs]
        return _json({"runs": names, **compare_configs(configs)})

    async def _episodes(self, request: web.Request) -> web.Response:
        run = await self._run(request)
        query = EpisodeQuery.parse(request.query)
        page = await asyncio.to_thread(run_query, run.episodes, query)
        return _json(page.to_json())

    async def _episode(self, request: web.Request) -> web.Response:
        run = await self._run(request)
        try:
            number = int(request.match_info["id"])
        except ValueError:
            raise _NotFoundError("the id of an episode is a number") from None
        # Arrow would raise an error for larger numbers.
        if not 0 <= number <= MAX_NUMBER:
            raise _NotFoundError(f"{run.name} has no such episode")
        episode = await asyncio.to_thread(_read_episode, run, number)
        if episode is None:
            raise _NotFoundError(f"{run.name} has no episode {number}")
        return _json(episode)

    async def _run(self, request: web.Request) -> RunView:
        """Return the run in the address."""
        return await self._named_run(request.match_info["run"])

    async def _named_run(self, name: str) -> RunView:
        """Return the run of a name. Only names of found runs are accepted, no paths."""
        # The run may have started after the last search.
        if name not in self._runs:
            await asyncio.to_thread(self._find_runs)
        if name not in self._runs:
            raise _NotFoundError("no run has that name")
        return self._runs[name]


def _read_episode(run: RunView, number: int) -> dict[str, Any] | None:
    run.episodes.refresh()
    episode = run.episodes.read(number)
    if episode is None:
        return None
    # Converted here and not in the browser, which has no vocabularies.
    messages = split_episode(episode["texts"], episode["loss_mask"])
    return episode | {"messages": [message.to_json() for message in messages]}


# -- responses ------------------------------------------------------------------------------------


class _NotFoundError(UserError):
    """The requested object does not exist."""


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except _NotFoundError as error:
        return _error(404, str(error))
    except web.HTTPNotFound:
        return _error(404, "no such page")
    except web.HTTPMethodNotAllowed:
        return _error(405, "this server is read-only")
    except UserError as error:
        return _error(400, str(error))


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": message}, status=status)


def _json(value: Any) -> web.Response:
    """Return a JSON response. NaN and infinity, which JSON does not have, become null."""
    response = web.json_response(text=json.dumps(_finite(value), separators=(",", ":")))
    response.headers["Cache-Control"] = "no-store"
    # Curves of long runs are megabytes of similar numbers.
    response.enable_compression()
    return response


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        # json.dumps would write NaN, which browsers reject.
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_finite(entry) for entry in value]
    return value


async def _static_file(request: web.Request) -> web.Response:
    return _file(request.match_info["name"])


def _file(name: str) -> web.Response:
    """Return one of the package's files. ``name`` must be a file name without a path."""
    # All files are in memory, so no request can reach another path.
    if name not in STATIC_FILES:
        raise _NotFoundError("no such file")
    suffix = Path(name).suffix
    response = web.Response(
        body=STATIC_FILES[name], content_type=CONTENT_TYPES[suffix], charset="utf-8"
    )
    # Without caching, pages of a new version never use scripts of an older one.
    response.headers["Cache-Control"] = "no-cache"
    return response


def _read_static_files() -> dict[str, bytes]:
    """Return the contents of the viewer's files and of the vendored libraries by file name."""
    package = resources.files("launch.viewer")
    files = {}
    for folder in ("static", "third_party"):
        for file in (package / folder).iterdir():
            if Path(file.name).suffix in CONTENT_TYPES:
                files[file.name] = file.read_bytes()
    return files


STATIC_FILES = _read_static_files()


def _names_loopback(host: str) -> bool:
    """Return True if a Host header (with or without port) is a loopback name."""
    # IPv6 addresses contain colons and stand in brackets.
    name = host.rpartition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
    return name in LOOPBACK


def _whole_number(request: web.Request, name: str, default: int) -> int:
    text = request.query.get(name, "")
    try:
        return max(-1, int(text)) if text else default
    except ValueError:
        raise UserError(f"{name}: {text!r} is not an integer") from None


@dataclass(frozen=True)
class ViewerServer:
    """A viewer whose socket is open. ``serve`` starts to respond."""

    viewer: Viewer
    listener: socket.socket
    address: str
    """URL to open in a browser, including the token."""

    def serve(self) -> None:
        """Respond to requests until interrupted."""
        web.run_app(
            self.viewer.application(),
            sock=self.listener,
            print=None,
            access_log=None,
            shutdown_timeout=1,
        )


def open_server(paths: list[Path], host: str, port: int, ask_for_token: bool) -> ViewerServer:
    """Open the socket of a viewer.

    Args:
        paths: run directories, or directories that contain them.
        host: address to listen on.
        port: port to listen on; 0 for a free port.
        ask_for_token: whether to require a token on a loopback address. Other addresses always
            require a token.

    Raises:
        UserError: if the address is in use, or a directory is missing.
    """
    missing = [path for path in paths if not path.is_dir()]
    if missing:
        raise UserError(
            f"{missing[0]} is not a directory. Give run directories, or a directory of runs"
        )

    # IPv4 addresses and host names contain no colon.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        # Opened here and not by aiohttp, so that a busy port is an error of the command.
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"cannot listen on {host}:{port} ({reason}). Try another --port") from None

    is_loopback = host in LOOPBACK
    token = None if is_loopback and not ask_for_token else secrets.token_urlsafe(24)
    shown_host = f"[{host}]" if ":" in host else host
    question = "" if token is None else f"?token={token}"
    # The port of the socket, because port 0 selects a free one.
    address = f"http://{shown_host}:{listener.getsockname()[1]}/{question}"
    return ViewerServer(Viewer(paths, token, loopback=is_loopback), listener, address)
