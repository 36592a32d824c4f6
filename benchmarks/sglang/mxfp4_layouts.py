"""Comparison of SGLang's layouts of MXFP4 experts with the plugin's, and times of both.

``python -m benchmarks.sglang layouts --quantization mxfp4`` runs this file in the server's
environment. It needs one GPU and prints one JSON object per matrix.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

import gptoss_hopper_layout as layout
import torch
from gptoss_expert_layers import compare_layouts
from sglang.srt.layers.quantization.mxfp4 import _swizzle_mxfp4

SHAPES = {"gate_up_proj": (32, 5760, 1440), "down_proj": (32, 2880, 1440)}
"""Number of experts, rows, and bytes per row of the 20B, by matrix."""


def main() -> None:
    device = torch.device("cuda")
    compare_layouts(_swizzle_mxfp4, device)
    print(json.dumps({"case": "layouts", "equal": True}), flush=True)

    for name, (experts, rows, row_bytes) in SHAPES.items():
        packed = torch.randint(0, 256, (experts, rows, row_bytes), dtype=torch.uint8, device=device)
        scales = packed[:, :, : row_bytes // 16].contiguous()
        storage = packed.new_empty(experts, *layout.value_storage_shape(rows, row_bytes))
        scale_shape = layout.scale_storage_shape(rows, row_bytes // 16)
        scale_storage = packed.new_empty(experts, *scale_shape)

        def swizzle() -> None:
            layout.swizzle_values(packed, storage)  # noqa: B023

        def swizzle_scales() -> None:
            layout.swizzle_scales(scales, tuple(scales.shape[1:]), scale_storage)  # noqa: B023

        def unswizzle() -> None:
            layout.unswizzle_values(storage, rows, row_bytes)  # noqa: B023

        def upstream() -> None:
            _swizzle_mxfp4(packed, scales, layout.SCALE_WARPS)  # noqa: B023

        milliseconds = {}
        for work in (swizzle, swizzle_scales, unswizzle, upstream):
            milliseconds[work.__name__] = round(median_milliseconds(work), 3)
        theirs, _, theirs_scales = _swizzle_mxfp4(packed, scales, layout.SCALE_WARPS)
        their_values = layout.to_plugin_bit_order(theirs.storage.data.mT)
        # The plugin's scales are padded to more rows.
        their_scales = theirs_scales.storage.data.mT + layout.SCALE_BIAS
        our_scales = scale_storage[:, : their_scales.shape[1]]
        print(
            json.dumps(
                {
                    "case": "layout",
                    "matrix": name,
                    "gigabytes": packed.nbytes / 1e9,
                    "values_equal": torch.equal(their_values, storage),
                    "scales_equal": torch.equal(their_scales, our_scales),
                    "milliseconds": milliseconds,
                }
            ),
            flush=True,
        )


def median_milliseconds(work: Callable[[], None]) -> float:
    times = []
    for _ in range(6):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times[1:])


if __name__ == "__main__":
    main()
