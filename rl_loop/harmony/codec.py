"""Renders prompts and tool output to Harmony tokens, and parses sampled turns.

openai-harmony does both on token ids, without regular expressions. Sampled ids are parsed and kept
unchanged, because rendering a parsed message gives other ids: the recipient moves in front of the
channel.
"""

from collections.abc import Container, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

from openai_harmony import (
    Author,
    Conversation,
    DeveloperContent,
    Message,
    ReasoningEffort,
    RenderConversationConfig,
    Role,
    ToolDescription,
)

from rl_loop.chat.codec import Effort, without_surrogates
from rl_loop.chat.messages import FormatError, ParsedMessage, ToolOutput, TruncatedTurn
from rl_loop.chat.open_calls import OpenCall
from rl_loop.chat.tools import BuiltinTool, PythonTool, Tool, check_names
from rl_loop.harmony import chat_template
from rl_loop.harmony.bounded_rendering import developer_text, takes_long
from rl_loop.harmony.conversation import (
    message_text,
    prompt_messages,
    tool_message,
    user_message,
    without_finished_analysis,
)
from rl_loop.harmony.history import MessageFinder
from rl_loop.harmony.prompt_config import PromptConfig
from rl_loop.harmony.sampled_rendering import SampledTurnRenderer
from rl_loop.harmony.sampled_turn import parse_turn
from rl_loop.harmony.system_prompt import describe_functions, system_message
from rl_loop.harmony.system_prompt_cache import SystemPromptCache
from rl_loop.harmony.turn_grammar import turn_grammar
from rl_loop.harmony.turn_reader import HarmonyReader
from rl_loop.harmony.vocabulary import (
    Vocabulary,
    harmony_encoding,
    model_special_id,
    special_id,
)

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


CACHED_FRAMES = 4096
"""Size of the cache of messages without text. There are few distinct ones."""
MAX_TRIED_ENDS = 16
"""Maximum number of message ends, from the last one, at which a malformed turn is cut off to make
it valid."""


class Harmony:
    """Renders and parses with one vocabulary. Implements ``rl_loop.chat.codec.ChatCodec``."""

    knows_reasoning_effort = True

    def __init__(
        self,
        vocabulary: Vocabulary,
        prompt: PromptConfig,
        python_seconds: float = 10.0,
    ) -> None:
        """Create a codec.

        Args:
            vocabulary: token ids of the model.
            prompt: contents of the system message.
            python_seconds: time limit of the sandbox, for the system message.
        """
        self.vocabulary = vocabulary
        self.stop_token_ids = vocabulary.stop_token_ids
        self._prompt = prompt
        self._python_seconds = python_seconds

        # A prompt ends within the assistant's header, which the policy continues.
        header = harmony_encoding().encode("<|start|>assistant", allowed_special="all")
        self.assistant_header = vocabulary.from_harmony(header)
        self.answer_end = model_special_id(vocabulary, "<|return|>")
        self.call_end = model_special_id(vocabulary, "<|call|>")
        self.message_end = model_special_id(vocabulary, "<|end|>")
        self._history = MessageFinder(vocabulary)
        self._sampled_turns = SampledTurnRenderer(vocabulary, self.assistant_header)
        self._system_prompts = SystemPromptCache(self)

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
        """Render a conversation up to the beginning of the assistant's turn.

        Args:
            messages: messages in the format of ``rl_loop.harmony.conversation``.
            tools: functions for the first developer message, which is added if there is none.
            builtin_tools: built-in tools for the system message.
            drop_analysis: leave out the analysis before earlier answers, as the format specifies.
            reasoning_effort: replacement for the configured effort. None uses the configured one.

        Raises:
            ValueError: if a message cannot be rendered.
        """
        # Checked separately: functions have a namespace, so one may have the name of a built-in
        # tool.
        check_names(tools)
        check_names(builtin_tools)

        rendered = prompt_messages(messages)
        if drop_analysis:
            rendered = without_finished_analysis(rendered)
        if tools:
            rendered = describe_functions(rendered, tools)
        effort = None
        if reasoning_effort is not None:
            # The values of openai-harmony's enum are capitalized.
            effort = ReasoningEffort(reasoning_effort.capitalize())
        system = system_message(self._prompt, builtin_tools, self._python_seconds, effort)
        if system is not None:
            rendered.insert(0, system)

        if takes_long(rendered):
            ids = []
            for message in rendered:
                ids += self._render_bounded(message, has_functions=bool(tools))
            return ids + self.assistant_header

        # openai-harmony itself drops too little: see without_finished_analysis.
        ids = harmony_encoding().render_conversation_for_completion(
            Conversation.from_messages(rendered),
            Role.ASSISTANT,
            RenderConversationConfig(auto_drop_analysis=False),
        )
        return self.vocabulary.from_harmony(ids)

    def render_system_prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        system: Message | None = None,
        reasoning_effort: ReasoningEffort | None = None,
    ) -> list[int]:
        """Render the system message and the developer messages at the beginning of a conversation.

        Args:
            messages: developer messages of openai-harmony.
            tools: functions for the first of them. A message is added if there is none.
            system: replacement for the configured system message.
            reasoning_effort: replacement for the configured effort.

        Raises:
            ValueError: if two tools have the same name.
        """
        check_names(tools)
        # Before the system message is added, because the tools belong to the first developer
        # message.
        prefix = describe_functions(messages, tools) if tools else list(messages)
        if system is None:
            system = system_message(self._prompt, (), self._python_seconds, reasoning_effort)
        if system is not None:
            prefix.insert(0, system)

        if takes_long(prefix):
            described = [part for message in prefix for part in message.content]
            has_functions = any("functions" in (getattr(p, "tools", None) or {}) for p in described)
            bounded: list[int] = []
            for message in prefix:
                bounded += self._render_bounded(message, has_functions=has_functions)
            return bounded

        # Rendered together, because the system message mentions functions if a developer message
        # describes any.
        ids = harmony_encoding().render_conversation(
            Conversation.from_messages(prefix),
            RenderConversationConfig(auto_drop_analysis=False),
        )
        return self.vocabulary.from_harmony(ids)

    def render_message(self, message: Message) -> list[int]:
        """Render one message in its history form, from <|start|> to its end.

        System and developer messages include tool descriptions. Others are rendered with their
        text.
        """
        if message.author.role in (Role.DEVELOPER, Role.SYSTEM):
            return self._render_bounded(message, has_functions=False)

        # openai-harmony tokenizes a text in time that is quadratic in its longest word.
        # ``encode_text`` is linear, so openai-harmony renders the message without its text.
        header = (message.author.role, message.author.name, message.channel)
        frame = _frame(*header, message.recipient, message.content_type)
        before = self.vocabulary.from_harmony(frame[:-1])
        after = self.vocabulary.from_harmony(frame[-1:])  # <|end|>, or <|call|> for a call
        return before + self.vocabulary.encode_text(message_text(message)) + after

    def _render_bounded(self, message: Message, *, has_functions: bool) -> list[int]:
        """Render one message in time that is linear in its length.

        ``has_functions`` is True if a developer message describes functions. The system message
        then mentions them.
        """
        if message.author.role is Role.SYSTEM and has_functions:
            # Render it in front of a function, and cut off the function.
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

        The result ends at the beginning of the assistant's turn. The time is linear in the length
        of the texts. Arguments and errors are the same as for ``prompt_messages``.
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
        """Render a client's conversation of which no tokens exist: see ``ChatCodec``."""
        # The first developer messages precede the tools. All other messages are rendered as
        # continuations. Only the first part depends on tools and effort, and all conversations of
        # an agent share it.
        first = 0
        while first < len(messages) and messages[first]["role"] == "developer":
            first += 1

        key = keys[first] if keys else None
        head = self._system_prompts.render(key, messages[:first], tools, reasoning_effort)
        return [*head, *self.render_continuation(messages[first:], open_calls, first)]

    def render_observation(
        self,
        outputs: Sequence[ToolOutput],
        user: str | None = None,
    ) -> list[int]:
        """Render the outputs of a sampled turn's calls, and then the user's message.

        The result ends at the beginning of the assistant's turn. Lone surrogates become U+FFFD.

        Args:
            outputs: tool outputs, in the order of the calls.
            user: next message of the user.
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
        """Render a turn as a policy would sample it: see ``SampledTurnRenderer``."""
        return self._sampled_turns.render_turn(messages, end)

    def render_sampled(
        self,
        message: ParsedMessage,
        end: Literal["<|end|>", "<|return|>", "<|call|>"] | None,
    ) -> list[int]:
        """Render one message as a policy would sample it: see ``SampledTurnRenderer``."""
        return self._sampled_turns.render_message(message, end)

    def encode_sampled(self, text: str) -> list[int]:
        """Encode a turn that a person wrote. Names of special tokens become these tokens."""
        return self._sampled_turns.encode(text)

    # ---- parsing

    def parse(self, ids: Sequence[int]) -> list[ParsedMessage] | FormatError:
        """Parse one sampled assistant turn: analysis and comments, then calls or a final answer.

        ``ids`` follow ``<|start|>assistant`` and include the stop token. Recipients are not
        checked, because the environment knows its tools.
        """
        return parse_turn(self.vocabulary.to_harmony(ids))

    def parse_for_client(self, ids: Sequence[int]) -> list[ParsedMessage] | FormatError:
        """Parse a turn as ``parse`` does. Channels separate reasoning and answers."""
        return self.parse(ids)

    def parse_truncated_for_client(self, ids: Sequence[int]) -> TruncatedTurn:
        """Parse a turn that a limit cut off: see ``ChatCodec``.

        A header that was cut off is dropped.
        """
        # Case 1: cut within a text, which may be the arguments of a call. The parser accepts only
        # complete turns, so try each end token.
        for end, closing in ((self.answer_end, self.message_end), (self.call_end, self.call_end)):
            # In the conversation <|end|> closes a text, as in every history. A call keeps its own
            # end.
            messages = self.parse([*ids, end])
            if not isinstance(messages, FormatError):
                return TruncatedTurn(messages, (closing,))

        # Case 2: cut within a header, which has no usable information, or malformed. Keep the last
        # message that is complete.
        ends = [place for place, token in enumerate(ids) if token == self.message_end]
        for place in reversed(ends[-MAX_TRIED_ENDS:]):
            for end in (self.answer_end, self.call_end):
                messages = self.parse([*ids[:place], end])
                if not isinstance(messages, FormatError):
                    return TruncatedTurn(messages, (), dropped=len(ids) - place - 1)
        # No message can be kept, so drop the header in the prompt, too.
        return TruncatedTurn([], (), dropped=len(ids) + len(self.assistant_header))

    def without_finished_analysis(self, ids: Sequence[int]) -> list[int]:
        """Leave out the analysis that led to earlier answers: see ``MessageFinder``."""
        return self._history.without_finished_analysis(ids)

    def turn_grammar(self, answer: str | None, arguments: Mapping[str, str]) -> str:
        """Return a grammar of turns: see ``ChatCodec``. Thoughts are one analysis message."""
        return turn_grammar(self.vocabulary, answer, arguments)

    def turn_reader(self, recipients: Container[str], stop: Sequence[str]) -> HarmonyReader:
        """Return a reader of a turn that is being sampled: see ``ChatCodec``."""
        return HarmonyReader(self.vocabulary, self.assistant_header, recipients, stop)

    def answer_ranges(self, sampled: Sequence[int]) -> list[range]:
        """Return the positions of the texts for the client: see ``MessageFinder``."""
        return self._history.answer_ranges(sampled)

    def reasoning_tokens(self, sampled: Sequence[int]) -> int:
        """Return the number of analysis tokens in a sampled turn, including headers."""
        return self._history.reasoning_tokens(sampled)

    def split_at_calls(
        self, ids: Sequence[int], messages: Sequence[ParsedMessage]
    ) -> tuple[list[int], list[int]]:
        """Split a turn with calls into reasoning and calls, without the header between them."""
        first_call = next(i for i, message in enumerate(messages) if message.recipient is not None)
        if first_call == 0:
            return [], list(ids)

        # A turn is sampled behind a header, so the first header within it belongs to the second
        # message.
        header = self.assistant_header
        headers = [i for i, token in enumerate(ids) if token == header[0]]
        start = headers[first_call - 1]
        return list(ids[:start]), list(ids[start + len(header) :])

    def join_with_calls(self, reasoning: Sequence[int], calls: Sequence[int]) -> list[int]:
        """Concatenate results of ``split_at_calls``, of one turn or of two turns."""
        if not reasoning:
            return list(calls)
        return [*reasoning, *self.assistant_header, *calls]

    def chat_template(self) -> str:
        """Return the Jinja template for an export with a tiny vocabulary."""
        # The template cannot render a system message, so it contains the configured one as text.
        system = self.decode(self.render_prompt([])).removesuffix(chat_template.ASSISTANT)
        return chat_template.chat_template(system)

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids of the model. Special tokens are written as their names."""
        return self.vocabulary.decode(ids)

    def decode_token(self, token_id: int) -> str:
        """Decode one id of the model."""
        return self.vocabulary.decode([token_id])


@lru_cache(maxsize=CACHED_FRAMES)
def _frame(
    role: Role,
    name: str | None,
    channel: str | None,
    recipient: str | None,
    content_type: str | None,
) -> tuple[int, ...]:
    """Render a message without text in Harmony ids: its header and its last token."""
    # Rendered without a text, because header and last token do not depend on the text.
    message = Message.from_author_and_content(Author(role=role, name=name), "")
    message.channel = channel
    message.recipient = recipient
    message.content_type = content_type
    return tuple(harmony_encoding().render(message))
