"""What a run that has no memory left is told."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron_gptoss.planning.memory_advice import Hardware, memory_plan
from megatron_gptoss.planning.memory_inputs import MemoryInputs


@contextmanager
def out_of_memory_explained(inputs: MemoryInputs) -> Iterator[None]:
    """Add to an OutOfMemoryError from inside what was predicted and what to set next."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        # The advice needs the GPU's size; without a GPU nothing fits.
        gigabytes = 0.0
        if torch.cuda.is_available():
            _, total = torch.cuda.mem_get_info()
            gigabytes = total / 1e9
        first_line = str(error).splitlines()[0]
        plan = memory_plan(inputs, Hardware(gigabytes))
        message = f"{first_line}\nThe prediction for this run was:\n{plan}"
        raise torch.OutOfMemoryError(message) from error
