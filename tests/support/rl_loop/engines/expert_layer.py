"""A layer of experts of GPT-OSS's width on a GPU, computed like SGLang's servers do.

Matrices use the plugin's layout if the plugin converts their values, else triton_kernels' layout.
Needs triton_kernels, SGLang, and the plugin's modules in the import path.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
from typing import Any

import torch

EXPERTS, TOP_K, WIDTH = 32, 4, 2880


OURS = "gptoss_expert_values"
"""Module that is required to read the plugin's layouts."""


class Layer:
    """Random experts and tokens, equal in every process.

    Args:
        tokens: number of tokens.
        scales: lowest scale byte, and one above the highest.
        is_ours: whether matrices use the plugin's layout.
    """

    def __init__(self, tokens: int, *, scales: tuple[int, int], is_ours: bool) -> None:
        self._generator = torch.Generator("cuda").manual_seed(tokens)
        self._scales = scales
        self._is_ours = is_ours
        self.tokens = tokens
        self.rows = self._draw(tokens, WIDTH).bfloat16()
        self.routes = _route(self._draw(tokens, EXPERTS).bfloat16())
        self.bias = self._draw(EXPERTS, 2 * WIDTH)
        self.gate_up = self._draw_matrices(2 * WIDTH)
        self.down = self._draw_matrices(WIDTH)

    def run(self) -> torch.Tensor:
        """Return the experts' output for the tokens, bf16 [tokens, width]."""
        from triton_kernels.swiglu import swiglu_fn

        matmul_ogs: Any = importlib.import_module("triton_kernels.matmul_ogs")
        # Same call as in ``triton_kernel_fused_experts_with_bias``.
        sglang: Any = importlib.import_module(
            "sglang.srt.layers.moe.fused_moe_triton.triton_kernels_moe"
        )
        data, gather, scatter = self.routes
        swiglu = matmul_ogs.FusedActivation(
            matmul_ogs.FnSpecs("swiglu", swiglu_fn, ("alpha", "limit"), reduction_n=2), (1.702, 7.0)
        )
        matrix, config = self.gate_up
        # NaN reveals values that are not written.
        hidden = self.rows.new_full((1, self.tokens * TOP_K, WIDTH), torch.nan)
        sglang.matmul_ogs(
            self.rows,
            matrix,
            self.bias,
            data,
            gather_indx=gather,
            precision_config=config,
            fused_activation=swiglu,
            y=hidden,
        )
        matrix, config = self.down
        result = self.rows.new_full((1, self.tokens, WIDTH), torch.nan)
        sglang.matmul_ogs(
            hidden[0],
            matrix,
            self.bias[:, :WIDTH].contiguous(),
            data,
            scatter_indx=scatter,
            precision_config=config,
            gammas=data.gate_scal,
            y=result,
        )
        return result[0]

    def _draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=self._generator)

    def _draw_bytes(self, *shape: int, low: int = 0, high: int = 256) -> torch.Tensor:
        return torch.randint(
            low, high, shape, dtype=torch.uint8, device="cuda", generator=self._generator
        )

    def _draw_matrices(self, rows: int) -> tuple[object, object]:
        """Return random matrices as triton_kernels' tensor, and their configuration."""
        from triton_kernels.numerics import InFlexData

        layers = importlib.import_module("gptoss_expert_layers")
        layout = importlib.import_module("gptoss_hopper_layout")
        matmul_ogs: Any = importlib.import_module("triton_kernels.matmul_ogs")
        packed = self._draw_bytes(EXPERTS, rows, WIDTH // 2)
        low, high = self._scales
        bytes_of = self._draw_bytes(EXPERTS, rows, WIDTH // 32, low=low, high=high)
        if self._is_ours:
            values = packed.new_empty(EXPERTS, *layout.value_storage_shape(*packed.shape[1:]))
            layout.swizzle_values(packed, values)
            shape = tuple(bytes_of.shape[1:])
            of_blocks = packed.new_empty(EXPERTS, *layout.scale_storage_shape(*shape))
            layout.swizzle_scales(bytes_of, shape, of_blocks)
        else:
            values, of_blocks = laid_out_by_triton_kernels(packed, bytes_of)

        values, of_blocks = layers.wrap(values, of_blocks, tuple(packed.shape))
        flex = matmul_ogs.FlexCtx(rhs_data=InFlexData())
        return values, matmul_ogs.PrecisionConfig(weight_scale=of_blocks, flex_ctx=flex)


def laid_out_by_triton_kernels(
    packed: torch.Tensor, scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the storage of values and scales, with scales padded like the plugin's."""
    hopper: Any = importlib.import_module("triton_kernels.tensor_details.layout")
    layout = importlib.import_module("gptoss_hopper_layout")
    values = hopper.HopperMXValueLayout(packed.mT.shape, mx_axis=1).swizzle_data(packed.mT)

    rows = -scales.shape[1] % layout.SCALE_ROWS
    padded = torch.nn.functional.pad(scales, (0, 0, 0, rows)).mT
    warps = layout.SCALE_WARPS
    of_blocks = hopper.HopperMXScaleLayout(padded.shape, mx_axis=1, num_warps=warps)
    return values.mT, of_blocks.swizzle_data(padded).mT


def _route(logits: torch.Tensor) -> tuple[Any, Any, Any]:
    """Choose 4 experts per token of logits [tokens, experts], in triton_kernels' format."""
    routing = importlib.import_module("gptoss_expert_routing")
    kernels = importlib.import_module("gptoss_routing_kernels")
    topk = importlib.import_module("sglang.srt.layers.moe.topk")
    if kernels.fits(logits):
        data, gather, scatter = routing.as_routing_data(topk, kernels.route(logits, TOP_K), TOP_K)
    else:
        data, gather, scatter = topk.routing(logits, TOP_K)
    return data, gather, scatter


def main() -> None:
    """Print per number of tokens a hash of the layer's output, and how many more runs differ.

    Arguments: names of the plugin's modules to install, separated by commas, or "-"; the number of
    further runs; numbers of tokens.
    """
    names, further, *numbers = sys.argv[1:]
    patches = [] if names == "-" else names.split(",")
    for patch in patches:
        importlib.import_module(patch).install()
    for tokens in map(int, numbers):
        for scales in ((116, 120), (1, 129)):
            layer = Layer(tokens, scales=scales, is_ours=OURS in patches)
            values = layer.run()
            assert values.any() and not values.isnan().any()
            digest = hashlib.sha256(values.view(torch.int16).cpu().numpy().tobytes())
            differing = sum(not torch.equal(layer.run(), values) for _ in range(int(further)))
            print(tokens, scales, digest.hexdigest(), differing)


if __name__ == "__main__":
    main()
