"""Messages between pipeline stages without asking for their shapes."""

from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table

Shape = list[int]


class StaticShapeP2P(P2PCommunicator):
    """Megatron's messages between stages, with shapes that every stage knows beforehand.

    Rows have different lengths, and Megatron would send each message's shape first and wait for
    all work on the GPU with it. But every stage has the micro-batches, and the schedule says in
    which order they come.
    """

    def __init__(self, chunks: Sequence[GPTModel], tokens: Sequence[int]) -> None:
        """Prepare one pass over all micro-batches.

        Args:
            chunks: the model chunks of this stage.
            tokens: of every micro-batch, as many as this rank holds of it.
        """
        # Megatron asks ``_communicate_shapes`` for every message as long as the configuration says
        # ``variable_seq_lengths``: that is the one method that is replaced here.
        config = chunks[0].config
        super().__init__(parallel_state.get_pipeline_model_parallel_group(), config)
        table = get_schedule_table(
            len(tokens),
            len(chunks),
            config.microbatch_group_size_per_vp_stage,
        )

        def message_shapes(starts_pass: bool) -> Iterator[Shape]:
            """Yield the shapes of what arrives in a pass, forward or backward.

            Where the pass starts, nothing arrives for the first chunk of the schedule's table;
            for a further one arrives what the pass's last stage made of the chunk before it.
            """
            for micro_batch, chunk in table:
                if chunk > 0 or not starts_pass:
                    yield [tokens[micro_batch], 1, config.hidden_size]

        # Forward passes begin on the first stage and come from the previous one; backward passes
        # begin on the last stage and come from the next one. Both take the micro-batches in the
        # same order. Of a stage's chunks a backward pass takes the last one first; Megatron counts
        # them from there then (get_model_chunk_id), so the table's chunk 0 is still the one that
        # the pass starts with.
        self._shapes_from_previous = message_shapes(starts_pass=self.is_pp_first_stage)
        self._shapes_from_next = message_shapes(starts_pass=self.is_pp_last_stage)

    def _communicate_shapes(
        self,
        tensor_send_next: Any,
        tensor_send_prev: Any,
        recv_prev: bool,
        recv_next: bool,
    ) -> tuple[Shape | None, Shape | None]:
        """Return the shapes of what comes from the previous and the next stage, if anything."""
        from_previous = next(self._shapes_from_previous) if recv_prev else None
        from_next = next(self._shapes_from_next) if recv_next else None
        return from_previous, from_next
