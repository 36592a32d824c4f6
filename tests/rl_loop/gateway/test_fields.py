"""Every row of the tables of fields, with the official client and the embedded engine."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import openai
import pytest
from openai.types.chat.chat_completion_stream_options_param import ChatCompletionStreamOptionsParam
from openai.types.chat.completion_create_params import CompletionCreateParamsBase
from openai.types.completion_create_params import (
    CompletionCreateParamsBase as TextCompletionParams,
)
from openai.types.responses import ResponseTextConfigParam
from openai.types.responses.response_create_params import ResponseCreateParamsBase
from openai.types.shared_params import Reasoning
from transformers import GptOssForCausalLM

from rl_loop.engines.protocol import GenerateRequest
from rl_loop.gateway.chat import ChatParameters
from rl_loop.gateway.completions import CompletionParameters
from rl_loop.gateway.fields import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    RESPONSES_FIELDS,
    FieldBehavior,
    RequestField,
    fields_by_name,
)
from rl_loop.gateway.responses import ResponsesParameters
from rl_loop.harmony.codec import Harmony
from tests.support.rl_loop.gateway.serving import SETTINGS, Served, serving

HI: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "Hi"}]},
    "completions": {"prompt": "<|start|>user<|message|>Hi<|end|><|start|>assistant"},
    "responses": {"input": "Hi"},
}
ROWS = {
    "chat": CHAT_FIELDS,
    "completions": COMPLETION_FIELDS,
    "responses": RESPONSES_FIELDS,
}
SERVING = replace(SETTINGS, is_episode=False, clients_choose_sampling=True)
"""Settings of ``gptoss serve``, as far as they concern requests."""
REFERENCE = "previous_response_id"
"""Field whose example depends on an earlier response."""


# ---- the tables are complete


@pytest.mark.parametrize(
    ("dialect", "prefix", "declared"),
    [
        ("chat", "", CompletionCreateParamsBase),
        ("chat", "stream_options.", ChatCompletionStreamOptionsParam),
        ("completions", "", TextCompletionParams),
        ("completions", "stream_options.", ChatCompletionStreamOptionsParam),
        ("responses", "", ResponseCreateParamsBase),
        ("responses", "reasoning.", Reasoning),
        ("responses", "text.", ResponseTextConfigParam),
    ],
)
def test_every_field_of_the_client_has_a_row(dialect: str, prefix: str, declared: Any) -> None:
    names = {f"{prefix}{name}" for name in declared.__annotations__}
    assert names <= fields_by_name(ROWS[dialect]).keys()


@pytest.mark.parametrize(
    ("dialect", "parameters"),
    [
        ("chat", ChatParameters),
        ("completions", CompletionParameters),
        ("responses", ResponsesParameters),
    ],
)
def test_every_parameter_with_an_effect_has_a_row(dialect: str, parameters: Any) -> None:
    rows = fields_by_name(ROWS[dialect]).values()
    working = {row.name for row in rows if row.behavior is FieldBehavior.WORKS}
    top_level = {name for name in working if "." not in name}
    assert top_level == parameters.model_fields.keys()
    assert working == EFFECTS[dialect].keys()


# ---- every row


def rows_with(dialect: str, behavior: FieldBehavior) -> list[RequestField]:
    return [row for row in ROWS[dialect] if row.behavior is behavior]


def body_with(dialect: str, name: str, value: Any) -> dict[str, Any]:
    for key in reversed(name.split(".")):
        value = {key: value}
    return HI[dialect] | value


async def send(served: Served, dialect: str, body: dict[str, Any]) -> Any:
    """Return the client's answer to a body: a parsed answer, or the list of a stream's events."""
    async with served.client(max_retries=0) as client:
        create: Any = client.chat.completions.create
        if dialect == "completions":
            create = client.completions.create
        if dialect == "responses":
            create = client.responses.create
        # The client adds extra_body unchanged, so every value reaches the server.
        fields = {"model": "any"} | HI[dialect]
        if body.get("stream") is True:
            return [event async for event in await create(**fields, stream=True, extra_body=body)]
        return await create(**fields, extra_body=body)


@pytest.mark.parametrize("dialect", ROWS)
def test_refused_rows_return_their_error(
    tiny: Harmony, model: GptOssForCausalLM, dialect: str
) -> None:
    async def run() -> None:
        async with serving(tiny, model, SERVING) as served:
            for row in rows_with(dialect, FieldBehavior.REFUSED):
                begun = len(served.engine.begun)
                with pytest.raises(openai.BadRequestError) as refusal:
                    await send(served, dialect, body_with(dialect, row.name, row.example))
                error = refusal.value
                expected = ("invalid_request_error", row.code, row.error_param)
                assert (error.type, error.code, error.param) == expected, row
                assert len(served.engine.begun) == begun
                for value in row.neutral:
                    body = body_with(dialect, row.name, value)
                    assert read_text(await send(served, dialect, body)) == "Hello", row

    asyncio.run(run())


@pytest.mark.parametrize("dialect", ROWS)
def test_ignored_rows_do_not_change_the_request(
    tiny: Harmony, model: GptOssForCausalLM, dialect: str
) -> None:
    async def run() -> None:
        async with serving(tiny, model, SERVING) as served:
            await send(served, dialect, HI[dialect])
            [plain] = served.engine.begun
            for row in rows_with(dialect, FieldBehavior.IGNORED):
                body = body_with(dialect, row.name, row.example)
                assert read_text(await send(served, dialect, body)) == "Hello", row
                request = served.engine.begun[-1]
                # Name and seed contain the number of the turn.
                sampling = replace(request.sampling, seed=plain.sampling.seed)
                assert (request.input_ids, sampling) == (plain.input_ids, plain.sampling), row

    asyncio.run(run())


@pytest.mark.parametrize("dialect", ROWS)
def test_working_rows_have_their_effect(
    tiny: Harmony, model: GptOssForCausalLM, dialect: str
) -> None:
    async def run() -> None:
        async with serving(tiny, model, SERVING) as served:
            plain = await send(served, dialect, HI[dialect])
            [before] = served.engine.begun
            for row in rows_with(dialect, FieldBehavior.WORKS):
                begun = len(served.engine.begun)
                value = plain.id if row.name == REFERENCE else row.example
                body = body_with(dialect, row.name, value) | NEEDED[dialect].get(row.name, {})
                if row.is_constraint and not is_installed("llguidance"):
                    continue
                answer = await send(served, dialect, body)
                after = served.engine.begun[begun:]
                if not row.is_constraint:
                    EFFECTS[dialect][row.name](Outcome(plain, answer, before, after))
                if row.is_constraint:
                    is_constrained(Outcome(plain, answer, before, after))
                if row.wrong is not None:
                    begun = len(served.engine.begun)
                    with pytest.raises(openai.APIStatusError) as refusal:
                        await send(served, dialect, body_with(dialect, row.name, row.wrong))
                    assert refusal.value.param == row.name
                    assert len(served.engine.begun) == begun

    asyncio.run(run())


@pytest.mark.parametrize("dialect", ROWS)
def test_null_is_the_same_as_an_absent_field(
    tiny: Harmony, model: GptOssForCausalLM, dialect: str
) -> None:
    names = [name for name in fields_by_name(ROWS[dialect]) if "." not in name]
    body = HI[dialect] | {name: None for name in names if name not in HI[dialect]}

    async def run() -> None:
        async with serving(tiny, model, SERVING) as served:
            assert read_text(await send(served, dialect, body)) == "Hello"

    asyncio.run(run())


def test_field_without_a_row_is_refused(tiny: Harmony, model: GptOssForCausalLM) -> None:
    async def run() -> None:
        async with serving(tiny, model, SERVING) as served:
            for dialect in ROWS:
                with pytest.raises(openai.BadRequestError, match="unknown parameter") as refusal:
                    await send(served, dialect, body_with(dialect, "typo", 1))
                assert refusal.value.param == "typo"
            with pytest.raises(openai.BadRequestError, match=r"text\.typo"):
                await send(served, "responses", body_with("responses", "text.typo", 1))

    asyncio.run(run())


def test_constraint_is_refused_without_llguidance(
    tiny: Harmony, model: GptOssForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    # None makes the import fail.
    monkeypatch.setitem(sys.modules, "llguidance", None)

    async def run() -> None:
        async with serving(tiny, model, SERVING) as served:
            for dialect in ROWS:
                for row in ROWS[dialect]:
                    if not row.is_constraint:
                        continue
                    body = body_with(dialect, row.name, row.example)
                    body |= NEEDED[dialect].get(row.name, {})
                    with pytest.raises(openai.BadRequestError, match="llguidance") as refusal:
                        await send(served, dialect, body)
                    error = refusal.value
                    assert (error.code, error.param) == ("unsupported_parameter", row.name)
            assert served.engine.begun == []

    asyncio.run(run())


def read_text(answer: Any) -> str:
    if isinstance(answer, openai.types.responses.Response):
        return answer.output_text
    if isinstance(answer, openai.types.Completion):
        # Without the header of the answer, which is text here.
        return answer.choices[0].text.rpartition("<|message|>")[2]
    return str(answer.choices[0].message.content)


# ---- effects


@dataclass
class Outcome:
    """Answers and engine requests without and with a field."""

    plain: Any
    answer: Any
    before: GenerateRequest
    requests: list[GenerateRequest]

    @property
    def after(self) -> GenerateRequest:
        return self.requests[-1]

    @property
    def has_other_prompt(self) -> bool:
        return self.before.input_ids != self.after.input_ids


def is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def is_constrained(outcome: Outcome) -> None:
    assert outcome.before.new_matcher is None
    assert outcome.after.new_matcher is not None


def same_prompt(outcome: Outcome) -> None:
    assert not outcome.has_other_prompt
    assert read_text(outcome.answer) == "Hello"


def other_prompt(outcome: Outcome) -> None:
    assert outcome.has_other_prompt


def stays_without_tools(outcome: Outcome) -> None:
    assert not outcome.has_other_prompt


def samples_one_token(outcome: Outcome) -> None:
    assert outcome.after.sampling.max_new_tokens == 1
    assert outcome.before.sampling.max_new_tokens > 1


def samples_at(name: str) -> Callable[[Outcome], None]:
    def check(outcome: Outcome) -> None:
        assert getattr(outcome.after.sampling, name) == 0.5
        assert getattr(outcome.before.sampling, name) != 0.5

    return check


def has_the_seed(outcome: Outcome) -> None:
    assert outcome.after.request_id.split("/")[1].endswith(".7")


def is_a_stream(outcome: Outcome) -> None:
    assert len(outcome.answer) > 2


def stream_has_usage(outcome: Outcome) -> None:
    assert outcome.answer[-1].usage.prompt_tokens == len(outcome.after.input_ids)


def has_another_text(outcome: Outcome) -> None:
    assert outcome.has_other_prompt
    assert len(outcome.after.input_ids) < len(outcome.before.input_ids)


def ends_with(outcome: Outcome, text: str) -> None:
    assert outcome.answer.choices[0].text.endswith(text)
    assert outcome.answer.choices[0].finish_reason == "stop"


def ends_at_the_stop_text(outcome: Outcome) -> None:
    assert read_text(outcome.answer) == "He"


def has_log_probs(tokens: list[Any]) -> None:
    assert "".join(token.token for token in tokens) == "Hello"


def has_two_likely_tokens(tokens: list[Any]) -> None:
    has_log_probs(tokens)
    assert [len(token.top_logprobs) for token in tokens] == [2] * len(tokens)


def has_two_likely_completions(outcome: Outcome) -> None:
    listed = outcome.answer.choices[0].logprobs
    assert "".join(listed.tokens) == outcome.answer.choices[0].text
    assert [len(top) for top in listed.top_logprobs] == [2] * len(listed.tokens)


def has_token_ids(outcome: Outcome) -> None:
    [choice] = outcome.answer.choices
    assert choice.prompt_token_ids == outcome.after.input_ids
    assert len(choice.token_ids) == outcome.answer.usage.completion_tokens


def has_two_choices(outcome: Outcome) -> None:
    assert [choice.index for choice in outcome.answer.choices] == [0, 1]
    assert len(outcome.requests) == 2


def is_not_stored(outcome: Outcome) -> None:
    assert (outcome.plain.store, outcome.answer.store) == (True, False)


def continues_the_response(outcome: Outcome) -> None:
    before = outcome.before.input_ids
    assert outcome.after.input_ids[: len(before)] == before
    assert len(outcome.after.input_ids) > len(before)


COMMON: dict[str, Callable[[Outcome], None]] = {
    "stream": is_a_stream,
    "temperature": samples_at("temperature"),
    "top_p": samples_at("top_p"),
    "tools": other_prompt,
    "tool_choice": stays_without_tools,
    "seed": has_the_seed,
}
EFFECTS: dict[str, dict[str, Callable[[Outcome], None]]] = {
    "chat": COMMON
    | {
        "messages": same_prompt,
        "max_completion_tokens": samples_one_token,
        "max_tokens": samples_one_token,
        "reasoning_effort": other_prompt,
        "stop": ends_at_the_stop_text,
        "logprobs": lambda outcome: has_log_probs(outcome.answer.choices[0].logprobs.content),
        "top_logprobs": lambda outcome: has_two_likely_tokens(
            outcome.answer.choices[0].logprobs.content
        ),
        "n": has_two_choices,
        "response_format": same_prompt,
        "stream_options": same_prompt,
        "stream_options.include_usage": stream_has_usage,
    },
    "completions": {name: COMMON[name] for name in ("stream", "temperature", "top_p", "seed")}
    | {
        "prompt": has_another_text,
        "max_tokens": samples_one_token,
        "stop": lambda outcome: ends_with(outcome, "He"),
        "logprobs": has_two_likely_completions,
        "n": has_two_choices,
        "return_token_ids": has_token_ids,
        "stream_options": same_prompt,
        "stream_options.include_usage": stream_has_usage,
    },
    "responses": COMMON
    | {
        "input": same_prompt,
        "instructions": other_prompt,
        "previous_response_id": continues_the_response,
        "store": is_not_stored,
        "max_output_tokens": samples_one_token,
        "top_logprobs": lambda outcome: has_two_likely_tokens(
            outcome.answer.output[-1].content[0].logprobs
        ),
        "include": lambda outcome: has_log_probs(outcome.answer.output[-1].content[0].logprobs),
        "reasoning": same_prompt,
        "reasoning.effort": other_prompt,
        "text": same_prompt,
        "text.format": same_prompt,
    },
}
"""Check of each working field."""

ONE_TOKEN: dict[str, dict[str, Any]] = {
    "chat": {"max_tokens": 1},
    "responses": {"max_output_tokens": 1},
}
"""The policy has learned no answer to prompts of some fields, and would write a malformed one."""


def example(dialect: str, name: str) -> Any:
    return fields_by_name(ROWS[dialect])[name].example


NEEDED: dict[str, dict[str, dict[str, Any]]] = {
    "chat": {
        "tools": ONE_TOKEN["chat"],
        "tool_choice": {"tools": example("chat", "tools")},
        "reasoning_effort": ONE_TOKEN["chat"],
        "stream_options.include_usage": {"stream": True},
        "top_logprobs": {"logprobs": True},
    },
    "completions": {"stream_options.include_usage": {"stream": True}},
    "responses": {
        "tools": ONE_TOKEN["responses"],
        "tool_choice": {"tools": example("responses", "tools")},
        "reasoning.effort": ONE_TOKEN["responses"],
        "previous_response_id": ONE_TOKEN["responses"],
        "top_logprobs": {"include": example("responses", "include")},
    },
}
"""Other fields that the example of a field needs."""
