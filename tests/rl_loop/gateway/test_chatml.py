"""Gateway of a dense ChatML model with the official client. It captures the engine's tokens."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from itertools import chain
from typing import Any

import openai
import pytest
from transformers import PreTrainedModel, Qwen2Config

from megatron_gptoss.families.dense.config import DenseModelConfig
from rl_loop.chat.messages import ParsedMessage, ToolOutput
from rl_loop.chat.tools import Tool
from rl_loop.chatml.codec import ChatMl
from rl_loop.chatml.conversation import ChatMessage, RenderedCall
from rl_loop.chatml.prompt_config import ChatMlConfig
from rl_loop.chatml.vocabulary import IM_END, TOOL_CALL, tiny_vocabulary
from rl_loop.environments import arithmetic
from rl_loop.rollout.episode import MalformedTurn
from tests.support.rl_loop.gateway.chats import TOOLS, echo, say
from tests.support.rl_loop.gateway.policy import ADD, Lesson, learned_model
from tests.support.rl_loop.gateway.serving import SETTINGS, Served, check_capture, serving

PLAIN = replace(SETTINGS, record_routes=False)
PYTHON = Tool("python", "", {"type": "object", "properties": {"code": {"type": "string"}}})
COUNTED = " ".join(str(number) for number in range(10, 20))
CODE = 'print("<|im_end|>")'


class Script:
    """Turns of the policy, and the text that it reads between them."""

    def __init__(self, codec: ChatMl) -> None:
        self.codec = codec

    def says(self, text: str) -> list[int]:
        return self.codec.render_assistant([ParsedMessage("final", None, None, text)])

    def calls(self, text: str, *calls: tuple[str, dict[str, Any]]) -> list[int]:
        written = tuple(RenderedCall(name, json.dumps(arguments)) for name, arguments in calls)
        return self.codec.render_turn(ChatMessage("assistant", text, written))

    def sums(self) -> list[int]:
        return self.calls("ok", ("add", {"a": 1, "b": 1}), ("add", {"a": 1, "b": 2}))

    def runs_code(self) -> list[int]:
        return self.calls("", ("python", {"code": CODE}))

    def illegal(self) -> list[int]:
        """Return a call without an end."""
        markup = self.codec.vocabulary.markup
        return [markup[TOOL_CALL], *self.codec.vocabulary.encode_text("x"), markup[IM_END]]

    def prompt(self, text: str, *tools: Tool) -> list[int]:
        messages = [{"role": "user", "content": text}]
        return self.codec.render_conversation(messages, tools, [])

    def hears(self, text: str) -> list[int]:
        return self.codec.render_observation([], text)

    def hears_tools(self, *texts: str) -> list[int]:
        outputs = [ToolOutput("functions.add", "commentary", text) for text in texts]
        return self.codec.render_observation(outputs)

    def lessons(self) -> list[Lesson]:
        def dialogue(*parts: list[int]) -> Lesson:
            lesson = Lesson([], [])
            for number, part in enumerate(parts):
                lesson = lesson.then(part, sampled=number % 2 == 1)
            return lesson

        end = self.codec.vocabulary.markup["<|im_end|>"]
        count = self.prompt("Count")
        cut = dialogue(count, self.says(COUNTED)[:12], [end, *self.hears("Stop")], self.says("ok"))
        return [
            dialogue(self.prompt("Hi"), self.says("Hello"), self.hears("More"), self.says("Bye")),
            dialogue(
                self.prompt("1+1", ADD), self.sums(), self.hears_tools("2", "3"), self.says("two")
            ),
            dialogue(
                self.prompt("Run", PYTHON),
                self.runs_code(),
                self.hears_tools("x"),
                self.says("ran"),
            ),
            dialogue(count, self.says(COUNTED)),
            cut,
            dialogue(self.prompt("Break"), self.illegal()),
        ]


@pytest.fixture(scope="module")
def chatml() -> ChatMl:
    texts = [arithmetic.vocabulary_text(), "Hello Hi Count Stop Break Bye two ran"]
    return ChatMl(tiny_vocabulary(1300, "\n".join(texts)), ChatMlConfig(system="Be brief."))


@pytest.fixture(scope="module")
def script(chatml: ChatMl) -> Script:
    return Script(chatml)


@pytest.fixture(scope="module")
def model(chatml: ChatMl, script: Script) -> PreTrainedModel:
    config = DenseModelConfig(
        model_type="qwen2",
        num_layers=2,
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_size=16,
        vocab_size=chatml.vocabulary.size,
        max_length=2048,
        tie_word_embeddings=True,
    )
    return learned_model(Qwen2Config(**config.to_hf_config()), script.lessons())


def user(text: str) -> Any:
    return {"role": "user", "content": text}


def answer_to(call: Any, text: str) -> Any:
    return {"role": "tool", "tool_call_id": call.id, "content": text}


def collect_ids(served: Served) -> list[list[int]]:
    trajectories = served.trajectories()
    check_capture(served, trajectories)
    return [trajectory.token_ids.tolist() for trajectory in trajectories]


def test_conversation_is_one_sequence_unless_edited(
    chatml: ChatMl, model: PreTrainedModel, script: Script
) -> None:
    async def run(history: Any) -> None:
        async with serving(chatml, model, replace(PLAIN, history=history)) as served:
            client = served.client()
            completion = await client.chat.completions.create(model="any", messages=[user("Hi")])
            [choice] = completion.choices
            assert (choice.message.content, choice.finish_reason) == ("Hello", "stop")
            # ChatML has no reasoning to show to a client.
            assert choice.message.model_extra == {}
            assert completion.usage is not None
            assert completion.usage.completion_tokens_details is not None
            assert completion.usage.completion_tokens_details.reasoning_tokens == 0

            messages = [user("Hi"), echo(choice.message), user("More")]
            assert (await say(client, messages)).content == "Bye"
            edited = [user("Hi"), {"role": "assistant", "content": "Howdy"}, user("More")]
            await say(client, edited, max_tokens=1)

            whole, other = collect_ids(served)
            parts = [
                script.prompt("Hi"),
                script.says("Hello"),
                script.hears("More"),
                script.says("Bye"),
            ]
            assert whole == list(chain.from_iterable(parts))
            assert other[:-1] == chatml.render_prompt(edited)

    # The format keeps earlier turns completely, so both kinds of history give one sequence.
    asyncio.run(run("append"))
    asyncio.run(run("harmony"))


@pytest.mark.parametrize("stream", [False, True])
def test_results_follow_the_order_of_calls_for_any_client_order(
    chatml: ChatMl, model: PreTrainedModel, script: Script, stream: bool
) -> None:
    async def run() -> None:
        async with serving(chatml, model, PLAIN) as served:
            client = served.client()
            if stream:
                async with client.chat.completions.stream(
                    model="any", messages=[user("1+1")], tools=TOOLS
                ) as events:
                    completion = await events.get_final_completion()
                [choice] = completion.choices
                assert choice.finish_reason == "tool_calls"
                message: Any = choice.message
            else:
                message = await say(client, [user("1+1")], tools=TOOLS)
            # The client repeats the text before calls, so the text is content, not reasoning.
            assert message.content == "ok"
            first, second = message.tool_calls
            assert first.function.arguments == '{"a": 1, "b": 1}'
            assert second.function.arguments == '{"a": 1, "b": 2}'

            repeated = echo(message)
            for call in repeated["tool_calls"]:
                call["function"]["arguments"] = call["function"]["arguments"].replace(" ", "")
            beginning = [user("1+1"), repeated]
            for wrong, named in (
                ([answer_to(second, "3")], r"call of functions\.add .* has no tool output"),
                ([user("Never mind")], r"has no tool output"),
                ([{"role": "tool", "tool_call_id": "x", "content": "2"}], "no open call"),
            ):
                with pytest.raises(openai.BadRequestError, match=named):
                    await say(client, [*beginning, *wrong], tools=TOOLS)

            answers = [answer_to(second, "3"), answer_to(first, "2")]
            assert (await say(client, [*beginning, *answers], tools=TOOLS)).content == "two"
            [ids] = collect_ids(served)
            parts = [
                script.prompt("1+1", ADD),
                script.sums(),
                script.hears_tools("2", "3"),
                script.says("two"),
            ]
            assert ids == list(chain.from_iterable(parts))
            [trajectory] = served.trajectories()
            assert [turn.role for turn in trajectory.turns][1:] == [
                "assistant",
                "tool",
                "assistant",
            ]
            assert trajectory.tool_calls == 2

    asyncio.run(run())


def test_response_continues_after_a_function_named_python(
    chatml: ChatMl, model: PreTrainedModel, script: Script
) -> None:
    tools: list[Any] = [{"type": "function", "name": "python", "parameters": PYTHON.parameters}]

    async def run() -> None:
        async with serving(chatml, model, PLAIN) as served:
            client = served.client()
            async with client.responses.stream(model="any", input="Run", tools=tools) as stream:
                first = await stream.get_final_response()
            [call] = first.output
            assert call.type == "function_call"
            assert (call.name, json.loads(call.arguments)) == ("python", {"code": CODE})

            output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "x"}
            second = await client.responses.create(
                model="any", input=[output], tools=tools, previous_response_id=first.id
            )
            assert second.output_text == "ran"
            [ids] = collect_ids(served)
            parts = [
                script.prompt("Run", PYTHON),
                script.runs_code(),
                script.hears_tools("x"),
                script.says("ran"),
            ]
            assert ids == list(chain.from_iterable(parts))

    asyncio.run(run())


def test_truncated_turn_continues_from_its_prefix(
    chatml: ChatMl, model: PreTrainedModel, script: Script
) -> None:
    async def run() -> None:
        async with serving(chatml, model, PLAIN) as served:
            client = served.client()
            cut = await say(client, [user("Count")], max_completion_tokens=12)
            assert COUNTED.startswith(cut.content)
            messages = [user("Count"), echo(cut), user("Stop")]
            assert (await say(client, messages)).content == "ok"

            inside = await say(client, [user("1+1")], tools=TOOLS, max_completion_tokens=8)
            assert not inside.tool_calls
            await say(client, [user("1+1"), echo(inside), user("Hi")], tools=TOOLS, max_tokens=1)

            whole, continued = collect_ids(served)
            beginning = script.prompt("Count") + script.says(COUNTED)[:12]
            assert whole == [
                *beginning,
                chatml.vocabulary.markup["<|im_end|>"],
                *script.hears("Stop"),
                *script.says("ok"),
            ]
            # The end of the truncated turn is context, because the policy did not sample it.
            assert served.trajectories()[0].sampled_tokens == 12 + len(script.says("ok"))
            # The prompt contains the sampled beginning of the call.
            call = script.prompt("1+1", ADD) + script.sums()[:8]
            end = chatml.vocabulary.markup["<|im_end|>"]
            assert continued[:-1] == [*call, end, *script.hears("Hi")]

    asyncio.run(run())


def test_malformed_turn_ends_the_session_as_a_format_error(
    chatml: ChatMl, model: PreTrainedModel
) -> None:
    async def run() -> None:
        async with serving(chatml, model, PLAIN) as served:
            with pytest.raises(openai.InternalServerError) as refusal:
                await say(served.client(), [user("Break")])
            assert refusal.value.type == "model_error"
            assert served.session.end == MalformedTurn("tool_call")
            collect_ids(served)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("options", "parameter", "named"),
    [
        ({"reasoning_effort": "low"}, "reasoning_effort", "no reasoning effort"),
        (
            {"messages": [user("Hi") | {"name": "ada"}]},
            "messages",
            "'name' cannot be rendered in ChatML",
        ),
        (
            {
                "messages": [
                    user("Hi"),
                    {"role": "assistant", "content": "x", "reasoning": "y"},
                    user("Hi"),
                ]
            },
            "messages",
            r"message 1 .*'thinking' cannot be rendered in ChatML",
        ),
    ],
)
def test_session_continues_after_rejecting_harmony_only_options(
    chatml: ChatMl, model: PreTrainedModel, options: dict[str, Any], parameter: str, named: str
) -> None:
    async def run() -> None:
        async with serving(chatml, model, PLAIN) as served:
            client = served.client()
            with pytest.raises(openai.BadRequestError, match=named) as refusal:
                await say(client, **{"messages": [user("Hi")], **options})
            assert refusal.value.param == parameter
            assert (await say(client, [user("Hi")])).content == "Hello"

    asyncio.run(run())
