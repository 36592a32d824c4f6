"""Saving and resuming a trainer: torch_dist checkpoints that are either complete or not there.

    ROOT/step_000120/            torch_dist: model and optimizer, loadable at other parallel sizes
    ROOT/step_000120/gptoss_config.json      the ModelConfig
    ROOT/step_000120/training_state.json     what the caller wants back: step, data position, ...
    ROOT/latest                  the name of the newest complete checkpoint

Written beside its final place while training goes on, and renamed when every rank is done; ``latest`` changes last. A
step that is saved again replaces its earlier checkpoint: that one is renamed to ``step_000120.replaced`` first, and
deleted when the new one is in its place. Between the two renames it is the newest complete checkpoint, and whoever
looks for ``step_000120`` gets it; the next save gives it back its name."""

import json
import queue
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch.distributed.checkpoint.api import CheckpointException

from gptoss_kernels.cache import write_atomically
from megatron_gptoss.config import ModelConfig
from megatron_gptoss.durable_files import sync_directory, sync_names
from megatron_gptoss.model import chunks_of
from megatron_gptoss.trainer import PolicyTrainer, gather_parameters

MODEL_CONFIG_FILE = "gptoss_config.json"
TRAINING_STATE_FILE = "training_state.json"
LATEST_FILE = "latest"
STEPS = "step_??????"
PARTIAL = ".partial"
"""Ends the name of a directory that is being written."""
REPLACED = ".replaced"
"""Ends the name of a checkpoint whose step is being saved again."""

WRITER = ThreadPoolExecutor(1, "checkpoint")
"""Of this process. One thread: Megatron's results come through one queue, in the order in which they were written."""

FAILURES = (Exception, CheckpointException)  # torch's own is a BaseException, which "except Exception" lets through


EXPERTS_APART = "experts_have_an_optimizer_of_their_own"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message names it and what to do."""


def _metadata() -> dict[str, Any]:
    return {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "chained_optim_avoid_prefix": True,
        "distrib_optim_sharding_type": "fully_reshardable",
        "singleton_local_shards": False,
    }


def _weights(model: torch.nn.Module, metadata: dict[str, Any]) -> dict[str, Any]:
    return {str(i): chunk.sharded_state_dict(metadata=metadata) for i, chunk in enumerate(chunks_of(model))}


def _load_weights(model: torch.nn.Module, weights: dict[str, Any]) -> None:
    for i, chunk in enumerate(chunks_of(model)):
        chunk.load_state_dict(weights[str(i)], strict=True)


def _state(trainer: PolicyTrainer, loading: bool) -> dict[str, Any]:
    metadata = _metadata()
    model = _weights(trainer.module, metadata)
    if not trainer.updated:  # a critic may be learning alone, or every token be masked
        return {"model": model}
    with _fp32_parameters_counted(trainer.optimizer), _exact_state(trainer.optimizer):
        optimizer = trainer.optimizer.sharded_state_dict(model, is_loading=loading, metadata=metadata)
    return {"model": model, "optimizer": optimizer}


@contextmanager
def _fp32_parameters_counted(optimizer: Any) -> Iterator[None]:
    """When Megatron's optimizer for CPUs saves, it numbers the bf16 parameters only; the routers' biases are fp32."""
    before = []
    for part in optimizer.chained_optimizers:
        if isinstance(part, Float16OptimizerWithFloat16Params):
            before.append((part, part.float16_groups, part.fp32_from_float16_groups))
            full = part.fp32_from_fp32_groups
            part.float16_groups = [a or b for a, b in zip(part.float16_groups, full, strict=True)]
            part.fp32_from_float16_groups = [a or b for a, b in zip(part.fp32_from_float16_groups, full, strict=True)]
    try:
        yield
    finally:
        for part, *groups in before:
            part.float16_groups, part.fp32_from_float16_groups = groups


@contextmanager
def _exact_state(optimizer: Any) -> Iterator[None]:
    """Inside, the distributed optimizer saves and loads every parameter's own state, which by itself it does not.

    - Transformer Engine's Adam keeps of an fp32 master weight only the half that its bf16 weight lacks, and Megatron
      would save those 16 bits as if they were a number: here the optimizer gives and takes master weights. Its own
      dictionaries, of which Megatron wants no state, do not make a copy of all state in fp32.
    - Megatron joins buckets without the gaps between them, but looks a parameter up where it lies with the gaps: from
      the first gap on, parameters would get each other's state."""

    def change(adam: Any) -> None:
        get, put = adam.get_unscaled_state, adam.set_scaled_state

        def get_whole(weight: torch.Tensor, name: str) -> torch.Tensor:
            state: torch.Tensor = get(weight, name)
            return master_weight(weight, state) if state.dtype == torch.int16 else state

        def put_whole(weight: torch.Tensor, name: str, state: torch.Tensor) -> None:
            halved = name == "master_param" and weight.dtype == torch.bfloat16
            put(weight, name, lower_half(state) if halved else state)

        adam.get_unscaled_state, adam.set_scaled_state = get_whole, put_whole
        adam.state_dict = partial(torch.optim.Optimizer.state_dict, adam)
        adam.load_state_dict = lambda saved: torch.optim.Optimizer.load_state_dict(adam, saved | {"state": {}})

    inner = [part.optimizer for part in optimizer.chained_optimizers]
    changed = [adam for adam in inner if getattr(adam, "store_param_remainders", False)]
    for adam in changed:
        change(adam)
    buffers = [buffer for part in optimizer.chained_optimizers for buffer in getattr(part, "buffers", ())]
    places = [buffer.param_index_map for buffer in buffers]
    for buffer in buffers:
        buffer.param_index_map = _without_gaps(buffer)
    try:
        yield
    finally:
        for buffer, place in zip(buffers, places, strict=True):
            buffer.param_index_map = place
        for adam in changed:  # the class's own show again
            del adam.get_unscaled_state, adam.set_scaled_state, adam.state_dict, adam.load_state_dict


def _without_gaps(buffer: Any) -> dict[torch.nn.Parameter, tuple[int, int, int]]:
    """First and last element and bucket of each parameter in a buffer whose buckets follow each other without gaps."""
    gaps = list(accumulate((len(bucket.grad_data) - bucket.numel_unpadded for bucket in buffer.buckets), initial=0))
    places = buffer.param_index_map.items()
    return {parameter: (start - gaps[i], end - gaps[i], i) for parameter, (start, end, i) in places}


def master_weight(weight: torch.Tensor, lower: torch.Tensor) -> torch.Tensor:
    """fp32 from bf16 ``weight``, which is the upper half rounded, and int16 ``lower``; of one shape."""
    return ((weight.detach().view(torch.int16).int() << 16) + lower).view(torch.float32)


def lower_half(master: torch.Tensor) -> torch.Tensor:
    """The int16 half of fp32 ``master`` that ``master_weight`` wants back."""
    return master.contiguous().view(torch.int32).to(torch.int16)


class CheckpointWriter:
    """Writes the checkpoints of one trainer under ``root`` while it goes on learning; all but the newest ``keep`` go.

    Every method is collective. CheckpointError is raised on every rank if any rank could not write, by the call that
    notices; then the previous checkpoint is still the latest."""

    def __init__(self, root: Path, keep: int = 2) -> None:
        self._root, self._keep = root, keep
        self._complete: Callable[[], None] | None = None
        self._written: list[Future[None]] = []

    def start(self, trainer: PolicyTrainer, step: int, training_state: dict[str, Any]) -> Path:
        """Copy everything to host memory and begin to write ``root/step_{step}``, whose path is returned; an earlier
        one is finished first."""
        self.finish()
        final = self._root / f"step_{step:06d}"
        partial = final.with_name(final.name + PARTIAL)
        with _failing_together(partial):
            if dist.get_rank() == 0:
                self._clean_up_after_a_crash()
                partial.mkdir(parents=True)

        gather_parameters(trainer.model)
        self._written = []
        results: Any = None
        try:
            with _failing_together(partial), trainer.offloaded.on_device():
                state = _state(trainer, loading=False) | {EXPERTS_APART: _experts_apart(trainer)}
                request = dist_checkpointing.save(state, str(partial), async_sharded_save=True, async_strategy="mcore")
                if request.async_fn is not None:  # this rank has something to write
                    rank, files, results = request.async_fn_args
                    # what a GPU's optimizer has on the host is a copy already
                    copy = not torch.cuda.is_available()
                    on_host = [
                        (path, key, (objects, [(item, tensor.to("cpu", copy=copy)) for item, tensor in tensors]))
                        for path, key, (objects, tensors) in files
                    ]
                    self._written.append(WRITER.submit(request.async_fn, rank, on_host, results))
        except CheckpointError:
            # Another rank failed, perhaps after this one had begun. Results of all saves come through one queue:
            # the next save would take those of this one for its own.
            self._discard(results)
            raise
        config: ModelConfig = trainer.chunks[0].config.gptoss

        def complete() -> None:
            try:
                with _failing_together(partial):
                    for future in self._written:
                        future.result()
                    for collect_results in request.finalize_fns:
                        collect_results()
            except CheckpointError:
                self._discard(results)
                raise
            with _failing_together(partial):
                if dist.get_rank() == 0:
                    (partial / MODEL_CONFIG_FILE).write_text(config.model_dump_json(indent=1))
                    (partial / TRAINING_STATE_FILE).write_text(json.dumps(training_state))
                    sync_directory(partial)
                    self._publish(partial, final)

        self._complete = complete
        return final

    def finish(self, block: bool = True) -> None:
        """Make what was started the latest checkpoint. Without ``block`` only if all ranks have written it."""
        if self._complete is None:
            return
        if not block:
            everyone = [False] * dist.get_world_size()
            dist.all_gather_object(everyone, all(future.done() for future in self._written))
            if not all(everyone):
                return
        complete, self._complete = self._complete, None
        complete()

    def _discard(self, results: Any) -> None:
        """Wait for what this rank is still writing and forget its results, the queue ``results``."""
        wait(self._written)
        with suppress(queue.Empty):
            while results is not None:
                results.get_nowait()

    def _publish(self, partial: Path, final: Path) -> None:
        """Give a complete checkpoint its name and make it the latest. A crash at any point leaves a complete one that
        ``latest_checkpoint`` finds; an OSError leaves the earlier one under its name."""
        replaced = final.with_name(final.name + REPLACED)
        if final.exists():
            _delete(replaced)
            final.rename(replaced)
        try:
            partial.rename(final)
        except OSError:
            if replaced.exists():
                replaced.rename(final)
            raise
        sync_names(self._root)
        write_atomically(self._root / LATEST_FILE, final.name.encode())

        # From here on nothing that is deleted is needed.
        _delete(replaced)
        for old in _beyond_the_newest(self._keep, self._root.glob(STEPS), final):
            _delete(old)

    def _clean_up_after_a_crash(self) -> None:
        """Undo what a crash left of a save: give a checkpoint that was set aside its name back, or delete it if its
        successor has that name; delete what was not complete."""
        for replaced in self._root.glob(STEPS + REPLACED):
            final = replaced.with_suffix("")
            if _is_complete(final):
                _delete(replaced)
            else:
                _delete(final)
                replaced.rename(final)
        for abandoned in self._root.glob(STEPS + PARTIAL):
            shutil.rmtree(abandoned, ignore_errors=True)


def _is_complete(checkpoint: Path) -> bool:
    return (checkpoint / TRAINING_STATE_FILE).exists()


def _delete(checkpoint: Path) -> None:
    """Delete the directory, if it is there. What is left when the process is killed does not look complete."""
    with suppress(OSError):
        (checkpoint / TRAINING_STATE_FILE).unlink(missing_ok=True)
    shutil.rmtree(checkpoint, ignore_errors=True)


def _beyond_the_newest(keep: int, checkpoints: Iterable[Path], newest: Path) -> list[Path]:
    """Which of ``checkpoints`` are not the ``keep`` newest; never ``newest``, whatever the numbers of the others.

    Higher steps than that of ``newest`` belong to a course of the run that was given up (``latest`` was set back by
    hand), and count as older than all others."""
    others = sorted(path for path in checkpoints if path != newest)
    by_age = sorted(others, key=lambda path: path < newest)
    return by_age[: max(0, len(by_age) - (keep - 1))]


@contextmanager
def _failing_together(partial: Path) -> Iterator[None]:
    """Whatever goes wrong on this rank is known to all before anyone goes on."""
    error: BaseException | None = None
    try:
        yield
    except FAILURES as failure:
        error = failure
    messages: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, None if error is None else f"rank {dist.get_rank()}: {error!r}")
    failed = [message for message in messages if message]
    if not failed:
        return
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
    free = shutil.disk_usage(partial.parent if partial.parent.exists() else Path.cwd()).free >> 20
    raise CheckpointError(
        f"checkpoint {partial.with_suffix('')} could not be written ({failed[0]}); {free} MiB are free there. "
        "The previous checkpoint is untouched."
    ) from error


def latest_checkpoint(root: Path) -> Path | None:
    """The newest complete checkpoint under ``root``, or None. Raises CheckpointError if it is gone."""
    pointer = root / LATEST_FILE
    if not pointer.exists():
        return None
    name = pointer.read_text().strip()
    path = find_checkpoint(root, name)
    if path is None:
        raise CheckpointError(f"{pointer} names {name}, which is missing or incomplete; correct or delete the file")
    return path


def find_checkpoint(root: Path, name: str) -> Path | None:
    """The complete checkpoint ``name`` under ``root``; None if there is none.

    It has another name only where the process was killed while it replaced this checkpoint. Nothing is renamed here:
    the process that is replacing it may be alive. ``name`` may be the one that this function found for another root."""
    name = name.removesuffix(REPLACED)
    for path in (root / name, root / f"{name}{REPLACED}"):
        if _is_complete(path):
            return path
    return None


def _experts_apart(trainer: PolicyTrainer) -> bool:
    """Whether Megatron keeps the experts in an optimizer of their own, as it does with expert or tensor parallelism."""
    return any(not getattr(parameter, "allreduce", True) for parameter in trainer.module.parameters())


@torch.no_grad()
def load_checkpoint(path: Path, trainer: PolicyTrainer) -> dict[str, Any]:
    """Restore model and optimizer in place and return the saved training state. Collective. The layout may be another
    than the one that saved, if both or neither have expert or tensor parallelism. Raises CheckpointError."""
    try:
        common = dist_checkpointing.load_common_state_dict(str(path))
        trainer.updated = "optimizer" in common
        if trainer.updated and common[EXPERTS_APART] != _experts_apart(trainer):
            had, wanted = ("with", "above 1") if common[EXPERTS_APART] else ("without", "1")
            raise CheckpointError(
                f"checkpoint {path} was saved {had} expert or tensor parallelism, and its optimizer cannot be split or "
                f"joined: go on with parallel.expert or parallel.tensor {wanted}, or start a new run whose "
                "initial_weights are this run"
            )
        state = dist_checkpointing.load(_state(trainer, loading=True), str(path))
        _load_weights(trainer.module, state["model"])
        if trainer.updated:
            _keep_settings(trainer.optimizer, state["optimizer"])
            with trainer.offloaded.on_device(), _exact_state(trainer.optimizer):
                trainer.optimizer.load_state_dict(state["optimizer"])
        else:
            trainer.optimizer.reload_model_params()
        return json.loads((path / TRAINING_STATE_FILE).read_text())
    except CheckpointError:
        raise
    except FAILURES as error:
        raise CheckpointError(f"checkpoint {path} cannot be loaded: {error}") from error


SETTINGS = ("lr", "max_lr", "min_lr", "weight_decay", "start_wd", "end_wd", "betas", "eps")
"""What a parameter group of Megatron's optimizer holds of the configuration."""


def _keep_settings(optimizer: Any, state: Any) -> None:
    """Give the parameter groups in a saved optimizer ``state`` the settings of ``optimizer``.

    Megatron puts the saved groups, settings included, in the place of its own, and refuses them where a learning rate
    or a weight decay is another: a run could not go on with other settings than it was begun with."""
    if not isinstance(state, dict):
        return
    for key, value in state.items():
        if key != "param_groups":
            _keep_settings(optimizer, value)
            continue
        for saved in value:
            for own in optimizer.param_groups:
                if _same_group(own, saved):
                    saved |= {name: own[name] for name in SETTINGS if name in own}


def _same_group(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two parameter groups hold the same parameters. ``start_wd`` tells the routers' biases apart by being
    there at all (see ``PolicyTrainer``)."""
    names = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
    return all(one.get(name) == other.get(name) for name in names) and (
        (one.get("start_wd") is None) == (other.get("start_wd") is None)
    )


def load_model_weights(path: Path, model: torch.nn.Module) -> None:
    """Restore only the weights, at any parallel layout. Collective. Raises CheckpointError naming the directory."""
    if path.name.endswith(PARTIAL):
        raise CheckpointError(f"{path} is unfinished; the process that wrote it was killed, or is still writing")
    if not (path / "metadata.json").exists():
        raise CheckpointError(f"{path} is not a torch_dist checkpoint: metadata.json is missing")
    try:
        _load_weights(model, dist_checkpointing.load({"model": _weights(model, _metadata())}, str(path))["model"])
    except FAILURES as error:
        raise CheckpointError(f"weights of {path} cannot be loaded: {error}") from error
