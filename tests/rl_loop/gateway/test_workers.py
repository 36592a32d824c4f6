"""Separate processes for long requests: slow, large and killed ones."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import dataclass
from typing import Any

import openai
import psutil
import pytest

from rl_loop.chat.codec import ChatCodec
from rl_loop.gateway import jobs as jobs_module
from rl_loop.gateway.body import SHORT_BODY_BYTES
from rl_loop.gateway.errors import ApiError
from rl_loop.gateway.jobs import RenderJob, RequestWorkers, TurnJob
from rl_loop.harmony.codec import Harmony
from tests.support.processes import kill, list_children
from tests.support.rl_loop.gateway.scripted import Talk, talking

FINAL = "<|channel|>final<|message|>done<|return|>"
LONG = "1 " * 1500 + "x" * SHORT_BODY_BYTES


@dataclass(frozen=True)
class Spinning:
    """A job that never ends."""

    def run(self, codec: ChatCodec) -> int:
        while True:
            pass


@dataclass(frozen=True)
class Hungry:
    """A job that takes all memory."""

    def run(self, codec: ChatCodec) -> int:
        return len(bytearray(1 << 40))


@dataclass(frozen=True)
class Deadly:
    """A job that kills its process."""

    def run(self, codec: ChatCodec) -> int:
        os.kill(os.getpid(), signal.SIGSEGV)
        return 0


@dataclass(frozen=True)
class Refused:
    """A job that raises an error for the client."""

    def run(self, codec: ChatCodec) -> int:
        raise ApiError(400, "invalid_request", "no", parameter="messages", kind="model_error")


@dataclass(frozen=True)
class Sum:
    """A job that returns at once."""

    def run(self, codec: ChatCodec) -> int:
        return 1 + 1


def find_server(talk: Talk) -> psutil.Process:
    server = talk.gateway._workers._pool._server
    assert server is not None
    return psutil.Process(server.pid)


async def chat(talk: Talk, text: str, **more: Any) -> str | None:
    create: Any = talk.client.chat.completions.create
    completion = await create(model="m", messages=[{"role": "user", "content": text}], **more)
    return completion.choices[0].message.content


def test_expensive_job_fails_only_its_own_request(
    full: Harmony, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs_module, "JOB_SECONDS", 0.3)

    async def run() -> None:
        async with talking(full, [FINAL] * 6) as talk:
            for job in (Spinning(), Hungry(), Deadly()):
                with pytest.raises(ApiError, match="needs more than") as error:
                    await talk.session.run(job)
                assert error.value.status == 413
                # The session and the processes keep working.
                assert talk.session.end is None
                assert await talk.session.run(Sum()) == 2
                assert await chat(talk, "Hi") == "done"
                assert await chat(talk, LONG) == "done"

    asyncio.run(run())


def test_error_of_a_worker_arrives_complete(full: Harmony) -> None:
    async def run() -> None:
        async with talking(full, [FINAL] * 2) as talk:
            with pytest.raises(ApiError) as error:
                await talk.session.run(Refused())
            assert error.value.status == 400
            assert error.value.body() == {
                "error": {
                    "message": "no",
                    "type": "model_error",
                    "param": "messages",
                    "code": "invalid_request",
                }
            }
            assert talk.session.end is None
            assert await talk.session.run(Sum()) == 2
            assert await chat(talk, "Hi") == "done"
            assert await chat(talk, LONG) == "done"

    asyncio.run(run())


def test_killed_processes_are_replaced(full: Harmony) -> None:
    async def run() -> None:
        async with talking(full, [FINAL] * 3) as talk:
            assert await chat(talk, LONG) == "done"
            for worker in list_children(find_server(talk)):
                kill(worker)
            assert await chat(talk, LONG) == "done"
            server = find_server(talk)
            server.kill()
            server.wait(20)
            assert await chat(talk, LONG) == "done"

    asyncio.run(run())


def test_processes_that_do_not_start_raise_an_error(
    full: Harmony, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with talking(full, [FINAL]) as talk:
            monkeypatch.setattr("rl_loop.forked_pool.sys.executable", "/nowhere/python")
            with pytest.raises(openai.InternalServerError, match="does not start") as error:
                await chat(talk, LONG)
            assert error.value.status_code == 503
            # Short requests need no process.
            assert await chat(talk, "Hi") == "done"
            assert talk.session.end is None
            monkeypatch.undo()

    asyncio.run(run())


def test_processes_start_when_needed_and_stop_with_gateway(full: Harmony) -> None:
    async def run() -> list[psutil.Process]:
        async with talking(full, [FINAL]) as talk:
            assert await chat(talk, "Hi") == "done"
            assert talk.gateway._workers._pool._server is None
            # Jobs that run when the gateway is closed do not start other processes.
            running = [talk.gateway._workers.begin(Spinning()) for _ in range(2)]
            async with asyncio.timeout(60):
                while talk.gateway._workers._pool._server is None:
                    await asyncio.sleep(0.05)
                while len(find_server(talk).children()) < 2:
                    await asyncio.sleep(0.05)
            processes = [find_server(talk), *find_server(talk).children()]
        for task in running:
            with pytest.raises(ApiError, match="was closed"):
                await task
        return processes

    _, alive = psutil.wait_procs(asyncio.run(run()), timeout=20)
    assert not alive


def test_job_of_a_disconnected_client_keeps_its_process(full: Harmony) -> None:
    """Otherwise one key could occupy all processes by disconnecting repeatedly."""

    async def run() -> None:
        async with talking(full, []) as talk:
            first = asyncio.create_task(talk.session.run(Spinning()))
            await asyncio.sleep(0.1)
            first.cancel()
            second = asyncio.create_task(talk.session.run(Sum()))
            await asyncio.sleep(0.5)
            assert not second.done()
            # Another session has a process at once.
            other = talk.gateway.open_session("other")
            assert await other.run(Sum()) == 2

    asyncio.run(run())


def test_jobs_in_processes_give_the_same_prompts(
    full: Harmony, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All APIs, with tools, a second turn, and reasoning that the format drops."""
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    turns = [f"{thought}{FINAL}", f"{thought}{FINAL}", f"{thought}{FINAL}"]
    tool = {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}

    async def prompts(*, is_long: bool) -> list[list[int]]:
        if is_long:
            monkeypatch.setattr("rl_loop.gateway.server.SHORT_BODY_BYTES", 0)
            monkeypatch.setattr("rl_loop.gateway.prompts.SHORT_CHARACTERS", 0)
            monkeypatch.setattr("rl_loop.gateway.session.SHORT_TOKENS", 0)
        began: list[Any] = []
        begin = RequestWorkers.begin

        def counted(workers: RequestWorkers, job: Any) -> Any:
            began.append(job)
            return begin(workers, job)

        monkeypatch.setattr(RequestWorkers, "begin", counted)
        async with talking(full, turns, history="harmony") as talk:
            create: Any = talk.client.chat.completions.create
            messages = [{"role": "user", "content": "Hi é \U0001f600"}]
            tools = [{"type": "function", "function": tool}]
            await create(model="m", messages=messages, tools=tools)
            messages += [
                {"role": "assistant", "content": "done"},
                {"role": "user", "content": "More"},
            ]
            await create(model="m", messages=messages, tools=tools)
            respond: Any = talk.client.responses.create
            response = await respond(
                model="m",
                input="Hi",
                instructions="Be short.",
                tools=[{"type": "function", **tool}],
            )
            assert response.output_text == "done"
            assert response.instructions == "Be short."
            assert response.tools[0].name == "look"
            assert bool(began) is is_long
            assert len(began) == (9 if is_long else 0)
            return [request.input_ids for request in talk.policy.requests]

    short = asyncio.run(prompts(is_long=False))
    monkeypatch.undo()
    assert asyncio.run(prompts(is_long=True)) == short


def test_worker_does_not_return_tokens_beyond_the_limit(full: Harmony) -> None:
    async def run() -> None:
        async with talking(full, []) as talk:
            text = "word " * 100_000
            job = RenderJob(
                messages=({"role": "user", "content": text},),
                first_number=0,
                tools=(),
                reasoning_effort=None,
                keys=(),
                stored=None,
                max_tokens=8000,
            )
            rendered = await talk.session.run(job)
            assert rendered.new_ids == []
            assert rendered.too_many == len(full.render_prompt(job.messages))
            with pytest.raises(openai.BadRequestError, match=f"{rendered.too_many} tokens"):
                await chat(talk, text)

    asyncio.run(run())


def test_turn_is_read_in_process_when_no_worker_can(
    full: Harmony, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client did not cause the failure, and an episode must not lose a turn."""
    turn = "<|channel|>final<|message|>" + "so " * 300 + "<|return|>"

    async def run() -> None:
        async with talking(full, [turn]) as talk:
            read = talk.session.run

            async def refuse(job: Any, **options: Any) -> Any:
                if not isinstance(job, TurnJob):
                    return await read(job, **options)
                raise ApiError(503, "internal_error", "no process")

            monkeypatch.setattr(talk.session, "run", refuse)
            assert await chat(talk, "Hi") == "so " * 300

    asyncio.run(run())


def test_total_body_size_of_a_key_is_bounded(
    full: Harmony, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rl_loop.gateway.server.MAX_BODIES_BYTES", 100_000)

    async def run() -> None:
        async with talking(full, [FINAL] * 8, seconds=0.5) as talk:
            asked = [chat(talk, "1 " * 3000) for _ in range(40)]
            answers = await asyncio.gather(*asked, return_exceptions=True)
            refused = [each for each in answers if isinstance(each, openai.RateLimitError)]
            assert 0 < len(refused) < 40
            assert "MiB" in str(refused[0])
            assert talk.session.body_bytes == 0

    asyncio.run(run())


def build_messages(count: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": ""}] * count


def test_continued_response_counts_towards_the_message_limit(
    full: Harmony, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise every continued response would add work for the event loop."""
    monkeypatch.setattr("rl_loop.gateway.forest.MAX_MESSAGES", 8)

    async def run() -> None:
        async with talking(full, [FINAL] * 2) as talk:
            respond: Any = talk.client.responses.create
            first = await respond(model="m", input=build_messages(6))
            with pytest.raises(openai.BadRequestError, match="more than 8 messages"):
                await respond(model="m", input=build_messages(2), previous_response_id=first.id)
            await respond(model="m", input=build_messages(1), previous_response_id=first.id)

    asyncio.run(run())
