"""Section ``tasks`` of a configuration: tasks for training and evaluation."""

from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from megatron_gptoss.config import StrictModel
from rl_loop.data.hub import check_location
from rl_loop.environments.registry import DEFAULT_ENVIRONMENT, environment_class
from rl_loop.rewards.judge_config import JudgeConfig


class PassRateConfig(StrictModel):
    """Selection of training tasks by the share of correct episodes.

    Tasks that are always or never solved give no gradient with group-relative advantages. Set
    ``episodes``, ``retry`` or both.
    """

    episodes: Path | None = None
    """Episodes of ``gptoss eval`` on the same tasks. Tasks without episodes are kept. null if the
    run measures the pass rates."""
    retry: float | None = Field(None, gt=0, lt=1)
    """Probability of using a task again after a group outside of the limits, and retry ** n after n
    groups in a row outside of the limits, at least 0.05 (GRESO, arXiv 2506.02177). null: the run
    measures no pass rates, and the tasks that ``episodes`` excludes are never used."""
    minimum: float = Field(0.05, ge=0, le=1)
    """Minimum share of correct episodes."""
    maximum: float = Field(0.95, ge=0, le=1)
    """Maximum share of correct episodes."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.episodes is None and self.retry is None:
            raise ValueError(
                "pass_rate has neither episodes nor retry, so it would select nothing. Set one"
            )
        return self


class SourceConfig(StrictModel):
    """Tasks of one environment, from data or generated."""

    environment: str
    """Name in ``rl_loop.environments``, or MODULE:CLASS."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the environment: the fields of its ``Options``."""
    train_path: str | None = None
    """Training tasks: a .jsonl or .parquet file, or hub:NAME:SPLIT or hub:NAME:CONFIGURATION:SPLIT
    of the Hugging Face hub. null for generated tasks. Shuffled in each epoch."""
    held_out_path: str | None = None
    """Held-out tasks for measuring accuracy, in the same formats. Training tasks that share 13
    consecutive words, or a shorter question, with a held-out task are dropped. null for generated
    tasks."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Column mapping {expected name: name in the data}, such as ``{question: problem, answer:
    solution}``. If set, other columns are ignored. If empty, the data has the expected names."""
    teacher_hint: str | None = None
    """Text after the prompt that only the teacher of ``algorithm.distillation`` sees, such as "The
    answer is {ground_truth}.". {ground_truth} stands for the answer of the task, and {KEY} for an
    entry of its metadata. null for none."""
    judge: JudgeConfig | None = None
    """Language model that scores final answers as the reward part ``judge``. null for none."""
    weight: float = Field(1.0, ge=0)
    """Share of the training tasks, relative to the other sources. 0 for evaluation only."""
    pass_rate: PassRateConfig | None = None
    """Drop or skip training tasks that are too easy or too hard. Needs train_path. null to use
    all."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        # This checks the form of hub names, not that the data exists.
        check_location(self.train_path)
        check_location(self.held_out_path)

        if self.train_path is not None and self.held_out_path is None:
            raise ValueError(
                "train_path needs held_out_path, because accuracy is measured on tasks that are "
                "not trained on. Set held_out_path"
            )
        if self.held_out_path is not None and self.train_path is None and self.weight > 0:
            raise ValueError(
                "held_out_path has no train_path. Set train_path, or weight=0 to evaluate only"
            )

        if self.pass_rate is not None and self.train_path is None:
            raise ValueError(
                "pass_rate selects the tasks of train_path, but train_path is null. Set "
                "train_path, or leave pass_rate out"
            )
        # A column mapping without data would have no effect.
        if self.columns and self.held_out_path is None:
            raise ValueError(
                "columns apply to train_path and held_out_path, but both are null. Set these "
                "paths, or leave columns out"
            )

        # Report wrong options with the other mistakes of the configuration, not at the first
        # episode.
        environment = environment_class(self.environment)
        environment.Options.model_validate(self.options)
        if self.judge is not None and environment.uses_external_agent:
            raise ValueError(
                "judge scores final answers of the agent loop, but an external agent runs the "
                "episodes of this environment. Let the agent score them, or leave judge out"
            )
        return self


class TaskConfig(StrictModel):
    """Tasks for training and evaluation: a mixture of sources."""

    sources: dict[str, SourceConfig] = Field(
        {DEFAULT_ENVIRONMENT: SourceConfig(environment=DEFAULT_ENVIRONMENT)}, min_length=1
    )
    """Sources of tasks, by a name of your choice."""
    seed: int = 0
    """Seed for task generators and for shuffling data."""
    held_out_tasks: int = Field(128, gt=0)
    """Held-out tasks per source in an evaluation."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        # Weight 0 is for evaluation only, so a run needs another source to train on.
        if not any(source.weight > 0 for source in self.sources.values()):
            raise ValueError(
                "every source has weight 0. Set the weight of at least one source above 0"
            )
        return self
