"""Runs one episode of an external agent: a session of the gateway, and its reward."""

import asyncio
import logging
import math
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from rl_loop.agents.process import AgentProcesses, ProcessEnded
from rl_loop.config.episode import EpisodeLimits
from rl_loop.data.trajectory import FinishReason, InvalidReason, Trajectory
from rl_loop.engines.protocol import SamplingParams
from rl_loop.environments.base import AgentProgram, Environment, StepResult
from rl_loop.gateway.server import Gateway
from rl_loop.gateway.session import Session, SessionSettings
from rl_loop.infrastructure import InfrastructureFailure
from rl_loop.off_loop import off_loop
from rl_loop.out_of_memory import out_of_memory_kills
from rl_loop.rollout.episode_clock import OutOfTime

AGENT_PAUSES = (0.5, 4.0)
"""Seconds before an episode that infrastructure spoiled is played again, from its beginning and in a
new session; after the last one it stays invalid."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProgramRunner:
    """What episodes of a rollout worker have in common."""

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
        routed_experts: bool = False,
    ) -> Trajectory:
        """Let the environment's program play one episode.

        An infrastructure failure is played again; one that persists makes the episode invalid. One
        of the engine is not: its requests were repeated already.

        If the process of the program ended, the last attempt has a process of its own. If that
        ends, too, what the policy wrote has ended it, and the episode is unfinished."""
        program = environment.program()
        settings = SessionSettings(
            limits=self.limits,
            sampling=sampling,
            history=program.history,
            routed_experts=routed_experts,
        )
        async with self.processes.vacancy(program):
            has_lost_process = False
            for attempt, pause in enumerate((*AGENT_PAUSES, None)):
                is_alone = has_lost_process and pause is None
                # Requests of an attempt that failed may still be known to the engine.
                name = f"{task_id}/{seed}" if attempt == 0 else f"{task_id}/{seed}.{attempt}"
                session = self.gateway.open_session(name, settings=settings)
                try:
                    return await self._play(task_id, environment, program, session, is_alone)
                except InfrastructureFailure as failure:
                    has_lost_process = isinstance(failure, ProcessEnded)
                    if pause is None or failure.component == "engine":
                        return invalid_episode(task_id, session, failure)
                    await asyncio.sleep(pause)
        raise AssertionError("the last failure is returned")

    async def _play(
        self,
        task_id: str,
        environment: Environment,
        program: AgentProgram,
        session: Session,
        is_alone: bool,
    ) -> Trajectory:
        """Play an episode once, in a process of its own if ``is_alone``.

        Raises InfrastructureFailure."""
        failure: InfrastructureFailure | None = None
        given: object = None
        killed_before = out_of_memory_kills()
        try:
            async with AsyncExitStack() as stack:
                if is_alone:
                    own = self.processes.process_alone(program)
                    process = await stack.enter_async_context(own)
                else:
                    process = await self.processes.process(program)
                # Importing the agent was not its episode's doing.
                session.clock.restart()
                given = await process.run(program, self.gateway.base_url, session)
        except OutOfTime:
            pass
        except InfrastructureFailure as raised:
            failure = raised
        finally:
            await self.gateway.close_session(session)

        returned = failure is None
        is_well = out_of_memory_kills() == killed_before
        if is_alone and isinstance(failure, ProcessEnded) and session.forest.nodes and is_well:
            logger.warning("task %s: %s. The policy's turns ended it", task_id, failure.reason)
            failure = None
        reason = end_of(session, failure)
        result = outcome_of(environment, session, reason, given, returned=returned)
        # Long conversations take long to decode.
        captured = await off_loop(session.trajectories, task_id)
        sequences = [trajectory for _, trajectory in captured]
        if not sequences:
            what = f"{program.function} ended without a turn of the policy"
            raise InfrastructureFailure("environment", what, program.function)
        is_excluded = self.limits.truncated_episodes == "mask"
        episode = episode_of(
            sequences,
            result,
            reason,
            mask_truncated=is_excluded,
            cut_whole=was_cut_whole(session, failure),
        )
        episode.prefilled_again = session.prefilled_again
        return episode


def was_cut_whole(session: Session, failure: InfrastructureFailure | None) -> bool:
    """Return True if a limit ended the episode as a whole, not only a turn of it.

    Args:
        session: the session of the episode.
        failure: the error that the agent raised, if any.
    """
    ends = (FinishReason.STOP, FinishReason.FORMAT_ERROR)
    if session.end is not None and session.end.reason not in ends:
        return True
    return session.clock.is_over or (failure is not None and session.was_too_long)


def end_of(session: Session, failure: InfrastructureFailure | None) -> FinishReason:
    """Return why an episode ended.

    Args:
        session: the session of the episode.
        failure: the error that the agent raised, if any.

    Raises:
        InfrastructureFailure: the policy had no part in it.
    """
    end = session.end
    if end is not None and end.invalid is not None:
        invalid = end.invalid
        raise InfrastructureFailure(invalid.component, invalid.reason, invalid.culprit) from failure
    if end is not None and end.reason is not FinishReason.STOP:
        # What an agent raises then comes of the requests that were refused.
        return end.reason
    if session.clock.is_over:
        return FinishReason.TIMEOUT
    if failure is not None:
        if session.was_too_long:
            return FinishReason.MAX_CONTEXT
        raise failure
    # The agent ended the episode. One of its conversations may end with a turn that was cut off.
    cut = [node.finish_reason for node in session.forest.leaves if node.was_cut]
    return cut[0] if cut else FinishReason.STOP


def outcome_of(
    environment: Environment,
    session: Session,
    reason: FinishReason,
    given: object,
    *,
    returned: bool,
) -> StepResult:
    """Return what an episode earned. ``given``: what its program ``returned``, if it did.

    Raises InfrastructureFailure if nobody said what, or it is no reward."""
    if reason is FinishReason.FORMAT_ERROR:
        assert session.end is not None and session.end.format_error is not None
        return environment.illegal(session.end.format_error)

    posted = session.reward_parts()
    if returned and given is not None:
        return environment.earned(given)
    if posted is not None:
        return environment.earned(posted)
    # An agent whose requests were refused need not know what that is worth.
    if not returned or reason not in (FinishReason.STOP, FinishReason.LENGTH):
        return environment.unfinished()
    function = environment.program().function
    what = f"{function} returned no reward, and none was posted"
    raise InfrastructureFailure("checker", what, function)


def episode_of(
    sequences: Sequence[Trajectory],
    result: StepResult,
    reason: FinishReason,
    *,
    mask_truncated: bool,
    cut_whole: bool = False,
) -> Trajectory:
    """Join the sequences of a session into one episode.

    Args:
        sequences: the session's sequences. Each has the finish reason of its own last turn.
        result: reward of the episode.
        reason: why the episode ended; all sequences get it.
        mask_truncated: whether to exclude what a limit cut off: the sequences that end with a turn
            that was cut off.
        cut_whole: whether a limit ended the episode as a whole. All sequences are cut off then.
    """
    first, *branches = sequences
    for sequence in sequences:
        sequence.excluded = mask_truncated and (cut_whole or sequence.truncated)
        sequence.finish_reason = reason
        sequence.format_error = result.format_error
        sequence.answer = result.answer
        sequence.reward = result.reward
        sequence.reward_parts = result.reward_parts
        sequence.validate()
    first.branches = branches
    return first


def invalid_episode(task_id: str, session: Session, failure: InfrastructureFailure) -> Trajectory:
    """Return an episode that infrastructure ended, as far as it came; nothing is learned from it."""
    sequences = [trajectory for _, trajectory in session.trajectories(task_id)]
    episode = Trajectory(task_id, token_ids=[], loss_mask=[], rollout_log_probs=[])  # type: ignore[arg-type]
    if sequences:
        episode = sequences[0]
    episode.routed_experts = None
    episode.finish_reason = FinishReason.ABORT
    episode.invalid = InvalidReason(failure.component, failure.reason, failure.culprit)
    episode.excluded = True
    # So that whoever uses the reward by mistake notices.
    episode.reward = math.nan
    return episode
