"""Records the episodes of a run in a background thread."""

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol, Self

from megatron_gptoss.samples import TrainingSamples
from rl_loop.data.trajectory import TrajectoryGroup
from rl_loop.tracking.conversation_rows import read_conversation
from rl_loop.tracking.episode_files import (
    delete_steps_after,
    first_episode_id,
    merge_small_files,
    next_number,
    write_episodes,
    write_vocabulary,
)
from rl_loop.tracking.episode_table import SplitEpisodes, episode_table, spread_evenly
from rl_loop.tracking.run_directory import RunWriteError

logger = logging.getLogger(__name__)


class TokenDecoder(Protocol):
    """Decoder of token ids, such as ``rl_loop.chat.codec.Vocabulary``."""

    size: int

    def decode(self, ids: Sequence[int]) -> str: ...


class EpisodeRecorder:
    """Writes the episodes of steps. As a context manager it waits until all are on disk.

    The thread works on one step at a time while the loop continues, so the episodes of at most two
    steps are in memory. An error of the thread is raised by the next call.
    """

    def __init__(
        self,
        directory: Path,
        vocabulary: TokenDecoder,
        keep: Literal["all"] | int,
        resume_after: int | None = None,
    ) -> None:
        """Open the recorder.

        Args:
            directory: ``RunDirectory.episodes``.
            vocabulary: decoder of token ids.
            keep: number of episodes per step and split, as in ``tracking.episodes``.
            resume_after: number of steps in the loaded checkpoint. Episodes of later steps are
                dropped. None for a new run.
        """
        self._directory = directory
        self._vocabulary = vocabulary
        self._at_most = None if keep == "all" else keep
        if resume_after is not None:
            delete_steps_after(directory, resume_after)
        self._number = next_number(directory)
        # One thread, so that files appear in the order of their numbers.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="episodes")
        self._in_flight: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.finish_writing()
        except RunWriteError as failure:
            if error is None:
                raise
            # The other exception is more important, and only one can be raised.
            logger.error("%s", failure)
        finally:
            self._thread.shutdown()

    def record(self, step: int, splits: Sequence[SplitEpisodes]) -> None:
        """Start writing the episodes of a step.

        Raises:
            RunWriteError: if the episodes of the previous step could not be written.
        """
        if self._at_most == 0:
            return
        self.finish_writing()
        # Routes are not recorded, and Ray's store would hold them until the thread has written the
        # step.
        kept = [
            replace(split, groups=[group.without_routes() for group in split.groups])
            for split in splits
        ]
        self._in_flight = self._thread.submit(self._write, self._number, step, kept)
        self._number += 1

    def record_conversations(self, step: int, samples: TrainingSamples) -> None:
        """Start writing conversations that a step of supervised fine-tuning trained on.

        Raises:
            RunWriteError: if the conversations of the previous step could not be written.
        """
        if self._at_most == 0:
            return
        self.finish_writing()
        self._in_flight = self._thread.submit(
            self._write_conversations, self._number, step, samples
        )
        self._number += 1

    def finish_writing(self) -> None:
        """Wait until all episodes are on disk. Raises RunWriteError if writing failed."""
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None:
            in_flight.result()

    def _write_conversations(self, number: int, step: int, samples: TrainingSamples) -> None:
        decode = self._vocabulary.decode
        # Chosen first, because decoding all conversations of a large step takes seconds.
        chosen = spread_evenly(range(len(samples)), self._at_most)
        conversations = [read_conversation(samples, i, decode) for i in chosen]
        groups = [TrajectoryGroup(one.task_id, [one]) for one in conversations]
        self._write(number, step, [SplitEpisodes("train", groups)])

    def _write(self, number: int, step: int, splits: Sequence[SplitEpisodes]) -> None:
        vocabulary = self._vocabulary
        write_vocabulary(self._directory, vocabulary.size, lambda i: vocabulary.decode([i]))
        table = episode_table(step, splits, first_episode_id(number), self._at_most)
        write_episodes(self._directory, number, table)
        # A merged file may complete the next level.
        while merge_small_files(self._directory):
            pass
