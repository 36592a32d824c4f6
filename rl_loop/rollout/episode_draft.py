"""An episode in progress: lists that grow turn by turn, and become a Trajectory at the end."""

from collections.abc import Sequence

import numpy as np

from megatron_gptoss.token_columns import as_column
from rl_loop.data.trajectory import Trajectory, Turn, WeightVersionSpan
from rl_loop.engines.protocol import GenerateResult
from rl_loop.rollout.episode_clock import CallTime
from rl_loop.rollout.turn_sampler import shift_spans


class EpisodeDraft:
    """Tokens and counters of one episode so far."""

    def __init__(self, task_id: str) -> None:
        self.task_id = task_id
        self.token_ids: list[int] = []
        """Prompt, turns of the policy, tool outputs and user messages."""
        self.teacher_prompt: list[int] | None = None
        """Prompt that a teacher sees instead. None if it sees that of the policy."""
        self.turns: list[Turn] = []
        self.spliced: list[tuple[int, int]] = []
        """Token ranges that were sampled in another context."""
        self.constrained: list[tuple[int, int]] = []
        """Token ranges that were sampled under a constraint."""
        self.tool_calls = 0
        self.tool_errors = 0
        self.reusable_tokens = 0
        self.cached_tokens = 0

        self._log_probs: list[float] = []
        """Log-prob of each token, 0.0 for tokens that were not sampled."""
        self._weight_versions: list[WeightVersionSpan] = []
        self._routes: list[np.ndarray] = []
        """Parts of the routes for the tokens so far. They are large, so they are joined only
        once."""
        self.routed_tokens = 0
        """Number of tokens in all parts: the first tokens of the episode."""

    def __len__(self) -> int:
        """Return the number of tokens so far."""
        return len(self.token_ids)

    def append(
        self,
        role: str,
        ids: Sequence[int],
        text: str,
        sampled: GenerateResult | None = None,
        time: CallTime | None = None,
    ) -> None:
        """Append a turn.

        Args:
            role: author of the turn: "prompt", "assistant", "tool" or "user".
            ids: token ids of the turn.
            text: text of the turn, for people.
            sampled: result of the engine. None if the policy is not the author.
            time: duration of the turn. None if it was not measured.
        """
        start = len(self)
        self.token_ids += ids
        time = time or CallTime()
        self.turns.append(Turn(role, start, len(self), text, time.seconds, time.waited))
        if sampled is None:
            self._log_probs += [0.0] * len(ids)
            return

        self._log_probs += sampled.output_log_probs
        self._weight_versions += shift_spans(sampled.weight_versions, start)
        if sampled.routed_experts is not None:
            self.append_routes(sampled.routed_experts)

    def note_reuse(self, sampled: GenerateResult) -> None:
        """Count the tokens that the engine had processed before a turn, and those it reused.

        Call it before the turn and the tool outputs before it are appended. All tokens so far have
        been processed once.
        """
        # The tool outputs after them are new to the engine, so they cannot be in its cache.
        self.reusable_tokens += len(self)
        self.cached_tokens += min(len(self), sampled.cached_tokens)

    def remove_last_turn(self) -> Turn:
        """Remove the last turn, which the policy sampled, and return it."""
        turn = self.turns.pop()
        del self.token_ids[turn.start :]
        del self._log_probs[turn.start :]
        self._weight_versions = [span for span in self._weight_versions if span.start < turn.start]

        # The token before the turn is first an input of the turn itself, so its route is unknown,
        # too.
        known = max(0, turn.start - 1)
        while self.routed_tokens > known:
            # Pieces do not end where turns end, so the last one may need a cut.
            piece = self._routes.pop()
            self.routed_tokens -= len(piece)
            self.append_routes(piece[: max(0, known - self.routed_tokens)])
        return turn

    def to_trajectory(self, *, with_routes: bool = True) -> Trajectory:
        """Return the episode without its outcome, which the caller sets.

        Raises:
            ColumnError: the columns do not fit together.
        """
        whose = f"task {self.task_id}"
        loss_mask = np.zeros(len(self), dtype=np.bool_)
        for turn in self.turns:
            loss_mask[turn.start : turn.end] = turn.role == "assistant"

        teacher_prompt = None
        if self.teacher_prompt is not None:
            teacher_prompt = np.array(self.teacher_prompt, dtype=np.int32)
        routes = None
        if with_routes and self._routes:
            routes = np.concatenate(self._routes)
        return Trajectory(
            task_id=self.task_id,
            token_ids=as_column("token_ids", self.token_ids, len(self), whose),
            loss_mask=loss_mask,
            rollout_log_probs=as_column("rollout_log_probs", self._log_probs, len(self), whose),
            weight_versions=self._weight_versions,
            turns=self.turns,
            teacher_prompt=teacher_prompt,
            routed_experts=routes,
            tool_calls=self.tool_calls,
            tool_errors=self.tool_errors,
            spliced=self.spliced,
            constrained=self.constrained,
            reusable_tokens=self.reusable_tokens,
            cached_tokens=self.cached_tokens,
        )

    def append_routes(self, piece: np.ndarray | None) -> None:
        """Append the routes of tokens after those with routes. None for unknown routes."""
        if piece is not None and len(piece) > 0:
            self._routes.append(piece)
            self.routed_tokens += len(piece)
