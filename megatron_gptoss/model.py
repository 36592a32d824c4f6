"""Building the policy."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel

from megatron_gptoss.config import ModelConfig, ParallelConfig
from megatron_gptoss.layers.cpu_block import cpu_block_spec
from megatron_gptoss.layers.transformer_engine_block import transformer_engine_block_spec
from megatron_gptoss.transformer_config import build_transformer_config


def build_model(
    model: ModelConfig, parallel: ParallelConfig, dtype: torch.dtype = torch.float32, **overrides: Any
) -> torch.nn.Module:
    """This rank's part of GPT-OSS, with uninitialised weights, on this rank's GPU or, where there is none, on the CPU.

    A GPTModel, or with ``parallel.virtual_pipeline`` above 1 a ModuleList of that many, the chunks of this rank in the
    order of their layers. All parameters have ``dtype`` but the router's biases, which stay in fp32 at least.
    ``distributed.initialize`` must have run. Logits come out as [1, tokens, vocab_size / tensor] of a call with
    ``input_ids`` and ``position_ids`` [1, tokens] and ``packed_seq_params`` from a PackedBatch."""
    parallel.check_layout(model)
    config = build_transformer_config(model, parallel, dtype, perform_initialization=False, **overrides)
    on_gpu = torch.cuda.is_available()
    block_spec = transformer_engine_block_spec if on_gpu else cpu_block_spec

    def chunk(stage: int) -> GPTModel:
        return GPTModel(
            config=config,
            transformer_layer_spec=block_spec(config, stage),
            vocab_size=model.vocab_size,
            max_sequence_length=model.max_length,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            position_embedding_type="none",
            share_embeddings_and_output_weights=False,
            parallel_output=True,
            vp_stage=stage,
        ).to(torch.device("cuda", torch.cuda.current_device()) if on_gpu else "cpu")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # 0.19.2 announces that GPTModel will move into HybridModel
        chunks = [chunk(stage) for stage in range(parallel.virtual_pipeline)]
    return torch.nn.ModuleList(chunks) if len(chunks) > 1 else chunks[0]


def chunks_of(model: torch.nn.Module) -> list[GPTModel]:
    """What ``build_model`` returned, as a list in the order of the layers."""
    return list(model) if isinstance(model, torch.nn.ModuleList) else [model]


PARTS = {"attention": ("self_attention.", ".input_layernorm."), "experts": (".mlp.", ".pre_mlp_layernorm.")}


def freeze(model: torch.nn.Module, parts: Sequence[str]) -> None:
    """Let the named PARTS of every layer keep their weights. Before the trainer is made."""
    for name, parameter in model.named_parameters():
        if any(piece in name for part in parts for piece in PARTS[part]):
            parameter.requires_grad = False
