"""Conversations for supervised fine-tuning: ``data`` of a configuration."""

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rl_loop.data.hub import check_location

Format = Literal["auto", "messages", "sharegpt", "harmony"]

ONLY_SOURCE = "data"
"""Name of a source that is given without a name."""


class ConversationSource(BaseModel):
    """Conversations of one file or data set."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    path: str
    """A .jsonl or .parquet file, or hub:NAME:SPLIT or hub:NAME:CONFIGURATION:SPLIT."""
    format: Format = "auto"
    """Format of the records. ``messages``: OpenAI's and Hugging Face's format, with ``tools`` and
    ``thinking``. ``sharegpt``: ``conversations`` of ``from`` and ``value``. ``harmony``: JSON of
    openai-harmony. ``auto``: detected for every conversation by its keys."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Column mapping {key of the format: column of the data}, such as
    ``{messages: chat, tools: functions}``. If set, other columns are ignored, and every row must
    have these columns (null is allowed). Empty: columns have the names of the format."""
    weight: float = Field(1.0, gt=0)
    """Share of the samples, relative to the other sources."""
    epochs: int | None = Field(None, gt=0)
    """Passes over the source. The other sources continue without it, and the run ends early if no
    source is left. null: repeat until ``training.steps`` are done."""
    validation_path: str | None = None
    """Conversations in the same format for the validation loss. null: use
    ``data.validation_fraction``."""

    @model_validator(mode="after")
    def _check_locations(self) -> Self:
        check_location(self.path)
        check_location(self.validation_path)
        return self


class CorpusConfig(BaseModel):
    """Conversations of one source or several.

    ``{path: chats.jsonl}`` is short for ``{sources: {data: {path: chats.jsonl}}}``. All keys of a
    source can be given in this way.
    """

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    sources: dict[str, ConversationSource] = Field(min_length=1)
    """Sources. Choose any names."""

    @model_validator(mode="before")
    @classmethod
    def _name_only_source(cls, values: Any) -> Any:
        """Move keys of a single source from the top level to ``sources.data``."""
        # pydantic reports other types with the key.
        if not isinstance(values, dict):
            return values
        source_values = {
            key: values[key] for key in values if key in ConversationSource.model_fields
        }
        if not source_values:
            return values

        # Errors name the source in full. Overrides may use the full name, too.
        named_sources = values.get("sources", {})
        if not isinstance(named_sources, dict) or set(named_sources) - {ONLY_SOURCE}:
            raise ValueError(
                f"{', '.join(source_values)} belongs to a source. Move it to sources.NAME"
            )
        others = {key: value for key, value in values.items() if key not in source_values}
        return {
            **others,
            "sources": {ONLY_SOURCE: source_values | named_sources.get(ONLY_SOURCE, {})},
        }


class DataConfig(CorpusConfig):
    """Conversations to train on, from one source or a mixture of several."""

    history: Literal["harmony", "append"] = "harmony"
    """Rendering of earlier turns. ``harmony``: one sample per user turn, with earlier turns as they
    look at inference: without the analysis of finished answers, and with <|end|> in place of
    <|return|>. ``append``: one sample per conversation, with everything as it was sampled. Both are
    the same for ChatML, which shows earlier turns in full."""
    seed: int = 0
    """Seed for shuffling and for the validation split."""
    shuffle: bool = True
    """Shuffle every epoch differently. false: use the order of the file."""
    validation_fraction: float = Field(0.0, ge=0, lt=1)
    """Share of the conversations used for the validation loss instead of training. They are chosen
    by content, so copies of a conversation are in the same split."""
    validation_conversations: int = Field(256, gt=0)
    """Maximum number of validation conversations per source."""
    validate_every: int = Field(50, gt=0)
    """Steps between validations. Validation also runs before the first step and after the last."""
    sampled_conversations: int = Field(0, ge=0)
    """Number of validation conversations per source whose turns are sampled in every validation and
    compared with the references (docs/evaluating.md). ``rollout`` has the engine and the limits of
    a turn. 0: measure the loss only."""
    max_tokens: int | None = Field(None, gt=1)
    """Maximum tokens per sample. null: the limit of ``training.max_tokens_per_micro_batch`` and
    ``model.max_length``."""
    too_long: Literal["reject", "truncate"] = "reject"
    """Treatment of longer samples. ``reject``: report them and leave them out. ``truncate``: cut
    off the end, including the token that ends a turn."""
    max_rejected_fraction: float = Field(0.1, ge=0, le=1)
    """Maximum share of rejected conversations. Above it the run ends and reports the reasons."""
    workers: int = Field(2, ge=0)
    """Processes that read and tokenize ahead of training. 0: do it between steps."""

    @model_validator(mode="after")
    def _check_validation(self) -> Self:
        for name, source in self.sources.items():
            if source.validation_path is not None and self.validation_fraction > 0:
                raise ValueError(
                    f"sources.{name}.validation_path and validation_fraction both select data for "
                    "validation. Give one of them"
                )
        if self.sampled_conversations > 0 and not self.holds_out_conversations:
            raise ValueError(
                f"sampled_conversations ({self.sampled_conversations}) needs held-out "
                "conversations. Set validation_path or validation_fraction"
            )
        return self

    @property
    def holds_out_conversations(self) -> bool:
        """True if conversations are held out for validation."""
        paths = [source.validation_path for source in self.sources.values()]
        return self.validation_fraction > 0 or any(path is not None for path in paths)
