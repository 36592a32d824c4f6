"""The policy that all tests of the gateway sample from; it is learned once."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from transformers import GptOssForCausalLM

from rl_loop.harmony.codec import Harmony
from tests.rl_loop.gateway.policy import Script, learned_model, tiny_config


@pytest.fixture(scope="session")
def script(tiny: Harmony) -> Script:
    return Script(tiny)


@pytest.fixture(scope="session")
def model(tiny: Harmony, script: Script) -> GptOssForCausalLM:
    return learned_model(tiny_config(tiny.vocabulary.size), script.lessons())


@pytest.fixture(scope="module", autouse=True)
def no_client_is_left() -> Iterator[None]:
    """Let OpenAI's clients that a test has not closed go now, when no event loop runs. Whatever loop runs when they go
    would be told to close connections of a loop that is closed, and a test of another file would fail."""
    yield
    gc.collect()
