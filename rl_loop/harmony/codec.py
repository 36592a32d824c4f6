"""Harmony in token space: rendering prompts and tool output, and parsing what the policy sampled.

openai-harmony does both on token ids; there are no regular expressions here. Sampled ids are parsed and then kept as
they are: rendering a parsed message again gives other ids (the recipient moves before the channel)."""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from openai_harmony import (
    ChannelConfig,
    Conversation,
    DeveloperContent,
    HarmonyError,
    Message,
    ReasoningEffort,
    RenderConversationConfig,
    Role,
    SystemContent,
)
from pydantic import BaseModel, ConfigDict, field_validator

from rl_loop.harmony.conversation import (
    CHANNELS,
    CONSTRAIN,
    prompt_messages,
    tool_message,
    user_message,
    without_finished_analysis,
)
from rl_loop.harmony.tool_descriptions import BuiltinTool, PythonTool, Tool, check_names
from rl_loop.harmony.vocabulary import SPECIAL_TOKENS, Vocabulary, harmony_encoding, special_id

__all__ = [
    "CHANNELS", "FIRST_SPECIAL_ID", "BuiltinTool", "FormatError", "Harmony", "ParsedMessage", "PromptConfig",
    "PythonTool", "Tool", "ToolOutput",
]  # fmt: skip

# Harmony ids from here on are special tokens, the reserved ones included
FIRST_SPECIAL_ID = 199_998

Channel = Literal["analysis", "commentary", "final"]


class PromptConfig(BaseModel):
    """What the Harmony system message says. Shorter prompts cost less; the released models expect the full ones."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    model_identity: str | None = "You are ChatGPT, a large language model trained by OpenAI."
    """First line of the system message; null leaves it out."""
    knowledge_cutoff: str | None = "2024-06"
    """Shown as the knowledge cutoff; null leaves it out."""
    current_date: str | None = None
    """Shown as the current date, such as "2025-08-05"; null leaves it out. It is written here and not taken from the
    clock, so that a resumed run has the prompts that it began with."""
    reasoning_effort: Literal["low", "medium", "high"] | None = "medium"
    """Shown as the reasoning effort; null leaves it out."""
    channels: bool | list[Channel] = True
    """Which channels the system message lists as valid: true for all three, false for no such line, or some of them,
    such as [analysis, final]."""
    python_tool: bool = True
    """Whether the built-in tools of an environment are described: Python, where it may be called."""

    @field_validator("current_date", mode="before")
    @classmethod
    def _read_date(cls, value: Any) -> Any:
        """YAML makes a date of what looks like one."""
        if isinstance(value, datetime.date):
            return value.isoformat()
        if isinstance(value, str) and not _is_date(value):
            raise ValueError("expected a date such as 2025-08-05")
        return value

    @field_validator("channels")
    @classmethod
    def _check_channels(cls, value: bool | list[Channel]) -> bool | list[Channel]:
        if isinstance(value, list) and len(set(value)) < max(1, len(value)):
            raise ValueError("list each channel once, or use false for none")
        return value


@dataclass(frozen=True)
class ParsedMessage:
    """One message that the policy wrote."""

    channel: str
    recipient: str | None  # the tool that is called, such as "python" or "functions.search"; None if it is no call
    content_type: str | None  # such as "code"; begins with "<|constrain|>" where that token precedes it
    text: str


@dataclass(frozen=True)
class ToolOutput:
    """What a tool answers: ``tool`` and ``channel`` are the recipient and channel of the call."""

    tool: str
    channel: str
    text: str


@dataclass(frozen=True)
class FormatError:
    """The sampled ids are not what Harmony allows."""

    kind: str  # under which it is counted: "structure", "header", "role", "channel", "recipient"


class Harmony:
    """Renders and parses for one vocabulary. ``python_seconds``: the sandbox's limit for one call, which the system
    message states."""

    def __init__(self, vocabulary: Vocabulary, prompt: PromptConfig, python_seconds: float = 10.0) -> None:
        self.vocabulary = vocabulary
        self.stop_token_ids = vocabulary.stop_token_ids
        self._prompt = prompt
        self._python_seconds = python_seconds
        header = harmony_encoding().encode("<|start|>assistant", allowed_special="all")
        self.assistant_header = vocabulary.from_harmony(header)

    # ---- rendering

    def render_prompt(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[Tool] = (),
        builtin_tools: Sequence[BuiltinTool | PythonTool] = (),
        *,
        drop_analysis: bool = True,
    ) -> list[int]:
        """Ids of a conversation, ending where the assistant begins its turn.

        ``messages`` are those that ``rl_loop.harmony.conversation`` describes; the system message is made from the
        configuration and ``builtin_tools``. ``tools`` are described in the first developer message, or in one of their
        own. Analysis that led to earlier answers is left out, as the format says, unless ``drop_analysis`` is off.
        Raises ValueError naming the message that cannot be rendered."""
        check_names(tools)
        check_names(builtin_tools)
        rendered = prompt_messages(messages)
        if drop_analysis:
            rendered = without_finished_analysis(rendered)
        if tools:
            rendered = _with_tools(rendered, tools)
        if (system := self._system_message(builtin_tools)) is not None:
            rendered.insert(0, system)

        ids = harmony_encoding().render_conversation_for_completion(
            Conversation.from_messages(rendered),
            Role.ASSISTANT,
            RenderConversationConfig(auto_drop_analysis=False),  # it leaves out too little: without_finished_analysis
        )
        return self.vocabulary.from_harmony(ids)

    def render_observation(self, outputs: Sequence[ToolOutput], user: str | None = None) -> list[int]:
        """Ids of what tools answer to the assistant and of what the user then says, ending where the assistant begins
        again. Half of a surrogate pair, which is no text, becomes U+FFFD."""
        said = [(tool_message(output.tool, output.channel, ""), output.text) for output in outputs]
        if user is not None:
            said.append((user_message(""), user))

        ids: list[int] = []
        for message, text in said:
            ids += self._render(message, _well_formed(text))
        return ids + self.assistant_header

    def _render(self, empty: Message, text: str) -> list[int]:
        """Ids of a message that is given without its text. openai-harmony tokenises a text as a whole, in time that
        grows with the square of its longest word; ``encode_text`` does not."""
        frame = harmony_encoding().render(empty)
        before, after = frame[:-1], frame[-1:]  # <|end|>
        vocabulary = self.vocabulary
        return vocabulary.from_harmony(before) + vocabulary.encode_text(text) + vocabulary.from_harmony(after)

    def render_assistant(self, messages: Sequence[ParsedMessage], end: Literal["<|return|>", "<|call|>"]) -> list[int]:
        """Ids of an assistant turn as a policy would sample it, after ``<|start|>assistant``. For demonstrations.

        The header has the order that GPT-OSS itself writes: channel, then recipient, then content type. (In history,
        openai-harmony writes the recipient before the channel; both are legal and are parsed alike.)"""
        text_ids, special = self.vocabulary.encode_text, self._special

        ids: list[int] = []
        for i, message in enumerate(messages):
            if i > 0:
                ids += self.assistant_header
            ids += special("<|channel|>") + text_ids(message.channel)
            if message.recipient is not None:
                ids += text_ids(f" to={message.recipient}")
            if message.content_type is not None:
                ids += self._content_type(message.content_type)
            ids += special("<|message|>") + text_ids(message.text)
            ids += special(end if i == len(messages) - 1 else "<|end|>")

        return ids

    # ---- parsing

    def parse(self, ids: Sequence[int]) -> list[ParsedMessage] | FormatError:
        """The messages of one sampled assistant turn: thoughts and comments, then calls to tools or a final answer.

        ``ids`` are those after ``<|start|>assistant``, the stop token included. A recipient is whatever the policy
        wrote: the environment says which tools there are."""
        harmony_ids = self.vocabulary.to_harmony(ids)

        # openai-harmony takes special tokens inside a message for text and inside a header for a recipient
        headers = _headers(harmony_ids)
        if headers is None:
            return FormatError("structure")
        # and it takes the *name* of a special token, spelled in ordinary tokens, for the token
        if any("<|" in harmony_encoding().decode(header) for header in headers):
            return FormatError("header")
        try:
            parsed = harmony_encoding().parse_messages_from_completion_tokens(harmony_ids, Role.ASSISTANT)
        except (HarmonyError, ValueError):
            return FormatError("header")

        messages: list[ParsedMessage] = []
        for message in parsed:
            if message.author.role is not Role.ASSISTANT:
                return FormatError("role")
            if message.channel not in CHANNELS:
                return FormatError("channel")
            messages.append(_parsed_message(message))

        calls = [message for message in messages if message.recipient is not None]
        if (harmony_ids[-1] == special_id("<|call|>")) != (messages[-1].recipient is not None):
            return FormatError("recipient")  # it ends a message to a tool, and nothing else
        if calls and (messages[-1].recipient is None or any(message.channel == "final" for message in messages)):
            return FormatError("recipient")  # a tool call together with a final answer
        return messages

    def decode(self, ids: Sequence[int]) -> str:
        return self.vocabulary.decode(ids)

    def decode_token(self, token_id: int) -> str:
        return self.vocabulary.decode([token_id])

    def _special(self, token: str) -> list[int]:
        return self.vocabulary.from_harmony([special_id(token)])

    def _content_type(self, content_type: str) -> list[int]:
        """Ids of a content type, the space before it included."""
        if not content_type.startswith(CONSTRAIN):
            return self.vocabulary.encode_text(f" {content_type}")
        kind = content_type.removeprefix(CONSTRAIN)
        return self.vocabulary.encode_text(" ") + self._special(CONSTRAIN) + self.vocabulary.encode_text(kind)

    def _system_message(self, builtin_tools: Sequence[BuiltinTool | PythonTool]) -> Message | None:
        """The system message, or None if the configuration leaves nothing to say."""
        prompt = self._prompt
        channels = list(CHANNELS) if prompt.channels is True else prompt.channels or []
        content = SystemContent(
            model_identity=prompt.model_identity,
            knowledge_cutoff=prompt.knowledge_cutoff,
            conversation_start_date=prompt.current_date,
            reasoning_effort=ReasoningEffort(prompt.reasoning_effort.capitalize()) if prompt.reasoning_effort else None,
            channel_config=ChannelConfig.require_channels(channels) if channels else None,
        )

        if prompt.python_tool:
            for tool in builtin_tools:
                described = tool.in_sandbox(self._python_seconds) if isinstance(tool, PythonTool) else tool
                content = content.with_tools(described.described())

        if not content.model_dump(exclude_none=True):
            return None
        return Message.from_role_and_content(Role.SYSTEM, content)


def _is_date(text: str) -> bool:
    try:
        return datetime.date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def _with_tools(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """The functions described in the first developer message, or in one before all others."""
    described = [tool.described() for tool in tools]
    rendered = list(messages)
    place = next((i for i, message in enumerate(rendered) if message.author.role is Role.DEVELOPER), None)

    content = DeveloperContent.new()
    if place is not None:
        content = rendered.pop(place).content[0]
    message = Message.from_role_and_content(Role.DEVELOPER, content.with_function_tools(described))
    rendered.insert(place or 0, message)
    return rendered


def _parsed_message(message: Message) -> ParsedMessage:
    recipient, content_type = message.recipient, message.content_type
    # openai-harmony takes the only word of a header for a recipient: in "final <|constrain|>json", which GPT-OSS writes
    # before structured output, the content type
    if recipient is not None and recipient.startswith(CONSTRAIN):
        recipient, content_type = None, recipient

    text = "".join(getattr(part, "text", "") for part in message.content)
    return ParsedMessage(message.channel or "", recipient, content_type, text)


def _headers(harmony_ids: Sequence[int]) -> list[list[int]] | None:
    """The ordinary tokens of every header of an assistant turn; None if its special tokens do not follow one another
    as they may. A turn begins inside a header, as after <|start|>.

    A turn is HEADER <|message|> TEXT, then <|end|> <|start|> and so on, or <|return|> or <|call|> at its end. A header
    may hold <|channel|> and <|constrain|> once each, in any order."""
    names = {special_id(token): token for token in SPECIAL_TOKENS}
    place: Literal["header", "text", "between", "over"] = "header"
    headers: list[list[int]] = [[]]
    in_header: set[str] = set()

    for token_id in harmony_ids:
        if token_id < FIRST_SPECIAL_ID:
            if place == "header":
                headers[-1].append(token_id)
            elif place != "text":
                return None
            continue

        token = names.get(token_id)
        if place == "header" and token in ("<|channel|>", "<|constrain|>") and token not in in_header:
            in_header.add(token)
        elif place == "header" and token == "<|message|>":
            place = "text"
        elif place == "text" and token == "<|end|>":
            place = "between"
        elif place == "text" and token in ("<|return|>", "<|call|>"):
            place = "over"
        elif place == "between" and token == "<|start|>":
            place = "header"
            headers.append([])
            in_header = set()
        else:
            return None

    return headers if place == "over" else None


def _well_formed(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
