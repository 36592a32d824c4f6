"""An unmodified agent of OpenAI's Agents SDK with a function tool, a handoff and an MCP server."""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from agents import Agent, RunConfig, Runner, function_tool
from agents.mcp import MCPServerStdio
from agents.models.openai_provider import OpenAIProvider
from transformers import GptOssForCausalLM

from rl_loop.engines.protocol import ModelShape
from rl_loop.gateway.server import Gateway, GatewaySettings
from rl_loop.harmony.codec import Harmony, ParsedMessage
from tests.support.rl_loop.gateway.policy import Lesson, learned_model, tiny_config
from tests.support.rl_loop.gateway.serving import LIMITS, SETTINGS, check_capture, serving
from tests.support.rl_loop.scripted_engine import ScriptedEngine

LONG_CONTEXT = replace(SETTINGS, limits=LIMITS.model_copy(update={"max_episode_tokens": 2048}))
DIALECTS = ("chat", "responses")
MCP_DOUBLER = Path(__file__).parents[3] / "tests/support/rl_loop/gateway/mcp_doubler.py"


def turns(harmony: Harmony) -> list[list[int]]:
    """Return the turns of the policy in order."""

    def call(name: str, arguments: str) -> list[int]:
        thought = ParsedMessage("analysis", None, None, "ok")
        calling = ParsedMessage("commentary", f"functions.{name}", "<|constrain|>json", arguments)
        return harmony.render_assistant([thought, calling], "<|call|>")

    answer = [ParsedMessage("final", None, None, "four")]
    return [
        call("transfer_to_math", "{}"),
        call("add", '{"a": 1, "b": 1}'),
        call("double", '{"n": 2}'),
        harmony.render_assistant(answer, "<|return|>"),
    ]


async def run_agent(base_url: str, api_key: str, dialect: str, *, stream: bool) -> str:
    """Run the agent as a user of the SDK would."""

    @function_tool
    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
    provider = OpenAIProvider(openai_client=client, use_responses=dialect == "responses")
    config = RunConfig(model_provider=provider, tracing_disabled=True)

    doubler = MCPServerStdio(
        params={
            "command": sys.executable,
            "args": [str(MCP_DOUBLER)],
            "env": dict(os.environ),
        },
        client_session_timeout_seconds=120,
    )
    async with doubler:
        math = Agent(name="math", instructions="Sum.", tools=[add], mcp_servers=[doubler])
        front = Agent(name="front", instructions="Route.", handoffs=[math])
        if not stream:
            result: Any = await Runner.run(front, "1+1", run_config=config)
        else:
            result = Runner.run_streamed(front, "1+1", run_config=config)
            async for _ in result.stream_events():
                pass
    return str(result.final_output)


async def rehearse(harmony: Harmony, dialect: str) -> list[Lesson]:
    """Run the agent with a scripted policy. Return the lessons that teach its turns."""
    engine = ScriptedEngine(turns(harmony))
    settings = GatewaySettings(replace(LONG_CONTEXT, record_routes=False))
    gateway = Gateway(engine, harmony, ModelShape(harmony.vocabulary.size), settings)
    await gateway.start()
    try:
        session = gateway.open_session("rehearsal")
        await run_agent(gateway.base_url, session.api_key, dialect, stream=False)
    finally:
        await gateway.close()

    lessons = []
    for request, result in zip(engine.requests, engine.results, strict=True):
        lesson = Lesson([], []).then(request.input_ids, sampled=False)
        lessons.append(lesson.then(result.output_ids, sampled=True))
    return lessons


@pytest.fixture(scope="module")
def agent_model(tiny: Harmony) -> GptOssForCausalLM:
    lessons = [lesson for dialect in DIALECTS for lesson in asyncio.run(rehearse(tiny, dialect))]
    different = {tuple(lesson.ids): lesson for lesson in lessons}
    return learned_model(tiny_config(tiny.vocabulary.size), list(different.values()))


@pytest.mark.parametrize(
    ("dialect", "stream"),
    [
        ("chat", False),
        ("responses", True),
        pytest.param("chat", True, marks=pytest.mark.slow),
        pytest.param("responses", False, marks=pytest.mark.slow),
    ],
)
def test_sdk_agent_with_tool_handoff_and_mcp_server_is_captured(
    tiny: Harmony, agent_model: GptOssForCausalLM, dialect: str, stream: bool
) -> None:
    async def run() -> None:
        async with serving(tiny, agent_model, LONG_CONTEXT) as served:
            key = served.session.api_key
            answer = await run_agent(served.gateway.base_url, key, dialect, stream=stream)
            assert answer == "four"

            # The second agent has other instructions and tools, so it begins another sequence.
            front, math = served.trajectories()
            assert front.assistant_turns == 1
            assert [turn.role for turn in math.turns] == [
                "prompt",
                "assistant",
                "tool",
                "assistant",
                "tool",
                "assistant",
            ]
            sampled = [turn for t in (front, math) for turn in t.turns if turn.role == "assistant"]
            texts = [tiny.decode(ids) for ids in turns(tiny)]
            assert [turn.text for turn in sampled] == texts
            assert "2<|end|>" in math.turns[2].text
            assert "4" in math.turns[4].text
            check_capture(served, [front, math])

    asyncio.run(run())
