"""Schemas of tools in prompts: equal for all sources, and bounded in size."""

from __future__ import annotations

import asyncio
import enum
import json
import time
from collections.abc import Callable
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from rl_loop.chat.tools import Tool
from rl_loop.conversations.harmony import RenderOptions
from rl_loop.conversations.renderers import conversation_renderer
from rl_loop.environments.tool_servers.toolbox import BoxedTool, ServerTool, ToolBox
from rl_loop.harmony.codec import Harmony
from rl_loop.harmony.json_schema import harmony_schema
from rl_loop.harmony.vocabulary import GptOssVocabulary
from tests.support.processor_speed import slowness
from tests.support.rl_loop.gateway.scripted import talking
from tests.support.rl_loop.prompts import SHORT_PROMPT

BARE = Harmony(GptOssVocabulary(), SHORT_PROMPT)
FINAL = "<|channel|>final<|message|>done<|return|>"


class Color(enum.StrEnum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Address(BaseModel):
    street: str = Field(description="Name of the street")
    zip_code: int | None = None


class Node(BaseModel):
    value: int
    children: list[Node] = []
    parent: Node | None = None


class Arguments(BaseModel):
    to: Address
    copy_to: Address | None = Field(None, description="A second address")
    color: Color = Color.RED
    level: Level = Level.LOW
    either: Literal["a", "b"] | int = "a"
    others: list[Address] = []
    table: dict[str, float] = {}
    pair: tuple[int, str] = (1, "a")
    tree: Node | None = None


SHOWN = """{
to: {
    // Name of the street
    street: string,
    zip_code?: number | null,
    },
// A second address
copy_to?:     // A second address
{
    // Name of the street
    street: string,
    zip_code?: number | null,
    },
color?: "red" | "blue", // default: red
// One of 1, 2.
level?: number, // default: 1
// default: "a"
either?:
 | "a" | "b"
 | number
,
others?: {
    // Name of the street
    street: string,
    zip_code?: number | null,
    }[], // default: []
table?: {
    [key: string]: number,
    }, // default: {}
"""


def described(schema: Any, name: str = "f") -> str:
    """Return the description of a tool's arguments in a prompt."""
    prompt = BARE.decode(BARE.render_prompt([], [Tool(name, "Does it.", schema)]))
    return prompt.partition(f"type {name} = ")[2].partition(" => any;")[0]


# ---- sources of schemas


def through_gateway(schema: Any, is_chat: bool) -> str:
    async def run() -> str:
        async with talking(BARE, [FINAL]) as talk:
            function: Any = {"name": "f", "description": "Does it.", "parameters": schema}
            if is_chat:
                tools: Any = [{"type": "function", "function": function}]
                messages: Any = [{"role": "user", "content": "q"}]
                await talk.client.chat.completions.create(model="m", messages=messages, tools=tools)
            else:
                tools = [{"type": "function", "strict": False, **function}]
                await talk.client.responses.create(model="m", input="q", tools=tools)
            return talk.shown()

    return asyncio.run(run())


def through_sft(schema: Any, is_harmony: bool) -> str:
    function = {"name": "f", "description": "Does it.", "parameters": schema}
    said = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    record: dict[str, Any] = {"tools": [{"function": function}], "messages": said}
    if is_harmony:
        namespace = {"functions": {"name": "functions", "description": None, "tools": [function]}}
        content = {"type": "developer_content", "tools": namespace}
        answer = said[1] | {"channel": "final"}
        record = {"messages": [{"role": "developer", "content": [content]}, said[0], answer]}
    options = RenderOptions("append", 100_000, "refuse")
    [sample], _ = conversation_renderer(BARE, options).render_record(record, "auto")
    return BARE.decode(sample.token_ids)


def through_mcp(schema: Any) -> str:
    box = ToolBox({}, {})
    connection: Any = None
    box._tools = {"f": BoxedTool(connection, ServerTool("f", "Does it.", schema), True)}
    return BARE.decode(BARE.render_prompt([], box.tools_for_prompt()))


SOURCES: dict[str, Callable[[Any], str]] = {
    "chat completions": lambda schema: through_gateway(schema, True),
    "responses": lambda schema: through_gateway(schema, False),
    "SFT": lambda schema: through_sft(schema, False),
    "SFT in Harmony": lambda schema: through_sft(schema, True),
    "MCP": through_mcp,
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    "schema",
    [
        Arguments.model_json_schema(),
        Node.model_json_schema(),
        {"$ref": "#/$defs/A", "$defs": {"A": Address.model_json_schema()}},
        {"type": "object", "properties": {}, "additionalProperties": False},
    ],
    ids=["everything", "recursion", "reference at the top", "no arguments"],
)
def test_schema_is_described_alike_for_all_sources(source: str, schema: Any) -> None:
    assert f"type f = {described(schema)} => any;" in SOURCES[source](schema)


# ---- descriptions


def test_pydantic_models_are_described_with_their_fields() -> None:
    text = described(Arguments.model_json_schema())
    assert SHOWN in text
    [tree] = text.split("tree?: ")[1:]
    assert tree.startswith("{\n    value: number,\n    children?: any[], // default: []\n")


CONSTRUCTS: list[tuple[Any, str]] = [
    ({"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}, "a?: string | null,"),
    ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "a?:\n | string\n | number\n,"),
    ({"anyOf": [{"type": "null"}, {"enum": ["x", "y"]}]}, 'a?: "x" | "y" | null,'),
    (
        {"anyOf": [{"type": "string"}, {"type": "number"}, {"type": "null"}]},
        "a?:\n | string\n | number | null\n,",
    ),
    ({"const": "x"}, 'a?: "x",'),
    ({"const": 3}, "// One of 3.\na?: number,"),
    ({"enum": ["x", None]}, 'a?: "x" | null,'),
    ({"enum": [1, 2], "description": "How."}, "// How. One of 1, 2.\na?: number,"),
    ({"type": "integer", "enum": [1, 2]}, "// One of 1, 2.\na?: number,"),
    ({"type": ["string", "null"]}, "a?: string | null,"),
    ({"properties": {"x": {"type": "string"}}}, "a?: {\n    x?: string,\n    },"),
    ({"items": {"type": "string"}}, "a?: string[],"),
    ({"type": "array", "prefixItems": [{"type": "string"}] * 2}, "a?: string[],"),
    (
        {"allOf": [{"$ref": "#/$defs/X"}], "description": "D"},
        "// D\na?:     // D\n{\n    x: number,\n    },",
    ),
    (
        {"allOf": [{"$ref": "#/$defs/X"}, {"properties": {"y": {"const": "k"}}}]},
        'a?: {\n    x: number,\n    y?: "k",\n    },',
    ),
    ({"$ref": "#/$defs/a~1b%"}, "a?: boolean,"),
    ({"type": "object", "additionalProperties": {"$ref": "#/$defs/X"}}, "[key: string]: {"),
    ({"$ref": "https://example.com/schema.json"}, "a?: any,"),
    ({"$ref": "#/$defs/missing"}, "a?: any,"),
    (True, "a?: any,"),
    ({"not": {"type": "string"}}, "a?: any,"),
]
DEFINITIONS = {
    "X": {
        "title": "X",
        "type": "object",
        "properties": {"x": {"type": "number"}},
        "required": ["x"],
    },
    "a/b%": {"type": "boolean"},
}


@pytest.mark.parametrize(("schema", "shown"), CONSTRUCTS)
def test_schema_construct_is_described_in_harmonys_terms(schema: Any, shown: str) -> None:
    whole = {"type": "object", "properties": {"a": schema}, "$defs": DEFINITIONS}
    assert shown in described(whole)


# ---- recursive and huge schemas


def bomb(width: int, depth: int) -> dict[str, Any]:
    """Return a schema whose references expand to ``width ** depth`` properties."""
    definitions = {
        f"D{n}": {
            "type": "object",
            "properties": {f"p{i}": {"$ref": f"#/$defs/D{n + 1}"} for i in range(width)},
        }
        for n in range(depth)
    }
    return {"$ref": "#/$defs/D0", "$defs": definitions | {f"D{depth}": {"type": "string"}}}


def nested(depth: int, keyword: str) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        inner = [schema] if keyword.endswith("Of") else schema
        if keyword == "properties":
            inner = {"x": schema}
        schema = {keyword: inner}
    return {"type": "object", "properties": {"a": schema}}


CYCLE = {"A": {"$ref": "#/$defs/B"}, "B": {"$ref": "#/$defs/A"}}
ENDLESS: dict[str, Any] = {
    "a type within itself": Node.model_json_schema(),
    "a reference to itself": {"$ref": "#"},
    "a cycle of references": {"properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": CYCLE},
    "many references": bomb(30, 20),
    "allOf of itself": {
        "properties": {"a": {"$ref": "#/$defs/A"}},
        "$defs": {"A": {"allOf": [{"$ref": "#/$defs/A"}] * 50}},
    },
    **{
        f"{depth} levels of {keyword}": nested(depth, keyword)
        for keyword in ("items", "properties", "anyOf", "allOf", "oneOf", "additionalProperties")
        for depth in (200, 900)
    },
    "a deep default": {
        "properties": {"a": {"type": "array", "default": json.loads("[" * 400 + "]" * 400)}}
    },
    "a long enum": {"properties": {"a": {"enum": list(range(100_000))}}},
}


@pytest.mark.parametrize("name", ENDLESS)
def test_recursive_or_huge_schema_is_described_up_to_a_limit(name: str) -> None:
    start = time.process_time()
    text = described(ENDLESS[name])
    assert time.process_time() - start < 2 * slowness()
    assert len(text) < 200_000
    assert "$ref" not in text


WORDS = ["type", "$ref", "anyOf", "oneOf", "allOf", "items", "properties", "enum", "const", "not"]
MORE = ["required", "prefixItems", "nullable", "additionalProperties", "default", "description"]
KEYWORDS = st.sampled_from([*WORDS, *MORE, "$defs"])
ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["string", "object", "array", "null", "#", "#/$defs/A", "#/properties/a"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(KEYWORDS | st.sampled_from(["a", "A"]), inner, max_size=4)
    ),
    max_leaves=20,
)


@settings(deadline=None, max_examples=300)
@given(st.dictionaries(KEYWORDS, ANYTHING, max_size=5))
def test_random_schema_is_described(schema: dict[str, Any]) -> None:
    described(schema)
    # The conversion is idempotent.
    shown = harmony_schema(schema)
    assert harmony_schema(shown) == shown
