"""The agent loop: one episode, token in and token out.

    ids = prompt
    repeat: sample a turn from ids; append exactly what was sampled; let the environment act on it;
            append what tools answered or the user said

Nothing is rendered twice. The loss mask is 1 exactly on what was sampled. What the policy does wrong ends an episode
with a reward; what infrastructure does wrong ends it as invalid (``rl_loop.infrastructure``)."""

import asyncio
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any

from rl_loop.config.episode import EpisodeLimits, PurificationConfig
from rl_loop.data.trajectory import FinishReason, InvalidReason, Trajectory, Turn
from rl_loop.engines.protocol import GenerateResult, ModelShape, RolloutEngine, SamplingParams
from rl_loop.environments.base import Environment, StepResult
from rl_loop.harmony.codec import FormatError, Harmony, ParsedMessage
from rl_loop.infrastructure import InfrastructureFailure, describe
from rl_loop.off_loop import off_loop
from rl_loop.rollout.episode_clock import EpisodeClock, OutOfTime
from rl_loop.rollout.observation import cut_observation
from rl_loop.rollout.purification import Attempt, Purifier
from rl_loop.rollout.turn_sampler import TurnSampler, first_routes, shifted
from rl_loop.tasks.prompt_limit import PromptLimit, prompt_of

TOOL_PAUSES = (0.1, 1.0, 4.0)
"""Seconds before a turn whose tools or checker failed is acted on again; after the last time the failure stays."""


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
    shape: ModelShape | None = None,
) -> Trajectory:
    """Run one episode to its end. ``sampling.max_new_tokens`` is the limit of one turn; stop ids and seed are set here.
    ``shape``: what the engine's answers are checked against, besides the vocabulary.

    The same seed, weights and task give the same episode, whatever else the engine is doing. An infrastructure failure
    that persists makes it invalid. Raises UnusablePrompt if the prompt leaves no room to answer."""
    clock = EpisodeClock(limits.episode_seconds)
    sampler = TurnSampler(
        engine=engine,
        episode=f"{task_id}/{seed}",
        sampling=replace(sampling, stop_token_ids=harmony.stop_token_ids),
        clock=clock,
        shape=shape or ModelShape(harmony.vocabulary.size),
        queue_seconds=limits.queue_seconds,
        routed_experts=routed_experts,
    )
    return await EpisodeRunner(task_id, environment, harmony, limits, sampler, purification).run()


class EpisodeRunner:
    """One episode on its way."""

    def __init__(
        self,
        task_id: str,
        environment: Environment,
        harmony: Harmony,
        limits: EpisodeLimits,
        sampler: TurnSampler,
        purification: PurificationConfig | None = None,
    ) -> None:
        self.environment = environment
        self.harmony = harmony
        self.limits = limits
        self.sampler = sampler
        self.clock = sampler.clock
        self.episode = Trajectory(task_id, [], [], [])
        # what tools answered or the user said, and who it was; part of the episode once a turn was sampled from it
        self.unread: list[int] = []
        self.unread_role = ""
        self.calls_run = 0  # tool calls, those of failed attempts included
        self.purifier: Purifier | None = None
        if purification is not None:
            self.purifier = Purifier(
                config=purification,
                environment=environment,
                harmony=harmony,
                max_tokens=limits.max_tokens,
                sample=self._sample,
                score=sampler.score,
                act=self.act,
                render=self.render,
            )

    async def run(self) -> Trajectory:
        """Play the episode; an infrastructure failure that persists makes it invalid."""
        try:
            await self.begin()
            return await self.play()
        except InfrastructureFailure as failure:
            return self.invalidate(failure)

    async def begin(self) -> None:
        """Render the prompt. Raises UnusablePrompt."""
        prompt = await self._ask(prompt_of, self.environment)
        limit = PromptLimit(self.harmony, self.limits.max_tokens)
        self._append("prompt", await off_loop(limit.render, self.episode.task_id, prompt))

    async def play(self) -> Trajectory:
        """Take turns until the agent answers or a limit ends the episode."""
        for turn in range(self.limits.max_turns):
            sampled, stopped_by = await self.sample_turn(turn)
            if stopped_by is not None:
                return await self.cut_short(stopped_by)

            messages = await off_loop(self.harmony.parse, sampled.output_ids)
            if isinstance(messages, FormatError):
                outcome = await self._ask(self.environment.illegal, messages.kind)
                return self.finish(_checked(outcome), FinishReason.FORMAT_ERROR)

            state = self.environment.save_state() if self.purifier else None
            try:
                result = await self.act(messages)
                result = await self.retry_failed_call(turn, sampled, messages, result, state)
            except OutOfTime:
                return await self.cut_short(FinishReason.TIMEOUT)

            self.episode.tool_calls += result.tool_calls
            self.episode.tool_errors += result.tool_errors
            if result.done:
                reason = FinishReason.FORMAT_ERROR if result.format_error else FinishReason.STOP
                return self.finish(result, reason)
            if self._calls_left == 0:
                return await self.cut_short(FinishReason.MAX_TOOL_CALLS)
            await self.observe(result)

        return await self.cut_short(FinishReason.MAX_TURNS)

    async def sample_turn(self, turn: int) -> tuple[GenerateResult, FinishReason | None]:
        """Sample a turn and append it. Returns it and, unless the agent ended it itself, the limit that did."""
        episode = self.episode
        prefix = episode.token_ids + self.unread
        room, limit = self._room(len(prefix))
        if room <= 0:
            return GenerateResult([], [], FinishReason.LENGTH), limit

        sampled = await self.sampler.sample(str(turn), prefix, room)
        if not sampled.output_ids:
            return sampled, sampled.finish_reason
        if turn > 0:
            episode.reusable_tokens += len(episode)
            episode.cached_tokens += min(len(episode), sampled.cached_tokens)
        if self.unread:
            self._append(self.unread_role, self.unread)
            self.unread = []
        self._append("assistant", sampled.output_ids, sampled)

        if sampled.finish_reason is FinishReason.STOP:
            return sampled, None
        if sampled.finish_reason is FinishReason.LENGTH:
            return sampled, limit
        return sampled, sampled.finish_reason

    async def act(self, messages: Sequence[ParsedMessage]) -> StepResult:
        """Let the environment act on a turn, as far as the limit of tool calls goes. What infrastructure spoils is done
        again, from the state before it. Raises InfrastructureFailure if it persists, and OutOfTime."""
        runnable = self._runnable(messages)
        state = self.environment.save_state()
        for pause in (*TOOL_PAUSES, None):
            try:
                result = await self._step(runnable)
                self.calls_run += result.tool_calls
                return result
            except InfrastructureFailure:
                if pause is None or state is None:
                    raise
                await self.clock.pause(pause)
                self.environment.restore_state(state)
        raise AssertionError("the last failure is raised")

    async def _step(self, messages: Sequence[ParsedMessage]) -> StepResult:
        try:
            result = await self.clock.limit(self.environment.step(messages))
        except (InfrastructureFailure, OutOfTime):
            raise
        except Exception as error:
            raise InfrastructureFailure("environment", f"step: {describe(error)}") from error
        if isinstance(result, StepResult) and not result.done:
            return result
        return _checked(result)

    async def retry_failed_call(
        self, turn: int, sampled: GenerateResult, messages: list[ParsedMessage], result: StepResult, state: Any
    ) -> StepResult:
        """Put a good call in the place of a failed one, if the configuration says so and the agent finds one
        (``rollout.purification``). ``state``: of the environment before the turn. Returns what the turn led to."""
        if self.purifier is None or not result.tool_errors or result.done:
            return result
        chance = random.Random(f"{self.sampler.episode}/{turn}").random()
        if chance >= self.purifier.config.probability:
            return result
        if state is None:
            name = type(self.environment).__name__
            raise InfrastructureFailure("environment", f"rollout.purification needs {name}.save_state")

        begin = self.episode.turns[-1].start
        prefix = self.episode.token_ids[:begin]
        failed = Attempt(prefix, sampled, messages, result, kept=len(sampled.output_ids))
        pure = await self.purifier.purified(failed, state)
        if pure is None:
            return result

        self._remove_last_turn()
        self._append("assistant", pure.sampled.output_ids, pure.sampled)
        self.episode.grafted.append((begin + pure.kept, len(self.episode)))
        return pure.result

    async def observe(self, result: StepResult) -> None:
        """Keep what tools answered or the user said for the next turn to read."""
        self.unread = await self.render(result)
        self.unread_role = "tool" if result.tool_outputs else "user"

    async def render(self, result: StepResult) -> list[int]:
        """Ids of what tools answered and the user said, cut to the limit."""
        outputs, user = cut_observation(result.tool_outputs, result.user, self.limits.max_observation_bytes)
        try:
            return await off_loop(self.harmony.render_observation, outputs, user)
        except Exception as error:
            task = self.episode.task_id
            reason = f"what a tool or the user said in task {task} cannot be rendered: {describe(error)}"
            raise InfrastructureFailure("environment", reason) from error

    async def cut_short(self, reason: FinishReason) -> Trajectory:
        """The episode as a limit ends it."""
        outcome = await self._ask(self.environment.unfinished)
        return self.finish(_checked(outcome), reason)

    def finish(self, result: StepResult, reason: FinishReason) -> Trajectory:
        """The episode with its outcome."""
        episode = self.episode
        episode.finish_reason = reason
        episode.excluded = self.limits.truncated_episodes == "mask" and episode.truncated
        episode.answer = result.answer
        episode.format_error = result.format_error
        episode.reward = result.reward
        episode.reward_parts = result.reward_parts
        episode.validate()
        return episode

    def invalidate(self, failure: InfrastructureFailure) -> Trajectory:
        """The episode as far as it came, which nothing is learned from."""
        episode = self.episode
        episode.finish_reason = FinishReason.ABORT
        episode.invalid = InvalidReason(failure.component, failure.reason)
        episode.excluded = True
        episode.reward = math.nan
        episode.reward_parts = {}
        return episode

    async def _ask[**P, T](self, method: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
        """Call a method of the environment that is no coroutine, on a thread, so that one that hangs holds up no other
        episode. Raises InfrastructureFailure for whatever it raises."""
        name = getattr(method, "__name__", "a method")
        seconds = self.limits.episode_seconds
        call = asyncio.to_thread(method, *arguments, **options)
        try:
            return await asyncio.wait_for(call, seconds)
        except InfrastructureFailure:
            raise
        except TimeoutError:
            raise InfrastructureFailure("environment", f"{name}() did not return within {seconds:g} s") from None
        except Exception as error:
            raise InfrastructureFailure("environment", f"{name}(): {describe(error)}") from error

    async def _sample(self, name: str, prefix: list[int]) -> GenerateResult | None:
        """A turn that is not part of the episode yet; None if there is no room for one."""
        room, _ = self._room(len(prefix))
        if room <= 0 or self._calls_left == 0:
            return None
        return await self.sampler.sample(name, prefix, room)

    def _room(self, used: int) -> tuple[int, FinishReason]:
        """How many tokens the next turn may have behind ``used`` ones, and which limit says so."""
        rooms = [
            (self.sampler.sampling.max_new_tokens, FinishReason.LENGTH),
            (self.limits.max_tokens - used, FinishReason.MAX_CONTEXT),
        ]
        if self.limits.max_sampled_tokens is not None:
            left = self.limits.max_sampled_tokens - self.episode.sampled_tokens
            rooms.append((left, FinishReason.MAX_SAMPLED_TOKENS))
        return min(rooms, key=lambda room: room[0])

    @property
    def _calls_left(self) -> int | None:
        """Tool calls that may still be run; None for any number."""
        if self.limits.max_tool_calls is None:
            return None
        return max(0, self.limits.max_tool_calls - self.calls_run)

    def _runnable(self, messages: Sequence[ParsedMessage]) -> Sequence[ParsedMessage]:
        """The messages up to the last call that may be run."""
        left = self._calls_left
        if left is None:
            return messages
        calls = [number for number, message in enumerate(messages) if message.recipient is not None]
        return messages[: calls[left - 1] + 1] if len(calls) > left else messages

    def _append(self, role: str, ids: list[int], sampled: GenerateResult | None = None) -> None:
        episode = self.episode
        start = len(episode)
        episode.token_ids += ids
        episode.loss_mask += [int(sampled is not None)] * len(ids)
        if sampled is None:
            episode.rollout_log_probs += [0.0] * len(ids)
        else:
            episode.rollout_log_probs += sampled.output_log_probs
            episode.routed_experts = first_routes(episode.routed_experts, sampled.routed_experts)
            episode.weight_versions += shifted(sampled.weight_versions, start)
        episode.turns.append(Turn(role, start, len(episode), self.harmony.decode(ids)))

    def _remove_last_turn(self) -> None:
        """The episode as it was before the last turn. Of the token before it, no route is known: that token is first an
        input of the turn itself."""
        episode = self.episode
        start = episode.turns.pop().start
        del episode.token_ids[start:], episode.loss_mask[start:], episode.rollout_log_probs[start:]
        episode.weight_versions = [span for span in episode.weight_versions if span.start < start]
        if episode.routed_experts is not None:
            episode.routed_experts = episode.routed_experts[: start - 1]


def _checked(result: StepResult) -> StepResult:
    """The end of an episode. Raises InfrastructureFailure if it is none, or its reward is no finite number."""
    if not isinstance(result, StepResult):
        raise InfrastructureFailure("environment", f"an episode ended with {type(result).__name__}, not a StepResult")
    for name, value in {"reward": result.reward, **result.reward_parts}.items():
        if not isinstance(value, Real) or not math.isfinite(value):
            raise InfrastructureFailure("checker", f"{name} is {value!r}, expected a finite number")
    return result
