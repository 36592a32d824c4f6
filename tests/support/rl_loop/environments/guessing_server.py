"""A guessing game as an OpenEnv server: by the ``openenv`` package, or by the used part of its
protocol.

python guessing_server.py 8000 openenv         # in an environment with openenv
python guessing_server.py 8000 wire
python guessing_server.py 8000 wire tools      # tools of the package's MCPEnvironment, no steps
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

SLOW = -100
"""A guess to which the server responds slowly."""
ONCE = -200
"""A guess at which the server exits, unless it has done so before."""


CUT = -300
"""A guess at which the server, otherwise healthy, closes the connection."""


def happens_once() -> bool:
    """Return True if this is the first call, in this process and earlier ones."""
    trace = Path(os.environ["TRACE"])
    if trace.exists():
        return False
    trace.write_text("happened")
    return True


class Game:
    """The game, independent of the server."""

    def __init__(self) -> None:
        self.secret = self.guesses = 0

    def reset(self, seed: int) -> dict[str, Any]:
        self.secret = seed % 10
        hint = "guess a number" if seed < 10 else "guess again"
        return {"hint": hint, "reward": None, "done": False}

    def step(self, number: int) -> dict[str, Any]:
        self.guesses += 1
        if number == SLOW:
            time.sleep(3)
        if number == ONCE and happens_once():
            os._exit(3)
        if number < 0:
            raise ValueError(f"guess {self.guesses} is negative")
        if number == self.secret:
            return {"hint": "yes", "reward": 1.0, "done": True}
        return {
            "hint": "higher" if number < self.secret else "lower",
            "reward": -0.25,
            "done": False,
        }


GUESS = "Guess the number."
RULES = "numbers from 0 to 9"
FAR = "the tool's server is away"


def serve_by_openenv(port: int, interface: str) -> None:
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

    if interface == "tools":
        from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation

        environment, action, observation = _tool_environment(), CallToolAction, CallToolObservation
    else:
        environment, action, observation = Guessing, GuessAction, GuessObservation
    app = create_fastapi_app(environment, action, observation, max_concurrent_envs=2)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error")


def _tool_environment() -> Any:
    """Return the game as an ``MCPEnvironment``, whose steps call tools of its MCP server."""
    from fastmcp import FastMCP
    from openenv.core.env_server import Observation
    from openenv.core.env_server.mcp_environment import MCPEnvironment
    from openenv.core.env_server.mcp_types import (
        CallToolAction,
        CallToolObservation,
        ToolError,
        ToolErrorType,
    )
    from openenv.core.env_server.types import State

    class HintObservation(Observation):
        hint: str = ""

    class GuessingByTools(MCPEnvironment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            self.game = Game()
            self.seen: dict[str, Any] | None = None
            mcp = FastMCP("guessing")

            @mcp.tool(description=GUESS)
            def guess(number: int) -> str:
                self.seen = self.game.step(number)
                return str(self.seen["hint"])

            @mcp.tool
            def rules():  # type: ignore[no-untyped-def]  # without it MCP adds structured content
                return RULES

            super().__init__(mcp)

        def reset(self, seed: int | None = None, **_: Any) -> Any:
            return HintObservation(**self.game.reset(seed or 0))

        async def step_async(self, action: Any, timeout_s: float | None = None, **_: Any) -> Any:
            if (
                isinstance(action, CallToolAction)
                and action.tool_name == "rules"
                and happens_once()
            ):
                error = ToolError(error_type=ToolErrorType.TRANSPORT_ERROR, message=FAR)
                return CallToolObservation(tool_name="rules", error=error)
            self.seen = None
            observation = await super().step_async(action, timeout_s)
            if self.seen is not None:
                observation.reward, observation.done = self.seen["reward"], self.seen["done"]
            return observation

        def _step_impl(self, action: Any, timeout_s: float | None = None, **_: Any) -> Any:
            raise ValueError("only tools act here")

        @property
        def state(self) -> Any:
            return State()

    return GuessingByTools


def serve_by_wire(port: int, interface: str) -> None:
    """Serve the part of the protocol that adapters use: messages of openenv 0.10.0."""
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
                if f'"number": {CUT}' in message.data:
                    await socket.close()
                    break
                await socket.send_json(answers(game, json.loads(message.data)))
        finally:
            sessions -= 1
        return socket

    answers = answer_to_call if interface == "tools" else answer_to_step
    app = web.Application()
    app.router.add_get("/schema", schema)
    app.router.add_get("/ws", session)
    web.run_app(app, host="127.0.0.1", port=port, print=None)


def answer_to_step(game: Game, message: dict[str, Any]) -> dict[str, Any]:
    data = message["data"]
    if message["type"] == "step" and set(data) != {"number"}:
        return _refused("number", *(key for key in data if key != "number"))
    try:
        seen = (
            game.reset(data.get("seed", 0))
            if message["type"] == "reset"
            else game.step(data["number"])
        )
    except Exception as error:
        return {"type": "error", "data": {"message": str(error), "code": "EXECUTION_ERROR"}}
    return _observed({"hint": seen["hint"]}, seen)


def answer_to_call(game: Game, message: dict[str, Any]) -> dict[str, Any]:
    data = message["data"]
    if message["type"] == "reset":
        seen = game.reset(data.get("seed", 0))
        return _observed({"hint": seen["hint"]}, seen)
    if data.get("type") == "list_tools":
        return _observed({"tools": [_tool("guess", GUESS, number="integer"), _tool("rules", "")]})
    if data.get("type") != "call_tool" or "tool_name" not in data:
        return _refused("tool_name")
    return _called(game, data["tool_name"], data["arguments"])


def _called(game: Game, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    def failed(kind: str, message: str) -> dict[str, Any]:
        error = {"error_type": kind, "message": message}
        return _observed({"tool_name": name, "result": None, "error": error})

    def came_to(text: str, seen: dict[str, Any] | None, *, is_structured: bool) -> dict[str, Any]:
        content = [{"type": "text", "text": text, "annotations": None, "meta": None}]
        result = {
            "content": content,
            "structured_content": {"result": text} if is_structured else None,
            "meta": {"fastmcp": {"wrap_result": True}} if is_structured else None,
            "data": text if is_structured else None,
            "is_error": False,
        }
        return _observed({"tool_name": name, "result": result, "error": None}, seen)

    if name == "rules":
        if happens_once():
            return failed("transport_error", FAR)
        return came_to(RULES, None, is_structured=False)
    if name != "guess":
        return failed("tool_not_found", f"Unknown tool: {name!r}")
    if not isinstance(arguments.get("number"), int):
        return failed("invalid_args", "1 validation error for call[guess]: number")
    try:
        seen = game.step(arguments["number"])
    except ValueError as error:
        return failed("execution_error", f"Error calling tool 'guess': {error}")
    return came_to(seen["hint"], seen, is_structured=True)


def _tool(name: str, description: str, **arguments: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in arguments.items()}
    schema: dict[str, Any] = {"additionalProperties": False, "properties": properties}
    if arguments:
        schema["required"] = list(arguments)
    return {"name": name, "description": description, "input_schema": schema | {"type": "object"}}


def _observed(observation: dict[str, Any], seen: dict[str, Any] | None = None) -> dict[str, Any]:
    earned = seen or {"reward": None, "done": False}
    data = {"observation": {"metadata": {}, **observation}}
    return {
        "type": "observation",
        "data": data | {"reward": earned["reward"], "done": earned["done"]},
    }


def _refused(*keys: str) -> dict[str, Any]:
    """Return an error for missing and for surplus ``keys``."""
    error = {"message": "Invalid message", "code": "VALIDATION_ERROR"}
    return {"type": "error", "data": error | {"errors": [{"loc": [key]} for key in keys]}}


if __name__ == "__main__":
    way, interface = sys.argv[2], [*sys.argv[3:], "step"][0]
    {"openenv": serve_by_openenv, "wire": serve_by_wire}[way](int(sys.argv[1]), interface)
