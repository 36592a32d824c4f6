"""The agent loop: one episode, token in and token out.

    ids = prompt
    repeat: sample a turn from ids; append exactly what was sampled; let the environment act on it;
            append what tools answered or the user said

Nothing is rendered twice. The loss mask is 1 exactly on what was sampled. What the policy does
wrong ends an episode with a reward; what infrastructure does wrong ends it as invalid
(``rl_loop.infrastructure``)."""

import asyncio
import logging
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from typing import Any

from rl_loop.chat.codec import ChatCodec
from rl_loop.chat.messages import FormatError, ParsedMessage
from rl_loop.config.episode import EpisodeLimits, PurificationConfig
from rl_loop.data.trajectory import FinishReason, InvalidReason, Trajectory
from rl_loop.engines.protocol import GenerateResult, ModelShape, RolloutEngine, SamplingParams
from rl_loop.environments.base import Environment, StepResult
from rl_loop.infrastructure import InfrastructureFailure, describe
from rl_loop.off_loop import call_users_code, off_loop
from rl_loop.rollout.episode_clock import EpisodeClock, OutOfTime
from rl_loop.rollout.episode_draft import EpisodeDraft
from rl_loop.rollout.observation import cut_observation
from rl_loop.rollout.purification import Attempt, Purifier
from rl_loop.rollout.turn_sampler import TurnSampler
from rl_loop.tasks.prompt_limit import PromptLimit, prompt_of

TOOL_PAUSES = (0.1, 1.0, 4.0)
"""Seconds before a turn whose tools or checker failed is acted on again; after the last one the
failure stays."""
OPEN_SECONDS = 300.0
"""What an environment has to open: more than its own limits, which say what took so long."""
CLOSE_SECONDS = 30.0
"""What it has to close."""

logger = logging.getLogger(__name__)


async def run_episode(
    task_id: str,
    environment: Environment,
    engine: RolloutEngine,
    codec: ChatCodec,
    limits: EpisodeLimits,
    sampling: SamplingParams,
    *,
    seed: int,
    routed_experts: bool = False,
    purification: PurificationConfig | None = None,
    shape: ModelShape | None = None,
) -> Trajectory:
    """Run one episode to its end.

    ``sampling.max_new_tokens`` is the limit of one turn; stop ids and seed are set here.
    ``shape`` is what the engine's answers are checked against, besides the vocabulary.

    The same seed, weights and task give the same episode, whatever else the engine is doing. An
    infrastructure failure that persists makes it invalid. Raises UnusablePrompt if the prompt
    leaves no room to answer."""
    sampler = TurnSampler(
        engine=engine,
        episode=f"{task_id}/{seed}",
        sampling=replace(sampling, stop_token_ids=codec.stop_token_ids),
        clock=EpisodeClock(limits.episode_seconds),
        shape=shape or ModelShape(codec.vocabulary.size),
        routed_experts=routed_experts,
    )
    runner = EpisodeRunner(task_id, environment, codec, limits, sampler, purification)
    return await runner.run()


@dataclass(frozen=True)
class Room:
    """How many tokens a turn may have."""

    tokens: int
    """0 or less if there is no room."""
    limit: FinishReason
    """Which limit says so."""


@dataclass(frozen=True)
class SampledTurn:
    """A turn of the policy."""

    result: GenerateResult
    cut_by: FinishReason | None
    """The limit that ended it; None if the policy did."""


class EpisodeRunner:
    """Runs one episode."""

    def __init__(
        self,
        task_id: str,
        environment: Environment,
        codec: ChatCodec,
        limits: EpisodeLimits,
        sampler: TurnSampler,
        purification: PurificationConfig | None = None,
    ) -> None:
        self.environment = environment
        self.codec = codec
        self.limits = limits
        self.sampler = sampler
        self.clock = sampler.clock

        self.draft = EpisodeDraft(task_id)
        self.unread: list[int] = []
        """What tools answered or the user said: part of the episode once a turn was sampled from
        it."""
        self.unread_role = ""
        """Who said it: "tool" or "user"."""
        self.calls_run = 0
        """Tool calls, those of retried turns included."""

        self.purifier: Purifier | None = None
        if purification is not None:
            self.purifier = Purifier(
                config=purification,
                environment=environment,
                codec=codec,
                max_tokens=limits.max_tokens,
                sample=self._sample_retry,
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
        finally:
            await self.close()

    async def begin(self) -> None:
        """Open the environment and render the prompt.

        Raises UnusablePrompt, and InfrastructureFailure if what cannot be opened stays away."""
        for pause in (*TOOL_PAUSES, None):
            try:
                await self.open()
                break
            except InfrastructureFailure:
                if pause is None:
                    raise
                await self.clock.pause(pause)

        prompt = await self._ask(prompt_of, self.environment)
        limit = PromptLimit(self.codec, self.limits.max_tokens)
        ids = await off_loop(limit.render, self.draft.task_id, prompt)
        self._append("prompt", ids)

    async def play(self) -> Trajectory:
        """Take turns until the agent answers or a limit ends the episode."""
        for number in range(self.limits.max_turns):
            turn = await self.sample_turn(number)
            if turn.cut_by is not None:
                return await self.cut_short(turn.cut_by)

            messages = await off_loop(self.codec.parse, turn.result.output_ids)
            if isinstance(messages, FormatError):
                outcome = await self._ask(self.environment.illegal, messages.kind)
                return self.finish(_checked_end(outcome), FinishReason.FORMAT_ERROR)

            # Only purification goes back to before the turn: ``act`` saves what it needs itself.
            before = self.environment.save_state() if self.purifier is not None else None
            try:
                result = await self.act(messages)
                if result.tool_errors > 0 and not result.done:
                    result = await self.retry_failed_call(
                        number, turn.result, messages, result, before
                    )
            except OutOfTime:
                return await self.cut_short(FinishReason.TIMEOUT)

            self.draft.tool_calls += result.tool_calls
            self.draft.tool_errors += result.tool_errors
            if result.done:
                reason = FinishReason.FORMAT_ERROR if result.format_error else FinishReason.STOP
                return self.finish(result, reason)
            if self._calls_left == 0:
                return await self.cut_short(FinishReason.MAX_TOOL_CALLS)
            await self.observe(result)

        return await self.cut_short(FinishReason.MAX_TURNS)

    # ---- one turn

    async def sample_turn(self, number: int) -> SampledTurn:
        """Sample a turn and append it to the episode, behind what it had to read."""
        draft = self.draft
        prefix = draft.token_ids + self.unread
        room = self._room(len(prefix))
        if room.tokens <= 0:
            return SampledTurn(GenerateResult([], [], FinishReason.LENGTH), cut_by=room.limit)

        sampled = await self.sampler.sample(str(number), prefix, room.tokens)
        # Out of time before the first token: what was unread stays outside of the episode.
        if not sampled.output_ids:
            return SampledTurn(sampled, cut_by=sampled.finish_reason)

        # All of the episode but what is still unread has been through the engine once.
        if number > 0:
            draft.reusable_tokens += len(draft)
            draft.cached_tokens += min(len(draft), sampled.cached_tokens)
        if self.unread:
            self._append(self.unread_role, self.unread)
            self.unread = []
        self._append("assistant", sampled.output_ids, sampled)

        if sampled.finish_reason is FinishReason.STOP:
            return SampledTurn(sampled, cut_by=None)
        if sampled.finish_reason is FinishReason.LENGTH:
            return SampledTurn(sampled, cut_by=room.limit)
        return SampledTurn(sampled, cut_by=sampled.finish_reason)

    async def act(self, messages: Sequence[ParsedMessage]) -> StepResult:
        """Let the environment act on a turn, as far as the limit of tool calls goes.

        What infrastructure spoils is done again, from the state before it. Raises
        InfrastructureFailure if it persists, and OutOfTime."""
        runnable = self._runnable(messages)
        state = self.environment.save_state()
        is_repeated = False
        for pause in (*TOOL_PAUSES, None):
            try:
                if is_repeated:
                    await self.open()
                result = await self._step(runnable)
                self.calls_run += result.tool_calls
                return result
            except InfrastructureFailure:
                # A world that cannot be set back is not acted on twice.
                if pause is None or state is None:
                    raise
                await self.clock.pause(pause)
                self.environment.restore_state(state)
                is_repeated = True
        raise AssertionError("the last failure is raised")

    async def retry_failed_call(
        self,
        number: int,
        sampled: GenerateResult,
        messages: list[ParsedMessage],
        result: StepResult,
        before: Any,
    ) -> StepResult:
        """Put a good call in the place of a failed one, if it may be retried and one is written.

        ``before``: state of the environment before the turn. Returns what the turn led to in the
        end."""
        if self.purifier is None:
            return result
        # Drawn from episode and turn, so that the same episode retries the same turns.
        chance = random.Random(f"{self.sampler.episode}/{number}").random()
        if chance >= self.purifier.config.probability:
            return result
        if before is None:
            name = type(self.environment).__name__
            reason = f"rollout.purification needs {name}.save_state"
            raise InfrastructureFailure("environment", reason)

        start = self.draft.turns[-1].start
        failed = Attempt(
            prefix=self.draft.token_ids[:start],
            sampled=sampled,
            messages=messages,
            result=result,
            kept=len(sampled.output_ids),
        )
        purified = await self.purifier.purify(failed, before)
        if purified is None:
            return result

        self.draft.remove_last_turn()
        self._append("assistant", purified.sampled.output_ids, purified.sampled)
        self.draft.grafted.append((start + purified.kept, len(self.draft)))
        return purified.result

    async def observe(self, result: StepResult) -> None:
        """Keep what tools answered or the user said for the next turn to read."""
        self.unread = await self.render(result)
        self.unread_role = "tool" if result.tool_outputs else "user"

    async def render(self, result: StepResult) -> list[int]:
        """Return the ids of what tools answered and the user said, cut to the limit."""
        limit = self.limits.max_observation_bytes
        outputs, user = cut_observation(result.tool_outputs, result.user, limit)
        try:
            return await off_loop(self.codec.render_observation, outputs, user)
        except Exception as error:
            what = f"what a tool or the user said in task {self.draft.task_id}"
            reason = f"{what} cannot be rendered: {describe(error)}"
            raise InfrastructureFailure("environment", reason) from error

    # ---- ends of the episode

    async def cut_short(self, reason: FinishReason) -> Trajectory:
        """End the episode for a limit."""
        outcome = await self._ask(self.environment.unfinished)
        return self.finish(_checked_end(outcome), reason)

    def finish(self, result: StepResult, reason: FinishReason) -> Trajectory:
        """Return the episode with its outcome."""
        episode = self.draft.to_trajectory()
        episode.finish_reason = reason
        episode.prefilled_again = self.sampler.prefilled_again
        episode.excluded = self.limits.truncated_episodes == "mask" and episode.truncated
        episode.answer = result.answer
        episode.format_error = result.format_error
        episode.reward = result.reward
        episode.reward_parts = result.reward_parts
        episode.validate()
        return episode

    def invalidate(self, failure: InfrastructureFailure) -> Trajectory:
        """Return the episode as far as it came; nothing is learned from it, so that its
        routes go nowhere."""
        episode = self.draft.to_trajectory(with_routes=False)
        episode.finish_reason = FinishReason.ABORT
        episode.invalid = InvalidReason(
            failure.component, failure.reason, failure.culprit or self._environment_name(failure)
        )
        episode.excluded = True
        # So that whoever uses the reward by mistake notices.
        episode.reward = math.nan
        episode.reward_parts = {}
        return episode

    def _environment_name(self, failure: InfrastructureFailure) -> str:
        """Return whose failure it was if nothing narrower is known: the environment's, unless it was
        the engine's."""
        return "" if failure.component == "engine" else type(self.environment).__name__

    # ---- the environment, which may raise anything and hang

    async def open(self) -> None:
        """Let the environment connect to what it needs; its time does not count.

        Raises InfrastructureFailure."""
        was_running = self.clock.is_running
        self.clock.stop()
        try:
            await asyncio.wait_for(self.environment.open(), OPEN_SECONDS)
        except InfrastructureFailure:
            raise
        except TimeoutError:
            reason = f"open() did not return within {OPEN_SECONDS:g} s"
            raise InfrastructureFailure("environment", reason) from None
        except Exception as error:
            raise InfrastructureFailure("environment", f"open(): {describe(error)}") from error
        finally:
            if was_running:
                self.clock.start()

    async def close(self) -> None:
        """Let the environment disconnect. What goes wrong is logged: the episode has ended."""
        try:
            await asyncio.wait_for(self.environment.close(), CLOSE_SECONDS)
        except Exception as error:
            name = type(self.environment).__name__
            logger.warning("%s.close() of %s: %s", name, self.draft.task_id, describe(error))

    async def _step(self, messages: Sequence[ParsedMessage]) -> StepResult:
        """Run ``Environment.step`` within the time limit.

        Raises InfrastructureFailure and OutOfTime."""
        try:
            result = await self.clock.limit(self.environment.step(messages))
        except (InfrastructureFailure, OutOfTime):
            raise
        except Exception as error:
            raise InfrastructureFailure("environment", f"step: {describe(error)}") from error

        if isinstance(result, StepResult) and not result.done:
            return result
        return _checked_end(result)

    async def _ask[**P, T](
        self, method: Callable[P, T], *arguments: P.args, **options: P.kwargs
    ) -> T:
        """Call a method on a thread, so that one that hangs holds up no other episode.

        Raises InfrastructureFailure for whatever it raises."""
        name = getattr(method, "__name__", "a method")
        seconds = self.limits.episode_seconds
        full_name = f"{type(self.environment).__name__}.{name}"
        call = call_users_code(partial(method, *arguments, **options), full_name)
        try:
            return await asyncio.wait_for(call, seconds)
        except InfrastructureFailure:
            raise
        except TimeoutError:
            reason = f"{name}() did not return within {seconds:g} s"
            raise InfrastructureFailure("environment", reason) from None
        except Exception as error:
            raise InfrastructureFailure("environment", f"{name}(): {describe(error)}") from error

    # ---- limits

    def _room(self, used: int) -> Room:
        """Return how many tokens the next turn may have behind ``used`` ones."""
        rooms = [
            Room(self.sampler.sampling.max_new_tokens, FinishReason.LENGTH),
            Room(self.limits.max_tokens - used, FinishReason.MAX_CONTEXT),
        ]
        if self.limits.max_sampled_tokens is not None:
            left = self.limits.max_sampled_tokens - self.draft.sampled_tokens
            rooms.append(Room(left, FinishReason.MAX_SAMPLED_TOKENS))
        return min(rooms, key=lambda room: room.tokens)

    @property
    def _calls_left(self) -> int | None:
        """Tool calls that may still be run; None for any number."""
        if self.limits.max_tool_calls is None:
            return None
        return max(0, self.limits.max_tool_calls - self.calls_run)

    def _runnable(self, messages: Sequence[ParsedMessage]) -> Sequence[ParsedMessage]:
        """Return the messages up to the last call that may be run."""
        left = self._calls_left
        if left is None:
            return messages

        calls = [i for i, message in enumerate(messages) if message.recipient is not None]
        if len(calls) <= left:
            return messages
        return messages[: calls[left - 1] + 1]

    async def _sample_retry(self, name: str, prefix: list[int]) -> GenerateResult | None:
        """Sample a turn outside of the episode. Returns None if there is no room for one."""
        room = self._room(len(prefix))
        if room.tokens <= 0 or self._calls_left == 0:
            return None
        return await self.sampler.sample(name, prefix, room.tokens)

    def _append(self, role: str, ids: list[int], sampled: GenerateResult | None = None) -> None:
        """Append a turn: what the policy ``sampled``, or what others said."""
        self.draft.append(role, ids, self.codec.decode(ids), sampled)


def _checked_end(result: StepResult) -> StepResult:
    """Return the end of an episode.

    Raises InfrastructureFailure if it is none, or its reward or a part of it is no finite
    number."""
    if not isinstance(result, StepResult):
        reason = f"an episode ended with {type(result).__name__}, not a StepResult"
        raise InfrastructureFailure("environment", reason)

    for name, value in {"reward": result.reward, **result.reward_parts}.items():
        if not isinstance(value, Real) or not math.isfinite(value):
            reason = f"{name} is {value!r}, expected a finite number"
            raise InfrastructureFailure("checker", reason)
    return result
