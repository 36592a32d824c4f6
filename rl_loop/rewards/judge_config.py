"""Settings of a judge, and the reward parts that it adds."""

import os
from typing import Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, model_validator

from megatron_gptoss.user_error import UserError

SCORE_PART = "judge"
"""Reward part with the score of the judge, from 0 to 1."""
UNSCORED_PART = "judge_unscored"
"""Reward part: 1 if the judge could not score this answer although it scored the control answer."""


class JudgeConfig(BaseModel):
    """Language model that scores the final answers of a source by a rubric."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    url: str
    """Base address of an OpenAI-compatible server, such as ``http://judge:8000/v1``."""
    model: str
    """Name of the model at the server."""
    rubric: str = Field(min_length=1)
    """Criteria for a score from 0 to 10. {ground_truth} stands for the answer of the task, and
    {KEY} for an entry of its metadata."""
    api_key_variable: str | None = None
    """Environment variable with the API key, such as OPENAI_API_KEY. null to send no key."""
    max_concurrent_requests: int = Field(16, gt=0)
    """Maximum number of running requests per rollout worker. Further requests wait."""
    timeout_seconds: float = Field(60.0, gt=0, allow_inf_nan=False)
    """Time limit of a request in seconds. A request is repeated 3 times before its episode is
    invalid."""
    max_tokens: int = Field(2048, gt=0)
    """Maximum tokens of a reply, including the judge's thoughts."""
    json_schema: bool = True
    """True to request replies that match a JSON schema. Set false for servers without
    ``response_format: json_schema``."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url: {self.url!r} is not an http or https address")
        # Addresses appear in messages and in the resolved configuration.
        if parts.username is not None or parts.password is not None:
            raise ValueError("url contains a user name or password. Set api_key_variable instead")
        return self

    def api_key(self) -> str | None:
        """Return the API key. Raises UserError if its variable is not set."""
        if self.api_key_variable is None:
            return None
        key = os.environ.get(self.api_key_variable)
        if not key:
            raise UserError(
                f"judge.api_key_variable: environment variable {self.api_key_variable} is not set. "
                "Set it to the API key of the judge"
            )
        return key
