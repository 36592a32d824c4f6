"""Required calls and JSON schemas: what is sampled, and how it is marked in the training data."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import jsonschema
import numpy as np
import openai
import pytest
import torch
from agents import Agent, RunConfig, Runner
from agents.models.openai_provider import OpenAIProvider
from pydantic import BaseModel
from transformers import GptOssForCausalLM

from rl_loop.algorithms.config import AlgorithmConfig
from rl_loop.chat.codec import ChatCodec
from rl_loop.chat.messages import ParsedMessage
from rl_loop.chat.tools import Tool
from rl_loop.chatml.codec import ChatMl
from rl_loop.chatml.prompt_config import ChatMlConfig
from rl_loop.chatml.vocabulary import tiny_vocabulary
from rl_loop.data.samples import to_samples
from rl_loop.data.trajectory import Trajectory, TrajectoryGroup
from rl_loop.engines.embedded.sampling import allowed_log_probs, sample
from rl_loop.engines.protocol import GenerateRequest, GenerateResult, SamplingParams
from rl_loop.gateway.constraint import GrammarError, compile_constraint
from rl_loop.gateway.request import TurnConstraint
from rl_loop.harmony.codec import Harmony
from tests.support.rl_loop.gateway.chats import TOOLS, say
from tests.support.rl_loop.gateway.policy import ADD, ARGUMENTS, Script, build_engine
from tests.support.rl_loop.gateway.scripted import talking
from tests.support.rl_loop.gateway.serving import Served, check_capture, serving
from tests.support.waiting import PATIENCE_SECONDS, wait_until_async

pytest.importorskip("llguidance")

HI: list[Any] = [{"role": "user", "content": "Hi"}]
SUM: list[Any] = [{"role": "user", "content": "1+1"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"word": {"enum": ["Hello", "Bye"]}, "sure": {"type": "boolean"}},
    "required": ["word", "sure"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "greeting", "schema": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "add"}}


# ---- with the embedded engine


def test_answer_has_the_schema_and_is_marked(tiny: Harmony, model: GptOssForCausalLM) -> None:
    async def run() -> None:
        async with serving(tiny, model) as served, served.client() as client:
            assert (await say(client, HI)).content == "Hello"
            message = await say(client, HI, response_format=FORMAT)
            jsonschema.validate(json.loads(message.content), SCHEMA)
            # The thoughts before the answer are free.
            assert message.reasoning == "ok"

            free, constrained = served.trajectories()
            check_capture(served, [free, constrained])
            assert free.constrained == []
            prompt = int(np.argmax(constrained.loss_mask))
            assert constrained.constrained == [(prompt, len(constrained))]
            # The log-probs are those of the policy, which would not write this.
            assert constrained.rollout_log_probs.min() < -3
            assert free.rollout_log_probs.min() > -1
            assert spliced(constrained).tolist() == constrained.loss_mask.tolist()

    asyncio.run(run())


def spliced(trajectory: Trajectory) -> np.ndarray:
    """Return the column of a training sample."""
    groups = [TrajectoryGroup(trajectory.task_id, [trajectory])]
    samples = to_samples(groups, AlgorithmConfig(), version=1)
    assert samples.is_off_policy is not None
    return samples.is_off_policy


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_call_is_required(tiny: Harmony, model: GptOssForCausalLM, choice: Any) -> None:
    async def run() -> None:
        async with serving(tiny, model) as served, served.client() as client:
            assert (await say(client, HI, tools=TOOLS)).content == "Hello"
            again = await say(client, HI, tools=TOOLS, tool_choice=choice)
            assert again.content is None
            [function] = [entry.function for entry in again.tool_calls]
            assert function.name == "add"
            jsonschema.validate(json.loads(function.arguments), ADD.parameters)

            # Only the required turn is marked.
            free, required = served.trajectories()
            assert free.constrained == []
            assert required.constrained == [(required.turns[-1].start, len(required))]

    asyncio.run(run())


def test_schema_allows_a_call_if_tools_are_offered(tiny: Harmony, model: GptOssForCausalLM) -> None:
    async def run() -> None:
        async with serving(tiny, model) as served, served.client() as client:
            message = await say(client, SUM, tools=TOOLS, response_format=FORMAT)
            assert message.tool_calls[0].function.arguments == ARGUMENTS

    asyncio.run(run())


def test_streamed_and_plain_answers_are_equal(tiny: Harmony, model: GptOssForCausalLM) -> None:
    async def run() -> None:
        async with serving(tiny, model) as served, served.client() as client:
            plain = await say(client, HI, response_format=FORMAT)
            stream = await client.chat.completions.create(
                model="any", messages=HI, response_format=FORMAT, stream=True
            )
            texts = [chunk.choices[0].delta.content or "" async for chunk in stream]
            assert "".join(texts) == plain.content
            assert sum(bool(text) for text in texts) > 1

            response = await client.responses.create(
                model="any",
                input="Hi",
                text={"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
            )
            assert response.output_text == plain.content
            assert response.text is not None and response.text.format is not None
            assert response.text.format.type == "json_schema"

    asyncio.run(run())


def test_constraint_continues_after_a_weight_sync(tiny: Harmony, model: GptOssForCausalLM) -> None:
    in_third_step, may_continue = threading.Event(), threading.Event()
    steps = itertools.count(1)

    def hold_third_step(*_: object) -> None:
        if next(steps) == 3:
            in_third_step.set()
            assert may_continue.wait(PATIENCE_SECONDS)

    async def run() -> None:
        async with serving(tiny, model) as served, served.client() as client:
            plain = await say(client, HI, response_format=FORMAT)
            decoder = served.engine.engine._model.model
            hook = decoder.register_forward_pre_hook(hold_third_step)
            asked = asyncio.create_task(say(client, HI, response_format=FORMAT))
            await wait_until_async(in_third_step.is_set)
            # The sync waits for the step that runs.
            syncing = asyncio.create_task(
                served.engine.sync_weights(model.named_parameters(), version=2)
            )
            await asyncio.sleep(0.05)
            may_continue.set()
            await syncing
            hook.remove()
            assert (await asked).content == plain.content
            assert len(served.engine.begun) > 2

    asyncio.run(run())


class Greeting(BaseModel):
    """Answer that clients ask for."""

    word: Literal["Hello", "Bye"]
    sure: bool


async def parsed_chat(served: Served) -> Any:
    async with served.client() as client:
        completion = await client.chat.completions.parse(
            model="any", messages=HI, response_format=Greeting
        )
        return completion.choices[0].message.parsed


async def parsed_response(served: Served) -> Any:
    async with served.client() as client:
        response = await client.responses.parse(model="any", input="Hi", text_format=Greeting)
        return response.output_parsed


async def output_of_agent(served: Served, *, use_responses: bool) -> Any:
    async with served.client() as client:
        provider = OpenAIProvider(openai_client=client, use_responses=use_responses)
        agent = Agent(name="greeter", output_type=Greeting)
        config = RunConfig(model_provider=provider, tracing_disabled=True)
        return (await Runner.run(agent, "Hi", run_config=config)).final_output


async def output_of_langchain(served: Served) -> Any:
    langchain = pytest.importorskip("langchain_openai")
    model = langchain.ChatOpenAI(
        model="any", base_url=served.gateway.base_url, api_key=served.session.api_key
    )
    return await model.with_structured_output(Greeting, method="json_schema").ainvoke("Hi")


@pytest.mark.parametrize(
    "ask",
    [
        parsed_chat,
        parsed_response,
        partial(output_of_agent, use_responses=False),
        partial(output_of_agent, use_responses=True),
        output_of_langchain,
    ],
)
def test_clients_get_objects(
    tiny: Harmony, model: GptOssForCausalLM, ask: Callable[[Served], Awaitable[Any]]
) -> None:
    async def run() -> None:
        async with serving(tiny, model) as served:
            assert isinstance(await ask(served), Greeting)

    asyncio.run(run())


class BrokenMatcher:
    """A constraint that allows two tokens and then fails."""

    def __init__(self, size: int) -> None:
        self._mask = np.ones(size, dtype=np.bool_)
        self._accepted = 0

    def allowed(self) -> np.ndarray:
        return self._mask

    def accept(self, tokens: Sequence[int]) -> None:
        self._accepted += len(tokens)
        if self._accepted > 2:
            raise RuntimeError("too complex")


def test_failed_constraint_ends_only_its_request(
    tiny: Harmony, model: GptOssForCausalLM, script: Script
) -> None:
    size = tiny.vocabulary.size
    sampling = SamplingParams(20, temperature=0.0, stop_token_ids=tiny.stop_token_ids)
    free = GenerateRequest("a/0/0", script.prompt("Hi"), sampling)
    broken = replace(free, request_id="b/0/0", new_matcher=lambda: BrokenMatcher(size))

    async def run() -> None:
        engine = await build_engine(model)
        try:
            results = await asyncio.gather(
                engine.generate(broken), engine.generate(free), return_exceptions=True
            )
            assert isinstance(results[0], RuntimeError) and "too complex" in str(results[0])
            assert isinstance(results[1], GenerateResult)
            assert results[1].output_ids == script.says("Hello", thinks=True)
        finally:
            await engine.close()

    asyncio.run(run())


# ---- requests


def test_unsupported_schema_is_refused_before_sampling(
    tiny: Harmony, model: GptOssForCausalLM
) -> None:
    unsupported = {"type": "array", "uniqueItems": True}
    wrong: list[Any] = [
        {"type": "json_schema", "json_schema": {"name": "x", "schema": unsupported}},
        {"type": "json_schema", "json_schema": {"name": "x"}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nope"}}},
        {"type": "json_schema"},
        "json",
    ]

    async def run() -> None:
        async with serving(tiny, model) as served, served.client(max_retries=0) as client:
            for response_format in wrong:
                with pytest.raises(openai.BadRequestError) as refusal:
                    await say(client, HI, response_format=response_format)
                assert str(refusal.value.param).startswith("response_format")
            for choice in ("required", NAMED):
                with pytest.raises(openai.BadRequestError) as refusal:
                    await say(client, HI, tool_choice=choice)
                assert refusal.value.param == "tool_choice"
            assert served.engine.begun == []
            assert served.session.end is None

    asyncio.run(run())


def test_engine_without_constraints_refuses_them(tiny: Harmony) -> None:
    async def run() -> None:
        async with talking(tiny, []) as talk:
            with pytest.raises(openai.BadRequestError, match="cannot constrain") as refusal:
                await say(talk.client, HI, response_format={"type": "json_object"})
            assert refusal.value.code == "unsupported_parameter"
            assert refusal.value.param == "response_format"
            assert talk.policy.requests == []

    asyncio.run(run())


# ---- grammars


@pytest.fixture(scope="module")
def chatml() -> ChatMl:
    return ChatMl(tiny_vocabulary(600, "Hello Bye word sure"), ChatMlConfig())


def turn(codec: ChatCodec, *messages: ParsedMessage) -> list[int]:
    return codec.render_assistant(messages)


def answer(text: str) -> ParsedMessage:
    return ParsedMessage("final", None, None, text)


def call(name: str, arguments: str) -> ParsedMessage:
    return ParsedMessage("commentary", f"functions.{name}", "<|constrain|>json", arguments)


GREETING = '{"word": "Bye", "sure": true}'
THOUGHT = ParsedMessage("analysis", None, None, "H<|end|>\nm")
BOTH = TurnConstraint("x", SCHEMA, (ADD, Tool("größe-1.x", "", None)))
REQUIRED = TurnConstraint("x", None, BOTH.tools)


@pytest.mark.parametrize("format", ["harmony", "chatml"])
def test_grammar_accepts_exactly_the_allowed_turns(
    tiny: Harmony, chatml: ChatMl, format: str
) -> None:
    codec: ChatCodec = tiny if format == "harmony" else chatml
    adds = turn(codec, call("add", ARGUMENTS))
    free = turn(codec, call("größe-1.x", '{"a": [{}]}'))
    greets = turn(codec, answer(GREETING))
    cases = [
        (BOTH, greets, True),
        (BOTH, adds, True),
        (BOTH, free, True),
        (BOTH, turn(codec, answer("Hello")), False),
        (BOTH, turn(codec, answer('{"word": "Bye"}')), False),
        (BOTH, turn(codec, call("add", '{"a": 1}')), False),
        (BOTH, turn(codec, call("other", ARGUMENTS)), False),
        (REQUIRED, adds, True),
        (REQUIRED, greets, False),
    ]
    if format == "harmony":
        cases += [
            (BOTH, turn(codec, THOUGHT, answer(GREETING)), True),
            (REQUIRED, turn(codec, THOUGHT, call("add", ARGUMENTS)), True),
            (REQUIRED, turn(codec, THOUGHT), False),
        ]
    for constraint, ids, is_allowed in cases:
        new_matcher = compile_constraint(codec, constraint)
        matcher = new_matcher([])
        allowed = []
        for token in ids:
            allowed.append(bool(matcher.allowed()[token]))
            if not allowed[-1]:
                break
            matcher.accept([token])
        assert all(allowed) == is_allowed, (constraint, codec.decode(ids))
        if is_allowed:
            # An interrupted turn continues behind its first tokens.
            half = len(ids) // 2
            continued = new_matcher(ids[:half])
            assert continued.allowed()[ids[half]]
            continued.accept(ids[half:])
        else:
            with pytest.raises(GrammarError):
                new_matcher(ids)


def test_unlikely_allowed_token_is_sampled() -> None:
    log_probs = torch.log_softmax(torch.tensor([[0.0, -5000.0, -5001.0], [0.0, 1.0, 2.0]]), -1)
    masked = allowed_log_probs(log_probs, [np.array([False, True, True]), None])
    assert masked[0].exp().tolist() == pytest.approx([0.0, 0.7311, 0.2689], abs=1e-3)
    assert torch.equal(masked[1], log_probs[1])
    for greedy in (False, True):
        for uniform in (0.0, 0.5, 0.9999):
            tokens = sample(
                masked,
                torch.tensor([uniform, 0.0], dtype=torch.float64),
                torch.tensor([greedy, greedy]),
                torch.tensor([1.0, 1.0], dtype=torch.float64),
            )
            expected = 1 if greedy or uniform < 0.9 else 2
            assert tokens[0] == expected
