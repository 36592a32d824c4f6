"""Samples of one source, in the order of training.

An epoch shuffles the blocks of the file and divides them into windows of some megabytes. The
samples of each window are shuffled, too. The order depends only on the seed, the epoch and the
window. The state of a resumed run is the epoch, the window and the last used sample. The run
renders one window again and continues behind that sample.

The sort key of a sample depends only on its line, not on other samples. If a resumed run leaves out
other samples, for example because its maximum length is shorter, it still repeats none.
"""

import hashlib
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

import numpy as np

from rl_loop.conversations.blocks import BlockJob, RenderedBlock, RenderPool
from rl_loop.conversations.config import ConversationSource, DataConfig
from rl_loop.conversations.errors import DataError
from rl_loop.conversations.rejections import (
    ENOUGH_TO_JUDGE,
    RejectionReport,
    check_rejected_share,
    describe_kinds,
    generalize_reason,
)
from rl_loop.conversations.rows import RowBlock, Rows

WINDOW_BYTES = 16 << 20
"""Bytes of a file that are shuffled and kept in memory at a time. Blocks are shuffled, too."""

OrderKey = tuple[bytes, int, int]
"""Sort key in a window: random bytes, row and number of the sample."""


@dataclass
class SourcePosition:
    """Progress of a source. All values are JSON."""

    epoch: int = 0
    window: int = 0
    """Index within the epoch."""
    last: tuple[int, int] | None = None
    """Row and number of the last used sample of the window. None if no sample is used."""
    conversations: int = 0
    """Conversations read in the first epoch, including the current window."""
    rejected: int = 0
    """Number of rejections among ``conversations``."""


@dataclass(frozen=True)
class DataSample:
    """One training sample."""

    token_ids: np.ndarray
    """int32 [tokens]."""
    loss_mask: np.ndarray
    """bool [tokens]."""
    name: str
    """File and line, for messages."""


@dataclass(frozen=True)
class ShuffleWindow:
    """Blocks that are shuffled together. They may still be rendering."""

    epoch: int
    number: int
    waiting: list[Callable[[], RenderedBlock]]
    is_last: bool
    """True for the last window of an epoch."""


class SourceStream:
    """Iterates over the samples of a source. The next window is rendered in the background."""

    def __init__(
        self,
        number: int,
        name: str,
        rows: Rows,
        source: ConversationSource,
        data: DataConfig,
        pool: RenderPool,
        report: RejectionReport,
        saved: dict[str, Any] | None = None,
    ) -> None:
        """Open the stream at its beginning, or at a saved position.

        Args:
            number: index of the source in ``pool``.
            name: name of the source in the configuration.
            rows: file to read.
            source: configuration of the source.
            data: configuration of all sources.
            pool: pool that renders the blocks.
            report: report of rejected conversations.
            saved: ``state`` of an earlier stream, to continue from.

        Raises:
            DataError: if the data cannot be used, or if the file has changed since ``saved``.
        """
        self.name = name
        self._number = number
        self._rows = rows
        self._epochs = source.epochs
        self._data = data
        self._pool = pool
        self._report = report

        self.exhausted = False
        """True if all epochs are over."""
        self._position = SourcePosition()
        self._blocks: list[RenderedBlock] = []
        self._order: list[tuple[OrderKey, int, int]] = []
        """Key, block and index in the block of each sample, in the order of the window."""
        self._used = 0
        """Number of used samples of ``_order``."""
        self._kinds: Counter[str] = Counter()
        """Number of rejections by kind of reason."""
        self._samples_of_epoch = 0

        # Windows that are rendered while the current one is used.
        self._ahead: deque[ShuffleWindow] = deque()
        self._next = (0, 0)
        """Epoch and window to render after the windows in ``_ahead``."""
        self._windows_of: tuple[int, list[list[RowBlock]]] = (-1, [])

        if saved is not None:
            self._restore(saved)
        else:
            self._load_next_window()

    # ---- samples

    def next(self) -> DataSample:
        """Return the next sample. Must not be called if ``exhausted``."""
        _, block_number, i = self._order[self._used]
        block = self._blocks[block_number]
        first, last = block.offsets[i], block.offsets[i + 1]
        sample = DataSample(
            block.token_ids[first:last],
            block.loss_mask[first:last],
            f"{self._rows.location}, {self._rows.unit} {block.rows[i]}",
        )
        self._used += 1
        self._position.last = int(block.rows[i]), int(block.numbers[i])
        # Load the next window at once, so that ``exhausted`` is right after the last sample.
        if self._used == len(self._order):
            self._load_next_window()
        return sample

    @property
    def epoch(self) -> int:
        """Epoch of the next sample, from 0."""
        return self._position.epoch

    @property
    def conversations(self) -> int:
        """Number of conversations read in the first epoch."""
        return self._position.conversations

    @property
    def rejected(self) -> int:
        """Number of rejections among ``conversations``."""
        return self._position.rejected

    def state(self) -> dict[str, Any]:
        """Return the position as JSON, so that a resumed run continues behind the last sample."""
        return asdict(self._position) | {"file": self._file()}

    def _file(self) -> dict[str, int]:
        """Return values that detect most changes of the file."""
        return {"blocks": len(self._rows.blocks), "end": self._rows.blocks[-1].stop}

    def _restore(self, saved: dict[str, Any]) -> None:
        if saved["file"] != self._file():
            raise DataError(
                f"{self._rows.location} has changed since the checkpoint was saved, so the run cannot "
                "continue behind its last sample. Restore the original file"
            )
        # The file was compared above and is not part of the position.
        fields = {key: value for key, value in saved.items() if key != "file"}
        # JSON has turned the tuple into a list.
        last = fields["last"]
        fields["last"] = None if last is None else (last[0], last[1])
        self._position = SourcePosition(**fields)
        self._next = (self._position.epoch, self._position.window)

        self._submit_ahead()
        if not self._ahead:
            self.exhausted = True
            return
        window = self._ahead.popleft()
        self._load(window)
        # Used samples count even if this run leaves them out.
        has_used = self._position.window > 0 or self._position.last is not None
        self._samples_of_epoch = len(self._order) + has_used
        self._submit_ahead()

        if self._position.last is not None:
            # This run may have left out the last used sample, so search for the place of its key.
            last = self._key(window, *self._position.last)
            self._used = bisect_right(self._order, last, key=lambda sample: sample[0])
        if self._used == len(self._order):
            self._load_next_window()

    # ---- windows

    def _load_next_window(self) -> None:
        """Load the next window that has samples, or set ``exhausted``."""
        while True:
            self._submit_ahead()
            if not self._ahead:
                self.exhausted = True
                # This is the end of the last epoch, so a stream that continues here is exhausted,
                # too.
                self._position.epoch, self._position.window = self._next
                self._position.last = None
                self._blocks, self._order = [], []
                return

            window = self._ahead.popleft()
            # Render the following window while this one is used.
            self._submit_ahead()
            self._load(window)
            self._position.epoch, self._position.window = window.epoch, window.number
            self._position.last = None
            self._account(window)
            # All conversations of a window may be rejected.
            if self._order:
                return

    def _submit_ahead(self) -> None:
        """Start rendering the next window, unless one is in progress or none is left."""
        # One window ahead is enough to keep the processes busy, and bounds the memory.
        if self._ahead:
            return
        epoch, number = self._next
        if self._epochs is not None and epoch >= self._epochs:
            return

        windows = self._windows(epoch)
        jobs = [BlockJob(self._number, block, "train") for block in windows[number]]
        is_last = number + 1 == len(windows)
        self._ahead.append(ShuffleWindow(epoch, number, self._pool.submit(jobs), is_last))
        self._next = (epoch + 1, 0) if is_last else (epoch, number + 1)

    def _windows(self, epoch: int) -> list[list[RowBlock]]:
        """Return the blocks of an epoch in its order, grouped into windows."""
        if self._windows_of[0] == epoch:
            return self._windows_of[1]

        blocks = list(self._rows.blocks)
        if self._data.shuffle:
            # With the name in the seed, two sources of the same file have different orders.
            Random(f"{self._data.seed}/{self.name}/{epoch}").shuffle(blocks)

        windows: list[list[RowBlock]] = []
        room = 0
        for block in blocks:
            # A block that is larger than a window has a window alone.
            if not windows or block.size > room:
                windows.append([])
                room = WINDOW_BYTES
            windows[-1].append(block)
            room -= block.size
        self._windows_of = (epoch, windows)
        return windows

    def _load(self, window: ShuffleWindow) -> None:
        """Wait for the blocks of a window and sort their samples."""
        # Drop the used blocks before the next ones arrive, to save memory.
        self._blocks, self._order, self._used = [], [], 0
        for wait in window.waiting:
            self._blocks.append(wait())
        for number, block in enumerate(self._blocks):
            samples = zip(block.rows.tolist(), block.numbers.tolist(), strict=True)
            for i, (row, part) in enumerate(samples):
                self._order.append((self._key(window, row, part), number, i))
            self._report.add(self.name, self._rows, block.rejections)

        self._order.sort()

    def _key(self, window: ShuffleWindow, row: int, number: int) -> OrderKey:
        """Return the sort key of a sample in a window."""
        # With equal first parts, rows and numbers decide.
        if not self._data.shuffle:
            return b"", row, number
        # The key depends on the line only, so samples that are left out do not move the others.
        seed = f"{self._data.seed}/{self.name}/{window.epoch}/{window.number}"
        text = f"{seed}/{row}/{number}".encode()
        return hashlib.blake2b(text, digest_size=8).digest(), row, number

    # ---- rejections

    def _account(self, window: ShuffleWindow) -> None:
        """Count conversations and rejections. Raises DataError if too many are rejected."""
        self._samples_of_epoch += len(self._order)
        # Later epochs read the same conversations again.
        if window.epoch == 0:
            for block in self._blocks:
                self._position.conversations += block.conversations
                self._position.rejected += len(block.rejections)
                self._kinds.update(
                    generalize_reason(rejection.reason) for rejection in block.rejections
                )
            self._check_rejected(window.is_last)

        if window.is_last:
            # Such a source would be read again and again without giving a sample.
            if self._samples_of_epoch == 0:
                raise DataError(f"{self._rows.location}: {self._no_loss_tokens()}")
            self._samples_of_epoch = 0

    def _check_rejected(self, all_seen: bool) -> None:
        # A few conversations at the beginning of a file may not be typical.
        if all_seen or self._position.conversations >= ENOUGH_TO_JUDGE:
            check_rejected_share(
                self._rows.location,
                seen=self._position.conversations,
                rejected=self._position.rejected,
                kinds=self._kinds,
                limit=self._data.max_rejected_fraction,
            )

    def _no_loss_tokens(self) -> str:
        if self._kinds:
            return f"no conversation can be used: {describe_kinds(self._kinds)}"
        return "it has no conversation to train on"
