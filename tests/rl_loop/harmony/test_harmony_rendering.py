"""Rendered prompts and histories, compared with the documented format and with openai-harmony."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai_harmony import (
    ChannelConfig,
    Conversation,
    DeveloperContent,
    Message,
    ReasoningEffort,
    Role,
    SystemContent,
    ToolDescription,
    ToolNamespaceConfig,
)
from pydantic import ValidationError

from rl_loop.config.load import dump_config, load_config
from rl_loop.config.run import SftConfig
from rl_loop.harmony.codec import (
    BuiltinTool,
    Harmony,
    PromptConfig,
    PythonTool,
    Tool,
    ToolOutput,
)
from rl_loop.harmony.system_prompt import describe_function, system_message
from rl_loop.harmony.vocabulary import GptOssVocabulary, harmony_encoding
from rl_loop.sandbox import SandboxConfig
from tests.support.processor_speed import slowness
from tests.support.rl_loop import harmony_reference as reference
from tests.support.rl_loop.harmony_reference import assistant, encode, tool, user
from tests.support.rl_loop.prompts import SHORT_PROMPT

TOKENS = GptOssVocabulary()
BARE = Harmony(TOKENS, SHORT_PROMPT)

IDENTITY = "You are ChatGPT, a large language model trained by OpenAI."
ALL_CHANNELS = (
    "# Valid channels: analysis, commentary, final. Channel must be included for every message."
)


def harmony_with(**settings: Any) -> Harmony:
    return Harmony(TOKENS, PromptConfig(**settings))


def released_tool(namespace: ToolNamespaceConfig) -> BuiltinTool:
    """Return a built-in tool of openai-harmony as a ``BuiltinTool``."""
    functions = tuple(Tool(t.name, t.description, t.parameters) for t in namespace.tools)
    return BuiltinTool(namespace.name, namespace.description or "", functions)


BROWSER = released_tool(ToolNamespaceConfig.browser())
NOTEBOOK = released_tool(ToolNamespaceConfig.python())
"""The Python tool of openai-harmony, with a drive /mnt/data."""


def system(content: SystemContent) -> Message:
    return Message.from_role_and_content(Role.SYSTEM, content)


# ---- the system message


@pytest.mark.parametrize("effort", ["low", "medium", "high"])
def test_system_message_has_identity_cutoff_effort_and_channels(effort: str) -> None:
    ids = harmony_with(reasoning_effort=effort).render_prompt(
        [{"role": "user", "content": "Why is the sky blue?"}]
    )
    assert ids == encode(
        f"<|start|>system<|message|>{IDENTITY}\nKnowledge cutoff: 2024-06\n\n"
        f"Reasoning: {effort}\n\n{ALL_CHANNELS}<|end|>"
        "<|start|>user<|message|>Why is the sky blue?<|end|><|start|>assistant"
    )
    content = SystemContent.new().with_reasoning_effort(ReasoningEffort(effort.capitalize()))
    assert ids == reference.render_for_completion([system(content), user("Why is the sky blue?")])


def test_system_message_states_the_current_date_after_the_cutoff() -> None:
    ids = harmony_with(knowledge_cutoff="2023-10", current_date="2025-08-05").render_prompt([])
    assert ids == encode(
        f"<|start|>system<|message|>{IDENTITY}\nKnowledge cutoff: 2023-10\nCurrent date: 2025-08-05\n\n"
        f"Reasoning: medium\n\n{ALL_CHANNELS}<|end|><|start|>assistant"
    )
    content = (
        SystemContent.new()
        .with_knowledge_cutoff("2023-10")
        .with_conversation_start_date("2025-08-05")
    )
    assert ids == reference.render_for_completion([system(content)])


def test_system_message_may_list_some_channels_only() -> None:
    ids = harmony_with(channels=["analysis", "final"]).render_prompt([])
    assert ids == encode(
        f"<|start|>system<|message|>{IDENTITY}\nKnowledge cutoff: 2024-06\n\nReasoning: medium\n\n"
        "# Valid channels: analysis, final. Channel must be included for every message.<|end|><|start|>assistant"
    )
    content = SystemContent.new().with_required_channels(["analysis", "final"])
    assert ids == reference.render_for_completion([system(content)])


CHANNEL_LISTS = st.lists(
    st.sampled_from(["analysis", "commentary", "final"]), min_size=1, unique=True
)


@settings(deadline=None, max_examples=100)
@given(
    identity=st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    cutoff=st.none() | st.sampled_from(["2024-06", "2021-01"]),
    date=st.none() | st.dates().map(str),
    effort=st.none() | st.sampled_from(["low", "medium", "high"]),
    channels=st.booleans() | CHANNEL_LISTS,
    python=st.booleans(),
    functions=st.booleans(),
)
def test_system_message_equals_openai_harmonys_for_any_settings(
    identity: str | None,
    cutoff: str | None,
    date: str | None,
    effort: Any,
    channels: Any,
    python: bool,
    functions: bool,
) -> None:
    prompt = PromptConfig(
        model_identity=identity,
        knowledge_cutoff=cutoff,
        current_date=date,
        reasoning_effort=effort,
        channels=channels,
        describe_builtin_tools=python,
    )
    tools = [Tool("ping", "Answers pong.")] if functions else []
    ids = Harmony(TOKENS, prompt).render_prompt([], tools, [BROWSER, NOTEBOOK])

    listed = channels
    if isinstance(channels, bool):
        listed = ["analysis", "commentary", "final"] if channels else []
    content = SystemContent(
        model_identity=identity,
        knowledge_cutoff=cutoff,
        conversation_start_date=date,
        reasoning_effort=effort and effort.capitalize(),
        channel_config=ChannelConfig.require_channels(listed) if listed else None,
    )
    if python:
        content = content.with_browser_tool().with_python_tool()
    says_nothing = not python and not listed and [identity, cutoff, date, effort] == [None] * 4
    messages = [] if says_nothing else [system(content)]
    if functions:
        described = DeveloperContent.new().with_function_tools(
            [ToolDescription.new("ping", "Answers pong.")]
        )
        messages.append(Message.from_role_and_content(Role.DEVELOPER, described))
    assert ids == reference.render_for_completion(messages)


def test_invalid_prompt_settings_are_rejected() -> None:
    for wrong in ({"channels": []}, {"channels": ["final", "final"]}, {"channels": ["thoughts"]}):
        with pytest.raises(ValidationError):
            PromptConfig(**wrong)  # type: ignore[arg-type]
    for date in ("yesterday", "2025-13-01", "05.08.2025", "20250805"):
        with pytest.raises(ValidationError, match="must have the form"):
            PromptConfig(current_date=date)


def test_prompt_settings_survive_overrides_and_a_dumped_config(
    tmp_path: Path,
) -> None:
    overrides = [
        "prompt.current_date=2025-08-05",
        "prompt.channels=[analysis,final]",
        "prompt.reasoning_effort=high",
    ]
    config = load_config(Path("configs/sft/tiny_retool.yaml"), SftConfig, overrides)
    assert config.prompt.current_date == "2025-08-05"
    assert config.prompt.channels == ["analysis", "final"]
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "config.yaml", SftConfig).prompt == config.prompt


# ---- built-in tools


def test_descriptions_of_built_in_tools_equal_openai_harmonys() -> None:
    ids = harmony_with().render_prompt([], builtin_tools=[BROWSER, NOTEBOOK])
    content = SystemContent.new().with_browser_tool().with_python_tool()
    assert ids == reference.render_for_completion([system(content)])
    text = harmony_encoding().decode(ids)
    assert "## browser" in text
    assert text.index("## browser") < text.index("## python") < text.index("# Valid channels")


def test_stateless_python_is_described_with_the_sandbox_limit() -> None:
    text = harmony_encoding().decode(
        Harmony(TOKENS, PromptConfig(), python_seconds=7.5).render_prompt(
            [], builtin_tools=[PythonTool()]
        )
    )
    assert (
        "# Tools\n\n## python\n\nUse this tool to execute STATELESS Python code in your chain of thought."
        in text
    )
    assert "time out after 7.5 seconds" in text
    assert text.count("seconds") == 1
    assert (
        "\n\nIMPORTANT: Your python environment is not shared between calls. You will have to pass your entire code "
        "each time.\n\n# Valid channels" in text
    )
    for untrue in ("/mnt/data", "stateful", "Jupyter", "120", "UNKNOWN"):
        assert untrue not in text


def test_stateful_python_description_differs_only_where_untrue() -> None:
    released = ToolNamespaceConfig.python().description
    assert released is not None
    expected = (
        released.replace("120.0 seconds", "10.0 seconds")
        .replace(" The drive at '/mnt/data' can be used to save and persist user files.", "")
        .replace("is UNKNOWN. Depends on the cluster.", "is disabled.")
    )
    assert PythonTool(stateful=True).in_sandbox(10).description == expected
    assert expected.count("\n") == released.count("\n")


def test_default_time_limit_in_prompts_is_the_sandbox_default() -> None:
    default = Harmony(TOKENS, PromptConfig()).render_prompt([], builtin_tools=[PythonTool()])
    seconds = SandboxConfig().timeout_seconds
    assert default == Harmony(TOKENS, PromptConfig(), seconds).render_prompt(
        [], builtin_tools=[PythonTool()]
    )


# ---- functions in the developer message


WEATHER = {
    "type": "object",
    "properties": {
        "place": {"type": "string", "description": "A town, such as Reykjavík"},
        "unit": {"type": "string", "enum": ["kelvin", "celsius"], "default": "kelvin"},
    },
    "required": ["place"],
}
EVERYTHING = {
    "type": "object",
    "description": "all there is",
    "properties": {
        "zulu": {
            "type": "string",
            "title": "ZULU",
            "description": "a text",
            "examples": ["yes", "no"],
        },
        "alpha": {"type": "string", "nullable": True, "default": "none given"},
        "count": {"type": "integer", "default": 3},
        "ratio": {"type": "number"},
        "loud": {"type": "boolean", "default": False},
        "kind": {"type": "string", "enum": ["a", "b c"]},
        "either": {
            "description": "one of two",
            "oneOf": [
                {"type": "string", "default": "word"},
                {"type": "number", "description": "or a number", "nullable": True},
            ],
            "default": 4,
        },
        "mixed": {"type": ["integer", "null", "string"]},
        "words": {"type": "array", "items": {"type": "string"}},
        "table": {"type": "array", "items": {"type": "array", "items": {"type": "number"}}},
        "anything": {"type": "array"},
        "inner": {
            "type": "object",
            "properties": {
                "deep": {
                    "type": "object",
                    "properties": {"x": {"type": "number"}},
                    "required": ["x"],
                }
            },
            "required": ["deep"],
        },
        "untyped": {},
    },
    "required": ["zulu", "either", "inner"],
}


def test_functions_are_described_in_the_documented_typescript() -> None:
    tools = [
        Tool("where", "Says where\nthe user is."),
        Tool("weather", "Says the weather.", WEATHER),
    ]
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Is it cold?"},
    ]
    ids = harmony_with(current_date="2025-08-05", reasoning_effort="high").render_prompt(
        messages, tools
    )
    assert ids == encode(
        f"<|start|>system<|message|>{IDENTITY}\nKnowledge cutoff: 2024-06\nCurrent date: 2025-08-05\n\n"
        f"Reasoning: high\n\n{ALL_CHANNELS}\n"
        "Calls to these tools must go to the commentary channel: 'functions'.<|end|>"
        """<|start|>developer<|message|># Instructions

Be brief.

# Tools

## functions

namespace functions {

// Says where
// the user is.
type where = () => any;

// Says the weather.
type weather = (_: {
// A town, such as Reykjavík
place: string,
unit?: "kelvin" | "celsius", // default: kelvin
}) => any;

} // namespace functions<|end|><|start|>user<|message|>Is it cold?<|end|><|start|>assistant"""
    )


def test_schema_of_every_shape_is_described_like_openai_harmonys() -> None:
    ids = BARE.render_prompt([], [Tool("everything", "All shapes.", EVERYTHING)])
    content = DeveloperContent.new().with_function_tools(
        [ToolDescription.new("everything", "All shapes.", EVERYTHING)]
    )
    assert ids == reference.render_for_completion(
        [Message.from_role_and_content(Role.DEVELOPER, content)]
    )
    assert """type everything = (_: // all there is
{
// ZULU
//
// a text
// Examples:
// - "yes"
// - "no"
zulu: string,
alpha?: string | null, // default: "none given"
count?: number, // default: 3
ratio?: number,
loud?: boolean, // default: false
kind?: "a" | "b c",
// one of two
// default: 4
either:
 | string // default: "word"
 | number | null // or a number
,
mixed?: number | null | string,
words?: string[],
table?: number[][],
anything?: Array<any>,
inner: {
    deep: {
        x: number,
        },
    },
untyped?: any,
}) => any;""" in harmony_encoding().decode(ids)


NAMES = st.sampled_from(["b", "a", "with_underscore", "z9"])
LEAVES = st.fixed_dictionaries(
    {
        "type": st.sampled_from(
            ["string", "number", "integer", "boolean", "null", "array", ["string", "null"]]
        )
    },
    optional={
        "description": st.text('ab é\n"<|end|>', max_size=12),
        "default": st.none() | st.booleans() | st.integers() | st.text('xy"', max_size=3),
        "enum": st.lists(st.sampled_from(["p", "q r"]), max_size=3),
        "nullable": st.booleans(),
        "title": st.text("T", max_size=2),
        "examples": st.lists(st.sampled_from(["e", 2]), max_size=2),
    },
)
SCHEMAS = st.recursive(
    LEAVES | st.just({}),
    lambda inner: (
        st.fixed_dictionaries({"type": st.just("array"), "items": inner})
        | st.fixed_dictionaries(
            {"oneOf": st.lists(inner, max_size=3)}, optional={"description": st.just("d")}
        )
        | st.fixed_dictionaries(
            {"type": st.just("object"), "properties": st.dictionaries(NAMES, inner, max_size=3)},
            optional={"required": st.lists(NAMES, max_size=2), "description": st.just("obj")},
        )
    ),
    max_leaves=8,
)


@settings(deadline=None, max_examples=150)
@given(SCHEMAS)
def test_random_schema_is_described_like_openai_harmonys(schema: dict[str, Any]) -> None:
    # The format documents a function without arguments as "() => any".
    is_object = schema.get("type", "object") == "object" and "oneOf" not in schema
    parameters = None if is_object and not schema.get("properties") else schema
    content = DeveloperContent.new().with_function_tools(
        [ToolDescription.new("f", "Does f.", parameters)]
    )
    developer = Message.from_role_and_content(Role.DEVELOPER, content)
    assert BARE.render_prompt(
        [], [Tool("f", "Does f.", schema)]
    ) == reference.render_for_completion([developer])


def test_tools_are_described_once_in_a_prompt(harmony: Harmony) -> None:
    block = Tool(
        "block", "Block a domain.", {"type": "object", "properties": {"domain": {"type": "string"}}}
    )
    developer, question = (
        {"role": "developer", "content": "Act."},
        {"role": "user", "content": "Go."},
    )
    for messages in ([developer, question], [question], [developer, developer, question]):
        text = harmony.decode(harmony.render_prompt(messages, [block]))
        assert text.count("type block = (_: {") == 1
        assert (
            text.index("<|start|>developer")
            < text.index("type block")
            < text.index("<|start|>user")
        )


def test_tools_with_equal_or_invalid_names_are_rejected() -> None:
    with pytest.raises(ValueError, match="two tools have the name 'f'"):
        BARE.render_prompt([], [Tool("f", "One."), Tool("f", "Two.")])
    with pytest.raises(ValueError, match="two tools have the name 'python'"):
        BARE.render_prompt([], builtin_tools=[BuiltinTool("python", ""), PythonTool()])
    for name in ("two words", "", "a<|end|>"):
        with pytest.raises(ValueError, match="is not a valid name of a tool"):
            Tool(name, "No.")


# ---- whole conversations


CALL = {
    "role": "assistant",
    "recipient": "functions.weather",
    "content_type": "<|constrain|>json",
    "content": '{"place": "Oslo"}',
}
REPLY = {"role": "tool", "name": "weather", "content": "cold"}
CALL_REFERENCE = assistant(
    '{"place": "Oslo"}', "commentary", "functions.weather", "<|constrain|>json"
)
REPLY_REFERENCE = tool("functions.weather", "cold", "commentary")


def test_function_call_in_history_has_recipient_and_constrain() -> None:
    question = {"role": "user", "content": "Oslo?"}
    thought = {"role": "assistant", "channel": "analysis", "content": "I ask."}
    ids = BARE.render_prompt([question, thought, CALL, REPLY])
    assert ids == encode(
        "<|start|>user<|message|>Oslo?<|end|><|start|>assistant<|channel|>analysis<|message|>I ask.<|end|>"
        "<|start|>assistant to=functions.weather<|channel|>commentary <|constrain|>json<|message|>"
        '{"place": "Oslo"}<|call|>'
        "<|start|>functions.weather to=assistant<|channel|>commentary<|message|>cold<|end|><|start|>assistant"
    )
    assert ids.count(reference.CONSTRAIN) == 1
    messages = [user("Oslo?"), assistant("I ask.", "analysis"), CALL_REFERENCE, REPLY_REFERENCE]
    assert ids == reference.render_for_completion(messages)


def test_finished_answer_ends_with_end_and_without_analysis() -> None:
    messages = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "channel": "analysis", "content": "Easy."},
        {"role": "assistant", "channel": "final", "content": "4"},
        {"role": "user", "content": "9/2?"},
    ]
    written = [user("2+2?"), assistant("Easy.", "analysis"), assistant("4", "final"), user("9/2?")]
    ids = BARE.render_prompt(messages)
    assert ids == encode(
        "<|start|>user<|message|>2+2?<|end|><|start|>assistant<|channel|>final<|message|>4<|end|>"
        "<|start|>user<|message|>9/2?<|end|><|start|>assistant"
    )
    # openai-harmony's own rule agrees for a single answer.
    conversation = Conversation.from_messages(written)
    assert ids == harmony_encoding().render_conversation_for_completion(
        conversation, Role.ASSISTANT
    )
    # drop_analysis=False keeps all analysis.
    assert BARE.render_prompt(messages, drop_analysis=False) == reference.render_for_completion(
        written
    )


def conversation_of_three_turns() -> tuple[list[dict[str, Any]], list[Message]]:
    """Return a plain turn, a turn with calls of Python and a function, and an unfinished turn."""
    messages = [
        {"role": "user", "content": "A?"},
        {"role": "assistant", "thinking": "think A", "content": "a"},
        {"role": "user", "content": "B?"},
        {
            "role": "assistant",
            "thinking": "think B",
            "recipient": "python",
            "content_type": "code",
            "content": "b()",
        },
        {"role": "tool", "content": "4"},
        CALL,
        REPLY,
        {"role": "assistant", "channel": "commentary", "content": "nearly"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "C?"},
        {"role": "assistant", "channel": "analysis", "content": "think C"},
        CALL,
        REPLY,
    ]
    kept = [
        user("A?"), assistant("a", "final"), user("B?"), CALL_REFERENCE, REPLY_REFERENCE,
        assistant("nearly", "commentary"), assistant("b", "final"),
        user("C?"), assistant("think C", "analysis"), CALL_REFERENCE, REPLY_REFERENCE,
    ]  # fmt: skip
    return messages, kept


def test_analysis_is_kept_only_in_the_unfinished_turn() -> None:
    messages, kept = conversation_of_three_turns()
    assert BARE.render_prompt(messages) == reference.render_for_completion(kept)


def test_openai_harmony_drops_less_analysis_than_documented() -> None:
    """openai-harmony 0.0.8 keeps more analysis than its documentation says.

    It drops analysis only before the first answer, and none while a later turn calls tools. If
    this test fails, openai-harmony follows its documentation, and ``without_finished_analysis``
    can be removed.
    """
    finished = [
        user("A?"), assistant("think A", "analysis"), assistant("a", "final"),
        user("B?"), assistant("think B", "analysis"), assistant("b", "final"), user("C?"),
    ]  # fmt: skip
    ids = harmony_encoding().render_conversation_for_completion(
        Conversation.from_messages(finished), Role.ASSISTANT
    )
    assert "think B" in harmony_encoding().decode(ids)
    calling = [*finished, CALL_REFERENCE, REPLY_REFERENCE]
    ids = harmony_encoding().render_conversation_for_completion(
        Conversation.from_messages(calling), Role.ASSISTANT
    )
    assert "think A" in harmony_encoding().decode(ids)


def test_trained_turn_ends_with_return_like_openai_harmonys() -> None:
    history = [
        {"role": "user", "content": "A?"},
        {"role": "assistant", "thinking": "think A", "content": "a"},
        {"role": "user", "content": "B?"},
    ]
    last = [assistant("think B", "analysis"), assistant("b", "final")]
    ids = BARE.render_prompt(history) + reference.sampled_turn(last)
    assert ids == reference.render_for_training(
        [user("A?"), assistant("a", "final"), user("B?"), *last]
    )
    assert ids[-1] == reference.RETURN


def test_openai_chat_messages_are_rendered_with_implied_fields() -> None:
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": t} for t in ("Oslo ", "and Rome?")], "name": "eva"},
        {
            "role": "assistant",
            "content": "I will look.",
            "thinking": "two calls",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Oslo"}'}},
                {"id": "2", "type": "function", "function": {"name": "weather", "arguments": {"place": "Rømø"}}},
            ],
        },
        {"role": "tool", "tool_call_id": "2", "content": "warm"},
        {"role": "tool", "tool_call_id": "1", "content": "cold", "name": "weather", "channel": None, "tool_calls": []},
    ]  # fmt: skip
    call = ("commentary", "functions.weather", "<|constrain|>json")
    named = user("Oslo and Rome?")
    named.author.name = "eva"
    assert BARE.render_prompt(messages) == reference.render_for_completion(
        [
            Message.from_role_and_content(
                Role.DEVELOPER, DeveloperContent.new().with_instructions("Be kind.")
            ),
            named,
            assistant("two calls", "analysis"),
            assistant("I will look.", "commentary"),
            assistant('{"place": "Oslo"}', *call),
            assistant('{"place": "Rømø"}', *call),
            # Results are in the order of the calls, because Harmony has no call ids.
            tool("functions.weather", "cold", "commentary"),
            tool("functions.weather", "warm", "commentary"),
        ]
    )


def test_prompt_keeps_its_system_message_and_earlier_turns() -> None:
    """The rows have the form of verl's data."""
    rows = [
        {"role": "system", "content": "Answer in French."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Un."},
        {"role": "user", "content": "Two?"},
    ]
    assert BARE.render_prompt(rows) == encode(
        "<|start|>developer<|message|># Instructions\n\nAnswer in French.<|end|><|start|>user<|message|>One?<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Un.<|end|><|start|>user<|message|>Two?<|end|><|start|>assistant"
    )


ASK = {"role": "user", "content": "?"}


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([{"role": "critic", "content": "x"}], r"message 0 \(role 'critic'\): the role must be one of system,"),
        (["hello"], "message 0 .* must be an object"),
        ([{"role": "user"}], "'content' must be text, not NoneType"),
        ([{"role": "user", "content": 5}], "'content' must be text, not int"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "has the type 'image_url', but only text"),
        ([{"role": "user", "content": "\ud800"}], "'content' has half of a surrogate pair at index 0"),
        ([{"role": "user", "content": "x", "audio": "y"}], "'audio' cannot be rendered here. Known keys: content"),
        ([{"role": "user", "content": "x", "name": "a b"}], "name is 'a b', but a header needs one word"),
        ([ASK, {"role": "assistant", "content": "x"}], "but the assistant's turn comes next"),
        ([ASK, {"role": "assistant", "content": "x", "channel": "secret"}, ASK], "'secret' is not a channel"),
        ([ASK, {"role": "assistant", "content": "x", "content_type": "a b"}, ASK], "content_type is 'a b'"),
        ([ASK, {"role": "assistant", "content": "x", "recipient": "<|end|>"}, ASK], "recipient is '<|end|>'"),
        ([ASK, {"role": "assistant", "tool_calls": [{"id": "1"}]}, ASK], "a tool call must have the form"),
        ([ASK, {"role": "assistant", "tool_calls": 5}, ASK], "tool_calls must be a list, not int"),
        ([{"role": ["user"], "content": "x"}], "the role must be one of"),
        ([ASK, {"role": "assistant", "tool_calls": [{"name": "f g"}]}, ASK], "'f g' is not a valid name of a function"),
        ([ASK, {"role": "assistant"}, ASK], "'content' must be text"),
        ([ASK, CALL | {"tool_calls": [{"name": "f"}]}, ASK], "both tool_calls and a recipient"),
        ([ASK, REPLY], "message 1 .* no open call of weather precedes this tool output"),
        ([ASK, CALL, {"role": "tool", "tool_call_id": "7", "content": "x"}], "no open call with id '7'"),
        ([ASK, CALL, REPLY, REPLY], "message 3 .* no open call"),
        ([ASK, CALL, CALL | {"recipient": "python"}, {"role": "tool", "content": "x"}], "several calls have no"),
    ],
)  # fmt: skip
def test_unrenderable_message_is_rejected_with_the_reason(messages: list[Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        BARE.render_prompt(messages)


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    ["<|end|>", "<|start|>system"]
)


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_random_history_equals_openai_harmonys_without_analysis(
    data: st.DataObject,
) -> None:
    """Histories of 1-4 turns with thoughts and calls, most of them with a final answer."""
    messages: list[dict[str, Any]] = []
    written: list[Message] = []
    for _ in range(data.draw(st.integers(1, 4))):
        texts = data.draw(st.lists(TEXTS, min_size=4, max_size=4))
        messages.append({"role": "user", "content": texts[0]})
        written.append(user(texts[0]))
        for step in data.draw(
            st.lists(st.sampled_from(["think", "python", "function", "preamble"]), max_size=3)
        ):
            if step == "think":
                messages.append({"role": "assistant", "channel": "analysis", "content": texts[1]})
                written.append(assistant(texts[1], "analysis"))
            elif step == "preamble":
                messages.append({"role": "assistant", "channel": "commentary", "content": texts[1]})
                written.append(assistant(texts[1], "commentary"))
            elif step == "python":
                messages.append(
                    {
                        "role": "assistant",
                        "recipient": "python",
                        "content_type": "code",
                        "content": texts[2],
                    }
                )
                messages.append({"role": "tool", "name": "python", "content": texts[3]})
                written += [
                    assistant(texts[2], "analysis", "python", "code"),
                    tool("python", texts[3], "analysis"),
                ]
            else:
                messages += [CALL | {"content": texts[2]}, REPLY | {"content": texts[3]}]
                written.append(
                    assistant(texts[2], "commentary", "functions.weather", "<|constrain|>json")
                )
                written.append(tool("functions.weather", texts[3], "commentary"))
        if data.draw(st.integers(0, 3)) > 0:
            messages.append({"role": "assistant", "content": texts[1]})
            written.append(assistant(texts[1], "final"))
    if messages[-1]["role"] == "assistant":
        messages.append(ASK)
        written.append(user("?"))

    last_answer = max(
        (i for i, message in enumerate(written) if message.channel == "final"), default=0
    )
    kept = [m for i, m in enumerate(written) if not (i < last_answer and m.channel == "analysis")]
    assert BARE.render_prompt(messages) == reference.render_for_completion(kept)
    assert BARE.render_prompt(messages, drop_analysis=False) == reference.render_for_completion(
        written
    )


# ---- messages of tools and users in an episode


def test_observations_equal_openai_harmonys(harmony: Harmony) -> None:
    outputs = [
        ToolOutput("functions.a", "commentary", "1"),
        ToolOutput("python", "analysis", "<|end|>"),
    ]
    written = [
        tool("functions.a", "1", "commentary"),
        tool("python", "<|end|>", "analysis"),
        user("Thanks."),
    ]
    expected = harmony.vocabulary.from_harmony(reference.render_for_completion(written))
    assert harmony.render_observation(outputs, "Thanks.") == expected


def test_lone_surrogate_in_an_observation_is_replaced(
    harmony: Harmony,
) -> None:
    ids = harmony.render_observation([ToolOutput("python", "analysis", "a\ud800b")], "\udfff")
    assert ids == harmony.render_observation(
        [ToolOutput("python", "analysis", "a\ufffdb")], "\ufffd"
    )


# ---- long instructions and tools


WORDS = st.text("ab 1é\n\t'.{}", max_size=40) | st.sampled_from(["x" * 300, " " * 300, "\n" * 300])
DESCRIBED = st.tuples(WORDS, WORDS, st.sampled_from([None, "object", "empty"]))


@settings(deadline=None, max_examples=100)
@given(WORDS, st.lists(DESCRIBED, max_size=3), st.booleans())
def test_long_system_prompts_equal_openai_harmonys(
    instructions: str, described: list[tuple[str, str, str | None]], is_long: bool
) -> None:
    """The prefix is rendered in parts and equals openai-harmony's rendering of the whole."""
    tools = []
    for number, (description, word, kind) in enumerate(described):
        properties = {"a": {"type": "string", "description": word, "default": "d"}}
        schema = {"type": "object", "properties": properties if kind == "object" else {}}
        tools.append(Tool(f"f{number}", description, schema if kind else None))
    if is_long:
        instructions += " word" * 3000
    messages = [{"role": "developer", "content": instructions}, {"role": "user", "content": "q"}]
    prompt = PromptConfig(current_date="2026-01-01")
    ids = Harmony(TOKENS, prompt).render_prompt(messages if instructions else messages[1:], tools)

    content = DeveloperContent.new()
    if instructions:
        content = content.with_instructions(instructions)
    if tools:
        content = content.with_function_tools([describe_function(tool) for tool in tools])
    rendered = [system_message(prompt, (), python_seconds=10.0), user("q")]
    if instructions or tools:
        rendered.insert(1, Message.from_role_and_content(Role.DEVELOPER, content))
    assert ids == reference.render_for_completion(rendered)


def test_long_words_in_a_system_prompt_render_in_bounded_time() -> None:
    word = "x" * 300_000
    parameters = {"type": "object", "properties": {"a": {"type": "string", "description": word}}}
    tools = [Tool("f", f"Does it {word}.", parameters)]
    start = time.process_time()
    text = BARE.decode(BARE.render_prompt([{"role": "developer", "content": word}], tools))
    assert time.process_time() - start < 10 * slowness()
    assert text.count(word) == 3
