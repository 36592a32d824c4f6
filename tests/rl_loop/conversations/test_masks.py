"""Trained tokens of conversations equal the tokens that inference would sample.

Other conversations are rejected.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from rl_loop.conversations.config import Format
from rl_loop.conversations.conversation import make_conversation
from rl_loop.conversations.errors import ConversationError
from rl_loop.conversations.formats import detect_format, read_conversation
from rl_loop.conversations.harmony import HarmonyRenderer, RenderedSample, RenderOptions
from rl_loop.conversations.rows import UnparsedRecord
from rl_loop.harmony.codec import Harmony, Tool
from rl_loop.harmony.vocabulary import GptOssVocabulary
from rl_loop.tasks.demonstrations import (
    PlayedEpisode,
    _as_conversation,
    render_as_sampled,
    render_by_user_turn,
)
from tests.support.rl_loop import harmony_reference as reference
from tests.support.rl_loop.conversations.malformed import MALFORMED
from tests.support.rl_loop.conversations.written_by_hand import CASES, Case
from tests.support.rl_loop.prompts import SHORT_PROMPT
from tests.support.rl_loop.tasks.demonstrations import CHECKERS, generate_task, scripted_episode

LONG = 100_000


def rendered(case: Case, harmony: Harmony, max_tokens: int = LONG) -> list[RenderedSample]:
    options = RenderOptions(case.history, max_tokens, "reject")  # type: ignore[arg-type]
    samples, rejected = HarmonyRenderer(harmony, options).render(
        read_conversation(case.record, case.form)
    )
    assert rejected == []
    return samples


def shown(sample: RenderedSample, harmony: Harmony) -> str:
    """Return the text of a sample, with trained tokens between « and »."""
    text, run, learned = "", list[int](), False
    for token, mask in zip([*sample.token_ids, None], [*sample.loss_mask, None], strict=True):
        if mask is not learned and run:
            decoded = harmony.decode(run)
            text += f"«{decoded}»" if learned else decoded
            run = []
        learned = bool(mask)
        run += [] if token is None else [token]
    return text


def test_at_least_30_cases_cover_all_formats() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 30
    assert {case.form for case in CASES} == {"messages", "sharegpt", "harmony"}
    assert {case.history for case in CASES} == {"append", "harmony"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_harmony_mask_equals_the_one_written_by_hand(case: Case) -> None:
    harmony = Harmony(GptOssVocabulary(), case.prompt)
    samples = rendered(case, harmony)
    assert [shown(sample, harmony) for sample in samples] == case.samples

    # The ids equal the ids of openai-harmony for the text.
    for sample, text in zip(samples, case.samples, strict=True):
        ids, mask = [], []
        for number, part in enumerate(re.split("[«»]", text)):
            encoded = reference.encode(part)
            ids += encoded
            mask += [number % 2 == 1] * len(encoded)
        assert sample.token_ids == ids
        assert sample.loss_mask == mask


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_small_vocabulary_gives_the_same_mask(case: Case, tiny: Harmony) -> None:
    harmony = Harmony(tiny.vocabulary, case.prompt)
    samples = rendered(case, harmony)
    assert [shown(sample, harmony) for sample in samples] == case.samples


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_format_of_conversations_is_detected(case: Case) -> None:
    assert detect_format(case.record) == case.form
    harmony = Harmony(GptOssVocabulary(), case.prompt)
    assert rendered(replace(case, form="auto"), harmony) == rendered(case, harmony)


PROMPTS = [
    case
    for case in CASES
    if case.form == "messages"
    and case.history == "harmony"
    # The codec's prompt has the reasoning effort of the codec's configuration.
    and "reasoning_effort" not in case.record
]


@pytest.mark.parametrize("case", PROMPTS, ids=lambda case: case.name)
def test_context_of_a_trained_turn_is_the_inference_prompt(case: Case) -> None:
    """The streams use a faster rendering than the codec."""
    harmony = Harmony(GptOssVocabulary(), case.prompt)
    tools = [
        Tool(**{"description": "", "parameters": None} | tool["function"])
        for tool in case.record.get("tools", [])
    ]
    known = ("role", "content", "tool_calls", "thinking", "tool_call_id")
    messages = [
        {key: value for key, value in message.items() if key in known}
        for message in case.record["messages"]
    ]

    samples = rendered(case, harmony)
    asked = [i + 1 for i, message in enumerate(messages) if message["role"] == "user"]
    # A turn of weight 0 is not a sample.
    for sample, end in zip(reversed(samples), reversed(asked), strict=False):
        prompt = harmony.render_prompt(messages[:end], tools)
        assert sample.token_ids[: len(prompt)] == prompt
        assert not any(sample.loss_mask[: len(prompt)])
        assert sample.loss_mask[len(prompt)]


KINDS = [
    ("incident", {"level": 3}),
    ("gsm8k", {}),
    ("gsm8k", {"tools": True}),
    ("instructions", {"turns": 2, "checkers": CHECKERS, "constraints": 1}),
]


def as_record(episode: PlayedEpisode) -> list[tuple[int, dict[str, object]]]:
    messages = list(episode.prompt)
    for turn in episode.turns:
        messages += _as_conversation(turn)
    return list(enumerate(messages))


@pytest.mark.parametrize(("environment", "options"), KINDS)
def test_recorded_episode_trains_like_its_demonstration(
    environment: str, options: dict[str, object], harmony: Harmony
) -> None:
    harmony = Harmony(harmony.vocabulary, SHORT_PROMPT)
    for seed in range(4):
        task = replace(generate_task(environment, seed, **options), environment=environment)
        episode = replace(scripted_episode(task, seed), builtin_tools=())
        conversation = make_conversation(as_record(episode), tools=list(episode.tools))

        whole, by_turn = (
            HarmonyRenderer(harmony, RenderOptions(history, LONG, "reject")).render(conversation)[0]
            for history in ("append", "harmony")
        )
        shown_whole = render_as_sampled(episode, harmony)
        assert [(s.token_ids, s.loss_mask) for s in whole] == [
            (shown_whole.token_ids, [bool(mask) for mask in shown_whole.loss_mask])
        ]
        shown_by_turn = render_by_user_turn(episode, harmony)
        assert [s.token_ids for s in by_turn] == [s.token_ids for s in shown_by_turn]
        assert [s.loss_mask for s in by_turn] == [
            [bool(mask) for mask in s.loss_mask] for s in shown_by_turn
        ]


@pytest.mark.parametrize(
    ("form", "content", "reason"),
    [case[1:] for case in MALFORMED],
    ids=[case[0] for case in MALFORMED],
)
def test_malformed_conversation_is_rejected_with_the_reason(
    form: Format, content: bytes, reason: str, full: Harmony
) -> None:
    renderer = HarmonyRenderer(full, RenderOptions("harmony", LONG, "reject"))
    with pytest.raises(ConversationError, match=re.escape(reason)):
        renderer.render(read_conversation(UnparsedRecord(1, content).parse({}), form))


def test_at_least_20_malformed_lines_are_covered() -> None:
    assert len(MALFORMED) >= 20


def test_too_long_sample_is_rejected_or_truncated(full: Harmony) -> None:
    case = next(case for case in CASES if case.name.startswith("a later turn"))
    conversation = read_conversation(case.record, case.form)
    first, second = rendered(replace(case), Harmony(GptOssVocabulary(), SHORT_PROMPT))
    limit = len(second.token_ids) - 1
    assert len(first.token_ids) <= limit

    harmony = Harmony(GptOssVocabulary(), SHORT_PROMPT)
    kept, rejected = HarmonyRenderer(harmony, RenderOptions("harmony", limit, "reject")).render(
        conversation
    )
    assert kept == [first]
    assert rejected == [
        f"turn 1 of the user: it has {limit + 1} tokens, more than data.max_tokens ({limit})"
    ]

    kept, rejected = HarmonyRenderer(harmony, RenderOptions("harmony", limit, "truncate")).render(
        conversation
    )
    assert rejected == []
    assert kept[1].token_ids == second.token_ids[:-1]
    assert kept[1].loss_mask == second.loss_mask[:-1]

    few = second.loss_mask.index(True)
    kept, rejected = HarmonyRenderer(harmony, RenderOptions("harmony", few, "truncate")).render(
        conversation
    )
    assert f"its first {few} tokens (data.max_tokens) have no token in the loss" in rejected[-1]


def test_cached_system_prompts_are_not_mixed_up(full: Harmony) -> None:
    """A prompt prefix is rendered once for all conversations with this prefix."""
    cases = [replace(case, history="append") for case in CASES if case.prompt != SHORT_PROMPT]
    for effort in ("high", None):
        record = cases[0].record | {"reasoning_effort": effort}
        cases.append(replace(cases[0], record=record))

    renderer = HarmonyRenderer(full, RenderOptions("append", LONG, "reject"))
    prefixes = set()
    for _ in range(2):
        for case in cases:
            (sample,), _ = renderer.render(read_conversation(case.record, case.form))
            (alone,) = rendered(case, full)
            assert sample == alone
            prefixes.add(tuple(sample.token_ids[: sample.loss_mask.index(True)]))
    assert len(prefixes) == len(cases)


def test_every_mask_has_trained_and_other_tokens() -> None:
    for case in CASES:
        for sample in rendered(case, Harmony(GptOssVocabulary(), case.prompt)):
            assert 0 < sum(sample.loss_mask) < len(sample.loss_mask)
