"""Renders the prompt of a turn: the stored tokens of a conversation and its new messages."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rl_loop.chat.codec import ChatCodec
from rl_loop.gateway.errors import ApiError, invalid_request
from rl_loop.gateway.jobs import (
    EncodeJob,
    RenderedMessages,
    RenderJob,
    SessionJobs,
    StoredTokens,
)
from rl_loop.gateway.node import ForestPosition, TurnNode, TurnPrompt
from rl_loop.gateway.raw_prompt import RawPrompt
from rl_loop.gateway.request import TurnRequest, text_bytes, text_size
from rl_loop.tasks.episode_prompts import MAX_O200K_TOKEN_BYTES

SHORT_CHARACTERS = 4096
"""Bytes of text that are rendered on the event loop. It takes a few milliseconds at most."""
MESSAGE_CHARACTERS = 64
"""Characters that take as long to render as the header of a message."""
SHORT_HISTORY = 4096
"""Tokens from which finished analysis is removed on the event loop."""

History = Literal["append", "harmony"]


class PromptTooLongError(Exception):
    """The prompt leaves no room for an answer."""

    def __init__(self, tokens: str) -> None:
        """``tokens``: tokens of the conversation, for people."""
        super().__init__(tokens)
        self.tokens = tokens


@dataclass(frozen=True)
class TurnPromptRenderer:
    """Renders the prompts of one session."""

    codec: ChatCodec
    history: History
    """See ``SessionSettings.history``."""
    max_tokens: int
    """Limit of a conversation."""
    jobs: SessionJobs

    async def render(self, request: TurnRequest, position: ForestPosition) -> TurnPrompt:
        """Render the prompt of a request.

        Args:
            request: request of the client.
            position: position of the request in the forest.

        Raises:
            ApiError: the messages cannot be rendered.
            PromptTooLongError: the prompt leaves no room for an answer.
        """
        self._check_effort(request)
        self._check_size(request, position)
        job = self._job(request, position)
        rendered = await self.jobs.run(job, is_short=_is_short(request, job))
        # The job leaves these tokens out and returns only their number.
        if rendered.too_many is not None:
            raise PromptTooLongError(str(rendered.too_many))

        # At least one token must be left for the answer.
        prompt = _build_prompt(position, rendered)
        tokens = len(prompt.token_ids)
        if tokens >= self.max_tokens:
            raise PromptTooLongError(str(tokens))
        return prompt

    async def encode(self, prompt: RawPrompt, parent: TurnNode | None) -> TurnPrompt:
        """Return the tokens of a completion's prompt.

        Args:
            prompt: prompt of the client.
            parent: completion that the prompt continues. None for a new text.

        Raises:
            ApiError: a token id is not in the vocabulary, or the prompt is empty.
            PromptTooLongError: the prompt leaves no room for an answer.
        """
        begin = 0
        closing: tuple[int, ...] = ()
        is_whole = True
        if parent is not None:
            assert parent.completed_bytes is not None
            begin = parent.completed_bytes
            closing = parent.closing
            is_whole = not parent.dropped
        if prompt.kind == "token ids":
            # The client has all tokens, also those of a stop text.
            ids = prompt.ids_from(begin)
            is_whole, closing = True, ()
            _check_ids(ids, self.codec.vocabulary.size)
        else:
            text = prompt.text_from(begin)
            # Text of the client does not have the token that ended the completion.
            ends = self._drop_end(parent)
            if ends and text.startswith(ends):
                is_whole, text = True, text.removeprefix(ends)
            if len(text) > MAX_O200K_TOKEN_BYTES * self.max_tokens:
                raise PromptTooLongError(f"at least {len(text) // MAX_O200K_TOKEN_BYTES}")
            job = EncodeJob(text, closing, self.max_tokens)
            rendered = await self.jobs.run(job, is_short=len(text) <= SHORT_CHARACTERS)
            if rendered.too_many is not None:
                raise PromptTooLongError(str(rendered.too_many))
            ids = rendered.new_ids

        encoded = TurnPrompt(parent, ids, [])
        if parent is not None and not is_whole:
            # The tokens before the new text differ from the stored ones.
            encoded = TurnPrompt(None, _kept_ids(parent) + ids, [])
        tokens = len(encoded.token_ids)
        if tokens == 0:
            raise invalid_request("is empty", "prompt")
        if tokens >= self.max_tokens:
            raise PromptTooLongError(str(tokens))
        return encoded

    def _drop_end(self, parent: TurnNode | None) -> str:
        """Return the name of the token that ended a completion. Empty if there is none."""
        if parent is None or parent.dropped != 1 or parent.closing:
            return ""
        last = parent.sampled.output_ids[-1]
        return self.codec.decode_token(last) if last in self.codec.stop_token_ids else ""

    def _check_effort(self, request: TurnRequest) -> None:
        """Raise ApiError for a reasoning effort that the chat format cannot express."""
        if request.reasoning_effort is not None and not self.codec.knows_reasoning_effort:
            raise ApiError(
                400,
                "unsupported_parameter",
                "the chat format of this model has no reasoning effort",
                parameter="reasoning_effort",
            )

    def _check_size(self, request: TurnRequest, position: ForestPosition) -> None:
        """Raise PromptTooLongError for a text that is certainly too long, before it is tokenized."""
        # Tools are a part of the first prompt only.
        size = text_size(position.new_messages)
        if position.parent is None:
            size += request.tools_characters
        # A character has at least one byte, so characters bound the number of tokens from below.
        if size > MAX_O200K_TOKEN_BYTES * self.max_tokens:
            raise PromptTooLongError(f"at least {size // MAX_O200K_TOKEN_BYTES}")
        # Every message has a header of at least two tokens.
        if 2 * len(position.new_messages) > self.max_tokens:
            raise PromptTooLongError(f"at least {2 * len(position.new_messages)}")

    def _job(self, request: TurnRequest, position: ForestPosition) -> RenderJob:
        """Return the job that renders the new messages of a conversation."""
        stored = None
        parent = position.parent
        if parent is not None:
            # Only "harmony" removes analysis. The tokens are not sent to the job otherwise.
            history = _kept_ids(parent) if self.history == "harmony" else None
            stored = StoredTokens(parent.closing, tuple(parent.open_calls), history)
        return RenderJob(
            messages=position.new_messages,
            first_number=position.first_number,
            tools=request.tools,
            reasoning_effort=request.reasoning_effort,
            keys=position.keys,
            stored=stored,
            max_tokens=self.max_tokens,
        )


def _check_ids(ids: Sequence[int], vocabulary_size: int) -> None:
    """Raise ApiError if a token id is not in the vocabulary."""
    wrong = next((token for token in ids if not 0 <= token < vocabulary_size), None)
    if wrong is not None:
        message = f"has the token id {wrong}, but the vocabulary has {vocabulary_size} ids"
        raise invalid_request(message, "prompt")


def _is_short(request: TurnRequest, job: RenderJob) -> bool:
    """Return True if a job takes a few milliseconds at most. A process costs more than that."""
    work = text_bytes(job.messages) + MESSAGE_CHARACTERS * len(job.messages)
    if job.stored is None:
        return work + request.tools_render_cost <= SHORT_CHARACTERS
    # Each message is compared with the open calls.
    work += len(job.messages) * len(job.stored.open_calls)
    return work <= SHORT_CHARACTERS and len(job.stored.history or ()) <= SHORT_HISTORY


def _build_prompt(position: ForestPosition, rendered: RenderedMessages) -> TurnPrompt:
    """Return the prompt of a turn."""
    parent = position.parent
    if parent is None:
        return TurnPrompt(None, rendered.new_ids, rendered.open_calls)
    # Nothing before the new messages changed, so the stored sequence continues.
    if rendered.history is None and not parent.dropped:
        return TurnPrompt(parent, rendered.new_ids, rendered.open_calls)

    # The tokens before the new messages differ from the stored ones, so the stored sequence ends.
    history = rendered.history
    if history is None:
        history = _kept_ids(parent)
    return TurnPrompt(None, history + rendered.new_ids, rendered.open_calls)


def _kept_ids(parent: TurnNode) -> list[int]:
    """Return the tokens up to a turn, without the end that a continuation leaves out."""
    ids = parent.token_ids()
    return ids[: len(ids) - parent.dropped]
