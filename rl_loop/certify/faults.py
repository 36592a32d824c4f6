"""Known faults of GPT-OSS implementations, with their effects and sources."""

from dataclasses import dataclass, replace
from itertools import product

from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
from rl_loop.certify.variants import EVERY_LAYER, FaultyVariant


@dataclass(frozen=True)
class ModelFault:
    """Difference from GPT-OSS."""

    name: str
    """Name in reports, such as "one key too many in the window"."""
    variant: FaultyVariant
    source: str = ""
    """Place where it was seen: issue threads, or a page of this project's docs."""


# The window includes the token itself: a token sees at most ``sliding_window`` keys. Attention
# kernels that take the number of earlier keys need one less (``window_size`` of flash-attn).
WINDOW = (
    ModelFault("one key too few in the window", FaultyVariant(window_offset=-1)),
    ModelFault(
        "one key too many in the window",
        FaultyVariant(window_offset=1),
        "NVIDIA/Megatron-LM#2771, NVIDIA-NeMo/Megatron-Bridge#2656, ml-explore/mlx-lm#390",
    ),
    ModelFault(
        "no layer has a window",
        FaultyVariant(windows="none"),
        "NVIDIA/TensorRT-Model-Connect#400",
    ),
    ModelFault("every layer has a window", FaultyVariant(windows="all")),
    ModelFault("odd layers have the window instead of even layers", FaultyVariant(windows="odd")),
)

SINKS = (
    ModelFault(
        "sinks are absent",
        FaultyVariant(sinks="absent"),
        "PrimeIntellect-ai/prime-rl#3397 (under context parallelism), "
        "sgl-project/sglang#30050 (batched decoding on MLX)",
    ),
)

# These faults and the next ones leave log-probs exact. Only gradients show them.
SINK_GRADIENTS = (
    ModelFault(
        "the sinks' own gradient is dropped",
        FaultyVariant(sinks="no gradient"),
        "Dao-AILab/flash-attention#1973",
    ),
    ModelFault(
        "sinks are dropped in the backward pass",
        FaultyVariant(sinks="absent in the backward pass"),
        "a kernel with sinks in its forward pass only: Dao-AILab/flash-attention#2102, "
        "Dao-AILab/flash-attention#1895",
    ),
)

OTHER_GRADIENTS = (
    ModelFault(
        "the router gets no gradient from the experts' weights",
        FaultyVariant(router_gradient=False),
    ),
)

# The released models set ``truncate: false``: the ramp is not rounded to whole channels.
YARN = (
    ModelFault(
        "YaRN's ramp is truncated to whole channels",
        FaultyVariant(yarn="ramp rounded"),
        "vllm-project/vllm#27722, sgl-project/sglang#14270",
    ),
    ModelFault("positions end at YaRN's original length", FaultyVariant(yarn="cut")),
    ModelFault("YaRN is absent", FaultyVariant(yarn="absent"), "NVIDIA/TensorRT-Model-Connect#400"),
    ModelFault(
        "YaRN's concentration of queries and keys is absent", FaultyVariant(yarn="no concentration")
    ),
    ModelFault(
        "YaRN uses the longest length instead of the original length",
        FaultyVariant(yarn="wrong length"),
        "NVIDIA-NeMo/Speech#14686, NVIDIA/Megatron-LM#1418",
    ),
    ModelFault("positions are rounded to bf16", FaultyVariant(bf16_positions=True)),
)

ROUTER = (
    ModelFault(
        "the router's bias is absent",
        FaultyVariant(router_bias="absent"),
        "pytorch/torchtitan#2319",
    ),
    ModelFault(
        "the router's bias is in bf16",
        FaultyVariant(router_bias="bf16"),
        "NVIDIA/Megatron-LM#1482 (a bias in fp32 that became bf16)",
    ),
    ModelFault(
        "the router's softmax is taken over all experts",
        FaultyVariant(router_softmax="all"),
        "pytorch/torchtitan#2258; Megatron's moe_router_pre_softmax",
    ),
)

ACTIVATION = (
    ModelFault(
        "the activation is not clamped",
        FaultyVariant(clamp="absent"),
        "sgl-project/sglang#39939; config.json without swiglu_limit",
    ),
    ModelFault(
        "the clamp comes before the bias",
        FaultyVariant(clamp="before bias"),
        "the order that tenstorrent/tt-metal#49619 spells out",
    ),
    ModelFault("1 is not added to up", FaultyVariant(up_offset=0.0)),
    ModelFault("the gate's slope is 1 (SiLU) instead of 1.702", FaultyVariant(slope=1.0)),
)

# The released checkpoints alternate gate and up channels in the weights and in the biases.
INTERLEAVING = (
    ModelFault(
        "gate and up are read as halves instead of alternating channels",
        FaultyVariant(concatenated="all"),
        "ROCm/ATOM#845, vllm-project/vllm#29273",
    ),
    ModelFault(
        "only the biases of gate and up are read as halves",
        FaultyVariant(concatenated="biases"),
        "a conversion like that of ROCm/ATOM#845, of the biases only",
    ),
    ModelFault(
        "only the weights of gate and up are read as halves",
        FaultyVariant(concatenated="weights"),
        "a conversion like that of ROCm/ATOM#845, of the weights only",
    ),
    ModelFault("gate and up are swapped", FaultyVariant(swapped_gate_up=True)),
)

BIASES = (
    ModelFault(
        "the experts' biases are absent",
        FaultyVariant(absent_biases=("gate_up_proj_bias", "down_proj_bias")),
        "kernels of models without biases: tenstorrent/tt-metal#49619",
    ),
    ModelFault(
        "the biases of q, k and v are absent",
        FaultyVariant(absent_biases=("q_proj.bias", "k_proj.bias", "v_proj.bias")),
    ),
    ModelFault(
        "the bias of attention's output is absent", FaultyVariant(absent_biases=("o_proj.bias",))
    ),
    ModelFault(
        "biases are in bf16",
        FaultyVariant(bf16_biases=True),
    ),
)

TRANSPOSED = "NVIDIA-NeMo/Megatron-Bridge#3743, THUDM/slime#1840"

PACKING = (
    ModelFault(
        "tokens attend to earlier sequences of the row",
        FaultyVariant(leaky_packing=True),
        "huggingface/transformers#39997, huggingface/transformers#46634",
    ),
    ModelFault(
        "tokens attend to earlier sequences of the row, and positions continue",
        FaultyVariant(leaky_packing=True, running_positions=True),
    ),
)

DECODING = (
    ModelFault(
        "one key too few in the window of decoded tokens",
        FaultyVariant(decoding_window_offset=-1),
        "SGLang's triton attention: sgl-project/sglang#32087, docs/design/sglang.md",
    ),
    ModelFault(
        "one key too many in the window of decoded tokens",
        FaultyVariant(decoding_window_offset=1),
        "a rotating cache of another length than the mask: ml-explore/mlx-lm#390",
    ),
)


def orientation_faults(config: GptOssModelConfig) -> tuple[ModelFault, ...]:
    """Return faults of square matrices: in all layers, and in each layer."""
    # A transposed matrix of two different sizes does not load, so it needs no check.
    if config.hidden_size != config.intermediate_size:
        return ()
    name = "down projections, which are square, are transposed"
    everywhere = FaultyVariant(transposed_down=EVERY_LAYER)
    faults = [ModelFault(f"the experts' {name}", everywhere, TRANSPOSED)]
    for layer in range(config.num_layers):
        one = replace(everywhere, transposed_down=layer)
        faults.append(ModelFault(f"in layer {layer} the experts' {name}", one, TRANSPOSED))
    return tuple(faults)


def update_faults(config: GptOssModelConfig) -> tuple[ModelFault, ...]:
    """Return faults of an update from one set of weights to another."""
    unnamed = "engines that ignore unknown names and answer success (docs/design/sglang.md)"
    faults = [
        ModelFault(
            "no tensor was updated",
            FaultyVariant(not_updated=""),
            "vllm-project/vllm#32718 (weights are read from a cache)",
        ),
        ModelFault("the experts were not updated", FaultyVariant(not_updated=".experts."), unnamed),
        ModelFault("sinks were not updated", FaultyVariant(not_updated=".sinks"), unnamed),
        ModelFault("biases were not updated", FaultyVariant(not_updated="bias"), unnamed),
        ModelFault("the routers were not updated", FaultyVariant(not_updated=".router."), unnamed),
    ]

    # Experts are sharded over ranks, so each one can be missing on its own.
    own_experts_only = "a rank that sends only its own experts: verl-project/verl#7195"
    for layer, expert in product(range(config.num_layers), range(config.num_experts)):
        name = f"expert {expert} of layer {layer} kept its old weights"
        variant = FaultyVariant(expert_not_updated=(layer, expert))
        faults.append(ModelFault(name, variant, own_experts_only))
    # An update has its own code for layouts, which can be wrong even if the first weights are
    # right.
    return (*faults, *orientation_faults(config), *INTERLEAVING)
