"""Where a checkpoint's state of the distributed optimizer's parameters comes from.

By itself megatron-core 0.19.2 makes it in memory for all parameters of a rank, both to save and to load.
``gathered_state`` and ``streamed_state`` do otherwise.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


@contextmanager
def parameter_state_by(make: Callable[..., Any], optimizer: Any) -> Iterator[None]:
    """Let ``make`` take the place of ``get_parameter_state_dp_zero`` in the block.

    Megatron's ``sharded_state_dict`` calls it. Attributes of the instances cover the method.

    Args:
        make: takes one of the distributed optimizers, and Megatron's options.
        optimizer: a chain of them, and of others.
    """
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
