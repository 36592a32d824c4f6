"""Times the two GEMMs of a layer's MXFP4 experts with and without unmerged adapters.

    python -m benchmarks.experts adapters
    python -m benchmarks.experts adapters --requests 256 --rank 16 --rounds 50

Needs one Hopper GPU. Runs in the trainer's or in SGLang's Python environment, without a server. PYTHONPATH must have
this repository.

A decoding step multiplies each request's hidden state with gate and up and then with down, of 4 of 32 experts. Servers
with adapters call one more kernel before each GEMM. Several layers alternate, so that the L2 cache holds no weights.
Both variants have a CUDA graph. The graphs are replayed interleaved, and the medians are printed.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import time_interleaved

PLUGIN = Path(__file__).resolve().parents[2] / "rl_loop/engines/sglang/plugin"
if str(PLUGIN) not in sys.path:
    sys.path.append(str(PLUGIN))

import gptoss_adapted_moe as adapted  # noqa: E402
import gptoss_hopper_layout as layout  # noqa: E402
import gptoss_routing_kernels as routing  # noqa: E402
import gptoss_small_batch_moe as moe  # noqa: E402

SIZES_20B = (32, 4, 2880)
"""Experts, experts per token, and hidden (= intermediate) size of GPT-OSS-20B."""
SCALE_BYTES = (118, 122)
"""Lowest scale byte of random weights, and one above the highest."""
SWIGLU = moe.Swiglu(alpha=1.702, limit=7.0)


@dataclass(frozen=True)
class Blocks:
    """The part of triton_kernels' ``RaggedTensorMetadata`` that the kernels read."""

    routes: routing.ExpertAssignment

    @property
    def slice_sizes(self) -> Tensor:
        """Number of entries of each expert."""
        return self.routes.sizes

    @property
    def slice_offs(self) -> Tensor:
        """First entry of each expert."""
        return self.routes.starts

    def block_offs(self, size: int) -> Tensor:
        """Return the first block of each expert."""
        return self.routes.block_starts[_log2_of_16(size)]

    def block_schedule(self, size: int) -> Tensor:
        """Return expert and number of each block."""
        return self.routes.schedule[_log2_of_16(size)]


def _log2_of_16(size: int) -> int:
    """Return log2(size / 16)."""
    return (size // 16).bit_length() - 1


class Matrices:
    """Random matrices and adapters of all experts of one GEMM. Any bytes are valid values."""

    def __init__(
        self, outputs: int, sizes: tuple[int, int, int], rank: int, generator: torch.Generator
    ) -> None:
        experts, _, inputs = sizes
        device = generator.device
        bytes_of = partial(torch.randint, dtype=torch.uint8, device=device, generator=generator)
        normal = partial(torch.randn, dtype=torch.float32, device=device, generator=generator)
        self.values = bytes_of(0, 256, (experts, *layout.value_storage_shape(outputs, inputs // 2)))
        self.scales = bytes_of(
            *SCALE_BYTES, (experts, *layout.scale_storage_shape(outputs, inputs // 32))
        )
        self.scales += layout.SCALE_BIAS
        self.bias = normal((experts, outputs))

        settings = adapted.AdapterSettings(rank, scale=4.0)
        self.adapter = adapted.allocate_adapter(settings, (experts, outputs, inputs), device)
        self.adapter.a[:, :rank] = normal((experts, rank, inputs)) / inputs**0.5
        self.adapter.b[:, :, :rank] = normal((experts, outputs, rank)) / 1000


class Step:
    """Experts of several layers for a fixed number of requests."""

    def __init__(
        self,
        requests: int,
        layers: list[tuple[Matrices, Matrices]],
        sizes: tuple[int, int, int],
        generator: torch.Generator,
        dtype: torch.dtype,
    ) -> None:
        experts, top_k, width = sizes
        draw = partial(torch.randn, device=generator.device, generator=generator)
        self.layers = layers
        self.x = draw(requests, width).to(dtype)
        self.hidden = self.x.new_empty(requests * top_k, width)
        self.of_experts = self.x.new_empty(requests * top_k, width)
        self.result = self.x.new_empty(requests, width)
        self._top_k = top_k
        self._routes: list[tuple[routing.ExpertAssignment, Any]] = []
        for _ in layers:
            routes = routing.route(draw(requests, experts).to(dtype), top_k)
            data = SimpleNamespace(
                expt_data=Blocks(routes),
                n_expts_tot=experts,
                n_expts_act=top_k,
                n_blocks=partial(_blocks, experts=experts),
            )
            self._routes.append((routes, data))

    def run(self, has_adapters: bool) -> Tensor:
        """Compute all layers with the same input, and return the last one's output."""
        for (gate_up, down), (routes, data) in zip(self.layers, self._routes, strict=True):
            self._multiply(gate_up, self.x, data, routes, self.hidden, has_adapters, swiglu=SWIGLU)
            self._multiply(
                down, self.hidden, data, routes, self.of_experts, has_adapters, gates=routes.gates
            )
            width = self.result.shape[-1]
            moe.sum_experts(self.of_experts.view(-1, self._top_k, width), self.result)
        return self.result

    @staticmethod
    def _multiply(
        matrices: Matrices,
        x: Tensor,
        data: Any,
        routes: routing.ExpertAssignment,
        out: Tensor,
        has_adapters: bool,
        **kind: Any,
    ) -> None:
        adapter = matrices.adapter if has_adapters else None
        weights = (matrices.values, matrices.scales, matrices.bias)
        moe.multiply(x, *weights, data, routes.by_expert, out, adapter=adapter, **kind)


def _blocks(entries: int, rows: int, *, experts: int) -> int:
    """Return the largest number of blocks, as ``RoutingData.n_blocks`` of triton_kernels does."""
    if entries <= experts:
        return entries
    return experts - 1 - ((experts - entries - 1) // rows)


def make_layers(
    count: int, sizes: tuple[int, int, int], rank: int, generator: torch.Generator
) -> list[tuple[Matrices, Matrices]]:
    """Return random gate-and-up and down matrices of each layer.

    Args:
        count: number of layers.
        sizes: experts, experts per token, and hidden size.
        rank: rank of the adapters.
        generator: random generator. Its device is that of the tensors.
    """
    width = sizes[2]
    return [
        (Matrices(2 * width, sizes, rank, generator), Matrices(width, sizes, rank, generator))
        for _ in range(count)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, nargs="+", default=[256, 64, 8])
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4, help="in turn")
    parser.add_argument("--rounds", type=int, default=25, help="of which the median is taken")
    options = parser.parse_args()

    generator = torch.Generator("cuda").manual_seed(0)
    layers = make_layers(options.layers, SIZES_20B, options.rank, generator)
    print(f"{torch.cuda.get_device_name()}, rank {options.rank}, microseconds per layer")
    print(
        "| requests | base | with adapters | times | more per step of 24 layers, ms |\n|---|---|---|---|---|"
    )
    for requests in options.requests:
        step = Step(requests, layers, SIZES_20B, generator, torch.bfloat16)
        calls = {"base": partial(step.run, False), "adapters": partial(step.run, True)}
        times = time_interleaved(calls, rounds=options.rounds, calls=1)
        base, more = (1000 * times[name] / len(layers) for name in calls)
        cells = [
            f"{base:.1f}",
            f"{more:.1f}",
            f"{more / base:.3f}",
            f"{24 * (more - base) / 1000:.3f}",
        ]
        print(f"| {requests} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
