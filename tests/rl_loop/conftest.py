"""Fixtures shared by the tests of ``rl_loop``."""

from __future__ import annotations

import pytest

from rl_loop.environments.arithmetic import vocabulary_text
from rl_loop.harmony.codec import Harmony, PromptConfig
from rl_loop.harmony.vocabulary import GptOssVocabulary, TinyVocabulary
from tests.support.rl_loop.prompts import SHORT_PROMPT


@pytest.fixture(scope="session")
def tiny() -> Harmony:
    """A small vocabulary and the shortest prompts."""
    return Harmony(TinyVocabulary(640, vocabulary_text()), SHORT_PROMPT)


@pytest.fixture(scope="session")
def full() -> Harmony:
    """The vocabulary of the released models and their full prompts."""
    return Harmony(GptOssVocabulary(), PromptConfig())


@pytest.fixture(params=["tiny", "full"])
def harmony(request: pytest.FixtureRequest) -> Harmony:
    return request.getfixturevalue(request.param)
