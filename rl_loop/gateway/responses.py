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

from rl_loop.chat.open_calls import with_answers_in_order
from rl_loop.data.trajectory import FinishReason
from rl_loop.gateway.errors import invalid_request
from rl_loop.gateway.fields import RESPONSES_FIELDS
from rl_loop.gateway.node import TokenUsage, TurnNode
from rl_loop.gateway.parameters import (
    RequestParameters,
    checked_parameters,
    effort_of,
    mapping,
    offered,
    text_of,
    text_value,
    tool_of,
    validated,
)
from rl_loop.gateway.request import TurnRequest

ID_PREFIX = "resp_"

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


class ResponsesParameters(RequestParameters):
    """Parameters with an effect."""

    input: str | list[Any] = Field(min_length=1)
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[Any] = Field(default_factory=list)
    tool_choice: Any = None
    reasoning: ReasoningParameters = ReasoningParameters()
    max_output_tokens: int | None = Field(None, gt=0)
    text: dict[str, Any] = Field(default_factory=dict)
    include: list[str] = Field(default_factory=list)
    store: bool = True


class ResponsesCall:
    """One request of the dialect."""

    id_prefix = ID_PREFIX
    choices = 1
    """The API has one response for a request."""
    ends_with_done = False
    """A stream ends with ``response.completed`` or ``response.incomplete``."""

    def __init__(self, body: Any, model: str) -> None:
        """Parse a request.

        Args:
            body: JSON of the request.
            model: name of the policy.

        Raises:
            ApiError: the body is wrong. The message names the parameter.
        """
        parameters = validated(ResponsesParameters, checked_parameters(body, RESPONSES_FIELDS))
        self.stream = parameters.stream
        self.request = _turn_request(parameters)
        self._tool_choice = parameters.tool_choice or "auto"
        self._model = model
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
        return self._frame(node, status) | {
            "incomplete_details": details,
            "output": _items(node, status),
            "usage": _usage(usage),
        }

    def events(self, nodes: Sequence[TurnNode], usage: TokenUsage) -> Iterator[dict[str, Any]]:
        """Yield the events of a streamed answer."""
        [node] = nodes
        for number, event in enumerate(self._events(node, usage)):
            yield event | {"sequence_number": number}

    def _events(self, node: TurnNode, usage: TokenUsage) -> Iterator[dict[str, Any]]:
        # The OpenAI SDK rejects a stream that does not begin with ``response.created``.
        begun = self._frame(node, "in_progress")
        yield {"type": "response.created", "response": begun}
        yield {"type": "response.in_progress", "response": begun}

        answer = self.answer([node], usage)
        # The last event repeats all items, because clients may read only that event.
        for index, item in enumerate(answer["output"]):
            yield from _item_events(item, index)
        yield {"type": f"response.{answer['status']}", "response": answer}

    def to_json(self, value: dict[str, Any]) -> bytes:
        """Return an answer or an event as JSON."""
        return json.dumps(value).encode().replace(f'"{self._mark}": null'.encode(), self._repeated)

    def _frame(self, node: TurnNode, status: str) -> dict[str, Any]:
        """Return the fields of a response except its items."""
        return {
            self._mark: None,
            "id": node.response_id,
            "object": "response",
            "created_at": int(time.time()),
            "status": status,
            "error": None,
            "incomplete_details": None,
            "metadata": {},
            "model": self._model,
            "output": [],
            "parallel_tool_calls": False,
            "reasoning": {"effort": self.request.reasoning_effort, "summary": None},
            "text": {"format": {"type": "text"}},
            "tool_choice": self._tool_choice,
            "truncation": "disabled",
            "usage": None,
        }


# ---- requests


def _turn_request(parameters: ResponsesParameters) -> TurnRequest:
    tools = []
    for number, entry in enumerate(parameters.tools):
        where = f"tools[{number}]"
        tool = mapping(entry, where)
        # Hosted tools, such as web_search, run on OpenAI's servers. Nothing here could answer
        # their calls.
        if tool.get("type") != "function":
            raise invalid_request(f"{tool.get('type')!r} is not supported. Use functions", where)
        tools.append(tool_of(tool, where))

    return TurnRequest(
        messages=with_answers_in_order(_messages(parameters.input), ()),
        tools=offered(tools, parameters.tool_choice),
        instructions=parameters.instructions,
        previous_id=parameters.previous_response_id,
        reasoning_effort=effort_of(parameters.reasoning.effort, "reasoning.effort"),
        max_new_tokens=parameters.max_output_tokens,
        temperature=parameters.temperature,
        top_p=parameters.top_p,
        seed=parameters.seed,
        log_probs=INCLUDED_LOG_PROBS in parameters.include,
        is_stored=parameters.store,
    )


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
    output = text_of(item.get("output"), f"{where}.output")
    return {"role": "tool", "content": output, "tool_call_id": call_id}


def _other_message(item: dict[str, Any], where: str) -> dict[str, Any]:
    content = text_of(item.get("content"), f"{where}.content")
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
    # Calls come last in a turn.
    is_open = bool(messages) and messages[-1]["role"] == "assistant"
    if not is_open or ("tool_calls" in messages[-1] and kind != "function_call"):
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
        text = text_of(item.get("content"), f"{where}.content")
        # Joined like ``PolicyAnswer.content``, so that the repeated turn has the digest of the sampled
        # one.
        turn["content"] = text if turn["content"] is None else f"{turn['content']}\n{text}"
    else:
        # Only conversations that are not stored are rendered with repeated reasoning.
        parts = item.get("content") or []
        texts = [part["text"] for part in parts if isinstance(part, dict) and "text" in part]
        if texts:
            turn["thinking"] = "\n".join(texts)


# ---- responses


def _items(node: TurnNode, status: str) -> list[dict[str, Any]]:
    """Return the items of a turn."""
    name = node.response_id.removeprefix(ID_PREFIX)
    answer = node.answer
    items: list[dict[str, Any]] = []
    # The order in which ``_add_to_turn`` joins repeated items to one turn: calls come last.
    if answer.reasoning:
        thoughts = {"type": "reasoning_text", "text": answer.reasoning}
        items.append(
            {"type": "reasoning", "id": f"rs_{name}", "summary": [], "content": [thoughts]}
        )

    for number, text in enumerate(answer.texts):
        tokens = node.log_probs[number] if node.log_probs else ()
        log_probs = [token.to_json() for token in tokens]
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": log_probs}
        items.append(
            {
                "type": "message",
                "id": f"msg_{name}_{number}",
                "role": "assistant",
                "status": status,
                "content": [part],
            }
        )

    for number, call in enumerate(answer.calls):
        items.append(
            {
                "type": "function_call",
                "id": f"fc_{name}_{number}",
                # Tool outputs refer to this id, not to the id of the item.
                "call_id": call.call_id,
                "name": call.name,
                "arguments": call.arguments,
                "status": status,
            }
        )
    return items


def _item_events(item: dict[str, Any], index: int) -> Iterator[dict[str, Any]]:
    """Yield the events of one item: it begins empty, is filled at once, and ends."""
    place = {"output_index": index, "item_id": item["id"]}
    empty: dict[str, Any] = {"content": []}
    if item["type"] == "function_call":
        empty = {"arguments": ""}
    begun = item | empty
    # Reasoning items have no status.
    if "status" in item:
        begun["status"] = "in_progress"
    yield {"type": "response.output_item.added", "output_index": index, "item": begun}

    if item["type"] == "function_call":
        arguments = item["arguments"]
        kind = "response.function_call_arguments"
        yield place | {"type": f"{kind}.delta", "delta": arguments}
        yield place | {"type": f"{kind}.done", "arguments": arguments, "name": item["name"]}
    else:
        # ``_items`` makes one part per message, and one for all reasoning.
        [part] = item["content"]
        yield from _part_events(part, place | {"content_index": 0})

    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _part_events(part: dict[str, Any], place: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the events of a message's text, or of reasoning."""
    text = part["text"]
    kind = f"response.{part['type']}"
    # Only message texts have log-probs, reasoning has none.
    extra: dict[str, Any] = {}
    empty: dict[str, Any] = {"text": ""}
    if "logprobs" in part:
        extra = {"logprobs": part["logprobs"]}
        empty["logprobs"] = []

    yield place | {"type": "response.content_part.added", "part": part | empty}
    yield place | extra | {"type": f"{kind}.delta", "delta": text}
    yield place | extra | {"type": f"{kind}.done", "text": text}
    yield place | {"type": "response.content_part.done", "part": part}


def _usage(usage: TokenUsage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.sampled_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.sampled_tokens,
    }
