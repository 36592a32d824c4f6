"""The dialect of ``/v1/responses``.

A turn is a list of items: reasoning (analysis), messages (commentary without a recipient, final)
and function calls. A client either repeats all items, or names the previous response.
"""

import json
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel, Field

from rl_loop.chat.open_calls import with_outputs_in_order
from rl_loop.data.trajectory import FinishReason
from rl_loop.gateway.answer import AnswerText
from rl_loop.gateway.body import json_text
from rl_loop.gateway.errors import invalid_request, unsupported_error
from rl_loop.gateway.fields import RESPONSES_FIELDS
from rl_loop.gateway.node import TokenUsage, TurnNode
from rl_loop.gateway.parameters import (
    MAX_TOP_LOG_PROBS,
    RequestParameters,
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
from rl_loop.gateway.responses_stream import ID_PREFIX, ResponsesEvents, item_json
from rl_loop.gateway.turn_reader import text_of_item

INCLUDED_LOG_PROBS = "message.output_text.logprobs"
"""Entry of ``include`` that asks for log-probs. Other entries ask for nothing that exists here."""

NOT_REPEATED = {
    "include",
    "input",
    "reasoning",
    "seed",
    "stream",
    "text",
    "tool_choice",
}
"""Parameters that a response leaves out or repeats in another form."""


class ReasoningParameters(BaseModel):
    """Reasoning of the policy."""

    effort: Any = None


class TextParameters(BaseModel):
    """Answer of the policy."""

    format: Any = None


class ResponsesParameters(RequestParameters):
    """Parameters with an effect."""

    input: str | list[Any] = Field(min_length=1)
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[Any] = Field(default_factory=list)
    tool_choice: Any = None
    reasoning: ReasoningParameters = ReasoningParameters()
    max_output_tokens: int | None = Field(None, gt=0)
    text: TextParameters = TextParameters()
    include: list[str] = Field(default_factory=list)
    top_logprobs: int = Field(0, ge=0, le=MAX_TOP_LOG_PROBS)
    store: bool = True


class ResponsesCall:
    """One request of the dialect."""

    id_prefix = ID_PREFIX
    choices = 1
    """The API has one response for a request."""

    def __init__(self, body: Any, model: str) -> None:
        """Parse a request.

        Args:
            body: JSON of the request.
            model: name of the policy.

        Raises:
            ApiError: the body is wrong. The message names the parameter.
        """
        parameters = parse_parameters(body, ResponsesParameters, RESPONSES_FIELDS)
        self.stream = parameters.stream
        self.request = _turn_request(parameters)
        self.requests: tuple[TurnRequest, ...] = (self.request,)
        self._tool_choice = parameters.tool_choice or "auto"
        self._format = parameters.text.format or {"type": "text"}
        self._model = model
        self._created_at = int(time.time())
        # Instructions may have megabytes, so their JSON is written once, when the request is read.
        repeated = parameters.model_dump(exclude=NOT_REPEATED)
        self._repeated = json.dumps(repeated)[1:-1].encode()
        # Random, so that no content of an answer can equal it.
        self._mark = secrets.token_hex(16)
        """Key that an answer's JSON replaces by the repeated parameters."""

    def answer(self, nodes: Sequence[TurnNode], usage: TokenUsage) -> dict[str, Any]:
        """Return the body of a plain answer."""
        [node] = nodes
        is_complete = node.finish_reason is FinishReason.STOP
        status = "completed" if is_complete else "incomplete"
        # The policy either ends its turn or reaches a limit. The API reports a token limit this
        # way.
        details = None if is_complete else {"reason": "max_output_tokens"}
        return self._frame(node.response_id, status) | {
            "incomplete_details": details,
            "output": _items(node, status),
            "usage": _usage(usage),
        }

    def events(self) -> ResponsesEvents:
        """Return the events of a streamed answer, before the first one."""
        return ResponsesEvents(self._frame)

    def end_events(
        self, events: ResponsesEvents, nodes: Sequence[TurnNode], usage: TokenUsage
    ) -> Iterator[dict[str, Any]]:
        """Yield the events behind the last delta."""
        # The last event repeats all items, because clients may read only that event.
        yield from events.end(self.answer(nodes, usage))

    def to_json(self, value: dict[str, Any], *, in_pieces: bool = False) -> bytes:
        """Return an answer or an event as JSON, see ``json_text``."""
        text = json_text(value, in_pieces=in_pieces)
        return text.encode().replace(f'"{self._mark}": null'.encode(), self._repeated)

    def _frame(self, response_id: str, status: str) -> dict[str, Any]:
        """Return the fields of a response except its items."""
        return {
            self._mark: None,
            "id": response_id,
            "object": "response",
            "created_at": self._created_at,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "metadata": {},
            "model": self._model,
            "output": [],
            "parallel_tool_calls": False,
            "reasoning": {"effort": self.request.reasoning_effort, "summary": None},
            "text": {"format": self._format},
            "tool_choice": self._tool_choice,
            "truncation": "disabled",
            "usage": None,
        }


# ---- requests


def _turn_request(parameters: ResponsesParameters) -> TurnRequest:
    """Return the request for a turn. Raises ApiError."""
    functions = parse_functions(parameters.tools)
    tools = select_tools(functions, _tool_choice(parameters.tool_choice))
    schema = answer_schema(parameters.text.format, "text.format")

    log_probs = INCLUDED_LOG_PROBS in parameters.include
    if parameters.top_logprobs and not log_probs:
        raise invalid_request(f"needs {INCLUDED_LOG_PROBS!r} in include", "top_logprobs")
    return TurnRequest(
        messages=with_outputs_in_order(_messages(parameters.input), ()),
        tools=tools.tools,
        constraint=build_constraint(tools, schema, "text.format"),
        instructions=parameters.instructions,
        previous_id=parameters.previous_response_id,
        reasoning_effort=parse_effort(parameters.reasoning.effort, "reasoning.effort"),
        max_new_tokens=parameters.max_output_tokens,
        temperature=parameters.temperature,
        top_p=parameters.top_p,
        seed=parameters.seed,
        log_probs=log_probs,
        top_log_probs=parameters.top_logprobs,
        is_stored=parameters.store,
    )


def _tool_choice(choice: Any) -> Any:
    """Return the choice in the form of ``select_tools``. Raises ApiError if it is unknown."""
    if isinstance(choice, dict) and choice.get("type") != "function":
        raise unsupported_error("tool_choice", f"{choice.get('type')!r} is not a function")
    return choice


def _messages(items: str | list[Any]) -> tuple[dict[str, Any], ...]:
    """Return the messages for items. Raises ApiError if an item is wrong."""
    if isinstance(items, str):
        return ({"role": "user", "content": items},)

    messages: list[dict[str, Any]] = []
    for number, entry in enumerate(items):
        where = f"input[{number}]"
        item = mapping(entry, where)
        # The API allows messages without a type, but no other item.
        kind = item.get("type", "message")
        if kind == "function_call_output":
            messages.append(_tool_message(item, where))
        elif kind == "message" and item.get("role") != "assistant":
            messages.append(_other_message(item, where))
        elif kind in ("message", "reasoning", "function_call"):
            _add_to_turn(messages, item, kind, where)
        else:
            raise invalid_request(f"items of type {kind!r} are not supported", where)
    return tuple(messages)


def _tool_message(item: dict[str, Any], where: str) -> dict[str, Any]:
    call_id = text_value(item.get("call_id"), f"{where}.call_id")
    output = parse_text(item.get("output"), f"{where}.output")
    return {"role": "tool", "content": output, "tool_call_id": call_id}


def _other_message(item: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a message of a user, system or developer. Raises ApiError."""
    content = parse_text(item.get("content"), f"{where}.content")
    role = item.get("role")
    if role == "user":
        return {"role": "user", "content": content}
    if role in ("system", "developer"):
        # OpenAI's later name of the system role. Harmony reserves its system message for itself.
        return {"role": "developer", "content": content}
    raise invalid_request(
        f"{role!r} is not one of user, system, developer, assistant", f"{where}.role"
    )


def _add_to_turn(
    messages: list[dict[str, Any]], item: dict[str, Any], kind: str, where: str
) -> None:
    """Add an item of the assistant to its turn: the last one, or a new one."""
    if not messages or messages[-1]["role"] != "assistant":
        # None means that the turn has no message yet, in contrast to an empty message.
        messages.append({"role": "assistant", "content": None})
    turn = messages[-1]

    if kind == "function_call":
        function = {
            "name": text_value(item.get("name"), f"{where}.name"),
            "arguments": text_value(item.get("arguments"), f"{where}.arguments"),
        }
        call_id = text_value(item.get("call_id"), f"{where}.call_id")
        turn.setdefault("tool_calls", []).append({"id": call_id, "function": function})
    elif kind == "message":
        text = parse_text(item.get("content"), f"{where}.content")
        # Joined like ``PolicyAnswer.content``, so that the repeated turn has the digest of the sampled
        # one.
        turn["content"] = text if turn["content"] is None else f"{turn['content']}\n{text}"
    else:
        # Only conversations that are not stored are rendered with repeated reasoning.
        parts = item.get("content") or []
        texts = [part["text"] for part in parts if isinstance(part, dict) and "text" in part]
        if texts:
            thinking = [turn["thinking"]] if "thinking" in turn else []
            turn["thinking"] = "\n".join([*thinking, *texts])


# ---- responses


def _items(node: TurnNode, status: str) -> list[dict[str, Any]]:
    """Return the items of a turn. Only the last one of a truncated turn is incomplete."""
    log_probs = iter(node.log_probs)
    items = []
    for number, item in enumerate(node.answer.items):
        tokens = next(log_probs, ()) if isinstance(item, AnswerText) else ()
        is_last = number == len(node.answer.items) - 1
        of_item = status if is_last else "completed"
        text = text_of_item(item)
        items.append(item_json(node.response_id, number, item, text, tokens, of_item))
    return items


def _usage(usage: TokenUsage) -> dict[str, Any]:
    """Return the token counts of a response."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.sampled_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.sampled_tokens,
    }
