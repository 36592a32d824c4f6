"""The seam between chat formats and everything that plays, makes or learns episodes.

A codec renders conversations to token ids and parses what a policy sampled. Sampled ids are parsed and
then kept as they are: nothing that was sampled is rendered again.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from rl_loop.chat.messages import CutTurn, FormatError, ParsedMessage, ToolOutput
from rl_loop.chat.open_calls import OpenCall
from rl_loop.chat.tools import BuiltinTool, PythonTool, Tool

Effort = Literal["low", "medium", "high"]
"""How much a policy is asked to think, where a format can say it."""


class Vocabulary(Protocol):
    """The token ids of a model."""

    size: int
    """Rows of the model's embedding."""

    def encode_text(self, text: str) -> list[int]:
        """Encode plain text; nothing in it becomes a special token."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Decode with special tokens written out; bytes that are not UTF-8 become U+FFFD."""
        ...

    def save(self, directory: Path) -> list[Path]:
        """Write what transformers' AutoTokenizer needs and return the files; none if those of the
        checkpoint that training started from are to be copied."""
        ...


class ChatCodec(Protocol):
    """Renders and parses one chat format in one vocabulary."""

    @property
    def vocabulary(self) -> Vocabulary:
        """What token ids mean."""
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
        """Render a conversation, ending where the assistant begins its turn.

        ``messages`` are those that ``rl_loop.harmony.conversation`` describes, as far as the format
        can say them. Raises ValueError naming the message that cannot be rendered.
        """
        ...

    def render_observation(
        self, outputs: Sequence[ToolOutput], user: str | None = None
    ) -> list[int]:
        """Render what tools answer to a sampled turn and what the user then says.

        Ends where the assistant begins again. Half of a surrogate pair, which is no text, becomes
        U+FFFD.
        """
        ...

    def render_assistant(self, messages: Sequence[ParsedMessage]) -> list[int]:
        """Render a turn exactly as a policy would sample it, behind a prompt: with its stop token."""
        ...

    def parse(self, ids: Sequence[int]) -> list[ParsedMessage] | FormatError:
        """Parse one sampled turn, its stop token included: thoughts, then calls or a final answer.

        A recipient is whatever the policy wrote: the environment says which tools there are.
        """
        ...

    def split_at_calls(
        self, ids: Sequence[int], messages: Sequence[ParsedMessage]
    ) -> tuple[list[int], list[int]]:
        """Split a turn with calls, ``messages``, into reasoning and calls."""
        ...

    def join_with_calls(self, reasoning: Sequence[int], calls: Sequence[int]) -> list[int]:
        """Put together what ``split_at_calls`` gave, of one turn or of two."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids of the model, special tokens written out."""
        ...

    def decode_token(self, token_id: int) -> str:
        """Decode one id of the model."""
        ...

    def chat_template(self) -> str:
        """Return the Jinja template of an export whose vocabulary is our own."""
        ...

    # ---- conversations of clients, which the gateway serves

    @property
    def knows_reasoning_effort(self) -> bool:
        """Whether a prompt can say how much the policy is to think."""
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
        """Render a client's conversation from its first message to where the assistant begins its turn.

        ``tools`` are functions of the client. The calls that no message answers are added to
        ``open_calls``. ``reasoning_effort``: None for what the configuration says. ``keys``: one for each
        beginning of the messages, from none of them to all, equal for equal ones behind equal tools and
        effort, by which a codec may remember what many conversations begin with. Raises ValueError
        naming what cannot be rendered.
        """
        ...

    def render_continuation(
        self, messages: Sequence[dict[str, Any]], open_calls: list[OpenCall], first_number: int
    ) -> list[int]:
        """Render messages that follow tokens which end with a turn of the assistant.

        ``open_calls``: those in these tokens; afterwards those that are open then. ``first_number``:
        messages before these ones, for errors. Otherwise as ``render_conversation``.
        """
        ...

    def parse_for_client(self, ids: Sequence[int]) -> list[ParsedMessage] | FormatError:
        """Parse one sampled turn in which every call is one of a client's functions.

        On "analysis" is only what the format itself tells apart as thoughts; all other text is said to
        the client.
        """
        ...

    def parse_cut_for_client(self, ids: Sequence[int]) -> CutTurn:
        """Read a turn that a limit cut off, as far as ``parse_for_client`` would read it."""
        ...

    def without_finished_analysis(self, ids: Sequence[int]) -> list[int]:
        """Leave out of a conversation's tokens what the format drops once an answer is given."""
        ...

    def reasoning_tokens(self, sampled: Sequence[int]) -> int:
        """Count the tokens of a sampled turn that the format itself tells apart as thoughts."""
        ...


def without_surrogates(text: str) -> str:
    """Join surrogate pairs to characters, and replace a half of one by U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
