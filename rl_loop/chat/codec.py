"""Interface of chat formats for all code that runs, creates or trains on episodes.

A codec renders conversations to token ids and parses sampled turns. Sampled ids are kept unchanged
and never rendered again.
"""

from collections.abc import Collection, Container, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from rl_loop.chat.messages import FormatError, ParsedMessage, ToolOutput, TruncatedTurn
from rl_loop.chat.open_calls import OpenCall
from rl_loop.chat.tools import BuiltinTool, PythonTool, Tool
from rl_loop.chat.turn_reader import TurnReader

Effort = Literal["low", "medium", "high"]
"""Reasoning effort in the prompt, for formats that support it."""


class Vocabulary(Protocol):
    """Token ids of a model."""

    size: int
    """Rows of the model's embedding."""

    @property
    def special_ids(self) -> Collection[int]:
        """Ids that are not text."""
        ...

    def encode_text(self, text: str) -> list[int]:
        """Encode plain text. No part of it becomes a special token."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Decode, with special tokens as names. Bytes that are not UTF-8 become U+FFFD."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one id in UTF-8 text, possibly a part of a character."""
        ...

    def save(self, directory: Path) -> list[Path]:
        """Write the files that transformers' AutoTokenizer needs, and return them.

        Returns no files if the files of the initial checkpoint must be copied instead.
        """
        ...


class ChatCodec(Protocol):
    """Renders and parses one chat format in one vocabulary."""

    @property
    def vocabulary(self) -> Vocabulary:
        """Vocabulary of the token ids."""
        ...

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a turn of the policy."""
        ...

    def render_prompt(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[Tool] = (),
        builtin_tools: Sequence[BuiltinTool | PythonTool] = (),
    ) -> list[int]:
        """Render a conversation up to the beginning of the assistant's turn.

        Args:
            messages: messages in the format of ``rl_loop.harmony.conversation``, as far as the chat
                format supports it.
            tools: functions to describe.
            builtin_tools: built-in tools to describe.

        Raises:
            ValueError: if a message cannot be rendered. The error names it.
        """
        ...

    def render_observation(
        self, outputs: Sequence[ToolOutput], user: str | None = None
    ) -> list[int]:
        """Render the outputs of a sampled turn's calls, and then the user's message.

        The result ends at the beginning of the assistant's turn. Lone surrogates become U+FFFD.

        Args:
            outputs: tool outputs, in the order of the calls.
            user: next message of the user.
        """
        ...

    def render_assistant(self, messages: Sequence[ParsedMessage]) -> list[int]:
        """Render a turn with its stop token exactly as a policy would sample it behind a prompt."""
        ...

    def encode_sampled(self, text: str) -> list[int]:
        """Encode a turn that a person wrote. Names of the format's special tokens become tokens.

        The result need not be a valid turn.
        """
        ...

    def parse(self, ids: Sequence[int]) -> list[ParsedMessage] | FormatError:
        """Parse one sampled turn with its stop token: thoughts, then calls or a final answer.

        Recipients are not checked, because the environment knows its tools.
        """
        ...

    def split_at_calls(
        self, ids: Sequence[int], messages: Sequence[ParsedMessage]
    ) -> tuple[list[int], list[int]]:
        """Split a turn with calls, ``messages``, into reasoning and calls."""
        ...

    def join_with_calls(self, reasoning: Sequence[int], calls: Sequence[int]) -> list[int]:
        """Concatenate results of ``split_at_calls``, of one turn or of two turns."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids of the model. Special tokens are written as their names."""
        ...

    def decode_token(self, token_id: int) -> str:
        """Decode one id of the model."""
        ...

    def chat_template(self) -> str:
        """Return the Jinja template for an export with a tiny vocabulary."""
        ...

    # ---- conversations of the gateway's clients

    @property
    def knows_reasoning_effort(self) -> bool:
        """True if a prompt can set the reasoning effort."""
        ...

    def render_conversation(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[Tool],
        open_calls: list[OpenCall],
        *,
        reasoning_effort: Effort | None = None,
        keys: Sequence[bytes] = (),
    ) -> list[int]:
        """Render a client's whole conversation up to the beginning of the assistant's turn.

        Args:
            messages: messages of the conversation.
            tools: functions of the client.
            open_calls: list to which calls without a tool output are appended.
            reasoning_effort: replacement for the configured effort. None uses the configured one.
            keys: cache keys, one for each prefix of the messages, from none of them to all. Equal
                prefixes with equal tools and effort have equal keys.

        Raises:
            ValueError: if a message or a tool cannot be rendered. The error names it.
        """
        ...

    def render_continuation(
        self, messages: Sequence[dict[str, Any]], open_calls: list[OpenCall], first_number: int
    ) -> list[int]:
        """Render messages behind tokens that end with a turn of the assistant.

        Args:
            messages: messages to render.
            open_calls: open calls of the tokens. On return it has the calls that are open then.
            first_number: number of earlier messages, for errors.

        Raises:
            ValueError: as in ``render_conversation``.
        """
        ...

    def parse_for_client(self, ids: Sequence[int]) -> list[ParsedMessage] | FormatError:
        """Parse one sampled turn in which every call is one of a client's functions.

        Only thoughts that the format itself marks are on "analysis". All other text is a message to
        the client.
        """
        ...

    def parse_truncated_for_client(self, ids: Sequence[int]) -> TruncatedTurn:
        """Parse a turn that a limit cut off, as far as possible like ``parse_for_client``."""
        ...

    def turn_grammar(self, answer: str | None, arguments: Mapping[str, str]) -> str:
        """Return a grammar of turns with a JSON answer, or with one call of a client's function.

        Thoughts before the answer or the call are not constrained.

        Args:
            answer: JSON schema of the answer. None if the turn must be a call.
            arguments: JSON schema of the arguments, by the name of the function.

        Returns:
            Grammar in llguidance's dialect of Lark. Its last token is one of ``stop_token_ids``.
        """
        ...

    def turn_reader(self, recipients: Container[str], stop: Sequence[str]) -> TurnReader:
        """Return a reader that reads a sampled turn as ``parse_for_client``, before it is complete.

        Args:
            recipients: recipients that the client can call, such as "functions.search".
            stop: texts that end a message to the client.
        """
        ...

    def answer_ranges(self, sampled: Sequence[int]) -> list[range]:
        """Return the positions of the texts for the client in a sampled turn, in their order.

        Thoughts, calls and headers are not a part of them. The turn may be cut off.
        """
        ...

    def without_finished_analysis(self, ids: Sequence[int]) -> list[int]:
        """Leave out the tokens that the format drops after an answer."""
        ...

    def reasoning_tokens(self, sampled: Sequence[int]) -> int:
        """Return the number of tokens in a sampled turn that the format marks as thoughts."""
        ...


def without_surrogates(text: str) -> str:
    """Join surrogate pairs to characters, and replace lone surrogates by U+FFFD."""
    # Most texts are ASCII, which Python knows without a search.
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
