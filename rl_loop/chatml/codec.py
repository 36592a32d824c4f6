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
from itertools import accumulate, islice, takewhile
from typing import Any

from rl_loop.chat.codec import Effort, without_surrogates
from rl_loop.chat.messages import FormatError, ParsedMessage, ToolOutput, TruncatedTurn
from rl_loop.chat.open_calls import OpenCall
from rl_loop.chat.tools import BuiltinTool, PythonTool, Tool, check_names
from rl_loop.chatml.chat_template import CHAT_TEMPLATE
from rl_loop.chatml.conversation import ChatMessage, chat_messages, client_messages
from rl_loop.chatml.functions import PYTHON, build_call, openai_function, python_function
from rl_loop.chatml.pieces import (
    GENERATION_PROMPT,
    Markup,
    Piece,
    conversation_pieces,
    system_pieces,
    turn_pieces,
)
from rl_loop.chatml.prompt_config import ChatMlConfig
from rl_loop.chatml.sampled_turn import (
    ParsedTurn,
    build_messages,
    environment_call,
    function_call,
    parse_turn,
)
from rl_loop.chatml.turn_reader import ChatMlReader
from rl_loop.chatml.vocabulary import IM_END, TOOL_CALL, TOOL_CALL_END, ChatMlVocabulary


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
        return self._render_prefix(messages, self._describe(tools))

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
        pieces = system_pieces(system, functions)
        return self._encode(pieces + conversation_pieces(rest) + GENERATION_PROMPT)

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
        read = client_messages(messages, open_calls)
        return self._render_prefix(read, [openai_function(tool) for tool in tools])

    def render_continuation(
        self, messages: Sequence[dict[str, Any]], open_calls: list[OpenCall], first_number: int
    ) -> list[int]:
        """Render messages behind tokens that end with a turn: see ``ChatCodec``."""
        return self.render_replies(client_messages(messages, open_calls, first_number))

    def render_observation(
        self, outputs: Sequence[ToolOutput], user: str | None = None
    ) -> list[int]:
        """Render the outputs of a sampled turn's calls, and then the user's message.

        The result ends at the beginning of the assistant's turn. Lone surrogates become U+FFFD.

        Args:
            outputs: tool outputs, in the order of the calls.
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
        return self._encode(["\n", *conversation_pieces(messages), *GENERATION_PROMPT])

    def render_assistant(self, messages: Sequence[ParsedMessage]) -> list[int]:
        """Render a turn with its stop token exactly as a policy would sample it behind a prompt.

        Thoughts and an answer become one text, with a line each.
        """
        text = "\n".join(m.text for m in messages if m.recipient is None and m.text)
        calls = tuple(build_call(m) for m in messages if m.recipient is not None)
        return self.render_turn(ChatMessage("assistant", text, calls))

    def render_turn(self, message: ChatMessage, is_truncated: bool = False) -> list[int]:
        """Render a turn as a policy would sample it, without a stop token if it was cut off."""
        end: list[Piece] = [] if is_truncated else [Markup(IM_END)]
        return self._encode([*turn_pieces(message), *end])

    def chat_template(self) -> str:
        """Return the Jinja template for an export with a tiny vocabulary."""
        system = json.dumps(self._prompt.system or "")
        return f"{{%- set default_system = {system} -%}}\n{CHAT_TEMPLATE}"

    def _describe(self, tools: Sequence[Tool | BuiltinTool | PythonTool]) -> list[dict[str, Any]]:
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
                tool = python_function(tool)
            functions.append(openai_function(tool))
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
        return self._encode([Markup(part) if part in names else part for part in split])

    # ---- parsing

    def parse(self, ids: Sequence[int]) -> list[ParsedMessage] | FormatError:
        """Parse one sampled turn with its stop token: thoughts, then calls or a final answer.

        ``<tool_call>`` in ordinary tokens counts as the token, as in servers of this format.
        Recipients are not checked, because the environment knows its tools.
        """
        turn = self._read_turn(ids)
        if isinstance(turn, FormatError):
            return turn
        return build_messages(turn, "analysis", [environment_call(call) for call in turn.calls])

    def parse_for_client(self, ids: Sequence[int]) -> list[ParsedMessage] | FormatError:
        """Parse a turn whose calls are all a client's functions: see ``ChatCodec``."""
        turn = self._read_turn(ids)
        if isinstance(turn, FormatError):
            return turn
        # Text before calls is a message to the client, who sends it back, because ChatML has no
        # thoughts.
        return build_messages(turn, "commentary", [function_call(call) for call in turn.calls])

    def parse_truncated_for_client(self, ids: Sequence[int]) -> TruncatedTurn:
        """Parse a turn that a limit cut off: see ``ChatCodec``.

        The conversation continues behind the whole turn. A truncated call is ignored.
        """
        messages = self.parse_for_client([*ids, self._end])
        if isinstance(messages, FormatError):
            text = self.vocabulary.decode(ids)
            # Name and arguments of a call are one JSON value, so nothing of a truncated one can be
            # read. Only the last call can be truncated. Read the text before it.
            complete_text = text[: text.rfind(TOOL_CALL)] if messages.kind == "tool_call" else ""
            turn = parse_turn(complete_text.removesuffix("\n"))
            messages = []
            if isinstance(turn, ParsedTurn) and (turn.text or turn.calls):
                messages = build_messages(turn, "commentary", list(map(function_call, turn.calls)))
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
        # The line break before a call belongs to the format, as in ``parse_turn``.
        if call or (len(pieces) < len(sampled) and sampled[len(pieces)] != self._end):
            text = text.removesuffix(b"\n")
        starts = accumulate((len(piece) for piece in pieces), initial=0)
        return [range(sum(start < len(text) for start in islice(starts, len(pieces))))]

    def _is_text(self, token_id: int) -> bool:
        return self.vocabulary.is_text(token_id)

    def reasoning_tokens(self, sampled: Sequence[int]) -> int:
        """Return 0, because ChatML has no thoughts."""
        return 0

    def _read_turn(self, ids: Sequence[int]) -> ParsedTurn | FormatError:
        markup = self.vocabulary.markup
        # Any other markup would begin another message, or is an id that the tokenizer does not
        # have.
        call_tokens = {markup.get(TOOL_CALL), markup.get(TOOL_CALL_END)}
        body = ids[:-1]
        is_legal = all(self.vocabulary.is_text(i) or i in call_tokens for i in body)
        if not ids or ids[-1] != self._end or not is_legal:
            return FormatError("structure")

        return parse_turn(self.vocabulary.decode(body))

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
