"""The agent loop: one episode, token in and token out.

    ids = prompt
    repeat: sample a turn from ids; append exactly what was sampled; let the environment act on it;
            append what tools answered or the user said

Nothing is rendered twice. The loss mask is 1 exactly on what was sampled."""

import asyncio
import copy
import hashlib
import random
import time
from dataclasses import replace
from functools import partial
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from rl_loop.engines.protocol import GenerateRequest, GenerateResult, RolloutEngine, SamplingParams
from rl_loop.environments.base import Environment, StepResult
from rl_loop.harmony import FormatError, Harmony
from rl_loop.purification import Attempt, PurificationConfig, Purifier, snapshot
from rl_loop.trajectory import FinishReason, Trajectory, Turn, WeightVersionSpan


class EpisodeLimits(BaseModel):
    """Where an episode ends without the agent's doing."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    max_turns: int = Field(4, gt=0)
    """Assistant turns per episode; the last may not call a tool usefully any more."""
    max_tokens: int = Field(8192, gt=0)
    """Tokens of a whole episode, prompt and tool outputs included."""
    max_tool_calls: int | None = Field(None, gt=0)
    """Tool calls of a whole episode; null for no limit."""
    max_sampled_tokens: int | None = Field(None, gt=0)
    """Sampled tokens of a whole episode; null for no limit but max_tokens."""
    episode_seconds: float = Field(600.0, gt=0)
    """Wall-clock limit of one episode."""
    truncated_episodes: Literal["penalise", "mask"] = "penalise"
    """What a limit ends counts as a failure, or is left out of training (but not of the group's mean)."""


async def run_episode(
    task_id: str,
    environment: Environment,
    engine: RolloutEngine,
    harmony: Harmony,
    limits: EpisodeLimits,
    sampling: SamplingParams,
    *,
    seed: int,
    routed_experts: bool = False,
    purification: PurificationConfig | None = None,
) -> Trajectory:
    """Run one episode to its end. ``sampling.max_new_tokens`` is the limit of one turn; stop ids and seed are set here.

    The same seed, weights and task give the same episode, whatever else the engine is doing. Raises ValueError if the
    prompt leaves no room to answer."""
    deadline = time.monotonic() + limits.episode_seconds
    prompt = harmony.render_prompt(environment.prompt(), environment.tools(), environment.builtin_tools())
    if len(prompt) >= limits.max_tokens:
        length = f"has {len(prompt)} tokens; rollout.max_tokens is {limits.max_tokens}"
        raise ValueError(f"the prompt of task {task_id} {length}")
    episode = Trajectory(task_id, [], [], [])
    _append(episode, harmony, "prompt", prompt)
    end = partial(_end, episode, limits)

    async def sample(name: str, ids: list[int]) -> GenerateResult | None:
        room, _ = _room(episode, len(ids), limits, sampling.max_new_tokens)
        params = replace(sampling, max_new_tokens=room, stop_token_ids=harmony.stop_token_ids)
        request = GenerateRequest(f"{task_id}/{seed}/{name}", ids, params, routed_experts)
        return await _sample(engine, request, deadline) if room > 0 else None

    purifier = None
    if purification is not None:
        score = partial(engine.score, temperature=sampling.temperature or 1.0)
        purifier = Purifier(purification, environment, harmony, limits.max_tokens, sample, score)
    result = StepResult()
    unread: list[int] = []  # what tools answered or the user said; part of the episode once a turn was sampled from it
    for turn in range(limits.max_turns):
        prefix = episode.token_ids + unread
        _, limit = _room(episode, len(prefix), limits, sampling.max_new_tokens)
        sampled = await sample(str(turn), prefix)
        if sampled is None:
            return end(environment.unfinished(), limit)
        if not sampled.output_ids:
            return end(environment.unfinished(), sampled.finish_reason)
        if turn:
            episode.reusable_tokens += len(episode)
            episode.cached_tokens += min(len(episode), sampled.cached_tokens)
        if unread:
            _append(episode, harmony, "tool" if result.tool_outputs else "user", unread)
        before = copy.deepcopy(episode) if purifier else episode
        _append(episode, harmony, "assistant", sampled.output_ids, sampled)
        if sampled.finish_reason is not FinishReason.STOP:
            stopped = sampled.finish_reason
            return end(environment.unfinished(), limit if stopped is FinishReason.LENGTH else stopped)
        messages = harmony.parse(sampled.output_ids)
        if isinstance(messages, FormatError):
            return end(environment.illegal(messages.kind), FinishReason.FORMAT_ERROR)
        state = snapshot(environment) if purifier else {}
        result = await environment.step(messages)
        chance = random.Random(f"{task_id}/{seed}/{turn}").random()
        if purifier and result.tool_errors and not result.done and chance < purifier.config.probability:
            failed = Attempt(prefix, sampled, messages, result, len(sampled.output_ids))
            if (pure := await purifier.purified(failed, state)) is not None:
                result = pure.result
                vars(episode).update(vars(before))
                _append(episode, harmony, "assistant", pure.sampled.output_ids, pure.sampled)
                episode.grafted.append((len(prefix) + pure.kept, len(episode)))
        episode.tool_calls += result.tool_calls
        episode.tool_errors += result.tool_errors
        if result.done:
            return end(result, FinishReason.FORMAT_ERROR if result.format_error else FinishReason.STOP)
        if limits.max_tool_calls is not None and episode.tool_calls >= limits.max_tool_calls:
            return end(environment.unfinished(), FinishReason.MAX_TOOL_CALLS)
        unread = harmony.render_observation(result.tool_outputs, result.user)
    return end(environment.unfinished(), FinishReason.MAX_TURNS)


def _room(episode: Trajectory, used: int, limits: EpisodeLimits, turn: int) -> tuple[int, FinishReason]:
    """How many tokens the next turn may have, and which limit says so."""
    rooms = [(turn, FinishReason.LENGTH), (limits.max_tokens - used, FinishReason.MAX_CONTEXT)]
    if limits.max_sampled_tokens is not None:
        rooms.append((limits.max_sampled_tokens - episode.sampled_tokens, FinishReason.MAX_SAMPLED_TOKENS))
    return min(rooms, key=lambda room: room[0])


async def _sample(engine: RolloutEngine, turn: GenerateRequest, deadline: float) -> GenerateResult:
    """One turn, resumed from its own tokens as often as the engine aborts it (to take new weights, say).

    Out of time, it ends with what there is, perhaps nothing, and FinishReason.TIMEOUT."""
    whole = GenerateResult([], [], FinishReason.ABORT)
    while whole.finish_reason is FinishReason.ABORT:
        done = len(whole.output_ids)
        if done == turn.sampling.max_new_tokens:
            return replace(whole, finish_reason=FinishReason.LENGTH)
        if time.monotonic() >= deadline:
            return replace(whole, finish_reason=FinishReason.TIMEOUT)
        name = f"{turn.request_id}/{done}"
        # the rest of an aborted turn must not see the random numbers of its beginning again
        left = replace(turn.sampling, max_new_tokens=turn.sampling.max_new_tokens - done, seed=_seed_of(name))
        request = replace(turn, request_id=name, input_ids=turn.input_ids + whole.output_ids, sampling=left)
        part = await _generate(engine, request, deadline)
        if turn.return_routed_experts and part.output_ids and part.routed_experts is None:
            raise RuntimeError(f"the engine did not return the routed experts that request {name} asked for")
        spans = _shifted(part.weight_versions, done)
        ids, log_probs = whole.output_ids + part.output_ids, whole.output_log_probs + part.output_log_probs
        routes = _first_routes(whole.routed_experts, part.routed_experts)
        cached = whole.cached_tokens if done else part.cached_tokens
        whole = GenerateResult(ids, log_probs, part.finish_reason, whole.weight_versions + spans, routes, cached)
    return whole


async def _generate(engine: RolloutEngine, request: GenerateRequest, deadline: float) -> GenerateResult:
    """Sample until the deadline (of time.monotonic()) at the latest; then the engine is told to abort."""

    async def abort() -> None:
        await asyncio.sleep(deadline - time.monotonic())
        await engine.abort(request.request_id)

    timer = asyncio.create_task(abort())
    try:
        return await engine.generate(request)
    finally:
        timer.cancel()


def _seed_of(request_id: str) -> int:
    """63 bits: what a torch generator takes."""
    return int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8).digest()) >> 1


def _first_routes(earlier: np.ndarray | None, latest: np.ndarray | None) -> np.ndarray | None:
    """Every token keeps the experts that it was first processed with: they made the log-probs that were returned."""
    if earlier is None or latest is None:
        return latest if earlier is None else earlier
    return np.concatenate([earlier, latest[len(earlier) :]])


def _shifted(spans: list[WeightVersionSpan], by: int) -> list[WeightVersionSpan]:
    return [WeightVersionSpan(span.start + by, span.end + by, span.version) for span in spans]


def _append(
    episode: Trajectory, harmony: Harmony, role: str, ids: list[int], sampled: GenerateResult | None = None
) -> None:
    start = len(episode)
    episode.token_ids += ids
    episode.loss_mask += [int(sampled is not None)] * len(ids)
    episode.rollout_log_probs += sampled.output_log_probs if sampled else [0.0] * len(ids)
    if sampled:
        episode.routed_experts = _first_routes(episode.routed_experts, sampled.routed_experts)
        episode.weight_versions += _shifted(sampled.weight_versions, start)
    episode.turns.append(Turn(role, start, len(episode), harmony.decode(ids)))


def _end(episode: Trajectory, limits: EpisodeLimits, result: StepResult, reason: FinishReason) -> Trajectory:
    episode.finish_reason = reason
    episode.excluded = limits.truncated_episodes == "mask" and episode.truncated
    episode.answer, episode.format_error = result.answer, result.format_error
    episode.reward, episode.reward_parts = result.reward, result.reward_parts
    episode.validate()
    return episode
