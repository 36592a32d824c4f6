"""Agents as users write them: plain HTTP or OpenAI's client, without imports of this project.

State that must survive several attempts of a run is kept in a file.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any


def ask(
    base_url: str, api_key: str, messages: list[dict[str, str]], **options: int
) -> dict[str, Any]:
    body = {"model": "x", "messages": messages, **options}
    return post(f"{base_url}/chat/completions", api_key, body)


def post(url: str, api_key: str, body: dict[str, Any]) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def plain(task: dict[str, Any], base_url: str, api_key: str) -> dict[str, float]:
    print("what an agent prints is no answer")
    answer = ask(base_url, api_key, [user(task["prompt"])])
    right = answer["choices"][0]["message"]["content"] == task["answer"]
    return {"score": float(right), "politeness": 0.25}


async def with_openai(task: dict[str, Any], base_url: str, api_key: str) -> float:
    import openai  # takes 0.7 s of processor time in every agent's process

    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        answer = await client.responses.create(model="x", input=task["prompt"])
        return float(answer.output_text == task["answer"])


def branching(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """Continue one conversation in two ways, and hold another one separately."""
    first = [user(task["prompt"])]
    said = ask(base_url, api_key, first)["choices"][0]["message"]["content"]
    first.append({"role": "assistant", "content": said})
    for text in ("More", "Again"):
        ask(base_url, api_key, [*first, user(text)])
    ask(base_url, api_key, [user("Count")])
    return 0.5


def planned(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """Ask by the task's plan: [number of the response to continue from or None, max_tokens]."""
    talks: list[list[dict[str, Any]]] = []
    for number, (parent, max_tokens) in enumerate(task["plan"]):
        before = talks[parent] if parent is not None else []
        messages = [*before, user(f"Question {number}")]
        limit = {"max_tokens": max_tokens} if max_tokens is not None else {}
        said = ask(base_url, api_key, messages, **limit)["choices"][0]["message"]["content"]
        talks.append([*messages, {"role": "assistant", "content": said or ""}])
    return 1.0


def posting(task: dict[str, Any], base_url: str, api_key: str) -> None:
    answer = ask(base_url, api_key, [user(task["prompt"])])
    url = f"{base_url}/rewards"
    # Posted twice: the second value counts.
    post(url, api_key, {"reward": 0.1})
    post(url, api_key, {"reward": 0.5})
    post(url, api_key, {"reward": {"score": 0.25}, "response_id": answer["id"]})
    for body in ({"reward": float("nan")}, {"reward": 1, "response_id": "none"}, {"more": 1}):
        try:
            post(url, api_key, body)
        except urllib.error.HTTPError as error:
            assert error.code in (400, 404)
        else:
            raise AssertionError(body)


def silent(task: dict[str, Any], base_url: str, api_key: str) -> None:
    ask(base_url, api_key, [user(task["prompt"])])


def idle(task: dict[str, Any], base_url: str, api_key: str) -> float:
    return 1.0


def wrong_parts(task: dict[str, Any], base_url: str, api_key: str) -> dict[str, float]:
    ask(base_url, api_key, [user(task["prompt"])])
    return {"score": 1.0, "tone": 1.0}


def broken(task: dict[str, Any], base_url: str, api_key: str) -> float:
    count(task)
    ask(base_url, api_key, [user(task["prompt"])])
    raise ConnectionError("the database is away")


def broken_once(task: dict[str, Any], base_url: str, api_key: str) -> float:
    if count(task) == 1:
        ask(base_url, api_key, [user(task["prompt"])])
        raise ConnectionError("the database is away")
    return plain(task, base_url, api_key)["score"]


def killed_once(task: dict[str, Any], base_url: str, api_key: str) -> float:
    if count(task) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(task, base_url, api_key)["score"]


def killed_by_an_answer(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """Be killed, as by a response that crashes a library of the agent."""
    ask(base_url, api_key, [user(task["prompt"])])
    os.kill(os.getpid(), signal.SIGSEGV)
    return 1.0


def killed_before_the_policy(task: dict[str, Any], base_url: str, api_key: str) -> float:
    os.kill(os.getpid(), signal.SIGSEGV)
    return 1.0


def greedy_for_memory(task: dict[str, Any], base_url: str, api_key: str) -> float:
    return float(len(bytearray(3 << 30)))


def hanging(task: dict[str, Any], base_url: str, api_key: str) -> float:
    ask(base_url, api_key, [user(task["prompt"])])
    Path(task["file"]).write_text(str(os.getpid()))
    threading.Event().wait()
    return 1.0


async def sleeping(task: dict[str, Any], base_url: str, api_key: str) -> float:
    await asyncio.to_thread(ask, base_url, api_key, [user(task["prompt"])])
    await asyncio.sleep(3600)
    return 1.0


def talkative(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """Continue until the policy is refused."""
    messages = [user(task["prompt"])]
    while True:
        said = ask(base_url, api_key, messages)["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": said or ""}, user("More")]


def two_talks(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """Hold two conversations. Longer responses are better."""
    said = ""
    for text in (task["prompt"], "Count"):
        message = ask(base_url, api_key, [user(text)])["choices"][0]["message"]
        said += message["content"] + message.get("reasoning", "")
    return min(1.0, len(said) / 400)


def exiting(task: dict[str, Any], base_url: str, api_key: str) -> float:
    sys.exit("enough")


def count(task: dict[str, Any]) -> int:
    """Count how often an episode has started."""
    path = Path(task["file"])
    times = int(path.read_text()) + 1 if path.exists() else 1
    path.write_text(str(times))
    time.sleep(0.01)
    return times


def tasks(split: str, seed: int, index: int) -> dict[str, Any]:
    return {"prompt": f"Hi {split} {index}", "answer": "Hello", "index": index}


def tasks_without_prompt(split: str, seed: int, index: int) -> dict[str, Any]:
    return {"question": f"Hi {split} {index}"}


def tasks_with_a_list_as_prompt(split: str, seed: int, index: int) -> dict[str, Any]:
    return {"prompt": ["Hi"]}


def tasks_as_texts(split: str, seed: int, index: int) -> str:
    return "Hi"


def adding(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """Act like the agent loop with ``tests.rl_loop.agents.test_same_episodes.Adding``."""
    messages: list[dict[str, Any]] = [user(task["prompt"])]
    follow_ups = list(task["follow_ups"])
    while True:
        body = {"model": "x", "messages": messages, "tools": [task["tool"]]}
        choice = post(f"{base_url}/chat/completions", api_key, body)["choices"][0]
        message = choice["message"]
        messages.append(message)
        if choice["finish_reason"] == "length":
            return 0.0

        calls = message.get("tool_calls") or ()
        for call in calls:
            total = sum(json.loads(call["function"]["arguments"])["terms"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(total)})
        if calls:
            continue
        if not follow_ups:
            return float(message["content"] == task["answer"])
        messages.append(user(follow_ups.pop(0)))
