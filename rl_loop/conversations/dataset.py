"""The conversations of a run: opened once, then trained on as a stream, and measured on."""

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
from rl_loop.conversations.refusals import (
    ENOUGH_TO_JUDGE,
    RefusalReport,
    check_refused_share,
    describe_refusal,
    kind_of,
)
from rl_loop.conversations.rendering import RenderOptions
from rl_loop.conversations.rows import Rows, open_rows
from rl_loop.conversations.source_stream import DataSample, SourceStream
from rl_loop.data.mixture import BLOCK, Mixture

VALIDATION_BLOCKS = 8
"""Blocks that are rendered at a time while validation conversations are looked for."""


class ConversationData:
    """All sources of a run and the processes that render them, as a context."""

    def __init__(self, config: DataConfig, codec: ChatCodec, max_tokens: int) -> None:
        """Open the files. Raises DataError naming the one that cannot be read.

        ``max_tokens``: of the longest sample."""
        self.config = config
        self._names = list(config.sources)
        self._rows = [open_rows(source.path) for source in config.sources.values()]
        self._validation_rows: list[Rows | None] = [
            None if source.validation_path is None else open_rows(source.validation_path)
            for source in config.sources.values()
        ]
        self._mixture = _mixture(config)

        # Training rows come first, so that a source's number is that in the configuration.
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
            of_source = config.sources[name]
            sources.append(RenderSource(name, validation_rows, of_source.format, of_source.columns))

        plan = RenderPlan(
            sources=sources,
            codec=codec,
            options=RenderOptions(config.history, max_tokens, config.too_long),
            validation_share=config.validation_share,
            seed=config.seed,
        )
        self._pool = RenderPool(plan, config.workers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes that render."""
        self._pool.close()

    def check(self) -> None:
        """Render the beginning of every source, before anything heavy is started.

        Raises DataError if too many conversations are refused."""
        for name in self._names:
            preview = self.preview(name, ENOUGH_TO_JUDGE)
            check_refused_share(
                preview.place,
                seen=preview.conversations,
                refused=len(preview.refusals),
                kinds=preview.kinds,
                limit=self.config.max_refused_share,
            )

    # ---- what is trained on

    def stream(
        self, report: RefusalReport, saved: Mapping[str, Any] | None = None
    ) -> "ConversationStream":
        """Begin the stream of training samples, or go on behind the ``state`` of another."""
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
        position = 0 if saved is None else saved["position"]
        return ConversationStream(streams, self._mixture, position)

    # ---- what is measured on

    def validation(self, report: RefusalReport) -> dict[str, TrainingSamples]:
        """Render the conversations that measure the loss, by source; none if there are to be none.

        Raises DataError for a source that has none, or whose first one cannot be used."""
        measured: dict[str, TrainingSamples] = {}
        for number, name in enumerate(self._names):
            rows = self._validation_rows[number]
            separate = self._validation_numbers[number]
            if rows is not None and separate is not None:
                samples = self._first_conversations(name, separate, rows, "train", report)
            elif self.config.validation_share > 0:
                rows = self._rows[number]
                samples = self._first_conversations(name, number, rows, "validation", report)
            else:
                continue

            if not samples:
                share = self.config.validation_share
                raise DataError(
                    f"{rows.place}: no conversation of data.sources.{name} is left to measure the "
                    f"loss on (data.validation_share is {share}); give a larger share, or a file of "
                    "its own as validation_path"
                )
            measured[name] = join_samples(samples)
        return measured

    def _first_conversations(
        self, name: str, number: int, rows: Rows, split: Split, report: RefusalReport
    ) -> list[DataSample]:
        """Render the first ``validation_conversations`` of a split that can be rendered.

        ``name``: of the source in the configuration; ``number``: of ``rows`` in the pool."""
        samples: list[DataSample] = []
        used: set[int] = set()
        for first in range(0, len(rows.blocks), VALIDATION_BLOCKS):
            blocks = rows.blocks[first : first + VALIDATION_BLOCKS]
            jobs = [BlockJob(number, block, split) for block in blocks]
            for wait in self._pool.submit(jobs):
                rendered = wait()
                report.add(name, rows, rendered.refusals)
                for sample_row, sample in samples_of(rendered, rows):
                    used.add(sample_row)
                    if len(used) > self.config.validation_conversations:
                        return samples
                    samples.append(sample)
        return samples

    # ---- what is shown

    def preview(self, source: str, conversations: int) -> "Preview":
        """Render the first conversations of a source that are trained on.

        Raises DataError for a source that there is not."""
        if source not in self._names:
            raise DataError(
                f"there is no data.sources.{source}; there are {', '.join(self._names)}"
            )
        number = self._names.index(source)
        rows = self._rows[number]
        preview = Preview(source, rows.place)
        for block in rows.blocks:
            (wait,) = self._pool.submit([BlockJob(number, block, "train")])
            rendered = wait()
            preview.conversations += rendered.conversations
            preview.samples += [sample for _, sample in samples_of(rendered, rows)]
            preview.refusals += [describe_refusal(rows, refusal) for refusal in rendered.refusals]
            preview.kinds.update(kind_of(refusal.reason) for refusal in rendered.refusals)
            if preview.conversations >= conversations:
                break
        return preview

    @property
    def sources(self) -> list[str]:
        """Names of the sources, in the order of the configuration."""
        return list(self._names)


@dataclass
class Preview:
    """The beginning of a source, rendered."""

    source: str
    place: str
    """The file."""
    conversations: int = 0
    """How many were read."""
    samples: list[DataSample] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    """What was refused: file, line and reason."""
    kinds: Counter[str] = field(default_factory=Counter)
    """How many were refused for each kind of reason."""


class ConversationStream:
    """The training samples of all sources, mixed by weight."""

    def __init__(self, streams: Sequence[SourceStream], mixture: Mixture, position: int) -> None:
        """``position``: how many places of the mixture are used up."""
        self.streams = list(streams)
        self._mixture = mixture
        self._position = position

    @property
    def exhausted(self) -> bool:
        """Whether every source has been passed over as often as it is to be."""
        return all(stream.exhausted for stream in self.streams)

    def take(self, count: int) -> TrainingSamples | None:
        """Return the next samples: ``count`` or, at the very end, fewer; None if none is left."""
        samples: list[DataSample] = []
        while len(samples) < count and not self.exhausted:
            stream = self.streams[self._mixture.source_at(self._position)]
            self._position += 1
            # The place of a source that is over is passed over, too.
            if not stream.exhausted:
                samples.append(stream.next())
        return join_samples(samples) if samples else None

    def state(self) -> dict[str, Any]:
        """Return what ``ConversationData.stream`` needs to go on behind the last sample, as JSON."""
        return {
            "position": self._position,
            "sources": {stream.name: stream.state() for stream in self.streams},
        }


def join_samples(samples: Sequence[DataSample]) -> TrainingSamples:
    """Lay samples end to end."""
    return TrainingSamples.join(
        [{"token_ids": sample.token_ids, "loss_mask": sample.loss_mask} for sample in samples],
        names=[sample.name for sample in samples],
    )


def samples_of(rendered: RenderedBlock, rows: Rows) -> list[tuple[int, DataSample]]:
    """Return the samples of a block, each with its line or row."""
    ids = np.split(rendered.token_ids, rendered.offsets[1:-1])
    masks = np.split(rendered.loss_mask, rendered.offsets[1:-1])
    samples = []
    for i, row in enumerate(rendered.rows.tolist()):
        name = f"{rows.place}, {rows.unit} {row}"
        samples.append((row, DataSample(ids[i], masks[i], name)))
    return samples


def _mixture(config: DataConfig) -> Mixture:
    """Share positions out among the sources. Raises DataError if one has hardly any."""
    weights = [source.weight for source in config.sources.values()]
    mixture = Mixture(weights, f"{config.seed}/data")
    taken = {mixture.source_at(position) for position in range(BLOCK)}
    for number, name in enumerate(config.sources):
        if number not in taken:
            raise DataError(
                f"data.sources.{name}.weight ({weights[number]}) is less than 1/{2 * BLOCK} of all "
                "weights, and it would never be trained on"
            )
    return mixture
