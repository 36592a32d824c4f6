"""What the Harmony system message says: ``prompt`` of a configuration."""

import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, field_validator

from rl_loop.chat.codec import Effort

Channel = Literal["analysis", "commentary", "final"]


class PromptConfig(BaseModel):
    """What the Harmony system message says.

    Shorter prompts cost less; the released models expect the full ones.
    """

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    model_identity: str | None = "You are ChatGPT, a large language model trained by OpenAI."
    """First line of the system message; null leaves it out."""
    knowledge_cutoff: str | None = "2024-06"
    """Shown as the knowledge cutoff; null leaves it out."""
    current_date: str | None = None
    """Shown as the current date, such as "2025-08-05"; null leaves it out. It is written here and
    not taken from the clock, so that a resumed run has the prompts that it began with."""
    reasoning_effort: Effort | None = "medium"
    """Shown as the reasoning effort; null leaves it out."""
    channels: bool | list[Channel] = True
    """Which channels the system message lists as valid: true for all three, false for no such
    line, or some of them, such as [analysis, final]."""
    python_tool: bool = True
    """Whether the built-in tools of an environment, such as Python, are described."""

    @field_validator("current_date", mode="before")
    @classmethod
    def _read_date(cls, value: Any) -> Any:
        # YAML makes a date of what looks like one.
        if isinstance(value, datetime.date):
            return value.isoformat()
        if isinstance(value, str) and not _is_date(value):
            raise ValueError("expected a date such as 2025-08-05")
        return value

    @field_validator("channels")
    @classmethod
    def _check_channels(cls, value: bool | list[Channel]) -> bool | list[Channel]:
        if isinstance(value, list):
            has_repeated = len(set(value)) < len(value)
            if not value or has_repeated:
                raise ValueError("list each channel once, or use false for none")
        return value


def _is_date(text: str) -> bool:
    # fromisoformat takes other spellings too, such as 20250805.
    try:
        return datetime.date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False
