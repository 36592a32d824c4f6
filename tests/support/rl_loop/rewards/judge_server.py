"""An HTTP server that answers like a judge, or fails in a given way."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from rl_loop.rewards.judge_config import JudgeConfig

Reply = tuple[int, str]
"""Status and body of a response."""


def says(content: str | None) -> Reply:
    """Return a chat completion."""
    return 200, json.dumps({"choices": [{"message": {"role": "assistant", "content": content}}]})


@dataclass
class JudgeServer:
    """Replies in order. The last one is repeated."""

    replies: Sequence[Reply]
    seconds: float = 0.0
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    running: int = 0
    most_running: int = 0

    async def answer(self, request: web.Request) -> web.Response:
        number = min(len(self.requests), len(self.replies) - 1)
        self.keys.append(request.headers.get("Authorization"))
        self.requests.append(await request.json())
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(self.seconds)
        self.running -= 1
        status, body = self.replies[number]
        # A redirect leads here again.
        headers = {"Location": str(request.url)} if status == 307 else {}
        return web.Response(
            status=status, text=body, content_type="application/json", headers=headers
        )

    def settings(self, **changed: Any) -> JudgeConfig:
        given = {"url": self.url, "model": "m", "rubric": "Polite answers are better."}
        return JudgeConfig.model_validate(given | changed)


@asynccontextmanager
async def judging(*replies: Reply, seconds: float = 0.0) -> AsyncIterator[JudgeServer]:
    """Serve replies on a free port. Each takes some seconds."""
    server = JudgeServer(replies, seconds)
    application = web.Application()
    application.router.add_post("/v1/chat/completions", server.answer)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    server.url = f"http://{host}:{port}/v1"
    try:
        yield server
    finally:
        await runner.cleanup()
