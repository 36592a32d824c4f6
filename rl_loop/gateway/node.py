"""One sampled turn of a session, and its prompt."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import batched
from typing import Any

from rl_loop.chat.open_calls import OpenCall
from rl_loop.chat.tools import FUNCTIONS
from rl_loop.data.trajectory import FinishReason
from rl_loop.engines.protocol import GenerateResult
from rl_loop.gateway.answer import PolicyAnswer, ReadTurn
from rl_loop.gateway.request import (
    MessageDigest,
    TurnRequest,
    extended_key,
    raw_key,
    text_size,
)
from rl_loop.gateway.token_log_probs import TextLogProbs
from rl_loop.rollout.episode import SampledTurn
from rl_loop.rollout.episode_clock import CallTime

TOKEN_BYTES = 48
"""Assumed memory of one token: its id as a Python object, and perhaps a log-prob."""
LOG_PROB_BYTES = 128
"""Assumed memory of a token's text and log-prob for the client."""
CHARACTER_BYTES = 2
"""Assumed memory of one character, which takes 1 to 4 bytes."""


# Compared by identity: turns with equal content are different samples, and sets contain turns.
@dataclass(eq=False)
class TurnNode:
    """One sampled turn, and the tokens between it and the previous turn."""

    response_id: str
    parent: "TurnNode | None"
    """Turn whose tokens this one continues. None for the first turn of its sequence."""
    new_ids: list[int]
    """Rendered tokens after the parent's tokens. The whole prompt if there is no parent."""
    new_role: str
    """Author of ``new_ids``: "prompt", "tool" or "user"."""
    sampled: GenerateResult
    """Sampled turn. Its experts are those of the tokens that no earlier turn had as inputs."""
    finish_reason: FinishReason
    """Reason for the end of the turn."""
    answer: PolicyAnswer
    """Answer to the client."""
    format_error: str | None
    """Kind of the error if the turn is malformed. The client then gets no answer."""
    messages: tuple[dict[str, Any], ...]
    """Conversation including this turn, without instructions."""
    digests: tuple[MessageDigest, ...]
    """Digest of each item of ``messages``."""
    digest: MessageDigest
    """Digest of the answer."""
    reasoning_tokens: int
    """Number of sampled tokens in analysis messages."""
    key: bytes
    """Key of the conversation with instructions and tools: ``TurnRequest.conversation_keys``."""
    open_calls: list[OpenCall]
    """Calls without a tool output, including the calls of this turn."""
    closing: tuple[int, ...]
    """Tokens after the turn when the conversation continues."""
    dropped: int
    """Number of tokens at the end of the turn that are left out when the conversation continues."""
    fingerprint: bytes
    """Fingerprint of the request."""
    log_probs: tuple[TextLogProbs, ...] = ()
    """Tokens of each text of ``answer``. Empty if not requested."""
    text_characters: int = 0
    """Characters of ``messages``."""
    is_stored: bool = True
    """True if a request may name the response to continue it."""
    delivered: bool | None = None
    """True if a client has received the answer, False if its connection was lost. None while the
    answer is sent."""
    completed_bytes: int | None = None
    """Bytes of a completion's prompt and text, as the client has them (``RawPrompt.content``). None
    in a conversation."""
    is_constrained: bool = False
    """True if the request required a call or a JSON schema."""
    is_leaf: bool = True
    """True if no turn continues from its tokens."""
    sampling_time: CallTime = field(default_factory=CallTime)
    """Duration of sampling, and time in the engine's queue."""
    ended: float = field(default_factory=time.monotonic)
    """Time at which the turn was complete, in seconds of the monotonic clock."""

    def path(self) -> list["TurnNode"]:
        """Return the turns from the root to this one."""
        nodes: list[TurnNode] = []
        node: TurnNode | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    @property
    def client_time(self) -> CallTime:
        """Time of the client between the previous turn and this one: its tools and its own code."""
        sampling = self.sampling_time
        if self.parent is None or sampling.seconds is None or sampling.waited is None:
            return CallTime()
        began = self.ended - sampling.seconds - sampling.waited
        # Turns of concurrent conversations may overlap.
        return CallTime(max(0.0, began - self.parent.ended), 0.0)

    @property
    def memory_bytes(self) -> int:
        """Approximate memory of this turn in bytes, without the turns before it."""
        tokens = len(self.new_ids) + len(self.sampled.output_ids)
        listed = sum(token.entries for text in self.log_probs for token in text)
        return (
            TOKEN_BYTES * tokens + LOG_PROB_BYTES * listed + CHARACTER_BYTES * self.text_characters
        )

    @property
    def was_truncated(self) -> bool:
        """True if a limit, not the policy, ended the turn."""
        return self.finish_reason not in (FinishReason.STOP, FinishReason.FORMAT_ERROR)

    @property
    def usage(self) -> "TokenUsage":
        """Token counts of the turn."""
        sampled = self.sampled
        return TokenUsage(
            prompt_tokens=len(self.token_ids()) - len(sampled.output_ids),
            cached_tokens=sampled.cached_tokens,
            sampled_tokens=len(sampled.output_ids),
            reasoning_tokens=self.reasoning_tokens,
        )

    def token_ids(self) -> list[int]:
        """Return all tokens up to the end of this turn."""
        ids: list[int] = []
        for node in self.path():
            ids += node.new_ids
            ids += node.sampled.output_ids
        return ids


@dataclass(frozen=True)
class TokenUsage:
    """Token counts of one turn."""

    prompt_tokens: int
    cached_tokens: int
    """Number of prompt tokens in the engine's cache."""
    sampled_tokens: int
    reasoning_tokens: int
    """Number of sampled tokens in analysis messages."""


def total_usage(nodes: Sequence[TurnNode], choices: int) -> TokenUsage:
    """Return the token counts of turns. Each prompt counts once.

    Args:
        nodes: turns of all prompts, one prompt after the other.
        choices: number of turns of each prompt.
    """
    usages = [node.usage for node in nodes]
    prompts = list(batched(usages, choices))
    return TokenUsage(
        prompt_tokens=sum(prompt_usages[0].prompt_tokens for prompt_usages in prompts),
        # The first turn to be sampled computes the tokens that the others find in the cache.
        cached_tokens=sum(
            min(usage.cached_tokens for usage in prompt_usages) for prompt_usages in prompts
        ),
        sampled_tokens=sum(usage.sampled_tokens for usage in usages),
        reasoning_tokens=sum(usage.reasoning_tokens for usage in usages),
    )


@dataclass(frozen=True)
class ForestPosition:
    """Position of a request in the forest."""

    parent: TurnNode | None
    """Turn to continue. None for a new sequence."""
    conversation: tuple[dict[str, Any], ...]
    """All messages, without instructions."""
    digests: tuple[MessageDigest, ...]
    """Digest of each conversation message."""
    keys: list[bytes]
    """Keys of all prefixes of instructions plus conversation."""
    new_messages: tuple[dict[str, Any], ...]
    """Messages to render: the messages after the parent, or all messages."""
    first_number: int
    """Number of the client's messages before ``new_messages``."""


@dataclass(frozen=True)
class TurnPrompt:
    """Prompt of a turn."""

    parent: TurnNode | None
    """Turn before ``new_ids``. None if ``new_ids`` is the whole prompt."""
    new_ids: list[int]
    open_calls: list[OpenCall]

    @cached_property
    def token_ids(self) -> list[int]:
        """All tokens of the prompt."""
        # Every turn stores only its own tokens, so that a long conversation needs linear memory.
        before = self.parent.token_ids() if self.parent is not None else []
        return before + self.new_ids

    @property
    def routes_start(self) -> int:
        """Index of the first token whose experts no earlier turn has returned."""
        if self.parent is None:
            return 0
        # The last token of the parent is first an input of this turn.
        return len(self.token_ids) - len(self.new_ids) - 1


def new_completion(
    request: TurnRequest,
    response_id: str,
    prompt: TurnPrompt,
    sampled: SampledTurn,
    turn: ReadTurn,
) -> TurnNode:
    """Make the node of a sampled completion. The arguments are those of ``new_node``."""
    assert request.prompt is not None
    ids = sampled.result.output_ids
    completed = request.prompt.extend(turn.answer.content, ids)
    return TurnNode(
        response_id=response_id,
        parent=prompt.parent,
        new_ids=prompt.new_ids,
        new_role="prompt" if prompt.parent is None else "user",
        sampled=sampled.result,
        finish_reason=sampled.reason,
        answer=turn.answer,
        format_error=None,
        messages=(),
        digests=(),
        digest=turn.digest,
        reasoning_tokens=0,
        key=raw_key(completed),
        open_calls=[],
        closing=turn.closing,
        dropped=turn.dropped,
        fingerprint=request.fingerprint,
        completed_bytes=len(completed.content),
        sampling_time=sampled.time,
    )


def new_node(
    request: TurnRequest,
    response_id: str,
    position: ForestPosition,
    prompt: TurnPrompt,
    sampled: SampledTurn,
    turn: ReadTurn,
) -> TurnNode:
    """Make the node of a sampled turn.

    Args:
        request: request of the client.
        response_id: name of the turn.
        position: position of the request in the forest.
        prompt: prompt of the turn.
        sampled: the sampled turn.
        turn: the parsed turn.
    """
    # A malformed turn ends the episode, whatever ended its sampling.
    finish_reason = sampled.reason
    if turn.format_error is not None:
        finish_reason = FinishReason.FORMAT_ERROR

    # A tool output has the channel of its call, so the call stores the channel.
    calls = [
        OpenCall(call.call_id, f"{FUNCTIONS}{call.name}", call.channel)
        for call in turn.answer.calls
    ]
    # A turn that was truncated before its first message is not rendered.
    message = turn.answer.as_message()
    is_empty = finish_reason is not FinishReason.STOP and message.keys() == {"role", "content"}
    answers = () if is_empty and not message["content"] else (message,)
    new_role = "prompt"
    # The role of the first new message is enough: tool outputs precede a message of the user.
    if prompt.parent is not None:
        new_role = "tool" if position.new_messages[0]["role"] == "tool" else "user"

    return TurnNode(
        response_id=response_id,
        parent=prompt.parent,
        new_ids=prompt.new_ids,
        new_role=new_role,
        sampled=sampled.result,
        finish_reason=finish_reason,
        answer=turn.answer,
        format_error=turn.format_error,
        messages=(*position.conversation, *answers),
        digests=(*position.digests, *([turn.digest] if answers else [])),
        digest=turn.digest,
        text_characters=text_size(position.conversation),
        reasoning_tokens=turn.reasoning_tokens,
        key=extended_key(position.keys[-1], turn.digest),
        open_calls=prompt.open_calls + calls,
        closing=turn.closing,
        dropped=turn.dropped,
        fingerprint=request.fingerprint,
        is_stored=request.is_stored,
        is_constrained=request.constraint is not None,
        sampling_time=sampled.time,
    )
