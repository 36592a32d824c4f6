"""Clients of other projects: litellm and langchain-openai. Neither is a requirement of the tests."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

from rl_loop.harmony.codec import Harmony
from tests.support.rl_loop.gateway.chats import TOOLS
from tests.support.rl_loop.gateway.scripted import Talk, talking

HI: list[Any] = [{"role": "user", "content": "Hi"}]
FINAL = "<|channel|>final<|message|>{}<|return|>"
HELLO = "<|channel|>analysis<|message|>ok<|end|><|start|>assistant" + FINAL.format("Hello you")
CALL = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1, "b": 1}<|call|>'


def completion(codec: Harmony, text: str) -> list[int]:
    return [*codec.vocabulary.encode_text(text), codec.stop_token_ids[0]]


# ---- litellm


@pytest.fixture
def litellm() -> Any:
    # Otherwise its import downloads a list of prices.
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    return pytest.importorskip("litellm")


def address(talk: Talk, model: str) -> dict[str, Any]:
    return {
        "model": model,
        "api_base": talk.gateway.base_url,
        "api_key": talk.session.api_key,
        "max_retries": 0,
    }


def test_litellm_chats_with_tools_choices_and_log_probs(tiny: Harmony, litellm: Any) -> None:
    async def run() -> None:
        async with talking(tiny, [CALL, FINAL.format("two"), HELLO, HELLO]) as talk:
            to = address(talk, "openai/any")
            message = (
                (await litellm.acompletion(**to, messages=HI, tools=TOOLS, tool_choice="auto"))
                .choices[0]
                .message
            )
            [call] = message.tool_calls
            assert (call.function.name, call.function.arguments) == ("add", '{"a": 1, "b": 1}')

            tool = {"role": "tool", "tool_call_id": call.id, "content": "2"}
            answered = [*HI, message.model_dump(), tool]
            answer = await litellm.acompletion(**to, messages=answered, tools=TOOLS)
            assert answer.choices[0].message.content == "two"
            # The conversation continues from the sampled tokens.
            assert len(talk.session.forest.leaves) == 1

            answer = await litellm.acompletion(**to, messages=HI, n=2, logprobs=True, stop=["you"])
            assert [choice.message.content for choice in answer.choices] == ["Hello ", "Hello "]
            tokens = answer.choices[1].logprobs.content
            assert "".join(token.token for token in tokens) == "Hello "
            assert answer.usage.prompt_tokens_details.cached_tokens == 0

    asyncio.run(run())


@pytest.mark.parametrize("dialect", ["chat", "completions", "responses"])
def test_litellm_reads_streams(tiny: Harmony, litellm: Any, dialect: str) -> None:
    async def run() -> None:
        turn = completion(tiny, "Hello you") if dialect == "completions" else HELLO
        async with talking(tiny, [turn]) as talk:
            text = ""
            if dialect == "chat":
                stream = await litellm.acompletion(
                    **address(talk, "openai/any"), messages=HI, stream=True
                )
                async for chunk in stream:
                    text += chunk.choices[0].delta.content or ""
            elif dialect == "completions":
                stream = await litellm.atext_completion(
                    **address(talk, "text-completion-openai/any"), prompt="Hi", stream=True
                )
                async for chunk in stream:
                    text += chunk.choices[0].text or ""
            else:
                stream = await litellm.aresponses(
                    **address(talk, "openai/any"), input="Hi", stream=True
                )
                async for event in stream:
                    text += event.delta if event.type == "response.output_text.delta" else ""
            assert text == "Hello you"

    asyncio.run(run())


def test_litellm_raises_errors(tiny: Harmony, litellm: Any) -> None:
    async def run() -> None:
        async with talking(tiny, []) as talk:
            to = address(talk, "openai/any")
            with pytest.raises(litellm.BadRequestError, match="logit_bias"):
                await litellm.acompletion(**to, messages=HI, logit_bias={"1": 1})
            with pytest.raises(litellm.AuthenticationError):
                await litellm.acompletion(**to | {"api_key": "guessed"}, messages=HI)

    asyncio.run(run())


# ---- langchain-openai


def chat_model(talk: Talk, **options: Any) -> Any:
    langchain = pytest.importorskip("langchain_openai")
    return langchain.ChatOpenAI(
        model="any",
        base_url=talk.gateway.base_url,
        api_key=talk.session.api_key,
        max_retries=0,
        **options,
    )


@pytest.mark.parametrize("use_responses", [False, True])
def test_langchain_agent_calls_a_tool(tiny: Harmony, use_responses: bool) -> None:
    pytest.importorskip("langchain_openai")
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool

    @tool
    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    async def run() -> None:
        async with talking(tiny, [CALL, FINAL.format("two")]) as talk:
            model = chat_model(talk, use_responses_api=use_responses).bind_tools([add])
            messages: list[Any] = [HumanMessage("1+1")]
            called = await model.ainvoke(messages)
            [call] = called.tool_calls
            assert (call["name"], call["args"]) == ("add", {"a": 1, "b": 1})
            messages += [called, ToolMessage("2", tool_call_id=call["id"])]
            answer = await model.ainvoke(messages)
            assert answer.text == "two"
            assert answer.usage_metadata["input_tokens"] == len(talk.policy.requests[1].input_ids)
            [(_, trajectory)] = talk.session.trajectories("task")
            assert trajectory.assistant_turns == 2

    asyncio.run(run())


@pytest.mark.parametrize("use_responses", [False, True])
def test_langchain_streams(tiny: Harmony, use_responses: bool) -> None:
    async def run() -> None:
        async with talking(tiny, [HELLO]) as talk:
            model = chat_model(talk, use_responses_api=use_responses, stream_usage=True)
            chunks = [chunk async for chunk in model.astream("Hi")]
            assert "".join(chunk.text for chunk in chunks) == "Hello you"
            counted = [chunk for chunk in chunks if chunk.usage_metadata]
            assert counted[-1].usage_metadata["output_tokens"] > 0

    asyncio.run(run())


def test_langchain_completes_texts(tiny: Harmony) -> None:
    langchain = pytest.importorskip("langchain_openai")

    async def run() -> None:
        turns = [completion(tiny, "one"), completion(tiny, "two")]
        async with talking(tiny, [*turns, completion(tiny, "three")]) as talk:
            model = langchain.OpenAI(
                model="any",
                base_url=talk.gateway.base_url,
                api_key=talk.session.api_key,
                max_retries=0,
            )
            result = await model.agenerate(["Say: ", "Tell: "])
            assert [generation[0].text for generation in result.generations] == ["one", "two"]
            assert "".join([piece async for piece in model.astream("Say: ")]) == "three"

    asyncio.run(run())
