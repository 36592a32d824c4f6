"""Fields of requests: which ones work, are ignored or are refused.

Requests are checked against these rows. The tables of ``docs/reference/openai_api.md`` and the
tests of all fields come from them, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rl_loop.gateway.errors import ErrorCode


class FieldBehavior(StrEnum):
    """Behavior of the gateway for a field."""

    WORKS = "works"
    IGNORED = "ignored"
    """The field does not change sampling, or OpenAI's API defines it as a hint."""
    REFUSED = "refused"
    """An error, because the request would otherwise get another answer than it asks for."""


@dataclass(frozen=True)
class RequestField:
    """One row: a field, or further values of a field."""

    name: str
    """Key of the request. A dot separates the keys of nested objects."""
    behavior: FieldBehavior
    example: Any
    """Value with this behavior."""
    note: str = ""
    """Reason or condition."""
    neutral: tuple[Any, ...] = ()
    """Values of a refused field that request nothing, and are accepted."""
    wrong: Any = None
    """Value of a working field that is refused. None if there is none."""
    code: ErrorCode = "unsupported_parameter"
    """Code of the error for a refused field."""
    is_constraint: bool = False
    """True if the value constrains the turn."""
    param: str = ""
    """Parameter in the error. Default: the name."""

    @property
    def error_param(self) -> str:
        """Parameter in the error for a refused field."""
        return self.param or self.name


type RequestFields = Sequence[RequestField]
"""Rows of one dialect. The first row of a name decides about the field, later rows are further
values."""


def fields_by_name(rows: RequestFields) -> dict[str, RequestField]:
    """Return the row that decides about each field."""
    fields: dict[str, RequestField] = {}
    for row in rows:
        # Later rows of a name only document and test further values, such as other refused tool
        # choices.
        fields.setdefault(row.name, row)
    return fields


def _works(name: str, example: Any, note: str = "", wrong: Any = None) -> RequestField:
    return RequestField(name, FieldBehavior.WORKS, example, note, wrong=wrong)


def _constrains(name: str, example: Any, note: str) -> RequestField:
    """Return the row of a value that constrains the turn."""
    return RequestField(name, FieldBehavior.WORKS, example, note, is_constraint=True)


def _ignored(name: str, example: Any, note: str) -> RequestField:
    return RequestField(name, FieldBehavior.IGNORED, example, note)


def _refused(name: str, example: Any, note: str, *neutral: Any) -> RequestField:
    return RequestField(name, FieldBehavior.REFUSED, example, note, neutral)


def _refused_part(name: str, example: Any, param: str, note: str) -> RequestField:
    """Return the row of a message, item or tool of a kind that the policy cannot have."""
    return RequestField(
        name, FieldBehavior.REFUSED, example, note, code="invalid_request", param=param
    )


# ---- examples of fields that both dialects have

_SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
_GRAMMAR = "[constrained](../gateway.md#constrained-turns)"
_NO_HOSTED_TOOLS = "hosted tools are not available"
_TEXT_ONLY = "only text is supported"
_OTHER_MEANING = "a label for OpenAI's dashboards"
_CACHE = "the prefix cache is automatic"
_TRAINING = "ignored in training, which samples at the run's value"
_PARALLEL = "a hint: the policy decides on the number of calls"
_FIXED_MODEL = "there is one policy"


def _user(part: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [part]}]


def _shared_fields(tool: dict[str, Any], named: dict[str, Any]) -> tuple[RequestField, ...]:
    """Return the fields of both APIs. ``tool`` is a function, ``named`` a ``tool_choice`` of it."""
    return (
        _ignored("model", "gpt-4o", _FIXED_MODEL),
        _works("stream", True, "tokens are sent as they are sampled", wrong="maybe"),
        _works("temperature", 0.5, _TRAINING, wrong=3),
        _works("top_p", 0.5, _TRAINING, wrong=0),
        _works("tools", [tool], "functions only", wrong="add"),
        _refused_part("tools", [{"type": "web_search"}], "tools[0]", _NO_HOSTED_TOOLS),
        _works("tool_choice", "none", "`auto`, or `none`, which hides the tools", wrong="maybe"),
        _constrains("tool_choice", "required", "one call; " + _GRAMMAR),
        _constrains("tool_choice", named, _GRAMMAR),
        _refused("tool_choice", {"type": "allowed_tools"}, "send only these tools"),
        _ignored("metadata", {"a": "b"}, _OTHER_MEANING),
        _ignored("parallel_tool_calls", False, _PARALLEL),
        _ignored("prompt_cache_key", "key", _CACHE),
        _ignored("prompt_cache_options", {"ttl": "30m"}, _CACHE),
        _ignored("prompt_cache_retention", "24h", _CACHE),
        _ignored("safety_identifier", "someone", _OTHER_MEANING),
        _ignored("service_tier", "flex", "there is one tier"),
        _ignored("user", "someone", _OTHER_MEANING),
        _refused("moderation", {"model": "omni-moderation-latest"}, "there is no moderation"),
    )


# ---- chat completions

CHAT_FIELDS: RequestFields = (
    _works("messages", [{"role": "user", "content": "Hi"}], wrong=[]),
    _refused_part(
        "messages",
        _user({"type": "image_url", "image_url": {"url": "data:"}}),
        "messages[0].content[0]",
        _TEXT_ONLY,
    ),
    _refused_part(
        "messages",
        _user({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}),
        "messages[0].content[0]",
        _TEXT_ONLY,
    ),
    _refused_part(
        "messages",
        _user({"type": "file", "file": {"file_id": "f"}}),
        "messages[0].content[0]",
        _TEXT_ONLY,
    ),
    *_shared_fields(
        {"type": "function", "function": {"name": "add", "parameters": _SCHEMA}},
        {"type": "function", "function": {"name": "add"}},
    ),
    _works("max_completion_tokens", 1, wrong=0),
    _works("max_tokens", 1, "earlier name of `max_completion_tokens`", wrong=0),
    _works("reasoning_effort", "high", "Harmony only; `none` and `minimal` mean `low`", wrong="x"),
    _works("seed", 7, "of sampling, together with session and turn", wrong="x"),
    _works("stream_options", {}, wrong="x"),
    _works("stream_options.include_usage", True, wrong="x"),
    _ignored("stream_options.include_obfuscation", True, "streams have no padding"),
    _ignored("prediction", {"type": "content", "content": "x"}, "a hint for speed"),
    _ignored("store", True, "conversations are kept by key"),
    _ignored("verbosity", "low", "a hint: the policy decides on the length"),
    _works("stop", ["ll", "x"], "up to 4 texts; not in reasoning and calls", wrong=["x"] * 5),
    _works("logprobs", True, "of the content, at the sampling temperature", wrong="x"),
    _works("top_logprobs", 2, "up to 20, with `logprobs`", wrong=21),
    _works("n", 2, "each choice is a turn, and in training a branch", wrong=129),
    _works("response_format", {"type": "text"}, wrong={"type": "xml"}),
    _constrains("response_format", {"type": "json_object"}, _GRAMMAR),
    _constrains(
        "response_format",
        {"type": "json_schema", "json_schema": {"name": "x", "schema": _SCHEMA}},
        _GRAMMAR,
    ),
    _refused("frequency_penalty", 0.5, "not implemented", 0),
    _refused("presence_penalty", 0.5, "not implemented", 0),
    _refused("logit_bias", {"50256": -100}, "not implemented", {}),
    _refused("audio", {"voice": "alloy", "format": "wav"}, _TEXT_ONLY),
    _refused("modalities", ["text", "audio"], _TEXT_ONLY, ["text"]),
    _refused("functions", [{"name": "add"}], "use `tools`", []),
    _refused("function_call", {"name": "add"}, "use `tools`", "auto", "none"),
    _refused("web_search_options", {}, _NO_HOSTED_TOOLS),
)
"""Fields of ``/v1/chat/completions``."""


# ---- completions

COMPLETION_FIELDS: RequestFields = (
    _works("prompt", "Hi", "text, token ids, or a list of either", wrong=[]),
    _ignored("model", "gpt-3.5-turbo-instruct", _FIXED_MODEL),
    _works("stream", True, "tokens are sent as they are sampled", wrong="maybe"),
    _works("stream_options", {}, wrong="x"),
    _works("stream_options.include_usage", True, wrong="x"),
    _ignored("stream_options.include_obfuscation", True, "streams have no padding"),
    _works("temperature", 0.5, _TRAINING, wrong=3),
    _works("top_p", 0.5, _TRAINING, wrong=0),
    _works("seed", 7, "of sampling, together with session and turn", wrong="x"),
    _works("max_tokens", 1, "16 if absent", wrong=0),
    _works("stop", ["ll", "x"], "up to 4 texts", wrong=["x"] * 5),
    _works("n", 2, "each choice is a turn, and in training a branch", wrong=129),
    _works("logprobs", 2, "up to 5 likely tokens of each position", wrong=6),
    _works("return_token_ids", True, "extension: token ids of prompt and answer", wrong="x"),
    _ignored("user", "someone", _OTHER_MEANING),
    _refused("best_of", 2, "all choices are returned", 1),
    _refused("echo", True, "the prompt has no log-probs", False),
    _refused("suffix", "x", "the policy only continues texts", ""),
    _refused("frequency_penalty", 0.5, "not implemented", 0),
    _refused("presence_penalty", 0.5, "not implemented", 0),
    _refused("logit_bias", {"50256": -100}, "not implemented", {}),
)
"""Fields of ``/v1/completions``."""


# ---- responses

RESPONSES_FIELDS: RequestFields = (
    _works("input", "Hi", wrong=[]),
    _refused_part(
        "input",
        _user({"type": "input_image", "image_url": "data:"}),
        "input[0].content[0]",
        _TEXT_ONLY,
    ),
    _refused_part(
        "input", [{"type": "item_reference", "id": "i"}], "input[0]", "items are not stored by ID"
    ),
    *_shared_fields(
        {"type": "function", "name": "add", "parameters": _SCHEMA},
        {"type": "function", "name": "add"},
    ),
    _works("instructions", "Be brief.", "not inherited by follow-up responses", wrong=3),
    _works("previous_response_id", "resp_...", "a response of the same key", wrong="resp_unknown"),
    _works("store", False, "the response then has no usable ID", wrong="x"),
    _works("max_output_tokens", 1, wrong=0),
    _works("seed", 7, "extension: as in chat completions", wrong="x"),
    _works("reasoning", {}, wrong="x"),
    _works("reasoning.effort", "high", "Harmony only; `none` and `minimal` mean `low`", wrong="x"),
    _ignored("reasoning.summary", "auto", "reasoning is returned in full"),
    _ignored("reasoning.generate_summary", "auto", "earlier name of `summary`"),
    _refused("reasoning.context", "all_turns", "the server's `--history` decides", "auto"),
    _refused("reasoning.mode", "pro", "there is one mode", "standard"),
    _works("text", {}, wrong="x"),
    _works("text.format", {"type": "text"}, wrong={"type": "xml"}),
    _constrains("text.format", {"type": "json_object"}, _GRAMMAR),
    _constrains("text.format", {"type": "json_schema", "name": "x", "schema": _SCHEMA}, _GRAMMAR),
    _ignored("text.verbosity", "low", "a hint: the policy decides on the length"),
    _works("include", ["message.output_text.logprobs"], "other entries are ignored", wrong="x"),
    _ignored("stream_options", {"include_obfuscation": True}, "streams have no padding"),
    _works("top_logprobs", 2, "up to 20, with log-probs in `include`", wrong=21),
    _refused("truncation", "auto", "nothing is dropped silently", "disabled"),
    _refused("background", True, "not implemented", False),
    _refused("background_options", {}, "not implemented"),
    _refused("context_management", [{"type": "compaction"}], "not implemented", []),
    _refused("conversation", "conv_1", "use `previous_response_id`"),
    _refused("prompt", {"id": "pmpt_1"}, "prompt templates are stored at OpenAI"),
    _refused("max_tool_calls", 1, _NO_HOSTED_TOOLS),
    _refused("access_programs", {}, "a program of OpenAI"),
    _refused("image", {}, _TEXT_ONLY),
)
"""Fields of ``/v1/responses``."""
