"""Demonstrations for supervised fine-tuning: whole episodes in the exact tokens of a rollout, with their loss mask.

A mixture that leaves reinforcement learning something to do: many demonstrations answer from the head, mostly wrongly,
some call Python, some call it with a mistake first.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rl_loop.arithmetic import Problem
from rl_loop.harmony import Harmony, ParsedMessage, ToolOutput


class DemonstrationConfig(BaseModel):
    """The mixture of demonstrations; direct + tool + corrected must be 1."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    direct: float = Field(0.5, ge=0, le=1)
    """Share answered from the head, without a tool."""
    direct_correct: float = Field(0.1, ge=0, le=1)
    """Of the direct answers, the share that is right."""
    tool: float = Field(0.35, ge=0, le=1)
    """Share with one correct call, then the answer."""
    corrected: float = Field(0.15, ge=0, le=1)
    """Share with a call that fails, a corrected call, then the answer."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        total = self.direct + self.tool + self.corrected
        if abs(total - 1) > 1e-6:
            raise ValueError(f"direct + tool + corrected must be 1, got {total}")
        return self


@dataclass(frozen=True)
class Demonstration:
    """Token ids of an episode; the mask is 1 on what a policy would have sampled. Both of one length."""

    token_ids: list[int]
    loss_mask: list[int]


def demonstrate(
    problem: Problem, prompt: Sequence[int], harmony: Harmony, mixture: DemonstrationConfig, rng: random.Random
) -> Demonstration:
    """One episode of a random kind on ``problem``; ``prompt`` are the ids that a rollout would start from."""
    ids, mask = list(prompt), [0] * len(prompt)

    def say(message: ParsedMessage, thought: str | None, end: Literal["<|return|>", "<|call|>"]) -> None:
        thinking = [] if thought is None else [ParsedMessage("analysis", None, None, thought)]
        turn = harmony.render_assistant([*thinking, message], end)
        ids.extend(turn)
        mask.extend([1] * len(turn))

    def call(code: str, output: str, thought: str) -> None:
        say(ParsedMessage("analysis", "python", "code", code), thought, "<|call|>")
        answer = harmony.render_tool_outputs([ToolOutput("python", "analysis", output)])
        ids.extend(answer)
        mask.extend([0] * len(answer))

    thought: str | None
    kind = rng.random()
    if kind < mixture.direct:
        answer = problem.answer if rng.random() < mixture.direct_correct else _guess(problem.answer, rng)
        thought = "I know."
    else:
        if kind < mixture.direct + mixture.corrected:
            broken, error = _mistake(problem.expression, rng)
            call(broken, error, "Use python.")
            thought = "Again."
        else:
            thought = "Use python."
        call(f"print({problem.expression})", f"{problem.answer}\n", thought)
        answer, thought = problem.answer, None
    say(ParsedMessage("final", None, None, rf"\boxed{{{answer}}}"), thought, "<|return|>")
    return Demonstration(ids, mask)


def _guess(answer: int, rng: random.Random) -> int:
    """A number of about the right size."""
    return rng.randint(answer // 2, 2 * answer) if answer > 0 else rng.randint(2 * answer, -answer)


def _mistake(expression: str, rng: random.Random) -> tuple[str, str]:
    """A program with a mistake, and what the sandbox answers to it: nothing printed, or a syntax error."""
    if rng.random() < 0.5:
        return f"x={expression}", ""
    code = f"print({expression}"
    return code, f"  File \"<sandbox>\", line 1\n    {code}\n         ^\nSyntaxError: '(' was never closed\n"
