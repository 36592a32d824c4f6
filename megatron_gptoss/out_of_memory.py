"""Explanation of out-of-memory errors by the memory prediction of the run."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron_gptoss.planning.memory_advice import Hardware, memory_plan
from megatron_gptoss.planning.memory_inputs import MemoryInputs


@contextmanager
def out_of_memory_explained(inputs: MemoryInputs) -> Iterator[None]:
    """Add the memory plan of the run to an OutOfMemoryError raised in the block.

    Args:
        inputs: models, layout and batch of the run.

    Raises:
        torch.OutOfMemoryError: the block raised one. The message has the prediction and settings
            that need less memory.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        # The advice needs the size of the GPU. Without a GPU it lists all settings.
        gigabytes = 0.0
        if torch.cuda.is_available():
            _, total = torch.cuda.mem_get_info()
            gigabytes = total / 1e9
        first_line = str(error).splitlines()[0]
        plan = memory_plan(inputs, Hardware(gigabytes))
        message = f"{first_line}\nThe prediction for this run was:\n{plan}"
        raise torch.OutOfMemoryError(message) from error
