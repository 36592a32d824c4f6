"""A guessing game behind OpenEnv's protocol: by the real ``openenv`` package, or by what of the protocol is used.

python guessing_server.py 8000 openenv     # in an environment with openenv, which this project does not have
python guessing_server.py 8000 wire
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

SLOW = -100
"""A guess that takes long."""
ONCE = -200
"""A guess at which the server dies, unless it has done so before."""


class Game:
    """The game, whoever serves it."""

    def __init__(self) -> None:
        self.secret = 0

    def reset(self, seed: int) -> dict[str, Any]:
        self.secret = seed % 10
        return {"hint": "guess a number", "reward": None, "done": False}

    def step(self, number: int) -> dict[str, Any]:
        if number == SLOW:
            time.sleep(3)
        if number == ONCE and not Path(os.environ["TRACE"]).exists():
            Path(os.environ["TRACE"]).write_text("died")
            os._exit(3)
        if number < 0:
            raise ValueError("negative")
        if number == self.secret:
            return {"hint": "yes", "reward": 1.0, "done": True}
        return {
            "hint": "higher" if number < self.secret else "lower",
            "reward": -0.25,
            "done": False,
        }


def serve_by_openenv(port: int) -> None:
    import uvicorn
    from openenv.core.env_server import Action, Environment, Observation, create_fastapi_app
    from openenv.core.env_server.types import State

    class GuessAction(Action):
        number: int

    class GuessObservation(Observation):
        hint: str = ""

    class Guessing(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            super().__init__()
            self.game = Game()

        def reset(self, seed: int | None = None, **_: Any) -> Any:
            return GuessObservation(**self.game.reset(seed or 0))

        def step(self, action: Any, **_: Any) -> Any:
            return GuessObservation(**self.game.step(action.number))

        @property
        def state(self) -> Any:
            return State()

    app = create_fastapi_app(Guessing, GuessAction, GuessObservation, max_concurrent_envs=2)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error")


def serve_by_wire(port: int) -> None:
    """Serve what an adapter sees of it: messages as openenv 0.10.0 writes them."""
    from aiohttp import web

    sessions = 0

    async def schema(request: web.Request) -> web.Response:
        number = {"title": "Number", "type": "integer"}
        action = {"type": "object", "properties": {"metadata": {}, "number": number}}
        return web.json_response({"action": action | {"required": ["number"]}})

    async def session(request: web.Request) -> web.WebSocketResponse:
        nonlocal sessions
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        if sessions == 2:
            error = {"message": "full", "code": "CAPACITY_REACHED"}
            await socket.send_json({"type": "error", "data": error})
            await socket.close()
            return socket

        sessions += 1
        game = Game()
        try:
            async for message in socket:
                await socket.send_json(answer(game, json.loads(message.data)))
        finally:
            sessions -= 1
        return socket

    def answer(game: Game, message: dict[str, Any]) -> dict[str, Any]:
        data = message["data"]
        try:
            if message["type"] == "reset":
                seen = game.reset(data.get("seed", 0))
            elif set(data) != {"number"}:
                error = {"message": "Invalid message", "code": "VALIDATION_ERROR"}
                return {"type": "error", "data": error | {"errors": [{"loc": ["number"]}]}}
            else:
                seen = game.step(data["number"])
        except Exception as error:
            return {"type": "error", "data": {"message": str(error), "code": "EXECUTION_ERROR"}}
        observation = {"metadata": {}, "hint": seen["hint"]}
        body = {"observation": observation, "reward": seen["reward"], "done": seen["done"]}
        return {"type": "observation", "data": body}

    app = web.Application()
    app.router.add_get("/schema", schema)
    app.router.add_get("/ws", session)
    web.run_app(app, host="127.0.0.1", port=port, print=None)


if __name__ == "__main__":
    {"openenv": serve_by_openenv, "wire": serve_by_wire}[sys.argv[2]](int(sys.argv[1]))
