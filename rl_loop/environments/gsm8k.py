r"""GSM8K (arXiv 2110.14168): word problems with integer answers, with or without Python.

Files and the hub contain the original problems. Without them, small word problems are generated. The
original solutions mark calculations, such as <<48/2=24>>. Demonstrations compute them with Python.
"""

import re
from collections.abc import Sequence
from fractions import Fraction
from random import Random
from typing import Any

from rl_loop.chat.tools import PythonTool
from rl_loop.environments import arithmetic
from rl_loop.environments.base import ScriptedPolicy, Split, Task, text_in
from rl_loop.environments.retool import ReToolEnvironment, ReToolOptions, build_messages
from rl_loop.environments.scripted_messages import final, think
from rl_loop.environments.tool_calls import UnknownToolError
from rl_loop.sandbox import ExecutionResult

CALCULATION = re.compile(r"<<([^<>=]+)=([^<>=]+)>>")
"""Marked calculation of a solution, with its result."""
NUMBER = re.compile(r"\d+(?:\.\d+)?|\.\d+")
ARITHMETIC = re.compile(r"[-+*/(). 0-9]{1,200}")
"""Expressions that ``evaluate`` computes. It rejects powers separately."""


class Gsm8kOptions(ReToolOptions):
    instructions: str | None = r"Think, then answer in \boxed{}."
    """Developer message; null for none."""
    tools: bool = False
    """Let the policy call Python. The system message describes Python if
    ``prompt.describe_builtin_tools`` is true."""
    max_number: int = 9
    """Largest number in generated problems. The smallest is 2."""


class Gsm8kEnvironment(ReToolEnvironment):
    Options = Gsm8kOptions

    @classmethod
    def generate(cls, split: Split, seed: int, index: int, options: Any) -> Task:
        problem = arithmetic.problem(split, seed, index, numbers=range(2, options.max_number + 1))
        record = {"question": problem.text, "answer": f"#### {problem.answer}"}
        # Generated problems have the form of the original ones, so both are read in the same way.
        task = cls.from_record(record, f"{split}-{index}", options)
        task.metadata["expression"] = problem.expression
        return task

    @classmethod
    def from_record(cls, record: dict[str, Any], name: str, options: Any) -> Task:
        """Read {"question", "answer"} whose answer ends with "#### 1,234"."""
        question = text_in(record, "question")
        answer = text_in(record, "answer")
        # Answers have separators of thousands, such as 1,234.
        ground_truth = answer.rpartition("####")[2].strip().replace(",", "")
        if not ground_truth:
            raise ValueError("'answer' has nothing after ####")

        task = Task(
            name, build_messages(question, options), ground_truth, "gsm8k", {"tools": options.tools}
        )
        expression = build_expression(answer, ground_truth)
        # Without marked calculations there is no expression, so demonstrations do not call Python.
        if expression is not None:
            task.metadata["expression"] = expression
        return task

    @classmethod
    def solve(cls, task: Task, rng: Random, inject_errors: bool) -> ScriptedPolicy:
        """Return a script that solves the problem, or guesses if ``inject_errors``.

        The script calls Python if this is allowed and the task's solution has a calculation.
        """
        if task.metadata["tools"] and "expression" in task.metadata:
            yield from ReToolEnvironment.solve(task, rng, inject_errors)
        elif inject_errors:
            # A guess needs a number of about the right size.
            if not NUMBER.fullmatch(task.ground_truth.lstrip("-")):
                raise NotImplementedError(
                    f"cannot guess near {task.ground_truth!r}, which is not a number"
                )
            guess = arithmetic.guess(int(float(task.ground_truth)), rng)
            yield [think("I guess."), final(rf"\boxed{{{guess}}}")]
        else:
            yield [think("I work it out."), final(rf"\boxed{{{task.ground_truth}}}")]

    @classmethod
    async def simulate_python(cls, code: str, history: Sequence[str] = (), /) -> ExecutionResult:
        # Programs of this environment contain divisions, which ReTool's interpreter does not know.
        printed = re.fullmatch(r"print\((.*)\)", code)
        value = None if printed is None else evaluate(printed[1])
        if value is not None:
            return ExecutionResult(f"{value}\n", 0)
        return await ReToolEnvironment.simulate_python(code, history)

    @classmethod
    def vocabulary_text(cls) -> str:
        # ReTool's text does not fit, because the wording of these tasks depends on their options.
        return ""

    def builtin_tools(self) -> Sequence[PythonTool]:
        return super().builtin_tools() if self.task.metadata.get("tools") else ()

    async def call(self, tool: str, arguments: str) -> str:
        # Without tools, a call is a format error, as for any unknown tool.
        if not self.task.metadata.get("tools"):
            raise UnknownToolError
        return await super().call(tool, arguments)


def build_expression(solution: str, answer: str) -> str | None:
    """Return one expression with all calculations of a solution.

    In the last calculation, results of earlier calculations are replaced by these: "48/2" and
    "48+24" become "48+(48/2)".

    Returns:
        An expression whose value in Python is exactly ``answer``; None if there is none.
    """
    # Fractions, so that "2.50" and "2.5" are the same result.
    steps: dict[Fraction, str] = {}

    def written_out(number: re.Match[str]) -> str:
        earlier = steps.get(Fraction(number[0]))
        return number[0] if earlier is None else f"({earlier})"

    expression = ""
    for calculation, result in CALCULATION.findall(solution):
        expression = NUMBER.sub(written_out, calculation.replace(" ", ""))
        # Do not insert an expression that is too long to compute, because each insertion may double
        # the length.
        if NUMBER.fullmatch(result.strip()) and ARITHMETIC.fullmatch(expression):
            steps[Fraction(result.strip())] = expression

    # The last calculation gives the answer. A solution may be wrong, or round its results.
    value = evaluate(expression)
    if value is None or not NUMBER.fullmatch(answer.lstrip("-")):
        return None
    return expression if value == float(answer) else None


def evaluate(expression: str) -> int | float | None:
    """Return the value of an expression with numbers, +, -, *, / and brackets.

    Returns:
        Python's value; None for other expressions, and if Python raises an error.
    """
    # A power such as 9**9**9 would take all memory.
    if not ARITHMETIC.fullmatch(expression) or "**" in expression:
        return None
    try:
        # The expression has only digits, dots, brackets and the four operators.
        value = eval(expression, {"__builtins__": {}})
    except (ArithmeticError, SyntaxError, TypeError):
        return None
    return value if isinstance(value, int | float) else None
