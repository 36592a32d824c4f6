"""Episodes as the exact token ids that the engine consumed and produced.

Text is never tokenized a second time. Position ``i`` is the same token for the engine, the trainer
and the report.
"""

import copy
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from megatron_gptoss.samples import check_route_array
from megatron_gptoss.token_columns import (
    INPUT_COLUMNS,
    TOKEN_COLUMNS,
    TokenColumns,
    as_column,
    check_column,
)
from rl_loop.data.stored_routes import StoredRoutes


class FinishReason(StrEnum):
    """Why sampling, or a whole episode, ended."""

    STOP = "stop"
    """A stop token was sampled / the agent gave its final answer."""
    LENGTH = "length"
    """The token budget of the turn ran out."""
    MAX_CONTEXT = "max_context"
    """The token budget of the episode, prompt and tool output included, ran out."""
    MAX_SAMPLED_TOKENS = "max_sampled_tokens"
    """The budget of sampled tokens of the episode ran out."""
    MAX_TURNS = "max_turns"
    """The agent used all its turns without a final answer."""
    MAX_TOOL_CALLS = "max_tool_calls"
    """The agent used all its tool calls without a final answer."""
    TIMEOUT = "timeout"
    """The wall-clock time of the episode ran out."""
    FORMAT_ERROR = "format_error"
    """The sampled tokens are no legal turn of the chat format."""
    ABORT = "abort"
    """The caller stopped it; partial tokens are kept."""


@dataclass(frozen=True)
class InvalidReason:
    """Why an episode says nothing about the policy: an infrastructure failure ended it."""

    component: str
    """One of ``rl_loop.infrastructure.COMPONENTS``."""
    reason: str
    """For people."""
    culprit: str = ""
    """What of the component it was, where that is known: a server, an agent's function, an
    environment."""


@dataclass(frozen=True)
class WeightVersionSpan:
    """Tokens ``[start, end)`` of a trajectory were sampled with policy weights ``version``."""

    start: int
    end: int
    version: int


@dataclass(frozen=True)
class Turn:
    """One contiguous piece of a trajectory: the prompt, or what policy, tools or user said."""

    role: str
    """Who said it: "prompt", "assistant", "tool" or "user"."""
    start: int
    """First token of the range [start, end) in the trajectory."""
    end: int
    text: str
    """Decoded for people; never fed back to a model."""


@dataclass(eq=False)
class Trajectory(TokenColumns[np.ndarray]):
    """One episode of one task. If an agent held several conversations, the first of them.

    ``token_ids`` are the prompt, the turns of the policy, and the messages of tools and user, as
    the engine had them. ``loss_mask`` is True exactly on sampled tokens. All columns are as long as
    ``token_ids``. A column may be given as a list, which is converted. An array must already have
    the declared dtype. ``validate`` checks the values.

    Raises:
        ColumnError: a column is missing or has another length, or cannot hold its values. The
            message names column and task.
    """

    task_id: str
    weight_versions: list[WeightVersionSpan] = field(default_factory=list)
    """Which weights sampled which tokens; covers all sampled ones, or none."""
    turns: list[Turn] = field(default_factory=list)
    routed_experts: np.ndarray | StoredRoutes | None = None
    """uint8 or int16 [len - 1, layers, top_k] (``megatron_gptoss.routes``): the experts of every
    token that was an input, so not of the last one. On the driver: where they are stored."""
    finish_reason: FinishReason = FinishReason.STOP
    reward: float = 0.0
    """NaN if the episode is ``invalid``."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    tool_calls: int = 0
    tool_errors: int = 0
    format_error: str | None = None
    """Which kind of illegal message ended the episode, see
    ``rl_loop.chat.messages.FormatError``."""
    excluded: bool = False
    """Not to be trained on: a limit cut it short, and the configuration masks such episodes."""
    grafted: list[tuple[int, int]] = field(default_factory=list)
    """Token ranges [start, end) that were sampled in another context and put here
    (``rollout.purification``)."""
    reusable_tokens: int = 0
    """What the engine had processed for earlier turns, added up over the turns; ``cached_tokens``
    of it were reused."""
    cached_tokens: int = 0
    prefilled_again: int = 0
    """What the engine computed again because turns were interrupted, by a weight sync mostly."""
    answer: str | None = None
    """The final answer in a form in which equal answers are equal text."""
    expected_answer: str | None = None
    """What the task has as the right one; None if it has none."""
    invalid: InvalidReason | None = None
    """Set if an infrastructure failure ended it; it must not be trained on. Its tokens are those
    from before."""
    branches: "list[Trajectory]" = field(default_factory=list)
    """Further token sequences of the same episode: conversations that an agent of its own held
    beside this one, or that it branched off. They share the reward, and have no branches."""

    def __post_init__(self) -> None:
        for name in TOKEN_COLUMNS:
            values = getattr(self, name)
            if values is None and name not in (*INPUT_COLUMNS, "rollout_log_probs"):
                continue
            # An array comes from code that knows the dtype: conversion would hide a mistake, such
            # as a byte order or a second dimension.
            if isinstance(values, np.ndarray):
                check_column(name, values, len(self), self._name)
            else:
                setattr(self, name, as_column(name, values, len(self), self._name))
        if self.routed_experts is not None:
            check_route_array(self.routed_experts, len(self), self._name)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def sequences(self) -> "list[Trajectory]":
        """All token sequences of the episode, this one first."""
        return [self, *self.branches]

    @property
    def sampled_tokens(self) -> int:
        """Tokens that were sampled in this sequence."""
        # Not sum(): Python's adds numbers of numpy in their own dtype, which may overflow.
        return int(np.count_nonzero(self.loss_mask))

    @property
    def episode_sampled_tokens(self) -> int:
        """Tokens that were sampled in all sequences of the episode."""
        return sum(sequence.sampled_tokens for sequence in self.sequences)

    @property
    def truncated(self) -> bool:
        """Whether a limit, not the agent, ended the episode."""
        return self.finish_reason not in (FinishReason.STOP, FinishReason.FORMAT_ERROR)

    @property
    def assistant_turns(self) -> int:
        """Turns of the policy in this sequence that are trained on."""
        return sum(turn.role == "assistant" for turn in self.turns)

    @property
    def episode_assistant_turns(self) -> int:
        """Turns of the policy in all sequences of the episode."""
        return sum(sequence.assistant_turns for sequence in self.sequences)

    def validate(self) -> None:
        """Check that the episode can be trained on.

        Raises:
            ValueError: it cannot. The message names the task and the field.
        """
        if self.invalid is not None:
            raise self._error(f"is invalid ({self.invalid.component}: {self.invalid.reason})")

        # Checked where the episode ends, because a NaN in the loss would not name the episode.
        log_probs = self.column("rollout_log_probs")
        finite = np.isfinite(log_probs)
        if not finite.all():
            raise self._error(f"rollout_log_probs holds {log_probs[finite.argmin()]}")
        if ((log_probs != 0) & ~self.loss_mask).any():
            raise self._error("rollout_log_probs is non-zero outside the loss mask")

        # Not every engine tells versions; one that does has to tell those of all tokens.
        covered = sum(span.end - span.start for span in self.weight_versions)
        if self.weight_versions and covered != self.sampled_tokens:
            raise self._error(
                f"weight_versions cover {covered} tokens, {self.sampled_tokens} were sampled"
            )

    def without_routes(self) -> "Trajectory":
        """Return a copy that shares everything but the routes, which it does not have."""
        # Not replace(), which would check all columns again.
        copied = copy.copy(self)
        copied.routed_experts = None
        copied.branches = [branch.without_routes() for branch in self.branches]
        return copied

    @property
    def _name(self) -> str:
        return f"task {self.task_id}"

    def _error(self, what: str) -> ValueError:
        return ValueError(f"trajectory of task {self.task_id}: {what}")


@dataclass
class TrajectoryGroup:
    """The samples of one task: the unit over which group-relative advantages are computed.

    A single trajectory has nothing to be compared with: its group-relative advantage is 0."""

    task_id: str
    trajectories: list[Trajectory]
    """What is trained on and evaluated: fewer than were asked for, perhaps none, where
    infrastructure failed or the prompt cannot be used."""
    invalid: list[Trajectory] = field(default_factory=list)
    """Episodes that infrastructure failures ended."""
    skipped: str | None = None
    """Why no episode of the task was run, if none was: its prompt is too long or cannot be
    rendered."""

    @property
    def sequences(self) -> list[Trajectory]:
        """The token sequences of all valid episodes, in order: what samples are made of."""
        return [sequence for episode in self.trajectories for sequence in episode.sequences]

    def without_routes(self) -> "TrajectoryGroup":
        """Return a copy without routes: these lie in Ray's store, and may go before it does."""
        return replace(
            self,
            trajectories=[trajectory.without_routes() for trajectory in self.trajectories],
            invalid=[trajectory.without_routes() for trajectory in self.invalid],
        )
