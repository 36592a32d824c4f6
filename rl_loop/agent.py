"""The agent loop: one episode, token in and token out.

    ids = prompt
    repeat: sample a turn from ids; append exactly what was sampled; let the environment act on it;
            append what the tool answered

Nothing is rendered twice. The loss mask is 1 exactly on what was sampled.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from rl_loop.engines.protocol import GenerateRequest, GenerateResult, RolloutEngine, SamplingParams
from rl_loop.environments.base import Environment, StepResult
from rl_loop.harmony import FormatError, Harmony
from rl_loop.trajectory import FinishReason, Trajectory, Turn, WeightVersionSpan


@dataclass(frozen=True)
class EpisodeLimits:
    """Where an episode ends without the agent's doing."""

    max_turns: int
    """Assistant turns."""
    max_tokens: int
    """Tokens in all, prompt and tool output included."""
    seconds: float
    """Wall-clock time."""


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
) -> Trajectory:
    """Run one episode to its end. ``sampling.max_new_tokens`` is the limit of one turn; stop ids and seed are set here.

    The same seed, weights and task give the same episode, whatever else the engine is doing.
    """
    deadline = time.monotonic() + limits.seconds
    prompt = harmony.render_prompt(environment.prompt())
    if len(prompt) >= limits.max_tokens:
        raise ValueError(f"the prompt of task {task_id} has {len(prompt)} tokens; rollout.max_tokens is {limits.max_tokens}")
    episode = Trajectory(task_id, [], [], [])
    _append(episode, harmony, "prompt", prompt)
    for turn in range(limits.max_turns):
        room = min(sampling.max_new_tokens, limits.max_tokens - len(episode))
        params = replace(sampling, max_new_tokens=room, stop_token_ids=harmony.stop_token_ids, seed=seed * 1009 + turn)
        sampled = await _sample(engine, episode.token_ids, params, f"{task_id}/{seed}/{turn}", routed_experts)
        episode.routed_experts = sampled.routed_experts
        _append(episode, harmony, "assistant", sampled.output_ids, sampled)
        if sampled.finish_reason is not FinishReason.STOP:
            return _end(episode, environment.unfinished(), sampled.finish_reason)
        messages = harmony.parse(sampled.output_ids)
        if isinstance(messages, FormatError):
            return _end(episode, environment.illegal(messages.reason), FinishReason.FORMAT_ERROR)
        result = await environment.step(messages)
        episode.tool_calls += result.tool_calls
        episode.tool_errors += result.tool_errors
        if result.done:
            reason = FinishReason.FORMAT_ERROR if result.format_error else FinishReason.STOP
            return _end(episode, result, reason)
        answer = [i for o in result.observations for i in harmony.render_tool_output(o.tool, o.channel, o.text)]
        if turn + 1 == limits.max_turns:
            break
        if len(episode) + len(answer) >= limits.max_tokens or time.monotonic() > deadline:
            return _end(episode, environment.unfinished(), FinishReason.LENGTH)
        _append(episode, harmony, "tool", answer)
    return _end(episode, environment.unfinished(), FinishReason.MAX_TURNS)


async def _sample(
    engine: RolloutEngine, prefix: list[int], params: SamplingParams, request_id: str, routed_experts: bool
) -> GenerateResult:
    """One turn, resumed from its own tokens as often as the engine aborts it (to take new weights, say)."""
    whole = GenerateResult([], [], FinishReason.ABORT)
    while whole.finish_reason is FinishReason.ABORT:
        done = len(whole.output_ids)
        left = replace(params, max_new_tokens=params.max_new_tokens - done)
        if left.max_new_tokens == 0:
            return replace(whole, finish_reason=FinishReason.LENGTH)
        request = GenerateRequest(f"{request_id}/{done}", prefix + whole.output_ids, left, routed_experts)
        part = await engine.generate(request)
        spans = [WeightVersionSpan(s.start + done, s.end + done, s.version) for s in part.weight_versions]
        whole = GenerateResult(
            whole.output_ids + part.output_ids,
            whole.output_log_probs + part.output_log_probs,
            part.finish_reason,
            whole.weight_versions + spans,
            part.routed_experts if part.routed_experts is not None else whole.routed_experts,
        )
    return whole


def _append(
    episode: Trajectory, harmony: Harmony, role: str, ids: list[int], sampled: GenerateResult | None = None
) -> None:
    start = len(episode)
    episode.token_ids += ids
    episode.loss_mask += [int(sampled is not None)] * len(ids)
    episode.rollout_log_probs += sampled.output_log_probs if sampled else [0.0] * len(ids)
    if sampled:
        episode.weight_versions += [
            WeightVersionSpan(s.start + start, s.end + start, s.version) for s in sampled.weight_versions
        ]
    episode.turns.append(Turn(role, start, len(episode), harmony.decode(ids)))


def _end(episode: Trajectory, result: StepResult, reason: FinishReason) -> Trajectory:
    episode.finish_reason = reason
    episode.reward, episode.reward_parts = result.reward, result.reward_parts
    if episode.routed_experts is not None:
        # tokens after the last forward pass (a tool's answer that was never read) cannot be there: turns end sampled
        episode.routed_experts = np.ascontiguousarray(episode.routed_experts[: len(episode) - 1])
    episode.validate()
    return episode
