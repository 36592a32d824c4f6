"""Workarounds for errors of megatron-core 0.19.2 in saving and loading.

Each context manager changes objects of Megatron while its block runs and restores them afterwards.
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

# torch's CheckpointException derives from BaseException, so ``except Exception`` misses it.
FAILURES = (Exception, CheckpointException)
"""Exceptions that reading or writing a checkpoint may raise."""

SETTINGS = ("lr", "max_lr", "min_lr", "weight_decay", "start_wd", "end_wd", "betas", "eps")
"""Keys of a parameter group of Megatron's optimizer that come from the configuration."""


def keep_results_in_this_process() -> None:
    """Give Megatron a plain queue for the results of writing, if it has none yet."""
    # Megatron would start a server process for the queue, because it expects writers in other
    # processes. Our writer is a thread. The server would import torch, which takes seconds while
    # training waits, and it would never exit.
    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.Queue()


@contextmanager
def number_fp32_parameters(optimizer: Any) -> Iterator[None]:
    """Make Megatron's optimizer for CPUs save its fp32 parameters, too.

    When it saves, it numbers only bf16 parameters. The router biases are fp32.
    """
    originals = []
    for chained in optimizer.chained_optimizers:
        if not isinstance(chained, Float16OptimizerWithFloat16Params):
            continue

        # A group has parameters of one dtype. If it has no bf16 parameters, put its fp32 parameters
        # in their place.
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
    """Return each group of parameters, or its alternative if the group is empty."""
    pairs = zip(groups, alternatives, strict=True)
    return [group or alternative for group, alternative in pairs]


@contextmanager
def exact_optimizer_state(optimizer: Any, offloaded: OffloadedState) -> Iterator[None]:
    """Correct how the distributed optimizer saves and loads the state of parameters.

    Three faults are corrected in the block:

    - Transformer Engine's Adam stores only the lower 16 bits of an fp32 master weight; the bf16
      weight has the upper bits. Megatron would save the lower bits as if they were a number. In the
      block the optimizer returns and accepts whole master weights.
    - Megatron joins buckets without the gaps between them, but looks parameters up at positions
      with gaps. After the first gap, parameters would get the state of others. In the block the
      positions have no gaps.
    - On loading, Megatron allocates all state twice on the GPU: empty state for Adam, and the
      loaded state. In the block each state exists once and moves to the host if it is offloaded.

    Args:
        optimizer: chain of Megatron optimizers.
        offloaded: state that is kept in host memory.
    """
    adams = [
        chained.optimizer
        for chained in optimizer.chained_optimizers
        if getattr(chained.optimizer, "store_param_remainders", False)
    ]
    for adam in adams:
        _exchange_whole_master_weights(adam, offloaded)
        # DistributedOptimizer.load_state_dict allocates state for all parameters of an Adam that
        # has no state at all. One empty entry prevents that.
        for group in adam.param_groups:
            if group["params"]:
                adam.state.setdefault(group["params"][0], {})

    # Only the distributed optimizer has buffers. Megatron's optimizer for CPUs has single tensors.
    buffers: list[Any] = []
    for chained in optimizer.chained_optimizers:
        buffers += getattr(chained, "buffers", ())
    original_maps = [buffer.param_index_map for buffer in buffers]
    for buffer in buffers:
        buffer.param_index_map = _positions_without_gaps(buffer)

    try:
        yield
    finally:
        for buffer, original_map in zip(buffers, original_maps, strict=True):
            buffer.param_index_map = original_map
        for adam in adams:
            # Deleting the attributes of the instance makes the methods of the class visible again.
            for name in (
                "get_unscaled_state",
                "set_scaled_state",
                "state_dict",
                "load_state_dict",
            ):
                delattr(adam, name)


def _exchange_whole_master_weights(adam: Any, offloaded: OffloadedState) -> None:
    """Make Transformer Engine's Adam return and accept whole fp32 master weights."""
    get_state = adam.get_unscaled_state
    set_state = adam.set_scaled_state

    def get_whole(weight: torch.Tensor, name: str) -> torch.Tensor:
        """Return Adam's state of a weight, with a whole fp32 master weight."""
        state: torch.Tensor = get_state(weight, name)
        if state.dtype == torch.int16:
            return master_weight(weight, state.to(weight.device))
        return state

    # Only the lower half is stored: the bf16 weight, loaded from the same checkpoint, is the upper
    # half. Parameters of other dtypes have whole master weights.
    def set_full_state(weight: torch.Tensor, name: str, state: torch.Tensor) -> None:
        """Set Adam's state of a weight, from a whole fp32 master weight."""
        if name == "master_param" and weight.dtype == torch.bfloat16:
            state = lower_half(state)
        set_state(weight, name, state)
        # Now and not at the end: otherwise the state of all parameters would be on the GPU at once.
        offloaded.offload(weight)

    # Attributes of the instance hide the methods of the class.
    adam.get_unscaled_state = get_whole
    adam.set_scaled_state = set_full_state

    # Megatron ignores the state in this dictionary. Transformer Engine's method would copy all of
    # it to fp32; the method of torch does not.
    base = torch.optim.Optimizer
    adam.state_dict = partial(base.state_dict, adam)
    adam.load_state_dict = lambda saved: base.load_state_dict(adam, saved | {"state": {}})


def _positions_without_gaps(buffer: Any) -> dict[torch.nn.Parameter, tuple[int, int, int]]:
    """Return the position of each parameter in a buffer without gaps between buckets.

    Returns:
        (first element, end, index of the bucket) by parameter, like Megatron's map.
    """
    # Each bucket ends with padding to a multiple of the number of ranks. Move bucket n back by the
    # padding of all earlier buckets.
    paddings = (len(bucket.grad_data) - bucket.numel_unpadded for bucket in buffer.buckets)
    gaps_before = list(accumulate(paddings, initial=0))

    places = {}
    for parameter, (start, end, bucket) in buffer.param_index_map.items():
        places[parameter] = (start - gaps_before[bucket], end - gaps_before[bucket], bucket)
    return places


def master_weight(weight: torch.Tensor, lower: torch.Tensor) -> torch.Tensor:
    """Join the halves of fp32 master weights.

    Args:
        weight: [...] bf16 upper half, rounded to nearest.
        lower: [...] int16 lower half.

    Returns:
        [...] fp32.
    """
    # If rounding increased the upper half, the lower half is negative as int16, and the sum
    # compensates.
    upper = weight.detach().view(torch.int16).int() << 16
    return (upper + lower).view(torch.float32)


def lower_half(master: torch.Tensor) -> torch.Tensor:
    """Return the lower half of master weights, int16 [...], from fp32 [...]."""
    # Conversion to a narrower integer drops the upper bits, which the bf16 weight has.
    return master.contiguous().view(torch.int32).to(torch.int16)


def keep_settings(optimizer: Any, saved_state: Any) -> None:
    """Replace the settings in the parameter groups of ``saved_state`` by those of ``optimizer``.

    Args:
        optimizer: optimizer with the settings to use.
        saved_state: loaded state of the optimizer, changed in place.
    """
    # Megatron replaces its groups, including their settings, by the saved ones. It raises an error
    # if learning rate or weight decay differ, so a run could not resume with other settings.
    if not isinstance(saved_state, dict):
        return

    # The state of a chained optimizer nests the states of its optimizers at any depth. Search for
    # the key of the groups.
    for key, value in saved_state.items():
        if key != "param_groups":
            keep_settings(optimizer, value)
            continue
        for saved_group in value:
            for group in optimizer.param_groups:
                if _same_parameters(group, saved_group):
                    saved_group |= {name: group[name] for name in SETTINGS if name in group}


def _same_parameters(group: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return True if two parameter groups hold the same parameters."""
    # Groups have no name. These keys distinguish all groups of a trainer. Only the router biases
    # have the key start_wd (see ``PolicyTrainer``).
    names = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
    if any(group.get(name) != other.get(name) for name in names):
        return False
    return (group.get("start_wd") is None) == (other.get("start_wd") is None)
