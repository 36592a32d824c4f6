"""Keys, addresses, and requests that the gateway rejects."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import openai
import pytest
from transformers import GptOssForCausalLM

from rl_loop.engines.protocol import ModelShape
from rl_loop.gateway.server import Gateway, GatewaySettings
from rl_loop.harmony.codec import Harmony
from tests.support.rl_loop.gateway.serving import SETTINGS, check_capture, serving

HI: list[Any] = [{"role": "user", "content": "Hi"}]


def test_key_opens_only_its_own_session(tiny: Harmony, model: GptOssForCausalLM) -> None:
    async def run() -> None:
        async with serving(tiny, model) as served:
            other = served.gateway.open_session("other")
            response = await served.client().responses.create(model="any", input="Hi")
            mine, theirs = served.client(), served.client(other)
            with pytest.raises(openai.NotFoundError) as refusal:
                await theirs.responses.create(
                    model="any", input="More", previous_response_id=response.id
                )
            assert refusal.value.code == "response_not_found"
            with pytest.raises(openai.NotFoundError, match="has no response"):
                body = {"reward": 1.0, "response_id": response.id}
                await theirs.post("/rewards", body=body, cast_to=object)
            assert served.session.reward_parts() is None
            basic = {"Authorization": f"Basic {served.session.api_key}"}
            with pytest.raises(openai.AuthenticationError):
                await mine.with_options(default_headers=basic).models.list()
            # The same text with another key begins another conversation.
            await theirs.responses.create(model="any", input="Hi")
            assert len(served.engine.answered) == 2

            await served.gateway.close_session(other)
            for client in (theirs, mine.with_options(api_key="sk-wrong")):
                with pytest.raises(openai.AuthenticationError):
                    await client.responses.create(model="any", input="Hi")
                with pytest.raises(openai.AuthenticationError):
                    await client.models.list()
            # In the order of the requests: equal tokens may differ in the last bits of their
            # log-probs, because the second request finds its prompt in the engine's cache.
            check_capture(served, served.trajectories() + served.trajectories(other))

    asyncio.run(run())


def test_keys_are_long_unique_and_not_shared(tiny: Harmony, model: GptOssForCausalLM) -> None:
    async def run() -> None:
        async with serving(tiny, model) as served:
            keys = {served.gateway.open_session(f"s{i}").api_key for i in range(100)}
            assert len(keys) == 100
            assert min(map(len, keys)) >= 32
            with pytest.raises(ValueError, match="belongs to another session"):
                served.gateway.open_session("again", api_key=served.session.api_key)

    asyncio.run(run())


def test_closing_a_session_stops_its_sampling(tiny: Harmony, model: GptOssForCausalLM) -> None:
    async def run() -> None:
        async with serving(tiny, model) as served:
            asking = asyncio.create_task(
                served.client(max_retries=0).chat.completions.create(
                    model="any", messages=[{"role": "user", "content": "Count"}]
                )
            )
            while not served.engine.begun:
                await asyncio.sleep(0.001)
            await served.gateway.close_session(served.session)
            with pytest.raises(openai.BadRequestError) as refusal:
                await asking
            assert refusal.value.code == "session_over"
            assert served.trajectories() == []

    asyncio.run(run())


def test_gateway_listens_on_loopback_by_default(tiny: Harmony, model: GptOssForCausalLM) -> None:
    assert GatewaySettings(SETTINGS).host == "127.0.0.1"

    async def run() -> None:
        async with serving(tiny, model) as served:
            assert served.gateway.base_url.startswith("http://127.0.0.1:")
            assert served.gateway._runner is not None
            assert {host for host, _ in served.gateway._runner.addresses} == {"127.0.0.1"}

    asyncio.run(run())


def test_port_in_use_is_named(tiny: Harmony, model: GptOssForCausalLM) -> None:
    async def run() -> None:
        async with serving(tiny, model) as served:
            port = int(served.gateway.base_url.split(":")[2].split("/")[0])
            shape = ModelShape(tiny.vocabulary.size)
            second = Gateway(served.engine, tiny, shape, GatewaySettings(SETTINGS, port=port))
            with pytest.raises(OSError, match=str(port)):
                await second.start()
            await second.close()

    asyncio.run(run())


def test_policy_is_the_only_listed_model(tiny: Harmony, model: GptOssForCausalLM) -> None:
    async def run() -> None:
        async with serving(tiny, model) as served:
            client = served.client()
            assert [entry.id async for entry in client.models.list()] == ["policy"]
            assert (await client.models.retrieve("policy")).id == "policy"
            with pytest.raises(openai.NotFoundError, match="The model 'gpt-4' does not exist"):
                await client.models.retrieve("gpt-4")

    asyncio.run(run())


def chat(**changes: Any) -> dict[str, Any]:
    return {"model": "any", "messages": HI} | changes


def user(content: Any) -> list[Any]:
    return [{"role": "user", "content": content}]


FUNCTION = {"name": "add", "parameters": {}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}

REFUSED = [
    ("chat/completions", chat(n=0), "n"),
    ("chat/completions", chat(stop=["x"] * 5), "stop"),
    ("chat/completions", chat(logprobs=True, top_logprobs=21), "top_logprobs"),
    ("chat/completions", chat(response_format={"type": "xml"}), "response_format"),
    ("chat/completions", chat(tool_choice="required"), "tool_choice"),
    ("chat/completions", chat(typo=1), "typo"),
    ("chat/completions", chat(max_tokens=0), "max_tokens"),
    ("chat/completions", chat(temperature=-1), "temperature"),
    ("chat/completions", chat(messages=[]), "messages"),
    ("chat/completions", chat(messages="Hi"), "messages"),
    ("chat/completions", {"model": "any"}, "messages"),
    ("chat/completions", chat(messages=[{"role": "oracle", "content": "x"}]), "messages[0].role"),
    ("chat/completions", chat(messages=["Hi"]), "messages[0]"),
    ("chat/completions", chat(messages=user(3)), "messages[0].content"),
    ("chat/completions", chat(messages=user(None)), "messages[0].content"),
    (
        "chat/completions",
        chat(messages=user([{"type": "image_url", "image_url": {}}])),
        "messages[0].content[0]",
    ),
    ("chat/completions", chat(messages=[*HI, {"role": "assistant", "content": "x"}]), "messages"),
    (
        "chat/completions",
        chat(messages=[*HI, {"role": "tool", "content": "x"}]),
        "messages[1].tool_call_id",
    ),
    (
        "chat/completions",
        chat(messages=[*HI, {"role": "tool", "tool_call_id": "c", "content": "x"}]),
        "messages",
    ),
    (
        "chat/completions",
        chat(messages=[*HI, {"role": "assistant", "tool_calls": [CALL | {"id": 7}]}]),
        "messages[1].tool_calls[0].id",
    ),
    ("chat/completions", chat(tools=[{"type": "web_search"}]), "tools[0]"),
    (
        "chat/completions",
        chat(tools=[{"type": "function", "function": {"name": "a b"}}]),
        "tools[0].function.name",
    ),
    ("chat/completions", chat(tools=[{"type": "function", "function": FUNCTION}] * 2), "tools"),
    ("chat/completions", chat(reasoning_effort="extreme"), "reasoning_effort"),
    ("responses", {"model": "any"}, "input"),
    ("responses", {"model": "any", "input": "Hi", "truncation": "auto"}, "truncation"),
    ("responses", {"model": "any", "input": "Hi", "background": True}, "background"),
    (
        "responses",
        {"model": "any", "input": "Hi", "text": {"format": {"type": "xml"}}},
        "text.format",
    ),
    ("responses", {"model": "any", "input": [{"type": "item_reference"}]}, "input[0]"),
    (
        "responses",
        {"model": "any", "input": [{"type": "function_call", "name": "f"}]},
        "input[0].arguments",
    ),
    ("responses", {"model": "any", "input": "Hi", "reasoning": {"effort": 1}}, "reasoning.effort"),
    ("responses", {"model": "any", "input": "Hi", "tools": [{"type": "mcp"}]}, "tools[0]"),
]


def test_invalid_request_names_the_wrong_key(tiny: Harmony, model: GptOssForCausalLM) -> None:
    async def run() -> None:
        async with serving(tiny, model) as served, aiohttp.ClientSession() as http:
            headers = {"Authorization": f"Bearer {served.session.api_key}"}
            for path, body, key in REFUSED:
                url = f"{served.gateway.base_url}/{path}"
                async with http.post(url, json=body, headers=headers) as answer:
                    error = (await answer.json())["error"]
                    assert (answer.status, error["param"]) == (400, key), (body, error)
                    assert error["message"]
            assert served.engine.begun == []
            assert served.session.end is None

    asyncio.run(run())


def test_unreadable_request_gets_a_json_error(tiny: Harmony, model: GptOssForCausalLM) -> None:
    async def run() -> None:
        async with serving(tiny, model) as served, aiohttp.ClientSession() as http:
            url = served.gateway.base_url
            headers = {"Authorization": f"Bearer {served.session.api_key}"}
            for method, path, data, status in (
                ("POST", "chat/completions", b"{", 400),
                ("POST", "chat/completions", b"[]", 400),
                ("POST", "chat/completions", b"\xff", 400),
                ("POST", "chat/completions", b"[" * 100_000, 400),
                ("GET", "chat/completions", b"", 405),
                ("POST", "embeddings", b"{}", 404),
            ):
                async with http.request(
                    method, f"{url}/{path}", data=data, headers=headers
                ) as answer:
                    assert answer.status == status
                    assert json.loads(await answer.text())["error"]["message"]

    asyncio.run(run())


def test_parameters_without_effect_are_accepted(tiny: Harmony, model: GptOssForCausalLM) -> None:
    async def run() -> None:
        async with serving(tiny, model) as served:
            completion = await served.client().chat.completions.create(
                model="gpt-4o-mini",
                messages=[{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
                n=1,
                stop=None,
                user="someone",
                temperature=0.7,
                parallel_tool_calls=False,
                response_format={"type": "text"},
                tool_choice="none",
                tools=[{"type": "function", "function": {"name": "add"}}],
            )
            assert completion.choices[0].message.content == "Hello"

    asyncio.run(run())
