"""The demo's tasks: arithmetic that is hard from the head and easy with Python, in words and as expressions.

A hash of its *expression* decides which split a problem belongs to: none occurs in both, in any wording."""

import hashlib
import random
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from rl_loop.sandbox import ExecutionResult

Split = Literal["train", "held_out"]
HELD_OUT_SHARE = 8  # one expression in this many is held out

# (text, expression); a, b, c are replaced by numbers
TEMPLATES = (
    ("Compute {a}*{b}+{c}.", "{a}*{b}+{c}"),
    ("Compute {a}*{b}-{c}.", "{a}*{b}-{c}"),
    ("Compute ({a}+{b})*{c}.", "({a}+{b})*{c}"),
    ("Compute {a}*({b}-{c}).", "{a}*({b}-{c})"),
    ("{a} boxes of {b} pens and {c} more. How many pens?", "{a}*{b}+{c}"),
    ("{a} boxes of {b} pens, {c} are lost. How many pens?", "{a}*{b}-{c}"),
    ("{a} boys and {b} girls have {c} cards each. How many cards?", "({a}+{b})*{c}"),
)
NUMBERS = range(11, 51)


@dataclass(frozen=True)
class Problem:
    """``text`` is what is asked, ``expression`` the Python that answers it."""

    text: str
    expression: str

    @property
    def answer(self) -> int:
        return int(eval(self.expression, {"__builtins__": {}}))


def problem(split: Split, seed: int, index: int, numbers: range = NUMBERS) -> Problem:
    """Problem ``index`` (from 0, without end) of a split."""
    for attempt in range(1000):
        rng = random.Random(f"{seed}/{split}/{index}/{attempt}")
        text, expression = rng.choice(TEMPLATES)
        drawn = {name: rng.choice(numbers) for name in "abc"}
        found = Problem(text.format(**drawn), expression.format(**drawn))
        if split_of(found.expression) == split:
            return found
    raise RuntimeError(f"no problem {index} of split {split} found")  # 1000 misses in a row do not happen


def split_of(expression: str) -> Split:
    digest = hashlib.sha256(expression.encode()).digest()
    return "held_out" if digest[0] % HELD_OUT_SHARE == 0 else "train"


def vocabulary_text() -> str:
    """Text with every word of the problems and of the episodes about them, and every number of two digits."""
    lines = [line for template in TEMPLATES for line in template]
    lines += [*(f"{n} *{n}" for n in range(100)), "developer", "user", "assistant", "analysis", "final"]
    lines += ["# Instructions\n\nUse python. Answer in \\boxed{}."]
    lines += [" to=python code", "python to=assistant", "print(", "x=", "\\boxed{", "I know.", "Use python.", "Again."]
    lines += ["  File \"<sandbox>\", line 1\n    print(\n         ^\nSyntaxError: '(' was never closed\n"]
    return "\n".join(lines)


def guess(answer: int, rng: random.Random) -> int:
    """A number of about the right size."""
    return rng.randint(answer // 2, 2 * answer) if answer > 0 else rng.randint(2 * answer, -answer)


async def interpret(code: str, history: Sequence[str] = ()) -> ExecutionResult:
    """What Python answers to the programs of the scripted policy, without running anything. They keep no state."""
    if code.startswith("x="):
        return ExecutionResult("", 0)
    expression = re.fullmatch(r"print\(([-+*() 0-9]*)\)", code)
    if expression is not None:
        with suppress(SyntaxError):
            return ExecutionResult(f"{Problem('', expression[1]).answer}\n", 0)
    text = f"  File \"<sandbox>\", line 1\n    {code}\n         ^\nSyntaxError: '(' was never closed\n"
    return ExecutionResult(text, 1)
