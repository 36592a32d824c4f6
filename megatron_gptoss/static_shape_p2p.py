"""Messages between pipeline stages without asking for their shapes."""

from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table


class StaticShapeP2P(P2PCommunicator):
    """Every stage has the micro-batches and so knows what comes next. Megatron would send its shape first, and wait for
    all work on the GPU with every message."""

    def __init__(self, chunks: Sequence[GPTModel], tokens: Sequence[int]) -> None:
        """``chunks``: of this stage; ``tokens``: of every micro-batch, on this rank."""
        config = chunks[0].config
        super().__init__(parallel_state.get_pipeline_model_parallel_group(), config)
        table = get_schedule_table(len(tokens), len(chunks), config.microbatch_group_size_per_vp_stage)

        def shapes(leads: bool) -> Iterator[list[int]]:
            """In the order of a pass, forward or backward. Where it begins, nothing comes for the first chunk, and for
            a further one what the last stage made of the chunk before it."""
            to = [micro_batch for micro_batch, chunk in table if chunk > 0 or not leads]
            return iter([[tokens[micro_batch], 1, config.hidden_size] for micro_batch in to])

        self.from_previous, self.from_next = shapes(self.is_pp_first_stage), shapes(self.is_pp_last_stage)

    def _communicate_shapes(self, _: Any, __: Any, recv_prev: bool, recv_next: bool) -> tuple[Any, Any]:
        return next(self.from_previous) if recv_prev else None, next(self.from_next) if recv_next else None
