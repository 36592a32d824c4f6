"""Writing of checkpoints in a thread while training continues."""

import json
import queue
import shutil
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing

from megatron_gptoss.checkpoint.checksums import (
    FileChecksum,
    checksum_files,
    compute_checksum,
    write_checksums,
)
from megatron_gptoss.checkpoint.directory import (
    ADAPTER_FILE,
    MODEL_CONFIG_FILE,
    QUANTIZATION_FILE,
    TRAINING_STATE_FILE,
    clean_up_after_crash,
    publish,
    step_directory,
)
from megatron_gptoss.checkpoint.errors import CheckpointError
from megatron_gptoss.checkpoint.megatron_workarounds import FAILURES, keep_results_in_this_process
from megatron_gptoss.checkpoint.state import (
    HAS_EXPERT_OPTIMIZER,
    describe_adapters,
    has_adapters,
    has_expert_optimizer,
    trainer_state,
)
from megatron_gptoss.config import ModelConfig, Quantization
from megatron_gptoss.new_directory import final_name, partial_name
from megatron_gptoss.scorer import gather_parameters
from megatron_gptoss.trainer import PolicyTrainer

# One thread only: Megatron has a single queue for results, in the order of writing.
WRITER = ThreadPoolExecutor(1, "checkpoint")
"""Thread that writes all checkpoints of this process."""
FULL_DISK_MIB = 16
"""Free space, in MiB, below which an error message calls the disk full."""


class PublishedReader(Protocol):
    """Reader of published checkpoints, which runs in a thread. No method is collective."""

    def is_reading(self) -> bool:
        """Return True while this rank reads a checkpoint."""

    def wait(self) -> int:
        """Wait until this rank has finished reading. Must not raise, because ranks would diverge.

        Returns:
            Number of checkpoints that could not be read. They are kept for another process.
        """

    def read(self, checkpoint: Path) -> None:
        """Start to read a checkpoint that has just been published."""


class CheckpointWriter:
    """Writer of one trainer's checkpoints.

    Every method is collective. If a rank cannot write, the call that detects it raises
    CheckpointError on every rank. The previous checkpoint is then still the latest.
    """

    def __init__(self, root: Path, keep: int = 2, reader: PublishedReader | None = None) -> None:
        """Create a writer. Nothing is written yet.

        Args:
            root: directory of the checkpoints.
            keep: number of checkpoints to keep. Older ones are deleted.
            reader: reader of each published checkpoint. The next checkpoint is published, and older
                ones are deleted, only after it has finished.
        """
        self._root = root
        self._keep = keep
        self._reader = reader
        self._pending: _PendingSave | None = None

    def start(self, trainer: PolicyTrainer, step: int, training_state: dict[str, Any]) -> Path:
        """Copy the state to host memory and start to write it.

        Args:
            trainer: trainer to save.
            step: step number, which names the checkpoint.
            training_state: state of the caller, which ``load_checkpoint`` returns. JSON values.

        Returns:
            Path of the checkpoint when it is complete.

        Raises:
            CheckpointError: this checkpoint or the previous one cannot be written.
        """
        # Only one checkpoint is pending at a time, because each holds a copy of the state.
        self.finish()

        final = step_directory(self._root, step)
        save = _PendingSave(
            final=final,
            model_config=trainer.chunks[0].config.architecture,
            quantization=trainer.chunks[0].config.trained_quantization,
            adapters=describe_adapters(trainer.module) if has_adapters(trainer.module) else None,
            training_state=training_state,
        )
        with fail_together(save.partial):
            if dist.get_rank() == 0:
                clean_up_after_crash(self._root)
                save.partial.mkdir(parents=True)

        # The distributed optimizer gathers updated weights lazily. Until then this rank has old
        # values of the parts that other ranks have updated.
        gather_parameters(trainer.model)
        save.begin(trainer)
        self._pending = save
        return final

    def finish(self, block: bool = True) -> None:
        """Publish the pending checkpoint, if there is one, as the latest.

        Args:
            block: whether to wait. If False, publish only if all ranks have written their files
                and no rank reads an earlier checkpoint.

        Raises:
            CheckpointError: a rank could not write.
        """
        if self._pending is None:
            return

        # Completing is collective, so all ranks must make the same decision.
        if not block:
            everyone_done = [False] * dist.get_world_size()
            is_reading = self._reader is not None and self._reader.is_reading()
            dist.all_gather_object(everyone_done, self._pending.is_written() and not is_reading)
            if not all(everyone_done):
                return

        # Clear it first: if completing fails, the next call must not raise the same error again.
        save = self._pending
        self._pending = None
        unverified = 0 if self._reader is None else self._reader.wait()
        save.complete(self._keep + unverified)
        if self._reader is not None:
            self._reader.read(save.final)


@dataclass
class _PendingSave:
    """Checkpoint that is being written, until its publication."""

    final: Path
    """Path of the complete checkpoint."""
    model_config: ModelConfig
    """Architecture of the model."""
    quantization: Quantization | None
    """Number format to which the experts are rounded in training; None if they are not."""
    adapters: dict[str, Any] | None
    """Result of ``describe_adapters``; None for a whole model."""
    training_state: dict[str, Any]
    """State of the caller."""
    collect_results: list[Callable[[], None]] = field(default_factory=list)
    """Megatron's collective functions that gather the results of all ranks and write metadata."""
    results: Any = None
    """Megatron's result queue of this process; None if this rank has nothing to write."""
    written: Future[dict[str, FileChecksum]] | None = None
    """Result of the thread: checksums of this rank's files. None if there is nothing to write."""

    @property
    def partial(self) -> Path:
        """Path of the checkpoint until its publication."""
        return partial_name(self.final)

    def begin(self, trainer: PolicyTrainer) -> None:
        """Copy this rank's part to host memory and pass it to the thread. Collective."""
        try:
            with fail_together(self.partial):
                # Make both calls before ``save``, because it would create Megatron's own queue, and
                # it reads offloaded state, which may still be in transfer.
                keep_results_in_this_process()
                trainer.offloaded.wait()
                state = trainer_state(trainer, is_loading=False)
                state[HAS_EXPERT_OPTIMIZER] = has_expert_optimizer(trainer)
                request = dist_checkpointing.save(
                    state,
                    str(self.partial),
                    async_sharded_save=True,
                    async_strategy="mcore",
                )
                self.collect_results = request.finalize_fns

                # None if other ranks write copies of everything that this rank holds.
                if request.async_fn is not None:
                    # Megatron would run this function in a forked process. A thread shares our CUDA
                    # context and needs no shared memory for the tensors.
                    rank, files, self.results = request.async_fn_args
                    host_files = [_copy_to_host(file) for file in files]
                    self.written = WRITER.submit(
                        _write_and_hash, request.async_fn, rank, host_files, self.results
                    )
        except CheckpointError:
            # Another rank may have failed after this rank has started to write.
            self._discard_results()
            raise

    def is_written(self) -> bool:
        """Return True if the thread of this rank has finished."""
        return self.written is None or self.written.done()

    def complete(self, keep: int) -> None:
        """Wait for the files of all ranks and publish the checkpoint. Collective.

        ``keep`` is the number of checkpoints to keep.
        """
        checksums: dict[str, FileChecksum] = {}
        try:
            with fail_together(self.partial):
                if self.written is not None:
                    checksums = self.written.result()
                # These are collective, so they run in the main thread: collectives of two threads
                # over one process group may run in a different order on each rank.
                for collect in self.collect_results:
                    collect()
        except CheckpointError:
            self._discard_results()
            raise

        rank_checksums: list[dict[str, FileChecksum]] = [{}] * dist.get_world_size()
        dist.all_gather_object(rank_checksums, checksums)

        # All tensor files and the metadata exist. The files that make the directory complete are
        # written last.
        with fail_together(self.partial):
            if dist.get_rank() == 0:
                self.seal(ChainMap(*rank_checksums))
                publish(self.final, keep)

    def seal(self, known: Mapping[str, FileChecksum]) -> None:
        """Write the files that make the directory complete. Not collective.

        Args:
            known: checksums of the files that ranks have written, by file name.
        """
        directory = self.partial
        model_config = self.model_config.model_dump_json(indent=1)
        (directory / MODEL_CONFIG_FILE).write_text(model_config)
        if self.quantization is not None:
            content = json.dumps({"format": self.quantization})
            (directory / QUANTIZATION_FILE).write_text(content)
        if self.adapters is not None:
            (directory / ADAPTER_FILE).write_text(json.dumps(self.adapters, indent=1))

        # The training state marks a complete checkpoint, so it is written last. Its own checksum is
        # computed from memory.
        training_state = json.dumps(self.training_state).encode()
        write_checksums(directory, {**known, TRAINING_STATE_FILE: compute_checksum(training_state)})
        (directory / TRAINING_STATE_FILE).write_bytes(training_state)

    def _discard_results(self) -> None:
        """Wait until this rank's thread has finished, and drop its results."""
        # All saves use the same queue. The next save would read these results as its own.
        if self.written is not None:
            wait([self.written])
        if self.results is None:
            return
        with suppress(queue.Empty):
            while True:
                self.results.get_nowait()


_File = tuple[Any, Any, tuple[Any, list[Any]]]
"""Megatron's description of a file: (path, storage key, (objects, [(item, tensor), ...]))."""


def _write_and_hash(
    write: Callable[..., None], rank: int, files: list[_File], results: Any
) -> dict[str, FileChecksum]:
    """Write ``files`` and return their checksums by file name.

    A file that could not be written is missing in the result. Its error is in ``results``.
    """
    # Hash right after writing, while the files are in the page cache.
    write(rank, files, results)
    return checksum_files([Path(path) for path, _, _ in files])


def _copy_to_host(file: _File) -> _File:
    """Return the file with its tensors in host memory that training does not change."""
    # On a machine with a GPU, tensors on the host are copies that Megatron made for this save. On
    # a CPU they are the trainer's own.
    always_copy = not torch.cuda.is_available()
    path, key, (objects, tensors) = file
    host_tensors = [(item, tensor.to("cpu", copy=always_copy)) for item, tensor in tensors]
    return path, key, (objects, host_tensors)


@contextmanager
def fail_together(partial: Path) -> Iterator[None]:
    """Raise CheckpointError on every rank if the block fails on any rank. Collective.

    ``partial`` is deleted in this case.
    """
    # Otherwise the other ranks would wait for the failed rank in their next collective call.
    # Catch everything here and decide together: every rank must reach the collective call below.
    error: BaseException | None = None
    try:
        yield
    except FAILURES as failure:
        error = failure

    message = None if error is None else f"rank {dist.get_rank()}: {error!r}"
    messages: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, message)
    failures = [message for message in messages if message]
    if not failures:
        return

    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
    volume = partial.parent if partial.parent.exists() else Path.cwd()
    free_mib = shutil.disk_usage(volume).free >> 20
    space = f"{free_mib} MiB are free there"
    if free_mib < FULL_DISK_MIB:
        # Megatron may report only the class of a thread's error, which hides that the disk is full.
        space = f"its disk is full, {space}"
    raise CheckpointError(
        f"checkpoint {final_name(partial)} could not be written ({failures[0]}); "
        f"{space}. The previous checkpoint is untouched"
    ) from error
