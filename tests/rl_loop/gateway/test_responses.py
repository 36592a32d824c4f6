"""The Responses API with the official client and the embedded engine."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from transformers import GptOssForCausalLM

from rl_loop.harmony.codec import Harmony
from tests.support.rl_loop.gateway.policy import ADD, ARGUMENTS, LONG, Script
from tests.support.rl_loop.gateway.serving import check_capture, serving

TOOLS: list[Any] = [{"type": "function", "name": "add", "parameters": ADD.parameters}]


def test_plain_response_has_items_and_usage(tiny: Harmony, model: GptOssForCausalLM) -> None:
    async def run() -> None:
        async with serving(tiny, model) as served:
            with served.sync_client() as client:
                response = await asyncio.to_thread(client.responses.create, model="any", input="Hi")
            assert (response.output_text, response.status) == ("Hello", "completed")
            assert [item.type for item in response.output] == ["reasoning", "message"]
            assert response.output[0].content[0].text == "ok"
            assert response.usage is not None
            assert response.usage.output_tokens == len(served.engine.answered[0].result.output_ids)
            assert response.usage.output_tokens_details.reasoning_tokens > 0
            check_capture(served, served.trajectories())

    asyncio.run(run())


def test_stream_has_the_items_of_a_plain_response(tiny: Harmony, model: GptOssForCausalLM) -> None:
    async def run() -> None:
        async with serving(tiny, model) as served:
            client = served.client()
            events = []
            # The client's helper assembles the response from the events.
            async with client.responses.stream(model="any", input="Hi") as stream:
                async for event in stream:
                    events.append(event)
                streamed = await stream.get_final_response()
            plain = await client.responses.create(model="any", input="Hi")

            assert events[0].type == "response.created"
            assert events[-1].type == "response.completed"
            assert [event.sequence_number for event in events] == list(range(len(events)))
            text = [event.delta for event in events if event.type == "response.output_text.delta"]
            assert "".join(text) == "Hello"

            def without_ids(response: Any) -> Any:
                return [item.model_dump(exclude={"id", "parsed"}) for item in response.output]

            assert [item["type"] for item in without_ids(streamed)] == ["reasoning", "message"]
            assert streamed.output_text == plain.output_text
            check_capture(served, served.trajectories())

    asyncio.run(run())


@pytest.mark.parametrize("by_id", [True, False])
def test_function_call_and_its_output_are_one_sequence(
    tiny: Harmony, model: GptOssForCausalLM, script: Script, by_id: bool
) -> None:
    async def run() -> None:
        async with serving(tiny, model) as served:
            client = served.client()
            question: list[Any] = [{"role": "user", "content": "1+1"}]
            first = await client.responses.create(model="any", input=question, tools=TOOLS)
            call = first.output[-1]
            assert (call.type, call.name, call.arguments) == ("function_call", "add", ARGUMENTS)

            output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "2"}
            if by_id:
                second = await client.responses.create(
                    model="any", input=[output], tools=TOOLS, previous_response_id=first.id
                )
            else:
                repeated: list[Any] = [item.model_dump() for item in first.output]
                second = await client.responses.create(
                    model="any", input=[*question, *repeated, output], tools=TOOLS
                )
            assert second.output_text == "two"

            [trajectory] = served.trajectories()
            expected = script.prompt("1+1", (ADD,)) + script.calls_add()
            expected += script.hears_tool("2") + script.says("two")
            assert trajectory.token_ids.tolist() == expected
            check_capture(served, [trajectory])

    asyncio.run(run())


def test_streamed_call_has_its_arguments(tiny: Harmony, model: GptOssForCausalLM) -> None:
    async def run() -> None:
        async with serving(tiny, model) as served:
            async with served.client().responses.stream(
                model="any", input="1+1", tools=TOOLS
            ) as stream:
                events = [event async for event in stream]
            deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
            assert "".join(deltas) == ARGUMENTS
            check_capture(served, served.trajectories())

    asyncio.run(run())


def test_two_branches_continue_one_response(tiny: Harmony, model: GptOssForCausalLM) -> None:
    async def run() -> None:
        async with serving(tiny, model) as served:
            client = served.client()
            first = await client.responses.create(model="any", input="Hi")
            answers = []
            for text in ("More", "Again"):
                response = await client.responses.create(
                    model="any", input=text, previous_response_id=first.id
                )
                answers.append(response.output_text)
            assert answers == ["Bye", "What"]

            one, other = served.trajectories()
            assert other.turns[0].role == "prompt"
            check_capture(served, [one, other])

    asyncio.run(run())


def test_continued_response_does_not_inherit_instructions(
    tiny: Harmony, model: GptOssForCausalLM, script: Script
) -> None:
    async def run() -> None:
        async with serving(tiny, model) as served:
            client = served.client()
            brief = await client.responses.create(model="any", input="Hi", instructions="Be brief.")
            assert brief.output_text == "Yo"
            await client.responses.create(
                model="any", input="More", previous_response_id=brief.id, max_output_tokens=1
            )
            first, second = served.trajectories()
            assert first.token_ids.tolist() == (
                script.prompt("Hi", instructions="Be brief.") + script.says("Yo")
            )
            history = [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "Yo"},
                {"role": "user", "content": "More"},
            ]
            assert second.token_ids[:-1].tolist() == tiny.render_prompt(history)

            # With the same instructions, the response continues the stored tokens.
            await client.responses.create(
                model="any",
                input="More",
                instructions="Be brief.",
                previous_response_id=brief.id,
                max_output_tokens=1,
            )
            assert len(served.trajectories()) == 2
            check_capture(served, served.trajectories())

    asyncio.run(run())


def test_unstored_response_cannot_be_continued_by_its_id(
    tiny: Harmony, model: GptOssForCausalLM
) -> None:
    async def run() -> None:
        async with serving(tiny, model) as served:
            client = served.client()
            first = await client.responses.create(model="any", input="Hi", store=False)
            with pytest.raises(openai.NotFoundError, match="has no response"):
                await client.responses.create(
                    model="any", input="More", previous_response_id=first.id
                )
            # The response is captured, and repeated items continue its tokens.
            items: list[Any] = [
                {"role": "user", "content": "Hi"},
                *(item.model_dump() for item in first.output),
                {"role": "user", "content": "More"},
            ]
            second = await client.responses.create(model="any", input=items, store=False)
            assert second.output_text == "Bye"
            [trajectory] = served.trajectories()
            check_capture(served, [trajectory])

    asyncio.run(run())


def test_truncated_response_is_incomplete(tiny: Harmony, model: GptOssForCausalLM) -> None:
    async def run() -> None:
        async with serving(tiny, model) as served:
            client = served.client()
            response = await client.responses.create(
                model="any", input="Count", max_output_tokens=12
            )
            assert response.status == "incomplete"
            assert response.incomplete_details is not None
            assert response.incomplete_details.reason == "max_output_tokens"
            assert LONG.startswith(response.output_text)

            # A response truncated inside a header has no output.
            response = await client.responses.create(model="any", input="Hi", max_output_tokens=1)
            assert (response.status, response.output) == ("incomplete", [])
            check_capture(served, served.trajectories())

    asyncio.run(run())
