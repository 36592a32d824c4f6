"""Renders conversations with the tokens that inference would consume and sample.

The loss covers the sampled tokens: from behind the header of a turn, which ends the prompt, through
<|return|> or <|call|>. The tokens <|end|><|start|>assistant between two messages of a turn are
sampled, too. We do not use ``render_conversation_for_training`` of openai-harmony, because it drops
the analysis before the answer and puts recipients where GPT-OSS does not sample them.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from openai_harmony import DeveloperContent, Message, ReasoningEffort

from rl_loop.conversations.config import Format
from rl_loop.conversations.conversation import Conversation, ConversationEntry
from rl_loop.conversations.errors import ConversationError
from rl_loop.conversations.formats import read_conversation
from rl_loop.harmony.codec import FormatError, Harmony, ParsedMessage
from rl_loop.harmony.conversation import message_text, without_finished_analysis

CACHE_SIZE = 256
"""Maximum entries of each cache. Most conversations of a file have equal instructions and tools."""

StopToken = Literal["<|end|>", "<|return|>", "<|call|>"]
SystemPromptKey = tuple[tuple[str | None, ...], str | None, str, ReasoningEffort | None]


@dataclass
class RenderedSample:
    """Tokens of one sample."""

    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    """True for tokens in the loss. As long as ``token_ids``."""
    number: int = 0
    """Index among the samples of the conversation. Samples that are left out count, too."""

    def add(self, ids: Sequence[int], in_loss: bool) -> None:
        """Append tokens. All of them are in the loss if ``in_loss``."""
        self.token_ids += ids
        self.loss_mask += [in_loss] * len(ids)


@dataclass(frozen=True)
class RenderOptions:
    """Options of rendering, as in ``DataConfig``."""

    history: Literal["harmony", "append"]
    max_tokens: int
    too_long: Literal["reject", "truncate"]


def fit(sample: RenderedSample, options: RenderOptions) -> str | None:
    """Truncate a sample that is too long, if the options allow it.

    Returns:
        None if the sample can be used, else the reason why it cannot.
    """
    limit = options.max_tokens
    tokens = len(sample.token_ids)
    if tokens <= limit:
        return None
    if options.too_long == "reject":
        return f"it has {tokens} tokens, more than data.max_tokens ({limit})"

    del sample.token_ids[limit:]
    del sample.loss_mask[limit:]
    # Without a token in the loss, the sample would only cost time.
    if not any(sample.loss_mask):
        return f"its first {limit} tokens (data.max_tokens) have no token in the loss"
    return None


class HarmonyRenderer:
    """Renders conversations for one vocabulary."""

    def __init__(self, harmony: Harmony, options: RenderOptions) -> None:
        self._harmony = harmony
        self._options = options
        self._system_prompts: OrderedDict[SystemPromptKey, list[int]] = OrderedDict()
        self._header_faults: dict[tuple[ParsedMessage, ...], str] = {}
        """Cache of ``_find_header_fault``. Keys are the messages of a turn, without texts."""

    def render_record(
        self, record: Any, record_format: Format
    ) -> tuple[list[RenderedSample], list[str]]:
        """Read a record and ``render`` it."""
        return self.render(read_conversation(record, record_format))

    def render(self, conversation: Conversation) -> tuple[list[RenderedSample], list[str]]:
        """Render the samples of a conversation.

        Returns:
            Samples with at least one token in the loss each, and a reason for each sample left out.

        Raises:
            ConversationError: if the whole conversation cannot be rendered.
        """
        if self._options.history == "append":
            samples = [self._render_whole(conversation)]
        else:
            samples = self._render_user_turns(conversation)

        kept: list[RenderedSample] = []
        rejected: list[str] = []
        # Number all samples before some are left out: a resumed run finds its place by these
        # numbers.
        for number, sample in enumerate(samples):
            sample.number = number
            reason = fit(sample, self._options)
            if reason is None:
                kept.append(sample)
            elif len(samples) == 1:
                rejected.append(reason)
            else:
                rejected.append(f"turn {number} of the user: {reason}")
        return kept, rejected

    # ---- samples

    def _render_whole(self, conversation: Conversation) -> RenderedSample:
        """Render a conversation as one episode, exactly as it was sampled."""
        sample = RenderedSample()
        sample.add(self._render_system_prompt(conversation), in_loss=False)
        turns = conversation.turns
        self._add_others(sample, conversation.entries[: turns[0].start])
        self._add_turns(sample, conversation, turns)
        return sample

    def _render_user_turns(self, conversation: Conversation) -> list[RenderedSample]:
        """Render one sample for each group of turns that ends with an answer.

        Earlier groups are rendered as they look at inference.
        """
        system_prompt = self._render_system_prompt(conversation)
        entries = conversation.entries
        samples: list[RenderedSample] = []

        for turns in _user_turns(conversation):
            in_loss = any(entries[i].in_loss for turn in turns for i in turn)
            # Turns of weight 0 are only context for later ones.
            if not in_loss:
                continue

            sample = RenderedSample()
            sample.add(system_prompt, in_loss=False)
            history = [entry.message for entry in entries[: turns[0].start]]
            for message in without_finished_analysis(history):
                sample.add(self._harmony.render_message(message), in_loss=False)
            sample.add(self._harmony.assistant_header, in_loss=False)
            self._add_turns(sample, conversation, turns)
            samples.append(sample)
        return samples

    def _add_turns(
        self, sample: RenderedSample, conversation: Conversation, turns: Sequence[range]
    ) -> None:
        """Add turns of the assistant as they are sampled, with the messages between them."""
        entries = conversation.entries
        for number, turn in enumerate(turns):
            is_truncated = conversation.truncated and turn.stop == len(entries)
            self._add_turn(sample, entries[turn.start : turn.stop], is_truncated)
            if number + 1 < len(turns):
                self._add_others(sample, entries[turn.stop : turns[number + 1].start])

    def _add_turn(
        self, sample: RenderedSample, turn: Sequence[ConversationEntry], is_truncated: bool
    ) -> None:
        """Add one turn after its header. A turn that was cut off gets no stop token."""
        # Training on a turn that RL would reject as malformed teaches the wrong format.
        self._check_round_trip(turn)
        for i, entry in enumerate(turn):
            # Within a turn, the policy samples the header of the next message, too.
            if i > 0:
                sample.add(self._harmony.assistant_header, entry.in_loss)

            end: StopToken | None = "<|end|>"
            # Only the last message ends with a token that stops sampling.
            if i == len(turn) - 1:
                end = "<|call|>" if entry.is_call else "<|return|>"
                end = None if is_truncated else end
            text = message_text(entry.message)
            parsed = _parse_message(entry.message, text)
            sample.add(self._harmony.render_sampled(parsed, end), entry.in_loss)

    def _check_round_trip(self, turn: Sequence[ConversationEntry]) -> None:
        """Check that parsing the rendered turn gives its messages.

        Raises:
            ConversationError: if it does not. The message names the file's message.
        """
        # Texts are encoded as plain text, so only headers can be misread. Few are distinct.
        messages = tuple(_parse_message(entry.message, "") for entry in turn)
        reason = self._header_faults.get(messages)
        if reason is None:
            reason = self._find_header_fault(messages)
            # Files have few different headers, so clearing all of them is rare.
            if len(self._header_faults) >= CACHE_SIZE:
                self._header_faults.clear()
            self._header_faults[messages] = reason
        if reason:
            raise ConversationError(f"message {turn[0].number}: {reason}")

    def _find_header_fault(self, messages: Sequence[ParsedMessage]) -> str:
        """Return an error if the headers of a turn are parsed differently, else ""."""
        read = self._harmony.parse(self._harmony.render_assistant(messages))
        if isinstance(read, FormatError):
            return f"in RL its turn would be a format error ({read.kind})"
        for meant, understood in zip(messages, read, strict=True):
            if meant != understood:
                return f"parsing would change the header of {meant} to {understood}"
        return ""

    def _add_others(self, sample: RenderedSample, others: Sequence[ConversationEntry]) -> None:
        """Add messages of other roles, and the header of the assistant's turn."""
        for entry in others:
            sample.add(self._harmony.render_message(entry.message), in_loss=False)
        sample.add(self._harmony.assistant_header, in_loss=False)

    # ---- system and developer messages

    def _render_system_prompt(self, conversation: Conversation) -> list[int]:
        """Render the system message and the developer messages at the beginning."""
        # Cached, because many conversations have the same messages. The key contains all that
        # ``render_system_prompt`` gets.
        key = _system_prompt_key(conversation)
        if key in self._system_prompts:
            self._system_prompts.move_to_end(key)
            return self._system_prompts[key]

        try:
            ids = self._harmony.render_system_prompt(
                conversation.developer_messages,
                conversation.tools,
                # Tools of a record can have schemas that openai-harmony cannot describe.
                system=conversation.system,
                reasoning_effort=conversation.reasoning_effort,
            )
        except ValueError as error:
            raise ConversationError(f"its tools cannot be described: {error}") from None
        self._system_prompts[key] = ids
        if len(self._system_prompts) > CACHE_SIZE:
            self._system_prompts.popitem(last=False)
        return ids


def _parse_message(message: Message, text: str) -> ParsedMessage:
    """Return an assistant message in sampled form, with another text."""
    return ParsedMessage(message.channel or "", message.recipient, message.content_type, text)


def _system_prompt_key(conversation: Conversation) -> SystemPromptKey:
    """Return the cache key for ``_render_system_prompt``."""
    system = conversation.system
    return (
        tuple(_content_key(message) for message in conversation.developer_messages),
        None if system is None else system.to_json(),
        repr(conversation.tools) if conversation.tools else "",
        conversation.reasoning_effort,
    )


def _content_key(message: Message) -> str | None:
    # openai-harmony gives each of these messages exactly one content.
    (content,) = message.content
    # Nearly all developer messages are instructions only, which need no JSON.
    if isinstance(content, DeveloperContent) and content.tools is None:
        return content.instructions
    return message.to_json()


def _user_turns(conversation: Conversation) -> list[list[range]]:
    """Group the assistant's turns: each group but the last ends with an answer."""
    groups: list[list[range]] = []
    current: list[range] = []
    for turn in conversation.turns:
        current.append(turn)
        if conversation.entries[turn.stop - 1].is_answer:
            groups.append(current)
            current = []
    if current:
        groups.append(current)
    return groups
