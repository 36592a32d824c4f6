"""One session: sampling, recording and limits for all conversations of one API key.

A session is an episode (``rollout.episode``). Mistakes of the policy and limits end it with a
reason that can be rewarded. Infrastructure failures end it as invalid. In both cases the client
reads an error, after this request and after every later one.
"""

import asyncio
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import assert_never

from rl_loop.chat.codec import ChatCodec
from rl_loop.config.episode import EpisodeLimits
from rl_loop.data.trajectory import FinishReason, Trajectory
from rl_loop.engines.protocol import (
    GenerateResult,
    ModelShape,
    RolloutEngine,
    SamplingParams,
    TokenChoice,
    constrains_tokens,
)
from rl_loop.gateway.answer import ReadTurn
from rl_loop.gateway.constraint import NewMatcher, compile_constraint
from rl_loop.gateway.errors import ApiError, invalid_content, unsupported_error
from rl_loop.gateway.forest import TurnForest
from rl_loop.gateway.jobs import RequestJob, RequestWorkers, SessionJobs, TurnJob
from rl_loop.gateway.node import TurnNode, new_completion, new_node
from rl_loop.gateway.observed_engine import ObservedEngine, TurnObserver
from rl_loop.gateway.pending import PendingTurns, TurnsClosedError
from rl_loop.gateway.prompts import History, PromptTooLongError, TurnPromptRenderer
from rl_loop.gateway.raw_prompt import text_range
from rl_loop.gateway.request import TurnRequest
from rl_loop.gateway.reward import SessionRewards, SubmittedReward
from rl_loop.gateway.stop_text import shorten
from rl_loop.gateway.token_log_probs import text_log_probs
from rl_loop.infrastructure import EngineError, InfrastructureError
from rl_loop.rollout.episode import (
    Ending,
    Episode,
    EpisodeCompleted,
    EpisodeFailed,
    EpisodeOver,
    LimitReached,
    MalformedTurn,
    SampledTurn,
)
from rl_loop.rollout.turn_sampler import ABORT_SECONDS
from rl_loop.threads import run_in_thread

SHORT_TOKENS = 256
"""Maximum tokens that are parsed on the event loop, which takes up to 1 ms."""

SHORT_LISTS = 2000
"""Maximum log-probs of an answer that are listed on the event loop, which takes up to 5 ms."""

SETTLE_SECONDS = 2 * ABORT_SECONDS
"""Seconds for the turns in flight to end when the time of the session is over."""


@dataclass(frozen=True)
class SessionSettings:
    """Settings of a gateway's sessions."""

    limits: EpisodeLimits
    """Limits of a session. The agent itself limits tools and observations."""
    sampling: SamplingParams
    """Temperature, top-p and the token limit of one turn."""
    history: History = "append"
    """Rendering of the tokens before a turn that follows a final answer. "append": all tokens so
    far. "harmony": the tokens that the format keeps (``ChatCodec.without_finished_analysis``),
    which begin another sequence."""
    clients_choose_sampling: bool = False
    """Use the temperature and top-p of requests. Not in training, because the trainer computes
    log-probs at the temperature of the run."""
    record_routes: bool = False
    """Record the experts of every token."""
    is_episode: bool = True
    """True if errors end the session, as they end an episode. Otherwise only the request fails, and
    the client may try again."""
    max_stored_turns: int | None = None
    """Number of turns to keep. None to keep all, for training."""


class ConversationSession:
    """Conversations of one API key."""

    def __init__(
        self,
        name: str,
        engine: RolloutEngine,
        codec: ChatCodec,
        shape: ModelShape,
        settings: SessionSettings,
        api_key: str | None = None,
        workers: RequestWorkers | None = None,
    ) -> None:
        """Open a session.

        Args:
            name: unique name. Together with the number of a turn it seeds the sampling.
            engine: engine that samples the turns.
            codec: chat format of the policy.
            shape: shape of the model, to check the engine's results.
            settings: limits and sampling.
            api_key: key of the client. None to generate one.
            workers: processes for long requests. None to start processes for this session.
        """
        self.name = name
        self.api_key = api_key or f"sk-{secrets.token_urlsafe(24)}"
        self.forest = TurnForest(settings.max_stored_turns)
        self._engine = ObservedEngine(engine)
        self.episode = Episode(
            name,
            self._engine,
            codec,
            settings.limits,
            settings.sampling,
            shape=shape,
            record_routes=settings.record_routes,
        )
        # The agent's computations also count as time of the episode.
        self.episode.clock.start()
        self.in_flight = 0
        """Number of requests in flight."""
        self.body_bytes = 0
        """Bytes of the request bodies in flight."""
        self.was_too_long = False
        """True if the last conversation was rejected because it left no room for an answer."""

        self._codec = codec
        self._settings = settings
        self._rewards = SessionRewards()
        self._jobs = SessionJobs(codec, workers)
        self._pending = PendingTurns()
        self._prompts = TurnPromptRenderer(
            codec, settings.history, settings.limits.max_episode_tokens, self._jobs
        )

    @property
    def end(self) -> Ending | None:
        """Ending of the session. None while it accepts requests."""
        return self.episode.ending

    async def respond(
        self,
        request: TurnRequest,
        response_id: str,
        *,
        is_retry: bool = False,
        observer: TurnObserver | None = None,
    ) -> TurnNode:
        """Return the policy's turn.

        Each request gets a separate sample, even if equal requests are in flight. A repeated
        request gets an earlier turn in two cases: the answer could not be delivered, or the client
        marks the request as a retry. If no client waits, sampling stops and the turn is dropped.

        Args:
            request: the conversation.
            response_id: name of the turn if it is a new one.
            is_retry: whether the client marks the request as a retry.
            observer: observer of the turn if it is a new one.

        Raises:
            ApiError: there is no turn.
        """
        equal = self.forest.answers(request.fingerprint)
        for node in equal:
            if node.delivered is False:
                # None means that it is being sent. A further equal request then gets a new sample.
                node.delivered = None
                return node
        if is_retry and self._pending.remove_abandoned(request.fingerprint):
            # The turn of this client was dropped. Equal turns belong to other clients.
            is_retry = False
        # The client did not receive the newest turn, or it would not have retried.
        if is_retry and equal:
            return equal[-1]

        take_turn = partial(self._take_turn, request, response_id, observer)
        try:
            return await self._pending.wait(request.fingerprint, take_turn, is_retry=is_retry)
        except TurnsClosedError:
            assert self.end is not None
            raise _build_error(self.end) from None

    async def respond_choices(
        self,
        requests: Sequence[TurnRequest],
        response_id: str,
        choices: int,
        *,
        is_retry: bool = False,
        observers: Sequence[TurnObserver] = (),
    ) -> list[TurnNode]:
        """Return ``choices`` turns for each of several requests, in the order of the requests.

        Each is a separate sample and a separate branch. If one of them fails, the others stop.

        Args:
            requests: the conversations.
            response_id: name of the first turn, see ``choice_id``.
            choices: number of turns for each request.
            is_retry: whether the client marks the request as a retry.
            observers: observer of each turn. Empty for none.

        Raises:
            ApiError: one of the turns failed.
        """
        tasks = []
        for number in range(len(requests) * choices):
            turn = self.respond(
                requests[number // choices].choice(number),
                choice_id(response_id, number),
                is_retry=is_retry,
                observer=observers[number] if observers else None,
            )
            tasks.append(asyncio.ensure_future(turn))
        try:
            return await asyncio.gather(*tasks)
        # BaseException, because a client that leaves cancels this task.
        except BaseException:
            for task in tasks:
                task.cancel()
            for node in await asyncio.gather(*tasks, return_exceptions=True):
                # A repeated request gets the turns that were complete.
                if isinstance(node, TurnNode) and node.delivered is None:
                    node.delivered = False
            raise

    def add_reward(self, reward: SubmittedReward) -> None:
        """Add a reward for the session or for a response. A repeat counts once. Raises ApiError."""
        if not self._settings.is_episode:
            message = "this server does not train, so it accepts no rewards"
            raise ApiError(400, "invalid_request", message)
        if reward.response_id is not None and not self.forest.has_response(reward.response_id):
            raise ApiError(
                404,
                "response_not_found",
                f"this session has no response {reward.response_id!r}",
                parameter="response_id",
            )
        self._rewards.add(reward)

    def reward_parts(self) -> dict[str, float] | None:
        """Return the sum of each reward part. None without rewards."""
        return self._rewards.totals()

    def trajectories(self, task_id: str) -> list[tuple[TurnNode, Trajectory]]:
        """Return the recorded sequences, see ``TurnForest.trajectories``."""
        return self.forest.trajectories(task_id, self._codec.decode)

    async def run[Result](self, job: RequestJob[Result], *, is_short: bool = False) -> Result:
        """Run a job, see ``SessionJobs.run``. Raises ApiError."""
        return await self._jobs.run(job, is_short=is_short)

    async def close(self) -> None:
        """Stop the turns in flight, and refuse further requests."""
        if self.episode.clock.is_over:
            # The sampler ends these turns. Their tokens so far are a part of the episode.
            await self._pending.settle(SETTLE_SECONDS)
        self.episode.end(EpisodeCompleted())
        await self._pending.close()
        await self._jobs.close()

    # ---- one turn

    async def _take_turn(
        self, request: TurnRequest, response_id: str, observer: TurnObserver | None
    ) -> TurnNode:
        """Sample a turn and add it to the forest. Raises ApiError."""
        try:
            with self.episode.turn() as number:
                return await self._sample_turn(request, response_id, number, observer)
        except EpisodeOver as over:
            raise self._end_session(over.ending) from None
        except InfrastructureError as failure:
            raise self._end_session(EpisodeFailed(failure)) from failure
        except PromptTooLongError as error:
            # The session continues with a shorter conversation.
            self.was_too_long = True
            raise self._too_long(error.tokens) from None

    async def _sample_turn(
        self,
        request: TurnRequest,
        response_id: str,
        number: int,
        observer: TurnObserver | None,
    ) -> TurnNode:
        """Sample a turn and add it to the forest.

        Raises ApiError, EpisodeOver, PromptTooLongError and InfrastructureError.
        """
        self.was_too_long = False
        if request.prompt is None:
            position = self.forest.find(request)
            prompt = await self._prompts.render(request, position)
        else:
            position = self.forest.find_completion(request.prompt)
            prompt = await self._prompts.encode(request.prompt, position.parent)

        # The number is a part of the name, because requests with equal prompts and equal seeds of
        # the client would be the same request to the engine.
        new_matcher = await self._compile_constraint(request)
        name = str(number) if request.seed is None else f"{number}.{request.seed}"
        if observer is None and request.top_log_probs:
            observer = TurnObserver()
        with self._observing(name, len(prompt.token_ids), observer, request):
            sampled = await self.episode.sample(
                name,
                prompt.token_ids,
                max_new_tokens=request.max_new_tokens,
                sampling=self._sampling(request),
                routes_start=prompt.routes_start,
                new_matcher=new_matcher,
            )
        top = (
            _check_top_log_probs(observer, sampled.result, f"{self.name}/{name}")
            if observer
            else []
        )
        turn = await self._read_turn(sampled.result, request, response_id)
        if turn.kept is not None:
            # No limit ended the turn, because the stop text came before.
            sampled = SampledTurn(shorten(sampled.result, turn.kept), None, sampled.time)
        if request.prompt is None:
            node = new_node(request, response_id, position, prompt, sampled, turn)
        else:
            node = new_completion(request, response_id, prompt, sampled, turn)
        if request.log_probs and turn.format_error is None:
            listed = len(sampled.result.output_ids) * (1 + request.top_log_probs)
            ids = sampled.result.output_ids
            ranges = self._codec.answer_ranges(ids)
            if request.prompt is not None:
                ranges = [text_range(self._codec, ids)]
            list_tokens = partial(
                text_log_probs, self._codec, sampled.result, ranges, turn.hidden_token_count, top
            )
            if listed <= SHORT_LISTS:
                node.log_probs = list_tokens()
            else:
                node.log_probs = await run_in_thread(list_tokens)
        # Counted even if the turn is not added, because its tokens were sampled.
        self.episode.keep(sampled.result)
        # A concurrent turn may have ended the session.
        if self.end is not None:
            raise EpisodeOver(self.end)
        # Before the checks below: a turn that ends the episode is trained on, too.
        self.forest.add(node)

        if sampled.reason is FinishReason.TIMEOUT:
            raise EpisodeOver(self.episode.out_of_time())
        if turn.format_error is not None:
            raise EpisodeOver(MalformedTurn(turn.format_error))
        return node

    async def _compile_constraint(self, request: TurnRequest) -> NewMatcher | None:
        """Return the compiled constraint of a request. Raises ApiError."""
        constraint = request.constraint
        if constraint is None:
            return None
        # Another engine would ignore the constraint.
        if not constrains_tokens(self._engine.engine):
            raise unsupported_error(constraint.parameter, "the engine cannot constrain sampling")
        # llguidance releases the interpreter while it compiles.
        return await run_in_thread(compile_constraint, self._codec, constraint)

    @contextmanager
    def _observing(
        self, name: str, prompt_tokens: int, observer: TurnObserver | None, request: TurnRequest
    ) -> Iterator[None]:
        """Let an observer, if there is one, see the tokens of a turn."""
        if observer is None:
            yield
            return
        observer.top_log_probs = request.top_log_probs
        with self._engine.observing(f"{self.name}/{name}", prompt_tokens, observer):
            yield

    async def _read_turn(
        self, sampled: GenerateResult, request: TurnRequest, response_id: str
    ) -> ReadTurn:
        """Parse a sampled turn. A long turn is parsed in another process."""
        job = TurnJob(
            sampled.output_ids,
            sampled.finish_reason,
            request.tools,
            response_id,
            request.stop,
            is_completion=request.prompt is not None,
        )
        if len(sampled.output_ids) <= SHORT_TOKENS:
            return job.run(self._codec)
        try:
            return await self.run(job)
        except ApiError:
            # The client did not cause the error, and must get its turn.
            return await run_in_thread(job.run, self._codec)

    def _sampling(self, request: TurnRequest) -> SamplingParams:
        """Return the sampling parameters of a turn."""
        # Training needs the sampling of the run, so requests change it only when serving.
        sampling = self.episode.sampling
        if self._settings.clients_choose_sampling:
            if request.temperature is not None:
                sampling = replace(sampling, temperature=request.temperature)
            if request.top_p is not None:
                sampling = replace(sampling, top_p=request.top_p)
        return sampling

    # ---- errors

    def _end_session(self, ending: Ending) -> ApiError:
        """End the session if it is an episode. Return the client's error."""
        if self._settings.is_episode:
            self.episode.end(ending)
        return _build_error(ending)

    def _too_long(self, tokens: str) -> ApiError:
        """Return the error for a conversation that leaves no tokens for an answer."""
        limit = self._settings.limits.max_episode_tokens
        return ApiError(
            400,
            "context_length_exceeded",
            f"the conversation has {tokens} tokens, but the model's context has {limit}",
            parameter="messages",
        )


def choice_id(response_id: str, number: int) -> str:
    """Return the name of a choice. The first one has the name of the response."""
    return f"{response_id}-{number}" if number else response_id


def _check_top_log_probs(
    observer: TurnObserver, result: GenerateResult, name: str
) -> list[list[TokenChoice]]:
    """Return the most likely tokens of each position of a turn. Empty if not requested.

    Raises:
        EngineError: the client has read different tokens than the engine returned.
        ApiError: the engine did not return the requested tokens.
    """
    if not observer.is_prefix_of(result.output_ids):
        raise EngineError(name, "the engine returned different tokens than it streamed")
    if observer.top_log_probs == 0:
        return []
    if observer.ids != result.output_ids or not all(observer.top):
        raise unsupported_error(
            "top_logprobs", "the engine returns the log-probs of sampled tokens only"
        )
    return observer.top


def _build_error(ending: Ending) -> ApiError:
    """Return the client's error after the end of a session."""
    match ending:
        case EpisodeFailed(failure):
            return ApiError(503, "infrastructure_failure", str(failure))
        case MalformedTurn(kind):
            return invalid_content(kind)
        case LimitReached():
            return ApiError(400, "session_over", f"the session has used its {ending.allowed}")
        case EpisodeCompleted():
            return ApiError(400, "session_over", "the session is over")
        case _:
            assert_never(ending)
