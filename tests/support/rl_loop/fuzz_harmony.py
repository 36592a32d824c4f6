"""Fuzzing of sampled tokens for a limited time.

    python -m tests.support.rl_loop.fuzz_harmony SECONDS [SEED]

Each round samples ids (random, assembled from pieces of Harmony, or mutations of turns rendered by
openai-harmony) and plays them through the agent loop. Every episode must end with a known reason
and hold exactly the sampled ids, and no tool result may hold a special token.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections import Counter

from rl_loop.config.episode import EpisodeLimits
from rl_loop.data.trajectory import FinishReason
from rl_loop.engines.protocol import SamplingParams
from rl_loop.environments import ENVIRONMENTS, RewardConfig, Task, arithmetic, make_environment
from rl_loop.harmony.codec import Harmony, PromptConfig
from rl_loop.harmony.vocabulary import (
    FIRST_SPECIAL_ID,
    SPECIAL_TOKENS,
    GptOssVocabulary,
    TinyVocabulary,
    harmony_encoding,
)
from rl_loop.rollout.agent import run_episode
from tests.support.rl_loop import harmony_reference as reference
from tests.support.rl_loop.scripted_engine import ScriptedEngine

PIECES = [
    *SPECIAL_TOKENS, "analysis", "final", "commentary", "assistant", "user", "system", "tool", " to=", " to=python",
    " to=functions.fetch_email", " to=functions.submit_report", " json", " code", "\n", "é", "\x00", "😀", "{", "}",
    '{"email": 1}',     "<|end|>", "print(1)", r"\boxed{1}", "",
]  # fmt: skip
TOOLS = [
    "python", "functions.python", "functions.fetch_email", "functions.query_logs", "browser.open", "nothing",
]  # fmt: skip
LIMITS = EpisodeLimits(
    max_turns=4,
    max_episode_tokens=3000,
    max_episode_seconds=60,
    max_tool_calls=5,
    max_sampled_tokens=400,
)


def sampled_turn(harmony: Harmony, rng: random.Random) -> list[int]:
    """Return the ids of one turn, ended like by an engine: by a stop token or by the limit."""
    vocabulary = harmony.vocabulary
    kind = rng.randrange(4)
    if kind == 0:
        ids = [rng.randrange(vocabulary.size) for _ in range(rng.randrange(1, 40))]
    elif kind == 1:
        text = "".join(rng.choice(PIECES) for _ in range(rng.randrange(1, 14)))
        ids = vocabulary.from_harmony(harmony_encoding().encode(text, allowed_special="all"))
    else:
        messages = [reference.assistant("so", "analysis")] * rng.randrange(2)
        if rng.random() < 0.7:
            channel = rng.choice(["analysis", "commentary"])
            content_type = rng.choice([None, "code", "json", "<|constrain|>json"])
            arguments = rng.choice(["print(2)", "{", "[[", '{"email": "m1"}', ""])
            messages.append(
                reference.assistant(arguments, channel, rng.choice(TOOLS), content_type)
            )
        else:
            content_type = rng.choice([None, None, "<|constrain|>json"])
            messages.append(
                reference.assistant(rng.choice([r"\boxed{1}", ""]), "final", None, content_type)
            )
        place: reference.RecipientPlace = rng.choice(["role", "channel"])
        ids = vocabulary.from_harmony(reference.sampled_turn(messages, place))
        for _ in range(rng.choice([0, 0, 1, 3])):
            place = rng.randrange(len(ids))
            ids[place : place + rng.randrange(2)] = [
                rng.randrange(vocabulary.size)
            ] * rng.randrange(2)
    ids = ids[:390] or [0]
    stops = [i for i, token in enumerate(ids) if token in harmony.stop_token_ids]
    return ids[: stops[0] + 1] if stops else [*ids, rng.choice(harmony.stop_token_ids)]


def play(harmony: Harmony, rng: random.Random) -> FinishReason:
    kind = ENVIRONMENTS.resolve(rng.choice(["retool", "incident", "gsm8k"]))
    options = {"tools": True} if kind.__name__.startswith("Gsm8k") else {}
    index = rng.randrange(100)
    generated = kind.generate("train", 0, index, kind.Options.model_validate(options))
    task = Task(**{**vars(generated)})
    turns = [sampled_turn(harmony, rng) for _ in range(5)]
    engine = ScriptedEngine(turns)
    environment = make_environment(task, arithmetic.interpret, RewardConfig())
    episode = asyncio.run(
        run_episode("t", environment, engine, harmony, LIMITS, SamplingParams(300), seed=1)
    )
    expected = [token for result in engine.results for token in result.output_ids]
    ids_of_episode = episode.token_ids.tolist()
    kept = episode.token_ids[episode.loss_mask].tolist()
    assert kept == expected, "an episode holds other tokens than were sampled"
    prompt = harmony.render_prompt(
        environment.prompt(), environment.tools(), environment.builtin_tools()
    )
    assert ids_of_episode[: len(prompt)] == prompt
    for turn in episode.turns:
        if turn.role == "tool":
            ids = harmony.vocabulary.to_harmony(ids_of_episode[turn.start : turn.end])
            special = sum(token >= FIRST_SPECIAL_ID for token in ids)
            assert special % 4 == 1, "a tool's answer holds a special token"
    assert episode.invalid is None, episode.invalid
    assert episode.finish_reason in FinishReason
    assert (episode.format_error is not None) == (
        episode.finish_reason is FinishReason.FORMAT_ERROR
    )
    return episode.finish_reason


def fuzz(seconds: float, seed: int = 0, rounds: int | None = None) -> Counter[FinishReason]:
    """Run rounds until the time is over or ``rounds`` are done, and count the finish reasons."""
    short = PromptConfig(
        model_identity=None,
        knowledge_cutoff=None,
        reasoning_effort=None,
        channels=False,
        describe_builtin_tools=False,
    )
    harmonies = [
        Harmony(TinyVocabulary(640, arithmetic.vocabulary_text()), short), Harmony(GptOssVocabulary(), PromptConfig())
    ]  # fmt: skip
    ends: Counter[FinishReason] = Counter()
    until = time.monotonic() + seconds
    while time.monotonic() < until and ends.total() != rounds:
        number = ends.total()
        try:
            ends[play(harmonies[number % 2], random.Random(f"{seed}/{number}"))] += 1
        except BaseException:
            print(f"failed in round {number} of seed {seed}", file=sys.stderr)
            raise
    return ends


if __name__ == "__main__":
    print(dict(fuzz(float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)))
