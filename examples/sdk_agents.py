"""Two agents of OpenAI's Agents SDK with a function tool, a handoff and an MCP server.

    python examples/sdk_agents.py http://127.0.0.1:8000/v1 KEY   # asks the served model three times
    python examples/sdk_agents.py --serve                        # the price list: MCP over stdio

A customer asks for the total price of several items. The front desk hands over to the clerk. The
clerk uses the price list, an MCP server in a separate process, and multiplies with a function.
``gptoss rl`` can train the agents. The configuration names only ``run`` and ``tasks``
(``agent: examples.sdk_agents:run``, ``tasks: examples.sdk_agents:tasks``).
"""

import argparse
import asyncio
import os
import random
import sys
from typing import Any

import openai
from agents import Agent, RunConfig, Runner, function_tool
from agents.mcp import MCPServerStdio
from agents.models.openai_provider import OpenAIProvider
from mcp.server import MCPServer

PRICES = {"lamp": 12, "table": 90, "chair": 35, "clock": 28, "vase": 17, "plate": 6, "candle": 3}
MAX_COUNT = 20
"""Maximum number of pieces of an item."""
HELD_OUT = 4
"""One of this many questions is held out."""
SERVER_SECONDS = 120.0
"""Time limit of the price list's answers, long enough for a busy machine, in seconds."""


# ---- the agents


@function_tool
def total(price: int, count: int) -> int:
    """Multiply."""
    return price * count


async def run(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """Serve one customer. Return 1 for the right total, 0 for any other answer."""
    async with (
        openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client,
        MCPServerStdio(
            params={
                "command": sys.executable,
                "args": [__file__, "--serve"],
                "env": dict(os.environ),
            },
            client_session_timeout_seconds=SERVER_SECONDS,
        ) as price_list,
    ):
        clerk = Agent(
            name="clerk",
            instructions="Look the price up, multiply, and answer with the total alone.",
            tools=[total],
            mcp_servers=[price_list],
        )
        desk = Agent(name="desk", instructions="Hand over to the clerk.", handoffs=[clerk])
        policy = OpenAIProvider(openai_client=client)
        config = RunConfig(model_provider=policy, tracing_disabled=True)
        answer = await Runner.run(desk, task["prompt"], run_config=config)
    return float(str(answer.final_output).strip() == str(task["total"]))


def serve() -> None:
    """Run the price list until the end of the standard input."""
    server = MCPServer("prices", log_level="ERROR")

    @server.tool()
    def price(item: str) -> int:
        """Costs of one of them."""
        return PRICES[item]

    server.run("stdio")


# ---- tasks


def tasks(split: str, seed: int, index: int) -> dict[str, Any]:
    """Return task ``index`` of a split. The splits have different questions."""
    questions = [(item, count) for item in PRICES for count in range(2, MAX_COUNT + 1)]
    random.Random(0).shuffle(questions)
    held_out = len(questions) // HELD_OUT
    known = questions[:held_out] if split == "held_out" else questions[held_out:]
    item, count = known[index % len(known)]
    return {"prompt": f"What do {count} {item}s cost?", "total": PRICES[item] * count}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("base_url", nargs="?")
    parser.add_argument("api_key", nargs="?")
    parser.add_argument("--serve", action="store_true")
    arguments = parser.parse_args()
    if arguments.serve:
        serve()
        return
    if arguments.api_key is None:
        parser.error("BASE_URL and API_KEY, or --serve")
    for index in range(3):
        task = tasks("held_out", 0, index)
        score = asyncio.run(run(task, arguments.base_url, arguments.api_key))
        print(f"{task['prompt']} -> {score}")


if __name__ == "__main__":
    main()
