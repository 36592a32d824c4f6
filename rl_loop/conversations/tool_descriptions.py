"""Reads the functions that a conversation may call."""

import json
from typing import Any

from rl_loop.chat.tools import Tool, check_names
from rl_loop.conversations.errors import ConversationError
from rl_loop.conversations.record_values import json_type


def read_tools(value: Any) -> list[Tool]:
    """Read descriptions of functions: OpenAI's form, a JSON schema's form, or either as text."""
    # Parquet files may store tools as JSON text, because their schemas differ from row to row.
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ConversationError(f"'tools' is text that is not JSON: {error}") from None
    if not value:
        return []
    if not isinstance(value, list):
        raise ConversationError(f"'tools' is {json_type(value)}, not a list")

    tools = [_tool(number, described) for number, described in enumerate(value)]
    try:
        check_names(tools)
    except ValueError as error:
        raise ConversationError(str(error)) from None
    return tools


def _tool(number: int, described: Any) -> Tool:
    name = f"tool {number}"
    if not isinstance(described, dict):
        raise ConversationError(f"{name}: a tool is a JSON object, not {json_type(described)}")
    kind = described.get("type")
    if kind not in (None, "function"):
        raise ConversationError(f"{name}: its type is {kind!r}. Only functions can be described")

    # OpenAI puts the description into ``function``. Other files have its keys at the top level.
    function = described.get("function", described)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ConversationError(f"{name}: it has no name")
    description = function.get("description") or ""
    parameters = function.get("parameters") or None
    if not isinstance(description, str) or not isinstance(parameters, dict | None):
        raise ConversationError(
            f"{name} ({function['name']}): its description must be text and its parameters a JSON schema"
        )
    try:
        return Tool(function["name"], description, parameters)
    except ValueError as error:
        raise ConversationError(f"{name}: {error}") from None
