"""Forward passes over packed micro-batches with Megatron's pipeline schedules."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import batched
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from megatron_gptoss.block_sizes import PARTS_OF_STAGE
from megatron_gptoss.context_parallel.token_order import inverse_order
from megatron_gptoss.layers.adapted_vocabulary import AdaptedHead
from megatron_gptoss.likely_tokens import greedy_tokens, top_log_probs
from megatron_gptoss.log_probs import gather_hidden_states, log_probs_and_entropy
from megatron_gptoss.model import list_chunks
from megatron_gptoss.packed_sequence import PackedSequence
from megatron_gptoss.packing import PackedBatch
from megatron_gptoss.routing_replay import RoutingReplay
from megatron_gptoss.static_shape_p2p import StaticShapeP2P

Head = Callable[[Tensor, Tensor, dist.ProcessGroup, PackedBatch], Tensor]
"""Function that computes the output of a model.

Its arguments are hidden [tokens, hidden_size], the output weight of this rank
[vocab_size / tensor, hidden_size], the tensor-parallel group, and the batch.
"""


class LogProbScorer:
    """Scorer of packed micro-batches with a model built by ``build_model``."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Create a scorer for the model of this rank."""
        self.module = model
        self.chunks = list_chunks(model)
        self.model: list[Any] = list(self.chunks)
        """Chunks as passed to Megatron's schedule. A trainer wraps them."""
        self.replay: RoutingReplay | None = None
        """If set, routers use the experts that a batch prescribes."""

    def score(self, batches: Sequence[PackedBatch], temperature: float = 1.0) -> list[Tensor]:
        """Compute log p(labels) of every micro-batch. Collective.

        Args:
            batches: micro-batches of this data-parallel rank.
            temperature: divisor of the logits.

        Returns:
            fp32 [labels] per micro-batch, in nats, on all ranks with the same micro-batches.
        """

        def head(hidden: Tensor, weight: Tensor, group: Any, batch: PackedBatch) -> Tensor:
            log_probs, _ = label_log_probs(hidden, weight, batch, temperature, group)
            return log_probs

        return self._evaluate(batches, head)

    def greedy_tokens(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        """Return the tokens of greedy decoding at the place of every label. Collective.

        Returns:
            [labels] int64 per micro-batch.
        """

        def head(hidden: Tensor, weight: Tensor, group: Any, batch: PackedBatch) -> Tensor:
            return batch.at_labels(greedy_tokens(hidden, weight, group))

        return self._evaluate(batches, head)

    def top_log_probs(
        self, batches: Sequence[PackedBatch], k: int, temperature: float = 1.0
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the k most likely tokens at the place of every label. Collective.

        Args:
            batches: micro-batches of this data-parallel rank.
            k: number of tokens, at most the size of the vocabulary.
            temperature: divisor of the logits.

        Yields:
            Ids [labels, k] int32 and log-probs [labels, k] fp32 of every micro-batch, most likely
            first, on the host of all ranks with the same micro-batches.
        """

        def head(hidden: Tensor, weight: Tensor, group: Any, batch: PackedBatch) -> Tensor:
            ids, log_probs = top_log_probs(hidden, weight, k, temperature, group)
            # A schedule returns one tensor. fp32 holds ids exactly, because they are below 2^24.
            return batch.at_labels(torch.stack([ids.float(), log_probs.float()], dim=1))

        # A few micro-batches at a time, because the results of a whole step can fill a GPU. Enough
        # to fill a pipeline, and a multiple of its size, which the interleaved schedule requires.
        size = PARTS_OF_STAGE * parallel_state.get_pipeline_model_parallel_world_size()
        for part in batched(batches, size):
            for both in self._evaluate(part, head):
                both = both.cpu()
                yield both[:, 0].int(), both[:, 1]

    @torch.no_grad()
    def _evaluate(self, batches: Sequence[PackedBatch], head: Head) -> list[Tensor]:
        """Return the output of ``head`` for every micro-batch, without gradients."""
        # eval() also disables recomputation, for which routing replay would expect a second pass.
        self.module.eval()

        # Megatron's schedule expects a loss function. Its results are the loss, a number of tokens
        # for normalization, and the value that the schedule returns.
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
        """Run Megatron's pipeline schedule over all micro-batches.

        Args:
            batches: micro-batches of this data-parallel rank.
            head: function for the hidden states of the last layer.
            loss: (output of ``head``, shard of the batch) -> (loss, tokens, result).
            forward_only: whether to leave out the backward passes.

        Returns:
            Result of ``loss`` for every micro-batch on the last pipeline stage, else an empty list.
        """

        def forward_step(
            batches: Iterator[PackedBatch],
            model: Any,
        ) -> tuple[Tensor, Callable[..., Any]]:
            batch = self._local_shard(next(batches))

            # The first chunk processes a micro-batch first. The routes are for all chunks.
            if self.replay is not None and model is self.model[0]:
                self.replay.prescribe(batch)

            # Megatron needs a batch dimension. A packed row is a batch of size 1.
            output = model(
                batch.token_ids[None],
                batch.position_ids[None],
                None,
                packed_seq_params=PackedSequence.of(batch),
                output_processor=_output_processor(model, head, batch),
            )
            return output, lambda output: loss(output, batch)

        # A message between stages contains one rank's tokens of a row. Context and sequence
        # parallelism both split the tokens.
        local_tokens = [batch.tokens // alignment() for batch in batches]
        outputs = get_forward_backward_func()(
            forward_step_func=forward_step,
            # The interleaved schedule reads every micro-batch once per chunk.
            data_iterator=[iter(batches) for _ in self.model],
            model=self.model,
            num_microbatches=len(batches),
            # Required, but ignored with ``variable_seq_lengths``. StaticShapeP2P defines the shapes
            # of messages.
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
        """Return this context-parallel rank's part of a micro-batch, on the device of the model."""
        group = parallel_state.get_context_parallel_group()
        device = next(self.module.parameters()).device
        return batch.context_parallel_shard(group.rank(), group.size()).to(device)

    @staticmethod
    def _from_last_stage(values: list[Any]) -> list[Any]:
        """Return the values of the last pipeline stage on every stage. Collective."""
        group = parallel_state.get_pipeline_model_parallel_group()
        if group.size() == 1:
            return values

        # Broadcast objects, because earlier stages know neither the number of values nor their
        # shapes.
        box = [values]
        last_rank = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast_object_list(box, src=last_rank, group=group)
        return box[0]


def label_log_probs(
    hidden: Tensor,
    weight: Tensor,
    batch: PackedBatch,
    temperature: float,
    group: dist.ProcessGroup | None,
) -> tuple[Tensor, Tensor]:
    """Compute ``log_probs_and_entropy`` of the labels of a batch.

    Args:
        hidden: [tokens, hidden_size] of this context-parallel rank.
        weight: [vocab_size / tensor, hidden_size] rows of this rank.
        batch: the tokens and labels of this rank.
        temperature: divisor of the logits.
        group: tensor-parallel ranks.

    Returns:
        Log-probs and entropy, [labels] each.
    """
    prefixes = batch.prefixes
    if prefixes is None:
        return log_probs_and_entropy(hidden, weight, batch.labels, temperature, group)

    # Indexing instead of index_select, whose gradient is summed in any order on a GPU.
    log_probs, entropy = log_probs_and_entropy(
        hidden[prefixes.pair_rows], weight, prefixes.pair_labels, temperature, group
    )
    return log_probs[prefixes.pair_of_label], entropy[prefixes.pair_of_label]


def _output_processor(model: Any, head: Head, batch: PackedBatch) -> Callable[..., Tensor]:
    """Return the function that GPTModel calls on the last stage instead of its output layer."""

    def process(
        hidden_states: Tensor, output_layer: Any, output_weight: Tensor | None = None, **unused: Any
    ) -> Tensor:
        weight = _output_weight(model, output_layer, tied_weight=output_weight)
        hidden = gather_hidden_states(hidden_states, output_layer)
        return head(hidden, weight, output_layer.tp_group, batch)

    return process


def _output_weight(model: Any, output_layer: Any, tied_weight: Tensor | None) -> Tensor:
    """Return the output weight [vocab_size / tensor, hidden_size].

    ``tied_weight`` is the weight of the embedding if it replaces that of the output layer.
    """
    if isinstance(output_layer, AdaptedHead):
        return output_layer.output_weight()

    # Megatron gathers updated weights when a module is called. The output layer is never called.
    weight: Any = output_layer.weight if tied_weight is None else tied_weight
    gather_parameters([model], [weight])
    return weight


def gather_context_parallel(shards: list[Tensor], batches: Sequence[PackedBatch]) -> list[Tensor]:
    """Join values per label of all context-parallel ranks in the order of the rows. Collective.

    Args:
        shards: [labels of this rank, ...] values for each micro-batch.
        batches: the micro-batches.

    Returns:
        [labels, ...] values of each micro-batch, of the dtype of the shards.
    """
    group = parallel_state.get_context_parallel_group()
    if group.size() == 1:
        return shards

    rows = []
    for shard, batch in zip(shards, batches, strict=True):
        if batch.prefixes is not None:
            rows.append(_gather_unequal(shard, batch, group))
            continue
        gathered = [torch.empty_like(shard) for _ in range(group.size())]
        dist.all_gather(gathered, shard.contiguous(), group=group)
        order = inverse_order(batch.context_layout_over(group.size())).to(shard.device)
        # [T] in the order of the ranks -> [T] in the order of the row.
        rows.append(torch.cat(gathered)[order])
    return rows


def _gather_unequal(shard: Tensor, batch: PackedBatch, group: dist.ProcessGroup) -> Tensor:
    """Join the values per label of a row whose sequences share prefixes. Collective."""
    labels = [
        batch.rank_labels(rank, group.size()).to(shard.device) for rank in range(group.size())
    ]
    # Ranks have equally many tokens, but these predict different numbers of labels. Messages of a
    # collective have equal sizes.
    most = max(len(rank_labels) for rank_labels in labels)
    padded = shard.new_zeros(most, *shard.shape[1:])
    padded[: len(shard)] = shard
    gathered = [torch.empty_like(padded) for _ in labels]
    dist.all_gather(gathered, padded, group=group)

    row = shard.new_empty(len(batch.labels), *shard.shape[1:])
    for rank_labels, values in zip(labels, gathered, strict=True):
        row[rank_labels] = values[: len(rank_labels)]
    return row


@torch.no_grad()
def gather_parameters(
    chunks: Iterable[Any],
    parameters: Iterable[torch.nn.Parameter] | None = None,
) -> None:
    """Wait until this rank has the updated values of parameters. Collective over data parallelism.

    With the distributed optimizer a rank updates a part of the parameters, and Megatron gathers the
    weights of a module when its forward pass is called. Code that reads weights in another way must
    call this function first. Otherwise it silently gets old values.

    Args:
        chunks: chunks of a model. Chunks without Megatron's data-parallel wrapper are skipped.
        parameters: parameters to gather; None for all parameters of ``chunks``.
    """
    for chunk in chunks:
        if not isinstance(chunk, DistributedDataParallel):
            continue
        if not chunk.ddp_config.overlap_param_gather:
            continue

        for parameter in chunk.params_with_grad if parameters is None else parameters:
            bucket_group = chunk.param_to_bucket_group.get(parameter)
            if bucket_group is not None:
                # Do not start the next bucket, which Megatron would do for the next module: no
                # module is called here. Buckets that are already gathered are not gathered again.
                bucket_group.finish_param_sync(skip_next_bucket_dispatch=True)


def alignment() -> int:
    """Return the divisor that a packed row's number of tokens has in the current layout."""
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    context = parallel_state.get_context_parallel_world_size()
    return tensor * context
