"""Harmony in token space: rendering prompts and tool output, and parsing what the policy sampled.

openai-harmony does both on token ids; there are no regular expressions here. Sampled ids are
parsed and then kept as they are: rendering a parsed message again gives other ids (the recipient
moves before the channel).
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

from openai_harmony import (
    Author,
    ChannelConfig,
    Conversation,
    DeveloperContent,
    Message,
    ReasoningEffort,
    RenderConversationConfig,
    Role,
    SystemContent,
    ToolDescription,
    ToolNamespaceConfig,
)

from rl_loop.chat.codec import Effort, without_surrogates
from rl_loop.chat.messages import CutTurn, FormatError, ParsedMessage, ToolOutput
from rl_loop.chat.open_calls import OpenCall
from rl_loop.chat.tools import BuiltinTool, PythonTool, Tool, check_names
from rl_loop.harmony import chat_template
from rl_loop.harmony.bounded_rendering import developer_text, takes_long
from rl_loop.harmony.conversation import (
    CHANNELS,
    CONSTRAIN,
    message_text,
    prompt_messages,
    sampled_content_type,
    tool_message,
    user_message,
    without_finished_analysis,
)
from rl_loop.harmony.history import History
from rl_loop.harmony.json_schema import harmony_schema
from rl_loop.harmony.openings import Openings
from rl_loop.harmony.prompt_config import PromptConfig
from rl_loop.harmony.sampled_turn import parse_turn
from rl_loop.harmony.vocabulary import Vocabulary, harmony_encoding, special_id

__all__ = [
    "BuiltinTool",
    "FormatError",
    "Harmony",
    "ParsedMessage",
    "PromptConfig",
    "PythonTool",
    "Tool",
    "ToolOutput",
]


REMEMBERED_HEADERS = 4096
"""Headers of which the tokens are kept: there are few different ones."""
TRIED_ENDS = 16
"""Messages at the end of an illegal turn that are tried as its last legal one."""


class Harmony:
    """Renders and parses for one vocabulary. Implements ``rl_loop.chat.codec.ChatCodec``."""

    knows_reasoning_effort = True

    def __init__(
        self,
        vocabulary: Vocabulary,
        prompt: PromptConfig,
        python_seconds: float = 10.0,
    ) -> None:
        """``python_seconds``: the sandbox's limit for a call, stated in the system message."""
        self.vocabulary = vocabulary
        self.stop_token_ids = vocabulary.stop_token_ids
        self._prompt = prompt
        self._python_seconds = python_seconds

        self._sampled_headers: dict[tuple[str, str | None, str | None], list[int]] = {}

        # A prompt ends inside the assistant's header, which the policy goes on to write.
        header = harmony_encoding().encode("<|start|>assistant", allowed_special="all")
        self.assistant_header = vocabulary.from_harmony(header)
        [self.answer_end] = self._special("<|return|>")
        [self.call_end] = self._special("<|call|>")
        [self.message_end] = self._special("<|end|>")
        self._history = History(vocabulary)
        self._openings = Openings(self)

    # ---- rendering

    def render_prompt(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[Tool] = (),
        builtin_tools: Sequence[BuiltinTool | PythonTool] = (),
        *,
        drop_analysis: bool = True,
        reasoning_effort: Effort | None = None,
    ) -> list[int]:
        """Render a conversation, ending where the assistant begins its turn.

        Args:
            messages: as ``rl_loop.harmony.conversation`` describes them.
            tools: described in the first developer message, or in one of their own.
            builtin_tools: described in the system message, with what the configuration says.
            drop_analysis: leave out analysis that led to earlier answers, as the format says.
            reasoning_effort: instead of what the configuration says; None leaves it at that.

        Raises:
            ValueError: naming the message that cannot be rendered.
        """
        check_names(tools)
        check_names(builtin_tools)

        rendered = prompt_messages(messages)
        if drop_analysis:
            rendered = without_finished_analysis(rendered)
        if tools:
            rendered = _with_tools(rendered, tools)
        effort = None
        if reasoning_effort is not None:
            effort = ReasoningEffort(reasoning_effort.capitalize())
        system = self._system_message(builtin_tools, effort)
        if system is not None:
            rendered.insert(0, system)

        if takes_long(rendered):
            ids = []
            for message in rendered:
                ids += self._render_bounded(message, has_functions=bool(tools))
            return ids + self.assistant_header

        # openai-harmony's own dropping leaves out too little: see without_finished_analysis.
        ids = harmony_encoding().render_conversation_for_completion(
            Conversation.from_messages(rendered),
            Role.ASSISTANT,
            RenderConversationConfig(auto_drop_analysis=False),
        )
        return self.vocabulary.from_harmony(ids)

    def render_opening(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        system: Message | None = None,
        reasoning_effort: ReasoningEffort | None = None,
    ) -> list[int]:
        """Render what stands before everything that is said: the system message and those of the
        developer.

        Args:
            messages: the developer's, of openai-harmony.
            tools: described in the first of them, or in one of their own.
            system: in place of what the configuration says.
            reasoning_effort: of this conversation, in place of what the configuration says.

        Raises:
            ValueError: if two tools have one name.
        """
        check_names(tools)
        opening = _with_tools(messages, tools) if tools else list(messages)
        if system is None:
            system = self._system_message((), reasoning_effort)
        if system is not None:
            opening.insert(0, system)

        if takes_long(opening):
            described = [part for message in opening for part in message.content]
            has_functions = any("functions" in (getattr(p, "tools", None) or {}) for p in described)
            bounded: list[int] = []
            for message in opening:
                bounded += self._render_bounded(message, has_functions=has_functions)
            return bounded

        # As a whole: the system message speaks of functions if the developer's describes any.
        ids = harmony_encoding().render_conversation(
            Conversation.from_messages(opening),
            RenderConversationConfig(auto_drop_analysis=False),
        )
        return self.vocabulary.from_harmony(ids)

    def render_message(self, message: Message) -> list[int]:
        """Render one message as history has it, from <|start|> to its end.

        Of the developer, with whatever it describes; of all others, with the text that they have.
        """
        if message.author.role in (Role.DEVELOPER, Role.SYSTEM):
            return self._render_bounded(message, has_functions=False)

        # openai-harmony tokenizes a text as a whole, in time that grows with the square of its
        # longest word; `encode_text` does not. So it gets the message without its text.
        header = (message.author.role, message.author.name, message.channel)
        frame = _frame(*header, message.recipient, message.content_type)
        before = self.vocabulary.from_harmony(frame[:-1])
        after = self.vocabulary.from_harmony(frame[-1:])  # <|end|>, of a call <|call|>
        return before + self.vocabulary.encode_text(message_text(message)) + after

    def _render_bounded(self, message: Message, *, has_functions: bool) -> list[int]:
        """Render one message in time that is linear in its length.

        ``has_functions``: whether a developer message describes functions, of which the system message
        speaks then.
        """
        if message.author.role is Role.SYSTEM and has_functions:
            # Rendered before a function, which is left out again.
            function = DeveloperContent.new().with_function_tools([ToolDescription.new("f", "")])
            pair = [message, Message.from_role_and_content(Role.DEVELOPER, function)]
            ids = harmony_encoding().render_conversation(
                Conversation.from_messages(pair),
                RenderConversationConfig(auto_drop_analysis=False),
            )
            return self.vocabulary.from_harmony(ids[: ids.index(special_id("<|end|>")) + 1])

        text = None
        if message.author.role is Role.DEVELOPER and takes_long([message]):
            text = developer_text(message.content[0])
        if text is None and message.author.role in (Role.DEVELOPER, Role.SYSTEM):
            return self.vocabulary.from_harmony(harmony_encoding().render(message))
        if text is None:
            return self.render_message(message)

        frame = _frame(Role.DEVELOPER, message.author.name, None, None, None)
        before = self.vocabulary.from_harmony(frame[:-1])
        after = self.vocabulary.from_harmony(frame[-1:])
        return before + self.vocabulary.encode_text(text) + after

    def render_continuation(
        self,
        messages: Sequence[dict[str, Any]],
        open_calls: list[OpenCall] | None = None,
        first_number: int = 0,
    ) -> list[int]:
        """Render the messages that follow a conversation whose tokens exist already.

        Ends where the assistant begins its turn. Texts are tokenized in time that is linear in
        their length. Arguments and errors are those of ``prompt_messages``.
        """
        rendered = prompt_messages(messages, open_calls, first_number)
        ids: list[int] = []
        for message in without_finished_analysis(rendered):
            ids += self.render_message(message)
        return ids + self.assistant_header

    def render_conversation(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[Tool],
        open_calls: list[OpenCall],
        *,
        reasoning_effort: Effort | None = None,
        keys: Sequence[bytes] = (),
    ) -> list[int]:
        """Render a client's conversation of which nothing is stored: see ``ChatCodec``."""
        # What developers say first stands before the description of tools; all else is rendered
        # as it would be in a conversation that goes on.
        first = 0
        while first < len(messages) and messages[first]["role"] == "developer":
            first += 1

        key = keys[first] if keys else None
        head = self._openings.render(key, messages[:first], tools, reasoning_effort)
        return [*head, *self.render_continuation(messages[first:], open_calls, first)]

    def render_observation(
        self,
        outputs: Sequence[ToolOutput],
        user: str | None = None,
    ) -> list[int]:
        """Render what tools answer to the assistant and what the user then says.

        Ends where the assistant begins again. Half of a surrogate pair, which is no text, becomes
        U+FFFD.
        """
        ids: list[int] = []
        for output in outputs:
            text = without_surrogates(output.text)
            ids += self.render_message(tool_message(output.tool, output.channel, text))
        if user is not None:
            ids += self.render_message(user_message(without_surrogates(user)))
        return ids + self.assistant_header

    def render_assistant(
        self,
        messages: Sequence[ParsedMessage],
        end: Literal["<|return|>", "<|call|>"] | None = None,
    ) -> list[int]:
        """Render an assistant turn as a policy would sample it, after ``<|start|>assistant``.

        ``end``: None for that of what the last message is, a call or an answer.
        """
        if end is None:
            end = "<|return|>" if messages[-1].recipient is None else "<|call|>"
        ids: list[int] = []
        for message in messages[:-1]:
            ids += self.render_sampled(message, "<|end|>") + self.assistant_header
        return ids + self.render_sampled(messages[-1], end)

    def render_sampled(
        self,
        message: ParsedMessage,
        end: Literal["<|end|>", "<|return|>", "<|call|>"] | None,
    ) -> list[int]:
        """Render one message as a policy would sample it, after ``<|start|>assistant``.

        For demonstrations. The header has the order that GPT-OSS itself writes: channel, then
        recipient, then content type. (In history, openai-harmony writes the recipient before the
        channel; both are legal and are parsed alike.)

        ``end``: None if sampling was cut off within the message.
        """
        key = (message.channel, message.recipient, message.content_type)
        header = self._sampled_headers.get(key)
        if header is None:
            header = self._sampled_header(*key)
            # Recipients are what data sets have in them: there is no end to them.
            if len(self._sampled_headers) >= REMEMBERED_HEADERS:
                self._sampled_headers.clear()
            self._sampled_headers[key] = header

        ids = header + self.vocabulary.encode_text(message.text)
        if end is not None:
            ids += self._special(end)
        return ids

    def _sampled_header(
        self, channel: str, recipient: str | None, content_type: str | None
    ) -> list[int]:
        """Render what precedes the text of a message, <|message|> included."""
        encode_text = self.vocabulary.encode_text
        ids = self._special("<|channel|>") + encode_text(channel)
        if recipient is not None:
            ids += encode_text(f" to={recipient}")
        written = sampled_content_type(content_type, recipient)
        if written is not None:
            ids += self._content_type(written)
        return ids + self._special("<|message|>")

    def _special(self, token: str) -> list[int]:
        return self.vocabulary.from_harmony([special_id(token)])

    def _content_type(self, content_type: str) -> list[int]:
        """Encode a content type, the space before it included."""
        encode_text = self.vocabulary.encode_text
        if not content_type.startswith(CONSTRAIN):
            return encode_text(f" {content_type}")
        kind = content_type.removeprefix(CONSTRAIN)
        return encode_text(" ") + self._special(CONSTRAIN) + encode_text(kind)

    def _system_message(
        self,
        builtin_tools: Sequence[BuiltinTool | PythonTool],
        effort: ReasoningEffort | None = None,
    ) -> Message | None:
        """Make the system message; None if the configuration leaves nothing to say.

        ``effort`` replaces that of the configuration.
        """
        prompt = self._prompt
        if effort is None and prompt.reasoning_effort:
            effort = ReasoningEffort(prompt.reasoning_effort.capitalize())

        channel_config = None
        if prompt.channels:
            channels = list(CHANNELS) if prompt.channels is True else prompt.channels
            channel_config = ChannelConfig.require_channels(channels)

        content = SystemContent(
            model_identity=prompt.model_identity,
            knowledge_cutoff=prompt.knowledge_cutoff,
            conversation_start_date=prompt.current_date,
            reasoning_effort=effort,
            channel_config=channel_config,
        )
        if prompt.python_tool:
            for tool in builtin_tools:
                # Only here is the sandbox's limit known, which the description states.
                if isinstance(tool, PythonTool):
                    tool = tool.in_sandbox(self._python_seconds)
                content = content.with_tools(described_builtin(tool))

        if not content.model_dump(exclude_none=True):
            return None
        return Message.from_role_and_content(Role.SYSTEM, content)

    # ---- parsing

    def parse(self, ids: Sequence[int]) -> list[ParsedMessage] | FormatError:
        """Parse one sampled assistant turn: thoughts and comments, then calls or a final answer.

        ``ids`` are those after ``<|start|>assistant``, the stop token included. A recipient is
        whatever the policy wrote: the environment says which tools there are.
        """
        return parse_turn(self.vocabulary.to_harmony(ids))

    def parse_for_client(self, ids: Sequence[int]) -> list[ParsedMessage] | FormatError:
        """Parse a turn as ``parse`` does: channels say what is whose."""
        return self.parse(ids)

    def parse_cut_for_client(self, ids: Sequence[int]) -> CutTurn:
        """Read a turn that a limit cut off: see ``ChatCodec``.

        A header that was cut off is left out: it says nothing yet.
        """
        # Within a text, which may be the arguments of a call.
        for end, closing in ((self.answer_end, self.message_end), (self.call_end, self.call_end)):
            messages = self.parse([*ids, end])
            if not isinstance(messages, FormatError):
                return CutTurn(messages, (closing,))

        # Within a header, or somewhere illegal: as far as the last message that is complete.
        ends = [place for place, token in enumerate(ids) if token == self.message_end]
        for place in reversed(ends[-TRIED_ENDS:]):
            for end in (self.answer_end, self.call_end):
                messages = self.parse([*ids[:place], end])
                if not isinstance(messages, FormatError):
                    return CutTurn(messages, (), dropped=len(ids) - place - 1)
        return CutTurn([], (), dropped=len(ids) + len(self.assistant_header))

    def without_finished_analysis(self, ids: Sequence[int]) -> list[int]:
        """Leave out the analysis that led to earlier answers: see ``History``."""
        return self._history.without_finished_analysis(ids)

    def reasoning_tokens(self, sampled: Sequence[int]) -> int:
        """Count the tokens of a sampled turn that are analysis, their headers included."""
        return self._history.reasoning_tokens(sampled)

    def split_at_calls(
        self, ids: Sequence[int], messages: Sequence[ParsedMessage]
    ) -> tuple[list[int], list[int]]:
        """Split a turn with calls into reasoning and calls, without the header between them."""
        first_call = next(i for i, message in enumerate(messages) if message.recipient is not None)
        if first_call == 0:
            return [], list(ids)

        # A turn is sampled behind a header, so the first one within it is that of the second
        # message.
        header = self.assistant_header
        headers = [i for i, token in enumerate(ids) if token == header[0]]
        start = headers[first_call - 1]
        return list(ids[:start]), list(ids[start + len(header) :])

    def join_with_calls(self, reasoning: Sequence[int], calls: Sequence[int]) -> list[int]:
        """Put together what ``split_at_calls`` gave, of one turn or of two."""
        if not reasoning:
            return list(calls)
        return [*reasoning, *self.assistant_header, *calls]

    def chat_template(self) -> str:
        """Return the Jinja template of an export whose vocabulary is our own."""
        system = self.decode(self.render_prompt([])).removesuffix(chat_template.ASSISTANT)
        return chat_template.chat_template(system)

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids of the model, special tokens written out."""
        return self.vocabulary.decode(ids)

    def decode_token(self, token_id: int) -> str:
        """Decode one id of the model."""
        return self.vocabulary.decode([token_id])


@lru_cache(maxsize=REMEMBERED_HEADERS)
def _frame(
    role: Role,
    name: str | None,
    channel: str | None,
    recipient: str | None,
    content_type: str | None,
) -> tuple[int, ...]:
    """Render a message without text, in Harmony ids: its header and the token that ends it."""
    message = Message.from_author_and_content(Author(role=role, name=name), "")
    message.channel = channel
    message.recipient = recipient
    message.content_type = content_type
    return tuple(harmony_encoding().render(message))


def _with_tools(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """Describe functions in the first developer message, or in one before all others."""
    rendered = list(messages)
    developer = [i for i, m in enumerate(rendered) if m.author.role is Role.DEVELOPER]
    place = 0
    content = DeveloperContent.new()
    if developer:
        place = developer[0]
        content = rendered.pop(place).content[0]

    content = content.with_function_tools([described_function(tool) for tool in tools])
    rendered.insert(place, Message.from_role_and_content(Role.DEVELOPER, content))
    return rendered


def described_function(tool: Tool) -> ToolDescription:
    """Return the description of a function that openai-harmony renders."""
    return ToolDescription.new(tool.name, tool.description, harmony_schema(tool.parameters))


def described_builtin(tool: BuiltinTool) -> ToolNamespaceConfig:
    """Return the description of a built-in tool that openai-harmony renders."""
    return ToolNamespaceConfig(
        name=tool.name,
        description=tool.description,
        tools=[described_function(function) for function in tool.functions],
    )
