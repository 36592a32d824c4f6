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
    MAX_EPISODE_TOKENS = "max_episode_tokens"
    """The token budget of the episode, prompt and tool output included, ran out."""
    MAX_SAMPLED_TOKENS = "max_sampled_tokens"
    """The episode's budget of sampled tokens ran out."""
    MAX_TURNS = "max_turns"
    """The agent used all its turns without a final answer."""
    MAX_TOOL_CALLS = "max_tool_calls"
    """The agent used all its tool calls without a final answer."""
    TIMEOUT = "timeout"
    """The wall-clock time of the episode ran out."""
    FORMAT_ERROR = "format_error"
    """The sampled tokens are a malformed turn of the chat format."""
    ABORT = "abort"
    """The caller stopped it. Tokens sampled so far are kept."""


@dataclass(frozen=True)
class InvalidReason:
    """Infrastructure failure that ended an episode.

    The episode says nothing about the policy.
    """

    component: str
    """One of ``rl_loop.infrastructure.COMPONENTS``."""
    reason: str
    """For people."""
    failure_source: str = ""
    """Failing part of the component if it is known: a server, a function of an agent, an
    environment."""


@dataclass(frozen=True)
class WeightVersionSpan:
    """Tokens ``[start, end)`` of a trajectory were sampled with policy weights ``version``."""

    start: int
    end: int
    version: int


@dataclass(frozen=True)
class Turn:
    """One contiguous part of a trajectory: the prompt, or a message of policy, tools or user."""

    role: str
    """Author of the turn: "prompt", "assistant", "tool" or "user"."""
    start: int
    """First token of the range [start, end) in the trajectory."""
    end: int
    """End of the range."""
    text: str
    """Decoded text for people. It is never an input of a model."""
    # Two samples of the same tokens are equal turns, however long they took.
    seconds: float | None = field(default=None, compare=False)
    """Seconds in which the turn was sampled, or in which tools or user produced it. None if they
    were not measured."""
    waited: float | None = field(default=None, compare=False)
    """Seconds in a queue, or before a failed call was repeated, in addition to ``seconds``. None if
    they were not measured."""


@dataclass(eq=False)
class Trajectory(TokenColumns[np.ndarray]):
    """One episode of one task. If an agent held several conversations, the first of them.

    ``token_ids`` are the prompt, the turns of the policy, and the messages of tools and user, as
    the engine had them. ``loss_mask`` is True exactly on sampled tokens. In a branch, turns that an
    earlier sequence already has count as prompt. All columns are as long as ``token_ids``. A column
    may be given as a list, which is converted. An array must already have the declared dtype.
    ``validate`` checks the values.

    Raises:
        ColumnError: a column is missing or has another length, or cannot hold its values. The
            message names column and task.

    Example:
        >>> # A prompt of 1 token, and a sampled token with its log-prob in nats.
        >>> columns = {"token_ids": [5, 6], "loss_mask": [0, 1], "rollout_log_probs": [0, -1]}
        >>> episode = Trajectory("task", **columns)
        >>> episode.rollout_log_probs.dtype, len(episode)
        (dtype('float32'), 2)
    """

    task_id: str
    weight_versions: list[WeightVersionSpan] = field(default_factory=list)
    """Weight versions of the sampled tokens. Covers all sampled tokens, or none."""
    turns: list[Turn] = field(default_factory=list)
    """Parts of the trajectory, in order."""
    teacher_prompt: np.ndarray | None = None
    """int32: token ids that a teacher sees instead of the first turn. None if it sees the same."""
    routed_experts: np.ndarray | StoredRoutes | None = None
    """uint8 or int16 [len - 1, layers, top_k] (``megatron_gptoss.routes``): experts of every input
    token, which excludes the last one. A reference on the driver."""
    finish_reason: FinishReason = FinishReason.STOP
    reward: float = 0.0
    """NaN if the episode is ``invalid``."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    tool_calls: int = 0
    tool_errors: int = 0
    format_error: str | None = None
    """Kind of malformed message that ended the episode, see
    ``rl_loop.chat.messages.FormatError``."""
    excluded: bool = False
    """True if a limit truncated the episode and the configuration masks truncated episodes. It is
    not trained on."""
    spliced: list[tuple[int, int]] = field(default_factory=list)
    """Token ranges [start, end) that were sampled in another context
    (``rollout.purification``)."""
    constrained: list[tuple[int, int]] = field(default_factory=list)
    """Token ranges [start, end) that a constraint of the request kept from being samples of the
    policy. Their log-probs are those of the policy without the constraint."""
    reusable_tokens: int = 0
    """Tokens that the engine had processed for earlier turns, summed over the turns."""
    cached_tokens: int = 0
    """Reusable tokens that the engine took from its cache."""
    recomputed_tokens: int = 0
    """Tokens that the engine processed again because a turn was interrupted, mostly by a weight
    sync."""
    answer: str | None = None
    """Final answer in a normalized form: equal answers are equal text."""
    expected_answer: str | None = None
    """Correct answer of the task. None if the task has no correct answer."""
    invalid: InvalidReason | None = None
    """Set if an infrastructure failure ended the episode, which must not be trained on. Its tokens
    precede the failure."""
    branches: "list[Trajectory]" = field(default_factory=list)
    """Further token sequences of the same episode: concurrent or branched conversations of an
    external agent. They share the reward, and have no branches."""

    def __post_init__(self) -> None:
        for name in TOKEN_COLUMNS:
            values = getattr(self, name)
            # Other columns are optional. These are always needed.
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
        # Not sum(), which adds NumPy numbers in their dtype and may overflow.
        return int(np.count_nonzero(self.loss_mask))

    @property
    def episode_sampled_tokens(self) -> int:
        """Tokens that were sampled in all sequences of the episode."""
        return sum(sequence.sampled_tokens for sequence in self.sequences)

    @property
    def truncated(self) -> bool:
        """True if a limit, not the agent, ended the episode."""
        # A malformed turn ends an episode, but the agent and not a limit is the cause.
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
        # Such an episode says nothing about the policy.
        if self.invalid is not None:
            raise self._error(
                "it ended with an infrastructure failure and cannot be trained on "
                f"({self.invalid.component}: {self.invalid.reason})"
            )

        # Checked where the episode ends, because a NaN in the loss would not name the episode.
        for name, column in self.columns.items():
            if column.dtype.kind == "f" and not (finite := np.isfinite(column)).all():
                raise self._error(f"{name} contains {column[finite.argmin()]}")
        # Sums over a sequence would include a log-prob of a token that was not sampled.
        log_probs = self.column("rollout_log_probs")
        if ((log_probs != 0) & ~self.loss_mask).any():
            raise self._error("rollout_log_probs is non-zero outside the loss mask")

        # Not every engine reports versions. If one does, it has to report them for all tokens.
        covered = sum(span.end - span.start for span in self.weight_versions)
        if self.weight_versions and covered != self.sampled_tokens:
            raise self._error(
                f"weight_versions cover {covered} tokens, but {self.sampled_tokens} were sampled"
            )

    def without_routes(self) -> "Trajectory":
        """Return a copy without routes that shares everything else."""
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
    """The episodes of one task, over which group-relative advantages are computed.

    The group-relative advantage of a single trajectory is 0.
    """

    task_id: str
    trajectories: list[Trajectory]
    """Episodes to train on or to evaluate. Fewer than requested, possibly none, after
    infrastructure failures or with an unusable prompt."""
    invalid: list[Trajectory] = field(default_factory=list)
    """Episodes that infrastructure failures ended."""
    source: str = ""
    """Name of the task's source in ``tasks.sources``."""
    skipped: str | None = None
    """Reason why no episode was run: the prompt is too long or cannot be rendered. None if episodes
    were run."""

    @property
    def sequences(self) -> list[Trajectory]:
        """Token sequences of all valid episodes, in order."""
        return [sequence for episode in self.trajectories for sequence in episode.sequences]

    def without_routes(self) -> "TrajectoryGroup":
        """Return a copy without routes, which stay in Ray's store and may be freed earlier."""
        return replace(
            self,
            trajectories=[trajectory.without_routes() for trajectory in self.trajectories],
            invalid=[trajectory.without_routes() for trajectory in self.invalid],
        )
