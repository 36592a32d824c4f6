"""Base class of environments, with the types of tasks, tool calls and step results.

``docs/environments.md`` shows how to write an environment.
"""

import copy
import json
from collections.abc import Awaitable, Generator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from random import Random
from typing import Any, ClassVar, Literal, Protocol

from pydantic import BaseModel, ConfigDict

from megatron_gptoss.user_error import UserError
from rl_loop.chat.messages import ParsedMessage, ToolOutput
from rl_loop.chat.tools import BuiltinTool, PythonTool, Tool
from rl_loop.environments.tool_calls import ToolError, UnknownToolError
from rl_loop.infrastructure import InfrastructureError, describe
from rl_loop.sandbox import ExecutionResult

Split = Literal["train", "held_out"]


class InvalidRowError(UserError, ValueError):
    """Generated row that is not a task. The message names the function and the task."""


@dataclass(frozen=True)
class Task:
    """One problem. All fields are JSON values."""

    task_id: str
    messages: list[dict[str, Any]]
    """Prompt, in the format of ``rl_loop.harmony.conversation``."""
    ground_truth: str
    environment: str = "retool"
    """Name in ``registry.ENVIRONMENTS``, or MODULE:CLASS."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Further data for the environment. The evaluation's table has a row per "category"."""
    # A task source sets these three. They are not a part of the problem.
    source: str = field(default="", compare=False)
    """Name in ``tasks.sources``."""
    teacher_hint: str | None = field(default=None, compare=False)
    """Text that only a teacher sees, from ``tasks.sources.NAME.teacher_hint``. None for none."""
    rubric: str | None = field(default=None, compare=False)
    """Criteria of the judge, from ``tasks.sources.NAME.judge.rubric``. None without a judge."""

    def to_json(self) -> str:
        """Return the task as one line of a task file."""
        values = asdict(self)
        return json.dumps({each.name: values[each.name] for each in fields(self) if each.compare})


@dataclass(frozen=True)
class StepResult:
    """Result of one agent turn.

    ``reward``, ``reward_parts`` and ``answer`` are used only if the episode is ``done``.
    """

    tool_outputs: list[ToolOutput] = field(default_factory=list)
    """Results of the tools, in the order of the calls."""
    user: str | None = None
    """Next message of the user."""
    done: bool = False
    reward: float = 0.0
    reward_parts: dict[str, float] = field(default_factory=dict)
    """Parts of the reward, for the metrics. "correct" (0 or 1) is always present."""
    answer: str | None = None
    """Final answer, normalized so that equal answers are equal strings. maj@k counts these."""
    tool_calls: int = 0
    tool_errors: int = 0
    format_error: str | None = None
    """Reason why the turn cannot be executed, such as "unknown_tool". It ends the episode."""


@dataclass(frozen=True)
class ExternalAgent:
    """External agent that runs an episode.

    It calls the policy over HTTP, through OpenAI's API, and does not depend on this project.
    """

    function: str
    """``run(task, base_url, api_key)`` as MODULE:FUNCTION, plain or async."""
    task: dict[str, Any]
    """First argument of the function: JSON values."""
    history: Literal["append", "harmony"]
    """Rendering of the history after a final answer (docs/gateway.md)."""
    max_concurrent_episodes: int
    """Episodes of the agent that one rollout worker runs at a time."""
    memory_bytes: int
    """Memory limit of the agent's process."""
    python: str | None = None
    """Interpreter of the agent's process. Default: the interpreter of this process."""


ScriptedPolicy = Generator[list[ParsedMessage], StepResult, None]
"""Scripted policy. It yields the messages of a turn and receives the turn's result."""


class PythonExecutor(Protocol):
    """Function that runs untrusted Python, such as ``PythonSandbox.run``."""

    def __call__(self, code: str, history: Sequence[str] = (), /) -> Awaitable[ExecutionResult]:
        """Run ``code`` after the programs of ``history``, whose output is dropped.

        Raises:
            SandboxError: if the sandbox fails.
            InfrastructureError: instead of SandboxError, within episodes.
        """
        ...


class RewardConfig(BaseModel):
    """Mapping from scores to rewards.

    Environments score episodes: 0 is the score of doing nothing, 1 is perfect.
    """

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    correct: float = 1.0
    """Reward of score 1. Rewards of other scores are interpolated linearly."""
    wrong: float = -1.0
    """Reward of score 0, and of an episode without an answer."""
    format_error: float = -1.0
    """Reward of a malformed turn or a call of an unknown tool. A negative score of the episode until
    then is added."""
    tool_use_bonus: bool = False
    """ReTool only: add 0.1 per 2 tool calls, at most 0.4, to the reward of a wrong episode. A policy
    that is always wrong learns to try tools."""


class EnvironmentOptions(BaseModel):
    """Base class of an environment's ``Options``: the keys of ``tasks.sources.NAME.options``."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class Environment:
    """State and rules of one episode. Every episode gets a new object.

    A subclass defines:

    - tasks: ``generate``, or ``from_record`` for rows of a file, or both;
    - the judgment of a final answer: ``answer``;
    - tools, if any: ``tools`` describes them, ``call`` runs one;
    - a scripted policy for supervised fine-tuning: ``solve``.

    The agent loop calls ``open``, renders ``prompt``, and passes every sampled turn to ``step`` until
    a result is ``done``. ``step`` calls ``call`` and ``answer``. If an episode ends early,
    ``end_truncated`` or ``end_with_format_error`` scores it. Finally the loop calls ``close``.
    """

    Options: ClassVar[type[EnvironmentOptions]] = EnvironmentOptions

    FIXED: ClassVar[tuple[str, ...]] = ("task", "execute", "reward")
    """Attributes that steps do not change. ``save_state`` leaves them out. Subclasses append
    attributes that cannot be copied, such as a connection."""

    uses_external_agent: ClassVar[bool] = False
    """True if ``external_agent`` runs the episodes instead of the agent loop."""

    def __init__(self, task: Task, execute: PythonExecutor, reward: RewardConfig) -> None:
        self.task = task
        self.execute = execute
        self.reward = reward

    # ---- tasks

    @classmethod
    def generate(cls, split: Split, seed: int, index: int, options: Any) -> Task:
        """Return a generated task. Equal arguments give equal tasks.

        Args:
            split: "train" or "held_out".
            seed: seed of the task source.
            index: number of the task: 0, 1, 2, ... without limit.
            options: instance of ``Options``.

        Returns:
            The task. The task source sets its id and the environment's name.
        """
        name = cls.__name__
        # Name the class, so that its author knows where a method is missing.
        raise NotImplementedError(
            f"{name} does not generate tasks. Set train_path and held_out_path"
        )

    @classmethod
    def from_record(cls, record: dict[str, Any], name: str, options: Any) -> Task | None:
        """Return the task in a data set's row; None to leave the row out.

        Args:
            record: row.
            name: unique name of the row, for ``Task.task_id``.
            options: instance of ``Options``.

        Returns:
            The task, or None. The task source sets the environment's name.

        Raises:
            KeyError: if a column is missing.
            ValueError: if a value has the wrong type.
        """
        raise ValueError("a task needs task_id, messages and ground_truth")

    @classmethod
    def solve(cls, task: Task, rng: Random, inject_errors: bool) -> ScriptedPolicy:
        """Return a scripted policy for ``task``.

        Its episodes are demonstrations for supervised fine-tuning.

        Args:
            task: task to solve.
            rng: source of variation.
            inject_errors: True for a policy that has the form of an expert and mostly fails.

        Raises:
            NotImplementedError: when the script starts, if it cannot solve the task.
        """
        name = cls.__name__
        raise NotImplementedError(f"{name} has no scripted policy for demonstrations")

    @classmethod
    async def simulate_python(cls, code: str, history: Sequence[str] = (), /) -> ExecutionResult:
        """Return the result of a ``solve`` program without running it.

        Demonstrations have no sandbox. Only environments whose scripts call Python need this method.
        Arguments and result are those of ``execute``.
        """
        name = cls.__name__
        raise NotImplementedError(f"{name}.solve calls Python, which needs {name}.simulate_python")

    @classmethod
    def vocabulary_text(cls) -> str:
        """Return the text from which a tiny vocabulary is built.

        If it is empty, the vocabulary is built from episodes of ``solve``: on generated tasks, or
        without ``generate`` on the first rows of the training file.
        Subclasses inherit the text, so override it if tasks use other words.
        """
        return ""

    # ---- an episode

    async def open(self) -> None:
        """Connect to the servers of the episode, before ``prompt`` is called.

        After an infrastructure failure the loop calls ``restore_state`` and then ``open`` again,
        before it repeats the turn. Existing connections may stay.

        Raises:
            InfrastructureError: if it fails, with no connection left open. Other exceptions count
                as infrastructure failures, too.
        """

    async def close(self) -> None:
        """Release the resources of ``open``, after any end of the episode.

        An exception is logged and does not change the episode.
        """

    def prompt(self) -> list[dict[str, Any]]:
        """Return the first messages, such as {"role": "user", "content": text}.

        ``rl_loop.harmony.conversation`` describes the format.
        """
        return self.task.messages

    def teacher_prompt(self) -> list[dict[str, Any]]:
        """Return the first messages for a teacher, of a task with a ``teacher_hint``.

        By default the hint follows the text of the last message. The tools are those of the policy.
        """
        *others, last = self.prompt()
        content = last.get("content") or ""
        hint = f"\n\n{self.task.teacher_hint}"
        added = content + hint if isinstance(content, str) else [*content, _text_part(hint)]
        return [*others, {**last, "content": added}]

    def prompt_ids(self) -> Sequence[int] | None:
        """Return the rendered prompt, which ends at the beginning of the assistant's turn.

        None: the loop renders ``prompt`` with the tools.
        """
        return None

    def tools(self) -> Sequence[Tool]:
        """Return the functions for the developer message, without ``python``."""
        return ()

    def builtin_tools(self) -> Sequence[BuiltinTool | PythonTool]:
        """Return the built-in tools for the system message, such as ``PythonTool()``.

        Offer only tools that ``call`` accepts ("python" for PythonTool). A call of another tool is a
        format error.
        """
        return ()

    async def call(self, tool: str, arguments: str) -> str | StepResult:
        """Run one tool call.

        Args:
            tool: sampled recipient: "functions.NAME" or "python".
            arguments: text of the message.

        Returns:
            The text that the agent reads, or the end of the episode.

        Raises:
            ToolError: if the agent made a mistake.
            UnknownToolError: if there is no such tool.
            InfrastructureError: if the tool fails for another reason. Other exceptions count as
                infrastructure failures, too.
        """
        raise UnknownToolError

    async def answer(self, text: str) -> StepResult:
        """Judge the text on the channel ``final``.

        Returns:
            The result of ``end_with_score``, or a StepResult with the next message of the user.
        """
        raise NotImplementedError

    async def step(self, messages: Sequence[ParsedMessage]) -> StepResult:
        """Execute one assistant turn: run its tool calls, or judge its answer."""
        calls = [message for message in messages if message.recipient is not None]
        # Turns without calls are answers. The message on ``final`` is the last one.
        if not calls:
            return await self._judge_turn(messages[-1])

        outputs: list[ToolOutput] = []
        errors = 0
        for message in calls:
            assert message.recipient is not None
            try:
                reply = await self._run_call(message.recipient, message.text)
            except ToolError as error:
                # The agent reads the error and can correct itself.
                reply = str(error)
                errors += 1
            except UnknownToolError:
                return self.end_with_format_error("unknown_tool")

            # The episode is over, so later calls are not executed. The call that ended it counts.
            if isinstance(reply, StepResult):
                return replace(reply, tool_calls=len(outputs) + 1, tool_errors=errors)
            # In Harmony a tool's result has the channel of its call.
            outputs.append(ToolOutput(message.recipient, message.channel, reply))

        return StepResult(outputs, tool_calls=len(outputs), tool_errors=errors)

    async def _judge_turn(self, message: ParsedMessage) -> StepResult:
        """Judge a turn without calls. Raises InfrastructureError if the checker fails."""
        # The user reads only ``final``, so a turn that ends on another channel is no answer.
        if message.channel != "final":
            return self.end_with_format_error("unanswered")

        try:
            return await self.answer(message.text)
        except InfrastructureError:
            raise
        except Exception as error:
            # A checker that crashes says nothing about the answer, so do not score it as wrong.
            raise InfrastructureError("checker", describe(error)) from error

    async def _run_call(self, tool: str, arguments: str) -> str | StepResult:
        """Run ``call``. Raises InfrastructureError for unexpected exceptions and return types."""
        try:
            reply = await self.call(tool, arguments)
        except (ToolError, UnknownToolError, InfrastructureError):
            raise
        except Exception as error:
            # The cause is a missing server or a bug of the tool, not the policy.
            raise InfrastructureError("tool", f"{tool[:60]}: {describe(error)}") from error

        if not isinstance(reply, str | StepResult):
            kind = type(reply).__name__
            raise InfrastructureError("tool", f"{tool[:60]} returned {kind} instead of text")
        return reply

    # ---- an episode that a program plays

    def external_agent(self) -> ExternalAgent:
        """Return the external agent of the episode, if uses_external_agent."""
        raise NotImplementedError

    def to_reward(self, value: object) -> StepResult:
        """Return the end of an external agent's episode.

        Args:
            value: reward that the agent returned or sent.

        Raises:
            InfrastructureError: if the value is not a reward.
        """
        raise NotImplementedError

    # ---- state of an episode, for repeating failed calls and for purification

    def save_state(self) -> Any:
        """Return a copy of the state that steps change, so that a failed call can be repeated.

        The default is a deep copy of all attributes except ``FIXED``. Return None if the state is on
        a server and cannot be restored. Failed calls are then not repeated.
        """
        # Steps change lists and dictionaries in place, so the copy is deep.
        changing = {name: value for name, value in vars(self).items() if name not in self.FIXED}
        return copy.deepcopy(changing)

    def restore_state(self, state: Any) -> None:
        """Restore the state that ``save_state`` returned. ``state`` can be used again."""
        # A retry must not see attributes that the failed call added.
        added = vars(self).keys() - state.keys() - set(self.FIXED)
        for name in added:
            delattr(self, name)

        # Copy again, so that a second retry gets the same state.
        for name, value in copy.deepcopy(state).items():
            setattr(self, name, value)

    # ---- ends of an episode

    def end_truncated(self) -> StepResult:
        """Score a truncated episode: it reached its limit of turns, tokens or time."""
        return self.end_with_score(0.0)

    def end_with_format_error(self, kind: str) -> StepResult:
        """Score an episode that ended with a malformed turn or an unknown tool.

        The reward is ``format_error`` plus the negative score until then, so a malformed turn does
        not hide damage. The reward parts are those of a truncated episode, because GDPO compares
        episodes part by part.

        Args:
            kind: reason, such as "unknown_tool".
        """
        # An episode without any action earns ``wrong``. The difference to it is the damage.
        truncated = self.end_truncated()
        damage = min(0.0, truncated.reward - self.reward.wrong)
        parts = truncated.reward_parts | {"correct": 0.0, "format_error": 1.0}
        # A positive score until then must not soften the penalty.
        parts["score"] = min(0.0, parts.get("score", 0.0))

        reward = self.reward.format_error + damage
        return StepResult(done=True, reward=reward, reward_parts=parts, format_error=kind)

    def end_with_score(self, score: float, answer: str | None = None, **parts: float) -> StepResult:
        """Return the end of the episode.

        Args:
            score: 1 is perfect, 0 is the score of doing nothing, negative is damage.
            answer: normalized final answer, for maj@k.
            parts: further reward parts. Every end of an episode must have the same parts.
        """
        # Linear: score 0 gives ``wrong``, score 1 gives ``correct``.
        reward = self.reward.wrong + (self.reward.correct - self.reward.wrong) * score
        all_parts = {"correct": float(score >= 1), "format_error": 0.0, "score": score, **parts}
        return StepResult(done=True, reward=reward, reward_parts=all_parts, answer=answer)

    def reference_answer(self) -> str:
        """Return a correct answer as an agent would write it. It is never trained on."""
        return self.task.ground_truth


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


# ---- for ``from_record``


def text_in(record: dict[str, Any], key: str) -> str:
    """Return a column of a row as text. Numbers are converted.

    Raises:
        KeyError: if the column is missing.
        ValueError: if its value is neither text nor a number.

    Example:
        >>> text_in({"answer": 42}, "answer")
        '42'
    """
    value = record[key]
    # JSON's true and false are integers in Python.
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise ValueError(f"{key!r} must be text, not {type(value).__name__}")
    return value
