"""Keeps the adapters of every checkpoint in PEFT's format after the checkpoint is deleted."""

import logging
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import torch.distributed as dist

from converters.adapter_checkpoint import export_adapter
from megatron_gptoss.checkpoint.checksums import compare_checksums
from megatron_gptoss.checkpoint.directory import (
    checkpoint_step,
    earlier_checkpoints,
    step_directory,
)
from megatron_gptoss.checkpoint.errors import CheckpointError
from rl_loop.tracking.run_directory import RunDirectory

logger = logging.getLogger(__name__)


class AdapterArchiver:
    """Writes the adapters of published checkpoints on rank 0, in a thread, one at a time.

    An error of the thread is kept until ``finish``, which raises it on every rank. If rank 0 ended
    alone, the other ranks would wait in their next collective call.
    """

    def __init__(self, run: RunDirectory, base: str | None) -> None:
        """Write to a run's directory.

        Args:
            run: directory of the run.
            base: name of the base model for ``adapter_config.json``, see ``export_adapter``.
        """
        self._run = run
        self._base = base
        self._thread = ThreadPoolExecutor(1, "adapters")
        self._writing: Future[None] | None = None
        """Result of the thread's last task, until it is checked."""
        self._failures: list[str] = []
        """One message for each checkpoint since the last ``finish`` whose adapters are not
        written."""

    # -- calls of CheckpointWriter on every rank, not collective ----------------------------------

    def is_reading(self) -> bool:
        """Return True if this rank still reads a checkpoint."""
        return self._writing is not None and not self._writing.done()

    def wait(self) -> int:
        """Wait until this rank reads no checkpoint. Failures are raised by ``finish``.

        Returns:
            Number of checkpoints whose adapters could not be written.
        """
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
            # Record the failure of the earlier task before its future is replaced.
            self.wait()
            self._writing = self._thread.submit(self._write, checkpoint)

    # -- collective calls of the worker -----------------------------------------------------------

    def has_failed(self) -> bool:
        """Return True on every rank if the adapters of a checkpoint could not be written. Collective."""
        # ``wait`` returns at once, because the task has ended. It records a failure of the task.
        if not self.is_reading():
            self.wait()
        return self._shared_failure() is not None

    def finish(self) -> None:
        """Wait until all adapters are written. Collective.

        Raises:
            CheckpointError: on every rank. The message names the directory that is not written.
        """
        self.wait()
        failure = self._shared_failure()
        # The next call must not raise the error again.
        self._failures.clear()
        if failure is not None:
            raise CheckpointError(failure)

    def write_missing(self, newest: Path) -> None:
        """Write missing adapters of ``newest`` and of older checkpoints in its folder. Collective.

        An earlier process may have been killed before it wrote them, or may have had
        ``training.keep_adapters=false``. Damaged older checkpoints are skipped with a warning.

        Args:
            newest: checkpoint that is known to be undamaged.

        Raises:
            CheckpointError: adapters could not be written, as in ``finish``.
        """
        if dist.get_rank() == 0:
            for checkpoint in (newest, *earlier_checkpoints(newest)):
                # A directory of adapters gets its name only when it is complete.
                if self._directory(checkpoint).exists():
                    continue
                damage = None if checkpoint == newest else compare_checksums(checkpoint, 0, 1)
                if damage is None:
                    self.read(checkpoint)
                else:
                    logger.warning("no adapters are archived for %s: %s", checkpoint, damage)
        self.finish()

    def _shared_failure(self) -> str | None:
        """Return the first failure of any rank on every rank."""
        rank_failures: list[list[str]] = [[]] * dist.get_world_size()
        dist.all_gather_object(rank_failures, self._failures)
        return next((failure for failures in rank_failures for failure in failures), None)

    def _directory(self, checkpoint: Path) -> Path:
        return step_directory(self._run.adapters, checkpoint_step(checkpoint))

    def _write(self, checkpoint: Path) -> None:
        directory = self._directory(checkpoint)
        try:
            # A step that is saved again also replaces its adapters.
            export_adapter(checkpoint, directory, self._base, overwrite=True)
        except Exception as error:
            raise CheckpointError(
                f"{directory}: the adapters of {checkpoint.name} could not be written ({error}). "
                "The checkpoint is complete. Continue with --resume, which writes its adapters"
            ) from error
