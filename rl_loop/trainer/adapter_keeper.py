"""Keeps the adapters of every checkpoint in PEFT's format, when the checkpoints themselves go."""

import logging
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import torch.distributed as dist

from converters.adapter_checkpoint import export_adapter
from megatron_gptoss.checkpoint.checksums import damage_in
from megatron_gptoss.checkpoint.directory import earlier_checkpoints, step_directory, step_of
from megatron_gptoss.checkpoint.errors import CheckpointError
from rl_loop.tracking.run_directory import RunDirectory

logger = logging.getLogger(__name__)


class AdapterKeeper:
    """Writes the adapters of published checkpoints on rank 0, in a thread, one at a time.

    An error of the thread is kept until ``finish``, which raises it on every rank: a rank that
    ended alone would leave the others waiting in their next collective call.
    """

    def __init__(self, run: RunDirectory, base: str | None) -> None:
        """``base``: what ``adapter_config.json`` says of the base, see ``export_adapter``."""
        self._run = run
        self._base = base
        self._thread = ThreadPoolExecutor(1, "adapters")
        self._writing: Future[None] | None = None
        """Of the thread, until its result was looked at."""
        self._failures: list[str] = []
        """One for each checkpoint since the last ``finish`` whose adapters could not be written."""

    # -- what a CheckpointWriter asks on every rank; none of it is collective ---------------------

    def is_reading(self) -> bool:
        """Return whether this rank still reads a checkpoint."""
        return self._writing is not None and not self._writing.done()

    def wait(self) -> int:
        """Wait until this rank reads no checkpoint. Returns how many have no adapters because they
        could not be written; raises nothing, which ``finish`` does."""
        if self._writing is not None:
            wait([self._writing])
            error = self._writing.exception()
            self._writing = None
            if error is not None:
                self._failures.append(str(error))
        return len(self._failures)

    def read(self, checkpoint: Path) -> None:
        """Begin to write the adapters of a checkpoint that has just been published."""
        if dist.get_rank() == 0:
            self.wait()
            self._writing = self._thread.submit(self._write, checkpoint)

    # -- what a worker asks of all ranks together -------------------------------------------------

    def has_failed(self) -> bool:
        """Return on every rank whether adapters are known not to have been written. Collective."""
        if not self.is_reading():
            self.wait()
        return self._shared_failure() is not None

    def finish(self) -> None:
        """Wait until all that was begun is on the disk. Collective.

        Raises:
            CheckpointError: on every rank, naming the directory that could not be written.
        """
        self.wait()
        failure = self._shared_failure()
        # An error must not be met a second time by the next call.
        self._failures.clear()
        if failure is not None:
            raise CheckpointError(failure)

    def write_missing(self, newest: Path) -> None:
        """Write the adapters of ``newest``, and of older checkpoints beside it, that are not there:
        the process before may have been killed meanwhile, or have kept none. Collective.

        ``newest`` is known to be undamaged. Of an older one that is damaged a warning is logged.

        Raises:
            CheckpointError: as ``finish`` does.
        """
        if dist.get_rank() == 0:
            for checkpoint in (newest, *earlier_checkpoints(newest)):
                if self._directory(checkpoint).exists():
                    continue
                damage = None if checkpoint == newest else damage_in(checkpoint, 0, 1)
                if damage is None:
                    self.read(checkpoint)
                else:
                    logger.warning("the adapters of %s are not kept: %s", checkpoint, damage)
        self.finish()

    def _shared_failure(self) -> str | None:
        """Return the first failure of any rank on every rank."""
        of_ranks: list[list[str]] = [[]] * dist.get_world_size()
        dist.all_gather_object(of_ranks, self._failures)
        return next((failure for failures in of_ranks for failure in failures), None)

    def _directory(self, checkpoint: Path) -> Path:
        return step_directory(self._run.adapters, step_of(checkpoint))

    def _write(self, checkpoint: Path) -> None:
        directory = self._directory(checkpoint)
        try:
            # A step that is saved again replaces its adapters, too.
            export_adapter(checkpoint, directory, self._base, overwrite=True)
        except Exception as error:
            raise CheckpointError(
                f"{directory}: the adapters of {checkpoint.name} could not be kept ({error}). The "
                "checkpoint is complete: --resume goes on from it and writes its adapters"
            ) from error
