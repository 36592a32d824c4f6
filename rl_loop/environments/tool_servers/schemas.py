"""JSON schemas of MCP tools in the words that Harmony's ``namespace functions`` can show.

openai-harmony shows types, enums, defaults, nested objects, arrays, ``oneOf`` and ``nullable``, and
writes ``any`` for everything else. Servers that are written with pydantic say ``$ref`` and ``anyOf``
instead: these are put into the words that are shown."""

from typing import Any

from rl_loop.chat.tools import Tool

DEEPEST = 8
"""Levels of a schema that are shown; a type that refers to itself has no end."""


def described_tool(name: str, description: str, schema: dict[str, Any]) -> Tool:
    """Return a tool as the prompt describes it. ``schema``: the JSON schema of its arguments.

    Raises ValueError for a name that no call can say."""
    return Tool(name, description, harmony_schema(schema))


def harmony_schema(schema: dict[str, Any]) -> dict[str, Any] | None:
    """Return a tool's ``inputSchema`` for ``Tool.parameters``; None for a tool without arguments."""
    if not schema.get("properties"):
        return None
    shown = _shown(schema, schema, DEEPEST)
    shown.pop("title", None)
    return shown


def _shown(schema: Any, root: dict[str, Any], levels: int) -> dict[str, Any]:
    """Return one level of a schema, and what is in it. ``root``: what ``$ref`` refers into."""
    if not isinstance(schema, dict) or levels == 0:
        return {}
    if "$ref" in schema:
        referred = _referred(schema["$ref"], root)
        beside = {key: value for key, value in schema.items() if key != "$ref"}
        return _shown({**referred, **beside}, root, levels - 1)

    shown = {key: value for key, value in schema.items() if key not in _NOT_SHOWN}
    if "properties" in schema:
        shown["properties"] = {
            name: _without_title(name, _shown(property_, root, levels - 1))
            for name, property_ in schema["properties"].items()
        }
    if "items" in schema:
        shown["items"] = _shown(schema["items"], root, levels - 1)
    for key in ("anyOf", "oneOf"):
        if key in schema:
            shown.pop(key, None)
            shown |= _alternatives(schema[key], root, levels)
    # A default of null says no more than that the argument may be left out.
    if "default" in shown and shown["default"] is None:
        del shown["default"]
    return shown


_NOT_SHOWN = ("$defs", "definitions", "$schema", "additionalProperties")


def _alternatives(choices: Any, root: dict[str, Any], levels: int) -> dict[str, Any]:
    """Return the keys that say that a value is one of several."""
    shown = [_shown(choice, root, levels - 1) for choice in choices]
    others = [choice for choice in shown if choice.get("type") != "null"]

    result: dict[str, Any] = {}
    if len(others) == 1:
        result = others[0]
    elif others:
        result = {"oneOf": others}
    if len(others) < len(shown):
        result["nullable"] = True
    return result


def _referred(reference: Any, root: dict[str, Any]) -> dict[str, Any]:
    """Return what ``#/$defs/NAME`` stands for; nothing for references into other documents."""
    found: Any = root
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return {}
    for part in reference.removeprefix("#/").split("/"):
        found = found.get(part) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else {}


def _without_title(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Leave out a title that only repeats the property's name, as pydantic writes it."""
    if schema.get("title") == name.replace("_", " ").title():
        schema.pop("title")
    return schema
