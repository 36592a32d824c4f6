"""Environments whose world is elsewhere, and is set back by doing everything again.

A server cannot be copied. What brings another one to the same place are the actions since its
beginning: they are the state of such an environment."""

from collections import Counter
from dataclasses import dataclass
from typing import Any, cast

from rl_loop.environments.base import (
    Environment,
    EnvironmentOptions,
    Execute,
    RewardConfig,
    Task,
    ToolError,
)
from rl_loop.environments.row_tasks import row_of
from rl_loop.infrastructure import InfrastructureFailure


class WorldLost(InfrastructureFailure):
    """The world ended in the middle of an action."""


ATTEMPTS = 3
"""New worlds in which an action is tried. If it ends them all, it and not the infrastructure is to
blame: each of them could be reached, and did all that the episode had done before."""


class ReplayedOptions(EnvironmentOptions):
    """What all environments have whose world is elsewhere."""

    instructions: str | None = None
    """The developer message."""
    replay: bool = True
    """Whether an episode can be played again up to where it was, in a new world: the same actions
    come to the same. false where they do not, or have effects that last: an action that
    infrastructure spoiled is then not repeated, and the episode is invalid."""


@dataclass(frozen=True)
class Deed:
    """Something that was done in the world, and what came of it."""

    action: Any
    outcome: Any


class ReplayedEnvironment[O: ReplayedOptions](Environment):
    """Keeps the actions of an episode, and makes them again in a new world where they are wanted.

    Its tasks are made by ``row_task``. A subclass defines ``connect``, ``disconnect``,
    ``is_connected`` and ``do``, and calls ``act`` for everything that the policy does."""

    def __init__(self, task: Task, execute: Execute, reward: RewardConfig) -> None:
        """Raises ValueError for a task that was made otherwise than by this class."""
        super().__init__(task, execute, reward)
        self.row = row_of(task)
        self.options = cast(O, self.Options.model_validate(task.metadata["options"]))
        self.can_be_set_back = self.options.replay
        """Whether actions may be repeated; otherwise those that infrastructure spoils end the episode."""
        self._deeds: list[Deed] = []
        self._is_stale = False
        """Whether the world has gone further than ``_deeds``."""
        self._ended_worlds: Counter[tuple[int, str]] = Counter()
        """Worlds that ended in an action, by the number of actions before it and the action."""

    # ---- what a subclass defines

    async def connect(self) -> None:
        """Begin a new world. Raises InfrastructureFailure."""
        raise NotImplementedError

    async def disconnect(self) -> None:
        """Leave the world, if there is one."""
        raise NotImplementedError

    @property
    def is_connected(self) -> bool:
        """Whether there is a world to act in."""
        raise NotImplementedError

    async def do(self, action: Any) -> Any:
        """Act in the world and return the outcome, comparable by ``==``.

        Raises InfrastructureFailure, and of these WorldLost if the world ended in the action."""
        raise NotImplementedError

    # ---- what it calls

    async def ready(self) -> None:
        """Have a world that is where the episode is: what purification set back is brought there."""
        if not self.is_connected or self._is_stale:
            await self.open()

    async def act(self, action: Any) -> Any:
        """Act for the policy, and keep it.

        Raises InfrastructureFailure, and ToolError for an action that ends every world it is done
        in. The episode then continues in a world without that action."""
        await self.ready()
        try:
            outcome = await self.do(action)
        except BaseException as error:
            # What was asked may be done, or a part of it.
            self._is_stale = True
            if isinstance(error, WorldLost) and self._ends_worlds(action):
                raise ToolError("this call ended the server that it was made to") from error
            raise
        self._deeds.append(Deed(action, outcome))
        return outcome

    def _ends_worlds(self, action: Any) -> bool:
        """Count a world that ended in an action. Return True if the action is to blame."""
        key = (len(self._deeds), repr(action))
        self._ended_worlds[key] += 1
        return self._ended_worlds[key] >= ATTEMPTS

    # ---- setting back

    async def repeat(self, deed: Deed) -> None:
        """Act as before. Raises InfrastructureFailure if it comes to something else: what the policy
        has read would not be true of this world."""
        outcome = await self.do(deed.action)
        if outcome != deed.outcome:
            what = (
                f"{type(self).__name__}: the world cannot be set back: {deed.action!r:.200} comes"
            )
            raise InfrastructureFailure("environment", f"{what} to something else than before")

    # ---- Environment

    async def open(self) -> None:
        if self.is_connected and not self._is_stale:
            return
        await self.disconnect()
        try:
            await self.connect()
            for deed in self._deeds:
                await self.repeat(deed)
        except BaseException:
            await self.disconnect()
            raise
        self._is_stale = False

    async def close(self) -> None:
        await self.disconnect()

    def save_state(self) -> Any:
        return list(self._deeds) if self.can_be_set_back else None

    def restore_state(self, state: Any) -> None:
        # Even if nothing was kept since: what failed may be done.
        self._is_stale = True
        self._deeds = list(state)
