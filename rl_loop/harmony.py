"""Harmony in token space: rendering prompts and tool output, and parsing what the policy sampled.

openai-harmony does both on token ids; there are no regular expressions here. Sampled ids are parsed and then kept as
they are: rendering a parsed message again gives other ids (the recipient moves before the channel)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from openai_harmony import Conversation, DeveloperContent, HarmonyError, Message, Role, SystemContent, ToolDescription
from pydantic import BaseModel, ConfigDict

from rl_loop.vocabulary import SPECIAL_TOKENS, Vocabulary, harmony_encoding, special_id

CHANNELS = ("analysis", "commentary", "final")

# Harmony ids from here on are special tokens, the reserved ones included
FIRST_SPECIAL_ID = 199_998

# which special token may follow which in one assistant turn; a turn begins inside a header, as after <|start|>
SUCCESSORS = {
    "<|start|>": ("<|channel|>",),
    "<|channel|>": ("<|constrain|>", "<|message|>"),
    "<|constrain|>": ("<|message|>",),
    "<|message|>": ("<|end|>", "<|return|>", "<|call|>"),
    "<|end|>": ("<|start|>",),
}


class PromptConfig(BaseModel):
    """What the Harmony system message says. Shorter prompts cost less; the released models expect the full ones."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    model_identity: str | None = "You are ChatGPT, a large language model trained by OpenAI."
    """First line of the system message; null leaves it out."""
    knowledge_cutoff: str | None = "2024-06"
    """Shown as the knowledge cutoff; null leaves it out."""
    reasoning_effort: Literal["low", "medium", "high"] | None = "medium"
    """Shown as the reasoning effort; null leaves it out."""
    channels: bool = True
    """Whether the list of valid channels is shown."""
    python_tool: bool = True
    """Whether the Python tool's own description, as the released models know it, is shown."""


@dataclass(frozen=True)
class Tool:
    """A function that the developer message offers; the policy calls it as ``functions.name`` with JSON arguments."""

    name: str
    description: str
    parameters: dict[str, Any]  # JSON schema of the arguments


@dataclass(frozen=True)
class ParsedMessage:
    """One message that the policy wrote."""

    channel: str
    recipient: str | None  # the tool that is called, such as "python" or "functions.search"; None if it is no call
    content_type: str | None
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
    """Renders and parses for one vocabulary."""

    def __init__(self, vocabulary: Vocabulary, prompt: PromptConfig) -> None:
        self.vocabulary, self.stop_token_ids = vocabulary, vocabulary.stop_token_ids
        self._system = _system_content(prompt)
        header = harmony_encoding().encode("<|start|>assistant", allowed_special="all")
        self.assistant_header = vocabulary.from_harmony(header)

    def render_prompt(self, messages: Sequence[dict[str, str]], tools: Sequence[Tool] = ()) -> list[int]:
        """Ids of system, developer and user messages, ending where the assistant begins.

        ``messages``: {"role": "developer" or "user", "content": text}; ``tools`` are described in the first developer
        message, or in one of their own. Raises ValueError naming another role."""
        rendered = [] if self._system is None else [Message.from_role_and_content(Role.SYSTEM, self._system)]
        if tools and all(message["role"] != "developer" for message in messages):
            rendered.append(_developer_message(None, tools))
        for message in messages:
            if message["role"] == "user":
                rendered.append(Message.from_role_and_content(Role.USER, message["content"]))
            elif message["role"] == "developer":
                rendered.append(_developer_message(message["content"], tools))
                tools = ()
            else:
                raise ValueError(f"a prompt message has role {message['role']!r}; expected 'developer' or 'user'")
        conversation = Conversation.from_messages(rendered)
        ids = harmony_encoding().render_conversation_for_completion(conversation, Role.ASSISTANT)
        return self.vocabulary.from_harmony(ids)

    def render_observation(self, outputs: Sequence[ToolOutput], user: str | None = None) -> list[int]:
        """Ids of what tools answer to the assistant and of what the user then says, ending where the assistant begins
        again."""
        ids: list[int] = []
        for output in outputs:
            message = Message.from_role_and_content(Role.TOOL, output.text)
            message.author.name = output.tool
            ids += harmony_encoding().render(message.with_channel(output.channel).with_recipient("assistant"))
        if user is not None:
            ids += harmony_encoding().render(Message.from_role_and_content(Role.USER, user))
        return self.vocabulary.from_harmony(ids) + self.assistant_header

    def render_assistant(self, messages: Sequence[ParsedMessage], end: Literal["<|return|>", "<|call|>"]) -> list[int]:
        """Ids of an assistant turn as a policy would sample it, after ``<|start|>assistant``. For demonstrations.

        The header has the order that GPT-OSS itself writes: channel, then recipient, then content type."""
        text_ids, special = self.vocabulary.encode_text, self._special
        ids: list[int] = []
        for i, message in enumerate(messages):
            ids += special("<|start|>") + text_ids("assistant") if i else []
            ids += special("<|channel|>") + text_ids(message.channel)
            ids += text_ids(f" to={message.recipient}") if message.recipient else []
            ids += text_ids(f" {message.content_type}") if message.content_type else []
            ids += special("<|message|>") + text_ids(message.text)
            ids += special(end if i == len(messages) - 1 else "<|end|>")
        return ids

    def parse(self, ids: Sequence[int]) -> list[ParsedMessage] | FormatError:
        """The messages of one sampled assistant turn: thoughts and comments, then calls to tools or a final answer.

        ``ids`` are those after ``<|start|>assistant``, the stop token included. A recipient is whatever the policy
        wrote: the environment says which tools there are."""
        harmony_ids = self.vocabulary.to_harmony(ids)
        # openai-harmony takes special tokens inside a message for text and inside a header for a recipient
        if not _in_order(harmony_ids):
            return FormatError("structure")
        try:
            parsed = harmony_encoding().parse_messages_from_completion_tokens(harmony_ids, Role.ASSISTANT)
        except (HarmonyError, ValueError):
            return FormatError("header")
        messages = []
        for message in parsed:
            if message.author.role is not Role.ASSISTANT:
                return FormatError("role")
            if message.channel not in CHANNELS:
                return FormatError("channel")
            text = "".join(getattr(part, "text", "") for part in message.content)
            messages.append(ParsedMessage(message.channel, message.recipient, message.content_type, text))
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


def _system_content(prompt: PromptConfig) -> SystemContent | None:
    settings: dict[str, Any] = prompt.model_dump(include={"model_identity", "knowledge_cutoff"})
    settings["reasoning_effort"] = prompt.reasoning_effort and prompt.reasoning_effort.capitalize()
    if not prompt.channels:
        settings["channel_config"] = None
    if not prompt.channels and not prompt.python_tool and all(value is None for value in settings.values()):
        return None
    content = SystemContent(**settings)
    return content.with_python_tool() if prompt.python_tool else content


def _developer_message(instructions: str | None, tools: Sequence[Tool]) -> Message:
    content = DeveloperContent.new()
    if instructions is not None:
        content = content.with_instructions(instructions)
    if tools:
        described = [ToolDescription.new(tool.name, tool.description, tool.parameters) for tool in tools]
        content = content.with_function_tools(described)
    return Message.from_role_and_content(Role.DEVELOPER, content)


def _in_order(harmony_ids: Sequence[int]) -> bool:
    """Whether the special tokens of an assistant turn follow one another as they may."""
    names = {special_id(token): token for token in SPECIAL_TOKENS}
    previous = "<|start|>"
    for token_id in harmony_ids:
        if token_id < FIRST_SPECIAL_ID:
            continue
        name = names.get(token_id, "reserved")
        if name not in SUCCESSORS.get(previous, ()):
            return False
        previous = name
    return previous in ("<|return|>", "<|call|>")
