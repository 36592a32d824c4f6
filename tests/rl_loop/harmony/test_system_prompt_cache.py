"""Prompt prefixes that are rendered once for all sessions."""

from __future__ import annotations

import pickle
import random
from dataclasses import replace
from typing import Any

import pytest

from rl_loop.gateway.request import TurnRequest
from rl_loop.harmony import prompt_prefix_cache
from rl_loop.harmony.codec import Harmony, PromptConfig, Tool
from rl_loop.harmony.prompt_prefix_cache import PromptPrefixCache
from rl_loop.harmony.vocabulary import GptOssVocabulary

BRIEF: dict[str, Any] = {"role": "developer", "content": "Be brief."}
HI: dict[str, Any] = {"role": "user", "content": "Hi"}
SEARCH = Tool(
    "search", "Searches.", {"type": "object", "properties": {"query": {"type": "string"}}}
)
REQUESTS = [
    TurnRequest((HI,)),
    TurnRequest((BRIEF, HI)),
    TurnRequest((BRIEF | {"content": "Be long."}, HI)),
    TurnRequest((BRIEF, BRIEF, HI)),
    TurnRequest((BRIEF, HI), tools=(SEARCH,)),
    TurnRequest((BRIEF, HI), tools=(replace(SEARCH, description="Finds."),)),
    TurnRequest((BRIEF, HI), tools=(replace(SEARCH, parameters=None),)),
    TurnRequest((BRIEF, HI), reasoning_effort="high"),
]


@pytest.fixture(scope="module")
def harmony() -> Harmony:
    return Harmony(GptOssVocabulary(), PromptConfig())


def rendered(opening: PromptPrefixCache, request: TurnRequest) -> list[int]:
    """Return the prefix of a request, rendered by ``opening`` as a session does."""
    first = len(request.messages) - 1
    key = request.conversation_keys(request.digests)[first]
    messages = request.messages[:first]
    return list(opening.render(key, messages, request.tools, request.reasoning_effort))


def expected(harmony: Harmony, request: TurnRequest) -> list[int]:
    prompt = harmony.render_prompt(
        request.messages[:-1], request.tools, reasoning_effort=request.reasoning_effort
    )
    return prompt[: len(prompt) - len(harmony.assistant_header)]


def test_cached_prefixes_equal_separately_rendered_ones(harmony: Harmony) -> None:
    opening = PromptPrefixCache(harmony)
    order = REQUESTS * 5
    random.Random(0).shuffle(order)
    for request in order:
        assert rendered(opening, request) == expected(harmony, request)
    different = {tuple(expected(harmony, request)) for request in REQUESTS}
    assert len(different) == len(REQUESTS)


def test_prefix_is_rendered_once_while_it_is_cached(
    harmony: Harmony, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_prefix_cache, "CACHED_PREFIXES", 2)
    calls: list[int] = []
    render_prompt = harmony.render_prompt

    def counted(messages: Any, *arguments: Any, **options: Any) -> list[int]:
        calls.append(REQUESTS.index(current))
        return render_prompt(messages, *arguments, **options)

    monkeypatch.setattr(harmony, "render_prompt", counted)
    opening = PromptPrefixCache(harmony)
    for number in (0, 1, 0, 2, 0, 1):
        current = REQUESTS[number]
        rendered(opening, current)
    # The third prefix replaces the least recently used one.
    assert calls == [0, 1, 2, 1]


def test_long_prefix_is_not_cached(harmony: Harmony, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_prefix_cache, "MAX_PREFIX_TOKENS", 3)
    opening = PromptPrefixCache(harmony)
    rendered(opening, REQUESTS[1])
    assert not opening._tokens


def test_pickled_codec_renders_equally(harmony: Harmony) -> None:
    request = REQUESTS[4]
    key = request.conversation_keys(request.digests)[len(request.messages)]
    keys = [key] * (len(request.messages) + 1)
    expected = harmony.render_conversation(request.messages, request.tools, [], keys=keys)
    copy = pickle.loads(pickle.dumps(harmony))
    assert copy.render_conversation(request.messages, request.tools, [], keys=keys) == expected
