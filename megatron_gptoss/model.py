"""Construction of the policy model."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel

from megatron_gptoss.config import (
    AdapterConfig,
    ModelConfig,
    ParallelConfig,
    Quantization,
    check_quantization,
)
from megatron_gptoss.families.layer_registry import get_family_layers
from megatron_gptoss.layers.adapted_vocabulary import adapt_vocabulary
from megatron_gptoss.layers.adapters import freeze_base
from megatron_gptoss.layers.cpu_block import cpu_block_spec
from megatron_gptoss.layers.transformer_engine_block import transformer_engine_block_spec
from megatron_gptoss.transformer_config import PolicyTransformerConfig
from megatron_gptoss.transformer_settings import build_transformer_config

PARAMETER_GROUPS = {
    "attention": ("self_attention.", ".input_layernorm."),
    "experts": (".mlp.", ".pre_mlp_layernorm."),
}
"""Groups of parameters for ``freeze``, by parts of their names."""


def build_model(
    model: ModelConfig,
    parallel: ParallelConfig,
    dtype: torch.dtype = torch.float32,
    adapter: AdapterConfig | None = None,
    quantization: Quantization | None = None,
    **overrides: Any,
) -> torch.nn.Module:
    """Build this rank's part of a model with uninitialized weights, on its GPU or else the CPU.

    ``distributed.initialize`` must have run.

    Args:
        model: architecture.
        parallel: layout.
        dtype: data type of all parameters. Router biases are fp32 or wider.
        adapter: adapters to train; all other parameters are frozen. ``initialize_adapters`` sets
            their initial values. None to train all parameters.
        quantization: format through which experts are trained, or with an adapter the format of the frozen
            base; None for none.
        overrides: fields of the TransformerConfig to replace.

    Returns:
        A GPTModel. With ``parallel.virtual_pipeline`` above 1 a ModuleList of GPTModels: the chunks
        of this rank in the order of their layers. The arguments of a chunk are ``input_ids`` and
        ``position_ids`` [1, tokens] and ``packed_seq_params`` (see ``PackedSequence.of``). The last
        stage returns logits [1, tokens, vocab_size / tensor].

    Raises:
        ValueError: layout, adapters or quantization are impossible for the model.
        MissingPackageError: Transformer Engine or DeepEP is needed and not installed.
    """
    parallel.check_layout(model, adapter)
    check_quantization("quantization", quantization, model)
    if adapter is not None:
        adapter.check_ranks(model)
        adapter.check_base(quantization)

    config = build_transformer_config(
        model,
        parallel,
        dtype,
        perform_initialization=False,
        adapter=adapter,
        quantization=quantization,
        **overrides,
    )
    with warnings.catch_warnings():
        # megatron-core 0.19.2 warns that GPTModel will move into HybridModel.
        warnings.simplefilter("ignore")
        chunks = [_build_chunk(config, i) for i in range(parallel.virtual_pipeline)]

    if adapter is not None:
        _freeze_for_adapters(chunks)
    if len(chunks) == 1:
        return chunks[0]
    return torch.nn.ModuleList(chunks)


def _freeze_for_adapters(chunks: Sequence[Any]) -> None:
    """Freeze all parameters except adapters, and keep the backward pass through all layers."""
    for chunk in chunks:
        freeze_base(chunk)
        if chunk.pre_process:
            chunk.embedding.register_forward_hook(_require_gradient)


def _require_gradient(module: torch.nn.Module, inputs: Any, embeddings: torch.Tensor) -> None:
    """Make the output of a frozen embedding require a gradient."""
    # Activation recomputation runs only for inputs that require a gradient. Without this, adapters
    # in a recomputed part of the first layer would silently not be trained.
    if torch.is_grad_enabled():
        embeddings.requires_grad_()


def _build_chunk(config: PolicyTransformerConfig, index: int) -> GPTModel:
    """Build the model chunk ``index`` of this pipeline rank."""
    model = config.architecture
    layers = get_family_layers(model)
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        block_spec = transformer_engine_block_spec(layers.gpu_layer(config), config, index)
    else:
        device = torch.device("cpu")
        block_spec = cpu_block_spec(layers.cpu_layer(config), config, index)

    chunk = GPTModel(
        config=config,
        transformer_layer_spec=block_spec,
        vocab_size=model.vocab_size,
        max_sequence_length=model.max_length,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=index),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=index),
        # SinkAttention rotates queries and keys at explicit positions.
        position_embedding_type="none",
        share_embeddings_and_output_weights=model.tied_embeddings,
        # Every tensor-parallel rank keeps the logits of its vocabulary part.
        parallel_output=True,
        vp_stage=index,
    )
    if config.adapter is not None:
        adapt_vocabulary(chunk)
    return chunk.to(device)


def list_chunks(model: torch.nn.Module) -> list[GPTModel]:
    """Return the chunks of a ``build_model`` model in layer order."""
    if isinstance(model, torch.nn.ModuleList):
        return list(model)
    return [model]


def freeze(model: torch.nn.Module, groups: Sequence[str]) -> None:
    """Freeze groups of parameters in every layer.

    Call it before building the trainer, because Megatron's gradient buffers contain only parameters
    that require gradients.

    Args:
        model: model of this rank.
        groups: keys of PARAMETER_GROUPS.
    """
    for name, parameter in model.named_parameters():
        for group in groups:
            if any(piece in name for piece in PARAMETER_GROUPS[group]):
                parameter.requires_grad = False
