"""The samples of one source, in the order in which they are trained on.

An epoch takes the blocks of the file in an order drawn for it, some megabytes (a window) at a
time, and the samples of a window in an order drawn for the window. Everything follows from the
seed, the epoch, the window and its last used sample. These are the state of a resumed run, which
renders one window again and continues behind that sample.

The place of a sample in the order depends on its line only, and not on the other samples. So a run
that leaves out other samples when it is resumed, because its rows are shorter, say, repeats none.
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
from rl_loop.conversations.refusals import (
    ENOUGH_TO_JUDGE,
    RefusalReport,
    check_refused_share,
    describe_kinds,
    kind_of,
)
from rl_loop.conversations.rows import Block, Rows

WINDOW_BYTES = 16 << 20
"""Text of a file that is shuffled, and kept in memory, at a time. Blocks of the file are shuffled, too."""

OrderKey = tuple[bytes, int, int]
"""Random bytes, row and number of a sample, by which a window is sorted."""


@dataclass
class SourcePosition:
    """How far a source has come. JSON."""

    epoch: int = 0
    window: int = 0
    """Within the epoch."""
    last: tuple[int, int] | None = None
    """Row and number of the last used sample of the window; None if none is used."""
    conversations: int = 0
    """Conversations that were read in the first epoch, those of the window included."""
    refused: int = 0
    """How many refusals there were among them."""


@dataclass(frozen=True)
class DataSample:
    """One sample to learn from."""

    token_ids: np.ndarray
    """int32 [tokens]."""
    loss_mask: np.ndarray
    """bool [tokens]."""
    name: str
    """File and line, for messages."""


@dataclass(frozen=True)
class Window:
    """Blocks that are shuffled together, while they are being rendered."""

    epoch: int
    number: int
    waiting: list[Callable[[], RenderedBlock]]
    is_last: bool
    """Whether the epoch ends with it."""


class SourceStream:
    """Gives the samples of a source one by one; the next window is rendered meanwhile."""

    def __init__(
        self,
        number: int,
        name: str,
        rows: Rows,
        source: ConversationSource,
        data: DataConfig,
        pool: RenderPool,
        report: RefusalReport,
        saved: dict[str, Any] | None = None,
    ) -> None:
        """``number``: of the source among those of ``pool``. ``saved``: the ``state`` to go on
        from. Raises DataError if the data cannot be used, or is not what it was."""
        self.name = name
        self._number = number
        self._rows = rows
        self._epochs = source.epochs
        self._data = data
        self._pool = pool
        self._report = report

        self.exhausted = False
        """Whether all epochs are over."""
        self._position = SourcePosition()
        self._blocks: list[RenderedBlock] = []
        self._order: list[tuple[OrderKey, int, int]] = []
        """Key, block and index in the block of each sample, in the order of the window."""
        self._used = 0
        """Number of samples of ``_order`` that are used."""
        self._kinds: Counter[str] = Counter()
        """Reasons for which conversations were refused."""
        self._samples_of_epoch = 0

        self._ahead: deque[Window] = deque()
        self._next = (0, 0)
        """Epoch and window to be rendered after those in ``_ahead``."""
        self._windows_of: tuple[int, list[list[Block]]] = (-1, [])

        if saved is not None:
            self._restore(saved)
        else:
            self._go_on()

    # ---- samples

    def next(self) -> DataSample:
        """Return the next sample; there is one unless ``exhausted``."""
        _, block_number, i = self._order[self._used]
        block = self._blocks[block_number]
        first, last = block.offsets[i], block.offsets[i + 1]
        sample = DataSample(
            block.token_ids[first:last],
            block.loss_mask[first:last],
            f"{self._rows.place}, {self._rows.unit} {block.rows[i]}",
        )
        self._used += 1
        self._position.last = int(block.rows[i]), int(block.numbers[i])
        if self._used == len(self._order):
            self._go_on()
        return sample

    @property
    def epoch(self) -> int:
        """The pass that the next sample belongs to, from 0."""
        return self._position.epoch

    @property
    def conversations(self) -> int:
        """How many conversations of the first epoch were read."""
        return self._position.conversations

    @property
    def refused(self) -> int:
        """How many refusals there were among them."""
        return self._position.refused

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs to go on behind the last sample, as JSON."""
        return asdict(self._position) | {"file": self._file()}

    def _file(self) -> dict[str, int]:
        """Return what tells that a file has changed."""
        return {"blocks": len(self._rows.blocks), "end": self._rows.blocks[-1].stop}

    def _restore(self, saved: dict[str, Any]) -> None:
        if saved["file"] != self._file():
            raise DataError(
                f"{self._rows.place} has another length than when the checkpoint was saved: the run "
                "cannot go on behind the last sample; give it the file that it began with"
            )
        fields = {key: value for key, value in saved.items() if key != "file"}
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
        # Whatever was used before counts: it may be left out by now.
        has_used = self._position.window > 0 or self._position.last is not None
        self._samples_of_epoch = len(self._order) + has_used
        self._submit_ahead()

        if self._position.last is not None:
            last = self._key(window, *self._position.last)
            self._used = bisect_right(self._order, last, key=lambda sample: sample[0])
        if self._used == len(self._order):
            self._go_on()

    # ---- windows

    def _go_on(self) -> None:
        """Take the next window that has samples, or find out that there is none."""
        while True:
            self._submit_ahead()
            if not self._ahead:
                self.exhausted = True
                self._position.epoch, self._position.window = self._next
                self._position.last = None
                self._blocks, self._order = [], []
                return

            window = self._ahead.popleft()
            # Its successor is rendered while this one is used.
            self._submit_ahead()
            self._load(window)
            self._position.epoch, self._position.window = window.epoch, window.number
            self._position.last = None
            self._account(window)
            if self._order:
                return

    def _submit_ahead(self) -> None:
        """Begin to render the next window, unless one is on its way or there is none."""
        if self._ahead:
            return
        epoch, number = self._next
        if self._epochs is not None and epoch >= self._epochs:
            return

        windows = self._windows(epoch)
        jobs = [BlockJob(self._number, block, "train") for block in windows[number]]
        is_last = number + 1 == len(windows)
        self._ahead.append(Window(epoch, number, self._pool.submit(jobs), is_last))
        self._next = (epoch + 1, 0) if is_last else (epoch, number + 1)

    def _windows(self, epoch: int) -> list[list[Block]]:
        """Group the blocks of an epoch, in its order, into windows."""
        if self._windows_of[0] == epoch:
            return self._windows_of[1]

        blocks = list(self._rows.blocks)
        if self._data.shuffle:
            Random(f"{self._data.seed}/{self.name}/{epoch}").shuffle(blocks)

        windows: list[list[Block]] = []
        room = 0
        for block in blocks:
            if not windows or block.size > room:
                windows.append([])
                room = WINDOW_BYTES
            windows[-1].append(block)
            room -= block.size
        self._windows_of = (epoch, windows)
        return windows

    def _load(self, window: Window) -> None:
        """Wait for the blocks of a window and put their samples in order."""
        # The used blocks are dropped before the next are there.
        self._blocks, self._order, self._used = [], [], 0
        for wait in window.waiting:
            self._blocks.append(wait())
        for number, block in enumerate(self._blocks):
            samples = zip(block.rows.tolist(), block.numbers.tolist(), strict=True)
            for i, (row, part) in enumerate(samples):
                self._order.append((self._key(window, row, part), number, i))
            self._report.add(self.name, self._rows, block.refusals)

        self._order.sort()

    def _key(self, window: Window, row: int, number: int) -> OrderKey:
        """Return the key by which a sample of a window is sorted."""
        if not self._data.shuffle:
            return b"", row, number
        seed = f"{self._data.seed}/{self.name}/{window.epoch}/{window.number}"
        text = f"{seed}/{row}/{number}".encode()
        return hashlib.blake2b(text, digest_size=8).digest(), row, number

    # ---- refusals

    def _account(self, window: Window) -> None:
        """Count what was read and refused; raise DataError if too much was."""
        self._samples_of_epoch += len(self._order)
        if window.epoch == 0:
            for block in self._blocks:
                self._position.conversations += block.conversations
                self._position.refused += len(block.refusals)
                self._kinds.update(kind_of(refusal.reason) for refusal in block.refusals)
            self._check_refused(window.is_last)

        if window.is_last:
            if self._samples_of_epoch == 0:
                raise DataError(f"{self._rows.place}: {self._nothing_to_learn()}")
            self._samples_of_epoch = 0

    def _check_refused(self, all_seen: bool) -> None:
        if all_seen or self._position.conversations >= ENOUGH_TO_JUDGE:
            check_refused_share(
                self._rows.place,
                seen=self._position.conversations,
                refused=self._position.refused,
                kinds=self._kinds,
                limit=self._data.max_refused_share,
            )

    def _nothing_to_learn(self) -> str:
        if self._kinds:
            return f"no conversation can be learned from: {describe_kinds(self._kinds)}"
        return "it has no conversation to train on"
