"""What is trained on and measured: ``tasks`` of a configuration."""

from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from megatron_gptoss.config import StrictModel
from rl_loop.data.hub import check_place
from rl_loop.environments.registry import DEFAULT_ENVIRONMENT, environment_class


class PassRateConfig(StrictModel):
    """Training tasks by how often a policy solved them: those that it always or
    never solves teach nothing."""

    episodes: Path
    """What ``gptoss eval`` wrote on the same tasks; tasks that are not in it are kept."""
    minimum: float = Field(0.05, ge=0, le=1)
    """Smallest share of correct episodes."""
    maximum: float = Field(0.95, ge=0, le=1)
    """Largest share of correct episodes."""


class SourceConfig(StrictModel):
    """Tasks of one environment: from data, or generated where it can generate."""

    environment: str
    """A name that ``rl_loop.environments`` knows, or MODULE:CLASS."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Of the environment: the fields of its ``Options``."""
    train_path: str | None = None
    """A .jsonl or .parquet file, or hub:NAME:SPLIT or
    hub:NAME:CONFIGURATION:SPLIT of the Hugging Face hub; null for generated tasks.
    Shuffled anew in each epoch."""
    held_out_path: str | None = None
    """The tasks on which accuracy is measured. Training tasks that share 13 words in a row, or a
    shorter question, with one of them are dropped."""
    columns: dict[str, str] = Field(default_factory=dict)
    """How rows of the data call what the environment or a task calls otherwise, such as
    ``{question: problem, answer: solution}``. Only these columns are read then. Empty: the names
    are known already."""
    weight: float = Field(1.0, ge=0)
    """Share of the training tasks, relative to the other sources; 0 only evaluates."""
    pass_rate: PassRateConfig | None = None
    """Leave out training tasks that are too easy or too hard; needs train_path."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_place(self.train_path)
        check_place(self.held_out_path)
        if self.train_path is not None and self.held_out_path is None:
            raise ValueError(
                "train_path needs held_out_path: accuracy is measured on tasks that are not trained on"
            )
        if self.held_out_path is not None and self.train_path is None and self.weight > 0:
            raise ValueError(
                "held_out_path without train_path: give train_path, or weight 0 to evaluate only"
            )
        if self.pass_rate is not None and self.train_path is None:
            raise ValueError("pass_rate filters the tasks of train_path, which is not given")
        if self.columns and self.held_out_path is None:
            raise ValueError(
                "columns are those of train_path and held_out_path, which are not given"
            )
        environment_class(self.environment).Options.model_validate(self.options)
        return self


class TaskConfig(StrictModel):
    """What is trained on and measured: a mixture of sources."""

    sources: dict[str, SourceConfig] = Field(
        {DEFAULT_ENVIRONMENT: SourceConfig(environment=DEFAULT_ENVIRONMENT)}, min_length=1
    )
    """By a name of your choice."""
    seed: int = 0
    """Of generators, and of the order of data."""
    held_out_tasks: int = Field(128, gt=0)
    """How many held-out tasks of each source an evaluation uses."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not any(source.weight > 0 for source in self.sources.values()):
            raise ValueError("no source has a weight above 0")
        return self
