"""Forward passes over packed micro-batches through Megatron's pipeline schedules."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from megatron_gptoss.context_parallel.token_order import inverse_order
from megatron_gptoss.layers.adapted_vocabulary import AdaptedHead
from megatron_gptoss.log_probs import gather_hidden_states, greedy_tokens, log_probs_and_entropy
from megatron_gptoss.model import chunks_of
from megatron_gptoss.packed_sequence import PackedSequence
from megatron_gptoss.packing import PackedBatch
from megatron_gptoss.routing_replay import RoutingReplay
from megatron_gptoss.static_shape_p2p import StaticShapeP2P

Head = Callable[[Tensor, Tensor, dist.ProcessGroup, PackedBatch], Tensor]
"""(hidden [tokens, hidden_size], output weight of this rank, tensor-parallel group, batch) -> the
model's output"""


class Scorer:
    """Scores packed micro-batches with what ``build_model`` built."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.module = model
        self.chunks = chunks_of(model)
        self.model: list[Any] = list(self.chunks)
        """The chunks as Megatron's schedule takes them: in a trainer, wrapped."""
        self.replay: RoutingReplay | None = None
        """If set, the routers take the experts that a batch prescribes."""

    def score(self, batches: Sequence[PackedBatch], temperature: float = 1.0) -> list[Tensor]:
        """Compute log p(labels) of every micro-batch, [tokens] each. Collective.

        Every rank that shares the micro-batches gets all of it.
        """

        def head(hidden: Tensor, weight: Tensor, group: Any, batch: PackedBatch) -> Tensor:
            log_probs, _ = log_probs_and_entropy(hidden, weight, batch.labels, temperature, group)
            return log_probs

        return self._evaluate(batches, head)

    def greedy_tokens(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        """Return what greedy decoding would choose at every position. Collective.

        int64 [tokens] per micro-batch.
        """

        def head(hidden: Tensor, weight: Tensor, group: Any, batch: PackedBatch) -> Tensor:
            return greedy_tokens(hidden, weight, group)

        return self._evaluate(batches, head)

    @torch.no_grad()
    def _evaluate(self, batches: Sequence[PackedBatch], head: Head) -> list[Tensor]:
        # Also turns off recomputation, of which routing replay would expect a second pass.
        self.module.eval()

        # What Megatron's schedule takes for a loss: the loss itself, a number of tokens by which
        # it would be normalised, and what the schedule is to return.
        def collect(values: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor, Tensor]:
            return values.new_zeros(()), torch.ones((), dtype=torch.int), values

        values = self._run_schedule(batches, head, collect, forward_only=True)
        if parallel_state.is_pipeline_last_stage():
            values = gather_context_parallel(values, batches)
        return self._from_last_stage(values)

    def _run_schedule(
        self,
        batches: Sequence[PackedBatch],
        head: Head,
        loss: Callable[..., Any],
        forward_only: bool,
    ) -> list[Any]:
        """Run forward passes and, unless ``forward_only``, backward passes of all micro-batches.

        Args:
            batches: this data-parallel rank's micro-batches, the same on all its ranks.
            head: applied to the last layer's hidden states.
            loss: (output of ``head``, shard of the batch) -> (loss, tokens, result).
            forward_only: no backward passes.

        Returns:
            On the last pipeline stage the result of ``loss`` of every micro-batch, else nothing.
        """

        def forward_step(
            batches: Iterator[PackedBatch],
            model: Any,
        ) -> tuple[Tensor, Callable[..., Any]]:
            batch = self._local_shard(next(batches))

            # The first chunk meets a micro-batch first; its routes are those of all chunks.
            if self.replay is not None and model is self.model[0]:
                self.replay.prescribe(batch)

            # Megatron wants a batch dimension; a packed row is a batch of one.
            output = model(
                batch.input_ids[None],
                batch.position_ids[None],
                None,
                packed_seq_params=PackedSequence.of(batch),
                output_processor=_output_processor(model, head, batch),
            )
            return output, lambda output: loss(output, batch)

        # A message between stages holds what one rank has of a row: context parallelism and
        # sequence parallelism each share its tokens out.
        local_tokens = [batch.tokens // alignment() for batch in batches]
        outputs = get_forward_backward_func()(
            forward_step_func=forward_step,
            # The interleaved schedule takes every micro-batch once for each chunk.
            data_iterator=[iter(batches) for _ in self.model],
            model=self.model,
            num_microbatches=len(batches),
            # Required, but Megatron ignores it with ``variable_seq_lengths``: shapes of messages are
            # what StaticShapeP2P says.
            seq_length=max(batch.tokens for batch in batches),
            micro_batch_size=1,
            forward_only=forward_only,
            p2p_communicator=StaticShapeP2P(self.chunks, local_tokens),
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        )
        if self.replay is not None:
            self.replay.check_consumed()
        return outputs

    def _local_shard(self, batch: PackedBatch) -> PackedBatch:
        """Move this context-parallel rank's tokens of a micro-batch to its device."""
        group = parallel_state.get_context_parallel_group()
        device = next(self.module.parameters()).device
        return batch.context_parallel_shard(group.rank(), group.size()).to(device)

    @staticmethod
    def _from_last_stage(values: list[Any]) -> list[Any]:
        """Return on every pipeline stage what the last one has. Collective."""
        group = parallel_state.get_pipeline_model_parallel_group()
        if group.size() == 1:
            return values

        # As objects: stages before the last know neither how many values there are nor their
        # shapes.
        box = [values]
        last_rank = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast_object_list(box, src=last_rank, group=group)
        return box[0]


def _output_processor(model: Any, head: Head, batch: PackedBatch) -> Callable[..., Tensor]:
    """Return what GPTModel calls on the last stage instead of its output layer."""

    def process(
        hidden_states: Tensor, output_layer: Any, output_weight: Tensor | None = None, **unused: Any
    ) -> Tensor:
        weight = _output_weight(model, output_layer, tied_weight=output_weight)
        hidden = gather_hidden_states(hidden_states, output_layer)
        return head(hidden, weight, output_layer.tp_group, batch)

    return process


def _output_weight(model: Any, output_layer: Any, tied_weight: Tensor | None) -> Tensor:
    """Return what hidden states are multiplied with, [vocab_size / tensor, hidden_size].

    ``tied_weight`` is the embedding, where it takes the place of the output layer's weight.
    """
    if isinstance(output_layer, AdaptedHead):
        return output_layer.output_weight()

    # The output layer is never called, so Megatron does not gather its weight by itself.
    weight: Any = output_layer.weight if tied_weight is None else tied_weight
    gather_parameters([model], [weight])
    return weight


def gather_context_parallel(shards: list[Tensor], batches: Sequence[PackedBatch]) -> list[Tensor]:
    """Join per-token values of all context-parallel ranks in the order of the rows. Collective."""
    group = parallel_state.get_context_parallel_group()
    if group.size() == 1:
        return shards

    rows = []
    for shard, batch in zip(shards, batches, strict=True):
        everyone = [torch.empty_like(shard) for _ in range(group.size())]
        dist.all_gather(everyone, shard.contiguous(), group=group)
        order = inverse_order(batch.context_layout_over(group.size())).to(shard.device)
        # [ranks * T / ranks] in the order of the ranks -> [T] in that of the row
        rows.append(torch.cat(everyone)[order])
    return rows


@torch.no_grad()
def gather_parameters(
    chunks: Iterable[Any],
    parameters: Iterable[torch.nn.Parameter] | None = None,
) -> None:
    """Wait until this rank has what the last optimizer step made of ``parameters``.

    Under the distributed optimizer a rank updates its share, and Megatron gathers a module's
    weights when its forward is called: whoever reads them in another way calls this first, or
    silently gets old ones. Collective over data-parallel ranks; does nothing for a model that is
    not in Megatron's data-parallel wrapper.

    Args:
        chunks: the wrapped chunks of a model.
        parameters: by default all of ``chunks``.
    """
    for chunk in chunks:
        if not isinstance(chunk, DistributedDataParallel):
            continue
        if not chunk.ddp_config.overlap_param_gather:
            continue

        for parameter in chunk.params_with_grad if parameters is None else parameters:
            bucket_group = chunk.param_to_bucket_group.get(parameter)
            if bucket_group is not None:
                # Without dispatching the next bucket, which Megatron does for the module that is
                # called after this one: no module is called here. A bucket that has been gathered
                # since the step is not gathered again.
                bucket_group.finish_param_sync(skip_next_bucket_dispatch=True)


def alignment() -> int:
    """Return of what the tokens of a packed row must be a multiple in the current layout."""
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    context = parallel_state.get_context_parallel_world_size()
    return tensor * context
