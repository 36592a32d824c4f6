"""Computes the tensors of an upcycled model from those of the dense one."""

from collections.abc import Iterator

import torch
from torch import Tensor

from converters.hf_directory import HfDirectory
from converters.mapping import NamedTensor
from converters.names import hf_shapes
from converters.reference.gpt_oss import SWISH_SLOPE
from converters.upcycling.architecture import UpcycleOptions
from converters.upcycling.calibration import CalibrationResult
from converters.upcycling.routers import derive_seed, router_weight
from megatron_gptoss.families.dense.config import DenseModelConfig
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig


def upcycled_tensors(
    source: HfDirectory,
    config: GptOssModelConfig,
    options: UpcycleOptions,
    measured: CalibrationResult,
    dtype: torch.dtype,
) -> Iterator[NamedTensor]:
    """Yield every tensor of the upcycled model by Hugging Face name, one layer in memory.

    Args:
        source: dense model.
        config: architecture of the upcycled model.
        options: properties of the upcycled model.
        measured: scales of ``up`` and biases of the routers.
        dtype: dtype of the tensors. They are computed in fp64.
    """
    dense = source.config
    assert isinstance(dense, DenseModelConfig)
    generator = torch.Generator()

    for name, shape in hf_shapes(config).items():
        # GPT-OSS has no tied embeddings, so the embedding is written twice.
        if name == "lm_head.weight" and dense.tied_embeddings:
            yield name, source.get("model.embed_tokens.weight").to(dtype)
            continue
        if not name.startswith("model.layers."):
            yield name, source.get(name).to(dtype)
            continue

        _, _, number, part = name.split(".", 3)
        layer = int(number)
        # Seed every tensor separately, so that its values do not depend on the order.
        generator.manual_seed(derive_seed(options.seed, name))
        if part.startswith("mlp.experts."):
            tensor = _experts(source, part, layer, measured.up_scales[layer], options, generator)
        elif part == "mlp.router.weight":
            # The weight with which ``measure`` has chosen the bias: it depends only on the seed and
            # the name.
            tensor = router_weight(config, options, layer)
        elif part == "mlp.router.bias":
            tensor = measured.router_biases[layer]
        elif part == "self_attn.sinks":
            tensor = torch.full(shape, options.sink)
        # GPT-OSS has biases in all projections of attention, a dense model in some or none.
        elif part.endswith(".bias") and not _has_bias(dense, part):
            tensor = torch.zeros(shape)
        else:
            tensor = source.get(name)
        yield name, tensor.to(dtype)


def _has_bias(dense: DenseModelConfig, part: str) -> bool:
    """Return True if the dense model has this bias of a layer."""
    projections = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    return dense.has_qkv_bias and part.startswith(projections)


def _experts(
    source: HfDirectory,
    part: str,
    layer: int,
    up_scale: Tensor,
    options: UpcycleOptions,
    generator: torch.Generator,
) -> Tensor:
    """Return a stacked tensor of the experts, fp64 [experts, ...].

    Args:
        source: dense model.
        part: name of the tensor without the prefix of the layer.
        layer: 0-based layer.
        up_scale: scale of every ``up`` channel, fp64 [intermediate_size].
        options: number of experts and noise.
        generator: source of the noise.
    """

    def copies(name: str) -> Tensor:
        """Return a copy of a dense matrix per expert with its own noise, [experts, in, out]."""
        matrix = source.get(f"model.layers.{layer}.mlp.{name}_proj.weight").double().T
        experts = matrix.expand(options.num_experts, *matrix.shape)
        if options.expert_noise == 0:
            return experts
        # Added before the scales, so that its size relative to the weights is equal in all
        # channels.
        noise = torch.randn(experts.shape, generator=generator)
        return experts + noise.double() * (options.expert_noise * matrix.std())

    if part == "mlp.experts.gate_up_proj":
        gate = copies("gate") / SWISH_SLOPE
        up = copies("up") * up_scale
        return torch.stack((gate, up), dim=-1).flatten(-2)  # gate and up channels alternate
    if part == "mlp.experts.gate_up_proj_bias":
        # The activation adds 1 to ``up``, and this bias takes it away.
        bias = torch.zeros(len(up_scale), 2)
        bias[:, 1] = -1
        return bias.flatten().expand(options.num_experts, -1)
    if part == "mlp.experts.down_proj":
        return copies("down") * (SWISH_SLOPE / up_scale)[:, None]
    assert part == "mlp.experts.down_proj_bias", part
    return torch.zeros(options.num_experts, source.config.hidden_size)
