"""ChatML's prompts equal the chat template's tokens, and samples are parsed or rejected."""

from __future__ import annotations

import asyncio
import json
import pickle
import random
import unicodedata
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from rl_loop.chat.messages import FormatError, ParsedMessage, ToolOutput
from rl_loop.chat.open_calls import OpenCall
from rl_loop.chat.tokenizer_vocabulary import TokenizerError, read_vocabulary
from rl_loop.chat.tools import BuiltinTool, PythonTool, Tool
from rl_loop.chatml.codec import ChatMl
from rl_loop.chatml.conversation import ChatMessage, RenderedCall
from rl_loop.chatml.prompt_config import QWEN_SYSTEM, ChatMlConfig
from rl_loop.chatml.vocabulary import TINY_MARKUP, ChatMlVocabulary, tiny_vocabulary
from rl_loop.config.episode import EpisodeLimits
from rl_loop.data.trajectory import FinishReason
from rl_loop.engines.protocol import SamplingParams
from rl_loop.environments import ENVIRONMENTS, RewardConfig, arithmetic, make_environment
from rl_loop.environments.scripted_messages import final, function_call, think
from rl_loop.harmony.vocabulary import byte_pair_tokenizer, choose_tokens
from rl_loop.rollout.agent import run_episode
from tests.support.rl_loop.chatml_vocabularies import VOCABULARIES, WORDS
from tests.support.rl_loop.scripted_engine import ScriptedEngine

CODECS = {name: ChatMl(v, ChatMlConfig()) for name, v in VOCABULARIES.items()}


def build_tokenizer(codec: ChatMl) -> Any:
    """Return transformers' tokenizer with the chat template of an export."""
    return PreTrainedTokenizerFast(
        tokenizer_object=codec.vocabulary._tokenizer,
        chat_template=codec.chat_template(),
    )


TOKENIZERS = {name: build_tokenizer(codec) for name, codec in CODECS.items()}


@pytest.fixture(params=CODECS)
def codec(request: pytest.FixtureRequest) -> ChatMl:
    return CODECS[request.param]


# ---- prompts

SEARCH = Tool(
    "search", "Finds „things“.", {"type": "object", "properties": {"q": {"type": "string"}}}
)
NOW = Tool("now", "The time, <b>always</b>.")
PYTHON = BuiltinTool("python", "Runs Python.")
TOOLS = [(), (SEARCH,), (PYTHON,), (PYTHON, NOW, SEARCH)]

USER = {"role": "user", "content": "Compute 12*34+5."}
CALL = {"name": "search", "arguments": {"q": 'naïve "x"\n', "n": [1, None, True]}}
CALLS = [
    {"id": "a", "type": "function", "function": CALL},
    {"function": {"name": "now", "arguments": {}}},
]
SYSTEM = {"role": "system", "content": "Use python. Answer in \\boxed{}."}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [USER],
    [{"role": "user", "content": ""}],
    [{"role": "user", "content": "  two\n\n\nlines \n"}],
    [USER, {"role": "assistant", "content": "413"}, {"role": "user", "content": "日本語 😀?"}],
    [
        USER,
        {"role": "assistant", "content": "", "tool_calls": CALLS[:1]},
        {"role": "tool", "content": "7"},
    ],
    [
        USER,
        {"role": "assistant", "content": "Let me see.", "tool_calls": CALLS},
        {"role": "tool", "content": "x\n"},
        {"role": "tool", "content": ""},
        {"role": "assistant", "content": "Done."},
        {"role": "user", "content": "Again."},
    ],
    [USER, {"role": "system", "content": "Be brief."}, USER],
]
CASES = [
    (system + conversation, tools)
    for system in ([], [SYSTEM])
    for conversation in CONVERSATIONS
    for tools in TOOLS
]


def described(tools: tuple[Tool | BuiltinTool, ...]) -> list[dict[str, Any]]:
    """Return tools in the form that the chat template expects."""
    functions = []
    for tool in tools:
        parameters = getattr(tool, "parameters", None) or {"type": "object", "properties": {}}
        if isinstance(tool, BuiltinTool):
            code = {"type": "string", "description": "The Python program to run."}
            parameters = {"type": "object", "properties": {"code": code}, "required": ["code"]}
        function = {"name": tool.name, "description": tool.description, "parameters": parameters}
        functions.append({"type": "function", "function": function})
    return functions


def by_template(
    name: str, messages: list[dict[str, Any]], tools: tuple[Any, ...] = ()
) -> list[int]:
    return TOKENIZERS[name].apply_chat_template(
        messages, tools=described(tools) or None, add_generation_prompt=True, return_dict=False
    )


def by_codec(
    codec: ChatMl, messages: list[dict[str, Any]], tools: tuple[Any, ...] = ()
) -> list[int]:
    builtin = [tool for tool in tools if isinstance(tool, BuiltinTool)]
    return codec.render_prompt(messages, [t for t in tools if isinstance(t, Tool)], builtin)


def test_at_least_40_chatml_cases_are_covered() -> None:
    assert len(CASES) >= 40


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("messages, tools", CASES)
def test_prompt_equals_the_templates_tokens(
    name: str, messages: list[dict[str, Any]], tools: tuple[Any, ...]
) -> None:
    assert by_codec(CODECS[name], messages, tools) == by_template(name, messages, tools)


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30).filter(
    lambda text: not any(name in text for name in TINY_MARKUP)
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
NAMES = st.from_regex(r"[A-Za-z0-9_.-]{1,12}", fullmatch=True)
FUNCTIONS = st.fixed_dictionaries(
    {"name": NAMES, "arguments": st.dictionaries(TEXT, JSON, max_size=3)}
)
ANSWERS = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": TEXT},
    optional={"tool_calls": st.lists(FUNCTIONS.map(lambda f: {"function": f}), max_size=3)},
)
OTHERS = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "tool", "system"]), "content": TEXT}
)


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=150)
@given(
    messages=st.lists(ANSWERS | OTHERS, max_size=6),
    last=OTHERS,
    tools=st.sampled_from(TOOLS),
)
def test_random_conversation_equals_the_templates_tokens(
    name: str, messages: list[dict[str, Any]], last: dict[str, Any], tools: tuple[Any, ...]
) -> None:
    conversation = [*messages, last]
    assert by_codec(CODECS[name], conversation, tools) == by_template(name, conversation, tools)


def test_qwen_prompt_equals_the_published_text(codec: ChatMl) -> None:
    """The expected text is that of Qwen2.5's chat template."""
    prompt = codec.render_prompt([USER], [NOW])
    assert codec.decode(prompt) == (
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.\n\n"
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
        '{"type": "function", "function": {"name": "now", "description": "The time, <b>always</b>.", '
        '"parameters": {"type": "object", "properties": {}}}}\n</tools>\n\n'
        "For each function call, return a json object with function name and arguments within "
        "<tool_call></tool_call> XML tags:\n<tool_call>\n"
        '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\nCompute 12*34+5.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert QWEN_SYSTEM in CODECS["qwen"].chat_template()


def test_prompt_without_system_and_tools_contains_neither() -> None:
    codec = ChatMl(VOCABULARIES["qwen"], ChatMlConfig(system=None, describe_tools=False))
    prompt = codec.render_prompt([USER], [NOW], [PythonTool()])
    assert codec.decode(prompt) == (
        "<|im_start|>user\nCompute 12*34+5.<|im_end|>\n<|im_start|>assistant\n"
    )
    template = build_tokenizer(codec).apply_chat_template(
        [USER], add_generation_prompt=True, return_dict=False
    )
    assert template == prompt


@pytest.mark.parametrize("text", ["<|im_end|>", "<|im_start|>assistant\n", "<tool_call>\n{}"])
def test_special_token_names_in_a_text_stay_text(text: str) -> None:
    codec = CODECS["qwen"]
    markup = set(codec.vocabulary.markup.values())

    def rendered(said: str) -> list[list[int]]:
        return [
            codec.render_prompt([{"role": "user", "content": said}]),
            codec.render_prompt([USER], [Tool("f", said)]),
            codec.render_observation([ToolOutput("python", "analysis", said)]),
            codec.render_observation([], user=said),
        ]

    for ids, plain in zip(rendered(text), rendered("plain"), strict=True):
        assert json.dumps(text)[1:-1] in codec.decode(ids) or text in codec.decode(ids)
        assert sum(i in markup for i in ids) == sum(i in markup for i in plain)


def test_tool_results_and_user_messages_continue_the_template(codec: ChatMl) -> None:
    name = next(key for key, value in CODECS.items() if value is codec)
    turn = [think("So."), function_call("search", q="a"), function_call("now")]
    prompt = codec.render_prompt([USER])
    sampled = codec.render_assistant(turn)
    outputs = [ToolOutput("functions.search", "x", "7\n"), ToolOutput("functions.now", "x", "é")]
    observed = codec.render_observation(outputs, user="Go on.")

    calls = [
        {"function": {"name": "search", "arguments": {"q": "a"}}},
        {"function": {"name": "now", "arguments": {}}},
    ]
    messages = [
        USER,
        {"role": "assistant", "content": "So.", "tool_calls": calls},
        {"role": "tool", "content": "7\n"},
        {"role": "tool", "content": "é"},
        {"role": "user", "content": "Go on."},
    ]
    assert prompt + sampled + observed == by_template(name, messages)


def test_lone_surrogate_becomes_the_replacement_character(codec: ChatMl) -> None:
    ids = codec.render_observation([ToolOutput("python", "analysis", "a\ud83d")], "\ude00b")
    assert "a\ufffd" in codec.decode(ids)
    assert "\ufffdb" in codec.decode(ids)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "assistant", "content": "x"}, "the prompt ends with an assistant message"),
        ({"role": "robot", "content": "x"}, r"message 1 \(role 'robot'\): the role must be one of"),
        ({"role": "user", "content": None}, "'content' must be text"),
        (
            {"role": "user", "content": "a", "thinking": "b"},
            "'thinking' cannot be rendered in ChatML",
        ),
        ({"role": "assistant", "tool_calls": [{}]}, "a tool call must have the form"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            "the arguments of f are not JSON",
        ),
        ("text", "a message must be an object"),
    ],
)
def test_message_that_chatml_cannot_render_is_rejected(message: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        CODECS["qwen"].render_prompt([USER, message])


def test_tools_with_ambiguous_chatml_names_are_rejected() -> None:
    codec = CODECS["qwen"]
    with pytest.raises(ValueError, match="two tools have the name 'now'"):
        codec.render_prompt([USER], [NOW, NOW])
    with pytest.raises(ValueError, match="'python' is reserved for the built-in tool"):
        codec.render_prompt([USER], [Tool("python", "mine")])
    with pytest.raises(ValueError, match="'browser' is for GPT-OSS only"):
        codec.render_prompt([USER], [], [BuiltinTool("browser", "looks")])


# ---- conversations of clients

MINE = Tool("python", "Mine.", {"type": "object", "properties": {"code": {"type": "string"}}})


@pytest.mark.parametrize("name", CODECS)
def test_clients_conversation_equals_the_templates_tokens(name: str) -> None:
    codec = CODECS[name]
    tools = (MINE, NOW)
    calls = [
        {"id": "a", "function": {"name": "python", "arguments": '{"code":"1+1"}'}},
        {"id": "b", "function": {"name": "now", "arguments": "{}"}},
    ]
    turn = {"role": "assistant", "content": "So.", "tool_calls": calls}
    # The second call is answered first.
    answers = [
        {"role": "tool", "tool_call_id": "b", "content": "noon"},
        {"role": "tool", "tool_call_id": "a", "content": "2"},
    ]
    more = {"role": "user", "content": "Go on."}
    parsed = [{"function": {"name": "python", "arguments": {"code": "1+1"}}}, calls[1]]
    parsed[1] = {"function": {"name": "now", "arguments": {}}}
    in_order = [USER, turn | {"tool_calls": parsed}, answers[1], answers[0], more]
    expected = by_template(name, in_order, tools)

    open_calls: list[OpenCall] = []
    messages = [{"role": "developer", "content": "Be brief."}, USER, turn, *answers, more]
    whole = codec.render_conversation(messages[1:], tools, open_calls)
    assert (whole, open_calls) == (expected, [])
    system = {"role": "system", "content": "Be brief."}
    assert codec.render_conversation(messages, tools, []) == by_template(
        name, [system, *in_order], tools
    )

    sampled = codec.render_turn(
        ChatMessage(
            "assistant",
            "So.",
            (RenderedCall("python", '{"code": "1+1"}'), RenderedCall("now", "{}")),
        )
    )
    open_calls = [
        OpenCall("a", "functions.python", "commentary"),
        OpenCall("b", "functions.now", "commentary"),
    ]
    beginning = codec.render_conversation([USER], tools, [])
    continued = codec.render_continuation([*answers, more], open_calls, 2)
    assert (beginning + sampled + continued, open_calls) == (expected, [])


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([{"role": "user", "content": "x"}], r"message 2 .*functions\.f \(a\) has no tool output"),
        (
            [{"role": "tool", "content": "x", "tool_call_id": "b"}],
            r"functions\.f \(a\) has no tool output",
        ),
        ([{"role": "tool", "content": "x", "tool_call_id": "c"}], "no open call with id 'c'"),
        ([{"role": "tool", "content": "x", "name": "g"}], "no open call of g"),
    ],
)
def test_tool_results_that_do_not_match_the_calls_are_rejected(
    messages: list[dict[str, Any]], reason: str
) -> None:
    open_calls = [OpenCall(name, "functions.f", "commentary") for name in "ab"]
    with pytest.raises(ValueError, match=reason):
        CODECS["qwen"].render_continuation(messages, open_calls, 2)


def test_clients_lone_surrogate_is_rejected(codec: ChatMl) -> None:
    call = {"function": {"name": "now", "arguments": r'{"a": "\ud83d"}'}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    with pytest.raises(ValueError, match="half of a surrogate pair"):
        codec.render_conversation([USER, turn, {"role": "tool", "content": "x"}], (), [])
    with pytest.raises(ValueError, match="half of a surrogate pair"):
        codec.render_conversation([USER], (Tool("now", "a\ud83d"),), [])


def test_client_receives_calls_as_functions_and_text_as_text(codec: ChatMl) -> None:
    turn = [think("So."), PROGRAM]
    [text, call] = codec.parse_for_client(codec.render_assistant(turn))
    assert text == ParsedMessage("commentary", None, None, "So.")
    assert (call.recipient, json.loads(call.text)) == ("functions.python", {"code": PROGRAM.text})
    answer = codec.render_assistant([final("Done.")])
    assert codec.parse_for_client(answer) == codec.parse(answer)
    assert codec.parse_for_client(answer[:-1]) == FormatError("structure")


# ---- sampled turns

PROGRAM = ParsedMessage("analysis", "python", "code", 'print("é")\n')
TURNS = [
    [final(r"\boxed{413}")],
    [final("")],
    [PROGRAM],
    [think("Use python."), PROGRAM],
    [think("Both.\n"), PROGRAM, function_call("search", q="x", n=[1])],
]


@pytest.mark.parametrize("turn", TURNS)
def test_rendered_turn_parses_to_the_same_messages(
    codec: ChatMl, turn: list[ParsedMessage]
) -> None:
    ids = codec.render_assistant(turn)
    assert codec.parse(ids) == turn
    assert ids[-1] in codec.stop_token_ids


def test_thoughts_before_an_answer_are_part_of_the_answer(codec: ChatMl) -> None:
    ids = codec.render_assistant([think("I know."), final(r"\boxed{1}")])
    assert codec.parse(ids) == [final("I know.\n\\boxed{1}")]


@example(thought="\ufa0a", calls=[{"name": "f", "arguments": {"\uf900": "e\u0301"}}])
@settings(max_examples=100)
@given(thought=TEXT, calls=st.lists(FUNCTIONS, min_size=1, max_size=3))
def test_random_calls_parse_to_the_same_calls(thought: str, calls: list[dict[str, Any]]) -> None:
    codec = CODECS["qwen"]
    messages = [think(thought)] if thought else []
    messages += [function_call(call["name"], **{}) for call in calls]
    for number, call in enumerate(calls, start=len(messages) - len(calls)):
        text = json.dumps(call["arguments"])
        messages[number] = ParsedMessage("commentary", f"functions.{call['name']}", "x", text)

    parsed = codec.parse(codec.render_assistant(messages))
    assert isinstance(parsed, list)
    # Qwen's tokenizer normalizes text to composed characters.
    said = [composed(thought)] if thought else []
    assert [m.text for m in parsed if m.recipient is None] == said
    found = [m for m in parsed if m.recipient is not None]
    for message, call in zip(found, calls, strict=True):
        if message.recipient == "python":
            assert call["name"] == "python"
            assert message.text == composed(call["arguments"]["code"])
        else:
            assert message.recipient == f"functions.{call['name']}"
            arguments = json.dumps(call["arguments"], ensure_ascii=False)
            assert json.loads(message.text) == json.loads(composed(arguments))


def composed(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def spelled(codec: ChatMl, text: str) -> list[int]:
    """Return the ids of a text in which names of special tokens are special tokens."""
    return codec.vocabulary._tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("no end", "structure"),
        ("", "structure"),
        ("a<|endoftext|>", "structure"),
        ("a<|im_start|>b<|im_end|>", "structure"),
        ("a<|im_end|>b<|im_end|>", "structure"),
        ("<tool_call>\n{<|im_end|>", "tool_call"),
        ("<tool_call>\n{}\n</tool_call><|im_end|>", "tool_call"),
        ('<tool_call>{"name": 1}</tool_call><|im_end|>', "tool_call"),
        ("<tool_call>[1]</tool_call><|im_end|>", "tool_call"),
        ('<tool_call>{"name": "f"} x</tool_call><|im_end|>', "tool_call"),
        ('<tool_call>{"name": "f"}</tool_call>and text<|im_end|>', "tool_call"),
        ('<tool_call>{"name": "f"}<tool_call></tool_call><|im_end|>', "tool_call"),
        ("a</tool_call><|im_end|>", "tool_call"),
        ("<tool_call>" + "[" * 5000 + "</tool_call><|im_end|>", "tool_call"),
    ],
)
def test_malformed_turn_is_a_format_error_with_a_reason(
    codec: ChatMl, text: str, kind: str
) -> None:
    assert codec.parse(spelled(codec, text)) == FormatError(kind)


@pytest.mark.parametrize("arguments", ["3", '"{}"', "[]", '{"program": "x"}', '{"code": 1}'])
def test_call_arguments_of_wrong_type_reach_the_environment(codec: ChatMl, arguments: str) -> None:
    text = f'<tool_call>{{"name": "python", "arguments": {arguments}}}</tool_call><|im_end|>'
    [call] = codec.parse(spelled(codec, text))  # type: ignore[misc]
    assert isinstance(call, ParsedMessage)
    assert call.recipient == "functions.python"
    assert json.loads(call.text) == json.loads(arguments)


def test_program_with_a_lone_surrogate_is_executable(codec: ChatMl) -> None:
    text = '<tool_call>{"name": "python", "arguments": {"code": "\\ud83d"}}</tool_call><|im_end|>'
    [call] = codec.parse(spelled(codec, text))  # type: ignore[misc]
    assert isinstance(call, ParsedMessage)
    assert call.text == "\ufffd"


def test_token_id_unknown_to_the_tokenizer_is_a_format_error(codec: ChatMl) -> None:
    unused = codec.vocabulary.size - 1
    assert codec.parse([unused, codec.vocabulary.markup["<|im_end|>"]]) == FormatError("structure")
    assert codec.decode([unused]) == f"<|unused_{unused}|>"


def test_turn_is_split_at_its_calls_and_joined_again(codec: ChatMl) -> None:
    turn = [think("So."), PROGRAM]
    ids = codec.render_assistant(turn)
    thought, call = codec.split_at_calls(ids, turn)
    assert codec.decode(thought) == "So.\n"
    assert codec.join_with_calls(thought, call) == ids

    other = codec.render_assistant([function_call("now")])
    assert codec.split_at_calls(other, [function_call("now")]) == ([], other)
    joined = codec.parse(codec.join_with_calls(thought, other))
    assert joined == [think("So."), function_call("now")]


# ---- whole episodes of random turns

PIECES = [
    *TINY_MARKUP, "\n", "assistant", "So.", '{"name": "python", "arguments": {"code": "print(2)"}}',
    '{"name": "fetch_email", "arguments": {"email": "m1"}}', '{"name": "nothing"}', "{", "é", "😀",
    "<tool_call>\n", "\n</tool_call>", r"\boxed{1}", "",
]  # fmt: skip
LIMITS = EpisodeLimits(
    max_turns=4,
    max_episode_tokens=4000,
    max_episode_seconds=60,
    max_tool_calls=5,
    max_sampled_tokens=400,
)


def sampled_turn(codec: ChatMl, rng: random.Random) -> list[int]:
    """Return the ids of a random turn that ends with a stop token or at the limit."""
    kind = rng.randrange(4)
    if kind == 0:
        ids = [rng.randrange(codec.vocabulary.size) for _ in range(rng.randrange(1, 40))]
    elif kind == 1:
        ids = spelled(codec, "".join(rng.choice(PIECES) for _ in range(rng.randrange(1, 14))))
    else:
        ids = codec.render_assistant(
            rng.choice([*TURNS, [function_call("fetch_email", email="m1")]])
        )
        if rng.random() < 0.3:
            ids[rng.randrange(len(ids))] = rng.randrange(codec.vocabulary.size)
    ids = ids[:390] or [0]
    stops = [i for i, token in enumerate(ids) if token in codec.stop_token_ids]
    return ids[: stops[0] + 1] if stops else [*ids, rng.choice(codec.stop_token_ids)]


def play(codec: ChatMl, rng: random.Random) -> FinishReason:
    kind = ENVIRONMENTS.resolve(rng.choice(["retool", "incident", "gsm8k"]))
    options = {"tools": True} if kind.__name__.startswith("Gsm8k") else {}
    task = kind.generate("train", 0, rng.randrange(100), kind.Options.model_validate(options))
    engine = ScriptedEngine([sampled_turn(codec, rng) for _ in range(5)])
    environment = make_environment(task, arithmetic.interpret, RewardConfig())
    episode = asyncio.run(
        run_episode("t", environment, engine, codec, LIMITS, SamplingParams(300), seed=1)
    )

    sampled = [token for result in engine.results for token in result.output_ids]
    assert episode.token_ids[episode.loss_mask].tolist() == sampled
    markup = {codec.vocabulary.markup[name] for name in TINY_MARKUP[:3]}
    for turn in episode.turns:
        if turn.role == "tool":
            ids = episode.token_ids[turn.start : turn.end].tolist()
            assert sum(token in markup for token in ids) == 3
    assert (episode.format_error is not None) == (
        episode.finish_reason is FinishReason.FORMAT_ERROR
    )
    return episode.finish_reason


def rounds(count: int) -> Iterator[FinishReason]:
    for number in range(count):
        codec = CODECS["qwen" if number % 2 else "smollm"]
        yield play(codec, random.Random(f"0/{number}"))


def test_fuzzed_episodes_end_with_a_reason_and_keep_their_tokens() -> None:
    ends = Counter(rounds(150))
    assert {FinishReason.STOP, FinishReason.FORMAT_ERROR} <= set(ends)


# ---- tokenizers


def test_invalid_tokenizer_directory_is_rejected_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: No such file"):
        read_vocabulary(ChatMlVocabulary, tmp_path, 1200)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="cannot be read as a tokenizer"):
        read_vocabulary(ChatMlVocabulary, tmp_path, 1200)

    VOCABULARIES["qwen"].save(tmp_path)
    with pytest.raises(TokenizerError, match=r"has ids up to \d+, but model\.vocab_size is 300"):
        read_vocabulary(ChatMlVocabulary, tmp_path, 300)
    vocabulary = read_vocabulary(ChatMlVocabulary, tmp_path, 1200)
    assert vocabulary.encode_text(WORDS) == VOCABULARIES["qwen"].encode_text(WORDS)
    assert vocabulary.save(tmp_path) == []

    plain = byte_pair_tokenizer(choose_tokens(WORDS))
    plain.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match=r"has no token <\|im_start\|>"):
        read_vocabulary(ChatMlVocabulary, tmp_path, 1200)


def test_copied_vocabulary_prints_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The added tokens have ids behind the vocabulary, as those of Qwen2.5."""
    VOCABULARIES["qwen"].save(tmp_path)
    vocabulary = read_vocabulary(ChatMlVocabulary, tmp_path, 1200)
    copied = pickle.loads(pickle.dumps(vocabulary))
    assert copied.encode_text(WORDS) == vocabulary.encode_text(WORDS)
    assert capfd.readouterr() == ("", "")


def test_too_small_vocabulary_is_rejected_with_the_needed_size() -> None:
    with pytest.raises(
        TokenizerError,
        match=r"needs \d+ ids for the texts of these tasks, but model\.vocab_size is 300",
    ):
        tiny_vocabulary(300, WORDS)


def test_long_texts_are_tokenized_in_time(codec: ChatMl) -> None:
    text = "\ufffd" * 65_536
    assert codec.vocabulary.decode(codec.vocabulary.encode_text(text)) == text
