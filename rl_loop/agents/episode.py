"""Runs one episode of an external agent: a session of the gateway, and its reward."""

import asyncio
import logging
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

from rl_loop.agents.process import AgentProcesses, ProcessEndedError
from rl_loop.config.episode import EpisodeLimits
from rl_loop.data.trajectory import FinishReason, Trajectory
from rl_loop.engines.protocol import SamplingParams
from rl_loop.environments.base import Environment, ExternalAgent, StepResult
from rl_loop.gateway.server import Gateway
from rl_loop.gateway.session import ConversationSession, SessionSettings
from rl_loop.infrastructure import InfrastructureError
from rl_loop.out_of_memory import out_of_memory_kills
from rl_loop.rollout.environment_guard import EnvironmentGuard, check_outcome
from rl_loop.rollout.episode import (
    Ending,
    EpisodeCompleted,
    EpisodeFailed,
    LimitReached,
    MalformedTurn,
    invalidated,
)
from rl_loop.rollout.episode_clock import OutOfTimeError
from rl_loop.threads import run_in_thread

AGENT_RETRY_DELAYS = (0.5, 4.0)
"""Seconds before each retry of an episode with an infrastructure failure. A retry begins at the
prompt, in a new session. After the last retry the episode is invalid."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FunctionResult:
    """The end of an agent's function."""

    value: object = None
    """Return value. None if the function returned None, or did not return in time."""
    failure: InfrastructureError | None = None
    """Error of the function or its process."""
    is_infrastructure_failure: bool = True
    """True if the error is an infrastructure failure. False if the policy's turns ended the
    process."""


@dataclass(frozen=True)
class AgentRunner:
    """Runs the episodes of external agents on one rollout worker."""

    gateway: Gateway
    processes: AgentProcesses
    limits: EpisodeLimits

    async def run_episode(
        self,
        task_id: str,
        environment: Environment,
        sampling: SamplingParams,
        *,
        seed: int,
        record_routes: bool = False,
    ) -> Trajectory:
        """Let the environment's agent play one episode.

        After an infrastructure failure the episode is played again. A persistent failure makes it
        invalid. So does a first failure of the engine, because its requests were repeated before.

        If the process of the agent ends, the last attempt gets a separate process. If that
        process ends, too, the turns of the policy have ended it, and the episode is unfinished.

        Args:
            task_id: name of the task.
            environment: environment of the episode.
            sampling: temperature, top-p and the token limit of one turn.
            seed: seed of the episode.
            record_routes: whether to record the experts of every token.
        """
        agent = environment.external_agent()
        settings = SessionSettings(
            limits=self.limits,
            sampling=sampling,
            history=agent.history,
            record_routes=record_routes,
        )

        has_lost_process = False
        # The slot is held during delays, too, so that repeated episodes do not exceed the limit.
        async with self.processes.slot(agent):
            for attempt, delay in enumerate((*AGENT_RETRY_DELAYS, None)):
                # The engine may still know requests of a failed attempt by their names.
                name = f"{task_id}/{seed}" if attempt == 0 else f"{task_id}/{seed}.{attempt}"
                session = self.gateway.open_session(name, settings=settings)
                is_alone = has_lost_process and delay is None

                try:
                    returned = await self._play(agent, session, is_alone)
                    return await self._finish_episode(task_id, environment, session, returned)
                except InfrastructureError as failure:
                    if delay is None or failure.component == "engine":
                        return invalid_episode(task_id, session, failure)
                    has_lost_process = isinstance(failure, ProcessEndedError)
                    await asyncio.sleep(delay)
        raise AssertionError("the last failure is returned")

    async def _play(
        self, agent: ExternalAgent, session: ConversationSession, is_alone: bool
    ) -> FunctionResult:
        """Run an episode once, and close its session.

        Args:
            agent: the external agent.
            session: session of the episode.
            is_alone: whether to start a process for this episode alone.
        """
        killed_before = out_of_memory_kills()
        # Stays like this if the time runs out: no value and no failure.
        returned = FunctionResult()
        try:
            async with AsyncExitStack() as stack:
                if is_alone:
                    own = self.processes.separate_process(agent)
                    process = await stack.enter_async_context(own)
                else:
                    process = await self.processes.process(agent)
                # Importing the agent takes no time of the episode.
                session.episode.clock.restart()
                value = await process.run(agent, self.gateway.base_url, session)
                returned = FunctionResult(value)
        except OutOfTimeError:
            pass
        except InfrastructureError as failure:
            returned = FunctionResult(failure=failure)
        finally:
            await self.gateway.close_session(session)

        # The policy is to blame only with evidence: the process ended twice, the second time while
        # it ran this episode alone, after a turn of the policy, and the kernel killed no process
        # for memory.
        is_well = out_of_memory_kills() == killed_before
        has_lost_process = isinstance(returned.failure, ProcessEndedError)
        if is_alone and has_lost_process and session.forest.nodes and is_well:
            logger.warning(
                "%s: %s. The cause is a turn of the policy", session.name, returned.failure
            )
            returned = replace(returned, is_infrastructure_failure=False)
        return returned

    async def _finish_episode(
        self,
        task_id: str,
        environment: Environment,
        session: ConversationSession,
        returned: FunctionResult,
    ) -> Trajectory:
        """Return an episode with its outcome. Raises InfrastructureError."""
        ending = classify_ending(
            session, returned.failure if returned.is_infrastructure_failure else None
        )
        guard = EnvironmentGuard(
            environment, session.episode.clock, self.limits.max_episode_seconds
        )
        result = await determine_outcome(guard, session, ending, returned)

        # Long conversations take long to decode.
        captured = await run_in_thread(session.trajectories, task_id)
        if not captured:
            function = environment.external_agent().function
            what = f"{function} returned without a request to the policy"
            raise InfrastructureError("environment", what, function)
        sequences = [trajectory for _, trajectory in captured]
        return session.episode.conclude(sequences, result, ending)


def classify_ending(session: ConversationSession, failure: InfrastructureError | None) -> Ending:
    """Return the ending of an episode.

    Args:
        session: session of the episode.
        failure: the error that the agent raised, if any.

    Raises:
        InfrastructureError: the policy did not cause the error.
    """
    ending = session.end
    if isinstance(ending, EpisodeFailed):
        raise ending.failure from failure
    if isinstance(ending, MalformedTurn | LimitReached):
        # An agent raises errors after that because its requests were refused.
        return ending
    if session.episode.clock.is_over:
        return session.episode.out_of_time()
    # The gateway refused a request that exceeded the context, and the agent raised an error.
    if failure is not None and session.was_too_long:
        allowed = f"{session.episode.limits.max_episode_tokens} tokens"
        return LimitReached(FinishReason.MAX_EPISODE_TOKENS, allowed)
    if failure is not None:
        raise failure
    # The agent ended the episode. One of its conversations may end with a turn that was cut off.
    cut = [node.finish_reason for node in session.forest.leaves if node.was_truncated]
    return EpisodeCompleted(cut[0] if cut else FinishReason.STOP)


async def determine_outcome(
    guard: EnvironmentGuard, session: ConversationSession, ending: Ending, returned: FunctionResult
) -> StepResult:
    """Return the reward of an episode.

    Args:
        guard: environment of the episode.
        session: session of the episode.
        ending: ending of the episode.
        returned: end of the agent's function.

    Raises:
        InfrastructureError: there is no reward, or it is not a valid reward.
    """
    if isinstance(ending, MalformedTurn):
        return await guard.reward_ending(ending)

    to_reward = guard.environment.to_reward
    has_returned = returned.failure is None
    if has_returned and returned.value is not None:
        return check_outcome(await guard.call_method(to_reward, returned.value))
    # The return value has priority over a reward that the agent posted to the gateway.
    posted = session.reward_parts()
    if posted is not None:
        return check_outcome(await guard.call_method(to_reward, posted))

    # An agent whose requests were refused need not know the reward of an unfinished episode.
    if not has_returned or ending.reason not in (FinishReason.STOP, FinishReason.LENGTH):
        return await guard.reward_ending(ending)
    function = guard.environment.external_agent().function
    what = f"{function} returned no reward and posted none to the gateway"
    raise InfrastructureError("checker", what, function)


def invalid_episode(
    task_id: str, session: ConversationSession, failure: InfrastructureError
) -> Trajectory:
    """Return the first sequence of an episode that infrastructure ended."""
    captured = session.trajectories(task_id)
    # An invalid episode is not trained on. One sequence is enough to show it to people.
    if captured:
        _, sequence = captured[0]
    else:
        sequence = Trajectory(task_id, token_ids=[], loss_mask=[], rollout_log_probs=[])  # type: ignore[arg-type]
    return invalidated(sequence, failure)
