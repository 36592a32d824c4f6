"""Trajectory purification (CLEANER, arXiv 2601.15141): a failed tool call is retried; the episode keeps the good one.

The agent sees the error and writes the turn again. The new call replaces the old one in the context from before the
error, behind the old reasoning if the calls are alike; the world is set back and the call executed. Tokens that moved
are *grafted*: their log-probs are computed anew, and rollout correction and routing replay leave them out."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_loop.config.episode import PurificationConfig
from rl_loop.data.trajectory import FinishReason, WeightVersionSpan
from rl_loop.environments.base import Environment, StepResult
from rl_loop.harmony.codec import FormatError, Harmony, ParsedMessage
from rl_loop.off_loop import off_loop

if TYPE_CHECKING:
    from rl_loop.engines.protocol import GenerateResult


COMPARED = 1024
"""Characters of two calls that are compared. difflib may need the cube of their number: seconds for these."""


@dataclass
class Attempt:
    """What the policy wrote after ``prefix`` and what came of it; its first ``kept`` tokens were sampled there."""

    prefix: list[int]
    sampled: "GenerateResult"
    messages: list[ParsedMessage]
    result: StepResult
    kept: int


Sample = Callable[[str, list[int]], Awaitable["GenerateResult | None"]]
"""(name, ids) -> a sampled turn, None if there is no room for one"""
Score = Callable[[list[int]], Awaitable[list[float]]]  # ids -> log-probs of all but the first
Render = Callable[[StepResult], Awaitable[list[int]]]  # ids of what a turn led to, as the agent reads them
Act = Callable[[Sequence[ParsedMessage]], Awaitable[StepResult]]  # what a turn leads to


@dataclass
class Purifier:
    """Retries failed tool calls within one episode."""

    config: PurificationConfig
    environment: Environment
    harmony: Harmony
    max_tokens: int
    sample: Sample
    score: Score
    act: Act
    render: Render
    attempts: int = 0

    async def purified(self, failed: Attempt, before: Any) -> Attempt | None:
        """A turn in place of ``failed``; None if the error stays. ``before``: the environment's state before it.

        If time runs out meanwhile, the environment is in the middle of a retry, and the episode ends."""
        after = self.environment.save_state()
        turn = failed
        for _ in range(self.config.retries):
            if self.attempts >= self.config.attempts:
                break
            self.attempts += 1
            new = await self._again(turn)
            if new is None:
                break

            self.environment.restore_state(before)
            turn = replace(new, result=await self.act(new.messages))
            if turn.result.tool_errors == 0 and turn.result.format_error is None:
                return await self._scored(turn, failed)

        self.environment.restore_state(after)
        return None

    async def _scored(self, turn: Attempt, failed: Attempt) -> Attempt:
        """The turn with the log-probs of its tokens where they now stand."""
        scored = (await self.score(turn.prefix + turn.sampled.output_ids))[len(turn.prefix) - 1 :]
        log_probs = failed.sampled.output_log_probs[: turn.kept] + scored[turn.kept :]
        return replace(turn, sampled=replace(turn.sampled, output_log_probs=log_probs))

    async def _again(self, turn: Attempt) -> Attempt | None:
        """The turn as the agent writes it after seeing the error, put in the place of the failed one."""
        error = await self.render(turn.result)
        prefix = turn.prefix + turn.sampled.output_ids + error
        sampled = await self.sample(f"retry{self.attempts}", prefix)
        if sampled is None or sampled.finish_reason is not FinishReason.STOP:
            return None
        return await off_loop(self._merged, turn, sampled)

    def _merged(self, turn: Attempt, sampled: "GenerateResult") -> Attempt | None:
        """The new turn where the failed one stood, behind its reasoning if the calls are alike. None if it has no call,
        or there is no room for it."""
        messages = self.harmony.parse(sampled.output_ids)
        if isinstance(messages, FormatError) or not _calls(messages):
            return None  # it gave up on the tool

        kept, new = 0, sampled.output_ids
        if _similarity(_calls(turn.messages), _calls(messages)) >= self.config.similarity:
            head, _ = self._split(turn.sampled.output_ids, turn.messages)
            _, tail = self._split(new, messages)
            kept = min(len(head), turn.kept)
            new = head + self.harmony.assistant_header + tail if head else tail

        merged = self.harmony.parse(new)
        if isinstance(merged, FormatError) or len(turn.prefix) + len(new) > self.max_tokens:
            return None
        return Attempt(turn.prefix, _grafted(turn, sampled, new, kept), merged, turn.result, kept)

    def _split(self, ids: list[int], messages: Sequence[ParsedMessage]) -> tuple[list[int], list[int]]:
        """The ids of the messages before the first call, and the call's own after its ``<|start|>assistant``."""
        first = next(i for i, message in enumerate(messages) if message.recipient is not None)
        if first == 0:
            return [], ids
        header = self.harmony.assistant_header
        starts = [i for i, token in enumerate(ids) if token == header[0]]
        return ids[: starts[first - 1]], ids[starts[first - 1] + len(header) :]


def _calls(messages: Sequence[ParsedMessage]) -> str:
    return "\n".join(message.text for message in messages if message.recipient is not None)


def _similarity(old: str, new: str) -> float:
    """difflib's ratio of two texts, of their beginnings if they are long."""
    return SequenceMatcher(None, old[:COMPARED], new[:COMPARED], autojunk=False).ratio()


def _grafted(turn: Attempt, sampled: "GenerateResult", ids: list[int], kept: int) -> "GenerateResult":
    """``ids`` as a result in the place of the turn's own, of which the first ``kept`` tokens are the same."""
    own = [replace(s, end=min(s.end, kept)) for s in turn.sampled.weight_versions if s.start < kept]
    new = [WeightVersionSpan(kept, len(ids), span.version) for span in sampled.weight_versions[-1:]]
    routes = turn.sampled.routed_experts
    if routes is not None:
        rows = len(turn.prefix) + len(ids) - 1
        routes = routes[: min(rows, len(turn.prefix) + kept)]
        routes = np.concatenate([routes, np.full((rows - len(routes), *routes.shape[1:]), -1, routes.dtype)])
    versions = own + new if new else []
    placed = replace(sampled, output_ids=ids, output_log_probs=[0.0] * len(ids))
    return replace(placed, weight_versions=versions, routed_experts=routes)
