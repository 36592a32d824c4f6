"""Prompts of episodes, and a renderer that rejects prompts without enough tokens for an answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rl_loop.chat.codec import ChatCodec
from rl_loop.chat.tools import BuiltinTool, PythonTool, Tool
from rl_loop.environments import make_offline_environment
from rl_loop.environments.base import Environment, Task
from rl_loop.infrastructure import describe
from rl_loop.tasks.task_file import TaskFileError

MAX_O200K_TOKEN_BYTES = 128
"""Bytes of o200k's longest token, a run of spaces.

A prompt with more bytes per allowed token is rejected before it is tokenized. Other vocabularies may
have longer tokens, but texts have far fewer bytes per token.
"""
PROMPT_OVERHEAD_TOKENS = 1024
"""Upper bound of the tokens that a codec adds to the texts of a prompt: the system message and some
headers."""


class UnusablePromptError(ValueError):
    """Prompt that is too long or cannot be rendered, so the task cannot be run.

    The message names the task.
    """


@dataclass(frozen=True)
class EpisodePrompt:
    """Beginning of an environment's episodes."""

    messages: Sequence[dict[str, Any]]
    tools: Sequence[Tool] = ()
    builtin_tools: Sequence[BuiltinTool | PythonTool] = ()
    token_ids: Sequence[int] | None = None
    """The rendered prompt, if the environment has it."""


def build_prompt(environment: Environment) -> EpisodePrompt:
    """Return the prompt of an environment's episode."""
    return EpisodePrompt(
        environment.prompt(),
        environment.tools(),
        environment.builtin_tools(),
        environment.prompt_ids(),
    )


def build_teacher_prompt(environment: Environment) -> EpisodePrompt | None:
    """Return the prompt that a teacher sees instead. None if it sees that of the policy."""
    if environment.task.teacher_hint is None:
        return None
    return EpisodePrompt(
        environment.teacher_prompt(), environment.tools(), environment.builtin_tools()
    )


class EpisodePromptRenderer:
    """Renderer of prompts that rejects prompts of ``max_tokens`` tokens or more."""

    def __init__(self, codec: ChatCodec, max_tokens: int) -> None:
        self._codec = codec
        self._max_tokens = max_tokens

    def render(self, task_id: str, prompt: EpisodePrompt) -> list[int]:
        """Return the ids of a prompt.

        Args:
            task_id: id of the task, for errors.
            prompt: prompt to render.

        Raises:
            UnusablePromptError: if it is too long or cannot be rendered.
        """
        if prompt.token_ids is not None:
            return self._fitting(task_id, list(prompt.token_ids))
        try:
            # Reject prompts of megabytes early, because tokenizing them would take minutes.
            contents = [str(message.get("content")) for message in prompt.messages]
            size = sum(len(text.encode("utf-8", "replace")) for text in contents)
            if size > MAX_O200K_TOKEN_BYTES * self._max_tokens:
                raise self._too_long(
                    task_id, f"{size} bytes, more than {MAX_O200K_TOKEN_BYTES} per token"
                )
            ids = self._codec.render_prompt(prompt.messages, prompt.tools, prompt.builtin_tools)
        except UnusablePromptError:
            raise
        except Exception as error:
            raise UnusablePromptError(
                f"the prompt of task {task_id} cannot be rendered: {describe(error)}"
            ) from error

        return self._fitting(task_id, ids)

    def _fitting(self, task_id: str, ids: list[int]) -> list[int]:
        """Return ``ids``. Raises UnusablePromptError if they are too long."""
        # At the limit there is no token left for an answer.
        if len(ids) >= self._max_tokens:
            raise self._too_long(task_id, f"{len(ids)} tokens")
        return ids

    def fits_without_tokenizing(self, prompt: EpisodePrompt) -> bool:
        """Return True if a prompt is certainly short enough, without tokenizing it.

        Every token has at least one byte. A prompt may be short enough even if this returns False.
        """
        described = sum(len(repr(tool).encode()) for tool in (*prompt.tools, *prompt.builtin_tools))
        written = sum(len(repr(message).encode()) for message in prompt.messages)
        return written + 2 * described + PROMPT_OVERHEAD_TOKENS < self._max_tokens

    def _too_long(self, task_id: str, length: str) -> UnusablePromptError:
        problem = f"has {length}; rollout.max_episode_tokens is {self._max_tokens}"
        return UnusablePromptError(f"the prompt of task {task_id} {problem}")


def unusable_reason(task: Task, renderer: EpisodePromptRenderer) -> str | None:
    """Return the reason why a task cannot be run. None if it can.

    Raises:
        TaskFileError: if the environment cannot create its prompt.
    """
    try:
        environment = make_offline_environment(task)
        prompt = build_prompt(environment)
        teacher_prompt = build_teacher_prompt(environment)
    except Exception as error:
        raise TaskFileError(
            f"task {task.task_id}: its prompt cannot be created: {describe(error)}"
        ) from error

    prompts = [prompt] if teacher_prompt is None else [prompt, teacher_prompt]
    if all(map(renderer.fits_without_tokenizing, prompts)):
        return None
    try:
        for each in prompts:
            renderer.render(task.task_id, each)
    except UnusablePromptError as reason:
        return str(reason)
    return None
