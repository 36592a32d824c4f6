"""Known faults of GPT-OSS implementations, with their effects and sources."""

from dataclasses import dataclass, replace
from itertools import product

from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
from rl_loop.certify.variants import EVERY_LAYER, Variant


@dataclass(frozen=True)
class Fault:
    """Difference from GPT-OSS."""

    name: str
    """Name in reports, such as "one key too many in the window"."""
    variant: Variant
    source: str = ""
    """Place where it was seen: issue threads, or a page of this project's docs."""


# The window includes the token itself: a token sees at most ``sliding_window`` keys. Attention
# kernels that take the number of earlier keys need one less (``window_size`` of flash-attn).
WINDOW = (
    Fault("one key too few in the window", Variant(window_offset=-1)),
    Fault(
        "one key too many in the window",
        Variant(window_offset=1),
        "NVIDIA/Megatron-LM#2771, NVIDIA-NeMo/Megatron-Bridge#2656, ml-explore/mlx-lm#390",
    ),
    Fault(
        "no layer has a window",
        Variant(windows="none"),
        "NVIDIA/TensorRT-Model-Connect#400",
    ),
    Fault("every layer has a window", Variant(windows="all")),
    Fault("odd layers have the window instead of even layers", Variant(windows="odd")),
)

SINKS = (
    Fault(
        "sinks are absent",
        Variant(sinks="absent"),
        "PrimeIntellect-ai/prime-rl#3397 (under context parallelism), "
        "sgl-project/sglang#30050 (batched decoding on MLX)",
    ),
)

# These faults and the next ones leave log-probs exact. Only gradients show them.
SINK_GRADIENTS = (
    Fault(
        "the sinks' own gradient is dropped",
        Variant(sinks="no gradient"),
        "Dao-AILab/flash-attention#1973",
    ),
    Fault(
        "sinks are dropped in the backward pass",
        Variant(sinks="absent in the backward pass"),
        "a kernel with sinks in its forward pass only: Dao-AILab/flash-attention#2102, "
        "Dao-AILab/flash-attention#1895",
    ),
)

OTHER_GRADIENTS = (
    Fault("the router gets no gradient from the experts' weights", Variant(router_gradient=False)),
)

# The released models set ``truncate: false``: the ramp is not rounded to whole channels.
YARN = (
    Fault(
        "YaRN's ramp is truncated to whole channels",
        Variant(yarn="ramp rounded"),
        "vllm-project/vllm#27722, sgl-project/sglang#14270",
    ),
    Fault("positions end at YaRN's original length", Variant(yarn="cut")),
    Fault("YaRN is absent", Variant(yarn="absent"), "NVIDIA/TensorRT-Model-Connect#400"),
    Fault("YaRN's concentration of queries and keys is absent", Variant(yarn="no concentration")),
    Fault(
        "YaRN uses the longest length instead of the original length",
        Variant(yarn="wrong length"),
        "NVIDIA-NeMo/Speech#14686, NVIDIA/Megatron-LM#1418",
    ),
    Fault("positions are rounded to bf16", Variant(bf16_positions=True)),
)

ROUTER = (
    Fault(
        "the router's bias is absent",
        Variant(router_bias="absent"),
        "pytorch/torchtitan#2319",
    ),
    Fault(
        "the router's bias is in bf16",
        Variant(router_bias="bf16"),
        "NVIDIA/Megatron-LM#1482 (a bias in fp32 that became bf16)",
    ),
    Fault(
        "the router's softmax is taken over all experts",
        Variant(router_softmax="all"),
        "pytorch/torchtitan#2258; Megatron's moe_router_pre_softmax",
    ),
)

ACTIVATION = (
    Fault(
        "the activation is not clamped",
        Variant(clamp="absent"),
        "sgl-project/sglang#39939; config.json without swiglu_limit (docs/sglang.md)",
    ),
    Fault(
        "the clamp comes before the bias",
        Variant(clamp="before bias"),
        "the order that tenstorrent/tt-metal#49619 spells out",
    ),
    Fault("1 is not added to up", Variant(up_offset=0.0)),
    Fault("the gate's slope is 1 (SiLU) instead of 1.702", Variant(slope=1.0)),
)

# The released checkpoints alternate gate and up channels in the weights and in the biases.
INTERLEAVING = (
    Fault(
        "gate and up are read as halves instead of alternating channels",
        Variant(concatenated="all"),
        "ROCm/ATOM#845, vllm-project/vllm#29273",
    ),
    Fault(
        "only the biases of gate and up are read as halves",
        Variant(concatenated="biases"),
        "a conversion like that of ROCm/ATOM#845, of the biases only",
    ),
    Fault(
        "only the weights of gate and up are read as halves",
        Variant(concatenated="weights"),
        "a conversion like that of ROCm/ATOM#845, of the weights only",
    ),
    Fault("gate and up are swapped", Variant(swapped_gate_up=True)),
)

BIASES = (
    Fault(
        "the experts' biases are absent",
        Variant(absent_biases=("gate_up_proj_bias", "down_proj_bias")),
        "kernels of models without biases: tenstorrent/tt-metal#49619",
    ),
    Fault(
        "the biases of q, k and v are absent",
        Variant(absent_biases=("q_proj.bias", "k_proj.bias", "v_proj.bias")),
    ),
    Fault("the bias of attention's output is absent", Variant(absent_biases=("o_proj.bias",))),
    Fault(
        "biases are in bf16",
        Variant(bf16_biases=True),
    ),
)

TRANSPOSED = "NVIDIA-NeMo/Megatron-Bridge#3743, THUDM/slime#1840"

PACKING = (
    Fault(
        "tokens attend to earlier sequences of the row",
        Variant(leaky_packing=True),
        "huggingface/transformers#39997, huggingface/transformers#46634",
    ),
    Fault(
        "tokens attend to earlier sequences of the row, and positions continue",
        Variant(leaky_packing=True, running_positions=True),
    ),
)

DECODING = (
    Fault(
        "one key too few in the window of decoded tokens",
        Variant(decoding_window_offset=-1),
        "SGLang's triton attention: sgl-project/sglang#32087, docs/sglang.md",
    ),
    Fault(
        "one key too many in the window of decoded tokens",
        Variant(decoding_window_offset=1),
        "a rotating cache of another length than the mask: ml-explore/mlx-lm#390",
    ),
)


def orientation_faults(config: GptOssModelConfig) -> tuple[Fault, ...]:
    """Return faults of square matrices: in all layers, and in each layer."""
    # A transposed matrix of two different sizes does not load, so it needs no check.
    if config.hidden_size != config.intermediate_size:
        return ()
    name = "down projections, which are square, are transposed"
    everywhere = Variant(transposed_down=EVERY_LAYER)
    faults = [Fault(f"the experts' {name}", everywhere, TRANSPOSED)]
    for layer in range(config.num_layers):
        one = replace(everywhere, transposed_down=layer)
        faults.append(Fault(f"in layer {layer} the experts' {name}", one, TRANSPOSED))
    return tuple(faults)


def update_faults(config: GptOssModelConfig) -> tuple[Fault, ...]:
    """Return faults of an update from one set of weights to another."""
    unnamed = "engines that ignore unknown names and answer success (docs/sglang.md)"
    faults = [
        Fault(
            "no tensor was updated",
            Variant(stale=""),
            "vllm-project/vllm#32718 (weights are read from a cache)",
        ),
        Fault("the experts were not updated", Variant(stale=".experts."), unnamed),
        Fault("sinks were not updated", Variant(stale=".sinks"), unnamed),
        Fault("biases were not updated", Variant(stale="bias"), unnamed),
        Fault("the routers were not updated", Variant(stale=".router."), unnamed),
    ]

    # Experts are sharded over ranks, so each one can be missing on its own.
    own_experts_only = "a rank that sends only its own experts: verl-project/verl#7195"
    for layer, expert in product(range(config.num_layers), range(config.num_experts)):
        name = f"expert {expert} of layer {layer} kept its old weights"
        variant = Variant(stale_expert=(layer, expert))
        faults.append(Fault(name, variant, own_experts_only))
    # An update has its own code for layouts, which can be wrong even if the first weights are
    # right.
    return (*faults, *orientation_faults(config), *INTERLEAVING)
