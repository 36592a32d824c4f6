"""Messages that a client repeats. They match by value, and keep the sampled tokens."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable
from typing import Any

import openai
import pytest

from rl_loop.chatml.codec import ChatMl
from rl_loop.chatml.conversation import ChatMessage, RenderedCall
from rl_loop.chatml.prompt_config import ChatMlConfig
from rl_loop.chatml.vocabulary import tiny_vocabulary
from rl_loop.environments.arithmetic import vocabulary_text
from rl_loop.harmony.codec import Harmony
from tests.support.rl_loop.gateway.scripted import Talk, talking

PARAMETERS = {"type": "object", "properties": {"a": {"type": "number"}}}
ADD: Any = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}
SUB: Any = {"type": "function", "function": {"name": "sub", "parameters": PARAMETERS}}
ADD_ITEM: Any = {"type": "function", "name": "add", "parameters": PARAMETERS, "strict": False}
SUB_ITEM: Any = ADD_ITEM | {"name": "sub"}

THOUGHT = "<|channel|>analysis<|message|>SECRET-PLAN<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>done<|return|>"
Q: Any = {"role": "user", "content": "q"}


def call(arguments: str = '{"a": 1}', function: str = "add", end: str = "<|call|>") -> str:
    header = f"<|channel|>commentary to=functions.{function} <|constrain|>json<|message|>"
    return f"{header}{arguments}{end}"


def calls(*functions: str) -> str:
    """Return a turn with several calls."""
    pieces = [
        call(json.dumps({"a": n}), name, "<|end|>") for n, name in enumerate(functions, start=1)
    ]
    return "<|start|>assistant".join(pieces).removesuffix("<|end|>") + "<|call|>"


def play(codec: Any, turns: Any, conversation: Callable[[Talk], Awaitable[None]], **o: Any) -> None:
    async def run() -> None:
        async with talking(codec, turns, **o) as talk:
            await conversation(talk)

    asyncio.run(run())


async def chat(talk: Talk, messages: list[Any], **options: Any) -> Any:
    options = {"tools": [ADD, SUB]} | options
    create: Any = talk.client.chat.completions.create
    completion = await create(model="m", messages=messages, **options)
    return completion.choices[0].message


def echo(message: Any) -> dict[str, Any]:
    """Return a message as repeated by clients that drop reasoning."""
    dumped: dict[str, Any] = message.model_dump(exclude_none=True)
    dumped.pop("reasoning", None)
    return dumped


def places(text: str, *pieces: str) -> list[int]:
    found = [text.index(piece) for piece in pieces]
    assert all(text.count(piece) == 1 for piece in pieces)
    return found


# ---- order of calls and results

FUNCTIONS = [("add", "add"), ("add", "add", "add"), ("add", "sub", "add")]


@pytest.mark.parametrize("functions", FUNCTIONS)
@pytest.mark.parametrize("dialect", ["chat", "responses", "previous"])
def test_results_are_rendered_in_the_order_of_their_calls(
    full: Harmony, functions: tuple[str, ...], dialect: str
) -> None:
    results = [f"RESULT{n}" for n in range(len(functions))]
    orders = list(itertools.permutations(range(len(functions))))

    async def conversation(talk: Talk) -> None:
        for order in orders:
            if dialect == "chat":
                message = await chat(talk, [Q])
                answers = [
                    {
                        "role": "tool",
                        "tool_call_id": message.tool_calls[i].id,
                        "content": results[i],
                    }
                    for i in order
                ]
                await chat(talk, [Q, echo(message), *answers])
            else:
                create: Any = talk.client.responses.create
                options = {"model": "m", "tools": [ADD_ITEM, SUB_ITEM]}
                response = await create(input=[Q], **options)
                made = [item for item in response.output if item.type == "function_call"]
                items = [
                    {
                        "type": "function_call_output",
                        "call_id": made[i].call_id,
                        "output": results[i],
                    }
                    for i in order
                ]
                if dialect == "previous":
                    await create(input=items, previous_response_id=response.id, **options)
                else:
                    repeated = [item.model_dump(exclude_none=True) for item in response.output]
                    await create(input=[Q, *repeated, *items], **options)
            found = places(talk.shown(), *results)
            assert found == sorted(found), order
        # The calls keep their sampled tokens for any order of the results.
        assert len(talk.session.trajectories("t")) == len(orders)

    play(full, [calls(*functions), FINAL] * len(orders), conversation)


def test_repeated_results_match_in_any_order(full: Harmony) -> None:
    async def conversation(talk: Talk) -> None:
        message = await chat(talk, [Q])
        one, two = (
            {"role": "tool", "tool_call_id": made.id, "content": f"R{n}"}
            for n, made in enumerate(message.tool_calls)
        )
        first = await chat(talk, [Q, echo(message), two, one])
        await chat(
            talk, [Q, echo(message), one, two, echo(first), {"role": "user", "content": "r"}]
        )
        assert len(talk.session.trajectories("t")) == 1

    play(full, [calls("add", "add"), FINAL, FINAL], conversation)


def test_result_without_a_clear_call_is_rejected(full: Harmony) -> None:
    async def conversation(talk: Talk) -> None:
        message = await chat(talk, [Q])
        last = message.tool_calls[-1].id
        for call_id in (last, "call_unknown"):
            answer = {"role": "tool", "tool_call_id": call_id, "content": "R"}
            with pytest.raises(openai.BadRequestError, match="call"):
                await chat(talk, [Q, echo(message), answer])
        assert len(talk.policy.requests) == 1

    play(full, [calls("add", "add")], conversation)


# ---- reasoning before an open call

CHANGES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "instructions": {"instructions": "B"},
    "no instructions": {"instructions": openai.omit},
    "effort": {"reasoning": {"effort": "high"}},
    "more tools": {"tools": [ADD_ITEM, SUB_ITEM]},
    "no tools": {"tools": openai.omit},
    "tool_choice": {"tool_choice": "none"},
}


@pytest.mark.parametrize("history", ["append", "harmony"])
@pytest.mark.parametrize("is_repeated", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_reasoning_of_an_open_call_is_kept_when_options_change(
    full: Harmony, history: str, is_repeated: bool, change: str
) -> None:
    async def conversation(talk: Talk) -> None:
        create: Any = talk.client.responses.create
        base: dict[str, Any] = {"model": "m", "tools": [ADD_ITEM], "instructions": "A"}
        response = await create(input=[Q], **base)
        made = response.output[-1]
        items: list[Any] = [
            {"type": "function_call_output", "call_id": made.call_id, "output": "RESULT"}
        ]
        options = base | CHANGES[change]
        if is_repeated:
            items = [Q, made.model_dump(exclude_none=True), *items]
        else:
            options["previous_response_id"] = response.id
        second = await create(input=items, **options)
        shown = talk.shown()
        found = places(shown, "SECRET-PLAN", "to=functions.add", "RESULT")
        assert found == sorted(found)

        # The format drops the reasoning after the answer.
        more = {"role": "user", "content": "more"}
        options = base | {"instructions": "C"} | {"previous_response_id": second.id}
        await create(input=[more], **options)
        assert "SECRET-PLAN" not in talk.shown()

    play(full, [THOUGHT + call(), FINAL, FINAL], conversation, history=history)


@pytest.mark.parametrize("options", [{"tools": [SUB, ADD]}, {"reasoning_effort": "low"}])
def test_reasoning_of_an_open_call_is_kept_in_chat_completions(full: Harmony, options: Any) -> None:
    async def conversation(talk: Talk) -> None:
        message = await chat(talk, [Q])
        [made] = message.tool_calls
        answer = {"role": "tool", "tool_call_id": made.id, "content": "RESULT"}
        repeated = echo(message)
        await chat(talk, [Q, repeated, answer], **options)
        found = places(talk.shown(), "SECRET-PLAN", "to=functions.add", "RESULT")
        assert found == sorted(found)

        # The reasoning belongs to this call only.
        edited = json.loads(json.dumps(repeated).replace('\\"a\\": 1', '\\"a\\": 2'))
        assert edited != repeated
        await chat(talk, [Q, edited, answer], **options)
        assert "SECRET-PLAN" not in talk.shown()

    play(full, [THOUGHT + call(), FINAL, FINAL], conversation)


# ---- equality by value

SPELLINGS = [
    ('{"a": 1.0, "b": 2}', '{"a":1,"b":2}'),
    ('{"a": 1e3}', '{"a":1000}'),
    ('{"a": 1E+3}', '{"a":1000.0}'),
    ('{"a": -0}', '{"a":0}'),
    ('{"a": -0.0}', '{"a":0}'),
    ('{"a": 0.1e-2}', '{"a":0.001}'),
    ('{"a": 3.14159265358979323846}', '{"a":3.141592653589793}'),
    ('{"a": 1e23}', '{"a":100000000000000000000000}'),
    ('{"a": 12345678901234567890123}', '{"a": 12345678901234567890123}'),
    ('{"b": [1, {"d": null, "c": true}], "a": 1}', '{"a":1,"b":[1,{"c":true,"d":null}]}'),
    ('{"a": "\\u00e9\\u6f22\\ud83d\\ude00/"}', '{"a":"é漢😀\\/"}'),
    ('{"a": 1, "a": 2}', '{"a":2}'),
    (' \n{"a" : 1}\t', '{"a":1}'),
    ("", "{}"),
    ("{not json", "{not json"),
    ('{"a": 1e400}', '{"a": 1E400}'),
]
DIFFERENT = [
    ('{"a": 1}', '{"a":"1"}'),
    ('{"a": 1}', '{"a":true}'),
    ('{"a": 0}', '{"a":false}'),
    ('{"a": null}', "{}"),
    ('{"a": [1, 2]}', '{"a":[2,1]}'),
    ('{"a": 12345678901234567890123}', '{"a": 12345678901234567890124}'),
    ('{"a": 1}', '{"a":-1}'),
    ('{"a": 10}', '{"a":1}'),
    ('{"a": "é"}', '{"a":"e\\u0301"}'),
    ('{"a": ["number", "1e0"]}', '{"a":1}'),
]


@pytest.mark.parametrize(
    ("sampled", "repeated", "is_same"),
    [(*pair, True) for pair in SPELLINGS] + [(*pair, False) for pair in DIFFERENT],
)
def test_repeated_call_matches_by_value(
    full: Harmony, sampled: str, repeated: str, is_same: bool
) -> None:
    async def conversation(talk: Talk) -> None:
        message = await chat(talk, [Q])
        [made] = message.tool_calls
        assert made.function.arguments == sampled
        function = {"name": "add", "arguments": repeated}
        entry = {"id": made.id, "type": "function", "function": function}
        turn = {"role": "assistant", "content": None, "tool_calls": [entry]}
        await chat(talk, [Q, turn, {"role": "tool", "tool_call_id": made.id, "content": "3"}])
        assert len(talk.session.trajectories("t")) == (1 if is_same else 2)

    play(full, [THOUGHT + call(sampled), FINAL], conversation)


def test_tools_match_by_value(full: Harmony) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "number", "default": 1}}}
    again = {"properties": {"a": {"default": 1.0, "type": "number"}}, "type": "object"}

    async def conversation(talk: Talk) -> None:
        tools, same = (
            [{"type": "function", "function": {"name": "add", "parameters": parameters}}]
            for parameters in (schema, again)
        )
        message = await chat(talk, [Q], tools=tools)
        await chat(talk, [Q, echo(message), Q], tools=same)
        assert len(talk.session.trajectories("t")) == 1

    play(full, [FINAL, FINAL], conversation)


# ---- equal requests


@pytest.mark.parametrize("is_streamed", [False, True])
def test_concurrent_equal_requests_get_separate_samples(full: Harmony, is_streamed: bool) -> None:
    turns = [f"<|channel|>final<|message|>{n}<|return|>" for n in range(8)]

    async def ask(talk: Talk) -> str:
        if not is_streamed:
            return str((await chat(talk, [Q])).content)
        create: Any = talk.client.chat.completions.create
        stream = await create(model="m", messages=[Q], stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def conversation(talk: Talk) -> None:
        answers = await asyncio.gather(*(ask(talk) for _ in turns))
        assert sorted(answers) == [str(n) for n in range(len(turns))]
        assert len(talk.session.trajectories("t")) == len(turns)

    play(full, turns, conversation, seconds=0.05)


# ---- truncated turns


def truncated_turn(codec: Harmony, text: str) -> list[int]:
    """Return a turn of which the engine samples exactly ``text`` before its limit."""
    filler = "<|channel|>final<|message|>never sampled<|return|>"
    return _ids(codec, text) + _ids(codec, filler)


def _ids(codec: Harmony, text: str) -> list[int]:
    from rl_loop.harmony.vocabulary import harmony_encoding

    return codec.vocabulary.from_harmony(harmony_encoding().encode(text, allowed_special="all"))


COMMENT = "<|channel|>commentary<|message|>I will look.<|end|><|start|>assistant"
CUTS = {
    "in thinking": ("<|channel|>analysis<|message|>SECRET", "SECRET", "", None, "<|end|>"),
    "in the answer": (
        THOUGHT + "<|channel|>final<|message|>4",
        "SECRET-PLAN",
        "4",
        None,
        "<|end|>",
    ),
    "in a call": (
        THOUGHT + COMMENT + call('{"a": 1', end=""),
        "SECRET-PLAN",
        "I will look.",
        '{"a": 1',
        "<|call|>",
    ),
}
HEADERS = [
    ("", "<|channel|>comm"),
    ("", "<|channel|>commentary to=functions.add <|constrain|>"),
    (THOUGHT, ""),
    (THOUGHT, "<|channel|>"),
    (THOUGHT, "<|channel|>commentary to=functions.add <|constrain|>"),
    (THOUGHT.removesuffix("assistant"), ""),
]


@pytest.mark.parametrize("place", CUTS)
def test_truncated_turn_is_rendered_as_sampled(full: Harmony, place: str) -> None:
    text, reasoning, content, arguments, end = CUTS[place]
    limit = len(_ids(full, text))

    async def conversation(talk: Talk) -> None:
        create: Any = talk.client.chat.completions.create
        options = {"model": "m", "tools": [ADD]}
        completion = await create(messages=[Q], max_tokens=limit, **options)
        [choice] = completion.choices
        assert choice.finish_reason == "length"
        assert getattr(choice.message, "reasoning", "") == reasoning
        assert (choice.message.content or "") == content
        made = choice.message.tool_calls or []
        assert [one.function.arguments for one in made] == ([arguments] if arguments else [])

        more: Any = {"role": "user", "content": "MORE"}
        if made:
            more = {"role": "tool", "tool_call_id": made[0].id, "content": "MORE"}
        await create(messages=[Q, echo(choice.message), more], **options)
        # The prompt is the sampled text, its end, and the next message.
        before = talk.shown(0) + text + end + "<|start|>"
        assert talk.shown().startswith(before)
        assert "MORE" in talk.shown()[len(before) :]
        assert "<|channel|>final<|message|><|end|>" not in talk.shown()
        assert len(talk.session.trajectories("t")) == 1

    play(full, [truncated_turn(full, text), FINAL], conversation)


@pytest.mark.parametrize("api", ["chat", "responses", "other options"])
@pytest.mark.parametrize(("before", "header"), HEADERS)
def test_truncated_header_is_left_out_of_the_prompt(
    full: Harmony, before: str, header: str, api: str
) -> None:
    limit = len(_ids(full, before + header))

    async def conversation(talk: Talk) -> None:
        if api == "chat":
            create: Any = talk.client.chat.completions.create
            completion = await create(model="m", messages=[Q], tools=[ADD], max_tokens=limit)
            message = completion.choices[0].message
            assert bool(getattr(message, "reasoning", "")) == bool(before)
            await create(model="m", messages=[Q, echo(message), Q], tools=[ADD])
        else:
            create = talk.client.responses.create
            base: dict[str, Any] = {"model": "m", "tools": [ADD_ITEM]}
            response = await create(input=[Q], max_output_tokens=limit, **base)
            assert response.status == "incomplete"
            options = base | ({"instructions": "B"} if api == "other options" else {})
            await create(input=[Q], previous_response_id=response.id, **options)

        shown = talk.shown().removesuffix("<|start|>assistant")
        assert "<|channel|>final" not in shown
        assert ("SECRET-PLAN" in shown) == bool(before)
        assert shown.count("<|start|>assistant") == (1 if before else 0)
        assert shown.count("<|start|>user<|message|>q<|end|>") == 2

    play(full, [truncated_turn(full, before + header), FINAL], conversation)


def test_truncated_chatml_call_is_rendered_as_sampled() -> None:
    codec = ChatMl(tiny_vocabulary(1300, vocabulary_text()), ChatMlConfig())
    turn = codec.render_turn(
        ChatMessage(
            "assistant", "Hm.", (RenderedCall("add", '{"a": 1}'), RenderedCall("add", '{"a": 2}'))
        )
    )
    [end] = turn[-1:]
    limit = len(turn) - 4

    async def conversation(talk: Talk) -> None:
        create: Any = talk.client.chat.completions.create
        completion = await create(model="m", messages=[Q], tools=[ADD], max_tokens=limit)
        message = completion.choices[0].message
        assert message.content == "Hm."
        [made] = message.tool_calls
        assert json.loads(made.function.arguments) == {"a": 1}
        answer = {"role": "tool", "tool_call_id": made.id, "content": "R"}
        await create(model="m", messages=[Q, echo(message), answer], tools=[ADD])
        first, second = (request.input_ids for request in talk.policy.requests)
        assert second[: len(first) + limit + 1] == [*first, *turn[:limit], end]

    play(codec, [turn, codec.render_turn(ChatMessage("assistant", "ok"))], conversation)


# ---- errors


def test_malformed_turn_is_reported_as_a_model_error(full: Harmony) -> None:
    async def conversation(talk: Talk) -> None:
        with pytest.raises(openai.InternalServerError) as error:
            await chat(talk, [Q])
        assert error.value.status_code == 500
        assert error.value.type == "model_error"
        assert error.value.response.headers["x-should-retry"] == "false"
        wrong = talk.client.with_options(api_key="sk-wrong")
        with pytest.raises(openai.AuthenticationError, match="Incorrect API key") as refused:
            await wrong.models.list()
        assert refused.value.code == "invalid_api_key"

    play(full, ["<|channel|>nonsense<|message|>x<|return|>"], conversation)
