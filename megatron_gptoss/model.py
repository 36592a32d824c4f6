"""Building the policy."""

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
from megatron_gptoss.families.layer_registry import layers_of
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
"""What ``freeze`` can freeze: pieces of the names of its parameters."""


def build_model(
    model: ModelConfig,
    parallel: ParallelConfig,
    dtype: torch.dtype = torch.float32,
    adapter: AdapterConfig | None = None,
    quantization: Quantization | None = None,
    **overrides: Any,
) -> torch.nn.Module:
    """Build this rank's share of a model with uninitialised weights, on its GPU or else the CPU.

    ``distributed.initialize`` must have run. All parameters have ``dtype`` but the routers'
    biases, which are fp32 at least. With an ``adapter`` everything else is frozen;
    ``initialize_adapters`` gives adapters their values. With ``quantization`` the experts are trained
    through that format, or frozen in it if there is an ``adapter``. ``overrides`` replace fields of
    the TransformerConfig.

    Returns:
        A GPTModel, or with ``parallel.virtual_pipeline`` above 1 a ModuleList of so many: the
        chunks of this rank in the order of their layers. Called with ``input_ids`` and
        ``position_ids`` [1, tokens] and ``packed_seq_params``, ``PackedSequence.of`` a PackedBatch,
        it returns logits [1, tokens, vocab_size / tensor].

    Raises:
        ValueError: when layout, adapters or quantization are impossible for the model.
        MissingPackageError: when Transformer Engine or DeepEP is needed and missing.
    """
    parallel.check_layout(model, adapter)
    check_quantization("quantization", quantization, model)
    if adapter is not None:
        adapter.check_ranks(model)

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
        # megatron-core 0.19.2 announces that GPTModel will move into HybridModel.
        warnings.simplefilter("ignore")
        chunks = [_build_chunk(config, i) for i in range(parallel.virtual_pipeline)]

    if adapter is not None:
        for chunk in chunks:
            freeze_base(chunk)
            if chunk.pre_process:
                chunk.embedding.register_forward_hook(_require_gradient)

    if len(chunks) == 1:
        return chunks[0]
    return torch.nn.ModuleList(chunks)


def _require_gradient(module: torch.nn.Module, inputs: Any, embeddings: torch.Tensor) -> None:
    """Give what a frozen embedding returns a gradient that nobody needs.

    A part of a layer that is computed again in the backward pass, and whose input has no gradient,
    would never get there: its adapters would silently not be trained.
    """
    if torch.is_grad_enabled():
        embeddings.requires_grad_()


def _build_chunk(config: PolicyTransformerConfig, index: int) -> GPTModel:
    """Build one of the model chunks of this pipeline rank."""
    model = config.architecture
    layers = layers_of(model)
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
        # Every tensor-parallel rank keeps the logits of its share of the vocabulary.
        parallel_output=True,
        vp_stage=index,
    )
    if config.adapter is not None:
        adapt_vocabulary(chunk)
    return chunk.to(device)


def chunks_of(model: torch.nn.Module) -> list[GPTModel]:
    """Return what ``build_model`` built as a list in the order of the layers."""
    if isinstance(model, torch.nn.ModuleList):
        return list(model)
    return [model]


def freeze(model: torch.nn.Module, groups: Sequence[str]) -> None:
    """Exclude the named PARAMETER_GROUPS of every layer from training.

    Must run before the trainer is built: Megatron's gradient buffers hold what is trained.
    """
    for name, parameter in model.named_parameters():
        for group in groups:
            if any(piece in name for piece in PARAMETER_GROUPS[group]):
                parameter.requires_grad = False
