"""The conversations that supervised fine-tuning learns: ``data`` of a configuration."""

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rl_loop.data.hub import check_place

Format = Literal["auto", "messages", "sharegpt", "harmony"]

ONLY_SOURCE = "data"
"""The name of a source that is given without one."""


class ConversationSource(BaseModel):
    """Conversations of one file or data set."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    path: str
    """A .jsonl or .parquet file, or hub:NAME:SPLIT or hub:NAME:CONFIGURATION:SPLIT."""
    format: Format = "auto"
    """``messages``: OpenAI's and Hugging Face's, with ``tools`` and ``thinking``; ``sharegpt``:
    ``conversations`` of ``from`` and ``value``; ``harmony``: as openai-harmony writes them;
    ``auto``: found out for every conversation, by its keys."""
    columns: dict[str, str] = Field(default_factory=dict)
    """How rows call what the format calls otherwise, such as ``{messages: chat, tools: functions}``.
    Only these columns are read then, and every row must have them, if only as null. Empty: the
    names are known already."""
    weight: float = Field(1.0, gt=0)
    """Share of the samples, relative to the other sources."""
    epochs: int | None = Field(None, gt=0)
    """Passes over the source, after which the others go on without it; the run ends early where
    none is left. null: as many as ``training.steps`` need."""
    validation_path: str | None = None
    """Conversations of the same format to measure the loss on; null: ``data.validation_share``."""

    @model_validator(mode="after")
    def _check_places(self) -> Self:
        check_place(self.path)
        check_place(self.validation_path)
        return self


class CorpusConfig(BaseModel):
    """Conversations of one source or several.

    ``{path: chats.jsonl}`` stands for ``{sources: {data: {path: chats.jsonl}}}``, with any key of
    a source."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    sources: dict[str, ConversationSource] = Field(min_length=1)
    """By a name of your choice."""

    @model_validator(mode="before")
    @classmethod
    def _name_only_source(cls, values: Any) -> Any:
        """Make a source of keys that a configuration with a single one may have at the top."""
        if not isinstance(values, dict):
            return values
        of_source = {key: values[key] for key in values if key in ConversationSource.model_fields}
        if not of_source:
            return values

        # Errors call it by its full name, so that an override may, too.
        named = values.get("sources", {})
        if not isinstance(named, dict) or set(named) - {ONLY_SOURCE}:
            raise ValueError(
                f"{', '.join(of_source)} belongs to a source: give it below sources.NAME"
            )
        others = {key: value for key, value in values.items() if key not in of_source}
        return {**others, "sources": {ONLY_SOURCE: of_source | named.get(ONLY_SOURCE, {})}}


class DataConfig(CorpusConfig):
    """Conversations to learn, from one source or a mixture of several."""

    history: Literal["harmony", "append"] = "harmony"
    """What a later turn of the user sees of the earlier ones. ``harmony``: one sample per turn,
    behind what inference shows of the others: no analysis of finished answers, and <|end|> in
    place of <|return|>. ``append``: one sample per conversation, everything as it was sampled. ChatML
    shows earlier turns whole: there both are ``append``."""
    seed: int = 0
    """Of the order, and of what is held out for validation."""
    shuffle: bool = True
    """Whether every epoch has an order of its own; false: that of the file."""
    validation_share: float = Field(0.0, ge=0, lt=1)
    """Share of the conversations that is not trained on and measures the loss. Chosen by content:
    copies of a conversation are all on one side."""
    validation_conversations: int = Field(256, gt=0)
    """How many conversations of each source measure the loss, at most."""
    validate_every: int = Field(50, gt=0)
    """Steps between measurements; also before the first step and after the last."""
    max_tokens: int | None = Field(None, gt=1)
    """Longest sample. null: as many as ``training.max_tokens_per_micro_batch`` and
    ``model.max_length`` allow."""
    too_long: Literal["refuse", "truncate"] = "refuse"
    """What becomes of longer samples: they are reported and left out, or lose their end, and with
    it the token that ends a turn."""
    max_refused_share: float = Field(0.1, ge=0, le=1)
    """Largest share of the conversations that may be refused; above it the run ends and says why
    they were."""
    workers: int = Field(2, ge=0)
    """Processes that read and tokenize ahead of training; 0 does it in between steps."""

    @model_validator(mode="after")
    def _check_validation(self) -> Self:
        for name, source in self.sources.items():
            if source.validation_path is not None and self.validation_share > 0:
                raise ValueError(
                    f"sources.{name}.validation_path and validation_share both say what measures "
                    "the loss; give one of them"
                )
        return self
