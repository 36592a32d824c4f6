"""Renders conversations in the tokens that inference would have consumed and sampled.

The mask is on what a policy would sample: behind the header of its turn, which the prompt ends
with, through <|return|> or <|call|>. What stands between two messages of a turn is sampled, too:
<|end|><|start|>assistant. openai-harmony's ``render_conversation_for_training`` is not used: it
drops the analysis that leads to the answer, and writes recipients where GPT-OSS does not sample
them.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from openai_harmony import DeveloperContent, Message, ReasoningEffort

from rl_loop.conversations.config import Format
from rl_loop.conversations.conversation import Conversation, Statement
from rl_loop.conversations.errors import ConversationError
from rl_loop.conversations.formats import read_conversation
from rl_loop.harmony.codec import FormatError, Harmony, ParsedMessage
from rl_loop.harmony.conversation import message_text, without_finished_analysis

REMEMBERED_OPENINGS = 256
"""Most conversations of a file have the same instructions and tools."""

StopToken = Literal["<|end|>", "<|return|>", "<|call|>"]
OpeningKey = tuple[tuple[str | None, ...], str | None, str, ReasoningEffort | None]


@dataclass
class RenderedSample:
    """The tokens of one sample."""

    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    """True where the token is learned; as long as ``token_ids``."""
    number: int = 0
    """Index among the samples of its conversation, those included that are left out."""

    def add(self, ids: Sequence[int], learned: bool) -> None:
        """Append tokens that are all learned or all not."""
        self.token_ids += ids
        self.loss_mask += [learned] * len(ids)


@dataclass(frozen=True)
class RenderOptions:
    """How conversations become samples; see ``DataConfig``."""

    history: Literal["harmony", "append"]
    max_tokens: int
    too_long: Literal["refuse", "truncate"]


def fit(sample: RenderedSample, options: RenderOptions) -> str | None:
    """Shorten a sample that is too long if that is asked for; else say why it is left out."""
    limit = options.max_tokens
    tokens = len(sample.token_ids)
    if tokens <= limit:
        return None
    if options.too_long == "refuse":
        return f"it has {tokens} tokens, more than data.max_tokens ({limit})"

    del sample.token_ids[limit:]
    del sample.loss_mask[limit:]
    if not any(sample.loss_mask):
        return f"its first {limit} tokens (data.max_tokens) have nothing to learn"
    return None


class ConversationRenderer:
    """Renders conversations for one vocabulary."""

    def __init__(self, harmony: Harmony, options: RenderOptions) -> None:
        self._harmony = harmony
        self._options = options
        self._openings: OrderedDict[OpeningKey, list[int]] = OrderedDict()
        self._misread: dict[tuple[ParsedMessage, ...], str] = {}
        """How turns without their texts are misread, "" if they are not."""

    def render_record(self, record: Any, form: Format) -> tuple[list[RenderedSample], list[str]]:
        """Read a record of a file and ``render`` it."""
        return self.render(read_conversation(record, form))

    def render(self, conversation: Conversation) -> tuple[list[RenderedSample], list[str]]:
        """Render the samples of a conversation, at least one token of each learned.

        Returns them, and for each one that is left out the reason. Raises ConversationError if the
        conversation as a whole cannot be rendered.
        """
        if self._options.history == "append":
            samples = [self._render_whole(conversation)]
        else:
            samples = self._render_user_turns(conversation)

        kept: list[RenderedSample] = []
        refused: list[str] = []
        for number, sample in enumerate(samples):
            sample.number = number
            reason = fit(sample, self._options)
            if reason is None:
                kept.append(sample)
            elif len(samples) == 1:
                refused.append(reason)
            else:
                refused.append(f"turn {number} of the user: {reason}")
        return kept, refused

    # ---- samples

    def _render_whole(self, conversation: Conversation) -> RenderedSample:
        """Render a conversation as one episode: everything exactly as it was sampled."""
        sample = RenderedSample()
        sample.add(self._opening(conversation), learned=False)
        turns = conversation.turns
        self._add_others(sample, conversation.statements[: turns[0].start])
        self._add_turns(sample, conversation, turns)
        return sample

    def _render_user_turns(self, conversation: Conversation) -> list[RenderedSample]:
        """Render a sample for each stretch that ends with an answer, behind what inference shows
        of the stretches before."""
        opening = self._opening(conversation)
        statements = conversation.statements
        samples: list[RenderedSample] = []

        for turns in _user_turns(conversation):
            learned = any(statements[i].learned for turn in turns for i in turn)
            if not learned:
                continue

            sample = RenderedSample()
            sample.add(opening, learned=False)
            history = [statement.message for statement in statements[: turns[0].start]]
            for message in without_finished_analysis(history):
                sample.add(self._harmony.render_message(message), learned=False)
            sample.add(self._harmony.assistant_header, learned=False)
            self._add_turns(sample, conversation, turns)
            samples.append(sample)
        return samples

    def _add_turns(
        self, sample: RenderedSample, conversation: Conversation, turns: Sequence[range]
    ) -> None:
        """Add turns of the assistant as they are sampled, and what is said between them."""
        statements = conversation.statements
        for number, turn in enumerate(turns):
            is_cut = conversation.truncated and turn.stop == len(statements)
            self._add_turn(sample, statements[turn.start : turn.stop], is_cut)
            if number + 1 < len(turns):
                self._add_others(sample, statements[turn.stop : turns[number + 1].start])

    def _add_turn(self, sample: RenderedSample, turn: Sequence[Statement], is_cut: bool) -> None:
        """Add one turn, after its header. Without a stop token if it was cut off."""
        self._check_reads_back(turn)
        for i, statement in enumerate(turn):
            if i > 0:
                sample.add(self._harmony.assistant_header, statement.learned)

            end: StopToken | None = "<|end|>"
            if i == len(turn) - 1:
                end = "<|call|>" if statement.is_call else "<|return|>"
                end = None if is_cut else end
            text = message_text(statement.message)
            parsed = _parsed(statement.message, text)
            sample.add(self._harmony.render_sampled(parsed, end), statement.learned)

    def _check_reads_back(self, turn: Sequence[Statement]) -> None:
        """Check that reinforcement learning would read the turn as it is meant.

        Raises ConversationError naming the message whose header is read as another one.
        """
        # Texts are encoded as text, so that only headers can be misread: there are few of them.
        messages = tuple(_parsed(statement.message, "") for statement in turn)
        reason = self._misread.get(messages)
        if reason is None:
            reason = self._misreading(messages)
            if len(self._misread) >= REMEMBERED_OPENINGS:
                self._misread.clear()
            self._misread[messages] = reason
        if reason:
            raise ConversationError(f"message {turn[0].number}: {reason}")

    def _misreading(self, messages: Sequence[ParsedMessage]) -> str:
        """Say how a turn without its texts is misread; "" if it is not."""
        read = self._harmony.parse(self._harmony.render_assistant(messages))
        if isinstance(read, FormatError):
            return f"the policy would be punished for its turn: a format error ({read.kind})"
        for meant, understood in zip(messages, read, strict=True):
            if meant != understood:
                return f"the header of {meant} would be read as {understood}"
        return ""

    def _add_others(self, sample: RenderedSample, others: Sequence[Statement]) -> None:
        """Add what users, tools and the developer say, and the header with which the assistant's
        turn begins."""
        for statement in others:
            sample.add(self._harmony.render_message(statement.message), learned=False)
        sample.add(self._harmony.assistant_header, learned=False)

    # ---- the opening

    def _opening(self, conversation: Conversation) -> list[int]:
        """Render the system message and what the developer says first, once for all conversations
        that have the same."""
        key = _opening_key(conversation)
        if key in self._openings:
            self._openings.move_to_end(key)
            return self._openings[key]

        try:
            ids = self._harmony.render_opening(
                conversation.opening,
                conversation.tools,
                system=conversation.system,
                reasoning_effort=conversation.reasoning_effort,
            )
        except ValueError as error:
            raise ConversationError(f"its tools cannot be described: {error}") from None
        self._openings[key] = ids
        if len(self._openings) > REMEMBERED_OPENINGS:
            self._openings.popitem(last=False)
        return ids


def _parsed(message: Message, text: str) -> ParsedMessage:
    """Return a message of the assistant as it is sampled, with another text."""
    return ParsedMessage(message.channel or "", message.recipient, message.content_type, text)


def _opening_key(conversation: Conversation) -> OpeningKey:
    """Return what two conversations with the same opening have in common."""
    system = conversation.system
    return (
        tuple(_content_key(message) for message in conversation.opening),
        None if system is None else system.to_json(),
        repr(conversation.tools) if conversation.tools else "",
        conversation.reasoning_effort,
    )


def _content_key(message: Message) -> str | None:
    (content,) = message.content
    # Instructions alone, as nearly all are, need not be written as JSON.
    if isinstance(content, DeveloperContent) and content.tools is None:
        return content.instructions
    return message.to_json()


def _user_turns(conversation: Conversation) -> list[list[range]]:
    """Group the assistant's turns: each group but the last ends with an answer."""
    groups: list[list[range]] = []
    current: list[range] = []
    for turn in conversation.turns:
        current.append(turn)
        if conversation.statements[turn.stop - 1].is_answer:
            groups.append(current)
            current = []
    if current:
        groups.append(current)
    return groups
