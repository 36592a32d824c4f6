"""Policies of ``gptoss play`` that are not models: a scripted policy and a person."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from random import Random
from typing import NoReturn, Protocol

from megatron_gptoss.user_error import UserError
from rl_loop.chat.codec import ChatCodec
from rl_loop.chat.messages import ParsedMessage
from rl_loop.chat.tools import FUNCTIONS, BuiltinTool, PythonTool
from rl_loop.data.trajectory import FinishReason
from rl_loop.engines.protocol import GenerateRequest, GenerateResult, SamplingParams
from rl_loop.environments import Environment, ScriptedPolicy, StepResult, Task, environment_class
from rl_loop.environments.scripted_messages import final, think

HELP = """\
  TEXT                  final answer
  /answer TEXT          final answer that may be empty or begin with /
  /think TEXT           thoughts before the call or answer of the next line
  /call TOOL ARGUMENTS  call of a tool: JSON for a function, code for python
  /raw TEXT             whole turn with the special tokens of the chat format
A line that ends with \\ continues on the next line. End of input (Ctrl-D) stops the episode."""
"""Lines that a person can type."""


class PlayError(UserError, RuntimeError):
    """An episode cannot be played. The message has the reason."""


class WrittenPolicy(Protocol):
    """Policy that writes turns instead of sampling them."""

    def begin(self, environment: Environment) -> None:
        """Prepare for the first turn. The environment is open."""

    async def write(self) -> list[int]:
        """Return the token ids of the next turn. An exception stops the episode."""
        ...

    def receive(self, result: StepResult) -> None:
        """Receive the result of the last turn."""


class WrittenTurns:
    """Engine whose turns a ``WrittenPolicy`` writes. Implements ``RolloutEngine``."""

    def __init__(self, policy: WrittenPolicy) -> None:
        self._policy = policy
        self.stopped = asyncio.Event()
        """Set when the policy raises an exception."""
        self.error: Exception | None = None
        """Exception of the policy."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Return the next turn, as an engine would have sampled it. Its log-probs are 0."""
        try:
            ids = await self._policy.write()
        except Exception as error:
            # The loop would report it as a failure of the engine. The caller cancels this request.
            self.error = error
            self.stopped.set()
            await asyncio.Event().wait()
        return as_sampled(ids, request.sampling)

    async def score(self, input_ids: list[int], temperature: float = 1.0) -> NoReturn:
        raise NotImplementedError("a written policy has no log-probs")

    async def abort(self, request_id: str | None = None) -> None:
        """Do nothing, because a written turn has no partial tokens."""

    async def close(self) -> None:
        """Do nothing, because there are no resources."""


def as_sampled(ids: Sequence[int], sampling: SamplingParams) -> GenerateResult:
    """Return a turn cut as an engine cuts it: at its first stop token or at the limit."""
    stops = (number for number, token in enumerate(ids, 1) if token in sampling.stop_token_ids)
    ids = ids[: next(stops, None)]
    reason = FinishReason.STOP
    if len(ids) > sampling.max_new_tokens or ids[-1] not in sampling.stop_token_ids:
        reason = FinishReason.LENGTH
    ids = ids[: sampling.max_new_tokens]
    return GenerateResult(list(ids), [0.0] * len(ids), reason)


class Script:
    """The environment's scripted expert for a task."""

    def __init__(self, task: Task, codec: ChatCodec, seed: int) -> None:
        """Start the script, as far as its first turn.

        Args:
            task: task to solve.
            codec: chat format of the policy.
            seed: seed of the script.

        Raises:
            PlayError: the environment has no script for the task.
        """
        self._task_id = task.task_id
        self._codec = codec
        self._result: StepResult | None = None
        environment = environment_class(task.environment)
        try:
            rng = Random(f"{task.task_id}/{seed}")
            self._script: ScriptedPolicy = environment.solve(task, rng, inject_errors=False)
            # Run up to its first turn here, because a `solve` that is a generator raises only then.
            self._first = next(self._script, None)
        except NotImplementedError as error:
            raise PlayError(
                f"--policy scripted: {error}. Define `solve`, or use --policy me or model"
            ) from None

    def begin(self, environment: Environment) -> None:
        """Do nothing, because a script knows its environment."""

    async def write(self) -> list[int]:
        """Return the next turn of the script."""
        messages = self._first
        if self._result is not None:
            try:
                messages = self._script.send(self._result)
            except StopIteration:
                messages = None
        if not messages:
            raise PlayError(f"the script of task {self._task_id} ends before its episode")
        return self._codec.render_assistant(messages)

    def receive(self, result: StepResult) -> None:
        """Keep the result for the next turn."""
        self._result = result


class Person:
    """A person who types the turns."""

    def __init__(
        self,
        codec: ChatCodec,
        read_line: Callable[[], Awaitable[str | None]],
        tell: Callable[[str], None],
    ) -> None:
        """Create the policy.

        Args:
            codec: chat format of the policy.
            read_line: returns the next line without its line break, or None at the end of input.
            tell: prints a message to the person.
        """
        self._codec = codec
        self._read_line = read_line
        self._tell = tell
        self._builtin_tools: Sequence[BuiltinTool | PythonTool] = ()

    def begin(self, environment: Environment) -> None:
        """Note the built-in tools, and print how to type a turn."""
        self._builtin_tools = environment.builtin_tools()
        self._tell(HELP)

    async def write(self) -> list[int]:
        """Read lines until they are a turn.

        Raises:
            PlayError: the input ends.
        """
        thoughts: list[ParsedMessage] = []
        while True:
            line = await self._read()
            command, _, text = line.partition(" ")
            try:
                match command:
                    case "/think":
                        thoughts.append(think(text))
                    case "/answer":
                        return self._codec.render_assistant([*thoughts, final(text)])
                    case "/call":
                        return self._codec.render_assistant([*thoughts, self._call(text)])
                    case "/raw":
                        return self._raw_turn(text)
                    case _ if command.startswith("/"):
                        self._tell(f"{command} is not a command:\n{HELP}")
                    case _ if line.strip():
                        return self._codec.render_assistant([*thoughts, final(line)])
            except ValueError as error:
                # A chat format may be unable to express a call, such as arguments without JSON.
                self._tell(f"not sent: {error}")

    def receive(self, result: StepResult) -> None:
        """Do nothing, because the person reads the result in the terminal."""

    async def _read(self) -> str:
        lines: list[str] = []
        while True:
            line = await self._read_line()
            if line is None:
                raise PlayError("the input ended before the episode")
            if not line.endswith("\\"):
                return "\n".join([*lines, line])
            lines.append(line[:-1])

    def _call(self, text: str) -> ParsedMessage:
        """Return the call that ``text`` describes: a tool's name and its arguments."""
        name, _, arguments = text.partition(" ")
        if not name:
            raise ValueError("/call needs the name of a tool")
        builtin = {tool.name for tool in self._builtin_tools}
        # "browser.search" is a function of the namespace "browser".
        if name.partition(".")[0] in builtin:
            return ParsedMessage("analysis", name, "code", arguments)
        recipient = f"{FUNCTIONS}{name.removeprefix(FUNCTIONS)}"
        # Not checked, so that a wrong call has the same result as a wrong call of a model.
        return ParsedMessage("commentary", recipient, "<|constrain|>json", arguments)

    def _raw_turn(self, text: str) -> list[int]:
        """Return the tokens of a turn that is written with special tokens."""
        ids = self._codec.encode_sampled(text)
        stops = self._codec.stop_token_ids
        if set(stops).isdisjoint(ids):
            ends = " or ".join(self._codec.decode_token(token) for token in stops)
            raise ValueError(f"a turn ends with {ends}")
        return ids
