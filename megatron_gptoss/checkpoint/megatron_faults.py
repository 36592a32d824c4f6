"""What megatron-core 0.19.2 would save or load wrongly, and how we step around it.

Each context manager changes Megatron's objects while its block runs and restores them afterwards.
"""

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch.distributed.checkpoint.api import CheckpointException

from megatron_gptoss.optimizer_offload import OffloadedState

FAILURES = (Exception, CheckpointException)
"""What reading or writing may raise. torch's CheckpointException is a BaseException, which
``except Exception`` lets through."""

SETTINGS = ("lr", "max_lr", "min_lr", "weight_decay", "start_wd", "end_wd", "betas", "eps")
"""What a parameter group of Megatron's optimizer holds of the configuration."""


def keep_results_in_this_process() -> None:
    """Give Megatron a plain queue for the results of writing, if it has none yet.

    By itself it starts a server process that holds the queue, for writers in other processes. Ours is
    a thread; the process would import torch first, for seconds in which training waits, and stay.
    """
    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.Queue()


@contextmanager
def number_fp32_parameters(optimizer: Any) -> Iterator[None]:
    """Let Megatron's optimizer for CPUs number all its parameters when it saves.

    By itself it numbers the bf16 parameters only, and the routers' biases are fp32.
    """
    originals = []
    for chained in optimizer.chained_optimizers:
        if not isinstance(chained, Float16OptimizerWithFloat16Params):
            continue

        # A group holds parameters of one dtype: where it has no bf16 ones, its fp32 ones take
        # their place.
        originals.append((chained, chained.float16_groups, chained.fp32_from_float16_groups))
        fp32_groups = chained.fp32_from_fp32_groups
        chained.float16_groups = _first_nonempty(chained.float16_groups, fp32_groups)
        chained.fp32_from_float16_groups = _first_nonempty(
            chained.fp32_from_float16_groups,
            fp32_groups,
        )
    try:
        yield
    finally:
        for chained, float16_groups, fp32_from_float16_groups in originals:
            chained.float16_groups = float16_groups
            chained.fp32_from_float16_groups = fp32_from_float16_groups


def _first_nonempty(groups: list[Any], alternatives: list[Any]) -> list[Any]:
    """Return each group of parameters, or its alternative where it is empty."""
    pairs = zip(groups, alternatives, strict=True)
    return [group or alternative for group, alternative in pairs]


@contextmanager
def exact_optimizer_state(optimizer: Any, offloaded: OffloadedState) -> Iterator[None]:
    """Let the distributed optimizer save and load every parameter's own state.

    By itself it does not:

    - Transformer Engine's Adam keeps of an fp32 master weight only the 16 bits that its bf16 weight
      lacks, and Megatron would save those bits as if they were a number. In the block, the
      optimizer gives and takes whole master weights.
    - Megatron joins buckets without the gaps between them, but looks a parameter up where it lies
      with the gaps: from the first gap on, parameters would get each other's state. In the block,
      parameters have the places that they have without gaps.
    - Loading, it makes all state twice on the GPU: empty, for Adam to keep, and again for what was
      loaded. In the block it makes each parameter's once, and what is ``offloaded`` leaves the GPU
      at once.
    """
    adams = [
        chained.optimizer
        for chained in optimizer.chained_optimizers
        if getattr(chained.optimizer, "store_param_remainders", False)
    ]
    for adam in adams:
        _exchange_whole_master_weights(adam, offloaded)
        # DistributedOptimizer.load_state_dict makes empty state for all parameters of an Adam that
        # has no state at all. One empty entry is enough to keep it from that.
        for group in adam.param_groups:
            if group["params"]:
                adam.state.setdefault(group["params"][0], {})

    # Only the distributed optimizer has buffers; Megatron's for CPUs keeps tensors by themselves.
    buffers: list[Any] = []
    for chained in optimizer.chained_optimizers:
        buffers += getattr(chained, "buffers", ())
    original_maps = [buffer.param_index_map for buffer in buffers]
    for buffer in buffers:
        buffer.param_index_map = _places_without_gaps(buffer)

    try:
        yield
    finally:
        for buffer, original_map in zip(buffers, original_maps, strict=True):
            buffer.param_index_map = original_map
        for adam in adams:
            # The instance's attributes covered the methods of the class.
            for name in (
                "get_unscaled_state",
                "set_scaled_state",
                "state_dict",
                "load_state_dict",
            ):
                delattr(adam, name)


def _exchange_whole_master_weights(adam: Any, offloaded: OffloadedState) -> None:
    """Let Transformer Engine's Adam give and take whole fp32 master weights.

    Covers the methods of the class by attributes of the instance.
    """
    get_state = adam.get_unscaled_state
    set_state = adam.set_scaled_state

    def get_whole(weight: torch.Tensor, name: str) -> torch.Tensor:
        state: torch.Tensor = get_state(weight, name)
        if state.dtype == torch.int16:
            return master_weight(weight, state.to(weight.device))
        return state

    # The upper half needs no writing: the model's weights are loaded from the same checkpoint, and
    # a bf16 weight is the upper half of its master. Parameters of other dtypes have whole masters.
    def set_whole(weight: torch.Tensor, name: str, state: torch.Tensor) -> None:
        if name == "master_param" and weight.dtype == torch.bfloat16:
            state = lower_half(state)
        set_state(weight, name, state)
        # Before the next parameter's state is made, not at the end: it would all be on the GPU then.
        offloaded.rest(weight)

    adam.get_unscaled_state = get_whole
    adam.set_scaled_state = set_whole

    # Megatron wants no state from the optimizer's dictionary; Transformer Engine's would copy all
    # of it in fp32.
    base = torch.optim.Optimizer
    adam.state_dict = partial(base.state_dict, adam)
    adam.load_state_dict = lambda saved: base.load_state_dict(adam, saved | {"state": {}})


def _places_without_gaps(buffer: Any) -> dict[torch.nn.Parameter, tuple[int, int, int]]:
    """Return where each parameter lies in a buffer whose buckets follow without gaps.

    As Megatron's map has it: first element, end and bucket.
    """
    # A bucket ends with padding, which makes it divisible among the ranks. Bucket n is moved back by
    # the padding of all buckets before it.
    paddings = (len(bucket.grad_data) - bucket.numel_unpadded for bucket in buffer.buckets)
    gaps_before = list(accumulate(paddings, initial=0))

    places = {}
    for parameter, (start, end, bucket) in buffer.param_index_map.items():
        places[parameter] = (start - gaps_before[bucket], end - gaps_before[bucket], bucket)
    return places


def master_weight(weight: torch.Tensor, lower: torch.Tensor) -> torch.Tensor:
    """Put an fp32 master weight together from its halves.

    Args:
        weight: bf16, the upper half, rounded to nearest.
        lower: int16 of the same shape, the lower half.
    """
    # Where the upper half was rounded up, the lower half is negative as an int16: the sum takes it
    # back.
    upper = weight.detach().view(torch.int16).int() << 16
    return (upper + lower).view(torch.float32)


def lower_half(master: torch.Tensor) -> torch.Tensor:
    """Return the int16 half of fp32 ``master`` that ``master_weight`` needs."""
    # Narrowing an integer drops its upper bits: the other half is the bf16 weight's.
    return master.contiguous().view(torch.int32).to(torch.int16)


def keep_settings(optimizer: Any, saved_state: Any) -> None:
    """Give the parameter groups in ``saved_state`` the present settings of ``optimizer``, in place.

    Megatron replaces its groups by the saved ones, settings included, and refuses them where a
    learning rate or a weight decay differs: a run could not go on with other settings than it was
    begun with.
    """
    if not isinstance(saved_state, dict):
        return

    # A chained optimizer's state is a dictionary of its optimizers' states, at whatever depth: the
    # groups are looked for by their key.
    for key, value in saved_state.items():
        if key != "param_groups":
            keep_settings(optimizer, value)
            continue
        for saved_group in value:
            for group in optimizer.param_groups:
                if _same_parameters(group, saved_group):
                    saved_group |= {name: group[name] for name in SETTINGS if name in group}


def _same_parameters(group: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two parameter groups hold the same parameters.

    ``start_wd`` tells the routers' biases apart by being there at all (see ``PolicyTrainer``).
    """
    names = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
    if any(group.get(name) != other.get(name) for name in names):
        return False
    return (group.get("start_wd") is None) == (other.get("start_wd") is None)
