"""Communication between pipeline stages with shapes that are known in advance."""

from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table

Shape = list[int]
"""Shape of a message."""


class StaticShapeP2P(P2PCommunicator):
    """Megatron's communicator between stages, with shapes that every stage computes itself.

    Rows have different lengths. Megatron would therefore send the shape before each message, and
    wait for all GPU work to do so. But every stage has the micro-batches, and the schedule defines
    their order.
    """

    def __init__(self, chunks: Sequence[GPTModel], tokens: Sequence[int]) -> None:
        """Prepare one pass over all micro-batches.

        Args:
            chunks: model chunks of this stage.
            tokens: number of this rank's tokens in every micro-batch.
        """
        # With ``variable_seq_lengths``, Megatron calls ``_communicate_shapes`` for every message.
        # It is the only method that is replaced here.
        config = chunks[0].config
        super().__init__(parallel_state.get_pipeline_model_parallel_group(), config)
        table = get_schedule_table(
            len(tokens),
            len(chunks),
            config.microbatch_group_size_per_vp_stage,
        )

        def message_shapes(starts_pass: bool) -> Iterator[Shape]:
            """Yield the shapes of received messages in forward or backward passes.

            On the stage where the pass starts, the first chunk of the schedule's table receives
            nothing. Each other chunk receives the output of the previous chunk from the last stage
            of the pass.
            """
            for micro_batch, chunk in table:
                if chunk > 0 or not starts_pass:
                    yield [tokens[micro_batch], 1, config.hidden_size]

        # Forward passes start on the first stage and arrive from the previous stage. Backward
        # passes start on the last stage and arrive from the next stage. Both process micro-batches
        # in the same order. A backward pass starts with the last chunk of a stage. Megatron then
        # counts chunks from the end (get_model_chunk_id), so chunk 0 of the table is the first in
        # both cases.
        self._shapes_from_previous = message_shapes(starts_pass=self.is_pp_first_stage)
        self._shapes_from_next = message_shapes(starts_pass=self.is_pp_last_stage)

    def _communicate_shapes(
        self,
        tensor_send_next: Any,
        tensor_send_prev: Any,
        recv_prev: bool,
        recv_next: bool,
    ) -> tuple[Shape | None, Shape | None]:
        """Return the shapes of the messages from the previous and the next stage, or None."""
        from_previous = next(self._shapes_from_previous) if recv_prev else None
        from_next = next(self._shapes_from_next) if recv_next else None
        return from_previous, from_next
