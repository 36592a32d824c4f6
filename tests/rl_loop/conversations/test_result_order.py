"""Results of calls are rendered after their calls in any order of the file."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from rl_loop.chatml.codec import ChatMl
from rl_loop.chatml.prompt_config import ChatMlConfig
from rl_loop.chatml.vocabulary import tiny_vocabulary
from rl_loop.conversations.errors import ConversationError
from rl_loop.conversations.harmony import RenderOptions
from rl_loop.conversations.renderers import conversation_renderer
from rl_loop.environments.arithmetic import vocabulary_text
from rl_loop.harmony.codec import Harmony

CHATML = ChatMl(tiny_vocabulary(1300, vocabulary_text()), ChatMlConfig())
OPTIONS = RenderOptions("append", 4000, "reject")


@pytest.fixture(params=["harmony", "chatml"])
def codec(request: pytest.FixtureRequest, full: Harmony) -> Any:
    return full if request.param == "harmony" else CHATML


def call(number: int, call_id: str | None, name: str = "f") -> dict[str, Any]:
    function = {"name": name, "arguments": f'{{"a": "CALL{number}"}}'}
    return {"id": call_id, "type": "function", "function": function}


def record(calls: list[dict[str, Any]], results: list[dict[str, Any]]) -> dict[str, Any]:
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        *({"role": "tool"} | result for result in results),
        {"role": "assistant", "content": "a"},
    ]
    return {"messages": messages}


def rendered(codec: Any, given: dict[str, Any]) -> str:
    [sample], _ = conversation_renderer(codec, OPTIONS).render_record(given, "auto")
    return codec.decode(sample.token_ids)


def check_order(codec: Any, text: str, count: int) -> None:
    """Check that results follow their calls: one by one in Harmony, after all calls in ChatML."""
    places = [(text.index(f"CALL{n}"), text.index(f"RESULT{n}")) for n in range(count)]
    assert places == sorted(places)
    assert [result for _, result in places] == sorted(result for _, result in places)
    if codec is not CHATML:
        flat = [place for pair in places for place in pair]
        assert flat == sorted(flat)


IDS = [{"content": f"RESULT{n}", "tool_call_id": f"c{n}"} for n in range(3)]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("names", ["fff", "fgf"])
def test_results_are_rendered_after_their_calls(
    codec: Any, order: tuple[int, ...], names: str
) -> None:
    calls = [call(n, f"c{n}", name) for n, name in enumerate(names)]
    check_order(codec, rendered(codec, record(calls, [IDS[n] for n in order])), 3)


def test_result_without_id_belongs_to_the_remaining_call(codec: Any) -> None:
    calls = [call(n, f"c{n}") for n in range(2)]
    nameless = {"content": "RESULT0"}
    check_order(codec, rendered(codec, record(calls, [IDS[1], nameless])), 2)
    check_order(codec, rendered(codec, record(calls, [nameless, IDS[1]])), 2)

    # Results without ids belong to calls by order or by function name.
    calls = [call(0, None, "f"), call(1, None, "g")]
    results = [{"content": f"RESULT{n}"} for n in range(2)]
    check_order(codec, rendered(codec, record(calls, results)), 2)
    named = [results[1] | {"name": "g"}, results[0] | {"name": "f"}]
    check_order(codec, rendered(codec, record(calls, named)), 2)


def test_result_of_an_unknown_call_is_rejected(codec: Any) -> None:
    calls = [call(n, f"c{n}") for n in range(2)]
    other = {"content": "RESULT0", "tool_call_id": "another"}
    for results in ([other, IDS[1]], [IDS[1], other], [IDS[0], IDS[0]]):
        with pytest.raises(ConversationError, match="call"):
            rendered(codec, record(calls, results))


def test_results_in_a_prompt_are_rendered_after_their_calls(codec: Any) -> None:
    calls = [call(n, f"c{n}") for n in range(3)]
    for order in itertools.permutations(range(3)):
        messages = record(calls, [IDS[n] for n in order])["messages"][:-1]
        text = codec.decode(codec.render_conversation(messages, (), []))
        places = [text.index(f"RESULT{n}") for n in range(3)]
        assert places == sorted(places)
