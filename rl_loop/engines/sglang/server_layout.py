"""Parameters of SGLang servers, the tensors that they are made of, and their checksums.

SGLang's GPT-OSS returns no tensors (``/get_weights_by_name`` is an error for this model). Its
``/weights_checker`` hashes every parameter as each rank holds it: QKV fused, experts output-major,
biases of experts in fp32, each rank with its own shard. This module makes the same hashes of Hugging
Face tensors.

Parameters follow ``load_weights`` in ``srt/models/gpt_oss.py``, ``llama.py`` and ``qwen2.py`` of SGLang
0.5.17. ``WeightChecker._compute_checksum`` in ``srt/utils/weight_checker.py`` chooses those that are
hashed. The hash is in ``server_hash``.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from converters.hf_layouts import BLOCK
from megatron_gptoss.config import ModelConfig
from megatron_gptoss.families.dense.config import DenseModelConfig
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
from rl_loop.engines.sglang.server_hash import cpu_hash, gpu_hash

VOCABULARY_PADDING = 64
"""SGLang pads embeddings to a multiple of this (``DEFAULT_VOCAB_PADDING_SIZE`` in
``srt/layers/vocab_parallel_embedding.py``); padded ones are not compared."""
SHARDED_DIMENSIONS = {
    "sinks": 0,
    "embed_tokens.weight": 0,
    "lm_head.weight": 0,
    "o_proj.weight": 1,
    "w13_weight": 1,
    "w13_weight_bias": 1,
    "w2_weight": 2,
    "down_proj.weight": 1,
}
"""Dimension along which tensor-parallel ranks share a parameter, by the end of its name. QKV and gate
and up projections have rules of their own. Each rank holds all of every other parameter."""
GPT_OSS_PARAMETERS = (
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "mlp.router.weight",
    "mlp.router.bias",
    "self_attn.sinks",
    "self_attn.o_proj.weight",
    "self_attn.o_proj.bias",
)
"""Parameters of a GPT-OSS layer that have one name in SGLang and in Hugging Face's checkpoints."""
DENSE_PARAMETERS = (
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "self_attn.o_proj.weight",
    "mlp.down_proj.weight",
)
"""The same of a layer of Llama or Qwen2."""
EXPERT_PARAMETERS = {
    "w13_weight": "gate_up_proj",
    "w13_weight_bias": "gate_up_proj_bias",
    "w2_weight": "down_proj",
    "w2_weight_bias": "down_proj_bias",
}
"""SGLang's name -> Hugging Face's, behind ``mlp.experts.``."""
PACKED_EXPERT_PARAMETERS = {
    "w13_weight": "gate_up_proj_blocks",
    "w13_weight_scale": "gate_up_proj_scales",
    "w13_weight_bias": "gate_up_proj_bias",
    "w2_weight": "down_proj_blocks",
    "w2_weight_scale": "down_proj_scales",
    "w2_weight_bias": "down_proj_bias",
}
"""The same of experts that are MXFP4. Our plugin hashes them as they were sent, each rank its
part."""


def sampled_parameters(
    config: ModelConfig, version: int, *, packed: bool = False
) -> dict[str, list[str]]:
    """Choose what to compare after sync ``version``: one layer, and one parameter outside them.

    Returns SGLang's parameters and the Hugging Face tensors that each is made of. Other versions
    take others, until every parameter had its turn.
    """
    outside_layers = ["model.norm.weight"]
    if config.vocab_size % VOCABULARY_PADDING == 0:
        outside_layers.append("model.embed_tokens.weight")
        if not config.tied_embeddings:
            outside_layers.append("lm_head.weight")
    chosen = outside_layers[version % len(outside_layers)]
    parameters = {chosen: [chosen]}

    layer = f"model.layers.{version % config.num_layers}"
    return parameters | _LAYER_PARAMETERS[type(config)](config, layer, packed)


def _gpt_oss_layer(config: GptOssModelConfig, layer: str, packed: bool) -> dict[str, list[str]]:
    """Return the parameters of a GPT-OSS layer and the tensors that they are made of.

    ``packed``: its experts are MXFP4."""
    parameters = {f"{layer}.{suffix}": [f"{layer}.{suffix}"] for suffix in GPT_OSS_PARAMETERS}
    for kind in ("weight", "bias"):
        parameters |= _fused(f"{layer}.self_attn", "qkv_proj", "qkv", kind)
    experts = PACKED_EXPERT_PARAMETERS if packed else EXPERT_PARAMETERS
    for name, source in experts.items():
        parameters[f"{layer}.mlp.experts.{name}"] = [f"{layer}.mlp.experts.{source}"]
    return parameters


def _dense_layer(config: DenseModelConfig, layer: str, packed: bool) -> dict[str, list[str]]:
    """Return the same of a layer of Llama or Qwen2, which has nothing to pack."""
    parameters = {f"{layer}.{suffix}": [f"{layer}.{suffix}"] for suffix in DENSE_PARAMETERS}
    parameters |= _fused(f"{layer}.self_attn", "qkv_proj", "qkv", "weight")
    if config.has_qkv_bias:
        parameters |= _fused(f"{layer}.self_attn", "qkv_proj", "qkv", "bias")
    parameters |= _fused(f"{layer}.mlp", "gate_up_proj", ("gate", "up"), "weight")
    return parameters


def _fused(module: str, name: str, parts: Iterable[str], kind: str) -> dict[str, list[str]]:
    """Return the parameter of projections that SGLang holds in one."""
    return {f"{module}.{name}.{kind}": [f"{module}.{part}_proj.{kind}" for part in parts]}


_LAYER_PARAMETERS: dict[type[ModelConfig], Callable[[Any, str, bool], dict[str, list[str]]]] = {
    GptOssModelConfig: _gpt_oss_layer,
    DenseModelConfig: _dense_layer,
}


class SglangLayout:
    """A ServerLayout of SGLang's servers."""

    def __init__(
        self,
        config: ModelConfig,
        ranks: int,
        server_info: dict[str, Any],
        *,
        packed: bool = False,
    ) -> None:
        """Describe servers.

        Args:
            config: of the model.
            ranks: tensor-parallel ranks of each server.
            server_info: what a server answers to /server_info.
            packed: whether experts' matrices are MXFP4.
        """
        self._config = config
        self._packed = packed
        self._ranks = ranks
        self._info = server_info

    def parameters(self, versions: range) -> dict[str, list[str]]:
        """Return the parameters to compare after syncs ``versions``, and the Hugging Face tensors
        that each is made of."""
        sources: dict[str, list[str]] = {}
        for version in versions:
            sources |= sampled_parameters(self._config, version, packed=self._packed)
        if self._info["ep_size"] > 1 or self._info["enable_dp_attention"]:
            # The shards of all other parameters on a rank are not known here.
            for name in list(sources):
                if "norm" not in name and "router" not in name:
                    del sources[name]
        return sources

    def checksums(self, parameter: str, parts: Sequence[torch.Tensor]) -> list[str]:
        """Return the checksum of a parameter on each rank, as ``/weights_checker`` does."""
        return [self._checksum(parameter, list(parts), rank) for rank in range(self._ranks)]

    def _checksum(self, parameter: str, parts: list[torch.Tensor], rank: int) -> str:
        dtype = self._dtype(parameter)
        shard = [part.to(dtype) for part in self._shard(parameter, parts, rank)]
        hash_parts = cpu_hash if self._info["device"] == "cpu" else gpu_hash
        return f"{hash_parts(shard):016x}"

    def _dtype(self, parameter: str) -> torch.dtype:
        """Return the dtype in which SGLang holds a parameter."""
        if self._packed and ".experts.w" in parameter and not parameter.endswith("_bias"):
            return torch.uint8
        if parameter.endswith("_weight_bias"):
            return torch.float32
        if parameter.endswith("sinks"):
            if self._info["attention_backend"] == "trtllm_mha":
                return torch.float32
            return torch.bfloat16
        dtype: torch.dtype = getattr(torch, self._info["dtype"])
        return dtype

    def _shard(
        self,
        parameter: str,
        parts: list[torch.Tensor],
        rank: int,
    ) -> list[torch.Tensor]:
        """Cut out what tensor-parallel ``rank`` holds: views that are joined along dim 0."""
        if "qkv_proj" in parameter:
            return self._shard_qkv(parts, rank)
        # Gate and up projections of experts are one tensor already.
        if len(parts) > 1:
            return [part.chunk(self._ranks)[rank] for part in parts]

        (part,) = parts
        if self._packed and ".experts.w" in parameter:
            return [self._shard_packed(parameter, part, rank)]

        # The ranks' outputs of the down projection are added up, so only one rank has its bias.
        if parameter.endswith("w2_weight_bias"):
            return [torch.zeros_like(part) if rank else part]

        # Hugging Face's experts are [experts, inputs, outputs], SGLang's [experts, outputs,
        # inputs].
        if parameter.endswith(("w13_weight", "w2_weight")):
            part = part.mT
        for suffix, dimension in SHARDED_DIMENSIONS.items():
            if parameter.endswith(suffix):
                return [part.chunk(self._ranks, dimension)[rank]]
        return [part]

    def _shard_packed(self, parameter: str, part: torch.Tensor, rank: int) -> torch.Tensor:
        """Cut out a rank's experts, in whole blocks of their intermediate size."""
        # As the plugin's Shard.of cuts, which follows SGLang: the last ranks may have less, but all
        # have whole blocks. 2,880 / 32 = 90 blocks over 4 ranks are 23, 23, 23 and 21.
        per_rank = -(-self._config.intermediate_size // BLOCK // self._ranks) * BLOCK
        first = rank * per_rank
        last = min(first + per_rank, self._config.intermediate_size)
        if "w13_weight" in parameter:
            # Rows of gate and up take turns.
            return part[:, 2 * first : 2 * last]
        if parameter.endswith("_bias"):
            return torch.zeros_like(part) if rank else part
        return part[:, :, first // BLOCK : last // BLOCK]

    def _shard_qkv(self, parts: list[torch.Tensor], rank: int) -> list[torch.Tensor]:
        """Cut out a rank's heads of Q, K and V.

        With more ranks than key/value heads, neighbouring ranks have the same one.
        """
        # SGLang's QKVParallelLinear replicates a key/value head where ranks are more than heads:
        # with 8 heads and 16 ranks, ranks 0 and 1 have head 0.
        q, k, v = parts
        kv_shards = min(self._ranks, self._config.num_key_value_heads)
        kv_shard = rank * kv_shards // self._ranks
        return [
            q.chunk(self._ranks)[rank],
            k.chunk(kv_shards)[kv_shard],
            v.chunk(kv_shards)[kv_shard],
        ]
