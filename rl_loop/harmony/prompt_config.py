"""Contents of the Harmony system message: ``prompt`` of a configuration."""

import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, field_validator

from rl_loop.chat.codec import Effort

Channel = Literal["analysis", "commentary", "final"]


class PromptConfig(BaseModel):
    """Contents of the Harmony system message.

    Shorter prompts cost less. The released models expect the full message.
    """

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    model_identity: str | None = "You are ChatGPT, a large language model trained by OpenAI."
    """First line of the system message. null: none."""
    knowledge_cutoff: str | None = "2024-06"
    """Knowledge cutoff. null: none."""
    current_date: str | None = None
    """Current date, such as "2025-08-05". null: none. It is not taken from the clock, so that a
    resumed run keeps its prompts."""
    reasoning_effort: Effort | None = "medium"
    """Reasoning effort. null: none."""
    channels: bool | list[Channel] = True
    """Valid channels in the system message. true: all three. false: no such line. Or a list, such
    as [analysis, final]."""
    describe_builtin_tools: bool = True
    """Describe the environment's built-in tools, such as Python."""

    @field_validator("current_date", mode="before")
    @classmethod
    def _read_date(cls, value: Any) -> Any:
        # YAML converts text that looks like a date.
        if isinstance(value, datetime.date):
            return value.isoformat()
        if isinstance(value, str) and not _is_date(value):
            raise ValueError("the date must have the form 2025-08-05")
        return value

    @field_validator("channels")
    @classmethod
    def _check_channels(cls, value: bool | list[Channel]) -> bool | list[Channel]:
        if isinstance(value, list):
            has_repeated = len(set(value)) < len(value)
            if not value or has_repeated:
                raise ValueError("name each channel once, or set false for none")
        return value


def _is_date(text: str) -> bool:
    # fromisoformat accepts other formats, too, such as 20250805.
    try:
        return datetime.date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False
