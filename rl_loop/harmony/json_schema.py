"""Converts JSON schemas of tools to the keywords that Harmony's ``namespace functions`` shows.

openai-harmony shows types, enums of texts, defaults, nested objects, arrays, ``oneOf`` and
``nullable``. It writes ``any`` for everything else. This module converts ``$ref``, ``anyOf``,
``allOf``, ``const`` and schemas without ``type``, which pydantic and others write. A schema with
only supported keywords is unchanged.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_DEPTH = 24
"""Maximum depth of a schema. Deeper levels are left out."""
MAX_NODES = 1000
"""Maximum number of nested schemas per tool, because references can multiply endlessly."""
MAX_VALUE_CHARACTERS = 2000
"""Maximum characters of a default or an example as JSON. Longer ones are left out."""

SHOWN = (
    "type",
    "title",
    "description",
    "examples",
    "enum",
    "default",
    "nullable",
    "properties",
    "required",
    "items",
    "oneOf",
)
"""Keywords that openai-harmony shows."""

Schema = dict[str, Any]


def harmony_schema(schema: Mapping[str, Any] | None) -> Schema | None:
    """Return the schema of a tool's arguments as openai-harmony can show it.

    Returns None for a tool without arguments. The format and the released models' chat template
    write ``() => any`` for it.
    """
    if schema is None:
        return None
    shown = _Translation(schema).shown(schema, MAX_DEPTH, frozenset())
    is_object = shown.get("type", "object") == "object" and "oneOf" not in shown
    if is_object and not shown.get("properties"):
        return None
    # pydantic uses the function's name as the title of the arguments.
    if "properties" in shown:
        shown.pop("title", None)
    return shown


@dataclass
class _Translation:
    """Conversion of one tool's schema."""

    root: Mapping[str, Any]
    """Root schema of ``$ref``."""
    nodes: int = 0
    """Number of converted schemas."""

    def shown(self, schema: Any, levels: int, within: frozenset[str]) -> Schema:
        """Convert a schema and its parts.

        Args:
            schema: JSON schema. Any other value allows any value.
            levels: number of levels to show.
            within: references that contain this schema, to stop at recursive types.
        """
        self.nodes += 1
        # openai-harmony shows an empty schema as ``any``.
        if not isinstance(schema, Mapping) or levels == 0 or self.nodes > MAX_NODES:
            return {}

        schema, within, is_translated = self._resolve(schema, within, levels)
        translated = {key: schema[key] for key in SHOWN if key in schema}
        for key, value in list(translated.items()):
            if not _can_be_shown(key, value):
                del translated[key]
        # A default of null only means that the argument is optional.
        if is_translated and translated.get("default", 0) is None:
            del translated["default"]

        if "type" not in translated and "oneOf" not in translated:
            translated |= _implied_type(schema)
        if not any(isinstance(value, str) for value in _list(translated, "enum")):
            translated |= _values_in_words(translated)
            translated.pop("enum", None)
        if isinstance(translated.get("properties"), Mapping):
            translated["properties"] = {
                str(name): _without_title(str(name), self.shown(value, levels - 1, within))
                for name, value in translated["properties"].items()
            }
        self._add_map(schema, translated, levels, within)
        self._add_items(schema, translated, levels, within)
        if isinstance(translated.get("oneOf"), list):
            translated["oneOf"] = [
                self.shown(choice, levels - 1, within) for choice in translated["oneOf"]
            ]
            if translated.pop("nullable", False) is True:
                _add_null(translated["oneOf"])
        return translated

    def _resolve(
        self, schema: Mapping[str, Any], within: frozenset[str], levels: int
    ) -> tuple[Mapping[str, Any], frozenset[str], bool]:
        """Replace unsupported keywords at the top level of a schema.

        Returns:
            The schema, the references that contain it, and True if a keyword was replaced.
        """
        is_translated = False
        # Each replacement removes one keyword. References may contain further ones.
        for _ in range(levels):
            if isinstance(schema.get("$ref"), str):
                schema, within = self._resolve_reference(schema, within)
            elif isinstance(schema.get("allOf"), list):
                schema, within = self._join(schema, within, levels)
            elif isinstance(schema.get("anyOf"), list):
                schema = _with_choices(schema)
            elif "const" in schema:
                schema = {"enum": [schema["const"]], **_without(schema, "const")}
            else:
                return schema, within, is_translated
            is_translated = True
        return {}, within, True

    def _resolve_reference(
        self, schema: Mapping[str, Any], within: frozenset[str]
    ) -> tuple[Mapping[str, Any], frozenset[str]]:
        """Replace ``$ref`` by its schema. Keywords next to it win.

        A recursive reference allows any value.
        """
        reference = schema["$ref"]
        # Writing out a recursive type would not end.
        referred: Mapping[str, Any] = {}
        if reference not in within:
            referred = _find_reference(reference, self.root)

        # pydantic uses the model's name as the title.
        if referred.get("title") == reference.rpartition("/")[2]:
            referred = _without(referred, "title")
        return {**referred, **_without(schema, "$ref")}, within | {reference}

    def _join(
        self, schema: Mapping[str, Any], within: frozenset[str], levels: int
    ) -> tuple[Mapping[str, Any], frozenset[str]]:
        """Merge the parts of ``allOf`` into one schema. Keywords next to it are the last part."""
        parts = [*schema["allOf"], _without(schema, "allOf")]
        joined: Schema = {}
        for part in parts:
            if not isinstance(part, Mapping) or self.nodes > MAX_NODES:
                continue
            part, within, _ = self._resolve(part, within, levels - 1)
            # Merged properties count, too: parts may refer to the same large schema many times.
            self.nodes += 1 + len(_mapping(part, "properties"))
            properties = {**_mapping(joined, "properties"), **_mapping(part, "properties")}
            required = [*_list(joined, "required"), *_list(part, "required")]
            joined |= part
            if properties:
                joined["properties"] = properties
            if required:
                joined["required"] = list(dict.fromkeys(map(str, required)))
        return joined, within

    def _add_map(
        self, schema: Mapping[str, Any], translated: Schema, levels: int, within: frozenset[str]
    ) -> None:
        """Show the values of an object with arbitrary keys as TypeScript's index signature."""
        values = schema.get("additionalProperties")
        if translated.get("type") == "object" and isinstance(values, Mapping) and values:
            key = "[key: string]"
            properties = {**_mapping(translated, "properties")}
            properties[key] = self.shown(values, levels - 1, within)
            translated["properties"] = properties
            # Required, because openai-harmony writes ? behind other keys. An index signature
            # cannot have it.
            translated["required"] = [*_list(translated, "required"), key]

    def _add_items(
        self, schema: Mapping[str, Any], translated: Schema, levels: int, within: frozenset[str]
    ) -> None:
        """Show the elements of an array. A tuple's elements become one type with choices."""
        items = schema.get("items")
        tuple_items = schema.get("prefixItems", items if isinstance(items, list) else None)
        if isinstance(tuple_items, list):
            choices = [self.shown(item, levels - 1, within) for item in tuple_items]
            distinct = [c for i, c in enumerate(choices) if c not in choices[:i]]
            translated.pop("items", None)
            if distinct:
                is_one = len(distinct) == 1
                translated["items"] = distinct[0] if is_one else {"oneOf": distinct}
        elif "items" in translated:
            translated["items"] = self.shown(items, levels - 1, within)


def _without(schema: Mapping[str, Any], keyword: str) -> Schema:
    """Return a schema without a keyword."""
    return {key: value for key, value in schema.items() if key != keyword}


def _with_choices(schema: Mapping[str, Any]) -> Schema:
    """Return a schema with ``oneOf`` instead of ``anyOf``, or with its only choice."""
    choices = schema["anyOf"]
    beside = _without(schema, "anyOf")
    others = [choice for choice in choices if not _is_null(choice)]
    has_null = len(others) < len(choices)
    if len(others) == 1 and isinstance(others[0], Mapping):
        result: Schema = {**others[0], **beside}
    elif others:
        result = {**beside, "oneOf": others}
    else:
        result = {**beside, "type": "null"}
        has_null = False
    if has_null:
        result["nullable"] = True
    return result


def _add_null(choices: list[Schema]) -> None:
    """Make the last choice nullable, because openai-harmony does not show this for ``oneOf``."""
    for choice in reversed(choices):
        if isinstance(choice.get("type"), str):
            choice["nullable"] = True
            return


def _implied_type(schema: Mapping[str, Any]) -> Schema:
    """Return the keywords of the type that a schema without ``type`` implies."""
    values = _list(schema, "enum")
    # null among the values only means that the argument may be null.
    others = [value for value in values if value is not None]
    nullable: Schema = {"nullable": True} if len(others) < len(values) else {}
    if others and all(isinstance(value, str) for value in others):
        return {"type": "string", "enum": others, **nullable}
    if others:
        kinds = sorted({_json_type(value) for value in others})
        kind = kinds[0] if len(kinds) == 1 else kinds
        return {"type": kind, **nullable}
    if isinstance(schema.get("properties"), Mapping):
        return {"type": "object"}
    if isinstance(schema.get("additionalProperties"), Mapping):
        return {"type": "object"}
    if "items" in schema or "prefixItems" in schema:
        return {"type": "array"}
    return {}


def _values_in_words(schema: Mapping[str, Any]) -> Schema:
    """Return a description that lists an enum's values. Only enums of texts are shown otherwise."""
    values = [value for value in _list(schema, "enum") if value is not None]
    if not values or not _is_short(values):
        return {}
    sentence = f"One of {', '.join(map(json.dumps, values))}."
    return {"description": " ".join(filter(None, [_text(schema, "description"), sentence]))}


def _json_type(value: Any) -> str:
    match value:
        # Before int, because bool is a subclass of int.
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def _find_reference(reference: str, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema at ``#/$defs/NAME``. Empty for references to other documents."""
    target: Any = root
    if reference != "#" and not reference.startswith("#/"):
        return {}
    for part in reference.split("/")[1:]:
        # JSON pointers escape / and ~ (RFC 6901). In this order, because "~01" stands for "~1".
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(target, list) and part.isdecimal() and int(part) < len(target):
            target = target[int(part)]
        else:
            target = target.get(part) if isinstance(target, Mapping) else None
    return target if isinstance(target, Mapping) else {}


def _is_null(schema: Any) -> bool:
    if not isinstance(schema, Mapping):
        return False
    return schema.get("type") == "null" or ("const" in schema and schema["const"] is None)


def _can_be_shown(key: str, value: Any) -> bool:
    """Return True if openai-harmony can read the value of a keyword."""
    match key:
        case "type":
            kinds = value if isinstance(value, list) else [value]
            return all(isinstance(kind, str) for kind in kinds)
        case "title" | "description":
            return isinstance(value, str)
        case "default" | "examples":
            return _is_short(value)
        case "enum" | "required":
            return isinstance(value, list) and all(map(_is_short, value))
        case "nullable":
            return isinstance(value, bool)
        case "properties":
            return isinstance(value, Mapping)
        case "oneOf":
            return isinstance(value, list)
    return True


def _is_short(value: Any) -> bool:
    """Return True if a JSON value is short and flat enough to be shown."""
    try:
        # NaN and infinities are not JSON, so openai-harmony cannot read them.
        text = json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        return False
    return len(text) <= MAX_VALUE_CHARACTERS and text.count("[") + text.count("{") < 100


def _without_title(name: str, schema: Schema) -> Schema:
    """Drop a title that only repeats the property's name, as pydantic writes it."""
    if schema.get("title") == name.replace("_", " ").title():
        schema.pop("title")
    return schema


def _mapping(schema: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = schema.get(key)
    return value if isinstance(value, Mapping) else {}


def _list(schema: Mapping[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _text(schema: Mapping[str, Any], key: str) -> str:
    value = schema.get(key)
    return value if isinstance(value, str) else ""
