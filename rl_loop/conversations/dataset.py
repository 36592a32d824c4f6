"""Conversations of a run: the training stream and the validation samples."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from megatron_gptoss.samples import TrainingSamples
from rl_loop.chat.codec import ChatCodec
from rl_loop.conversations.blocks import (
    BlockJob,
    RenderedBlock,
    RenderPlan,
    RenderPool,
    RenderSource,
    Split,
)
from rl_loop.conversations.config import DataConfig
from rl_loop.conversations.errors import DataError
from rl_loop.conversations.harmony import RenderOptions
from rl_loop.conversations.rejections import (
    ENOUGH_TO_JUDGE,
    RejectionReport,
    check_rejected_share,
    describe_rejection,
    generalize_reason,
)
from rl_loop.conversations.rows import Rows, open_rows
from rl_loop.conversations.source_stream import DataSample, SourceStream
from rl_loop.data.mixture import BLOCK, SourceMixture

VALIDATION_BLOCKS = 8
"""Number of blocks to render at a time when looking for validation conversations."""


class ConversationData:
    """All sources of a run and the processes that render them. Use it as a context manager."""

    def __init__(self, config: DataConfig, codec: ChatCodec, max_tokens: int) -> None:
        """Open the files.

        Args:
            config: ``data`` of the configuration.
            codec: chat format of the model.
            max_tokens: maximum tokens per sample.

        Raises:
            DataError: if a file cannot be read.
        """
        self.config = config
        self._names = list(config.sources)
        self._rows = [open_rows(source.path) for source in config.sources.values()]
        self._validation_rows: list[Rows | None] = [
            None if source.validation_path is None else open_rows(source.validation_path)
            for source in config.sources.values()
        ]
        self._mixture = _mixture(config)

        # Training rows come first, so that a source has the same number as in the configuration.
        sources = [
            RenderSource(name, rows, config.sources[name].format, config.sources[name].columns)
            for name, rows in zip(self._names, self._rows, strict=True)
        ]
        self._validation_numbers: list[int | None] = []
        for name, validation_rows in zip(self._names, self._validation_rows, strict=True):
            if validation_rows is None:
                self._validation_numbers.append(None)
                continue
            self._validation_numbers.append(len(sources))
            source = config.sources[name]
            sources.append(RenderSource(name, validation_rows, source.format, source.columns))

        # All processes get the same plan, so a block is rendered the same way by any of them.
        plan = RenderPlan(
            sources=sources,
            codec=codec,
            options=RenderOptions(config.history, max_tokens, config.too_long),
            validation_fraction=config.validation_fraction,
            seed=config.seed,
        )
        self._pool = RenderPool(plan, config.workers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the rendering processes."""
        self._pool.close()

    def check(self) -> None:
        """Render the beginning of every source, before the run starts its engines and trainer.

        Raises:
            DataError: if too many conversations are rejected.
        """
        for name in self._names:
            preview = self.preview(name, ENOUGH_TO_JUDGE)
            check_rejected_share(
                preview.location,
                seen=preview.conversations,
                rejected=len(preview.rejections),
                kinds=preview.kinds,
                limit=self.config.max_rejected_fraction,
            )

    # ---- training

    def stream(
        self, report: RejectionReport, saved: Mapping[str, Any] | None = None
    ) -> "ConversationStream":
        """Start the stream of training samples.

        Args:
            report: report of rejected conversations.
            saved: ``state`` of an earlier stream, to continue from.
        """
        streams: list[SourceStream] = []
        for number, name in enumerate(self._names):
            streams.append(
                SourceStream(
                    number,
                    name,
                    self._rows[number],
                    self.config.sources[name],
                    self.config,
                    self._pool,
                    report,
                    None if saved is None else saved["sources"][name],
                )
            )
        # The position of the mixture counts samples of all sources together.
        position = 0 if saved is None else saved["position"]
        return ConversationStream(streams, self._mixture, position)

    # ---- validation

    def validation(self, report: RejectionReport) -> dict[str, TrainingSamples]:
        """Render the validation conversations.

        Returns:
            Samples by source. Empty if no validation is configured.

        Raises:
            DataError: if a source has no usable validation conversation.
        """
        samples_by_source: dict[str, TrainingSamples] = {}
        for number, name in enumerate(self._names):
            rows = self._validation_rows[number]
            validation_number = self._validation_numbers[number]
            # A separate file is not split, so all its rows are in ``train``.
            if rows is not None and validation_number is not None:
                samples = self._first_conversations(name, validation_number, rows, "train", report)
            elif self.config.validation_fraction > 0:
                rows = self._rows[number]
                samples = self._first_conversations(name, number, rows, "validation", report)
            else:
                continue

            if not samples:
                fraction = self.config.validation_fraction
                raise DataError(
                    f"{rows.location}: no conversation of data.sources.{name} is left for "
                    f"validation (data.validation_fraction is {fraction}). Increase it, or set "
                    "validation_path"
                )
            # Each source has a separate validation loss.
            samples_by_source[name] = join_samples(samples)
        return samples_by_source

    def _first_conversations(
        self, name: str, number: int, rows: Rows, split: Split, report: RejectionReport
    ) -> list[DataSample]:
        """Render the first ``validation_conversations`` usable conversations of a split.

        Args:
            name: name of the source in the configuration.
            number: index of ``rows`` in the pool.
            rows: file to read.
            split: split to take.
            report: report of rejected conversations.
        """
        samples: list[DataSample] = []
        used: set[int] = set()
        # The wanted conversations are usually in the first blocks, so do not render all of them.
        for first in range(0, len(rows.blocks), VALIDATION_BLOCKS):
            blocks = rows.blocks[first : first + VALIDATION_BLOCKS]
            jobs = [BlockJob(number, block, split) for block in blocks]
            for wait in self._pool.submit(jobs):
                rendered = wait()
                report.add(name, rows, rendered.rejections)
                for sample_row, sample in build_samples(rendered, rows):
                    # Count rows, because a conversation may have several samples.
                    used.add(sample_row)
                    if len(used) > self.config.validation_conversations:
                        return samples
                    samples.append(sample)
        return samples

    # ---- preview

    def preview(self, source: str, conversations: int) -> "Preview":
        """Render the first training conversations of a source.

        Args:
            source: name of the source.
            conversations: minimum number of conversations to read, if there are enough.

        Raises:
            DataError: if there is no such source.
        """
        if source not in self._names:
            raise DataError(
                f"there is no data.sources.{source}. Known sources: {', '.join(self._names)}"
            )
        number = self._names.index(source)
        rows = self._rows[number]
        preview = Preview(source, rows.location)

        # Render one block at a time, because a preview needs few conversations.
        for block in rows.blocks:
            (wait,) = self._pool.submit([BlockJob(number, block, "train")])
            rendered = wait()
            preview.conversations += rendered.conversations
            preview.samples += [sample for _, sample in build_samples(rendered, rows)]
            preview.rejections += [
                describe_rejection(rows, rejection) for rejection in rendered.rejections
            ]
            # The kinds summarize the reasons if too many conversations are rejected.
            preview.kinds.update(
                generalize_reason(rejection.reason) for rejection in rendered.rejections
            )
            if preview.conversations >= conversations:
                break
        return preview

    @property
    def sources(self) -> list[str]:
        """Names of the sources, in the order of the configuration."""
        return list(self._names)


@dataclass
class Preview:
    """Rendered beginning of a source."""

    source: str
    location: str
    """File or data set."""
    conversations: int = 0
    """Number of conversations read."""
    samples: list[DataSample] = field(default_factory=list)
    rejections: list[str] = field(default_factory=list)
    """Rejected conversations: file, line and reason."""
    kinds: Counter[str] = field(default_factory=Counter)
    """Number of rejections by kind of reason."""


class ConversationStream:
    """Training samples of all sources, mixed by weight."""

    def __init__(
        self, streams: Sequence[SourceStream], mixture: SourceMixture, position: int
    ) -> None:
        """Create a stream. ``position`` is the number of mixture positions used so far."""
        self.streams = list(streams)
        self._mixture = mixture
        self._position = position

    @property
    def exhausted(self) -> bool:
        """True if all sources have finished their epochs."""
        return all(stream.exhausted for stream in self.streams)

    def take(self, count: int) -> TrainingSamples | None:
        """Return the next ``count`` samples. Returns fewer at the end, and None if none is left."""
        samples: list[DataSample] = []
        while len(samples) < count and not self.exhausted:
            stream = self.streams[self._mixture.source_at(self._position)]
            self._position += 1
            # The position counts even if its source is exhausted.
            if not stream.exhausted:
                samples.append(stream.next())
        return join_samples(samples) if samples else None

    def state(self) -> dict[str, Any]:
        """Return the position as JSON, for ``ConversationData.stream``."""
        return {
            "position": self._position,
            "sources": {stream.name: stream.state() for stream in self.streams},
        }


def join_samples(samples: Sequence[DataSample]) -> TrainingSamples:
    """Concatenate samples."""
    return TrainingSamples.join(
        [{"token_ids": sample.token_ids, "loss_mask": sample.loss_mask} for sample in samples],
        names=[sample.name for sample in samples],
    )


def build_samples(rendered: RenderedBlock, rows: Rows) -> list[tuple[int, DataSample]]:
    """Return the samples of a block, each with its line or row."""
    # np.split takes the inner boundaries only.
    ids = np.split(rendered.token_ids, rendered.offsets[1:-1])
    masks = np.split(rendered.loss_mask, rendered.offsets[1:-1])
    samples = []
    for i, row in enumerate(rendered.rows.tolist()):
        name = f"{rows.location}, {rows.unit} {row}"
        samples.append((row, DataSample(ids[i], masks[i], name)))
    return samples


def _mixture(config: DataConfig) -> SourceMixture:
    """Return the mixture of the sources. Raises DataError if a weight is too small to be used."""
    weights = [source.weight for source in config.sources.values()]
    mixture = SourceMixture(weights, f"{config.seed}/data")
    # All blocks of a mixture have the same shares, so one of them shows which sources are used.
    used_sources = {mixture.source_at(position) for position in range(BLOCK)}
    for number, name in enumerate(config.sources):
        if number not in used_sources:
            raise DataError(
                f"data.sources.{name}.weight ({weights[number]}) is less than 1/{2 * BLOCK} of the sum of "
                "all weights, so no conversation of this source would be used. Increase it"
            )
    return mixture
