"""Hook for the source of the distributed optimizer's state in a checkpoint.

For saving and for loading, megatron-core 0.19.2 allocates the whole state of all parameters on a
rank. ``gathered_state`` and ``streamed_state`` use this hook to avoid that.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


@contextmanager
def override_parameter_state(make: Callable[..., Any], optimizer: Any) -> Iterator[None]:
    """Replace ``get_parameter_state_dp_zero``, which ``sharded_state_dict`` calls, in the block.

    Args:
        make: replacement. It is called with a distributed optimizer and Megatron's options.
        optimizer: chain of Megatron optimizers. Only distributed ones change.
    """
    # Attributes of the instances hide the method, so other optimizers of the process are untouched.
    distributed = [
        chained
        for chained in optimizer.chained_optimizers
        if isinstance(chained, DistributedOptimizer)
    ]
    for chained in distributed:
        chained.get_parameter_state_dp_zero = partial(make, chained)

    try:
        yield
    finally:
        for chained in distributed:
            del chained.get_parameter_state_dp_zero
