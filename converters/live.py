"""Weights of a running Megatron model: filling it from Hugging Face tensors and reading it out as such.

Both work on this rank's part of the model under any tensor, pipeline, expert and data parallel layout (expert tensor
parallel size 1), with the groups of ``megatron.core.parallel_state``."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from converters.errors import ConversionError
from converters.hf_directory import ExpertStack
from converters.names import NamedTensor, ParameterMapping, global_name, hf_tensors, parameter_mappings
from megatron_gptoss.config import ModelConfig
from megatron_gptoss.model import chunks_of

GetTensor = Callable[[str], torch.Tensor] | Callable[[str], torch.Tensor | ExpertStack]


@torch.no_grad()
def load_hf_weights(model: torch.nn.Module, config: ModelConfig, get_tensor: GetTensor) -> None:
    """Fill every parameter of this rank's ``model`` in place; other dtypes are converted to the parameter's.

    ``get_tensor`` returns the Hugging Face tensor of a name and is called only for names of which this rank holds a
    part; if it answers with an ExpertStack, only this rank's experts are read. Not collective. Raises ConversionError
    (a ValueError) naming the tensor when it is missing or has another shape, or when the model has a parameter that the
    name table does not know."""
    tp = parallel_state.get_tensor_model_parallel_group()
    fetched: dict[str, torch.Tensor | ExpertStack] = {}
    # in the order of the table the experts that share one tensor come together, so one read serves them all
    for mapping, parameter in _local_parameters(model, config):
        if any(name not in fetched for name in mapping.hf_names):
            try:
                fetched = {name: get_tensor(name) for name in mapping.hf_names}
            except KeyError as error:
                raise ConversionError(f"tensor {error.args[0]} is missing from the weights to load") from None
        parts: list[Any] = []
        for name, shape in zip(mapping.hf_names, mapping.part_shapes, strict=True):
            whole = fetched[name]
            expected = shape if mapping.expert is None else (config.num_experts, *shape)
            if tuple(whole.shape) != expected:
                raise ConversionError(
                    f"tensor {name} has shape {list(whole.shape)}, but the model configuration says {list(expected)}"
                )
            parts.append(whole if mapping.expert is None else whole[mapping.expert])
        local = mapping.shard(mapping.to_megatron(*parts), tp.rank(), tp.size())
        if local.shape != parameter.shape:
            raise ConversionError(
                f"parameter {mapping.name} has shape {list(parameter.shape)} on this rank, but its share of "
                f"{', '.join(mapping.hf_names)} has {list(local.shape)}: model and configuration differ"
            )
        parameter.copy_(local)


def _local_parameters(model: torch.nn.Module, config: ModelConfig) -> list[tuple[ParameterMapping, torch.nn.Parameter]]:
    """What this rank holds, in the order of the name table."""
    table = parameter_mappings(config)
    experts = config.num_experts // parallel_state.get_expert_model_parallel_world_size()
    first_expert = experts * parallel_state.get_expert_model_parallel_rank()
    local = {}
    for chunk in chunks_of(model):
        for name, parameter in chunk.named_parameters():
            full_name = global_name(name, chunk.decoder.layers[0].layer_number - 1, first_expert)
            if full_name not in table:
                raise ConversionError(
                    f"parameter {name} ({full_name} of the whole model) has no counterpart in Hugging Face's GPT-OSS "
                    f"of {config.num_layers} layers and {config.num_experts} experts"
                )
            local[full_name] = parameter
    return [(mapping, local[name]) for name, mapping in table.items() if name in local]


@torch.no_grad()
def export_hf_weights(model: torch.nn.Module, config: ModelConfig, transposed: bool = False) -> Iterator[NamedTensor]:
    """All Hugging Face tensors of the model, on global rank 0, in the order of ``names.hf_shapes``.

    Collective: every rank must run the iterator to its end; on other ranks than 0 it yields nothing. dtype and device
    are the parameter's: of a bf16 model the router's bias comes in fp32. Each byte is sent once, from the lowest rank
    that holds it to rank 0. Rank 0 holds one Hugging Face tensor at a time (of a layer's experts, the stack of all)
    besides its own weights. A yielded tensor may share memory with a parameter: copy it to keep it beyond the next
    optimizer step. ``transposed``: see ``names.hf_tensors``."""
    tp_size = parallel_state.get_tensor_model_parallel_world_size()
    tp_rank, rank = parallel_state.get_tensor_model_parallel_rank(), dist.get_rank()
    local = {mapping.name: (mapping, parameter.detach()) for mapping, parameter in _local_parameters(model, config)}
    own = {name: parameter.dtype for name, (_, parameter) in local.items()}, tp_rank
    everyone = [own] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    device = next(model.parameters()).device

    def shards(mapping: ParameterMapping) -> Iterator[tuple[int, torch.dtype]]:
        """Per tensor-parallel shard the rank that provides it and its dtype."""
        for shard in range(1 if mapping.tensor_parallel_dim is None else tp_size):
            for holder, (dtypes, holder_shard) in enumerate(everyone):
                if mapping.name in dtypes and (mapping.tensor_parallel_dim is None or holder_shard == shard):
                    yield holder, dtypes[mapping.name]
                    break
            else:
                raise ConversionError(f"no rank holds part {shard} of parameter {mapping.name}: the layout is broken")

    def receive(mapping: ParameterMapping) -> torch.Tensor:
        received = []
        for holder, dtype in shards(mapping):
            if holder == 0:
                received.append(local[mapping.name][1])
                continue
            buffer = torch.empty(mapping.local_shape(tp_size), dtype=dtype, device=device)
            dist.recv(buffer, src=holder)
            received.append(buffer)
        return mapping.unshard(received)

    if rank == 0:
        yield from hf_tensors(config, receive, transposed)
        return
    for mapping, parameter in local.values():
        if rank in [holder for holder, _ in shards(mapping)]:
            dist.send(parameter.contiguous(), dst=0)
