"""An environment with a tool of an MCP server, and two scripts that answer its tasks.

Run it from the root of a checkout with PYTHONPATH=. in the environment:

    python examples/mcp_environment.py           # an expert, and a script that guesses
    python examples/mcp_environment.py --serve   # the server over stdio, for any MCP client

The policy has to find an item in a warehouse. The tool returns the shelf of the item. The server uses
the ``mcp`` package. Every episode starts its own server, which knows the item of the episode. A server
in another process or on another machine is configured with ``command`` or ``url`` instead of
``in_process``.
"""

import argparse
import asyncio
import random
from dataclasses import replace
from typing import Any

from mcp.server import MCPServer
from pydantic import Field

from rl_loop.environments import Task, make_offline_environment
from rl_loop.environments.mcp_tools import McpEnvironment, McpOptions
from rl_loop.environments.scripted_messages import final, function_call, think
from rl_loop.environments.tool_servers.config import ToolServerConfig
from rl_loop.tasks.demonstrations import play

SHELVES = 20
GOODS = ["lamp", "table", "chair", "clock", "vase", "plate", "candle", "mirror", "basket"]


def make(row: dict[str, Any]) -> MCPServer:
    """Return the server of an episode.

    Args:
        row: row of the task; {} if the server runs without an episode.
    """
    server = MCPServer("warehouse", log_level="ERROR")

    @server.tool()
    def find(item: str) -> str:
        """Return the shelf of an item."""
        if item != row.get("item"):
            raise ValueError("no such item")
        return f"shelf {row['shelf']}"

    return server


class WarehouseOptions(McpOptions):
    servers: dict[str, ToolServerConfig] = Field(
        {"warehouse": ToolServerConfig(in_process="examples.mcp_environment:make")}
    )
    """The server of this module, unless a configuration names another."""


class WarehouseEnvironment(McpEnvironment):
    """Environment of the warehouse: examples.mcp_environment:WarehouseEnvironment."""

    Options = WarehouseOptions

    @classmethod
    def generate(cls, split: Any, seed: int, index: int, options: Any) -> Task:
        rng = random.Random(f"{split}/{seed}/{index}")
        item = GOODS[index % len(GOODS)]
        shelf = rng.randint(1, SHELVES)
        row = {
            "prompt": f"Order {split} {index}: where is the {item}?",
            "answer": f"shelf {shelf}",
            "item": item,
            "shelf": shelf,
        }
        return cls.from_record(row, f"{split}-{index}", options)

    @classmethod
    def solve(cls, task: Task, rng: random.Random, inject_errors: bool) -> Any:
        if inject_errors:
            yield [think("I guess."), final(f"shelf {rng.randint(1, SHELVES)}")]
            return
        found = yield [
            think("I look it up."),
            function_call("find", item=task.metadata["record"]["item"]),
        ]
        yield [final(found.tool_outputs[0].text)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--serve", action="store_true")
    if parser.parse_args().serve:
        make({"item": "lamp", "shelf": 7}).run("stdio")
        return

    for index in range(3):
        task = WarehouseEnvironment.generate("train", 0, index, WarehouseOptions())
        task = replace(task, environment="examples.mcp_environment:WarehouseEnvironment")
        for name, inject_errors in [("expert", False), ("guess", True)]:
            environment = make_offline_environment(task)
            script = environment.solve(task, random.Random(index), inject_errors)
            episode = asyncio.run(play(environment, script))
            said = [message.text for turn in episode.turns for message in turn.messages]
            print(f"{name}: {' | '.join(said)} -> reward {episode.turns[-1].result.reward:+.2f}")


if __name__ == "__main__":
    main()
