"""The dialect of ``/v1/chat/completions``.

| Harmony | chat completions |
|---|---|
| developer message | ``system`` and ``developer`` |
| ``namespace functions`` | ``tools`` |
| analysis | ``reasoning`` |
| commentary without a recipient, final | ``content`` |
| commentary to a function | ``tool_calls`` |
| ``<|call|>``, ``<|return|>``, a limit | ``finish_reason`` tool_calls, stop, length |
"""

import time
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import Field

from rl_loop.chat.open_calls import with_outputs_in_order
from rl_loop.data.trajectory import FinishReason
from rl_loop.gateway.answer import FunctionCall
from rl_loop.gateway.body import json_text
from rl_loop.gateway.chat_stream import ChatEvents
from rl_loop.gateway.errors import invalid_request, unsupported_error
from rl_loop.gateway.fields import CHAT_FIELDS
from rl_loop.gateway.node import TokenUsage, TurnNode
from rl_loop.gateway.parameters import (
    MAX_TOP_LOG_PROBS,
    ChoicesParameters,
    answer_schema,
    build_constraint,
    mapping,
    parse_effort,
    parse_functions,
    parse_parameters,
    parse_text,
    select_tools,
    text_value,
)
from rl_loop.gateway.request import TurnRequest

ID_PREFIX = "chatcmpl-"


class ChatParameters(ChoicesParameters):
    """Parameters with an effect."""

    messages: list[Any] = Field(min_length=1)
    tools: list[Any] = Field(default_factory=list)
    tool_choice: Any = None
    response_format: Any = None
    reasoning_effort: Any = None
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_TOP_LOG_PROBS)
    max_tokens: int | None = Field(None, gt=0)
    max_completion_tokens: int | None = Field(None, gt=0)


class ChatCall:
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
        parameters = parse_parameters(body, ChatParameters, CHAT_FIELDS)
        self.stream = parameters.stream
        self.request = _turn_request(parameters)
        self.requests: tuple[TurnRequest, ...] = (self.request,)
        self.choices = parameters.n
        self._model = model
        # Streams have usage only on request, in a last chunk without choices (``stream_options``).
        self._include_usage = parameters.stream_options.include_usage

    def answer(self, nodes: Sequence[TurnNode], usage: TokenUsage) -> dict[str, Any]:
        """Return the body of a plain answer."""
        choices = [
            {
                "index": index,
                "message": _build_message(node),
                "logprobs": self._log_probs(node),
                "finish_reason": _finish_reason(node),
            }
            for index, node in enumerate(nodes)
        ]
        return {
            "id": nodes[0].response_id,
            "object": "chat.completion",
            "created": int(time.time()),
            "model": self._model,
            "choices": choices,
            "usage": _usage(usage),
        }

    def events(self) -> ChatEvents:
        """Return the chunks of a streamed answer, before the first one."""
        return ChatEvents(
            self._model, log_probs=self.request.log_probs, include_usage=self._include_usage
        )

    def end_events(
        self, events: ChatEvents, nodes: Sequence[TurnNode], usage: TokenUsage
    ) -> Iterator[dict[str, Any]]:
        """Yield the chunks behind the last delta."""
        for index, node in enumerate(nodes):
            yield from events.end_choice(index, _finish_reason(node))
        yield from events.end(_usage(usage))

    def _log_probs(self, node: TurnNode) -> dict[str, Any] | None:
        """Return the log-probs of the content's tokens. None if not requested."""
        if not self.request.log_probs:
            return None
        texts = len(node.answer.texts)
        tokens = [token.to_json() for text in node.log_probs[:texts] for token in text]
        return {"content": tokens, "refusal": None}

    def to_json(self, value: dict[str, Any], *, in_pieces: bool = False) -> bytes:
        """Return an answer or a chunk as JSON, see ``json_text``."""
        return json_text(value, in_pieces=in_pieces).encode()


# ---- requests


def _turn_request(parameters: ChatParameters) -> TurnRequest:
    """Return the request for a turn. Raises ApiError."""
    functions = parse_functions(parameters.tools, nested="function")
    messages = []
    for number, entry in enumerate(parameters.messages):
        where = f"messages[{number}]"
        messages.append(_message(mapping(entry, where), where))

    if parameters.top_logprobs and not parameters.logprobs:
        raise invalid_request("needs logprobs: true", "top_logprobs")
    tools = select_tools(functions, _tool_choice(parameters.tool_choice))
    schema = answer_schema(parameters.response_format, "response_format", nested="json_schema")
    # ``max_tokens`` is the deprecated name of ``max_completion_tokens``. If both are set, both
    # hold.
    limits = [parameters.max_tokens, parameters.max_completion_tokens]
    return TurnRequest(
        messages=with_outputs_in_order(messages, ()),
        tools=tools.tools,
        constraint=build_constraint(tools, schema, "response_format"),
        reasoning_effort=parse_effort(parameters.reasoning_effort, "reasoning_effort"),
        max_new_tokens=min((limit for limit in limits if limit is not None), default=None),
        temperature=parameters.temperature,
        top_p=parameters.top_p,
        seed=parameters.seed,
        stop=tuple(parameters.stop),
        log_probs=parameters.logprobs,
        top_log_probs=parameters.top_logprobs,
    )


def _tool_choice(choice: Any) -> Any:
    """Return the choice in the form of ``select_tools``. Raises ApiError if it is unknown."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") != "function":
        raise unsupported_error("tool_choice", f"{choice.get('type')!r} is not a function")
    return mapping(choice.get("function"), "tool_choice.function")


def _message(entry: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a message in the format of ``rl_loop.harmony.conversation``. Raises ApiError."""
    role = entry.get("role")
    content = f"{where}.content"
    match role:
        case "system" | "developer":
            return {"role": "developer", "content": parse_text(entry.get("content"), content)}
        case "user":
            message = {"role": "user", "content": parse_text(entry.get("content"), content)}
            if entry.get("name"):
                message["name"] = text_value(entry["name"], f"{where}.name")
            return message
        case "tool":
            call_id = text_value(entry.get("tool_call_id"), f"{where}.tool_call_id")
            text = parse_text(entry.get("content"), content)
            return {"role": "tool", "content": text, "tool_call_id": call_id}
        case "assistant":
            return _assistant_message(entry, where)
    raise invalid_request(
        f"{role!r} is not one of system, developer, user, assistant, tool", f"{where}.role"
    )


def _assistant_message(entry: dict[str, Any], where: str) -> dict[str, Any]:
    """Return an earlier turn of the policy as a message. Raises ApiError."""
    # No chat format can render these keys. Leaving them out would silently change the conversation.
    for key in ("audio", "function_call", "refusal"):
        if entry.get(key) is not None:
            raise unsupported_error(f"{where}.{key}", "no chat format can render it")

    message: dict[str, Any] = {"role": "assistant", "content": ""}
    # Clients repeat a turn that has only calls with null, as ``_content`` returns it.
    if entry.get("content") is not None:
        message["content"] = parse_text(entry["content"], f"{where}.content")
    # Names differ among servers. Only conversations that are not stored are rendered with it.
    reasoning = entry.get("reasoning") or entry.get("reasoning_content")
    if isinstance(reasoning, str):
        message["thinking"] = reasoning

    calls = entry.get("tool_calls") or []
    if not isinstance(calls, list):
        raise invalid_request("expected a list", f"{where}.tool_calls")
    if calls:
        message["tool_calls"] = [
            _stated_call(mapping(call, f"{where}.tool_calls[{number}]"), where, number)
            for number, call in enumerate(calls)
        ]
    return message


def _stated_call(call: dict[str, Any], where: str, number: int) -> dict[str, Any]:
    """Return a tool call of an earlier turn. Raises ApiError."""
    path = f"{where}.tool_calls[{number}]"
    function = mapping(call.get("function"), f"{path}.function")
    return {
        "id": text_value(call.get("id"), f"{path}.id"),
        "function": {
            "name": text_value(function.get("name"), f"{path}.function.name"),
            "arguments": text_value(function.get("arguments"), f"{path}.function.arguments"),
        },
    }


# ---- responses


def _build_message(node: TurnNode) -> dict[str, Any]:
    """Return the message of a response."""
    message: dict[str, Any] = {"role": "assistant", "content": _content(node), "refusal": None}
    if node.answer.reasoning:
        message["reasoning"] = node.answer.reasoning
    if node.answer.calls:
        message["tool_calls"] = [_tool_call(call) for call in node.answer.calls]
    return message


def _content(node: TurnNode) -> str | None:
    """Return the text of a response."""
    # A call without a comment has no content, as in OpenAI's answers.
    if node.answer.calls and not node.answer.texts:
        return None
    return node.answer.content


def _tool_call(call: FunctionCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.call_id, "type": "function", "function": function}


def _finish_reason(node: TurnNode) -> str:
    """Return the finish reason in OpenAI's terms."""
    # First the limit: a truncated turn may have calls, and the last one may be incomplete.
    if node.finish_reason is not FinishReason.STOP:
        return "length"
    return "tool_calls" if node.answer.calls else "stop"


def _usage(usage: TokenUsage) -> dict[str, Any]:
    """Return the token counts of a response."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.sampled_tokens,
        "total_tokens": usage.prompt_tokens + usage.sampled_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }
