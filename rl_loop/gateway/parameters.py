"""Reads the parameters of a request. Each one has an effect, is ignored, or is refused.

``rl_loop.gateway.fields`` declares all of them. An unknown parameter is an error. Otherwise an agent
would be trained, silently, with other settings than it requests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
)

from rl_loop.chat.codec import Effort
from rl_loop.chat.tools import Tool, check_names
from rl_loop.gateway.errors import ApiError, invalid_request, unsupported_error
from rl_loop.gateway.fields import FieldBehavior, RequestField, RequestFields, fields_by_name
from rl_loop.gateway.request import TurnConstraint

MAX_MESSAGES = 2048
"""Maximum messages, or items, of a request."""
MAX_CALLS = 1024
"""Maximum calls in the messages of a request."""
MAX_TOOLS = 256
"""Maximum functions of a request."""
MAX_TOOL_CHARACTERS = 32_768
"""Maximum characters in one function's description, including its schema."""
MAX_TOOLS_CHARACTERS = 1_048_576
"""Maximum characters in all functions' descriptions."""
MAX_TOP_LOG_PROBS = 20
"""Maximum ``top_logprobs``, as in OpenAI's API."""
MAX_CHOICES = 128
"""Maximum choices of a request, as in OpenAI's API."""
MAX_STOPS = 4
"""Maximum stop texts of a request, as in OpenAI's API."""

TEXT_PARTS = ("text", "input_text", "output_text")
"""Content types that are text."""

# GPT-OSS has three efforts and always reasons, so the API's lower efforts are mapped to "low".
EFFORTS: dict[str, Effort | None] = {
    "none": "low",
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
}
"""Reasoning efforts of the API, and their values in chat formats."""


class RequestParameters(BaseModel):
    """Parameters in all dialects of the API."""

    model_config = ConfigDict(extra="forbid")

    stream: bool = False
    """True to send the response as server-sent events."""
    # The ranges of OpenAI's API.
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = None


class StreamOptions(BaseModel):
    """Options of a stream."""

    include_usage: bool = False
    """True to send token counts in a last chunk without choices."""


StopText = Annotated[str, StringConstraints(min_length=1)]
"""One stop text."""


def _stop_list(stop: Any) -> Any:
    """Return one stop text as a list. An empty text requests nothing."""
    if isinstance(stop, str):
        return [stop] if stop else []
    return stop


class ChoicesParameters(RequestParameters):
    """Parameters of chat completions and completions."""

    n: int = Field(1, ge=1, le=MAX_CHOICES)
    stream_options: StreamOptions = StreamOptions()
    stop: Annotated[list[StopText], Field(max_length=MAX_STOPS), BeforeValidator(_stop_list)] = (
        Field(default_factory=list)
    )


def _count_calls(messages: Any) -> int:
    """Return the number of calls in messages of any form."""
    if not isinstance(messages, list):
        return 0
    lists = [message.get("tool_calls") for message in messages if isinstance(message, dict)]
    return sum(len(calls) for calls in lists if isinstance(calls, list))


def parse_parameters[Parameters: RequestParameters](
    body: Any, kind: type[Parameters], rows: RequestFields
) -> Parameters:
    """Return the parameters of a request that have an effect.

    Args:
        body: JSON of the request.
        kind: parameters of the dialect.
        rows: fields of the dialect.

    Raises:
        ApiError: a parameter is wrong or not supported. The message names it.
    """
    return validated(kind, _checked_parameters(body, rows))


def _checked_parameters(body: Any, rows: RequestFields) -> dict[str, Any]:
    """Return the parameters that have an effect, with any values. Raises ApiError."""
    if not isinstance(body, dict):
        raise ApiError(400, "invalid_request", "the body must be a JSON object")
    # Counted before any entry is read, because all later work grows with these numbers.
    for key, most in (("messages", MAX_MESSAGES), ("input", MAX_MESSAGES), ("tools", MAX_TOOLS)):
        value = body.get(key)
        if isinstance(value, list) and len(value) > most:
            raise invalid_request(f"has {len(value)} entries, more than {most}", key)
    calls = _count_calls(body.get("messages"))
    if calls > MAX_CALLS:
        raise invalid_request(f"have {calls} calls, more than {MAX_CALLS}", "messages")
    return _with_effect(body, fields_by_name(rows), "")


def _with_effect(
    given: dict[str, Any], fields: Mapping[str, RequestField], prefix: str
) -> dict[str, Any]:
    """Return the entries of an object that have an effect. ``prefix`` is the object's name."""
    parameters: dict[str, Any] = {}
    for key, value in given.items():
        name = f"{prefix}{key}"
        field = fields.get(name)
        # The API treats null like an absent parameter.
        if value is None or (field is not None and field.behavior is FieldBehavior.IGNORED):
            continue
        if field is None:
            raise unsupported_error(name, "unknown parameter")
        if field.behavior is FieldBehavior.REFUSED:
            # Compared with ==, so that 0.0 is as neutral as 0.
            if value not in field.neutral:
                raise unsupported_error(name, field.note)
            continue
        has_inner = any(other.startswith(f"{name}.") for other in fields)
        if has_inner and isinstance(value, dict):
            value = _with_effect(value, fields, f"{name}.")
        parameters[key] = value
    return parameters


def validated[Model: BaseModel](kind: type[Model], parameters: dict[str, Any]) -> Model:
    """Return ``parameters`` as ``kind``. Raises ApiError that names the first wrong parameter."""
    try:
        return kind.model_validate(parameters)
    except ValidationError as error:
        # The API's errors name one parameter.
        mistake = error.errors()[0]
        key = ".".join(str(part) for part in mistake["loc"])
        # Pydantic's type for a key that the model does not have.
        if mistake["type"] == "extra_forbidden":
            raise unsupported_error(key, "unknown parameter") from None
        raise invalid_request(mistake["msg"], key) from None


def parse_text(content: Any, where: str) -> str:
    """Return the text of a message's content, which is a string or a list of text parts.

    Args:
        content: the content.
        where: name of the content for messages.

    Raises:
        ApiError: the content has another form.
    """
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
    """Return ``value``. Raises ApiError if it is not a JSON object."""
    if not isinstance(value, dict):
        raise invalid_request(f"expected an object, not {type(value).__name__}", where)
    return value


def text_value(value: Any, where: str) -> str:
    """Return ``value``. Raises ApiError if it is not text."""
    if not isinstance(value, str):
        raise invalid_request(f"expected text, not {type(value).__name__}", where)
    return value


def parse_functions(tools: Sequence[Any], *, nested: str | None = None) -> list[Tool]:
    """Return the functions of the parameter ``tools``.

    Args:
        tools: JSON of the parameter.
        nested: key of an entry that contains the function. None if the entry does.

    Raises:
        ApiError: an entry is not a function, or its description is wrong.
    """
    functions = []
    for number, entry in enumerate(tools):
        where = f"tools[{number}]"
        tool = mapping(entry, where)
        # Hosted tools, such as web_search, run on OpenAI's servers. Nothing here could answer
        # their calls.
        if tool.get("type") != "function":
            raise invalid_request(f"{tool.get('type')!r} is not supported. Use functions", where)
        if nested is not None:
            where = f"{where}.{nested}"
            tool = mapping(tool.get(nested), where)
        functions.append(_parse_function(tool, where))
    return functions


def _parse_function(function: dict[str, Any], where: str) -> Tool:
    """Return the tool of a function's description. Raises ApiError if the description is wrong."""
    name = text_value(function.get("name"), f"{where}.name")
    description = function.get("description") or ""
    parameters = function.get("parameters")
    if parameters is not None:
        mapping(parameters, f"{where}.parameters")
    # repr is a cheap measure for any JSON value.
    size = len(repr((name, description, parameters)))
    if size > MAX_TOOL_CHARACTERS:
        raise invalid_request(f"has {size} characters, more than {MAX_TOOL_CHARACTERS}", where)
    try:
        # An empty schema describes a function without arguments.
        return Tool(name, text_value(description, f"{where}.description"), parameters or None)
    except ValueError as error:
        raise invalid_request(str(error), f"{where}.name") from None


@dataclass(frozen=True)
class OfferedTools:
    """Functions of a request."""

    tools: tuple[Tool, ...]
    """Functions that the prompt describes."""
    required: tuple[Tool, ...] = ()
    """Functions of which the turn must call one. Empty if the policy may answer."""


def select_tools(tools: Sequence[Tool], tool_choice: Any) -> OfferedTools:
    """Return the functions that a prompt describes, and those of which one must be called.

    With "none" the prompt describes no function, because sampling cannot forbid a call.

    Args:
        tools: tools of the request.
        tool_choice: choice of the request. A named function is ``{"name": NAME}``.

    Raises:
        ApiError: the choice is unknown, or the tools are too large or have wrong names.
    """
    size = sum(len(repr(tool)) for tool in tools)
    if size > MAX_TOOLS_CHARACTERS:
        raise invalid_request(f"have {size} characters, more than {MAX_TOOLS_CHARACTERS}", "tools")
    try:
        check_names(tools)
    except ValueError as error:
        raise invalid_request(str(error), "tools") from None

    if tool_choice in (None, "auto"):
        return OfferedTools(tuple(tools))
    if tool_choice == "none":
        return OfferedTools(())
    required = list(tools)
    if isinstance(tool_choice, dict):
        required = [tool for tool in tools if tool.name == tool_choice.get("name")]
    elif tool_choice != "required":
        raise invalid_request(f"{tool_choice!r} is unknown", "tool_choice")
    if not required:
        raise invalid_request("the request has no such function in tools", "tool_choice")
    return OfferedTools(tuple(tools), tuple(required))


def answer_schema(value: Any, where: str, *, nested: str | None = None) -> dict[str, Any] | None:
    """Return the JSON schema of the answer. None for any text.

    Args:
        value: value of the parameter for the format of the answer.
        where: name of the parameter.
        nested: key of ``value`` that contains the name and the schema. None if ``value`` does.

    Raises:
        ApiError: the type is unknown, or the schema is missing or too large.
    """
    if value is None:
        return None
    output = mapping(value, where)
    match output.get("type"):
        case "text":
            return None
        case "json_object":
            return {"type": "object"}
        case "json_schema" if nested is not None:
            return _parse_schema(
                mapping(output.get(nested), f"{where}.{nested}"), f"{where}.{nested}"
            )
        case "json_schema":
            return _parse_schema(output, where)
    raise invalid_request(f"the type {output.get('type')!r} is unknown", where)


def _parse_schema(output: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the JSON schema of a ``json_schema`` format. Raises ApiError if there is none."""
    text_value(output.get("name"), f"{where}.name")
    schema = mapping(output.get("schema"), f"{where}.schema")
    size = len(repr(schema))
    if size > MAX_TOOL_CHARACTERS:
        raise invalid_request(
            f"has {size} characters, more than {MAX_TOOL_CHARACTERS}", f"{where}.schema"
        )
    return schema


def build_constraint(
    tools: OfferedTools, schema: dict[str, Any] | None, parameter: str
) -> TurnConstraint | None:
    """Return the constraint of a request. None if its turn is free.

    Args:
        tools: functions of the request.
        schema: JSON schema of the answer. None for any text.
        parameter: parameter that contains the schema.
    """
    if tools.required:
        return TurnConstraint("tool_choice", None, tools.required)
    if schema is None:
        return None
    return TurnConstraint(parameter, schema, tools.tools)


def parse_effort(value: Any, where: str) -> Effort | None:
    """Return the requested reasoning effort. Raises ApiError if it is unknown."""
    if value is None:
        return None
    if not isinstance(value, str) or value not in EFFORTS:
        known = ", ".join(EFFORTS)
        raise invalid_request(f"{value!r} is not one of {known}", where)
    return EFFORTS[value]
