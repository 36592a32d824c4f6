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
    TurnRequest((BRIEF, HI), (SEARCH,)),
    TurnRequest((BRIEF, HI), (replace(SEARCH, description="Finds."),)),
    TurnRequest((BRIEF, HI), (replace(SEARCH, parameters=None),)),
    TurnRequest((BRIEF, HI), reasoning_effort="high"),
]


@pytest.fixture(scope="module")
def harmony() -> Harmony:
    return Harmony(GptOssVocabulary(), PromptConfig())


def rendered(opening: PromptPrefixCache, request: TurnRequest) -> list[int]:
    """Return what ``opening`` makes of a request, as a session asks for it."""
    first = len(request.messages) - 1
    key = request.conversation_keys(request.digests)[first]
    messages = request.messages[:first]
    return list(opening.render(key, messages, request.tools, request.reasoning_effort))


def expected(harmony: Harmony, request: TurnRequest) -> list[int]:
    prompt = harmony.render_prompt(
        request.messages[:-1], request.tools, reasoning_effort=request.reasoning_effort
    )
    return prompt[: len(prompt) - len(harmony.assistant_header)]


def test_every_opening_is_rendered_as_if_it_were_the_only_one(harmony: Harmony) -> None:
    opening = PromptPrefixCache(harmony)
    order = REQUESTS * 5
    random.Random(0).shuffle(order)
    for request in order:
        assert rendered(opening, request) == expected(harmony, request)
    different = {tuple(expected(harmony, request)) for request in REQUESTS}
    assert len(different) == len(REQUESTS)


def test_an_opening_is_rendered_once_while_it_is_in_use(
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
    # The third one takes the place of that which was used longest ago.
    assert calls == [0, 1, 2, 1]


def test_a_long_opening_is_not_kept(harmony: Harmony, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_prefix_cache, "MAX_PREFIX_TOKENS", 3)
    opening = PromptPrefixCache(harmony)
    rendered(opening, REQUESTS[1])
    assert not opening._tokens


def test_a_codec_travels_to_another_process_without_what_it_remembers(harmony: Harmony) -> None:
    request = REQUESTS[4]
    key = request.conversation_keys(request.digests)[len(request.messages)]
    keys = [key] * (len(request.messages) + 1)
    expected = harmony.render_conversation(request.messages, request.tools, [], keys=keys)
    copy = pickle.loads(pickle.dumps(harmony))
    assert copy.render_conversation(request.messages, request.tools, [], keys=keys) == expected
