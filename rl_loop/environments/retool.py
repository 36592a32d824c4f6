r"""ReTool (arXiv 2504.11536): mathematical problems with a Python interpreter.

The final answer is in \boxed{}. The reward depends only on its correctness. The agent reads errors of
the interpreter, and can correct itself without a penalty.
"""

from collections.abc import Sequence
from random import Random
from typing import Any

from rl_loop.chat.messages import ParsedMessage
from rl_loop.chat.tools import PythonTool
from rl_loop.environments import arithmetic
from rl_loop.environments.base import (
    Environment,
    EnvironmentOptions,
    ScriptedPolicy,
    Split,
    StepResult,
    Task,
    text_in,
)
from rl_loop.environments.scripted_messages import final, think
from rl_loop.environments.tool_calls import ToolError, UnknownToolError, parse_arguments
from rl_loop.rewards.math_answer import is_correct_async, is_number, last_boxed, normalize_answer
from rl_loop.sandbox import ExecutionResult

NEW_SESSION = (
    "[The earlier session has ended, and its variables are gone. A new one began with this call.]\n"
)
"""Text before the first result of a new session."""

INSTRUCTIONS = r"Use python. Answer in \boxed{}."

LUCKY_SHARE = 0.1
"""Share of faulty demonstrations whose answer, given without Python, is correct."""
MISTAKE_SHARE = 0.22
"""Share of expert demonstrations that correct a mistake first."""


class ReToolOptions(EnvironmentOptions):
    instructions: str | None = INSTRUCTIONS
    """Developer message; null for none."""
    numeric_only: bool = True
    """Leave out rows of a file whose answer is not a number. Numbers are judged exactly."""
    stateful: bool = False
    """Keep variables of the interpreter within an episode, like a notebook. All earlier programs run
    again before each program, without output and each with the full time limit, so they should be
    deterministic and fast. A program that ends the interpreter (exit(), a crash, a limit) ends the
    session. The result of the next call reports the new session."""


class ReToolEnvironment(Environment):
    """Mathematical problem with ``python`` (plain code) and ``functions.python`` ({"code"})."""

    Options = ReToolOptions

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._calls = 0
        self._history: tuple[str, ...] = ()
        """Programs of the current session, if it is stateful."""
        self._session_ended = False
        """True if the next result must report a new session."""

    @classmethod
    def generate(cls, split: Split, seed: int, index: int, options: Any) -> Task:
        problem = arithmetic.problem(split, seed, index)
        return Task(
            task_id=f"{split}-{index}",
            messages=build_messages(problem.text, options),
            ground_truth=str(problem.answer),
            environment="retool",
            metadata={"expression": problem.expression, "stateful": options.stateful},
        )

    @classmethod
    def from_record(cls, record: dict[str, Any], name: str, options: Any) -> Task | None:
        """Return the task of a row in one of two formats.

        - verl, such as DAPO-Math-17k: {"prompt": messages, "reward_model": {"ground_truth"}}.
          Conversations stay unmodified.
        - Lists of problems, such as AIME: {"problem" or "question", "answer"}.
        """
        if "reward_model" in record:
            messages = _conversation(record["prompt"], options)
            ground_truth = _ground_truth(record["reward_model"])
        else:
            # Files spell their columns differently, such as "Problem".
            row = {str(key).lower(): value for key, value in record.items()}
            question = text_in(row, "problem" if row.get("problem") else "question")
            messages = build_messages(question, options)
            ground_truth = text_in(row, "answer")

        # None leaves the row out.
        if options.numeric_only and not is_number(ground_truth):
            return None
        return Task(name, messages, ground_truth, "retool", {"stateful": options.stateful})

    @classmethod
    def solve(cls, task: Task, rng: Random, inject_errors: bool) -> ScriptedPolicy:
        """Return a script that calls Python, sometimes after a mistake.

        If ``inject_errors``, the script guesses and is mostly wrong.
        """
        expression = task.metadata.get("expression")
        if expression is None:
            raise NotImplementedError("tasks of files have no solution that a script could write")
        answer = task.ground_truth

        if inject_errors:
            if rng.random() >= LUCKY_SHARE:
                answer = str(arithmetic.guess(int(answer), rng))
            yield [think("I know."), final(rf"\boxed{{{answer}}}")]
            return

        program = f"print({expression})"
        if rng.random() < MISTAKE_SHARE:
            # The first mistake prints nothing, the second is a syntax error.
            mistake = rng.choice([f"x={expression}", f"print({expression}"])
            yield [think("Use python."), _python(mistake)]
            yield [think("Again."), _python(program)]
        else:
            yield [think("Use python."), _python(program)]
        yield [final(rf"\boxed{{{answer}}}")]

    @classmethod
    async def simulate_python(cls, code: str, history: Sequence[str] = (), /) -> ExecutionResult:
        return await arithmetic.interpret(code, history)

    @classmethod
    def vocabulary_text(cls) -> str:
        return arithmetic.vocabulary_text()

    def builtin_tools(self) -> Sequence[PythonTool]:
        return (PythonTool(stateful=self._is_stateful),)

    async def call(self, tool: str, arguments: str) -> str:
        code = _parse_code(tool, arguments)
        self._calls += 1

        notice = ""
        if self._is_stateful:
            execution, notice = await self._execute_in_session(code)
        else:
            execution = await self.execute(code)

        # The agent reads Python's message and may try again.
        output = notice + execution.output
        if execution.error is not None:
            raise ToolError(f"{output}\n{execution.error}".lstrip("\n"))
        if execution.exit_code != 0:
            raise ToolError(output)
        return output

    async def answer(self, text: str) -> StepResult:
        correct = await is_correct_async(text, self.task.ground_truth)
        return self._score_answer(correct, last_boxed(text))

    def end_truncated(self) -> StepResult:
        return self._score_answer(correct=False, answer=None)

    def reference_answer(self) -> str:
        return rf"\boxed{{{self.task.ground_truth}}}"

    @property
    def _is_stateful(self) -> bool:
        return bool(self.task.metadata.get("stateful"))

    async def _execute_in_session(self, code: str) -> tuple[ExecutionResult, str]:
        """Run a program after the earlier programs of its session.

        Returns:
            Result of the program, and a notice about a new session for the agent (may be empty).
        """
        # The sandbox keeps no state between calls, so the session's programs run again.
        execution = await self.execute(code, self._history)
        notice = NEW_SESSION if self._session_ended else ""

        self._session_ended = execution.interpreter_ended
        # The program ended the interpreter, and the session's variables with it.
        if execution.interpreter_ended:
            self._history = ()
        elif execution.error is None:
            # Also after an exception: a notebook keeps the effects of a cell before its exception.
            self._history += (code,)
        return execution, notice

    def _score_answer(self, correct: bool, answer: str | None) -> StepResult:
        score = float(correct)
        # ``end_with_score`` multiplies scores by this scale, and the bonus is a reward.
        scale = self.reward.correct - self.reward.wrong
        if self.reward.tool_use_bonus and not correct and scale != 0:
            bonus = min(0.4, 0.1 * (self._calls // 2))
            score += bonus / scale
        return self.end_with_score(score, normalize_answer(answer))


def build_messages(question: str, options: ReToolOptions) -> list[dict[str, Any]]:
    """Return the messages of a task: optional developer instructions, and the question."""
    messages = [{"role": "user", "content": question}]
    if options.instructions is not None:
        messages.insert(0, {"role": "developer", "content": options.instructions})
    return messages


def _conversation(prompt: Any, options: ReToolOptions) -> list[dict[str, Any]]:
    """Return all messages of a row's prompt, with the instructions appended to its own.

    Raises:
        ValueError: if the prompt is not a conversation.
    """
    if isinstance(prompt, str):
        return build_messages(prompt, options)
    if not isinstance(prompt, list) or not prompt:
        raise ValueError(
            f"'prompt' must be text or a list of messages, not {type(prompt).__name__}"
        )

    messages = list(prompt)
    if options.instructions is None:
        return messages

    # Harmony has one developer message, so append the instructions to an existing system message.
    first = messages[0]
    if not isinstance(first, dict) or first.get("role") not in ("system", "developer"):
        return [{"role": "developer", "content": options.instructions}, *messages]
    if not isinstance(first.get("content"), str):
        raise ValueError("'prompt': its system message must be text")
    instructed = {**first, "content": f"{first['content']}\n\n{options.instructions}"}
    return [instructed, *messages[1:]]


def _ground_truth(reward_model: Any) -> str:
    """Return the correct answer in a row of verl. Raises KeyError or ValueError."""
    if not isinstance(reward_model, dict):
        raise ValueError(f"'reward_model' must be an object, not {type(reward_model).__name__}")
    return text_in(reward_model, "ground_truth")


def _parse_code(tool: str, arguments: str) -> str:
    """Return the program of a call. Raises UnknownToolError and ToolError."""
    if tool == "python":
        return arguments
    if tool != "functions.python":
        raise UnknownToolError

    code = parse_arguments(arguments).get("code")
    if not isinstance(code, str):
        raise ToolError('functions.python takes JSON like {"code": "print(1)"}')
    return code


def _python(code: str) -> ParsedMessage:
    """Return a call of Python in GPT-OSS's form."""
    return ParsedMessage("analysis", "python", "code", code)
