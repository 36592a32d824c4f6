r"""GSM8K (arXiv 2110.14168): word problems whose answer is an integer, from the head or with
Python.

Files and the hub have the real ones; without either, small word problems are generated."""

from collections.abc import Sequence
from random import Random
from typing import Any

from rl_loop.chat.tools import PythonTool
from rl_loop.environments import arithmetic
from rl_loop.environments.base import Script, Split, Task, UnknownTool, final, text_in, think
from rl_loop.environments.retool import ReToolEnvironment, ReToolOptions, prompt_of


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
        return Task(
            name, prompt_of(question, options), ground_truth, "gsm8k", {"tools": options.tools}
        )

    @classmethod
    def solve(cls, task: Task, rng: Random, faulty: bool) -> Script:
        """Work the problem out, with Python where it may be called; if ``faulty``, guess."""
        if task.metadata["tools"]:
            yield from ReToolEnvironment.solve(task, rng, faulty)
        elif faulty:
            guess = arithmetic.guess(int(task.ground_truth), rng)
            yield [think("I guess."), final(rf"\boxed{{{guess}}}")]
        else:
            yield [think("I work it out."), final(rf"\boxed{{{task.ground_truth}}}")]

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
