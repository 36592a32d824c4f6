"""What an environment is: where its tasks come from, how an episode goes, how a script solves it.

``docs/environments.md`` shows how to write one."""

import copy
import json
import math
from collections.abc import Awaitable, Generator, Sequence
from dataclasses import asdict, dataclass, field, replace
from random import Random
from typing import Any, ClassVar, Literal, Protocol

from pydantic import BaseModel, ConfigDict

from rl_loop.chat.messages import ParsedMessage, ToolOutput
from rl_loop.chat.tools import FUNCTIONS, BuiltinTool, PythonTool, Tool
from rl_loop.infrastructure import InfrastructureFailure, describe
from rl_loop.sandbox import ExecutionResult

Split = Literal["train", "held_out"]


@dataclass(frozen=True)
class Task:
    """One problem. Every field is JSON."""

    task_id: str
    messages: list[dict[str, Any]]
    """The prompt: a conversation as ``rl_loop.harmony.conversation`` describes it."""
    ground_truth: str
    environment: str = "retool"
    """A name in ``registry.ENVIRONMENTS``, or MODULE:CLASS."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Whatever else the environment needs. "category", if present, is a row of the evaluation's
    table."""

    def to_json(self) -> str:
        """Write the task as one line of a task file."""
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class StepResult:
    """What one turn of the agent led to.

    ``reward``, ``reward_parts`` and ``answer`` count only if the episode is ``done``."""

    tool_outputs: list[ToolOutput] = field(default_factory=list)
    """What the tools answered, in the order of the calls."""
    user: str | None = None
    """What the user says next."""
    done: bool = False
    reward: float = 0.0
    reward_parts: dict[str, float] = field(default_factory=dict)
    """What the reward is made of, for the metrics; "correct" (0 or 1) is always one of them."""
    answer: str | None = None
    """The final answer, in a form in which equal answers are equal text: maj@k counts these."""
    tool_calls: int = 0
    tool_errors: int = 0
    format_error: str | None = None
    """Why the turn cannot be acted on, such as "unknown_tool". The episode then ends."""


@dataclass(frozen=True)
class AgentProgram:
    """A program that plays an episode by itself: it talks to the policy over HTTP, as to any model
    of OpenAI's, and knows nothing of us."""

    function: str
    """``run(task, base_url, api_key)`` as MODULE:FUNCTION, plain or async."""
    task: dict[str, Any]
    """JSON, which it is called with."""
    history: Literal["append", "harmony"]
    """What stands before a turn that follows a final answer (docs/gateway.md)."""
    concurrency: int
    """Episodes of the program that one rollout worker runs at a time."""
    memory_bytes: int
    """Of the process that runs them."""
    python: str | None = None
    """The interpreter of that process; None for this one's."""


Script = Generator[list[ParsedMessage], StepResult, None]
"""A policy that is a program: yields the messages of a turn and is sent what they led to."""


class Execute(Protocol):
    """Runs untrusted Python: ``PythonSandbox.run``, or a stand-in for it."""

    def __call__(self, code: str, history: Sequence[str] = (), /) -> Awaitable[ExecutionResult]:
        """Run ``code`` after the programs of ``history``, whose output is dropped.

        Raises SandboxFailure, or InfrastructureFailure where episodes run."""
        ...


class RewardConfig(BaseModel):
    """What an episode earns.

    Environments score it: 0 is what doing nothing scores, 1 is perfect."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    correct: float = 1.0
    """Reward of score 1; scores between 0 and 1 earn in proportion."""
    wrong: float = -1.0
    """Reward of score 0, and of an episode without an answer."""
    format_error: float = -1.0
    """The sampled tokens are no legal turn, or call a tool that does not exist. Harm
    done before, which is a score below 0, is subtracted."""
    tool_use: bool = False
    """ReTool only: a wrong episode that called tools earns up to 0.4 more, 0.1 for every two
    calls, so that a policy that is always wrong learns to try them."""


class EnvironmentOptions(BaseModel):
    """Base of an environment's ``Options``: what ``tasks.sources.NAME.options`` may say."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class ToolError(Exception):
    """A tool call failed through the agent's doing; the message is what the agent reads."""


class UnknownTool(Exception):
    """The agent called a tool that does not exist: a format error, which ends the episode."""


class Environment:
    """The world of one episode; every episode gets a new object.

    A subclass defines

    - its tasks: ``generate``, or ``from_record`` for rows of a file, or both;
    - what a final answer earns: ``answer``;
    - its tools, if it has any: ``tools`` describes them, ``call`` runs one;
    - a script that solves a task, for supervised fine-tuning: ``solve``.

    The agent loop calls ``open``, renders ``prompt`` and passes every turn that the policy samples to
    ``step``, which calls ``call`` and ``answer``, until a result is ``done``. An episode that ends
    otherwise earns what ``unfinished`` or ``illegal`` says. ``close`` is called in the end."""

    Options: ClassVar[type[EnvironmentOptions]] = EnvironmentOptions

    FIXED: ClassVar[tuple[str, ...]] = ("task", "execute", "reward")
    """Attributes that no step changes, which ``save_state`` leaves out. A subclass appends those
    that cannot be copied, such as a connection."""

    IS_PLAYED_BY_PROGRAM: ClassVar[bool] = False
    """Whether ``program`` plays the episodes, and not the agent loop."""

    def __init__(self, task: Task, execute: Execute, reward: RewardConfig) -> None:
        self.task = task
        self.execute = execute
        self.reward = reward

    # ---- tasks

    @classmethod
    def generate(cls, split: Split, seed: int, index: int, options: Any) -> Task:
        """Make task ``index`` (0, 1, 2, ... without end) of a split from the arguments alone.

        ``options`` is an instance of ``Options``. The task source that asks sets the id and the
        environment's name."""
        name = cls.__name__
        raise NotImplementedError(f"{name} generates no tasks: give train_path and held_out_path")

    @classmethod
    def from_record(cls, record: dict[str, Any], name: str, options: Any) -> Task | None:
        """Make the task of a data set's row, or return None to leave the row out.

        ``name`` is unique to the row. Raises KeyError or ValueError for a row of another kind."""
        raise ValueError("a task needs task_id, messages and ground_truth")

    @classmethod
    def solve(cls, task: Task, rng: Random, faulty: bool) -> Script:
        """Solve ``task`` as an expert, or look like one and mostly fail if ``faulty``.

        Episodes of such scripts are the demonstrations of supervised fine-tuning. Raises
        NotImplementedError, when the script begins, for a task that it cannot solve."""
        name = cls.__name__
        raise NotImplementedError(f"{name} has no scripted policy to make demonstrations with")

    @classmethod
    async def simulate_python(cls, code: str, history: Sequence[str] = (), /) -> ExecutionResult:
        """Answer a program of ``solve`` without running it, as demonstrations have no sandbox.

        Needed only if scripts call Python. Takes and returns what ``execute`` does."""
        name = cls.__name__
        raise NotImplementedError(f"{name}.solve calls Python, which needs {name}.simulate_python")

    @classmethod
    def vocabulary_text(cls) -> str:
        """Return the text that a tiny vocabulary is made for.

        Without one, the default, it is made for episodes of ``solve`` on generated tasks. A
        subclass inherits the text: override it where tasks read differently."""
        return ""

    # ---- an episode

    async def open(self) -> None:
        """Connect to what the episode needs, before its prompt is asked for.

        Called again, after ``restore_state``, before a turn that infrastructure spoiled is acted on
        anew: what is still open may stay. Raises InfrastructureFailure, as any other exception
        counts; leaves nothing open then."""

    async def close(self) -> None:
        """Let go of what ``open`` opened, however the episode ended.

        An exception is logged and changes nothing of the episode."""

    def prompt(self) -> list[dict[str, Any]]:
        """Return the messages that the agent starts from: {"role": "user", "content": text}.

        ``rl_loop.harmony.conversation`` describes what they may say."""
        return self.task.messages

    def tools(self) -> Sequence[Tool]:
        """Return the functions that the developer message describes, without ``python``."""
        return ()

    def builtin_tools(self) -> Sequence[BuiltinTool | PythonTool]:
        """Return the built-in tools that the system message describes, such as ``PythonTool()``.

        Offer only what ``call`` accepts ("python" for PythonTool): calling another is a format
        error."""
        return ()

    async def call(self, tool: str, arguments: str) -> str | StepResult:
        """Run one tool call. Returns what the agent reads, or the end of the episode.

        ``tool`` is the recipient as it was sampled ("functions.NAME", "python"), ``arguments``
        the text of the message. Raises ToolError and UnknownTool for what the agent did wrong,
        and InfrastructureFailure if the tool cannot work through no fault of the agent; any other
        exception counts as one."""
        raise UnknownTool

    async def answer(self, text: str) -> StepResult:
        """Judge the text on the channel ``final``.

        Returns ``finished``, or what the user says next."""
        raise NotImplementedError

    async def step(self, messages: Sequence[ParsedMessage]) -> StepResult:
        """Act on the messages of one assistant turn: run its calls, or judge its answer."""
        calls = [message for message in messages if message.recipient is not None]
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
            except UnknownTool:
                return self.illegal("unknown_tool")

            # The episode is over: calls behind this one are not run.
            if isinstance(reply, StepResult):
                return replace(reply, tool_calls=len(outputs) + 1, tool_errors=errors)
            # Harmony wants the answer on the channel of its call.
            outputs.append(ToolOutput(message.recipient, message.channel, reply))

        return StepResult(outputs, tool_calls=len(outputs), tool_errors=errors)

    async def _judge_turn(self, message: ParsedMessage) -> StepResult:
        """Judge a turn without calls. Raises InfrastructureFailure if that is not possible."""
        if message.channel != "final":
            return self.illegal("unanswered")

        try:
            return await self.answer(message.text)
        except InfrastructureFailure:
            raise
        except Exception as error:
            # An answer that could not be judged is not a wrong one.
            raise InfrastructureFailure("checker", describe(error)) from error

    async def _run_call(self, tool: str, arguments: str) -> str | StepResult:
        """Run ``call``. Raises InfrastructureFailure for whatever it must not raise or return."""
        try:
            reply = await self.call(tool, arguments)
        except (ToolError, UnknownTool, InfrastructureFailure):
            raise
        except Exception as error:
            # A server that is away, or a bug of the tool: never the policy's doing.
            raise InfrastructureFailure("tool", f"{tool[:60]}: {describe(error)}") from error

        if not isinstance(reply, str | StepResult):
            kind = type(reply).__name__
            raise InfrastructureFailure("tool", f"{tool[:60]} returned {kind} instead of text")
        return reply

    # ---- an episode that a program plays

    def program(self) -> AgentProgram:
        """Return what plays the episode, where IS_PLAYED_BY_PROGRAM."""
        raise NotImplementedError

    def earned(self, given: object) -> StepResult:
        """Return the end of an episode whose program returned ``given``, or was given it as reward.

        Raises InfrastructureFailure if that is no reward."""
        raise NotImplementedError

    # ---- its state: failed calls are repeated, and purification replays them

    def save_state(self) -> Any:
        """Copy all that steps of an episode change, so that a failed call can be repeated.

        The default deep-copies all attributes but those of ``FIXED``. An environment whose world
        lives elsewhere and cannot be set back returns None: its calls are then run only once."""
        # A deep copy, since steps change lists and dictionaries in place.
        changing = {name: value for name, value in vars(self).items() if name not in self.FIXED}
        return copy.deepcopy(changing)

    def restore_state(self, state: Any) -> None:
        """Set the world back to what ``save_state`` returned.

        ``state`` can be used again afterwards."""
        added = vars(self).keys() - state.keys() - set(self.FIXED)
        for name in added:
            delattr(self, name)

        # Copied again, so that a second retry finds the state unchanged.
        for name, value in copy.deepcopy(state).items():
            setattr(self, name, value)

    # ---- how an episode ends

    def unfinished(self) -> StepResult:
        """Score an episode that ended without a final answer: out of turns, tokens or time."""
        return self.finished(0.0)

    def illegal(self, kind: str) -> StepResult:
        """Score an episode that ended with an illegal turn or an unknown tool.

        It earns a format error's reward, less the harm done before, which such an end must not
        undo. It has all the reward parts of an unfinished episode, since GDPO compares episodes
        part by part."""
        # Doing nothing earns ``wrong``; what is missing to that is the harm.
        unfinished = self.unfinished()
        harm = min(0.0, unfinished.reward - self.reward.wrong)
        parts = unfinished.reward_parts | {"correct": 0.0, "format_error": 1.0}
        parts["score"] = min(0.0, parts.get("score", 0.0))

        reward = self.reward.format_error + harm
        return StepResult(done=True, reward=reward, reward_parts=parts, format_error=kind)

    def finished(self, score: float, answer: str | None = None, **parts: float) -> StepResult:
        """End the episode with ``score``: 1 is perfect, 0 what doing nothing scores.

        ``parts`` are further reward parts; every end of an episode must have the same ones."""
        reward = self.reward.wrong + (self.reward.correct - self.reward.wrong) * score
        all_parts = {"correct": float(score >= 1), "format_error": 0.0, "score": score, **parts}
        return StepResult(done=True, reward=reward, reward_parts=all_parts, answer=answer)

    def reference_answer(self) -> str:
        """Return the text of a right answer as an agent would write it.

        Nothing is trained on it."""
        return self.task.ground_truth


# ---- for ``from_record`` and ``call``


def text_in(record: dict[str, Any], key: str) -> str:
    """Return the text of a row's key; a number becomes text.

    Raises KeyError if the key is missing, ValueError if its value has another type."""
    value = record[key]
    # JSON's true and false are integers to Python, and no text to anybody.
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise ValueError(f"{key!r} must be text, not {type(value).__name__}")
    return value


def function_of(recipient: str) -> str:
    """Return the name of the function that a call is for. Raises UnknownTool for another recipient."""
    if not recipient.startswith(FUNCTIONS):
        raise UnknownTool
    return recipient.removeprefix(FUNCTIONS)


DEEPEST_ARGUMENTS = 64
"""Levels of JSON that a call may have: libraries which write or read it have limits of their own."""


def arguments_of(text: str) -> dict[str, Any]:
    """Parse the JSON object that a function is called with.

    Raises ToolError, also for what Python reads and JSON does not have: NaN, infinite numbers, half
    of a surrogate pair. A server would fail over it as if it were broken."""
    try:
        arguments = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
        json.dumps(arguments, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ToolError(f"the arguments are not JSON: {error}") from None

    if not isinstance(arguments, dict):
        raise ToolError("the arguments must be a JSON object")
    if _is_deeper(arguments, DEEPEST_ARGUMENTS):
        raise ToolError(f"the arguments have more than {DEEPEST_ARGUMENTS} levels")
    return arguments


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number of JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is too large a number")
    return number


def _is_deeper(value: Any, levels: int) -> bool:
    """Return True if JSON has more than ``levels`` levels of objects and lists."""
    level = [value]
    for _ in range(levels):
        children: list[Any] = []
        for parent in level:
            if isinstance(parent, dict):
                children += parent.values()
            elif isinstance(parent, list):
                children += parent
        level = children
    return any(isinstance(child, dict | list) for child in level)


# ---- for ``solve``


def think(text: str) -> ParsedMessage:
    """Write a message on the channel ``analysis``."""
    return ParsedMessage("analysis", None, None, text)


def final(text: str) -> ParsedMessage:
    """Write a final answer."""
    return ParsedMessage("final", None, None, text)


def function_call(name: str, /, **arguments: Any) -> ParsedMessage:
    """Write a call of one of the ``tools``."""
    text = json.dumps(arguments)
    return ParsedMessage("commentary", f"{FUNCTIONS}{name}", "<|constrain|>json", text)
