"""Building the policy."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel

from megatron_gptoss.config import ModelConfig, ParallelConfig
from megatron_gptoss.cpu_layers import cpu_block_spec
from megatron_gptoss.transformer_config import build_transformer_config
from megatron_gptoss.transformer_engine_layers import transformer_engine_block_spec


def build_model(
    model: ModelConfig, parallel: ParallelConfig, dtype: torch.dtype = torch.float32, **overrides: Any
) -> GPTModel:
    """This rank's part of GPT-OSS, with uninitialised weights, on this rank's GPU or, where there is none, on the CPU.

    All parameters have ``dtype`` but the router's biases, which stay in fp32 at least.
    ``distributed.initialize`` must have run. Logits come out as [1, tokens, vocab_size / tensor] of a call with
    ``input_ids`` and ``position_ids`` [1, tokens] and ``packed_seq_params`` from a PackedBatch.
    """
    parallel.check_layout(model)
    config = build_transformer_config(model, parallel, dtype, perform_initialization=False, **overrides)
    on_gpu = torch.cuda.is_available()
    block_spec = transformer_engine_block_spec if on_gpu else cpu_block_spec
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # 0.19.2 announces that GPTModel will move into HybridModel
        return GPTModel(
            config=config,
            transformer_layer_spec=block_spec(config),
            vocab_size=model.vocab_size,
            max_sequence_length=model.max_length,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            position_embedding_type="none",
            share_embeddings_and_output_weights=False,
            parallel_output=True,
        ).to(torch.device("cuda", torch.cuda.current_device()) if on_gpu else "cpu")


PARTS = {"attention": ("self_attention.", ".input_layernorm."), "experts": (".mlp.", ".pre_mlp_layernorm.")}


def freeze(model: GPTModel, parts: Sequence[str]) -> None:
    """Let the named PARTS of every layer keep their weights. Before the trainer is made."""
    for name, parameter in model.named_parameters():
        if any(piece in name for part in parts for piece in PARTS[part]):
            parameter.requires_grad = False
