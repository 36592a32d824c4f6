"""Base class of environments whose state is on a server, and is restored by replaying actions.

A server cannot be copied. All actions since the beginning bring a new server to the same state, so
the list of actions is the state of such an environment.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any, cast

from rl_loop.environments.base import (
    Environment,
    EnvironmentOptions,
    PythonExecutor,
    RewardConfig,
    Task,
)
from rl_loop.environments.row_tasks import read_row
from rl_loop.environments.tool_calls import ToolError
from rl_loop.infrastructure import InfrastructureError


class ToolServerLostError(InfrastructureError):
    """The server ended during an action."""


ATTEMPTS = 3
"""New servers on which an action is tried.

If the action ends all of them, the policy and not the infrastructure is the cause, because each
server could be reached and had replayed all earlier actions.
"""


class ReplayedOptions(EnvironmentOptions):
    """Options of all environments whose state is on a server."""

    instructions: str | None = None
    """Developer message."""
    replay: bool = True
    """Replay actions on a new server after an infrastructure failure. Set false if the same actions
    can give other results, or have lasting effects. The episode is then invalid instead."""


@dataclass(frozen=True)
class RecordedAction:
    """One action of an episode and its result."""

    action: Any
    result: Any


class ReplayedEnvironment[O: ReplayedOptions](Environment):
    """Records the actions of an episode, and replays them on a new server if necessary.

    ``row_task`` creates the tasks. A subclass defines ``connect``, ``disconnect``, ``is_connected``
    and ``do``, and calls ``act`` for every action of the policy.
    """

    def __init__(self, task: Task, execute: PythonExecutor, reward: RewardConfig) -> None:
        """Raises ValueError if another class created the task."""
        super().__init__(task, execute, reward)
        self.row = read_row(task)
        self.options = cast(O, self.Options.model_validate(task.metadata["options"]))
        self.can_be_restored = self.options.replay
        """True if actions may be repeated. Otherwise an infrastructure failure ends the episode."""
        self._actions: list[RecordedAction] = []
        self._state_differs = False
        """True if the server's state does not match ``_actions``."""
        self._lost_servers: Counter[tuple[int, str]] = Counter()
        """Number of servers that ended during an action, by the number of earlier actions and the
        action."""

    # ---- methods that a subclass defines

    async def connect(self) -> None:
        """Connect to a server in its initial state. Raises InfrastructureError."""
        raise NotImplementedError

    async def disconnect(self) -> None:
        """Leave the server, if there is one."""
        raise NotImplementedError

    @property
    def is_connected(self) -> bool:
        """True if there is a server."""
        raise NotImplementedError

    async def do(self, action: Any) -> Any:
        """Execute an action on the server.

        Returns:
            The result, comparable by ``==``.

        Raises:
            ToolServerLostError: if the server ended during the action.
            InfrastructureError: if the action failed in another way.
        """
        raise NotImplementedError

    # ---- methods that a subclass calls

    async def ready(self) -> None:
        """Make sure that a server has the state of the episode. Replay the actions if not."""
        if not self.is_connected or self._state_differs:
            await self.open()

    async def act(self, action: Any) -> Any:
        """Execute an action of the policy, and record it.

        Raises:
            ToolError: if the action ends every server. The episode continues on a server without it.
            InfrastructureError: if the action failed in another way.
        """
        await self.ready()
        # BaseException, because the server may also have executed an action that was cancelled.
        try:
            result = await self.do(action)
        except BaseException as error:
            # The server may have executed the action, or a part of it.
            self._state_differs = True
            if isinstance(error, ToolServerLostError) and self._ends_servers(action):
                raise ToolError("this call ended the server that it was made to") from error
            raise
        self._actions.append(RecordedAction(action, result))
        return result

    def _ends_servers(self, action: Any) -> bool:
        """Count a server that ended during an action. Return True if the action is the cause."""
        # At another time the same action may meet another state, so count it separately.
        key = (len(self._actions), repr(action))
        self._lost_servers[key] += 1
        return self._lost_servers[key] >= ATTEMPTS

    # ---- replay

    async def repeat(self, recorded: RecordedAction) -> None:
        """Execute a recorded action on a new server.

        Raises:
            InfrastructureError: if the result differs. The policy has read the earlier result,
                which would be wrong for this server.
        """
        result = await self.do(recorded.action)
        if result != recorded.result:
            raise InfrastructureError(
                "environment",
                f"{type(self).__name__}: replaying {recorded.action!r:.200} gave a different result. "
                "Set replay: false if results of this environment vary",
            )

    # ---- Environment

    async def open(self) -> None:
        if self.is_connected and not self._state_differs:
            return
        # The server has executed an unknown part of its actions, so do not keep it.
        await self.disconnect()
        try:
            await self.connect()
            for recorded in self._actions:
                await self.repeat(recorded)
        except BaseException:
            await self.disconnect()
            raise
        self._state_differs = False

    async def close(self) -> None:
        await self.disconnect()

    def save_state(self) -> Any:
        return list(self._actions) if self.can_be_restored else None

    def restore_state(self, state: Any) -> None:
        # The state differs even without new recorded actions: the server may have executed a failed one.
        self._state_differs = True
        self._actions = list(state)
