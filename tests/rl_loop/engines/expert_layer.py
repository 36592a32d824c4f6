"""A layer of experts of GPT-OSS's width on a GPU, as SGLang's servers compute it with triton_kernels.

Its matrices lie as the plugin keeps them where the plugin makes their values, else as triton_kernels does.
Needs triton_kernels, SGLang, and the plugin's modules on the path of imports.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
from typing import Any

import torch

EXPERTS, TOP_K, WIDTH = 32, 4, 2880


OURS = "gptoss_expert_values"
"""The module without which nothing reads the plugin's layouts."""


def layer_of_experts(tokens: int, *, scales: tuple[int, int], is_ours: bool) -> torch.Tensor:
    """Return what the experts make of random tokens, the same every time: bf16 [tokens, width].

    Args:
        scales: lowest scale byte, and one above the highest.
        is_ours: lays matrices out as the plugin does.
    """
    from triton_kernels.numerics import InFlexData
    from triton_kernels.swiglu import swiglu_fn

    layers = importlib.import_module("gptoss_expert_layers")
    layout = importlib.import_module("gptoss_hopper_layout")
    matmul_ogs: Any = importlib.import_module("triton_kernels.matmul_ogs")
    # As ``triton_kernel_fused_experts_with_bias`` there calls it.
    sglang: Any = importlib.import_module(
        "sglang.srt.layers.moe.fused_moe_triton.triton_kernels_moe"
    )
    generator = torch.Generator("cuda").manual_seed(tokens)

    def random_bytes(*shape: int, low: int = 0, high: int = 256) -> torch.Tensor:
        return torch.randint(
            low, high, shape, dtype=torch.uint8, device="cuda", generator=generator
        )

    def matrices(rows: int) -> tuple[object, object]:
        packed = random_bytes(EXPERTS, rows, WIDTH // 2)
        bytes_of = random_bytes(EXPERTS, rows, WIDTH // 32, low=scales[0], high=scales[1])
        if is_ours:
            values = packed.new_empty(EXPERTS, *layout.value_storage_shape(*packed.shape[1:]))
            layout.swizzle_values(packed, values)
            shape = bytes_of.shape[1:]
            of_blocks = packed.new_empty(EXPERTS, *layout.scale_storage_shape(*shape))
            layout.swizzle_scales(bytes_of, tuple(shape), of_blocks)
        else:
            values, of_blocks = laid_out_by_triton_kernels(packed, bytes_of)
        values, of_blocks = layers.wrap(values, of_blocks, (EXPERTS, rows, WIDTH // 2))
        flex = matmul_ogs.FlexCtx(rhs_data=InFlexData())
        return values, matmul_ogs.PrecisionConfig(weight_scale=of_blocks, flex_ctx=flex)

    rows = torch.randn(tokens, WIDTH, device="cuda", generator=generator).bfloat16()
    logits = torch.randn(tokens, EXPERTS, device="cuda", generator=generator).bfloat16()
    data, gather, scatter = _route(logits)

    swiglu = matmul_ogs.FusedActivation(
        matmul_ogs.FnSpecs("swiglu", swiglu_fn, ("alpha", "limit"), reduction_n=2), (1.702, 7.0)
    )
    bias = torch.randn(EXPERTS, 2 * WIDTH, device="cuda", generator=generator)
    gate_up, config = matrices(2 * WIDTH)
    hidden = rows.new_full((1, tokens * TOP_K, WIDTH), torch.nan)
    sglang.matmul_ogs(
        rows,
        gate_up,
        bias,
        data,
        gather_indx=gather,
        precision_config=config,
        fused_activation=swiglu,
        y=hidden,
    )
    down, config = matrices(WIDTH)
    result = rows.new_full((1, tokens, WIDTH), torch.nan)
    sglang.matmul_ogs(
        hidden[0],
        down,
        bias[:, :WIDTH].contiguous(),
        data,
        scatter_indx=scatter,
        precision_config=config,
        gammas=data.gate_scal,
        y=result,
    )
    return result[0]


def laid_out_by_triton_kernels(
    packed: torch.Tensor, scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the storage of values and scales, scales padded as the plugin pads them."""
    hopper: Any = importlib.import_module("triton_kernels.tensor_details.layout")
    layout = importlib.import_module("gptoss_hopper_layout")
    values = hopper.HopperMXValueLayout(packed.mT.shape, mx_axis=1).swizzle_data(packed.mT)

    rows = -scales.shape[1] % layout.SCALE_ROWS
    padded = torch.nn.functional.pad(scales, (0, 0, 0, rows)).mT
    warps = layout.SCALE_WARPS
    of_blocks = hopper.HopperMXScaleLayout(padded.shape, mx_axis=1, num_warps=warps)
    return values.mT, of_blocks.swizzle_data(padded).mT


def _route(logits: torch.Tensor) -> tuple[Any, Any, Any]:
    """Choose four experts for each token [tokens, experts], in what triton_kernels takes."""
    routing = importlib.import_module("gptoss_expert_routing")
    topk = importlib.import_module("sglang.srt.layers.moe.topk")
    if routing.fits(logits):
        data, gather, scatter = routing.as_routing_data(topk, routing.route(logits, TOP_K), TOP_K)
    else:
        data, gather, scatter = topk.routing(logits, TOP_K)
    return data, gather, scatter


def main() -> None:
    """Print a hash of what the layer makes of every number of tokens in the arguments, behind the names of
    modules of the plugin that are installed before, with commas in between, or "-"."""
    names, *numbers = sys.argv[1:]
    mends = [] if names == "-" else names.split(",")
    for mend in mends:
        importlib.import_module(mend).install()
    for tokens in map(int, numbers):
        for scales in ((116, 120), (1, 129)):
            values = layer_of_experts(tokens, scales=scales, is_ours=OURS in mends)
            assert values.any() and not values.isnan().any()
            digest = hashlib.sha256(values.view(torch.int16).cpu().numpy().tobytes())
            print(tokens, scales, digest.hexdigest())


if __name__ == "__main__":
    main()
