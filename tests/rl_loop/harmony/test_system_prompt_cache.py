"""System prompts that are rendered once for all sessions."""

from __future__ import annotations

import pickle
import random
from dataclasses import replace
from typing import Any

import pytest

from rl_loop.gateway.request import TurnRequest
from rl_loop.harmony import system_prompt_cache
from rl_loop.harmony.codec import Harmony, PromptConfig, Tool
from rl_loop.harmony.system_prompt_cache import SystemPromptCache
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


def rendered(cache: SystemPromptCache, request: TurnRequest) -> list[int]:
    """Return the system prompt of a request, rendered by ``cache`` as a session does."""
    first = len(request.messages) - 1
    key = request.conversation_keys(request.digests)[first]
    messages = request.messages[:first]
    return list(cache.render(key, messages, request.tools, request.reasoning_effort))


def expected(harmony: Harmony, request: TurnRequest) -> list[int]:
    prompt = harmony.render_prompt(
        request.messages[:-1], request.tools, reasoning_effort=request.reasoning_effort
    )
    return prompt[: len(prompt) - len(harmony.assistant_header)]


def test_cached_system_prompts_equal_new_renderings(harmony: Harmony) -> None:
    cache = SystemPromptCache(harmony)
    order = REQUESTS * 5
    random.Random(0).shuffle(order)
    for request in order:
        assert rendered(cache, request) == expected(harmony, request)
    different = {tuple(expected(harmony, request)) for request in REQUESTS}
    assert len(different) == len(REQUESTS)


def test_system_prompt_is_rendered_once_while_cached(
    harmony: Harmony, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system_prompt_cache, "CACHED_PROMPTS", 2)
    calls: list[int] = []
    render_prompt = harmony.render_prompt

    def counted(messages: Any, *arguments: Any, **options: Any) -> list[int]:
        calls.append(REQUESTS.index(current))
        return render_prompt(messages, *arguments, **options)

    monkeypatch.setattr(harmony, "render_prompt", counted)
    cache = SystemPromptCache(harmony)
    for number in (0, 1, 0, 2, 0, 1):
        current = REQUESTS[number]
        rendered(cache, current)
    # The third system prompt replaces the least recently used one.
    assert calls == [0, 1, 2, 1]


def test_long_system_prompt_is_not_cached(
    harmony: Harmony, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system_prompt_cache, "MAX_CACHED_TOKENS", 3)
    cache = SystemPromptCache(harmony)
    rendered(cache, REQUESTS[1])
    assert not cache._tokens


def test_pickled_codec_renders_equally(harmony: Harmony) -> None:
    request = REQUESTS[4]
    key = request.conversation_keys(request.digests)[len(request.messages)]
    keys = [key] * (len(request.messages) + 1)
    expected = harmony.render_conversation(request.messages, request.tools, [], keys=keys)
    copy = pickle.loads(pickle.dumps(harmony))
    assert copy.render_conversation(request.messages, request.tools, [], keys=keys) == expected
