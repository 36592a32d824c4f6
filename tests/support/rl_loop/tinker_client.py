"""Requests of the official SDK to a server of the tiny model."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

import numpy as np
import pytest

from tests.support.rl_loop.tinker_server import KEY, RunningServer

tinker = pytest.importorskip("tinker")

MODEL = "openai/gpt-oss-20b"
TOKENS = [5, 17, 3, 99, 500, 42, 7]


def datum(tokens: list[int], **columns: Any) -> Any:
    text = tinker.ModelInput.from_ints(tokens[:-1])
    inputs = {"target_tokens": tokens[1:], **columns}
    return tinker.Datum(model_input=text, loss_fn_inputs=inputs)


def log_probs_of(result: Any) -> list[np.ndarray]:
    return [output["logprobs"].to_numpy() for output in result.loss_fn_outputs]


DATA = {"weights": [0.0, 1, 1, 1, 1, 1]}


def step(train: Any, learning_rate: float = 0.01) -> Any:
    """Send a pass and a step together, as recipes do."""
    passed = train.forward_backward([datum(TOKENS, **DATA)], "cross_entropy")
    stepped = train.optim_step(tinker.AdamParams(learning_rate=learning_rate))
    return passed.result(), stepped.result()


def call(
    server: RunningServer, path: str, body: bytes | None = b"{}", key: str = KEY, **headers: str
) -> int:
    """Send a request without the SDK, and return its status."""
    try:
        fetch(server, path, body, key, **headers)
    except urllib.error.HTTPError as error:
        assert "detail" in json.load(error)
        return error.code
    return 200


def fetch(
    server: RunningServer, path: str, body: bytes | None = b"{}", key: str = KEY, **headers: str
) -> bytes:
    """Send a request without the SDK, and return its answer. Raises HTTPError."""
    headers = {"X-API-Key": key, **headers}
    request = urllib.request.Request(f"{server.url}/api/v1/{path}", body, headers)
    with urllib.request.urlopen(request) as response:
        assert response.status == 200
        return bytes(response.read())
