"""The agent loop: one episode, token in and token out.

    ids = prompt
    repeat: sample a turn from ids; append exactly the sampled ids; let the environment execute the
            turn; append tool outputs or the user message

Text is never rendered twice. The loss mask of these trajectories is 1 exactly on sampled tokens.
``data.samples`` clears it for excluded episodes (``rollout.truncated_episodes: mask``). Mistakes of
the policy end an episode with a reward. Infrastructure failures end it as invalid
(``rl_loop.infrastructure``).
"""

from collections.abc import Callable, Sequence

from rl_loop.chat.codec import ChatCodec
from rl_loop.chat.messages import FormatError, ParsedMessage
from rl_loop.config.episode import EpisodeLimits
from rl_loop.data.trajectory import FinishReason, Trajectory
from rl_loop.engines.protocol import GenerateResult, ModelShape, RolloutEngine, SamplingParams
from rl_loop.environments.base import Environment, StepResult
from rl_loop.infrastructure import InfrastructureError, describe
from rl_loop.rollout.environment_guard import EnvironmentGuard
from rl_loop.rollout.episode import (
    Ending,
    Episode,
    EpisodeCompleted,
    EpisodeOver,
    LimitReached,
    MalformedTurn,
    invalidated,
)
from rl_loop.rollout.episode_clock import CallTime, OutOfTimeError
from rl_loop.rollout.episode_draft import EpisodeDraft
from rl_loop.rollout.observation import truncate_observation
from rl_loop.tasks.episode_prompts import (
    EpisodePromptRenderer,
    build_prompt,
    build_teacher_prompt,
)
from rl_loop.threads import run_in_thread

TOOL_RETRY_DELAYS = (0.1, 1.0, 4.0)
"""Seconds before each retry of a turn whose tools or checker failed, or of opening an environment.
The failure after the last retry is final."""


async def run_episode(
    task_id: str,
    environment: Environment,
    engine: RolloutEngine,
    codec: ChatCodec,
    limits: EpisodeLimits,
    sampling: SamplingParams,
    *,
    seed: int,
    record_routes: bool = False,
    shape: ModelShape | None = None,
    make_runner: "RunnerFactory | None" = None,
) -> Trajectory:
    """Run one episode to its end.

    With ``rollout.engine.deterministic`` the result is a function of seed, weights and task. In
    other modes it also depends on the last bits of log-probs, which the batch changes. A persistent
    infrastructure failure makes the episode invalid.

    Args:
        task_id: name of the task.
        environment: environment of the episode.
        engine: engine that samples the turns.
        codec: chat format of the policy.
        limits: limits of the episode.
        sampling: temperature, top-p and the token limit of one turn.
        seed: seed of the episode.
        record_routes: whether to record the experts of every token.
        shape: shape of the model, to check the engine's results. None to check the vocabulary only.
        make_runner: makes the runner of the episode. None: ``EpisodeRunner``. ``purifying`` of
            ``rollout.purification`` returns another factory.

    Raises:
        UnusablePromptError: the prompt is too long or cannot be rendered. The worker skips the task
            (metric ``rollout/skipped_tasks``).
    """
    name = f"{task_id}/{seed}"
    episode = Episode(
        name, engine, codec, limits, sampling, shape=shape, record_routes=record_routes
    )
    return await (make_runner or EpisodeRunner)(task_id, environment, codec, episode).run()


class EpisodeRunner:
    """Runs one episode.

    The environment ends an episode with ``StepResult.done``. Limits and malformed turns raise
    EpisodeOver, which ``play`` turns into a reward. An InfrastructureError ends the episode in
    ``run``.
    """

    def __init__(
        self, task_id: str, environment: Environment, codec: ChatCodec, episode: Episode
    ) -> None:
        self.environment = environment
        self.codec = codec
        self.episode = episode
        self.limits = episode.limits
        self.guard = EnvironmentGuard(environment, episode.clock, self.limits.max_episode_seconds)

        self.draft = EpisodeDraft(task_id)
        self.pending_ids: list[int] = []
        """Token ids of tool outputs and user messages. They become a part of the episode when a
        turn is sampled from them."""
        self.pending_role = ""
        """Author of ``pending_ids``: "tool" or "user"."""
        self.pending_time = CallTime()
        """Duration of the step that produced ``pending_ids``."""
        self.calls_run = 0
        """Number of executed tool calls, including the calls of replaced turns."""

    async def run(self) -> Trajectory:
        """Run the episode. A persistent infrastructure failure makes it invalid."""
        try:
            await self.begin()
            return await self.play()
        except InfrastructureError as failure:
            return self.invalidate(failure)
        finally:
            await self.guard.close(self.draft.task_id)

    async def begin(self) -> None:
        """Open the environment and render the prompt.

        Raises:
            UnusablePromptError: the prompt is too long or cannot be rendered.
            InfrastructureError: the environment cannot be opened.
        """
        for delay in (*TOOL_RETRY_DELAYS, None):
            try:
                await self.guard.open()
                break
            except InfrastructureError:
                if delay is None:
                    raise
                await self.episode.clock.sleep(delay)

        # After `open`, because a prompt may depend on an open environment.
        prompt = await self.guard.call_method(build_prompt, self.environment)
        renderer = EpisodePromptRenderer(self.codec, self.limits.max_episode_tokens)
        ids = await run_in_thread(renderer.render, self.draft.task_id, prompt)
        self.append("prompt", ids)

        of_teacher = await self.guard.call_method(build_teacher_prompt, self.environment)
        if of_teacher is not None:
            teacher_ids = await run_in_thread(renderer.render, self.draft.task_id, of_teacher)
            self.draft.teacher_prompt = teacher_ids
            self.episode.reserved_tokens = max(0, len(teacher_ids) - len(ids))

    async def play(self) -> Trajectory:
        """Take turns until the episode ends."""
        ending: Ending
        try:
            result = await self.take_turns()
            ending = EpisodeCompleted()
            if result.format_error is not None:
                ending = MalformedTurn(result.format_error)
        except EpisodeOver as over:
            ending = over.ending
            # A limit or a malformed turn ended the episode, so the environment has not rewarded it
            # yet.
            result = await self.guard.reward_ending(ending)
        return self.finish(result, ending)

    async def take_turns(self) -> StepResult:
        """Take turns until the environment ends the episode. Raises EpisodeOver."""
        while True:
            sampled = await self.sample_turn()
            # Parsing a long turn here would delay all other episodes of the event loop.
            messages = await run_in_thread(self.codec.parse, sampled.output_ids)
            # A malformed turn is the policy's mistake. It ends the episode with a reward, not as
            # invalid.
            if isinstance(messages, FormatError):
                raise EpisodeOver(MalformedTurn(messages.kind))

            try:
                with self.episode.clock.measure() as self.pending_time:
                    result = await self.take_step(sampled, messages)
            except OutOfTimeError:
                raise EpisodeOver(self.episode.out_of_time()) from None

            self.draft.tool_calls += result.tool_calls
            self.draft.tool_errors += result.tool_errors
            # A step that ends the episode counts even if it used the last call, so check the limit
            # after it.
            if result.done:
                return result
            if self.calls_left == 0:
                allowed = f"{self.limits.max_tool_calls} tool calls"
                raise EpisodeOver(LimitReached(FinishReason.MAX_TOOL_CALLS, allowed))
            await self.observe(result)

    # ---- one turn

    async def sample_turn(self) -> GenerateResult:
        """Sample a turn and append it to the episode, after ``pending_ids``.

        The result has the ids, log-probs, weight versions and routes of the turn. A weight sync
        interrupts sampling, which continues from the tokens so far (``rollout.turn_sampler``).

        Raises:
            EpisodeOver: a limit ended the turn, or there is no room for a turn.
        """
        draft = self.draft
        with self.episode.turn() as number:
            turn = await self.episode.sample(
                str(number),
                draft.token_ids + self.pending_ids,
                routes_start=draft.routed_tokens,
            )
            self.episode.keep(turn.result)

        # Tool outputs join the episode only with the turn that was sampled from them. Otherwise an
        # episode could end with tokens that no turn follows.
        if number > 0:
            draft.note_reuse(turn.result)
        if self.pending_ids:
            self.append(self.pending_role, self.pending_ids, time=self.pending_time)
            self.pending_ids = []
        self.append("assistant", turn.result.output_ids, turn.result, turn.time)

        # After the append, because the tokens of a truncated turn are a part of the episode.
        if turn.truncated_by is not None:
            raise EpisodeOver(turn.truncated_by)
        return turn.result

    async def take_step(self, sampled: GenerateResult, messages: list[ParsedMessage]) -> StepResult:
        """Execute the turn that was sampled last. Raises InfrastructureError and OutOfTimeError.

        A subclass may replace the turn by another one first (``rollout.purification``).

        Args:
            sampled: the turn, which only subclasses need.
            messages: the parsed turn.
        """
        return await self.act(messages)

    async def act(self, messages: Sequence[ParsedMessage]) -> StepResult:
        """Let the environment execute a turn, up to the limit of tool calls.

        After an infrastructure failure the turn is executed again, from the state before it. Raises
        InfrastructureError if the failure persists, and OutOfTimeError.
        """
        # Save the state before the first attempt, because a failed step may have changed it.
        runnable = self._runnable(messages)
        state = self.environment.save_state()

        is_repeated = False
        for delay in (*TOOL_RETRY_DELAYS, None):
            try:
                if is_repeated:
                    # The failure may have closed a connection, which `open` restores.
                    await self.guard.open()
                result = await self.guard.step(runnable)
                self.calls_run += result.tool_calls
                return result
            except InfrastructureError:
                # Without a saved state, a second attempt could repeat the effects of the first one.
                if delay is None or state is None:
                    raise
                await self.episode.clock.sleep(delay)
                self.environment.restore_state(state)
                is_repeated = True
        raise AssertionError("the last failure is raised")

    async def observe(self, result: StepResult) -> None:
        """Keep tool outputs and user messages for the next turn."""
        self.pending_ids = await self.render(result)
        self.pending_role = "tool" if result.tool_outputs else "user"

    async def render(self, result: StepResult) -> list[int]:
        """Return the token ids of tool outputs and user messages, cut to the limit."""
        limit = self.limits.max_observation_bytes
        # Before rendering, because tokenizing megabytes would take minutes.
        outputs, user = truncate_observation(result.tool_outputs, result.user, limit)
        try:
            return await run_in_thread(self.codec.render_observation, outputs, user)
        except Exception as error:
            texts = f"a tool output or a user message of task {self.draft.task_id}"
            reason = f"{texts} cannot be rendered: {describe(error)}"
            raise InfrastructureError("environment", reason) from error

    def append(
        self,
        role: str,
        ids: list[int],
        sampled: GenerateResult | None = None,
        time: CallTime | None = None,
    ) -> None:
        """Append a turn: ``sampled`` by the policy, or written by others. See EpisodeDraft."""
        self.draft.append(role, ids, self.codec.decode(ids), sampled, time)

    # ---- ends of the episode

    def finish(self, result: StepResult, ending: Ending) -> Trajectory:
        """Return the episode with its outcome."""
        return self.episode.conclude([self.draft.to_trajectory()], result, ending)

    def invalidate(self, failure: InfrastructureError) -> Trajectory:
        """Return the invalid episode.

        A failure without a source gets the name of the environment.
        """
        # A failure of the engine names its server itself.
        failure_source = "" if failure.component == "engine" else self.guard.name
        # Without routes, because they are large and no step trains on this episode.
        return invalidated(self.draft.to_trajectory(with_routes=False), failure, failure_source)

    # ---- the limit of tool calls

    @property
    def calls_left(self) -> int | None:
        """Number of tool calls that may still be executed. None for no limit."""
        if self.limits.max_tool_calls is None:
            return None
        return max(0, self.limits.max_tool_calls - self.calls_run)

    def _runnable(self, messages: Sequence[ParsedMessage]) -> Sequence[ParsedMessage]:
        """Return the messages up to the last call that may be executed."""
        left = self.calls_left
        if left is None:
            return messages

        calls = [i for i, message in enumerate(messages) if message.recipient is not None]
        if len(calls) <= left:
            return messages
        # The turn ends with its last allowed call. Messages before and between the calls stay.
        return messages[: calls[left - 1] + 1]


type RunnerFactory = Callable[[str, Environment, ChatCodec, Episode], EpisodeRunner]
"""Makes a runner from task id, environment, chat format and episode core."""
