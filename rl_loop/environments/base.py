"""What an environment is: where its tasks come from, how an episode goes, and how a script would solve it."""

import copy
import json
from collections.abc import Awaitable, Generator, Sequence
from dataclasses import asdict, dataclass, field, replace
from random import Random
from typing import Any, ClassVar, Literal, Protocol

from pydantic import BaseModel, ConfigDict

from rl_loop.harmony.codec import BuiltinTool, ParsedMessage, PythonTool, Tool, ToolOutput
from rl_loop.infrastructure import InfrastructureFailure, describe
from rl_loop.sandbox import ExecutionResult

Split = Literal["train", "held_out"]


@dataclass(frozen=True)
class Task:
    """One problem. JSON-serialisable."""

    task_id: str
    messages: list[dict[str, Any]]  # the prompt: a conversation as rl_loop.harmony.conversation describes it
    ground_truth: str
    environment: str = "retool"  # a name in ``registry.ENVIRONMENTS``, or ``module:Class``
    # whatever the environment needs besides. "category", if given, is a row of the evaluation's table.
    metadata: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """One line of a task file."""
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class StepResult:
    """What a turn of the agent led to. ``reward``, ``reward_parts`` and ``answer`` count when ``done``."""

    tool_outputs: list[ToolOutput] = field(default_factory=list)  # what tools answer, in the order of the calls
    user: str | None = None  # what the user says next
    done: bool = False
    reward: float = 0.0
    # what the reward is made of, for the metrics; "correct" (0 or 1) is always there
    reward_parts: dict[str, float] = field(default_factory=dict)
    answer: str | None = None  # the final answer in a form in which equal answers are equal text: what maj@k counts
    tool_calls: int = 0
    tool_errors: int = 0
    format_error: str | None = None  # why the turn cannot be acted on, if it cannot; the episode then ends


# a policy that is a program: yields the messages of a turn and gets what they led to
Script = Generator[list[ParsedMessage], StepResult, None]


class Execute(Protocol):
    """Runs untrusted Python: ``PythonSandbox.run``, or a stand-in for it."""

    def __call__(self, code: str, history: Sequence[str] = (), /) -> Awaitable[ExecutionResult]:
        """Run ``code`` after the programs of ``history``, which are not heard. Raises SandboxFailure."""
        ...


class RewardConfig(BaseModel):
    """What an episode earns. Environments score an episode; 0 is what doing nothing scores and 1 is perfect."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    correct: float = 1.0
    """Reward of score 1; scores between 0 and 1 earn in proportion."""
    wrong: float = -1.0
    """Reward of score 0, and of an episode without an answer."""
    format_error: float = -1.0
    """The sampled tokens are not a legal Harmony message, or call a tool that does not exist. Harm done before, a score
    below 0, is taken off."""
    tool_use: bool = False
    """ReTool only: a wrong episode that called tools earns up to 0.4 more, 0.1 for every two calls, so that a policy
    that is always wrong learns to try them."""


class EnvironmentOptions(BaseModel):
    """Base of an environment's ``Options``: what ``tasks.sources.NAME.options`` may say."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class ToolError(Exception):
    """A call that failed; the message is what the agent is told."""


class UnknownTool(Exception):
    """The agent called something that does not exist; a format error, which ends the episode."""


class Environment:
    """The world of one episode; a new object for every episode.

    A subclass says what its tasks are (``generate``, or ``from_record`` for files, or both), what a final answer earns
    (``answer``), and if it has tools, what they are (``tools``) and do (``call``)."""

    Options: ClassVar[type[EnvironmentOptions]] = EnvironmentOptions

    FIXED: ClassVar[tuple[str, ...]] = ("task", "execute", "reward")
    """Attributes that no step changes and ``save_state`` leaves out. A subclass adds its own, such as a connection."""

    def __init__(self, task: Task, execute: Execute, reward: RewardConfig) -> None:
        self.task, self.execute, self.reward = task, execute, reward

    # ---- tasks

    @classmethod
    def generate(cls, split: Split, seed: int, index: int, options: Any) -> Task:
        """Task ``index`` (from 0, without end) of a split: a function of the arguments and nothing else. Its name
        and environment are completed by the source of tasks that asks for it."""
        raise NotImplementedError(f"{cls.__name__} generates no tasks: give train_path and held_out_path")

    @classmethod
    def from_record(cls, record: dict[str, Any], name: str, options: Any) -> Task | None:
        """The task that a row of a data set is, None to leave it out; ``name`` is unique to the row. Raises KeyError or
        ValueError if it is no such row."""
        raise ValueError("a task needs task_id, messages and ground_truth")

    @classmethod
    def solve(cls, task: Task, rng: Random, careless: bool) -> Script:
        """A script that solves ``task``, or one that looks like it and mostly fails if ``careless``. Episodes of such
        scripts are the demonstrations of supervised fine-tuning."""
        raise NotImplementedError(f"{cls.__name__} has no scripted policy to make demonstrations with")

    # ---- an episode

    def prompt(self) -> list[dict[str, Any]]:
        """The messages that the agent starts from, such as {"role": "user", "content": text}: a conversation as
        ``rl_loop.harmony.conversation`` describes it."""
        return self.task.messages

    def tools(self) -> Sequence[Tool]:
        """The functions that the developer message describes; the built-in ``python`` is none of them."""
        return ()

    def builtin_tools(self) -> Sequence[BuiltinTool | PythonTool]:
        """The built-in tools that may be called, which the system message then describes: ``PythonTool()`` where
        ``call`` takes "python". Offer none that ``call`` does not know, as calling it would be a format error."""
        return ()

    async def call(self, tool: str, arguments: str) -> str | StepResult:
        """Run one tool call: what the agent is told, or the end of the episode. ``tool`` is the recipient as sampled.
        Raises ToolError or UnknownTool; and InfrastructureFailure, as which any other exception counts too, if the tool
        cannot do its work through no fault of the agent."""
        raise UnknownTool

    async def answer(self, text: str) -> StepResult:
        """What the text on the channel ``final`` leads to: ``finished``, or another message of the user."""
        raise NotImplementedError

    async def step(self, messages: Sequence[ParsedMessage]) -> StepResult:
        """Act on the messages of one assistant turn: calls to tools, or an answer."""
        calls = [message for message in messages if message.recipient is not None]
        if not calls:
            return await self._answer(messages[-1])

        outputs: list[ToolOutput] = []
        errors = 0
        for message in calls:
            assert message.recipient is not None
            try:
                reply = await self._call(message.recipient, message.text)
            except ToolError as error:
                reply = str(error)
                errors += 1
            except UnknownTool:
                return self.illegal("unknown_tool")
            if isinstance(reply, StepResult):
                return replace(reply, tool_calls=len(outputs) + 1, tool_errors=errors)
            outputs.append(ToolOutput(message.recipient, message.channel, reply))
        return StepResult(outputs, tool_calls=len(outputs), tool_errors=errors)

    async def _answer(self, message: ParsedMessage) -> StepResult:
        """What a turn without calls leads to. Raises InfrastructureFailure if it cannot be judged."""
        if message.channel != "final":
            return self.illegal("unanswered")
        try:
            return await self.answer(message.text)
        except InfrastructureFailure:
            raise
        except Exception as error:  # an answer that cannot be judged is not a wrong one
            raise InfrastructureFailure("checker", describe(error)) from error

    async def _call(self, tool: str, arguments: str) -> str | StepResult:
        """``call``; raises InfrastructureFailure for whatever it must not raise or return."""
        try:
            reply = await self.call(tool, arguments)
        except (ToolError, UnknownTool, InfrastructureFailure):
            raise
        except Exception as error:  # a server that is away, say
            raise InfrastructureFailure("tool", f"{tool[:60]}: {describe(error)}") from error
        if not isinstance(reply, str | StepResult):
            raise InfrastructureFailure("tool", f"{tool[:60]} returned {type(reply).__name__} instead of text")
        return reply

    def save_state(self) -> Any:
        """Copy everything that the steps of an episode change, so that a failed call can be retried. None says that it
        cannot, as in a world that lives elsewhere."""
        return copy.deepcopy({name: value for name, value in vars(self).items() if name not in self.FIXED})

    def restore_state(self, state: Any) -> None:
        """Set the world back to what ``save_state`` returned, which stays usable."""
        for name in vars(self).keys() - state.keys() - set(self.FIXED):
            delattr(self, name)
        for name, value in copy.deepcopy(state).items():
            setattr(self, name, value)

    def unfinished(self) -> StepResult:
        """The reward when the episode ends without a final answer: out of turns, tokens or time."""
        return self.finished(0.0)

    def illegal(self, kind: str) -> StepResult:
        """The reward when what was sampled is not a legal Harmony message or calls a tool that does not exist: what a
        format error earns, less the harm done before, which such an end must not undo. It has all the parts of an
        unfinished episode, as GDPO compares episodes part by part."""
        unfinished = self.unfinished()
        reward = self.reward.format_error + min(0.0, unfinished.reward - self.reward.wrong)
        parts = unfinished.reward_parts | {"correct": 0.0, "format_error": 1.0}
        parts["score"] = min(0.0, parts.get("score", 0.0))
        return StepResult(done=True, reward=reward, reward_parts=parts, format_error=kind)

    def finished(self, score: float, answer: str | None = None, **parts: float) -> StepResult:
        """The end of an episode with ``score`` (1 is perfect, 0 what doing nothing scores)."""
        reward = self.reward.wrong + (self.reward.correct - self.reward.wrong) * score
        all_parts = {"correct": float(score >= 1), "format_error": 0.0, "score": score, **parts}
        return StepResult(done=True, reward=reward, reward_parts=all_parts, answer=answer)


def text_in(record: dict[str, Any], key: str) -> str:
    """The text of a key of a row; a number becomes text. Raises KeyError if the key is missing, ValueError if it is
    of another type."""
    value = record[key]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise ValueError(f"{key!r} must be text, not {type(value).__name__}")
    return value


def arguments_of(text: str) -> dict[str, Any]:
    """The JSON object that a function is called with. Raises ToolError."""
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ToolError(f"the arguments are not JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise ToolError("the arguments must be a JSON object")
    return arguments


# ---- what scripts say


def think(text: str) -> ParsedMessage:
    return ParsedMessage("analysis", None, None, text)


def final(text: str) -> ParsedMessage:
    return ParsedMessage("final", None, None, text)


def function_call(name: str, /, **arguments: Any) -> ParsedMessage:
    return ParsedMessage("commentary", f"functions.{name}", "<|constrain|>json", json.dumps(arguments))
