"""Every row of the tables of answer fields, in answers of the embedded engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, get_args

import aiohttp
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response
from pydantic import BaseModel
from transformers import GptOssForCausalLM

from rl_loop.gateway.answer_fields import ANSWERS, AnswerFields
from rl_loop.harmony.codec import Harmony
from tests.support.rl_loop.gateway.chats import TOOLS
from tests.support.rl_loop.gateway.serving import SETTINGS, Served, serving

DECLARED: dict[str, type[BaseModel]] = {
    "Chat completions": ChatCompletion,
    "Chunks of chat completions": ChatCompletionChunk,
    "Completions and their chunks": Completion,
    "Responses": Response,
}
CHAT = {"model": "x", "messages": [{"role": "user", "content": "Hi"}]}
LISTED = CHAT | {"logprobs": True, "top_logprobs": 1}
CALLING = {"model": "x", "messages": [{"role": "user", "content": "1+1"}], "tools": TOOLS}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
COMPLETION = {
    "model": "x",
    "prompt": "<|start|>user<|message|>Hi<|end|><|start|>assistant",
    "logprobs": 1,
    "return_token_ids": True,
}
TOOL = {"type": "function"} | TOOLS[0]["function"]
REQUESTS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "Chat completions": [("chat/completions", LISTED), ("chat/completions", CALLING)],
    "Chunks of chat completions": [
        ("chat/completions", LISTED | STREAM),
        ("chat/completions", CALLING | STREAM),
    ],
    "Completions and their chunks": [
        ("completions", COMPLETION),
        ("completions", COMPLETION | STREAM),
    ],
    "Responses": [
        (
            "responses",
            {
                "model": "x",
                "input": "Hi",
                "instructions": "Be brief.",
                "temperature": 0.5,
                "top_p": 0.5,
                "include": ["message.output_text.logprobs"],
                "top_logprobs": 1,
            },
        ),
        (
            "responses",
            {
                "model": "x",
                "input": "1+1",
                "tools": [TOOL],
                "max_output_tokens": 1,
                "reasoning": {"effort": "low"},
            },
        ),
    ],
}
"""Requests that set all fields of an answer that the gateway can set."""
UNDESCRIBED = (
    "choices.logprobs.top_logprobs.",
    "choices.message.tool_calls.",
    "output.",
    "text.format.",
    "tools.",
)
"""Objects of several kinds, or with keys of the client. Their fields have no rows."""


def models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in get_args(annotation) for model in models(inner)]


def declared(model: type[BaseModel], rows: AnswerFields, prefix: str = "") -> Iterator[str]:
    """Yield the client's fields. Objects without a value, and unions, have one row."""
    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        yield path
        inner = models(field.annotation)
        if len(inner) == 1 and rows.get(path) is not None and rows[path].is_set:
            yield from declared(inner[0], rows, f"{path}.")


def values(answer: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the paths of all values of an answer. Entries of lists have the path of the list."""
    if isinstance(answer, list):
        for entry in answer:
            yield from values(entry, prefix)
        return
    if not isinstance(answer, dict):
        return
    for name, value in answer.items():
        path = f"{prefix}{name}"
        yield path, value
        yield from values(value, f"{path}.")


@pytest.mark.parametrize("kind", ANSWERS)
def test_every_field_of_the_client_has_a_row(kind: str) -> None:
    rows = ANSWERS[kind]
    official = set(declared(DECLARED[kind], rows))
    assert official == {name for name, row in rows.items() if not row.is_extension}


async def send(served: Served, path: str, body: dict[str, Any]) -> list[Any]:
    """Return the JSON of an answer, or of the chunks of a stream."""
    headers = {"Authorization": f"Bearer {served.session.api_key}"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{served.gateway.base_url}/{path}", json=body, headers=headers) as answer,
    ):
        text = await answer.text()
        assert answer.status == 200, text
    if not body.get("stream"):
        return [json.loads(text)]
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return list(map(json.loads, lines))


@pytest.mark.parametrize("kind", ANSWERS)
def test_rows_describe_the_answers(tiny: Harmony, model: GptOssForCausalLM, kind: str) -> None:
    settings = replace(SETTINGS, is_episode=False)

    async def run() -> None:
        found: dict[str, list[Any]] = {}
        async with serving(tiny, model, settings) as served:
            earlier = ""
            for path, body in REQUESTS[kind]:
                if path == "responses" and earlier:
                    body = body | {"previous_response_id": earlier}
                for answer in await send(served, path, body):
                    earlier = answer["id"]
                    for name, value in values(answer):
                        found.setdefault(name, []).append(value)
        for name, row in ANSWERS[kind].items():
            has_value = any(value not in (None, [], {}) for value in found.get(name, []))
            assert has_value == row.is_set, name
        listed = {name for name in found if not name.startswith(UNDESCRIBED)}
        assert listed <= ANSWERS[kind].keys()

    asyncio.run(run())
