"""The dialect of ``/v1/completions``: text or token ids, continued without a chat format.

Special tokens are written as their names, in prompts and in the text of an answer. Therefore a
client can render the chat format itself.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from rl_loop.data.trajectory import FinishReason
from rl_loop.gateway.body import json_text
from rl_loop.gateway.errors import ApiError, invalid_request
from rl_loop.gateway.fields import COMPLETION_FIELDS
from rl_loop.gateway.node import TokenUsage, TurnNode
from rl_loop.gateway.parameters import (
    MAX_CHOICES,
    ChoicesParameters,
    parse_parameters,
)
from rl_loop.gateway.raw_prompt import RawPrompt
from rl_loop.gateway.request import TurnRequest
from rl_loop.gateway.token_log_probs import TokenLogProb
from rl_loop.gateway.turn_reader import AnswerDelta

ID_PREFIX = "cmpl-"
MAX_LOG_PROBS = 5
"""Maximum ``logprobs``, as in OpenAI's API."""
MAX_TOKENS = 16
"""Default of ``max_tokens``, as in OpenAI's API."""
MAX_TOKEN_ID = 2**31 - 1
"""Largest id that ``RawPrompt`` can hold. The vocabulary is checked later."""


def _no_bool(value: Any) -> Any:
    """Return a number. Raises ValueError for true and false, which pydantic takes for 1 and 0."""
    if isinstance(value, bool):
        raise ValueError("Input should be a valid integer")
    return value


class CompletionParameters(ChoicesParameters):
    """Parameters with an effect."""

    prompt: Any
    logprobs: Annotated[int | None, BeforeValidator(_no_bool)] = Field(None, ge=0, le=MAX_LOG_PROBS)
    max_tokens: int = Field(MAX_TOKENS, gt=0)
    return_token_ids: bool = False


class CompletionCall:
    """One request of the dialect."""

    id_prefix = ID_PREFIX

    def __init__(self, body: Any, model: str) -> None:
        """Parse a request.

        Args:
            body: JSON of the request.
            model: name of the policy.

        Raises:
            ApiError: the body is wrong. The message names the parameter.
        """
        parameters = parse_parameters(body, CompletionParameters, COMPLETION_FIELDS)
        self.stream = parameters.stream
        self.choices = parameters.n
        prompts = _prompts(parameters.prompt)
        if len(prompts) * self.choices > MAX_CHOICES:
            message = f"{len(prompts)} prompts with n={self.choices} are more than {MAX_CHOICES}"
            raise invalid_request(message, "prompt")
        self.requests = tuple(
            TurnRequest(
                prompt=prompt,
                max_new_tokens=parameters.max_tokens,
                temperature=parameters.temperature,
                top_p=parameters.top_p,
                seed=parameters.seed,
                stop=tuple(parameters.stop),
                log_probs=parameters.logprobs is not None,
                top_log_probs=parameters.logprobs or 0,
            )
            for prompt in prompts
        )
        self._log_probs = parameters.logprobs
        self._returns_ids = parameters.return_token_ids
        self._model = model
        self._include_usage = parameters.stream_options.include_usage

    def answer(self, nodes: Sequence[TurnNode], usage: TokenUsage) -> dict[str, Any]:
        """Return the body of a plain answer."""
        choices = []
        for index, node in enumerate(nodes):
            tokens = node.log_probs[0] if node.log_probs else ()
            choice = {
                "index": index,
                "text": node.answer.content,
                "logprobs": _log_probs(self._log_probs, tokens, 0),
                "finish_reason": _finish_reason(node),
            }
            if self._returns_ids:
                sampled = node.sampled.output_ids
                choice["token_ids"] = sampled
                choice["prompt_token_ids"] = node.token_ids()[: -len(sampled)]
            choices.append(choice)
        return {
            "id": nodes[0].response_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": self._model,
            "choices": choices,
            "usage": _usage(usage),
        }

    def events(self) -> "CompletionEvents":
        """Return the chunks of a streamed answer, before the first one."""
        return CompletionEvents(
            self._model, log_probs=self._log_probs, include_usage=self._include_usage
        )

    def end_events(
        self, events: "CompletionEvents", nodes: Sequence[TurnNode], usage: TokenUsage
    ) -> Iterator[dict[str, Any]]:
        """Yield the chunks behind the last delta."""
        for index, node in enumerate(nodes):
            ids = node.sampled.output_ids if self._returns_ids else None
            yield from events.end_choice(index, _finish_reason(node), ids)
        yield from events.end(_usage(usage))

    def to_json(self, value: dict[str, Any], *, in_pieces: bool = False) -> bytes:
        """Return an answer or a chunk as JSON, see ``json_text``."""
        return json_text(value, in_pieces=in_pieces).encode()


class CompletionEvents:
    """Chunks of one streamed answer."""

    ends_with_done = True
    """True if a stream ends with ``data: [DONE]``."""

    def __init__(self, model: str, *, log_probs: int | None, include_usage: bool) -> None:
        """Create a stream without chunks.

        Args:
            model: name of the policy.
            log_probs: number of likely tokens of each position. None for no log-probs.
            include_usage: whether the last chunk has token counts.
        """
        self._log_probs = log_probs
        self._include_usage = include_usage
        self._frame: dict[str, Any] = {
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        if include_usage:
            # Null in all chunks but the last one, as in OpenAI's streams.
            self._frame["usage"] = None
        self._characters: dict[int, int] = {}
        """Characters of each choice that were sent."""

    def begin(self, response_id: str) -> Iterator[dict[str, Any]]:
        """Begin the stream of a response. It has no chunk before the first delta."""
        self._frame["id"] = response_id
        return iter(())

    def add(self, choice: int, deltas: Sequence[AnswerDelta]) -> Iterator[dict[str, Any]]:
        """Yield the chunks of deltas of one choice."""
        for delta in deltas:
            if not delta.text and not delta.log_probs:
                continue
            begin = self._characters.get(choice, 0)
            self._characters[choice] = begin + len(delta.text)
            tokens = _log_probs(self._log_probs, delta.log_probs, begin)
            yield self._chunk({"index": choice, "text": delta.text, "logprobs": tokens})

    def end_choice(
        self, choice: int, finish_reason: str, ids: Sequence[int] | None
    ) -> Iterator[dict[str, Any]]:
        """Yield the last chunk of a choice, with its token ids if they were requested."""
        entry: dict[str, Any] = {"index": choice, "text": "", "logprobs": None}
        if ids is not None:
            entry["token_ids"] = ids
        yield self._chunk(entry | {"finish_reason": finish_reason})

    def end(self, usage: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the chunk after all choices, if there is one."""
        if self._include_usage:
            yield self._frame | {"choices": [], "usage": usage}

    def error_events(self, error: ApiError) -> Iterator[dict[str, Any]]:
        """Yield the chunk of an error, which OpenAI's clients raise."""
        yield error.body()

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        return self._frame | {"choices": [{"finish_reason": None} | choice]}


# ---- requests


def _prompts(value: Any) -> list[RawPrompt]:
    """Return the prompts of a request: a text, a list of token ids, or a list of either."""
    if isinstance(value, str) or _is_token_ids(value):
        return [_prompt(value, "prompt")]
    if not isinstance(value, list) or not value:
        raise invalid_request("expected text, token ids, or a list of either", "prompt")
    return [_prompt(entry, f"prompt[{number}]") for number, entry in enumerate(value)]


def _prompt(value: Any, where: str) -> RawPrompt:
    """Return a prompt of text or token ids. Raises ApiError."""
    if not isinstance(value, str) and not _is_token_ids(value):
        raise invalid_request("expected text or a list of token ids", where)
    if not value:
        raise invalid_request("is empty", where)
    if isinstance(value, str):
        return RawPrompt.of_text(value)
    wrong = next((token for token in value if not 0 <= token <= MAX_TOKEN_ID), None)
    if wrong is not None:
        raise invalid_request(f"{wrong} is not a token id", where)
    return RawPrompt.of_ids(value)


def _is_token_ids(value: Any) -> bool:
    # Booleans are integers in Python, but not in JSON.
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


# ---- responses


def _log_probs(
    likely: int | None, tokens: Sequence[TokenLogProb], begin: int
) -> dict[str, Any] | None:
    """Return the log-probs of tokens in the form of completions. None if not requested.

    Args:
        likely: number of likely tokens of each position. None for no log-probs.
        tokens: sampled tokens of the text.
        begin: characters before the first token.
    """
    if likely is None:
        return None
    offsets = []
    for token in tokens:
        offsets.append(begin)
        # A character that spans several tokens counts at its first byte.
        begin += sum(byte & 0xC0 != 0x80 for byte in token.token)
    top = [{_token_name(other): value for other, value in token.top} for token in tokens]
    return {
        "tokens": [_token_name(token.token) for token in tokens],
        "token_logprobs": [token.log_prob for token in tokens],
        "top_logprobs": top if likely else None,
        "text_offset": offsets,
    }


def _token_name(token: bytes) -> str:
    """Return a token as text. OpenAI writes a part of a character as ``bytes:\\xf0``."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _finish_reason(node: TurnNode) -> str:
    return "stop" if node.finish_reason is FinishReason.STOP else "length"


def _usage(usage: TokenUsage) -> dict[str, Any]:
    """Return the token counts of a response."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.sampled_tokens,
        "total_tokens": usage.prompt_tokens + usage.sampled_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
