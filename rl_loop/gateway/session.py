"""One session: everything that one API key says to the policy, sampled, captured and limited.

What the policy does wrong ends a session with a reason that can be rewarded; what infrastructure
does wrong ends it as invalid (``rl_loop.infrastructure``). Either way the client reads an error,
with this request and with every later one."""

import asyncio
import secrets
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from rl_loop.chat.codec import ChatCodec
from rl_loop.chat.open_calls import OpenCall
from rl_loop.chat.tools import FUNCTIONS
from rl_loop.config.episode import EpisodeLimits
from rl_loop.data.trajectory import FinishReason, InvalidReason, Trajectory
from rl_loop.engines.protocol import GenerateResult, ModelShape, RolloutEngine, SamplingParams
from rl_loop.gateway.answer import ReadTurn, read_turn
from rl_loop.gateway.errors import ApiError, invalid_content
from rl_loop.gateway.forest import Forest, Node, Place, new_routes, next_key, without_routes
from rl_loop.gateway.jobs import (
    Job,
    Rendered,
    RenderJob,
    RequestWorkers,
    StoredTokens,
    TurnJob,
)
from rl_loop.gateway.request import TurnRequest, text_bytes, text_size
from rl_loop.gateway.reward import GivenReward
from rl_loop.infrastructure import InfrastructureFailure
from rl_loop.off_loop import off_loop
from rl_loop.rollout.agent import Room
from rl_loop.rollout.episode_clock import EpisodeClock
from rl_loop.rollout.turn_sampler import TurnSampler
from rl_loop.tasks.prompt_limit import LONGEST_TOKEN

SHORT_CHARACTERS = 4096
"""Bytes of text that are rendered on the event loop: it takes a few milliseconds at most."""
MESSAGE_CHARACTERS = 64
"""Characters that take as long to render as the header of a message."""
SHORT_TOKENS = 256
"""Tokens that are parsed on the event loop: it takes a millisecond or less."""
SHORT_HISTORY = 4096
"""Tokens from which finished analysis is left out on the event loop."""


REMEMBERED_ABANDONED = 256
"""Abandoned requests whose retries are known to have no answer."""


@dataclass(frozen=True)
class SessionSettings:
    """What holds for every session of a gateway."""

    limits: EpisodeLimits
    """Where a session ends. Limits of tools and observations are the agent's business."""
    sampling: SamplingParams
    """Temperature, top-p and the limit of one turn."""
    history: Literal["append", "harmony"] = "append"
    """What stands before a turn that follows a final answer: every token so far, or what the
    format keeps of them (``ChatCodec.without_finished_analysis``), which begins another sequence."""
    clients_choose_sampling: bool = False
    """Whether a request's temperature and top-p count. Where the policy is trained they do not:
    the trainer computes its log-probs at the temperature of the run."""
    routed_experts: bool = False
    """Whether the experts of every token are captured, too."""
    is_episode: bool = True
    """Whether errors end the session, as they end an episode. Otherwise only the request fails, and
    the client may ask again."""
    remembered_turns: int | None = None
    """Older turns are forgotten; None to keep all, for training."""


@dataclass(frozen=True)
class SessionEnd:
    """Why a session takes no more requests."""

    reason: FinishReason
    message: str
    """For the client."""
    format_error: str | None = None
    """Which kind of illegal turn it was."""
    invalid: InvalidReason | None = None
    """The infrastructure failure that it was."""

    def as_error(self) -> ApiError:
        """Return what the client is told."""
        if self.invalid is not None:
            return ApiError(503, "infrastructure_failure", self.message)
        if self.format_error is not None:
            return invalid_content(self.format_error)
        return ApiError(400, "session_over", self.message)


@dataclass(eq=False)
class _PendingTurn:
    """A turn that is being sampled."""

    task: "asyncio.Task[Node]"
    waiting: int = 0
    """Clients that wait for it."""


@dataclass(frozen=True)
class _Prompt:
    """What a turn is sampled from."""

    parent: Node | None
    new_ids: list[int]
    """Behind the parent's tokens."""
    open_calls: list[OpenCall]

    @property
    def token_ids(self) -> list[int]:
        before = self.parent.token_ids() if self.parent is not None else []
        return before + self.new_ids


class Session:
    """The conversations of one API key."""

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
            name: unique; with the number of a turn it seeds what is sampled.
            engine: samples the turns.
            codec: chat format of the policy.
            shape: shape of the model that the engine's answers are checked against.
            settings: limits and sampling.
            api_key: key of the client; None to make one.
            workers: processes for long requests; None for processes of the session's own.
        """
        self.name = name
        self.api_key = api_key or f"sk-{secrets.token_urlsafe(24)}"
        self.forest = Forest(settings.remembered_turns)
        self.clock = EpisodeClock(settings.limits.episode_seconds)
        """Runs while the session does, but for the time that it waits for the engine."""
        self.end: SessionEnd | None = None
        self.in_flight = 0
        """Number of requests that are being answered."""
        self.body_bytes = 0
        """Bytes of the bodies of these requests."""
        self.was_too_long = False
        """Whether the last request was refused because the conversation left no room to answer."""
        self.prefilled_again = 0
        """Tokens that the engine computed again because turns were interrupted."""

        self._engine = engine
        self._codec = codec
        self._shape = shape
        self._settings = settings
        self._rewards: dict[str | None, dict[str, float]] = {}
        """By the response that earned it, None for the session as a whole."""
        self.clock.start()

        self._workers = workers or RequestWorkers(codec)
        self._owns_workers = workers is None
        self._is_working = asyncio.Lock()
        self._is_working_here = asyncio.Lock()
        self._begun_turns = 0
        """All of them: they number the turns."""
        self._counted_turns = 0
        """Those that were sampled, and those that are being sampled."""
        self._sampled_tokens = 0
        self._pending: dict[bytes, list[_PendingTurn]] = {}
        """By the fingerprint of the request, which several clients may send."""
        self._abandoned: deque[bytes] = deque(maxlen=REMEMBERED_ABANDONED)
        """Requests whose turns were cancelled because their clients left."""

    async def respond(
        self, request: TurnRequest, response_id: str, *, is_retry: bool = False
    ) -> Node:
        """Return the policy's turn.

        Each request gets a sample of its own, also among equal ones at the same time. Only a request
        that comes again gets the turn of an earlier one: its answer could not be delivered, or the
        client marks it as a retry. When no client waits any more, sampling stops and nothing is
        kept.

        Args:
            request: the conversation.
            response_id: names the turn if it is a new one.
            is_retry: whether the client says that it has sent the request before.

        Raises:
            ApiError: if there is no turn.
        """
        equal = self.forest.answers(request.fingerprint)
        for node in equal:
            if node.delivered is False:
                node.delivered = None
                return node
        if is_retry and request.fingerprint in self._abandoned:
            # The turn that this client waited for is gone: others that are equal are not its own.
            self._abandoned.remove(request.fingerprint)
            is_retry = False
        if is_retry and equal:
            return equal[-1]

        pending = self._retried(request.fingerprint) if is_retry else None
        if pending is None:
            task = asyncio.create_task(self._take_turn(request, response_id))
            pending = _PendingTurn(task)
            self._pending.setdefault(request.fingerprint, []).append(pending)

        pending.waiting += 1
        try:
            # Shielded: a client that leaves must not take the answer from its own retry.
            return await asyncio.shield(pending.task)
        except asyncio.CancelledError:
            # The turn was cancelled and not its client: the session was closed meanwhile.
            if pending.task.cancelled() and self.end is not None:
                raise self.end.as_error() from None
            if pending.task.done() and not pending.task.cancelled():
                _mark_lost(pending.task)
            raise
        finally:
            pending.waiting -= 1
            if pending.waiting == 0:
                self._remove(request.fingerprint, pending)

    def _retried(self, fingerprint: bytes) -> _PendingTurn | None:
        """Return a turn in flight whose client may have sent its request again."""
        for pending in self._pending.get(fingerprint, ()):
            if pending.waiting == 1:
                return pending
        return None

    def _remove(self, fingerprint: bytes, pending: _PendingTurn) -> None:
        """Stop a turn that no client waits for."""
        equal = self._pending[fingerprint]
        equal.remove(pending)
        if not equal:
            del self._pending[fingerprint]
        if not pending.task.done():
            pending.task.cancel()
            self._abandoned.append(fingerprint)

    def usage_of(self, node: Node) -> "Usage":
        """Count the tokens of a turn."""
        sampled = node.sampled
        return Usage(
            prompt_tokens=len(node.token_ids()) - len(sampled.output_ids),
            cached_tokens=sampled.cached_tokens,
            sampled_tokens=len(sampled.output_ids),
            reasoning_tokens=node.reasoning_tokens,
        )

    def add_reward(self, reward: GivenReward) -> None:
        """Note what the session, or one of its responses, earned. What was said of the same before
        is replaced, so that a request may be repeated. Raises ApiError."""
        if not self._settings.is_episode:
            message = "nothing is trained here, so there is nothing to reward"
            raise ApiError(400, "invalid_request", message)
        if reward.response_id is not None and not self.forest.has_response(reward.response_id):
            raise ApiError(
                404,
                "response_not_found",
                f"this session has no response {reward.response_id!r}",
                parameter="response_id",
            )
        self._rewards[reward.response_id] = reward.parts

    def reward_parts(self) -> dict[str, float] | None:
        """Return the sums of all rewards, part by part; None if there was none."""
        if not self._rewards:
            return None
        totals: dict[str, float] = {}
        for parts in self._rewards.values():
            for name, value in parts.items():
                totals[name] = totals.get(name, 0.0) + value
        return totals

    def trajectories(self, task_id: str) -> list[tuple[Node, Trajectory]]:
        """Return what was captured: see ``Forest.trajectories``."""
        return self.forest.trajectories(task_id, self._codec.decode)

    async def run[Result](self, job: Job[Result], *, is_short: bool = False) -> Result:
        """Run a job: a short one here, a long one in another process. Raises ApiError.

        One long job at a time: the requests of a session do not take processes from other sessions.
        The next job begins when this one is over, even if the client leaves.
        """
        if is_short:
            async with self._is_working_here:
                # The loop serves others between two jobs of a session.
                await asyncio.sleep(0)
                return job.run(self._codec)
        await self._is_working.acquire()
        task = self._workers.begin(job)
        task.add_done_callback(lambda _: self._is_working.release())
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Stop what is being sampled, and take no more requests."""
        if self.end is None:
            self.end = SessionEnd(FinishReason.STOP, "the session is over")
        tasks = [pending.task for equal in self._pending.values() for pending in equal]
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError, Exception):
                await task
        if self._owns_workers:
            await self._workers.close()

    # ---- one turn

    async def _take_turn(self, request: TurnRequest, response_id: str) -> Node:
        """Sample a turn and add it to the forest. Raises ApiError."""
        self._check_is_open()
        limit = self._settings.limits.max_turns
        if self._counted_turns >= limit:
            reason = FinishReason.MAX_TURNS
            raise self._ended(SessionEnd(reason, f"the session had its {limit} turns"))

        number = self._begun_turns
        self._begun_turns += 1
        self._counted_turns += 1
        is_added = False
        try:
            node = await self._sample_turn(request, response_id, number)
            is_added = True
            return node
        except InfrastructureFailure as failure:
            invalid = InvalidReason(failure.component, failure.reason, failure.culprit)
            end = SessionEnd(FinishReason.ABORT, str(failure), invalid=invalid)
            raise self._ended(end) from failure
        finally:
            if not is_added:
                self._counted_turns -= 1
            # A turn that was cancelled in the engine's queue has left it standing.
            self.clock.start()

    async def _sample_turn(self, request: TurnRequest, response_id: str, number: int) -> Node:
        self.was_too_long = False
        self._check_effort(request)
        place = self.forest.find(request)
        self._check_size(request, place)
        prompt = await self._render(request, place)
        prefix = prompt.token_ids
        room = self._room(request, len(prefix))

        sampler = self._sampler(request)
        # The client's seed does not decide alone: turns that are sampled from one prompt with one
        # seed would be one request to the engine.
        name = str(number) if request.seed is None else f"{number}.{request.seed}"
        sampled = await sampler.sample(name, prefix, room.tokens)
        self.prefilled_again += sampler.prefilled_again
        if not sampled.output_ids:
            raise self._out_of_time()

        if len(sampled.output_ids) <= SHORT_TOKENS:
            turn = read_turn(self._codec, sampled, request.tools)
        else:
            turn = await self._read_long_turn(sampled, request)
        node = self._node(request, response_id, place, prompt, sampled, turn, room)
        self._sampled_tokens += len(sampled.output_ids)
        # A turn beside this one may have ended the session meanwhile.
        if self.end is not None:
            raise self.end.as_error()
        self.forest.add(node)

        if sampled.finish_reason is FinishReason.TIMEOUT:
            raise self._out_of_time()
        if turn.format_error is not None:
            message = str(invalid_content(turn.format_error))
            reason = FinishReason.FORMAT_ERROR
            raise self._ended(SessionEnd(reason, message, format_error=turn.format_error))
        return node

    async def _read_long_turn(self, sampled: GenerateResult, request: TurnRequest) -> ReadTurn:
        """Parse a sampled turn in another process."""
        try:
            job = TurnJob(sampled.output_ids, sampled.finish_reason, request.tools)
            return await self.run(job)
        except ApiError:
            # The client has no part in it, and must get its turn.
            return await off_loop(read_turn, self._codec, sampled, request.tools)

    def _node(
        self,
        request: TurnRequest,
        response_id: str,
        place: Place,
        prompt: _Prompt,
        sampled: GenerateResult,
        turn: ReadTurn,
        room: Room,
    ) -> Node:
        """Make the node of a sampled turn."""
        # The engine says that the tokens were used up, and ``room`` which limit had counted them.
        finish_reason = sampled.finish_reason
        if finish_reason is FinishReason.LENGTH:
            finish_reason = room.limit
        if turn.format_error is not None:
            finish_reason = FinishReason.FORMAT_ERROR

        calls = [
            OpenCall(call.call_id, f"{FUNCTIONS}{call.name}", call.channel)
            for call in turn.answer.calls
        ]
        # A turn that was cut off before it said anything is no message to render.
        message = turn.answer.as_message()
        is_empty = finish_reason is not FinishReason.STOP and message.keys() == {"role", "content"}
        said = () if is_empty and not message["content"] else (message,)
        new_role = "prompt"
        if prompt.parent is not None:
            new_role = "tool" if place.new_messages[0]["role"] == "tool" else "user"

        return Node(
            response_id=response_id,
            parent=prompt.parent,
            new_ids=prompt.new_ids,
            new_role=new_role,
            sampled=without_routes(sampled),
            routes=new_routes(prompt.parent, sampled),
            finish_reason=finish_reason,
            answer=turn.answer,
            format_error=turn.format_error,
            messages=(*place.conversation, *said),
            digests=(*place.digests, *([turn.digest] if said else [])),
            digest=turn.digest,
            text_characters=text_size(place.conversation),
            reasoning_tokens=turn.reasoning_tokens,
            key=next_key(place, turn),
            open_calls=prompt.open_calls + calls,
            closing=turn.closing,
            dropped=turn.dropped,
            fingerprint=request.fingerprint,
            is_stored=request.is_stored,
        )

    def _sampler(self, request: TurnRequest) -> TurnSampler:
        sampling = replace(self._settings.sampling, stop_token_ids=self._codec.stop_token_ids)
        if self._settings.clients_choose_sampling:
            if request.temperature is not None:
                sampling = replace(sampling, temperature=request.temperature)
            if request.top_p is not None:
                sampling = replace(sampling, top_p=request.top_p)
        return TurnSampler(
            engine=self._engine,
            episode=self.name,
            sampling=sampling,
            clock=self.clock,
            shape=self._shape,
            routed_experts=self._settings.routed_experts,
        )

    # ---- its prompt

    async def _render(self, request: TurnRequest, place: Place) -> _Prompt:
        """Render the new messages of a conversation. Raises ApiError."""
        job = self._render_job(request, place)
        # A process costs as much as tokenizing a page: short texts are rendered here.
        rendered = await self.run(job, is_short=self._is_short(request, job))
        if rendered.too_many is not None:
            raise self._too_long(str(rendered.too_many))
        return _prompt_of(place, rendered)

    def _render_job(self, request: TurnRequest, place: Place) -> RenderJob:
        """Return the job that renders the new messages of a conversation."""
        stored = None
        if place.parent is not None:
            parent = place.parent
            history = None
            if self._settings.history == "harmony":
                before = parent.token_ids()
                history = before[: len(before) - parent.dropped]
            stored = StoredTokens(parent.closing, tuple(parent.open_calls), history)
        return RenderJob(
            messages=place.new_messages,
            first_number=place.first_number,
            tools=request.tools,
            reasoning_effort=request.reasoning_effort,
            keys=place.keys,
            stored=stored,
            max_tokens=self._settings.limits.max_tokens,
        )

    def _is_short(self, request: TurnRequest, job: RenderJob) -> bool:
        """Return True if a job takes a few milliseconds at most."""
        work = text_bytes(job.messages) + MESSAGE_CHARACTERS * len(job.messages)
        if job.stored is None:
            return work + request.tools_work <= SHORT_CHARACTERS
        # Each message is compared with the open calls.
        work += len(job.messages) * len(job.stored.open_calls)
        return work <= SHORT_CHARACTERS and len(job.stored.history or ()) <= SHORT_HISTORY

    # ---- its limits

    def _check_is_open(self) -> None:
        if self.end is not None:
            raise self.end.as_error()
        if self.clock.is_over:
            raise self._out_of_time()

    def _check_effort(self, request: TurnRequest) -> None:
        """Raise ApiError for a reasoning effort that no prompt of this model can say."""
        if request.reasoning_effort is not None and not self._codec.knows_reasoning_effort:
            raise ApiError(
                400,
                "unsupported_parameter",
                "the chat format of this model has no reasoning effort",
                parameter="reasoning_effort",
            )

    def _check_size(self, request: TurnRequest, place: Place) -> None:
        """Raise ApiError for a text that is surely too long, before it is tokenized."""
        limit = self._settings.limits.max_tokens
        size = text_size(place.new_messages)
        if place.parent is None:
            size += request.tools_size
        if size > LONGEST_TOKEN * limit:
            raise self._too_long(f"at least {size // LONGEST_TOKEN}")
        # Every message has a header of at least two tokens.
        if 2 * len(place.new_messages) > limit:
            raise self._too_long(f"at least {2 * len(place.new_messages)}")

    def _room(self, request: TurnRequest, used: int) -> Room:
        """Return how many tokens a turn behind ``used`` ones may have.

        Raises ApiError if there is room for none."""
        limits = self._settings.limits
        context = Room(limits.max_tokens - used, FinishReason.MAX_CONTEXT)
        if context.tokens <= 0:
            raise self._too_long(str(used))

        rooms = [Room(self._settings.sampling.max_new_tokens, FinishReason.LENGTH), context]
        if request.max_new_tokens is not None:
            rooms.append(Room(request.max_new_tokens, FinishReason.LENGTH))
        if limits.max_sampled_tokens is not None:
            left = limits.max_sampled_tokens - self._sampled_tokens
            if left <= 0:
                reason = FinishReason.MAX_SAMPLED_TOKENS
                limit = limits.max_sampled_tokens
                message = f"the session had its {limit} sampled tokens"
                raise self._ended(SessionEnd(reason, message))
            rooms.append(Room(left, FinishReason.MAX_SAMPLED_TOKENS))
        return min(rooms, key=lambda room: room.tokens)

    def _too_long(self, tokens: str) -> ApiError:
        """Make the error of a prompt without room for an answer; the session goes on, with a
        shorter one."""
        self.was_too_long = True
        limit = self._settings.limits.max_tokens
        return ApiError(
            400,
            "context_length_exceeded",
            f"the conversation has {tokens} tokens, the model's context has {limit}",
            parameter="messages",
        )

    def _out_of_time(self) -> ApiError:
        seconds = self._settings.limits.episode_seconds
        message = f"the session had its {seconds:g} s"
        return self._ended(SessionEnd(FinishReason.TIMEOUT, message))

    def _ended(self, end: SessionEnd) -> ApiError:
        """End the session, if it is an episode; return what the client is told."""
        if self._settings.is_episode and self.end is None:
            self.end = end
        return end.as_error()


def _prompt_of(place: Place, rendered: Rendered) -> _Prompt:
    """Return the prompt of a turn."""
    parent = place.parent
    if parent is None:
        return _Prompt(None, rendered.new_ids, rendered.open_calls)
    if rendered.history is None and not parent.dropped:
        return _Prompt(parent, rendered.new_ids, rendered.open_calls)

    # Other tokens stand before what comes next: the sequence ends here.
    history = rendered.history
    if history is None:
        before = parent.token_ids()
        history = before[: len(before) - parent.dropped]
    return _Prompt(None, history + rendered.new_ids, rendered.open_calls)


def _mark_lost(task: "asyncio.Task[Node]") -> None:
    """Note that the client has left just when its turn was complete."""
    if task.exception() is None and task.result().delivered is None:
        task.result().delivered = False


@dataclass(frozen=True)
class Usage:
    """The tokens of one turn."""

    prompt_tokens: int
    cached_tokens: int
    """Of the prompt: found in the engine's cache."""
    sampled_tokens: int
    reasoning_tokens: int
    """Of the sampled ones: analysis."""
