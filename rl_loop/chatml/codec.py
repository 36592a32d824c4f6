"""Renders prompts and tool output to ChatML tokens, and parses sampled turns.

The tokens are the same as those of Qwen2.5's chat template:

    <|im_start|>system
    TEXT, and the tools as JSON<|im_end|>
    <|im_start|>user
    TEXT<|im_end|>
    <|im_start|>assistant
    THOUGHTS
    <tool_call>
    {"name": "python", "arguments": {"code": "print(1)"}}
    </tool_call><|im_end|>
    <|im_start|>user
    <tool_response>
    1
    </tool_response><|im_end|>

ChatML has no channels. Text before calls corresponds to Harmony's analysis. A turn without calls is
the final answer as a whole, including thoughts.
"""

import json
import re
from bisect import bisect_left
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, takewhile
from typing import Any

from rl_loop.chat.codec import Effort, without_surrogates
from rl_loop.chat.messages import FormatError, ParsedMessage, ToolOutput, TruncatedTurn
from rl_loop.chat.open_calls import OpenCall
from rl_loop.chat.tools import FUNCTIONS, BuiltinTool, PythonTool, Tool, check_names
from rl_loop.chatml.chat_template import CHAT_TEMPLATE
from rl_loop.chatml.conversation import (
    ChatMessage,
    RenderedCall,
    answered_messages,
    chat_messages,
)
from rl_loop.chatml.prompt_config import ChatMlConfig
from rl_loop.chatml.turn_reader import ChatMlReader
from rl_loop.chatml.vocabulary import (
    IM_END,
    IM_START,
    TOOL_CALL,
    TOOL_CALL_END,
    ChatMlVocabulary,
)

TOOLS_BEGIN = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>"""
TOOLS_END = """
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""
"""Qwen2.5's text about tools."""

MARKUP = re.compile(f"({re.escape(TOOL_CALL)}|{re.escape(TOOL_CALL_END)})")
PYTHON = "python"


@dataclass(frozen=True)
class _Markup:
    """Name of a token that is not text."""

    name: str


Piece = str | _Markup


@dataclass(frozen=True)
class _SampledCall:
    """Sampled call."""

    name: str
    arguments: Any
    """JSON value."""


@dataclass(frozen=True)
class _SampledTurn:
    """Sampled turn."""

    text: str
    """Text before the calls, or the whole turn if there are none."""
    calls: Sequence[_SampledCall] = ()


class ChatMl:
    """Renders and parses with one vocabulary. Implements ``rl_loop.chat.codec.ChatCodec``."""

    knows_reasoning_effort = False

    def __init__(
        self, vocabulary: ChatMlVocabulary, prompt: ChatMlConfig, python_seconds: float = 10.0
    ) -> None:
        """Create a codec.

        Args:
            vocabulary: token ids of the model.
            prompt: options of the system message.
            python_seconds: time limit of the sandbox, for the description of Python.
        """
        self.vocabulary = vocabulary
        self.stop_token_ids = vocabulary.stop_token_ids
        self._prompt = prompt
        self._python_seconds = python_seconds
        self._end = vocabulary.markup[IM_END]

    # ---- rendering

    def render_prompt(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[Tool] = (),
        builtin_tools: Sequence[BuiltinTool | PythonTool] = (),
    ) -> list[int]:
        """Render a conversation up to the beginning of the assistant's turn.

        Args:
            messages: messages in the format of ``rl_loop.chatml.conversation``.
            tools: functions for the system message.
            builtin_tools: Python, described as a function of one argument, ``code``.

        Raises:
            ValueError: if a message or a tool cannot be rendered. The error names it.
        """
        return self.render_prefix(chat_messages(messages), (*builtin_tools, *tools))

    def render_prefix(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool | BuiltinTool | PythonTool] = (),
    ) -> list[int]:
        """Render messages that were read, like ``render_prompt``. Raises ValueError for a tool."""
        return self._render_prefix(messages, self._described(tools))

    def _render_prefix(
        self, messages: Sequence[ChatMessage], functions: Sequence[dict[str, Any]]
    ) -> list[int]:
        """Render a description of ``functions``, in OpenAI's format, and then the messages."""
        # A system message of the conversation replaces the configured one, as in Qwen2.5's
        # template.
        system = self._prompt.system
        rest = list(messages)
        if rest and rest[0].role == "system":
            system = rest.pop(0).text
        pieces = _system_pieces(system, functions)
        return self._encode(pieces + _conversation_pieces(rest) + _ASSISTANT)

    def render_conversation(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[Tool],
        open_calls: list[OpenCall],
        *,
        reasoning_effort: Effort | None = None,
        keys: Sequence[bytes] = (),
    ) -> list[int]:
        """Render a client's conversation of which no tokens exist: see ``ChatCodec``.

        Its tools are always described, whatever the configuration says about the environment's
        tools. A tool may be named python.
        """
        check_names(tools)
        read = answered_messages(messages, open_calls)
        return self._render_prefix(read, [_openai_function(tool) for tool in tools])

    def render_continuation(
        self, messages: Sequence[dict[str, Any]], open_calls: list[OpenCall], first_number: int
    ) -> list[int]:
        """Render messages behind tokens that end with a turn: see ``ChatCodec``."""
        return self.render_replies(answered_messages(messages, open_calls, first_number))

    def render_observation(
        self, outputs: Sequence[ToolOutput], user: str | None = None
    ) -> list[int]:
        """Render the answers of tools to a sampled turn, and then the user's message.

        The result ends at the beginning of the assistant's turn. Lone surrogates become U+FFFD.

        Args:
            outputs: results of the tools.
            user: next message of the user.
        """
        messages = [ChatMessage("tool", without_surrogates(output.text)) for output in outputs]
        if user is not None:
            messages.append(ChatMessage("user", without_surrogates(user)))
        return self.render_replies(messages)

    def render_replies(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Render the messages between two turns of the assistant.

        The result begins with the line break behind the first turn and ends with the second's
        header.
        """
        # The end of a turn is sampled, but the line break behind it is not.
        return self._encode(["\n", *_conversation_pieces(messages), *_ASSISTANT])

    def render_assistant(self, messages: Sequence[ParsedMessage]) -> list[int]:
        """Render a turn with its stop token exactly as a policy would sample it behind a prompt.

        Thoughts and an answer become one text, with a line each.
        """
        text = "\n".join(m.text for m in messages if m.recipient is None and m.text)
        calls = tuple(_build_call(m) for m in messages if m.recipient is not None)
        return self.render_turn(ChatMessage("assistant", text, calls))

    def render_turn(self, message: ChatMessage, is_truncated: bool = False) -> list[int]:
        """Render a turn as a policy would sample it, without a stop token if it was cut off."""
        end: list[Piece] = [] if is_truncated else [_Markup(IM_END)]
        return self._encode([*_turn_pieces(message), *end])

    def chat_template(self) -> str:
        """Return the Jinja template for an export with a tiny vocabulary."""
        system = json.dumps(self._prompt.system or "")
        return f"{{%- set default_system = {system} -%}}\n{CHAT_TEMPLATE}"

    def _described(self, tools: Sequence[Tool | BuiltinTool | PythonTool]) -> list[dict[str, Any]]:
        """Return the tools in OpenAI's format. Raises ValueError if one cannot be described."""
        check_names(tools)
        # Tools are read even if the prompt does not describe them, so that a wrong one is always
        # an error.
        functions: list[dict[str, Any]] = []
        for tool in tools:
            if isinstance(tool, PythonTool):
                tool = tool.in_sandbox(self._python_seconds)
            if isinstance(tool, Tool) and tool.name == PYTHON:
                raise ValueError(
                    "in ChatML the name 'python' is reserved for the built-in tool. Rename the "
                    "function"
                )
            if isinstance(tool, BuiltinTool):
                tool = _python_function(tool)
            functions.append(_openai_function(tool))
        return functions if self._prompt.describe_tools else []

    def _encode(self, pieces: Sequence[Piece]) -> list[int]:
        """Encode pieces. The pieces between two markup tokens are encoded as one text.

        Raises:
            ValueError: for a lone surrogate, which JSON can contain in arguments and tools.
        """
        ids: list[int] = []
        waiting = ""
        for piece in pieces:
            if isinstance(piece, str):
                waiting += piece
                continue
            # Some tokenizers have no tokens for calls. These are then encoded as text.
            token_id = self.vocabulary.markup.get(piece.name)
            if token_id is None:
                waiting += piece.name
                continue
            ids += self._encode_text(waiting)
            waiting = ""
            ids.append(token_id)
        return ids + self._encode_text(waiting)

    def _encode_text(self, text: str) -> list[int]:
        if not text:
            return []
        if without_surrogates(text) != text:
            raise ValueError(
                "the text contains half of a surrogate pair, which UTF-8 cannot encode"
            )
        return self.vocabulary.encode_text(text)

    def encode_sampled(self, text: str) -> list[int]:
        """Encode a turn that a person wrote. Names of markup tokens become these tokens."""
        # Longer names first, because one name can begin with another.
        names = sorted(self.vocabulary.markup, key=len, reverse=True)
        split = re.split(f"({'|'.join(map(re.escape, names))})", text)
        return self._encode([_Markup(part) if part in names else part for part in split])

    # ---- parsing

    def parse(self, ids: Sequence[int]) -> list[ParsedMessage] | FormatError:
        """Parse one sampled turn with its stop token: thoughts, then calls or a final answer.

        ``<tool_call>`` in ordinary tokens counts as the token, as in servers of this format.
        Recipients are not checked, because the environment knows its tools.
        """
        turn = self._read_turn(ids)
        if isinstance(turn, FormatError):
            return turn
        return _build_messages(turn, "analysis", [_environment_call(call) for call in turn.calls])

    def parse_for_client(self, ids: Sequence[int]) -> list[ParsedMessage] | FormatError:
        """Parse a turn whose calls are all a client's functions: see ``ChatCodec``."""
        turn = self._read_turn(ids)
        if isinstance(turn, FormatError):
            return turn
        # Text before calls is a message to the client, who sends it back, because ChatML has no
        # thoughts.
        return _build_messages(turn, "commentary", [_function_call(call) for call in turn.calls])

    def parse_truncated_for_client(self, ids: Sequence[int]) -> TruncatedTurn:
        """Parse a turn that a limit cut off: see ``ChatCodec``.

        The conversation continues behind the whole turn. A truncated call is ignored.
        """
        messages = self.parse_for_client([*ids, self._end])
        if isinstance(messages, FormatError):
            text = self.vocabulary.decode(ids)
            # Name and arguments of a call are one JSON value, so nothing of a truncated one can be
            # read. Only the last call can be truncated. Read the text before it.
            whole = text[: text.rfind(TOOL_CALL)] if messages.kind == "tool_call" else ""
            turn = _parse_turn(whole.removesuffix("\n"))
            messages = []
            if isinstance(turn, _SampledTurn) and (turn.text or turn.calls):
                messages = _build_messages(
                    turn, "commentary", list(map(_function_call, turn.calls))
                )
        return TruncatedTurn(messages, (self._end,))

    def without_finished_analysis(self, ids: Sequence[int]) -> list[int]:
        """Return all of a conversation, because ChatML shows earlier turns in full."""
        return list(ids)

    def turn_grammar(self, answer: str | None, arguments: Mapping[str, str]) -> str:
        """Return a grammar of turns: see ``ChatCodec``. ChatML has no thoughts."""
        markup = self.vocabulary.markup

        def tag(name: str) -> str:
            # Some tokenizers have no tokens for calls.
            return f"<[{markup[name]}]>" if name in markup else json.dumps(name)

        turns = []
        rules = []
        if answer is not None:
            turns.append("answer")
            rules.append(f"answer: %json {answer}")
        for number, (name, schema) in enumerate(arguments.items()):
            quoted = json.dumps(name, ensure_ascii=False)
            head = json.dumps(f'\n{{"name": {quoted}, "arguments": ', ensure_ascii=False)
            turns.append(f"call_{number}")
            rules.append(
                f"call_{number}: {tag(TOOL_CALL)} {head} arguments_{number} "
                f'"}}\\n" {tag(TOOL_CALL_END)}'
            )
            rules.append(f"arguments_{number}: %json {schema}")
        return "\n".join([f"start: ({' | '.join(turns)}) {tag(IM_END)}", *rules])

    def turn_reader(self, recipients: Container[str], stop: Sequence[str]) -> ChatMlReader:
        """Return a reader of a turn that is being sampled: see ``ChatCodec``."""
        return ChatMlReader(self.vocabulary, stop)

    def answer_ranges(self, sampled: Sequence[int]) -> list[range]:
        """Return the positions of the text before the calls: see ``ChatCodec``."""
        pieces = [self.vocabulary.token_bytes(i) for i in takewhile(self._is_text, sampled)]
        text, call, _ = b"".join(pieces).partition(TOOL_CALL.encode())
        # The line break before a call belongs to the format, as in ``_parse_turn``.
        if call or (len(pieces) < len(sampled) and sampled[len(pieces)] != self._end):
            text = text.removesuffix(b"\n")
        starts = accumulate((len(piece) for piece in pieces), initial=0)
        return [range(sum(start < len(text) for start in islice(starts, len(pieces))))]

    def _is_text(self, token_id: int) -> bool:
        return self.vocabulary.is_text(token_id)

    def reasoning_tokens(self, sampled: Sequence[int]) -> int:
        """Return 0, because ChatML has no thoughts."""
        return 0

    def _read_turn(self, ids: Sequence[int]) -> "_SampledTurn | FormatError":
        markup = self.vocabulary.markup
        # Any other markup would begin another message, or is an id that the tokenizer does not
        # have.
        call_tokens = {markup.get(TOOL_CALL), markup.get(TOOL_CALL_END)}
        body = ids[:-1]
        is_legal = all(self.vocabulary.is_text(i) or i in call_tokens for i in body)
        if not ids or ids[-1] != self._end or not is_legal:
            return FormatError("structure")

        return _parse_turn(self.vocabulary.decode(body))

    def split_at_calls(
        self, ids: Sequence[int], messages: Sequence[ParsedMessage]
    ) -> tuple[list[int], list[int]]:
        """Split a turn with calls into reasoning, with the line break behind it, and calls.

        The reasoning is empty if a token spans the boundary.
        """
        text = self.decode(ids)
        border = text.index(TOOL_CALL)
        # Text grows with every token, so bisection finds the first tokens that reach the boundary.
        position = bisect_left(range(len(ids)), border, key=lambda n: len(self.decode(ids[:n])))
        if self.decode(ids[:position]) != text[:border]:
            return [], list(ids)
        return list(ids[:position]), list(ids[position:])

    def join_with_calls(self, reasoning: Sequence[int], calls: Sequence[int]) -> list[int]:
        """Concatenate results of ``split_at_calls``, of one turn or of two turns."""
        return [*reasoning, *calls]

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids of the model. Markup is written as text."""
        return self.vocabulary.decode(ids)

    def decode_token(self, token_id: int) -> str:
        """Decode one id of the model."""
        return self.vocabulary.decode([token_id])


# The generation prompt of Qwen2.5's template.
_ASSISTANT: list[Piece] = [_Markup(IM_START), "assistant\n"]


def _system_pieces(system: str | None, functions: Sequence[dict[str, Any]]) -> list[Piece]:
    """Return the system message with a description of tools. Empty if there is neither."""
    if system is None and not functions:
        return []
    pieces: list[Piece] = [_Markup(IM_START), "system\n", system or ""]
    if functions:
        if system is not None:
            pieces.append("\n\n")
        # The text of transformers' tojson filter: characters are not escaped, and keys keep their
        # order.
        described = "".join(
            f"\n{json.dumps(function, ensure_ascii=False)}" for function in functions
        )
        # The template's text contains tokens of calls, but descriptions are plain text.
        pieces += [TOOLS_BEGIN, described, *_with_markup(TOOLS_END)]
    return [*pieces, _Markup(IM_END), "\n"]


def _conversation_pieces(messages: Sequence[ChatMessage]) -> list[Piece]:
    """Render consecutive messages."""
    # Padded at both ends, so that every message has a neighbor on each side.
    is_tool = [False, *(message.role == "tool" for message in messages), False]
    pieces: list[Piece] = []
    for number, message in enumerate(messages):
        pieces += _message_pieces(message, is_tool[number], is_tool[number + 2])
    return pieces


def _message_pieces(message: ChatMessage, follows_tool: bool, more_answers: bool) -> list[Piece]:
    """Render a message. Consecutive answers of tools become one message of the user.

    Args:
        message: message to render.
        follows_tool: True if the previous message is a tool's answer.
        more_answers: True if the next message is a tool's answer.
    """
    if message.role == "tool":
        # Only the first answer opens a message, and only the last one closes it.
        pieces: list[Piece] = [] if follows_tool else [_Markup(IM_START), "user"]
        pieces.append(f"\n<tool_response>\n{message.text}\n</tool_response>")
        return pieces if more_answers else [*pieces, _Markup(IM_END), "\n"]

    body: list[Piece] = [message.text]
    if message.role == "assistant":
        body = _turn_pieces(message)
    return [_Markup(IM_START), f"{message.role}\n", *body, _Markup(IM_END), "\n"]


def _turn_pieces(message: ChatMessage) -> list[Piece]:
    """Render the text and calls of an assistant's turn, without header and end."""
    pieces: list[Piece] = [message.text] if message.text else []
    # Every call begins on its own line, but an empty text has no line.
    for number, call in enumerate(message.calls):
        if message.text or number > 0:
            pieces.append("\n")
        pieces += [
            _Markup(TOOL_CALL),
            f'\n{{"name": "{call.name}", "arguments": {call.arguments}}}\n',
            _Markup(TOOL_CALL_END),
        ]
    return pieces


def _with_markup(text: str) -> list[Piece]:
    """Split the template's text into text and tokens of calls."""
    return [_Markup(part) if MARKUP.fullmatch(part) else part for part in MARKUP.split(text)]


def _openai_function(tool: Tool) -> dict[str, Any]:
    parameters = tool.parameters or {"type": "object", "properties": {}}
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}


def _python_function(tool: BuiltinTool) -> Tool:
    """Return Python as a function. Raises ValueError for another built-in tool."""
    if tool.name != PYTHON or tool.functions:
        raise ValueError(
            f"the built-in tool {tool.name!r} is for GPT-OSS only. ChatML supports only python"
        )
    # ChatML has no built-in tools, so a program is the argument of a function.
    code = {"type": "string", "description": "The Python program to run."}
    schema = {"type": "object", "properties": {"code": code}, "required": ["code"]}
    return Tool(tool.name, tool.description, schema)


def _build_call(message: ParsedMessage) -> RenderedCall:
    """Return a call in ChatML's form. Raises ValueError if its arguments are not JSON."""
    assert message.recipient is not None
    if message.recipient == PYTHON:
        return RenderedCall(PYTHON, json.dumps({"code": message.text}, ensure_ascii=False))
    name = message.recipient.removeprefix(FUNCTIONS)
    # Written again, so that demonstrations have the spacing of the template.
    return RenderedCall(name, json.dumps(json.loads(message.text), ensure_ascii=False))


def call_recipient(call: RenderedCall) -> str:
    """Return the recipient of a call for environments."""
    return PYTHON if call.name == PYTHON else f"{FUNCTIONS}{call.name}"


def _sampled_call(parts: Sequence[str]) -> _SampledCall | None:
    """Parse <tool_call>, JSON, </tool_call> and following text. None if it is not a call."""
    # Only spaces and line breaks may stand behind a call.
    if len(parts) != 4 or parts[0] != TOOL_CALL or parts[2] != TOOL_CALL_END or parts[3].strip():
        return None
    try:
        call = json.loads(parts[1])
    except (ValueError, RecursionError):
        return None
    # Arguments are not checked here, because the environment knows the function's schema.
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None

    return _SampledCall(call["name"], call.get("arguments", {}))


def _parse_turn(said: str) -> _SampledTurn | FormatError:
    """Parse the text of a turn, including the markup of its calls."""
    # The group of the pattern keeps the markup among the parts.
    text, *parts = MARKUP.split(said)
    if not parts:
        return _SampledTurn(text)

    # The parts are: begin, JSON, end, following text; begin again...
    calls: list[_SampledCall] = []
    for start in range(0, len(parts), 4):
        call = _sampled_call(parts[start : start + 4])
        if call is None:
            return FormatError("tool_call")
        calls.append(call)

    # The line break before the first call belongs to the format.
    return _SampledTurn(text.removesuffix("\n"), calls)


def _build_messages(
    turn: _SampledTurn, channel: str, calls: list[ParsedMessage]
) -> list[ParsedMessage]:
    """Return a turn's text and its ``calls``. Text before calls gets ``channel``."""
    # Without calls the text is the answer, even if it is empty.
    if not calls:
        return [ParsedMessage("final", None, None, turn.text)]
    if not turn.text:
        return calls
    return [ParsedMessage(channel, None, None, turn.text), *calls]


def _environment_call(call: _SampledCall) -> ParsedMessage:
    """Return a call for environments: a program of Python, or a function's arguments."""
    arguments = call.arguments
    is_program = isinstance(arguments, dict) and arguments.keys() == {"code"}
    if call.name == PYTHON and is_program and isinstance(arguments["code"], str):
        # JSON can contain a lone surrogate, but a program cannot.
        return ParsedMessage("analysis", PYTHON, "code", without_surrogates(arguments["code"]))
    return _function_call(call)


def _function_call(call: _SampledCall) -> ParsedMessage:
    text = json.dumps(call.arguments, ensure_ascii=False)
    return ParsedMessage(
        "commentary", f"{FUNCTIONS}{call.name}", "<|constrain|>json", without_surrogates(text)
    )
