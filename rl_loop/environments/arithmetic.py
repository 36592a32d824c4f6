"""Problems of the demo: arithmetic that is hard without Python and easy with it.

Problems are word problems or expressions. A hash of the expression selects the split, so that no
expression occurs in both splits, in any wording.
"""

import hashlib
import random
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from rl_loop.sandbox import ExecutionResult

Split = Literal["train", "held_out"]

HELD_OUT_SHARE = 8
"""One expression in this many is held out."""

TEMPLATES = (
    ("Compute {a}*{b}+{c}.", "{a}*{b}+{c}"),
    ("Compute {a}*{b}-{c}.", "{a}*{b}-{c}"),
    ("Compute ({a}+{b})*{c}.", "({a}+{b})*{c}"),
    ("Compute {a}*({b}-{c}).", "{a}*({b}-{c})"),
    ("{a} boxes of {b} pens and {c} more. How many pens?", "{a}*{b}+{c}"),
    ("{a} boxes of {b} pens, {c} are lost. How many pens?", "{a}*{b}-{c}"),
    ("{a} boys and {b} girls have {c} cards each. How many cards?", "({a}+{b})*{c}"),
)
"""Pairs of text and expression, in which a, b and c are replaced by numbers."""

NUMBERS = range(11, 51)


@dataclass(frozen=True)
class ArithmeticProblem:
    """A question and the expression that answers it."""

    text: str
    """Text of the question."""
    expression: str
    """Python expression of the answer."""

    @property
    def answer(self) -> int:
        """Value of the expression."""
        # ``problem`` builds expressions and ``interpret`` matches them: they have only digits, signs
        # and brackets.
        return int(eval(self.expression, {"__builtins__": {}}))


def problem(split: Split, seed: int, index: int, numbers: range = NUMBERS) -> ArithmeticProblem:
    """Return a generated problem. Equal arguments give equal problems.

    Args:
        split: "train" or "held_out".
        seed: seed of the problems.
        index: number of the problem: 0, 1, 2, ... without limit.
        numbers: numbers that occur in problems.
    """
    for attempt in range(1000):
        # Each index has its own seed, so that a resumed run gets the same tasks.
        rng = random.Random(f"{seed}/{split}/{index}/{attempt}")
        text, expression = rng.choice(TEMPLATES)
        drawn = {name: rng.choice(numbers) for name in "abc"}

        # The expression decides, so that the same numbers in other words are in the same split.
        candidate = ArithmeticProblem(text.format(**drawn), expression.format(**drawn))
        if choose_split(candidate.expression) == split:
            return candidate

    # 1 in 8 problems is held out, so 1,000 misses in a row do not happen.
    raise RuntimeError(f"problem {index}: 1,000 candidates were all outside of split {split!r}")


def choose_split(expression: str) -> Split:
    """Return the split of an expression, which does not depend on the seed."""
    digest = hashlib.sha256(expression.encode()).digest()
    # Not Python's own hash of a text, which differs from process to process.
    return "held_out" if digest[0] % HELD_OUT_SHARE == 0 else "train"


def vocabulary_text() -> str:
    """Return text with every word of problems and episodes, and every number of two digits."""
    problems = [line for template in TEMPLATES for line in template]
    numbers = [f"{n} *{n}" for n in range(100)]
    roles = ["developer", "user", "assistant", "analysis", "final"]
    prompts = ["# Instructions\n\nUse python. Answer in \\boxed{}."]
    calls = [" to=python code", "python to=assistant", "print(", "x=", "\\boxed{"]
    thoughts = ["I know.", "Use python.", "Again."]
    errors = [_syntax_error("print(")]

    return "\n".join([*problems, *numbers, *roles, *prompts, *calls, *thoughts, *errors])


def guess(answer: int, rng: random.Random) -> int:
    """Return a number of about the right size."""
    if answer > 0:
        return rng.randint(answer // 2, 2 * answer)
    return rng.randint(2 * answer, -answer)


async def interpret(code: str, history: Sequence[str] = ()) -> ExecutionResult:
    """Return Python's result for a program of the scripted policy, without running it.

    These programs keep no state, so ``history`` is ignored.
    """
    # An assignment prints nothing.
    if code.startswith("x="):
        return ExecutionResult("", 0)

    # Only digits and operators, because ``answer`` evaluates the text.
    expression = re.fullmatch(r"print\(([-+*() 0-9]*)\)", code)
    if expression is not None:
        # An expression of the right characters may still not be valid Python.
        with suppress(SyntaxError):
            return ExecutionResult(f"{ArithmeticProblem('', expression[1]).answer}\n", 0)
    return ExecutionResult(_syntax_error(code), 1)


def _syntax_error(code: str) -> str:
    """Return Python's message for an unclosed bracket."""
    return (
        f"  File \"<sandbox>\", line 1\n    {code}\n         ^\nSyntaxError: '(' was never closed\n"
    )
