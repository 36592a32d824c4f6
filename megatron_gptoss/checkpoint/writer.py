"""Writing checkpoints in a thread while the trainer goes on learning."""

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
    checksum_of,
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
from megatron_gptoss.checkpoint.megatron_faults import FAILURES, keep_results_in_this_process
from megatron_gptoss.checkpoint.state import (
    EXPERTS_APART,
    describe_adapters,
    experts_apart,
    has_adapters,
    trainer_state,
)
from megatron_gptoss.config import ModelConfig, Quantization
from megatron_gptoss.new_directory import final_name, partial_name
from megatron_gptoss.scorer import gather_parameters
from megatron_gptoss.trainer import PolicyTrainer

WRITER = ThreadPoolExecutor(1, "checkpoint")
"""Writes all checkpoints of this process. One thread only: Megatron's results come through one
queue, in the order in which they were written."""
FULL_DISK_MIB = 16
"""A disk with less room is called full."""


class PublishedReader(Protocol):
    """Reads published checkpoints in a thread. Asked on every rank; no method is collective."""

    def is_reading(self) -> bool:
        """Return whether this rank still reads the checkpoint before."""

    def wait(self) -> int:
        """Wait until it does not. Returns how many checkpoints could not be read, which stay for
        another process. Raises nothing: the ranks would part ways here."""

    def read(self, checkpoint: Path) -> None:
        """Begin to read a checkpoint that has just been published."""


class CheckpointWriter:
    """Writes one trainer's checkpoints under ``root``; deletes all but the newest ``keep``.

    ``reader`` reads each of them once it is published. The next one is published, and older ones
    are deleted, only when it is done with that.

    Every method is collective. If any rank could not write, the call that notices raises
    CheckpointError on every rank; the previous checkpoint then is still the latest.
    """

    def __init__(self, root: Path, keep: int = 2, reader: PublishedReader | None = None) -> None:
        self._root = root
        self._keep = keep
        self._reader = reader
        self._pending: _PendingSave | None = None

    def start(self, trainer: PolicyTrainer, step: int, training_state: dict[str, Any]) -> Path:
        """Copy everything to host memory and begin to write it.

        An earlier checkpoint is finished first.

        Returns:
            The path that the checkpoint will have when it is complete.
        """
        self.finish()

        final = step_directory(self._root, step)
        save = _PendingSave(
            final=final,
            model_config=trainer.chunks[0].config.architecture,
            quantization=trainer.chunks[0].config.quantization,
            adapters=describe_adapters(trainer.module) if has_adapters(trainer.module) else None,
            training_state=training_state,
        )
        with fail_together(save.partial):
            if dist.get_rank() == 0:
                clean_up_after_crash(self._root)
                save.partial.mkdir(parents=True)

        # Under the distributed optimizer this rank has stale copies of the shards that other ranks
        # updated.
        gather_parameters(trainer.model)
        save.begin(trainer)
        self._pending = save
        return final

    def finish(self, block: bool = True) -> None:
        """Make what was started the latest checkpoint.

        Without ``block``, only if all ranks have written it and none reads an earlier one.
        """
        if self._pending is None:
            return

        # All ranks must take the same way: completing is collective.
        if not block:
            everyone_done = [False] * dist.get_world_size()
            is_reading = self._reader is not None and self._reader.is_reading()
            dist.all_gather_object(everyone_done, self._pending.is_written() and not is_reading)
            if not all(everyone_done):
                return

        # An error must not be met a second time by the next call.
        save = self._pending
        self._pending = None
        unread = 0 if self._reader is None else self._reader.wait()
        save.complete(self._keep + unread)
        if self._reader is not None:
            self._reader.read(save.final)


@dataclass
class _PendingSave:
    """One checkpoint from the first byte to its publication."""

    final: Path
    """Path of the complete checkpoint."""
    model_config: ModelConfig
    quantization: Quantization | None
    """What the experts are trained through."""
    adapters: dict[str, Any] | None
    """What ``describe_adapters`` says; None for a whole model."""
    training_state: dict[str, Any]
    collect_results: list[Callable[[], None]] = field(default_factory=list)
    """Megatron's collective functions that gather every rank's results and write the metadata."""
    results: Any = None
    """Megatron's queue of this process's results; None on a rank that has nothing to write."""
    written: Future[dict[str, FileChecksum]] | None = None
    """Of the writing thread: checksums of its files by name. None on a rank that has nothing to
    write."""

    @property
    def partial(self) -> Path:
        """Path of the checkpoint while it is written."""
        return partial_name(self.final)

    def begin(self, trainer: PolicyTrainer) -> None:
        """Copy this rank's share to host memory and give it to the writing thread."""
        try:
            with fail_together(self.partial):
                # Before ``save``, which would make Megatron's queue if there were none, and which
                # reads what rests in host memory.
                keep_results_in_this_process()
                trainer.offloaded.wait()
                state = trainer_state(trainer, is_loading=False)
                state[EXPERTS_APART] = experts_apart(trainer)
                request = dist_checkpointing.save(
                    state,
                    str(self.partial),
                    async_sharded_save=True,
                    async_strategy="mcore",
                )
                self.collect_results = request.finalize_fns

                # None: replicas elsewhere write all that this rank holds.
                if request.async_fn is not None:
                    # Megatron would run this function in a process that it forks. In a thread it
                    # shares our CUDA context, and tensors need no other place than memory of this
                    # process.
                    rank, files, self.results = request.async_fn_args
                    host_files = [_copy_to_host(file) for file in files]
                    self.written = WRITER.submit(
                        _write_and_hash, request.async_fn, rank, host_files, self.results
                    )
        except CheckpointError:
            # Another rank may have failed after this one had begun to write.
            self._discard_results()
            raise

    def is_written(self) -> bool:
        """Return whether this rank's thread is done."""
        return self.written is None or self.written.done()

    def complete(self, keep: int) -> None:
        """Wait for every rank's files and publish the checkpoint."""
        own: dict[str, FileChecksum] = {}
        try:
            with fail_together(self.partial):
                if self.written is not None:
                    own = self.written.result()
                # Only now, on the main thread: they are collective, and two threads that talk over
                # one process group may meet in another order on every rank.
                for collect in self.collect_results:
                    collect()
        except CheckpointError:
            self._discard_results()
            raise

        of_ranks: list[dict[str, FileChecksum]] = [{}] * dist.get_world_size()
        dist.all_gather_object(of_ranks, own)

        # Every rank's files and the metadata exist now. What makes the directory complete comes
        # last.
        with fail_together(self.partial):
            if dist.get_rank() == 0:
                self.seal(ChainMap(*of_ranks))
                publish(self.final, keep)

    def seal(self, known: Mapping[str, FileChecksum]) -> None:
        """Write what makes the directory complete.

        ``known``: checksums by name of the files that ranks have written. Not collective.
        """
        directory = self.partial
        model_config = self.model_config.model_dump_json(indent=1)
        (directory / MODEL_CONFIG_FILE).write_text(model_config)
        if self.quantization is not None:
            content = json.dumps({"format": self.quantization})
            (directory / QUANTIZATION_FILE).write_text(content)
        if self.adapters is not None:
            (directory / ADAPTER_FILE).write_text(json.dumps(self.adapters, indent=1))

        # The training state says that a checkpoint is complete, so it is written last, after the
        # checksums, which have its own already.
        training_state = json.dumps(self.training_state).encode()
        write_checksums(directory, {**known, TRAINING_STATE_FILE: checksum_of(training_state)})
        (directory / TRAINING_STATE_FILE).write_bytes(training_state)

    def _discard_results(self) -> None:
        """Wait for what this rank is still writing and empty the queue of its results.

        The results of all saves come through one queue: the next save would take these for its
        own.
        """
        if self.written is not None:
            wait([self.written])
        if self.results is None:
            return
        with suppress(queue.Empty):
            while True:
                self.results.get_nowait()


_File = tuple[Any, Any, tuple[Any, list[Any]]]
"""A file as Megatron describes it: (path, storage key, (objects, [(item, tensor), ...]))."""


def _write_and_hash(
    write: Callable[..., None], rank: int, files: list[_File], results: Any
) -> dict[str, FileChecksum]:
    """Let Megatron write ``files`` and compute their checksums, by name.

    They are read from the page cache, where they have just been put. A file that could not be
    written is left out: its error is among ``results``.
    """
    write(rank, files, results)
    return checksum_files([Path(path) for path, _, _ in files])


def _copy_to_host(file: _File) -> _File:
    """Copy the tensors of a file to memory that training does not change."""
    # On a GPU's machine what already lies on the host is a copy that Megatron made for this save.
    always_copy = not torch.cuda.is_available()
    path, key, (objects, tensors) = file
    host_tensors = [(item, tensor.to("cpu", copy=always_copy)) for item, tensor in tensors]
    return path, key, (objects, host_tensors)


@contextmanager
def fail_together(partial: Path) -> Iterator[None]:
    """Raise CheckpointError on every rank when the block failed on any. Collective.

    Otherwise the other ranks would wait for the failed one in their next collective call. What was
    written to ``partial`` is deleted.
    """
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
        # What Megatron passes on of a thread's error may be its class alone.
        space = f"its disk is full, {space}"
    raise CheckpointError(
        f"checkpoint {final_name(partial)} could not be written ({failures[0]}); "
        f"{space}. The previous checkpoint is untouched."
    ) from error
