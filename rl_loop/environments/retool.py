r"""ReTool (arXiv 2504.11536): a mathematical problem, a Python interpreter, the answer in \boxed{}.

The reward is that of a correct answer or that of a wrong one; errors of the interpreter are answers like any other, so
that the agent can correct itself, and are not punished."""

from collections.abc import Sequence
from random import Random
from typing import Any

from rl_loop.environments import arithmetic, base
from rl_loop.environments.base import Script, StepResult, Task, ToolError, final, text_in, think
from rl_loop.harmony.codec import ParsedMessage, PythonTool
from rl_loop.rewards.math_answer import is_number, judge, last_boxed, normalised
from rl_loop.sandbox import ExecutionResult

# what the agent is told by the first answer of a new session
NEW_SESSION = "[The earlier session has ended, and its variables are gone. A new one began with this call.]\n"
INSTRUCTIONS = r"Use python. Answer in \boxed{}."


class ReToolOptions(base.EnvironmentOptions):
    instructions: str | None = INSTRUCTIONS
    """The developer message; null for none."""
    numeric_only: bool = True
    """Of files: leave out problems whose answer is not a number, which math-verify judges best."""
    stateful: bool = False
    """The interpreter keeps its variables within an episode, as a notebook does: the programs so far run again before
    every new one, unheard, each with limits of time of its own. They should be deterministic and quick. A program that
    ends the interpreter (exit(), a crash, a limit) ends the session; the next call begins a new one and says so."""


class ReToolEnvironment(base.Environment):
    """Tools are ``python`` (plain code, as GPT-OSS knows it) and ``functions.python`` (JSON with a key "code")."""

    Options = ReToolOptions

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._calls = 0
        self._history: tuple[str, ...] = ()  # programs of the session so far, if it is stateful
        self._session_ended = False  # and the agent was not yet told that a new one begins

    @classmethod
    def generate(cls, split: base.Split, seed: int, index: int, options: Any) -> Task:
        problem = arithmetic.problem(split, seed, index)
        metadata = {"expression": problem.expression, "stateful": options.stateful}
        return Task(f"{split}-{index}", prompt_of(problem.text, options), str(problem.answer), "retool", metadata)

    @classmethod
    def from_record(cls, record: dict[str, Any], name: str, options: Any) -> Task | None:
        """Rows as verl has them, such as DAPO-Math-17k's ({"prompt": messages, "reward_model": {"ground_truth"}}), and
        AIME and the like ({"problem" or "question", "answer"}). A conversation is kept as it is."""
        if "reward_model" in record:
            messages, wanted = _conversation(record["prompt"], options), _ground_truth(record["reward_model"])
        else:
            found = {str(key).lower(): value for key, value in record.items()}
            question = text_in(found, "problem" if found.get("problem") else "question")
            messages, wanted = prompt_of(question, options), text_in(found, "answer")
        if options.numeric_only and not is_number(wanted):
            return None
        return Task(name, messages, wanted, "retool", {"stateful": options.stateful})

    @classmethod
    def solve(cls, task: Task, rng: Random, careless: bool) -> Script:
        """Calls Python, sometimes after a mistake; careless, it answers from the head and is right one time in ten."""
        expression, answer = task.metadata["expression"], task.ground_truth
        if careless:
            if rng.random() >= 0.1:
                answer = str(arithmetic.guess(int(answer), rng))
            yield [think("I know."), final(rf"\boxed{{{answer}}}")]
            return
        if rng.random() < 0.22:
            yield [think("Use python."), _python(rng.choice([f"x={expression}", f"print({expression}"]))]
            yield [think("Again."), _python(f"print({expression})")]
        else:
            yield [think("Use python."), _python(f"print({expression})")]
        yield [final(rf"\boxed{{{answer}}}")]

    def builtin_tools(self) -> Sequence[PythonTool]:
        return (PythonTool(stateful=bool(self.task.metadata.get("stateful"))),)

    async def answer(self, text: str) -> StepResult:
        correct = await judge(text, self.task.ground_truth)
        return self._judged(correct, last_boxed(text))

    async def call(self, tool: str, arguments: str) -> str:
        code: Any = arguments
        if tool == "functions.python":
            code = base.arguments_of(arguments).get("code")
            if not isinstance(code, str):
                raise ToolError('functions.python takes JSON like {"code": "print(1)"}')
        elif tool != "python":
            raise base.UnknownTool
        self._calls += 1
        if self.task.metadata.get("stateful"):
            execution, notice = await self._execute_in_session(code)
        else:
            execution, notice = await self.execute(code), ""

        output = notice + execution.output
        if execution.exit_code != 0 or execution.error is not None:
            raise ToolError(output if execution.error is None else f"{output}\n{execution.error}".lstrip("\n"))
        return output

    async def _execute_in_session(self, code: str) -> tuple[ExecutionResult, str]:
        """Run a program after those of its session; with what the agent must be told about the session first."""
        execution = await self.execute(code, self._history)
        notice = NEW_SESSION if self._session_ended else ""
        self._session_ended = execution.ended
        if execution.ended:
            self._history = ()
        elif execution.error is None:
            # after an exception too: a notebook keeps what a cell did before it
            self._history += (code,)
        return execution, notice

    def unfinished(self) -> StepResult:
        return self._judged(False, None)

    def _judged(self, correct: bool, answer: str | None) -> StepResult:
        shaping = 0.0 if correct or not self.reward.tool_use else min(0.4, 0.1 * (self._calls // 2))
        scale = self.reward.correct - self.reward.wrong
        return self.finished(float(correct) + (shaping / scale if scale else 0.0), normalised(answer))


def prompt_of(question: str, options: ReToolOptions) -> list[dict[str, Any]]:
    """The messages of a task: the developer's instructions, if any, and the question."""
    messages = [{"role": "user", "content": question}]
    if options.instructions is not None:
        messages.insert(0, {"role": "developer", "content": options.instructions})
    return messages


def _conversation(prompt: Any, options: ReToolOptions) -> list[dict[str, Any]]:
    """All messages of a row's prompt; the instructions follow those that its own system message gives."""
    if isinstance(prompt, str):
        return prompt_of(prompt, options)
    if not isinstance(prompt, list) or not prompt:
        raise ValueError(f"'prompt' must be text or a list of messages, not {type(prompt).__name__}")

    messages = list(prompt)
    if options.instructions is None:
        return messages
    first = messages[0]
    if not isinstance(first, dict) or first.get("role") not in ("system", "developer"):
        return [{"role": "developer", "content": options.instructions}, *messages]
    if not isinstance(first.get("content"), str):
        raise ValueError("'prompt': its system message must be text")
    return [{**first, "content": f"{first['content']}\n\n{options.instructions}"}, *messages[1:]]


def _ground_truth(reward_model: Any) -> str:
    if not isinstance(reward_model, dict):
        raise ValueError(f"'reward_model' must be an object, not {type(reward_model).__name__}")
    return text_in(reward_model, "ground_truth")


def _python(code: str) -> ParsedMessage:
    return ParsedMessage("analysis", "python", "code", code)
