"""Which prompts leave room for an answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rl_loop.chat.codec import ChatCodec
from rl_loop.chat.tools import BuiltinTool, PythonTool, Tool
from rl_loop.environments.base import Environment
from rl_loop.infrastructure import describe

LONGEST_TOKEN = 128
"""Bytes of the longest token of o200k, a run of spaces."""
FRAME_TOKENS = 1024
"""More than a codec puts around the texts of a prompt: the system message and the headers of a few
messages."""


class UnusablePrompt(ValueError):
    """No episode of the task can be run: its prompt is too long or cannot be rendered.

    The message names the task."""


@dataclass(frozen=True)
class Prompt:
    """What an environment starts its episodes from."""

    messages: Sequence[dict[str, Any]]
    tools: Sequence[Tool] = ()
    builtin_tools: Sequence[BuiltinTool | PythonTool] = ()


def prompt_of(environment: Environment) -> Prompt:
    """Ask an environment for the prompt of its episode."""
    return Prompt(environment.prompt(), environment.tools(), environment.builtin_tools())


class PromptLimit:
    """Renders the prompts of a run whose episodes have at most ``max_tokens`` tokens."""

    def __init__(self, codec: ChatCodec, max_tokens: int) -> None:
        self._codec = codec
        self._max_tokens = max_tokens

    def render(self, task_id: str, prompt: Prompt) -> list[int]:
        """Return the ids of a prompt.

        Raises UnusablePrompt naming the task, and the limit if it is too long."""
        try:
            # A prompt of megabytes is refused before it is tokenised, which would take minutes.
            contents = [str(message.get("content")) for message in prompt.messages]
            size = sum(len(text.encode("utf-8", "replace")) for text in contents)
            if size > LONGEST_TOKEN * self._max_tokens:
                raise self._too_long(task_id, f"at least {size // LONGEST_TOKEN}")
            ids = self._codec.render_prompt(prompt.messages, prompt.tools, prompt.builtin_tools)
        except UnusablePrompt:
            raise
        except Exception as error:
            raise UnusablePrompt(
                f"the prompt of task {task_id} cannot be rendered: {describe(error)}"
            ) from error

        if len(ids) >= self._max_tokens:
            raise self._too_long(task_id, str(len(ids)))
        return ids

    def surely_fits(self, prompt: Prompt) -> bool:
        """Say whether a prompt is short enough whatever its tokens are, without tokenising it.

        Every token has a byte or more. False says nothing."""
        described = sum(len(repr(tool).encode()) for tool in (*prompt.tools, *prompt.builtin_tools))
        written = sum(len(repr(message).encode()) for message in prompt.messages)
        return written + 2 * described + FRAME_TOKENS < self._max_tokens

    def _too_long(self, task_id: str, tokens: str) -> UnusablePrompt:
        limit = f"has {tokens} tokens; rollout.max_tokens is {self._max_tokens}"
        return UnusablePrompt(f"the prompt of task {task_id} {limit}")
