"""Renders blocks of rows, in this process or in a process pool."""

import gc
import hashlib
import os
import threading
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context, parent_process
from typing import Literal, Self

import numpy as np

from rl_loop.chat.codec import ChatCodec
from rl_loop.conversations.config import Format
from rl_loop.conversations.errors import ConversationError, DataError
from rl_loop.conversations.harmony import RenderOptions
from rl_loop.conversations.renderers import conversation_renderer
from rl_loop.conversations.rows import RowBlock, Rows, UnparsedRecord

Split = Literal["train", "validation"]

GC_THRESHOLD = 200_000
"""Garbage collection threshold of a rendering process, in new objects."""


@dataclass(frozen=True)
class RenderSource:
    """Source, as sent to the rendering processes."""

    name: str
    rows: Rows
    format: Format
    columns: dict[str, str]
    """Column mapping, as in ``ConversationSource``."""


@dataclass(frozen=True)
class RenderPlan:
    """Everything that determines how a block is rendered."""

    sources: list[RenderSource]
    codec: ChatCodec
    options: RenderOptions
    validation_fraction: float
    """Share of the rows in the validation split. 0 for no validation split."""
    seed: int
    """Seed for the split."""


@dataclass(frozen=True)
class BlockJob:
    """A block to render."""

    source: int
    """Index in ``RenderPlan.sources``."""
    block: RowBlock
    split: Split


@dataclass(frozen=True)
class RejectedRow:
    """Conversation or sample that is left out."""

    row: int
    reason: str


@dataclass(frozen=True)
class RenderedBlock:
    """Samples of a block, concatenated."""

    token_ids: np.ndarray
    """int32 [tokens]."""
    loss_mask: np.ndarray
    """bool [tokens]."""
    offsets: np.ndarray
    """int64 [samples + 1]: boundaries of the samples in ``token_ids``."""
    rows: np.ndarray
    """int64 [samples]: line or row of each sample."""
    numbers: np.ndarray
    """int64 [samples]: ``RenderedSample.number`` of each sample."""
    conversations: int
    """Conversations in the split, including rejected ones."""
    rejections: list[RejectedRow]

    @property
    def samples(self) -> int:
        return len(self.rows)


class BlockRenderer:
    """Renders blocks in this process."""

    def __init__(self, plan: RenderPlan) -> None:
        self._plan = plan
        self._renderer = conversation_renderer(plan.codec, plan.options)

    def render(self, job: BlockJob) -> RenderedBlock:
        """Read and render the block's conversations of the job's split."""
        # Jobs carry only an index, because sources are large to send with each block.
        source = self._plan.sources[job.source]
        token_ids: list[np.ndarray] = []
        loss_masks: list[np.ndarray] = []
        rows: list[int] = []
        numbers: list[int] = []
        rejections: list[RejectedRow] = []
        conversations = 0

        for row in source.rows.read(job.block):
            # The raw row decides, so that a rejected conversation belongs to one split, too.
            if self._choose_split(row) != job.split:
                continue
            conversations += 1
            try:
                samples, reasons = self._renderer.render_record(
                    row.parse(source.columns), source.format
                )
            except ConversationError as error:
                # One bad row must not end the run. ``max_rejected_fraction`` limits their number.
                rejections.append(RejectedRow(row.number, str(error)))
                continue

            rejections += [RejectedRow(row.number, reason) for reason in reasons]
            for sample in samples:
                # Several times as fast as letting numpy inspect the type of every element.
                token_ids.append(np.frombuffer(array("i", sample.token_ids), dtype=np.int32))
                loss_masks.append(np.frombuffer(bytes(sample.loss_mask), dtype=np.bool_))
                rows.append(row.number)
                numbers.append(sample.number)

        lengths = [len(ids) for ids in token_ids]
        return RenderedBlock(
            # concatenate refuses an empty list, so each list begins with an empty array.
            token_ids=np.concatenate([np.zeros(0, np.int32), *token_ids]),
            loss_mask=np.concatenate([np.zeros(0, np.bool_), *loss_masks]),
            offsets=np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64),
            rows=np.array(rows, dtype=np.int64),
            numbers=np.array(numbers, dtype=np.int64),
            conversations=conversations,
            rejections=rejections,
        )

    def _choose_split(self, row: UnparsedRecord) -> Split:
        """Return the split of a row. It depends only on the content and the seed."""
        fraction = self._plan.validation_fraction
        if fraction == 0:
            return "train"
        # The seed is the key of the hash, so that another seed gives another split.
        key = str(self._plan.seed).encode()
        digest = hashlib.blake2b(row.fingerprint(), digest_size=8, key=key).digest()
        # The digest is uniform below 2**64.
        return "validation" if int.from_bytes(digest) < fraction * 2**64 else "train"


# ---- parallel rendering


class RenderPool:
    """Renders blocks in worker processes, or in this process if ``workers`` is 0.

    Use it as a context manager.
    """

    def __init__(self, plan: RenderPlan, workers: int) -> None:
        """Create the pool. Worker processes start with the first block."""
        self._plan = plan
        self._local: BlockRenderer | None = None
        self._executor: ProcessPoolExecutor | None = None
        if workers == 0:
            self._local = BlockRenderer(plan)
        else:
            # A fork would copy locked locks of Ray's and torch's threads.
            self._executor = ProcessPoolExecutor(
                workers,
                mp_context=get_context("spawn"),
                initializer=_start_worker,
                initargs=(plan,),
            )

    def submit(self, jobs: Sequence[BlockJob]) -> list[Callable[[], RenderedBlock]]:
        """Start rendering blocks.

        Returns:
            A function for each job that waits for the result and may raise DataError.
        """
        if self._local is not None:
            render = self._local.render
            return [partial(render, job) for job in jobs]

        assert self._executor is not None
        try:
            # A pool with a dead process raises this error for every further job.
            futures = [self._executor.submit(_render_in_worker, job) for job in jobs]
        except BrokenProcessPool:
            raise self._process_error() from None
        return [partial(self._result, future) for future in futures]

    def close(self) -> None:
        """Stop the processes. Queued blocks are not rendered."""
        if self._executor is not None:
            # Wait for running blocks, because a process must not outlive the run.
            self._executor.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _result(self, future: "Future[RenderedBlock]") -> RenderedBlock:
        try:
            return future.result()
        except BrokenProcessPool:
            raise self._process_error() from None

    def _process_error(self) -> DataError:
        names = ", ".join(source.name for source in self._plan.sources)
        return DataError(
            f"data.sources ({names}): a process that renders conversations died. If memory was "
            "short, lower data.workers"
        )


_renderer: BlockRenderer | None = None
"""Renderer of a worker process."""


def _start_worker(plan: RenderPlan) -> None:
    global _renderer
    # The terminal's signals are for the run, which finishes its step and then stops this process.
    os.setsid()
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    _renderer = BlockRenderer(plan)

    # A block has thousands of small objects, so the collector would often traverse all objects.
    # Hardly any of them is in a cycle.
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, 10, 10)


def _exit_with_parent() -> None:
    """Exit when the parent process has exited, because a killed run cannot stop its workers."""
    parent = parent_process()
    if parent is not None:
        # join also returns if the parent was killed by SIGKILL.
        parent.join()
        # sys.exit would end this thread only.
        os._exit(1)


def _render_in_worker(job: BlockJob) -> RenderedBlock:
    assert _renderer is not None
    return _renderer.render(job)
