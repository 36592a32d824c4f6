"""Output of tools and text of users of any content and length."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rl_loop.config.episode import EpisodeLimits, PurificationConfig
from rl_loop.data.trajectory import FinishReason, Trajectory
from rl_loop.engines.protocol import SamplingParams
from rl_loop.environments import RewardConfig, Task
from rl_loop.environments.base import Environment, StepResult
from rl_loop.environments.retool import ReToolEnvironment
from rl_loop.environments.scripted_messages import final
from rl_loop.environments.tool_calls import ToolError
from rl_loop.harmony.bounded_encoding import MAX_PIECE_CHARACTERS, encode_bounded, split_text
from rl_loop.harmony.codec import Harmony, ParsedMessage, ToolOutput
from rl_loop.harmony.vocabulary import harmony_encoding
from rl_loop.rollout.agent import run_episode
from rl_loop.rollout.observation import fair_share, truncate_observation, truncate_text
from rl_loop.rollout.purification import purifying
from rl_loop.tasks.episode_prompts import EpisodePrompt, EpisodePromptRenderer, UnusablePromptError
from tests.support.processor_speed import slowness
from tests.support.rl_loop.scripted_engine import ScriptedEngine

MEGABYTE = 1 << 20
RUNS = {
    "letters": "a", "capitals": "A", "replacement characters": "\ufffd", "spaces": " ", "tabs": "\t", "newlines": "\n",
    "digits": "1", "ideographs": "字", "combining marks": "\u0301", "apostrophes": "'", "dashes": "-", "zeros": "\0",
    "emoji": "\U0001f600", "no-break spaces": "\xa0", "surrogates": "\udc80", "slashes": "/", "mixed case": "aA",
    "carriage returns": "\r\n", "words": "word ", "special tokens": "<|end|>",
}  # fmt: skip
"""Text to repeat: one class of characters each, without the breaks of BPE, or ordinary text."""


class Answer:
    exit_code, error = 0, None

    def __init__(self, output: str) -> None:
        self.output = output


class OneMessageUser(Environment):
    """A user that sends the task's ground truth as a message. Then the episode ends."""

    said = False

    async def answer(self, text: str) -> StepResult:
        if self.said:
            return self.end_with_score(1.0)
        self.said = True
        return StepResult(user=self.task.ground_truth)


async def measure_lag(run: Any) -> tuple[Any, float]:
    """Return the result of ``run`` and the longest block of the event loop.

    The block is in seconds. Time in which the machine did not run this process does not count.
    """
    worst = 0.0
    task = asyncio.ensure_future(run)
    while not task.done():
        began, worked = time.perf_counter(), time.process_time()
        await asyncio.sleep(0.001)
        worst = max(worst, min(time.perf_counter() - began, time.process_time() - worked))
    return await task, worst


def least_lag(make: Any, attempts: int = 4) -> tuple[Any, float]:
    """Return the least lag of a few attempts, because a busy machine lengthens some of them.

    The lag is the one of the machine for which limits are stated (``slowness``).
    """
    least = 1e9
    for _ in range(attempts):
        result, lag = asyncio.run(measure_lag(make()))
        least = min(least, lag / slowness())
        if least < 0.05:
            break
    return result, least


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("who", ["tool", "user"])
def test_megabyte_of_text_blocks_the_event_loop_below_50_ms(
    request: pytest.FixtureRequest, run: str, who: str
) -> None:
    harmony: Harmony = request.getfixturevalue("full")
    text = RUNS[run] * (MEGABYTE // len(RUNS[run]))
    call = harmony.render_assistant([ParsedMessage("analysis", "python", "code", "x")], "<|call|>")
    answer = harmony.render_assistant([final("x")], "<|return|>")
    limits = EpisodeLimits(max_turns=2, max_episode_tokens=200_000, max_episode_seconds=100)

    async def execute(code: str) -> Any:
        return Answer(text)

    async def play() -> Trajectory:
        messages = [{"role": "user", "content": "Go."}]
        if who == "tool":
            environment: Environment = ReToolEnvironment(
                Task("t", messages, "1"), execute, RewardConfig()
            )
        else:
            environment = OneMessageUser(Task("t", messages, text), execute, RewardConfig())
        engine = ScriptedEngine([call if who == "tool" else answer, answer])
        return await run_episode(
            "t", environment, engine, harmony, limits, SamplingParams(500), seed=1
        )

    episode, lag = least_lag(play)
    assert lag < 0.05
    assert episode.finish_reason is FinishReason.STOP
    (said,) = (turn for turn in episode.turns if turn.role == who)
    assert "characters left out]" in said.text
    assert said.end - said.start < limits.max_observation_bytes + 100


@pytest.mark.parametrize("run", ["replacement characters", "words"])
def test_megabyte_of_error_in_a_retry_blocks_below_50_ms(full: Harmony, run: str) -> None:
    """Purification shows the error to the policy, and compares two different long calls."""
    text = RUNS[run] * (MEGABYTE // len(RUNS[run]))

    def call(code: str) -> list[int]:
        return full.render_assistant(
            [ParsedMessage("analysis", "python", "code", code)], "<|call|>"
        )

    # Before the measurement, because only the test renders the policy's turns on the event loop.
    turns = [
        call("x = 1\n" * 2000),
        call("y = 2\n" * 2000),
        full.render_assistant([final("x")], "<|return|>"),
    ]

    async def play() -> Trajectory:
        async def execute(code: str) -> Any:
            raise ToolError(text)

        environment = ReToolEnvironment(
            Task("t", [{"role": "user", "content": "Go."}], "1"), execute, RewardConfig()
        )
        limits = EpisodeLimits(max_turns=2, max_episode_tokens=400_000, max_episode_seconds=100)
        return await run_episode(
            "t",
            environment,
            ScriptedEngine(turns),
            full,
            limits,
            SamplingParams(20_000),
            seed=1,
            make_runner=purifying(PurificationConfig(retries=1)),
        )

    episode, lag = least_lag(play)
    assert lag < 0.05
    assert (episode.finish_reason, episode.tool_errors) == (FinishReason.STOP, 1)


@pytest.mark.parametrize("run", RUNS)
def test_encoding_time_is_not_quadratic(full: Harmony, tiny: Harmony, run: str) -> None:
    """64 KB need 8x the processor time of 8 KB. Quadratic time would be 64x."""

    def seconds(harmony: Harmony, size: int) -> float:
        text = (RUNS[run] * size)[:size].replace("\udc80", "\ufffd")
        began = time.thread_time()
        harmony.vocabulary.encode_text(text)
        return time.thread_time() - began

    for harmony in (full, tiny):
        # Two more attempts on a busy machine.
        attempts = (seconds(harmony, 65536) < 20 * seconds(harmony, 8192) + 0.05 for _ in range(3))
        assert any(attempts)


def reference(text: str) -> list[int]:
    return harmony_encoding().encode(text, disallowed_special=())


PIECES = st.sampled_from(
    ["word", " word", "don't", "DON'T", "x'll", "'", "A", "aB", "12", "12345", "  ", "\n", "\r\n", "\n/", "!?\n", " !",
     "\t", "字", "é", "e\u0301", "\U0001f600", "<|end|>", "\xa0", "//", "'s", "ÀB"]
)  # fmt: skip


@settings(deadline=None, max_examples=300)
@given(
    st.lists(PIECES, max_size=60).map("".join)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=80)
)
@example("don't" * 12)
@example("a  b\n\n  c" * 6)
def test_text_is_split_only_between_words_of_bpe(text: str) -> None:
    parts = list(split_text(text, longest=16, window=24))
    assert "".join(parts) == text
    if max((len(word) for word in _words(text)), default=0) <= 12:
        assert [token for part in parts for token in reference(part)] == reference(text)


def _words(text: str) -> list[str]:
    import regex

    from rl_loop.harmony.bounded_encoding import O200K_PATTERN

    return list(regex.findall(O200K_PATTERN, text))


@pytest.mark.parametrize("length", [MAX_PIECE_CHARACTERS + 1, 5000])
def test_bounded_encoding_of_ordinary_text_is_exact(length: int) -> None:
    code = 'def f(x):\n    """Twice x, isn\'t it?"""\n    return 2 * x  # 1234567\n\n\n' * 200
    assert encode_bounded(code[:length], reference) == reference(code[:length])
    dashes = ("-" * MAX_PIECE_CHARACTERS + "\n") * 8
    assert encode_bounded(dashes, reference) == reference(dashes)


def test_bounded_encoding_of_a_long_run_decodes_to_the_same_text() -> None:
    text = "a" * 5000 + " and then words"
    assert harmony_encoding().decode(encode_bounded(text, reference)) == text


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=6), st.integers(0, 2000))
def test_fair_share_is_the_largest_that_fits(sizes: list[int], total: int) -> None:
    share = fair_share(sizes, total)
    assert sum(min(size, share) for size in sizes) <= total
    if any(size > share for size in sizes):
        assert sum(min(size, share + 1) for size in sizes) > total


@settings(deadline=None)
@given(st.text(max_size=60), st.integers(2, 80))
def test_cut_text_keeps_its_beginning_and_end(text: str, limit: int) -> None:
    cut = truncate_text(text, limit)
    whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if len(whole.encode()) <= limit:
        assert cut == whole
        return
    match = re.fullmatch(r"(.*)\n\[(\d+) characters left out\]\n(.*)", cut, re.DOTALL)
    assert match is not None
    begin, left_out, end = match.groups()
    assert whole.startswith(begin)
    assert whole.endswith(end)
    assert len(begin.encode()) + len(end.encode()) <= limit
    assert int(left_out) + len(begin) + len(end) == len(text)


def test_only_the_longest_of_several_tool_results_are_cut() -> None:
    outputs = [
        ToolOutput("python", "analysis", text) for text in ("x" * 10_000, "short", "y" * 5000)
    ]
    cut, user = truncate_observation(outputs, "hello", 4000)
    assert (cut[1].text, user) == ("short", "hello")
    assert all(1900 < len(output.text) < 2100 for output in (cut[0], cut[2]))


@pytest.mark.parametrize("text", ["\udc80", "ok \ud83d", "\ud83d\ude00", "a\ud800b" * 1000])
def test_lone_surrogate_becomes_a_replacement_character(harmony: Harmony, text: str) -> None:
    call = harmony.render_assistant([ParsedMessage("analysis", "python", "code", "x")], "<|call|>")
    answer = harmony.render_assistant([final(r"\boxed{1}")], "<|return|>")

    async def execute(code: str) -> Any:
        return Answer(text)

    environment = ReToolEnvironment(
        Task("t", [{"role": "user", "content": "Go."}], "1"), execute, RewardConfig()
    )
    limits = EpisodeLimits(max_turns=2, max_episode_tokens=20_000)
    run = run_episode(
        "t",
        environment,
        ScriptedEngine([call, answer]),
        harmony,
        limits,
        SamplingParams(500),
        seed=1,
    )
    episode = asyncio.run(run)
    assert (episode.invalid, episode.reward) == (None, 1.0)
    expected = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert expected in episode.turns[2].text


# ---- prompts


@pytest.mark.parametrize(
    "content", ["word " * 3000, "a" * MEGABYTE, " " * MEGABYTE, "\udc80", None]
)
def test_unusable_prompt_names_its_task_quickly(harmony: Harmony, content: Any) -> None:
    began = time.process_time()
    with pytest.raises(UnusablePromptError, match="the prompt of task t7 "):
        EpisodePromptRenderer(harmony, 1000).render(
            "t7", EpisodePrompt([{"role": "user", "content": content}])
        )
    assert time.process_time() - began < 5 * slowness()


@settings(deadline=None, max_examples=50)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=300), st.integers(1024, 1500))
def test_prompt_that_surely_fits_is_within_the_limit(
    tiny: Harmony, text: str, max_tokens: int
) -> None:
    renderer = EpisodePromptRenderer(tiny, max_tokens)
    prompt = EpisodePrompt([{"role": "user", "content": text}])
    if renderer.fits_without_tokenizing(prompt):
        assert len(renderer.render("t", prompt)) < max_tokens
