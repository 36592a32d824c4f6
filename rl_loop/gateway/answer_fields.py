"""Fields of answers: which ones have a value.

The tables of ``docs/reference/openai_api.md`` and the tests of all fields come from these rows.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class AnswerField:
    """One row: a field of an answer."""

    name: str
    """Path of the field. A dot separates the keys of nested objects. Entries of a list have the
    path of the list."""
    is_set: bool
    """True if the field can have a value. Otherwise it is absent, null or empty, and so are all
    fields in it."""
    note: str = ""
    """Meaning, reason or condition."""
    is_extension: bool = False
    """True if OpenAI's API does not have the field."""


type AnswerFields = Mapping[str, AnswerField]
"""Rows of one kind of answer, by name."""


def _set(name: str, note: str = "") -> AnswerField:
    return AnswerField(name, True, note)


def _empty(name: str, note: str) -> AnswerField:
    return AnswerField(name, False, note)


def _extension(name: str, note: str) -> AnswerField:
    return AnswerField(name, True, note, is_extension=True)


def _by_name(*rows: Iterable[AnswerField]) -> AnswerFields:
    return {row.name: row for group in rows for row in group}


_ONE_TIER = "there is one tier"
_NO_MODERATION = "there is no moderation"
_TEXT_ONLY = "only text is supported"
_NO_REFUSAL = "the policy has no refusals"
_NO_HOSTED_TOOLS = "hosted tools are not available"
_NOT_REPEATED = "not repeated"
_NOT_COUNTED = "not counted"


def _frame(object_name: str) -> list[AnswerField]:
    """Return the rows that chat completions, their chunks and completions share."""
    return [
        _set("id"),
        _set("created"),
        _set("model"),
        _set("object", f"`{object_name}`"),
        _empty("system_fingerprint", "weights change during training"),
        _set("choices"),
        _set("choices.index"),
        _set("choices.logprobs", "if requested"),
        _set("usage", "streams: in the last chunk, if requested"),
        _set("usage.prompt_tokens"),
        _set("usage.completion_tokens"),
        _set("usage.total_tokens"),
        _set("usage.prompt_tokens_details"),
        _set("usage.prompt_tokens_details.cached_tokens", "in the engine's prefix cache"),
        _empty("usage.prompt_tokens_details.cache_write_tokens", _NOT_COUNTED),
        _empty("usage.prompt_tokens_details.text_tokens", _NOT_COUNTED),
        _empty("usage.prompt_tokens_details.audio_tokens", _TEXT_ONLY),
        _empty("usage.prompt_tokens_details.image_tokens", _TEXT_ONLY),
    ]


_CHAT: list[AnswerField] = [
    _empty("service_tier", _ONE_TIER),
    _empty("moderation", _NO_MODERATION),
    _set("choices.finish_reason", "`stop`, `tool_calls` or `length`"),
    _set("choices.logprobs.content"),
    _set("choices.logprobs.content.token"),
    _set("choices.logprobs.content.bytes"),
    _set("choices.logprobs.content.logprob", "in nats"),
    _set("choices.logprobs.content.top_logprobs", "if requested"),
    _set("choices.logprobs.content.top_logprobs.token"),
    _set("choices.logprobs.content.top_logprobs.bytes"),
    _set("choices.logprobs.content.top_logprobs.logprob"),
    _empty("choices.logprobs.refusal", _NO_REFUSAL),
    _set("usage.completion_tokens_details"),
    _set("usage.completion_tokens_details.reasoning_tokens"),
    _empty("usage.completion_tokens_details.text_tokens", _NOT_COUNTED),
    _empty("usage.completion_tokens_details.audio_tokens", _TEXT_ONLY),
    _empty("usage.completion_tokens_details.accepted_prediction_tokens", "predictions are ignored"),
    _empty("usage.completion_tokens_details.rejected_prediction_tokens", "predictions are ignored"),
]

ANSWERS: Mapping[str, AnswerFields] = {
    "Chat completions": _by_name(
        _frame("chat.completion"),
        _CHAT,
        [
            _empty("metadata", _NOT_REPEATED),
            _set("choices.message"),
            _set("choices.message.role", "`assistant`"),
            _set("choices.message.content", "null if there are only calls"),
            _extension("choices.message.reasoning", "analysis of the turn"),
            _set("choices.message.tool_calls", "calls of functions"),
            _empty("choices.message.refusal", _NO_REFUSAL),
            _empty("choices.message.annotations", _NO_HOSTED_TOOLS),
            _empty("choices.message.audio", _TEXT_ONLY),
            _empty("choices.message.function_call", "use `tool_calls`"),
        ],
    ),
    "Chunks of chat completions": _by_name(
        _frame("chat.completion.chunk"),
        _CHAT,
        [
            _set("choices.delta"),
            _set("choices.delta.role", "in the first chunk of a choice"),
            _set("choices.delta.content"),
            _extension("choices.delta.reasoning", "analysis of the turn"),
            _set("choices.delta.tool_calls"),
            _set("choices.delta.tool_calls.index"),
            _set("choices.delta.tool_calls.id", "in the first chunk of a call"),
            _set("choices.delta.tool_calls.type", "in the first chunk of a call"),
            _set("choices.delta.tool_calls.function"),
            _set("choices.delta.tool_calls.function.name", "in the first chunk of a call"),
            _set("choices.delta.tool_calls.function.arguments"),
            _empty("choices.delta.refusal", _NO_REFUSAL),
            _empty("choices.delta.audio", _TEXT_ONLY),
            _empty("choices.delta.function_call", "use `tool_calls`"),
            _empty("obfuscation", "streams have no padding"),
        ],
    ),
    "Completions and their chunks": _by_name(
        _frame("text_completion"),
        [
            _set("choices.finish_reason", "`stop` or `length`"),
            _set("choices.text", "without the token that ends the turn"),
            _set("choices.logprobs.tokens"),
            _set("choices.logprobs.token_logprobs", "in nats"),
            _set("choices.logprobs.top_logprobs", "null for `logprobs: 0`"),
            _set("choices.logprobs.text_offset", "characters from the start of `text`"),
            _extension("choices.token_ids", "if requested; streams: in the last chunk of a choice"),
            _extension("choices.prompt_token_ids", "if requested; not in streams"),
            _empty("usage.completion_tokens_details", "the text has no format"),
        ],
    ),
    "Responses": _by_name(
        [
            _set("id"),
            _set("object", "`response`"),
            _set("created_at"),
            _set("model"),
            _set("status", "`completed` or `incomplete`; `in_progress` and `failed` in streams"),
            _set("output", "reasoning, messages and calls of functions"),
            _set("incomplete_details"),
            _set("incomplete_details.reason", "`max_output_tokens` for every limit"),
            _set("instructions"),
            _set("max_output_tokens"),
            _set("previous_response_id"),
            _set("temperature"),
            _set("top_p"),
            _set("top_logprobs"),
            _set("tools"),
            _set("tool_choice"),
            _set("parallel_tool_calls", "`false`"),
            _set("truncation", "`disabled`"),
            _set("reasoning"),
            _set("reasoning.effort"),
            _empty("reasoning.summary", "reasoning is returned in full"),
            _empty("reasoning.generate_summary", "reasoning is returned in full"),
            _empty("reasoning.context", "the server's `--history` decides"),
            _empty("reasoning.mode", "there is one mode"),
            _set("text"),
            _set("text.format"),
            _empty("text.verbosity", "the policy decides on the length"),
            _extension("store", "as in the request"),
            _set("usage"),
            _set("usage.input_tokens"),
            _set("usage.input_tokens_details"),
            _set("usage.input_tokens_details.cached_tokens", "in the engine's prefix cache"),
            _empty("usage.input_tokens_details.cache_write_tokens", _NOT_COUNTED),
            _empty("usage.input_tokens_details.cache_write_tokens_details", _NOT_COUNTED),
            _set("usage.output_tokens"),
            _set("usage.output_tokens_details"),
            _set("usage.output_tokens_details.reasoning_tokens"),
            _set("usage.total_tokens"),
            _empty("error", "set in the event `response.failed` of a stream"),
            _empty("metadata", _NOT_REPEATED),
            _empty("access_programs", "a program of OpenAI"),
            _empty("background", "not implemented"),
            _empty("completed_at", "not implemented"),
            _empty("conversation", "use `previous_response_id`"),
            _empty("image", _TEXT_ONLY),
            _empty("input_transformations", "inputs are not changed"),
            _empty("max_tool_calls", _NO_HOSTED_TOOLS),
            _empty("moderation", _NO_MODERATION),
            _empty("prompt", "prompt templates are stored at OpenAI"),
            _empty("prompt_cache_diagnostics", _NOT_REPEATED),
            _empty("prompt_cache_key", _NOT_REPEATED),
            _empty("prompt_cache_options", _NOT_REPEATED),
            _empty("prompt_cache_retention", _NOT_REPEATED),
            _empty("safety_identifier", _NOT_REPEATED),
            _empty("service_tier", _ONE_TIER),
            _empty("tool_usage", _NO_HOSTED_TOOLS),
            _empty("user", _NOT_REPEATED),
        ],
    ),
}
"""Rows of all kinds of answers, by title."""
