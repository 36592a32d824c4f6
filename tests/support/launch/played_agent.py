"""External agent for tests of `gptoss play`: asks the policy once and scores its answer."""

from __future__ import annotations

from typing import Any

import openai


def tasks(split: str, seed: int, index: int) -> dict[str, Any]:
    return {"prompt": f"{split} {index}"}


def run(task: dict[str, Any], base_url: str, api_key: str) -> float:
    messages: list[Any] = [{"role": "user", "content": task["prompt"]}]
    with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
        answer = client.chat.completions.create(model="policy", messages=messages)
    return float(answer.choices[0].message.content == "8")
