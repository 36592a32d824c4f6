"""Output of ``gptoss play``: the steps of an episode as they happen, and its outcome."""

import os
import traceback
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console

import rl_loop
from launch.standard_input import StandardInput
from launch.token_display import color_tokens, print_line, token_lines
from rl_loop.chat.codec import ChatCodec
from rl_loop.data.trajectory import FinishReason, Trajectory, TrajectoryGroup
from rl_loop.environments import StepResult, Task
from rl_loop.infrastructure import InfrastructureError

LOOP = f"{Path(rl_loop.__file__).parent}{os.sep}"
"""Directory of the package with the agent loop."""
FORMAT_ERRORS = {
    "structure": "the special tokens are not in the order of the chat format",
    "header": "the header of a message cannot be parsed",
    "role": "a message has another author than the assistant",
    "channel": "a channel is not analysis, commentary or final",
    "recipient": "calls must come last and end with <|call|>, without a final answer",
    "tool_call": "a call is not a JSON object with name and arguments",
    "unknown_tool": "the environment has no such tool",
    "unanswered": "the turn has neither a call nor a final answer",
}
"""Explanations of format errors by their kind."""


class EpisodeTerminal:
    """Terminal of one episode. Implements ``rl_loop.play.episode.EpisodeView``."""

    def __init__(self, console: Console, lines: StandardInput, *, list_tokens: bool) -> None:
        """Create the display.

        Args:
            console: output.
            lines: input of the person who plays.
            list_tokens: whether to print a line per token instead of text.
        """
        self._console = console
        self._input = lines
        self._list_tokens = list_tokens
        self._codec: ChatCodec | None = None
        self._has_tokens = False

    # ---- the steps

    def show_task(self, task: Task, codec: ChatCodec) -> None:
        """Print the name of the task. The codec decodes the tokens of all steps."""
        self._codec = codec
        self._print(f"task {task.task_id} of environment {task.environment}", style="bold")

    def show_tokens(self, role: str, start: int, ids: Sequence[int]) -> None:
        """Print tokens with their loss mask. The policy's tokens have a loss."""
        self._has_tokens = True
        has_loss = role == "assistant"
        title = (
            f"{role}: tokens {start}-{start + len(ids) - 1}, {'loss' if has_loss else 'no loss'}"
        )
        self._console.print()
        self._print(title, style="bold")

        assert self._codec is not None
        token_ids, mask = np.array(ids), np.full(len(ids), has_loss)
        if self._list_tokens:
            for line in token_lines(token_ids, mask, self._codec, start):
                self._print(line)
        # Colors are lost in a file, which has the mask in the title.
        elif self._console.is_terminal:
            self._console.print(color_tokens(token_ids, mask, self._codec), highlight=False)
        else:
            self._print(self._codec.decode(ids))

    def show_result(self, result: StepResult) -> None:
        """Print the number of tool errors, whose texts are in the tokens that follow."""
        if result.tool_errors:
            self._console.print()
            self._print(
                f"tool errors: {result.tool_errors} of {result.tool_calls} calls. The policy reads the messages",
                style="yellow",
            )

    def show_failure(self, failure: InfrastructureError) -> None:
        """Print the lines of the environment's code in which the failure occurred."""
        cause = failure.__cause__
        frames = traceback.extract_tb(cause.__traceback__) if cause is not None else []
        # The loop's own frames say nothing about the mistake.
        author_frames = [frame for frame in frames if not frame.filename.startswith(LOOP)]
        if author_frames:
            self._console.print()
        for frame in author_frames:
            place = f"{_short(frame.filename)}:{frame.lineno} in {frame.name}"
            self._print(f"  {place}: {frame.line}")

    # ---- the person who plays

    def tell(self, text: str) -> None:
        """Print a message to the person who plays."""
        self._print(text)

    async def read_line(self) -> str | None:
        """Return the next line of standard input. None at its end."""
        if self._console.is_terminal:
            self._console.print("> ", end="")
        return await self._input.read_line()

    # ---- the outcome

    def print_outcome(self, group: TrajectoryGroup) -> bool:
        """Print ending, counts and reward. Return True if the episode is valid."""
        if group.skipped is not None:
            self._console.print()
            self._print(f"skipped: {group.skipped}", style="bold red")
            return False

        [episode] = group.trajectories or group.invalid
        # The turns of an external agent are known at the end.
        if not self._has_tokens:
            for sequence in episode.sequences:
                for turn in sequence.turns:
                    ids = sequence.token_ids[turn.start : turn.end].tolist()
                    self.show_tokens(turn.role, turn.start, ids)

        self._console.print()
        if episode.invalid is not None:
            component, reason = episode.invalid.component, episode.invalid.reason
            self._print(f"end: infrastructure failure of {component}: {reason}", style="bold red")
            self._print("The episode is invalid: it has no reward and is not trained on")
            return False
        for line in outcome_lines(episode):
            self._print(line)
        return True

    def _print(self, line: str, style: str | None = None) -> None:
        print_line(line, self._console, style)


def outcome_lines(episode: Trajectory) -> list[str]:
    """Return ending, counts, answer and reward of a valid episode."""
    turns = sum(turn.role == "assistant" for turn in episode.turns)
    trained = f"{int(np.count_nonzero(episode.loss_mask))} with loss"
    if episode.excluded:
        trained = "no loss, because rollout.truncated_episodes is mask"
    counts = f"turns {turns}, tool calls {episode.tool_calls}, tool errors {episode.tool_errors}"
    lines = [f"end: {_ending(episode)}", f"{counts}, tokens {len(episode)} ({trained})"]
    if episode.answer is not None or episode.expected_answer is not None:
        answer = "none" if episode.answer is None else episode.answer
        lines.append(f"answer: {answer}; expected: {episode.expected_answer}")
    parts = ", ".join(f"{name} {value:g}" for name, value in episode.reward_parts.items())
    lines.append(f"reward: {episode.reward:g} ({parts})")
    return lines


def _ending(episode: Trajectory) -> str:
    """Return the reason why a valid episode ended."""
    if episode.format_error is not None:
        kind = episode.format_error
        known = FORMAT_ERRORS.get(kind)
        return f"format error {kind}" + (f": {known}" if known else "")
    if episode.finish_reason is FinishReason.STOP:
        return "stop"
    return f"{episode.finish_reason} (a limit truncated the episode)"


def _short(filename: str) -> str:
    """Return a path relative to the working directory if it is inside."""
    path = Path(filename)
    return os.fspath(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else filename
