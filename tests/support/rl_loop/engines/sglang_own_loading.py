"""Compares the plugin's loading of MXFP4 experts with the loading code of SGLang 0.5.17.

A test runs it if SGLang is installed. It needs no GPU: the Hopper layouts are selected explicitly,
for scales the layout that the plugin has.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from gptoss_expert_layers import take_over
from gptoss_expert_storage import MAX_SCALE, WrongWeightsError
from gptoss_hopper_layout import SCALE_BIAS, SCALE_ROWS, SCALE_WARPS, to_plugin_bit_order
from gptoss_mxfp4_experts import install
from gptoss_synced_model import is_starting, synced
from sglang.srt.layers.quantization import mxfp4
from sglang.srt.models import gpt_oss
from triton_kernels.tensor_details import layout

EXPERTS, INTERMEDIATE, HIDDEN = 3, 192, 96
PREFIX = "layers.0.mlp.experts."
Method = mxfp4.Mxfp4MoEMethod
Model = gpt_oss.GptOssForCausalLM


def swizzle_whole_programs(self: layout.HopperMXScaleLayout, data: torch.Tensor) -> torch.Tensor:
    """Lay out scales [experts, blocks, rows], padded like the plugin's."""
    padding = -data.shape[-1] % SCALE_ROWS
    return original_swizzle(self, torch.nn.functional.pad(data, (0, padding)))


original_swizzle = layout.HopperMXScaleLayout.swizzle_data


def choose_hopper() -> None:
    layout.make_default_matmul_mxfp4_w_layout = lambda mx_axis: (
        layout.HopperMXValueLayout,
        {"mx_axis": mx_axis},
    )
    layout.make_default_matmul_mxfp4_w_scale_layout = lambda mx_axis, num_warps: (
        layout.HopperMXScaleLayout,
        {"mx_axis": mx_axis, "num_warps": SCALE_WARPS},
    )
    layout.HopperMXScaleLayout.swizzle_data = swizzle_whole_programs
    mxfp4.has_triton_kernels = True
    gpt_oss._is_cuda = False
    torch.cuda.empty_cache = lambda: None


def load_into_parameter(
    parameter: Any, weight: torch.Tensor, weight_name: str, **options: Any
) -> None:
    """Load a rank's part of MXFP4 experts like ``FusedMoE.weight_loader``."""
    place = tuple(slice(0, size) for size in weight.shape)
    parameter.data[place].copy_(weight)


def build(rank: int, ranks: int) -> tuple[Any, Any, Any]:
    """Return a model with one layer of experts, the layer, and its quantization method."""
    method = object.__new__(Method)
    method.use_marlin = method.use_deep_gemm = method.use_flashinfer = False
    method._fi_kernel = None
    method.use_triton_kernels = True

    experts = torch.nn.Module()
    experts.layer_id, experts.moe_ep_size = 0, 1
    experts.moe_tp_rank, experts.moe_tp_size = rank, ranks
    experts.num_local_experts, experts.hidden_size = EXPERTS, HIDDEN
    experts.intermediate_size_per_partition = INTERMEDIATE // ranks
    method.create_weights(
        experts,
        EXPERTS,
        HIDDEN,
        INTERMEDIATE // ranks,
        torch.bfloat16,
        with_bias=True,
        weight_loader=load_into_parameter,
    )
    experts.quant_method = method

    model = object.__new__(Model)
    torch.nn.Module.__init__(model)
    model.config = SimpleNamespace(intermediate_size=INTERMEDIATE, num_local_experts=EXPERTS)
    model.layers = torch.nn.ModuleList([torch.nn.Module()])
    model.layers[0].mlp = torch.nn.Module()
    model.layers[0].mlp.experts = experts
    gpt_oss.get_parallel = lambda: SimpleNamespace(
        moe_tp_rank=rank, moe_tp_size=ranks, moe_ep_rank=0, moe_ep_size=1
    )
    return model, experts, method


def random_weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def codes(*shape: int, largest: int = 255) -> torch.Tensor:
        return torch.randint(0, largest + 1, shape, dtype=torch.uint8, generator=generator)

    def floats(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    weights = {
        "gate_up_proj_blocks": codes(EXPERTS, 2 * INTERMEDIATE, HIDDEN // 32, 16),
        "gate_up_proj_scales": codes(EXPERTS, 2 * INTERMEDIATE, HIDDEN // 32, largest=MAX_SCALE),
        "gate_up_proj_bias": floats(EXPERTS, 2 * INTERMEDIATE),
        "down_proj_blocks": codes(EXPERTS, HIDDEN, INTERMEDIATE // 32, 16),
        "down_proj_scales": codes(EXPERTS, HIDDEN, INTERMEDIATE // 32, largest=MAX_SCALE),
        "down_proj_bias": floats(EXPERTS, HIDDEN),
    }
    return {f"{PREFIX}{name}": tensor for name, tensor in weights.items()}


def load_by_sglang(
    weights: dict[str, torch.Tensor], rank: int, ranks: int
) -> dict[str, torch.Tensor]:
    model, layer, method = build(rank, ranks)
    Model._load_mxfp4_experts_weights(model, list(weights.items()))
    method.process_weights_after_loading(layer)
    return {name: as_ours(name, t) for name, t in take_over(layer, method).storage.items()}


def as_ours(name: str, storage: torch.Tensor) -> torch.Tensor:
    """Return the part of SGLang's storage that corresponds to the plugin's."""
    if name.endswith("_bias"):
        return storage.clone()
    if name.endswith("_scale"):
        return storage + SCALE_BIAS
    return to_plugin_bit_order(storage)


def check_ours(
    expected: dict[str, torch.Tensor], weights: dict[str, torch.Tensor], rank: int, ranks: int
) -> None:
    model, layer, method = build(rank, ranks)
    # No parameters other than those that the server computes with, and fp32 biases.
    assert {name for name, _ in layer.named_parameters()} == {"w13_weight_bias", "w2_weight_bias"}
    assert is_starting(model)

    lacking = dict(list(weights.items())[1:])
    expect_refusal(f"the first is {PREFIX}gate_up_proj_blocks", model.load_weights, lacking.items())
    name = f"{PREFIX}down_proj_scales"
    too_large = weights | {name: torch.full_like(weights[name], MAX_SCALE + 1)}
    expect_refusal(f"{name} has the scale byte 129", model.load_weights, too_large.items())
    # Load from a checkpoint, then from a sync after the memory was released by sleep.
    for _ in range(2):
        assert list(model.load_weights(weights.items())) == []
        for name, tensor in method.gptoss_experts.storage.items():
            assert torch.equal(tensor, expected[name]), (rank, ranks, name)
            tensor.view(torch.uint8).fill_(0xA5)

        method.process_weights_after_loading(layer)
        assert not is_starting(model)
        known = synced(model)
        assert known is not None
        known.begin_sync()

    # A bucket of a sync has some tensors. The end of the sync reports missing ones.
    model.load_weights(lacking.items())
    expect_refusal(f"the first is {PREFIX}gate_up_proj_blocks", known.end_sync)


def expect_refusal(message: str, function: Callable[..., Any], *arguments: Any) -> None:
    try:
        function(*arguments)
    except WrongWeightsError as error:
        assert message in str(error), error
    else:
        raise AssertionError(f"not raised: {message}")


def main() -> None:
    choose_hopper()
    # Tensors other than experts are not tested, and there are none.
    Model.load_weights = lambda self, named: list(named)
    weights = random_weights()
    places = [(rank, ranks) for ranks in (1, 2, 3) for rank in range(ranks)]
    expected = {place: load_by_sglang(weights, *place) for place in places}
    install()
    for place in places:
        check_ours(expected[place], weights, *place)
    print(f"{len(places)} ranks")


if __name__ == "__main__":
    main()
