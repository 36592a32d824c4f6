"""Trajectory purification (CLEANER, arXiv 2601.15141): a failed tool call is retried, and the
good one kept.

The agent sees the error and writes the turn again. The new call replaces the old one in the
context from before the error, behind the old reasoning if the calls are alike; the world is set
back and the call executed. Tokens that moved are *grafted*: their log-probs are computed anew,
and rollout correction and routing replay leave them out."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_gptoss.routes import unknown_route
from rl_loop.chat.codec import ChatCodec
from rl_loop.chat.messages import FormatError, ParsedMessage
from rl_loop.config.episode import PurificationConfig
from rl_loop.data.trajectory import FinishReason, WeightVersionSpan
from rl_loop.environments.base import Environment, StepResult
from rl_loop.off_loop import off_loop

if TYPE_CHECKING:
    from rl_loop.engines.protocol import GenerateResult

MAX_RETRIES = 30
"""Retries of a whole episode."""
SIMILARITY = 0.5
"""Least similarity of old and new call (difflib's ratio) that keeps the old reasoning."""
COMPARED_CHARACTERS = 1024
"""Of two calls that are compared. difflib may need the cube of their number: seconds for these."""


@dataclass
class Attempt:
    """A turn that the policy wrote, and what came of it."""

    prefix: list[int]
    """The tokens before the turn."""
    sampled: "GenerateResult"
    messages: list[ParsedMessage]
    """The turn, parsed."""
    result: StepResult
    kept: int
    """Its first tokens, as many as were sampled behind ``prefix``; the others are grafted."""


Sample = Callable[[str, list[int]], Awaitable["GenerateResult | None"]]
"""(name, ids) -> a sampled turn, None if there is no room for one."""
Score = Callable[[list[int]], Awaitable[list[float]]]
"""ids -> log-probs of all but the first."""
Render = Callable[[StepResult], Awaitable[list[int]]]
"""What a turn led to -> its ids, as the agent reads them."""
Act = Callable[[Sequence[ParsedMessage]], Awaitable[StepResult]]
"""A turn -> what it leads to."""


@dataclass
class Purifier:
    """Retries failed tool calls within one episode."""

    config: PurificationConfig
    environment: Environment
    codec: ChatCodec
    max_tokens: int
    """Of the episode."""
    sample: Sample
    score: Score
    act: Act
    render: Render
    attempts: int = 0
    """Retries so far, of all turns."""

    async def purify(self, failed: Attempt, before: Any) -> Attempt | None:
        """Find a turn to put in place of ``failed``. Returns None if the error stays.

        ``before``: the environment's state before the failed turn. If time runs out meanwhile,
        the environment is in the middle of a retry, and the episode ends."""
        # If all retries fail, the episode goes on from behind the failed turn.
        after = self.environment.save_state()
        turn = failed
        for _ in range(self.config.retries):
            if self.attempts >= MAX_RETRIES:
                break
            self.attempts += 1
            retried = await self._write_again(turn)
            if retried is None:
                break

            self.environment.restore_state(before)
            result = await self.act(retried.messages)
            turn = replace(retried, result=result)
            if result.tool_errors == 0 and result.format_error is None:
                return await self._rescore(turn, failed)

        self.environment.restore_state(after)
        return None

    async def _rescore(self, turn: Attempt, failed: Attempt) -> Attempt:
        """Give grafted tokens the log-probs that they have where they now stand."""
        scores = await self.score(turn.prefix + turn.sampled.output_ids)
        of_turn = scores[len(turn.prefix) - 1 :]
        log_probs = failed.sampled.output_log_probs[: turn.kept] + of_turn[turn.kept :]
        return replace(turn, sampled=replace(turn.sampled, output_log_probs=log_probs))

    async def _write_again(self, turn: Attempt) -> Attempt | None:
        """Let the agent read the error and write the turn again.

        Returns it in the failed one's place."""
        error = await self.render(turn.result)
        prefix = turn.prefix + turn.sampled.output_ids + error
        sampled = await self.sample(f"retry{self.attempts}", prefix)
        if sampled is None or sampled.finish_reason is not FinishReason.STOP:
            return None
        return await off_loop(self._merge, turn, sampled)

    def _merge(self, turn: Attempt, sampled: "GenerateResult") -> Attempt | None:
        """Put the new turn where the failed one stood, behind its reasoning if calls are alike.

        Returns None if it has no call, or there is no room for it."""
        messages = self.codec.parse(sampled.output_ids)
        if isinstance(messages, FormatError) or not _calls(messages):
            return None  # it gave up on the tool

        kept = 0
        ids = sampled.output_ids
        if _similarity(_calls(turn.messages), _calls(messages)) >= SIMILARITY:
            reasoning, _ = self.codec.split_at_calls(turn.sampled.output_ids, turn.messages)
            _, call = self.codec.split_at_calls(sampled.output_ids, messages)
            kept = min(len(reasoning), turn.kept)
            ids = self.codec.join_with_calls(reasoning, call)

        # Parsed anew: two halves of legal turns need not make a legal one.
        merged = self.codec.parse(ids)
        if isinstance(merged, FormatError) or len(turn.prefix) + len(ids) > self.max_tokens:
            return None
        return Attempt(turn.prefix, _graft(turn, sampled, ids, kept), merged, turn.result, kept)


def _calls(messages: Sequence[ParsedMessage]) -> str:
    """Return the texts of a turn's calls."""
    return "\n".join(message.text for message in messages if message.recipient is not None)


def _similarity(old: str, new: str) -> float:
    """Return difflib's ratio of two texts, of their beginnings if they are long."""
    old = old[:COMPARED_CHARACTERS]
    new = new[:COMPARED_CHARACTERS]
    return SequenceMatcher(None, old, new, autojunk=False).ratio()


def _graft(turn: Attempt, sampled: "GenerateResult", ids: list[int], kept: int) -> "GenerateResult":
    """Return ``ids`` as a result in place of the turn's own; the first ``kept`` are the same.

    Grafted tokens have log-probs of 0 until they are scored, and routes that are not known: the
    trainer chooses for them."""
    versions: list[WeightVersionSpan] = []
    if sampled.weight_versions:
        for span in turn.sampled.weight_versions:
            if span.start < kept:
                versions.append(replace(span, end=min(span.end, kept)))
        versions.append(WeightVersionSpan(kept, len(ids), sampled.weight_versions[-1].version))

    routes = turn.sampled.routed_experts
    if routes is not None:
        # Of the last token there is no route, as it was an input to nothing yet.
        rows = len(turn.prefix) + len(ids) - 1
        routes = routes[: min(rows, len(turn.prefix) + kept)]
        unknown = np.full(
            (rows - len(routes), *routes.shape[1:]), unknown_route(routes.dtype), routes.dtype
        )
        routes = np.concatenate([routes, unknown])

    return replace(
        sampled,
        output_ids=ids,
        output_log_probs=[0.0] * len(ids),
        weight_versions=versions,
        routed_experts=routes,
    )
