r"""GSM8K (arXiv 2110.14168): word problems whose answer is an integer, from the head or with
Python.

Files and the hub have the real ones; without either, small word problems are generated. The real
ones come with solutions whose calculations are marked, <<48/2=24>>: demonstrations compute them."""

import re
from collections.abc import Sequence
from fractions import Fraction
from random import Random
from typing import Any

from rl_loop.chat.tools import PythonTool
from rl_loop.environments import arithmetic
from rl_loop.environments.base import Script, Split, Task, UnknownTool, final, text_in, think
from rl_loop.environments.retool import ReToolEnvironment, ReToolOptions, prompt_of
from rl_loop.sandbox import ExecutionResult

CALCULATION = re.compile(r"<<([^<>=]+)=([^<>=]+)>>")
"""A calculation of a solution, and its result."""
NUMBER = re.compile(r"\d+(?:\.\d+)?|\.\d+")
ARITHMETIC = re.compile(r"[-+*/(). 0-9]{1,200}")
"""What is computed here. No powers: ``evaluate`` leaves out two asterisks."""


class Gsm8kOptions(ReToolOptions):
    instructions: str | None = r"Think, then answer in \boxed{}."
    """The developer message; null for none."""
    tools: bool = False
    """Whether Python may be called; the system message then describes it if
    ``prompt.python_tool`` is on."""
    largest: int = 9
    """Of generated problems: numbers go from 2 to this."""


class Gsm8kEnvironment(ReToolEnvironment):
    Options = Gsm8kOptions

    @classmethod
    def generate(cls, split: Split, seed: int, index: int, options: Any) -> Task:
        problem = arithmetic.problem(split, seed, index, numbers=range(2, options.largest + 1))
        record = {"question": problem.text, "answer": f"#### {problem.answer}"}
        task = cls.from_record(record, f"{split}-{index}", options)
        task.metadata["expression"] = problem.expression
        return task

    @classmethod
    def from_record(cls, record: dict[str, Any], name: str, options: Any) -> Task:
        """Read {"question", "answer"} whose answer ends with "#### 1,234"."""
        question = text_in(record, "question")
        answer = text_in(record, "answer")
        ground_truth = answer.rpartition("####")[2].strip().replace(",", "")
        if not ground_truth:
            raise ValueError("'answer' has nothing after ####")

        task = Task(
            name, prompt_of(question, options), ground_truth, "gsm8k", {"tools": options.tools}
        )
        expression = expression_of(answer, ground_truth)
        if expression is not None:
            task.metadata["expression"] = expression
        return task

    @classmethod
    def solve(cls, task: Task, rng: Random, faulty: bool) -> Script:
        """Work the problem out, with Python where it may be called; if ``faulty``, guess.

        Without Python where the task's solution says no calculation that Python could do."""
        if task.metadata["tools"] and "expression" in task.metadata:
            yield from ReToolEnvironment.solve(task, rng, faulty)
        elif faulty:
            if not NUMBER.fullmatch(task.ground_truth.lstrip("-")):
                raise NotImplementedError(f"a guess at {task.ground_truth!r} needs a number")
            guess = arithmetic.guess(int(float(task.ground_truth)), rng)
            yield [think("I guess."), final(rf"\boxed{{{guess}}}")]
        else:
            yield [think("I work it out."), final(rf"\boxed{{{task.ground_truth}}}")]

    @classmethod
    async def simulate_python(cls, code: str, history: Sequence[str] = (), /) -> ExecutionResult:
        printed = re.fullmatch(r"print\((.*)\)", code)
        value = None if printed is None else evaluate(printed[1])
        if value is not None:
            return ExecutionResult(f"{value}\n", 0)
        return await ReToolEnvironment.simulate_python(code, history)

    @classmethod
    def vocabulary_text(cls) -> str:
        # Not ReTool's: the wording of these tasks depends on their options.
        return ""

    def builtin_tools(self) -> Sequence[PythonTool]:
        return super().builtin_tools() if self.task.metadata.get("tools") else ()

    async def call(self, tool: str, arguments: str) -> str:
        if not self.task.metadata.get("tools"):
            raise UnknownTool
        return await super().call(tool, arguments)


def expression_of(solution: str, answer: str) -> str | None:
    """Return one expression for what a solution of GSM8K calculates, None if there is none.

    The last calculation, with earlier ones in place of their results: "48/2" and "48+24" make
    "48+(48/2)". Python's value of it is exactly ``answer``."""
    steps: dict[Fraction, str] = {}

    def written_out(number: re.Match[str]) -> str:
        earlier = steps.get(Fraction(number[0]))
        return number[0] if earlier is None else f"({earlier})"

    expression = ""
    for calculation, result in CALCULATION.findall(solution):
        expression = NUMBER.sub(written_out, calculation.replace(" ", ""))
        # One that is too long to be computed is not put into others: each could double it.
        if NUMBER.fullmatch(result.strip()) and ARITHMETIC.fullmatch(expression):
            steps[Fraction(result.strip())] = expression

    value = evaluate(expression)
    if value is None or not NUMBER.fullmatch(answer.lstrip("-")):
        return None
    return expression if value == float(answer) else None


def evaluate(expression: str) -> int | float | None:
    """Compute sums, differences, products and quotients of numbers as Python does.

    Returns None for anything else, and for what Python refuses."""
    if not ARITHMETIC.fullmatch(expression) or "**" in expression:
        return None
    try:
        # Only digits, dots, brackets and the four operations can be in it.
        value = eval(expression, {"__builtins__": {}})
    except (ArithmeticError, SyntaxError, TypeError):
        return None
    return value if isinstance(value, int | float) else None
