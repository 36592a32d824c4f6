"""Trajectory purification (CLEANER, arXiv 2601.15141).

A failed tool call is retried, and a successful call replaces it.

The agent reads the error and writes the turn again. The new call replaces the old one in the
context from before the error, after the old reasoning if the calls are similar. The environment is
set back and the new call is executed. Moved tokens are *spliced*: their log-probs are computed
again, and rollout correction and routing replay leave them out.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import partial
from typing import Any

import numpy as np

from megatron_gptoss.routes import unknown_route
from rl_loop.chat.codec import ChatCodec
from rl_loop.chat.messages import FormatError, ParsedMessage
from rl_loop.config.episode import PurificationConfig
from rl_loop.data.trajectory import WeightVersionSpan
from rl_loop.engines.protocol import GenerateResult
from rl_loop.environments.base import Environment, StepResult
from rl_loop.infrastructure import InfrastructureError
from rl_loop.rollout.agent import EpisodeRunner, RunnerFactory
from rl_loop.rollout.episode import Episode, EpisodeOver
from rl_loop.rollout.episode_clock import CallTime
from rl_loop.threads import run_in_thread

MAX_RETRIES = 30
"""Maximum retries per episode."""
SIMILARITY = 0.5
"""Least similarity of old and new call (difflib's ratio) that keeps the old reasoning."""
COMPARED_CHARACTERS = 1024
"""Characters of two calls that are compared. difflib may need the cube of it: seconds for
this number."""


@dataclass
class TurnAttempt:
    """A turn of the policy and its result."""

    prefix: list[int]
    """Token ids before the turn."""
    sampled: GenerateResult
    messages: list[ParsedMessage]
    """The parsed turn."""
    result: StepResult
    kept: int
    """Number of tokens at the start of the turn that were sampled after ``prefix``. Later tokens
    are spliced."""


def purifying(config: PurificationConfig) -> RunnerFactory:
    """Return the runner that retries failed tool calls, for ``run_episode``."""
    return partial(PurifyingRunner, config)


class PurifyingRunner(EpisodeRunner):
    """Runs an episode and retries its failed tool calls."""

    def __init__(
        self,
        config: PurificationConfig,
        task_id: str,
        environment: Environment,
        codec: ChatCodec,
        episode: Episode,
    ) -> None:
        super().__init__(task_id, environment, codec, episode)
        self._config = config
        self._turns = 0
        """Number of executed turns."""
        self._retries = 0
        """Retries of all turns."""

    async def take_step(self, sampled: GenerateResult, messages: list[ParsedMessage]) -> StepResult:
        """Execute the turn that was sampled last, and retry it if a call fails."""
        number = self._turns
        self._turns += 1
        # Saved before every turn, because only its result shows whether a call fails.
        before = self.environment.save_state()
        result = await self.act(messages)
        if result.tool_errors == 0 or result.done:
            return result
        # Drawn from episode and turn, so that an episode always retries the same turns.
        chance = random.Random(f"{self.episode.name}/{number}").random()
        if chance >= self._config.probability:
            return result
        if before is None:
            reason = f"rollout.purification needs {self.guard.name}.save_state"
            raise InfrastructureError("environment", reason)

        # The failed turn is the last one of the draft.
        start = self.draft.turns[-1].start
        failed = TurnAttempt(
            prefix=self.draft.token_ids[:start],
            sampled=sampled,
            messages=messages,
            result=result,
            kept=len(sampled.output_ids),
        )
        purified = await self._purify(failed, before)
        if purified is None:
            return result

        removed = self.draft.remove_last_turn()
        time = CallTime(removed.seconds, removed.waited)
        self.append("assistant", purified.sampled.output_ids, purified.sampled, time)
        self.draft.spliced.append((start + purified.kept, len(self.draft)))
        self.episode.replace_turn(sampled, purified.sampled)
        return purified.result

    async def _purify(self, failed: TurnAttempt, before: Any) -> TurnAttempt | None:
        """Return a turn to put in place of a failed one, or None if the error stays.

        If the time is over during a retry, the environment is in an intermediate state, and the
        episode ends.

        Args:
            failed: the failed turn.
            before: state of the environment before the turn.
        """
        # If all retries fail, the episode continues after the failed turn.
        after = self.environment.save_state()
        turn = failed
        for _ in range(self._config.retries):
            if self._retries >= MAX_RETRIES:
                break
            self._retries += 1
            retried = await self._resample(turn)
            if retried is None:
                break

            self.environment.restore_state(before)
            result = await self.act(retried.messages)
            turn = replace(retried, result=result)
            if result.tool_errors == 0 and result.format_error is None:
                return await self._rescore(turn, failed)

        self.environment.restore_state(after)
        return None

    async def _rescore(self, turn: TurnAttempt, failed: TurnAttempt) -> TurnAttempt:
        """Give spliced tokens the log-probs of their new place."""
        # scores[i] belongs to token i + 1, because the first token has no log-prob.
        scores = await self.episode.sampler.score(turn.prefix + turn.sampled.output_ids)
        turn_scores = scores[len(turn.prefix) - 1 :]
        # The first tokens are those of the failed turn, however often it was retried, and keep the
        # log-probs with which they were sampled.
        log_probs = failed.sampled.output_log_probs[: turn.kept] + turn_scores[turn.kept :]
        return replace(turn, sampled=replace(turn.sampled, output_log_probs=log_probs))

    async def _resample(self, turn: TurnAttempt) -> TurnAttempt | None:
        """Let the agent read the error, and return its new turn in place of the failed one."""
        error = await self.render(turn.result)
        if self.calls_left == 0:
            return None
        prefix = turn.prefix + turn.sampled.output_ids + error
        try:
            sampled = await self.episode.sample(
                f"retry{self._retries}",
                prefix,
                # As few routes as possible: none of them is kept, because the tokens of a retry
                # move to another place.
                routes_start=len(prefix) - 1,
            )
        except EpisodeOver:
            return None
        # A truncated retry has no complete call.
        if sampled.truncated_by is not None:
            return None
        return await run_in_thread(self._merge, turn, sampled.result)

    def _merge(self, turn: TurnAttempt, sampled: GenerateResult) -> TurnAttempt | None:
        """Replace the failed turn by the new one, after its reasoning if the calls are similar.

        Returns None if the new turn has no call, or the merged turn is malformed or too long.
        """
        messages = self.codec.parse(sampled.output_ids)
        if isinstance(messages, FormatError) or not _calls(messages):
            # The policy gave up on the tool, or the turn is malformed.
            return None

        kept = 0
        ids = sampled.output_ids
        if _similarity(_calls(turn.messages), _calls(messages)) >= SIMILARITY:
            reasoning, _ = self.codec.split_at_calls(turn.sampled.output_ids, turn.messages)
            _, call = self.codec.split_at_calls(sampled.output_ids, messages)
            # A turn that was merged before may end with spliced reasoning, which stays spliced.
            kept = min(len(reasoning), turn.kept)
            ids = self.codec.join_with_calls(reasoning, call)

        # Parsed again, because two halves of legal turns may not be a legal turn.
        merged = self.codec.parse(ids)
        has_room = len(turn.prefix) + len(ids) <= self.limits.max_episode_tokens
        if isinstance(merged, FormatError) or not has_room:
            return None
        return TurnAttempt(
            turn.prefix, _splice(turn, sampled, ids, kept), merged, turn.result, kept
        )


def _calls(messages: Sequence[ParsedMessage]) -> str:
    """Return the texts of a turn's calls."""
    return "\n".join(message.text for message in messages if message.recipient is not None)


def _similarity(old: str, new: str) -> float:
    """Return difflib's ratio of two texts. Only the beginnings of long texts are compared."""
    old = old[:COMPARED_CHARACTERS]
    new = new[:COMPARED_CHARACTERS]
    # From 200 characters on, autojunk would ignore all characters with a share above 1%.
    return SequenceMatcher(None, old, new, autojunk=False).ratio()


def _splice(
    turn: TurnAttempt, sampled: GenerateResult, ids: list[int], kept: int
) -> GenerateResult:
    """Return ``ids`` as a result in place of the turn's own. The first ``kept`` ids are equal.

    Spliced tokens have log-probs of 0 until they are scored. Their routes are unknown, and the
    trainer chooses them.
    """
    versions: list[WeightVersionSpan] = []
    if sampled.weight_versions:
        for span in turn.sampled.weight_versions:
            if span.start < kept:
                versions.append(replace(span, end=min(span.end, kept)))
        versions.append(WeightVersionSpan(kept, len(ids), sampled.weight_versions[-1].version))

    routes = turn.sampled.routed_experts
    if routes is not None:
        # One row per token of the turn: the experts of the token before it, which was the input
        # that it was sampled from. The row after the kept tokens belongs to the last of them.
        rows = routes[len(routes) - len(turn.sampled.output_ids) :]
        rows = rows[: min(kept + 1, len(ids))]
        unknown = np.full(
            (len(ids) - len(rows), *rows.shape[1:]), unknown_route(rows.dtype), rows.dtype
        )
        routes = np.concatenate([rows, unknown])

    return replace(
        sampled,
        output_ids=ids,
        output_log_probs=[0.0] * len(ids),
        weight_versions=versions,
        routed_experts=routes,
    )
