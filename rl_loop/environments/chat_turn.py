"""One turn of a held-out conversation: the policy samples it, and it is compared with the reference.

``rl_loop.tasks.chat_turns`` makes the tasks.
"""

from collections.abc import Sequence
from dataclasses import replace

from rl_loop.chat.messages import ParsedMessage
from rl_loop.chat.turn_content import TurnContent
from rl_loop.environments.base import Environment, StepResult


class ChatTurnEnvironment(Environment):
    """An episode of one turn, which continues the true history of a conversation.

    The turn is correct if it makes the calls of the reference, or has the text of its answer. Calls
    are not executed. The reward part "function" is 1 if the functions are those of the reference,
    whatever their arguments. For an answer it is 1 if the turn makes no call.
    """

    def prompt_ids(self) -> Sequence[int]:
        data = self.task.metadata
        # Turns of a conversation share one list, so a task has no copy of its history.
        ids: list[int] = data["token_ids"]
        return ids[: data["prompt_tokens"]]

    async def step(self, messages: Sequence[ParsedMessage]) -> StepResult:
        sampled = TurnContent.of(messages)
        # The user would not see a text on another channel.
        if not sampled.calls and messages[-1].channel != "final":
            return self.end_with_format_error("unanswered")

        reference = TurnContent.from_json(self.task.metadata["reference"])
        ended = self.end_with_score(
            float(sampled.equals(reference)),
            str(sampled),
            function=float(sampled.functions == reference.functions),
        )
        return replace(ended, tool_calls=len(sampled.calls))

    def end_truncated(self) -> StepResult:
        return self.end_with_score(0.0, function=0.0)
