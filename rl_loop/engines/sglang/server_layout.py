"""Parameters of SGLang servers, their source tensors, and their checksums.

SGLang does not return tensors of GPT-OSS (``/get_weights_by_name`` is an error for this model). Its
``/weights_checker`` hashes every parameter as each rank holds it: QKV fused, experts output-major,
biases of experts in fp32, and only the rank's shard. This module computes equal hashes from Hugging
Face tensors.

Parameters follow ``load_weights`` in ``srt/models/gpt_oss.py``, ``llama.py`` and ``qwen2.py`` of
SGLang 0.5.17. ``WeightChecker._compute_checksum`` in ``srt/utils/weight_checker.py`` chooses the
parameters that are hashed. ``server_hash`` has the hash.
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
"""SGLang pads embeddings to a multiple of this number of tokens. Padded ones are not compared.

``DEFAULT_VOCAB_PADDING_SIZE`` in ``srt/layers/vocab_parallel_embedding.py``.
"""
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
"""Dimension along which a parameter is sharded over tensor-parallel ranks, by the end of its name.

QKV and gate and up projections have separate rules. All other parameters are replicated.
"""
GPT_OSS_PARAMETERS = (
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "mlp.router.weight",
    "mlp.router.bias",
    "self_attn.sinks",
    "self_attn.o_proj.weight",
    "self_attn.o_proj.bias",
)
"""Parameters of a GPT-OSS layer with equal names in SGLang and in Hugging Face's checkpoints."""
DENSE_PARAMETERS = (
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "self_attn.o_proj.weight",
    "mlp.down_proj.weight",
)
"""Parameters of a Llama or Qwen2 layer with equal names in SGLang and Hugging Face."""
EXPERT_PARAMETERS = {
    "w13_weight": "gate_up_proj",
    "w13_weight_bias": "gate_up_proj_bias",
    "w2_weight": "down_proj",
    "w2_weight_bias": "down_proj_bias",
}
"""Hugging Face's name by SGLang's name, after ``mlp.experts.``."""
MXFP4_EXPERT_PARAMETERS = {
    "w13_weight": "gate_up_proj_blocks",
    "w13_weight_scale": "gate_up_proj_scales",
    "w13_weight_bias": "gate_up_proj_bias",
    "w2_weight": "down_proj_blocks",
    "w2_weight_scale": "down_proj_scales",
    "w2_weight_bias": "down_proj_bias",
}
"""Hugging Face's name by SGLang's name, for MXFP4 experts.

The plugin hashes them in the format in which they were sent, each rank its shard.
"""
EXPERT_ADAPTERS = {
    "w13_lora_a": "gate_up_proj.lora_A",
    "w13_lora_b": "gate_up_proj.lora_B",
    "w2_lora_a": "down_proj.lora_A",
    "w2_lora_b": "down_proj.lora_B",
}
"""Name in a sync by the plugin's name, for the factors of unmerged adapters."""


def sampled_parameters(
    config: ModelConfig, version: int, *, mxfp4_experts: bool = False, adapted: bool = False
) -> dict[str, list[str]]:
    """Choose parameters to compare after sync ``version``: one layer, and one outside the layers.

    Consecutive versions choose different ones, until every parameter was chosen.

    Args:
        config: configuration of the model.
        version: version of the weights.
        mxfp4_experts: whether experts' matrices are MXFP4.
        adapted: whether experts have unmerged adapters.

    Returns:
        {SGLang's parameter: names of the Hugging Face tensors that it consists of}.
    """
    outside_layers = ["model.norm.weight"]
    # Otherwise the server's parameters have additional rows, whose values are not known here.
    if config.vocab_size % VOCABULARY_PADDING == 0:
        outside_layers.append("model.embed_tokens.weight")
        if not config.tied_embeddings:
            outside_layers.append("lm_head.weight")
    chosen = outside_layers[version % len(outside_layers)]
    parameters = {chosen: [chosen]}

    layer = f"model.layers.{version % config.num_layers}"
    parameters |= _LAYER_PARAMETERS[type(config)](config, layer, mxfp4_experts)
    if adapted:
        for name, source in EXPERT_ADAPTERS.items():
            parameters[f"{layer}.mlp.experts.{name}"] = [f"{layer}.mlp.experts.{source}"]
    return parameters


def _gpt_oss_layer(
    config: GptOssModelConfig, layer: str, mxfp4_experts: bool
) -> dict[str, list[str]]:
    """Return the parameters of a GPT-OSS layer and the names of their source tensors.

    Args:
        config: configuration of the model.
        layer: name prefix of the layer.
        mxfp4_experts: whether its experts are MXFP4.
    """
    parameters = {f"{layer}.{suffix}": [f"{layer}.{suffix}"] for suffix in GPT_OSS_PARAMETERS}
    for kind in ("weight", "bias"):
        parameters |= _fused(f"{layer}.self_attn", "qkv_proj", "qkv", kind)
    experts = MXFP4_EXPERT_PARAMETERS if mxfp4_experts else EXPERT_PARAMETERS
    for name, source in experts.items():
        parameters[f"{layer}.mlp.experts.{name}"] = [f"{layer}.mlp.experts.{source}"]
    return parameters


def _dense_layer(config: DenseModelConfig, layer: str, mxfp4_experts: bool) -> dict[str, list[str]]:
    """Return the parameters of a Llama or Qwen2 layer. ``mxfp4_experts`` is ignored: it has no experts."""
    parameters = {f"{layer}.{suffix}": [f"{layer}.{suffix}"] for suffix in DENSE_PARAMETERS}
    parameters |= _fused(f"{layer}.self_attn", "qkv_proj", "qkv", "weight")
    if config.has_qkv_bias:
        parameters |= _fused(f"{layer}.self_attn", "qkv_proj", "qkv", "bias")
    parameters |= _fused(f"{layer}.mlp", "gate_up_proj", ("gate", "up"), "weight")
    return parameters


def _fused(module: str, name: str, parts: Iterable[str], kind: str) -> dict[str, list[str]]:
    """Return the parameter that fuses several projections, with the names of its source tensors."""
    return {f"{module}.{name}.{kind}": [f"{module}.{part}_proj.{kind}" for part in parts]}


_LAYER_PARAMETERS: dict[type[ModelConfig], Callable[[Any, str, bool], dict[str, list[str]]]] = {
    GptOssModelConfig: _gpt_oss_layer,
    DenseModelConfig: _dense_layer,
}


class SglangLayout:
    """ServerLayout of SGLang servers."""

    def __init__(
        self,
        config: ModelConfig,
        ranks: int,
        server_info: dict[str, Any],
        *,
        mxfp4_experts: bool = False,
        adapted: bool = False,
    ) -> None:
        """Describe servers.

        Args:
            config: configuration of the model.
            ranks: tensor-parallel ranks of each server.
            server_info: a server's response to /server_info.
            mxfp4_experts: whether experts' matrices are MXFP4.
            adapted: whether experts have unmerged adapters.
        """
        self._config = config
        self._mxfp4_experts = mxfp4_experts
        self._adapted = adapted
        self._ranks = ranks
        self._info = server_info

    def parameters(self, versions: range) -> dict[str, list[str]]:
        """Return the parameters to compare after the syncs ``versions``.

        Returns:
            {SGLang's parameter: names of the Hugging Face tensors that it consists of}.
        """
        sources: dict[str, list[str]] = {}
        for version in versions:
            sources |= sampled_parameters(
                self._config, version, mxfp4_experts=self._mxfp4_experts, adapted=self._adapted
            )
        if self._info["ep_size"] > 1 or self._info["enable_dp_attention"]:
            # With these options the shards of all other parameters are not known here.
            for name in list(sources):
                if "norm" not in name and "router" not in name:
                    del sources[name]
        return sources

    def checksums(self, parameter: str, parts: Sequence[torch.Tensor]) -> list[str]:
        """Return the checksum of a parameter on each rank, as ``/weights_checker`` reports it.

        Args:
            parameter: SGLang's name of the parameter.
            parts: its Hugging Face tensors in their shapes, in the order of ``parameters``.
        """
        return [self._checksum(parameter, list(parts), rank) for rank in range(self._ranks)]

    def _checksum(self, parameter: str, parts: list[torch.Tensor], rank: int) -> str:
        dtype = self._dtype(parameter)
        shard = [part.to(dtype) for part in self._shard(parameter, parts, rank)]
        hash_parts = cpu_hash if self._info["device"] == "cpu" else gpu_hash
        # SGLang reports 16 hexadecimal digits.
        return f"{hash_parts(shard):016x}"

    def _dtype(self, parameter: str) -> torch.dtype:
        """Return the dtype in which SGLang holds a parameter."""
        if parameter.endswith(tuple(EXPERT_ADAPTERS)):
            return torch.bfloat16
        if self._mxfp4_experts and ".experts.w" in parameter and not parameter.endswith("_bias"):
            return torch.uint8
        if parameter.endswith("_weight_bias"):
            return torch.float32
        if parameter.endswith("sinks"):
            # SGLang chooses the dtype of sinks by the backend that reads them.
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
        """Return a rank's shard of a parameter, as views to join along dim 0."""
        if "qkv_proj" in parameter:
            return self._shard_qkv(parts, rank)
        # Gate and up projections of experts are one tensor, those of dense layers are two.
        if len(parts) > 1:
            return [part.chunk(self._ranks)[rank] for part in parts]

        (part,) = parts
        if self._mxfp4_experts and ".experts.w" in parameter:
            return [self._shard_mxfp4(parameter, part, rank)]

        # The outputs of the ranks' down projections are summed, so only one rank has the bias.
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

    def _shard_mxfp4(self, parameter: str, part: torch.Tensor, rank: int) -> torch.Tensor:
        """Return a rank's shard of MXFP4 experts: whole blocks of their intermediate size."""
        # Equal to ``ExpertShard.of`` of the plugin, which follows SGLang. The last ranks may have fewer
        # blocks: 2,880 / 32 = 90 blocks over 4 ranks are 23, 23, 23 and 21.
        per_rank = -(-self._config.intermediate_size // BLOCK // self._ranks) * BLOCK
        first = rank * per_rank
        last = min(first + per_rank, self._config.intermediate_size)
        if "w13_weight" in parameter or parameter.endswith("w13_lora_b"):
            # Rows of gate and up alternate.
            return part[:, 2 * first : 2 * last]
        if parameter.endswith("w2_lora_a"):
            return part[:, :, first:last]
        if parameter.endswith(("w13_lora_a", "w2_lora_b")):
            return part
        if parameter.endswith("_bias"):
            return torch.zeros_like(part) if rank else part
        return part[:, :, first // BLOCK : last // BLOCK]

    def _shard_qkv(self, parts: list[torch.Tensor], rank: int) -> list[torch.Tensor]:
        """Return a rank's heads of Q, K and V.

        If there are more ranks than key/value heads, adjacent ranks hold the same head.
        """
        # QKVParallelLinear of SGLang replicates key/value heads: with 8 heads and 16 ranks, ranks 0
        # and 1 hold head 0.
        q, k, v = parts
        kv_shards = min(self._ranks, self._config.num_key_value_heads)
        kv_shard = rank * kv_shards // self._ranks
        return [
            q.chunk(self._ranks)[rank],
            k.chunk(kv_shards)[kv_shard],
            v.chunk(kv_shards)[kv_shard],
        ]
