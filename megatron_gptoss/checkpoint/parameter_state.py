"""Replacement of Megatron's method that returns the optimizer state for a checkpoint.

The method of megatron-core 0.19.2 allocates the state of all parameters on one rank, when a
checkpoint is saved and when it is loaded. ``gathered_state`` and ``streamed_state`` replace it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


@contextmanager
def override_parameter_state(replacement: Callable[..., Any], optimizer: Any) -> Iterator[None]:
    """Within the block, let ``sharded_state_dict`` call another ``get_parameter_state_dp_zero``.

    Args:
        replacement: function of a distributed optimizer and of the method's arguments.
        optimizer: chain of Megatron optimizers. Those that are not distributed keep their method.
    """
    # Set attributes of instances, not of the class. Other optimizers of the process keep the method.
    distributed = [
        chained
        for chained in optimizer.chained_optimizers
        if isinstance(chained, DistributedOptimizer)
    ]
    for chained in distributed:
        chained.get_parameter_state_dp_zero = partial(replacement, chained)

    try:
        yield
    finally:
        for chained in distributed:
            del chained.get_parameter_state_dp_zero
