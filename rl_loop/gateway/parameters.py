"""Reads the parameters of a request. Each one counts, changes nothing, or is refused.

A parameter that would change what is sampled, and that the gateway does not know, is an error: an
agent that is trained with other settings than it asks for would be a silent difference."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rl_loop.chat.codec import Effort
from rl_loop.chat.tools import Tool, check_names
from rl_loop.gateway.errors import ApiError, invalid_request

MAX_MESSAGES = 2048
"""Messages, or items, of a request."""
MAX_CALLS = 1024
"""Calls in the messages of a request."""
MAX_TOOLS = 256
"""Functions of a request."""
MAX_TOOL_CHARACTERS = 32_768
"""Characters of the description of one function, its schema included."""
MAX_TOOLS_CHARACTERS = 1_048_576
"""Characters of the descriptions of all functions."""

TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of content that are text."""

EFFORTS: dict[str, Effort | None] = {
    "none": "low",
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
}
"""What a client may ask for, as chat formats know it."""


class SamplingParameters(BaseModel):
    """What both dialects of the API have."""

    model_config = ConfigDict(extra="forbid")

    model: str = ""
    """Not looked at: there is one policy."""
    stream: bool = False
    """Whether the answer comes as server-sent events."""
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = None


def _count_calls(messages: Any) -> int:
    """Return the number of calls in messages, whatever else they are."""
    if not isinstance(messages, list):
        return 0
    lists = [message.get("tool_calls") for message in messages if isinstance(message, dict)]
    return sum(len(calls) for calls in lists if isinstance(calls, list))


def checked_parameters(
    body: Any,
    ignored: frozenset[str],
    neutral: Mapping[str, Sequence[Any]],
) -> dict[str, Any]:
    """Return the parameters of a request that count.

    Args:
        body: the request's JSON.
        ignored: parameters that change nothing of the answer.
        neutral: parameters that are not supported, and the values that ask for nothing.

    Raises:
        ApiError: naming a parameter that is not supported.
    """
    if not isinstance(body, dict):
        raise ApiError(400, "invalid_request", "the body must be a JSON object")
    for key, most in (("messages", MAX_MESSAGES), ("input", MAX_MESSAGES), ("tools", MAX_TOOLS)):
        value = body.get(key)
        if isinstance(value, list) and len(value) > most:
            raise invalid_request(f"has {len(value)} entries, more than {most}", key)
    calls = _count_calls(body.get("messages"))
    if calls > MAX_CALLS:
        raise invalid_request(f"have {calls} calls, more than {MAX_CALLS}", "messages")

    parameters: dict[str, Any] = {}
    for key, value in body.items():
        if value is None or key in ignored:
            continue
        if key not in neutral:
            parameters[key] = value
        elif value not in neutral[key]:
            raise ApiError(
                400, "unsupported_parameter", f"{key} is not supported here", parameter=key
            )
    return parameters


def validated[Model: BaseModel](kind: type[Model], parameters: dict[str, Any]) -> Model:
    """Return ``parameters`` as ``kind``. Raises ApiError naming the first that is wrong."""
    try:
        return kind.model_validate(parameters)
    except ValidationError as error:
        mistake = error.errors()[0]
        key = ".".join(str(part) for part in mistake["loc"])
        if mistake["type"] == "extra_forbidden":
            raise ApiError(
                400, "unsupported_parameter", f"{key} is not supported here", parameter=key
            ) from None
        raise invalid_request(mistake["msg"], key) from None


def text_of(content: Any, where: str) -> str:
    """Return the text of a message's content: a string, or parts that are text.

    ``where`` names it. Raises ApiError for anything else."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid_request(f"expected text, not {type(content).__name__}", where)

    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in TEXT_PARTS:
            raise invalid_request(
                f"is of type {kind!r}; only text is supported", f"{where}[{number}]"
            )
        text = part.get("text")
        if not isinstance(text, str):
            raise invalid_request("has no text", f"{where}[{number}]")
        texts.append(text)
    return "".join(texts)


def mapping(value: Any, where: str) -> dict[str, Any]:
    """Return ``value`` if it is a JSON object. Raises ApiError."""
    if not isinstance(value, dict):
        raise invalid_request(f"expected an object, not {type(value).__name__}", where)
    return value


def text_value(value: Any, where: str) -> str:
    """Return ``value`` if it is text. Raises ApiError."""
    if not isinstance(value, str):
        raise invalid_request(f"expected text, not {type(value).__name__}", where)
    return value


def tool_of(function: dict[str, Any], where: str) -> Tool:
    """Read the description of a function. Raises ApiError."""
    name = text_value(function.get("name"), f"{where}.name")
    description = function.get("description") or ""
    parameters = function.get("parameters")
    if parameters is not None:
        mapping(parameters, f"{where}.parameters")
    size = len(repr((name, description, parameters)))
    if size > MAX_TOOL_CHARACTERS:
        raise invalid_request(f"has {size} characters, more than {MAX_TOOL_CHARACTERS}", where)
    try:
        return Tool(name, text_value(description, f"{where}.description"), parameters or None)
    except ValueError as error:
        raise invalid_request(str(error), f"{where}.name") from None


def offered(tools: Sequence[Tool], tool_choice: Any) -> tuple[Tool, ...]:
    """Return the tools that a prompt describes.

    Nothing forces a policy to call, or not to: with "none" it is not told of any tool. Raises
    ApiError for a choice that cannot be kept."""
    size = sum(len(repr(tool)) for tool in tools)
    if size > MAX_TOOLS_CHARACTERS:
        raise invalid_request(f"have {size} characters, more than {MAX_TOOLS_CHARACTERS}", "tools")
    try:
        check_names(tools)
    except ValueError as error:
        raise invalid_request(str(error), "tools") from None

    if tool_choice in (None, "auto"):
        return tuple(tools)
    if tool_choice == "none":
        return ()
    raise ApiError(
        400,
        "unsupported_parameter",
        f"tool_choice {tool_choice!r} is not supported: what is sampled is not constrained; "
        'use "auto" or "none"',
        parameter="tool_choice",
    )


def effort_of(value: Any, where: str) -> Effort | None:
    """Return the reasoning effort that a client asks for. Raises ApiError."""
    if value is None:
        return None
    if not isinstance(value, str) or value not in EFFORTS:
        known = ", ".join(EFFORTS)
        raise invalid_request(f"{value!r} is none of {known}", where)
    return EFFORTS[value]
