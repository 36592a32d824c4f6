"""The plugin's MXFP4 to bf16 conversion, against the format's definition and triton_kernels."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch

from rl_loop.engines.sglang.config import PLUGIN
from tests.support.rl_loop.engines.expert_layer_process import hashes_of_products
from tests.support.rl_loop.engines.ptx_emulated import as_bf16, run_assembly
from tests.support.rl_loop.plugin_process import run_with_plugin, write_modules

CODES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
"""Absolute values of the codes."""


@pytest.fixture
def values(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(PLUGIN))
    return importlib.import_module("gptoss_expert_values")


@pytest.fixture
def layout(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(PLUGIN))
    return importlib.import_module("gptoss_hopper_layout")


def test_conversion_equals_code_times_scale(values: ModuleType, layout: ModuleType) -> None:
    """Covers all codes at all places of a word, with all scales that weights may have."""
    byte = torch.arange(256)
    scales = torch.arange(129)[:, None, None]  # before [bytes, halves]
    factors = scale_factors(values, scales.flatten()).double().view(-1, 1, 1)
    code = torch.stack([byte & 15, byte >> 4], -1)
    meant = CODES[code & 7] * (1 - 2 * (code >> 3)) * 2.0 ** (scales.double() - 127)

    for place in range(4):
        # The other bytes of the word are random.
        others = torch.randint(0, 256, (4, 256), generator=torch.Generator().manual_seed(place))
        others[place] = byte
        word = sum(layout._spread(others[other], other) for other in range(4))
        pairs = run_assembly(values.UNPACK.value, 4, [word])
        made = as_bf16(pairs[place]).double() * factors
        assert torch.equal(made, meant), place
        # The products are exact in bf16.
        assert torch.equal(made.bfloat16().double(), made)


def scale_factors(values: ModuleType, scales: torch.Tensor) -> torch.Tensor:
    """Return the bf16 factors of scale bytes. A register holds 4 stored bytes."""
    padded = torch.cat([scales, scales.new_zeros(-len(scales) % 4)]).view(-1, 4) + 126
    register = sum(padded[:, place] << (8 * place) for place in range(4))
    halves = run_assembly(values.FACTORS.value, 2, [register])
    return torch.cat([as_bf16(half) for half in halves], -1).flatten()[: len(scales)]


def test_converted_values_have_the_order_of_the_matrix() -> None:
    said = run_with_plugin(
        "-m", "tests.support.rl_loop.engines.expert_values_interpreted", interpreted=True
    )
    assert said == "every value is where the matrix has it\n"


def test_conversion_compiles_for_hopper_without_spills() -> None:
    assert (
        run_with_plugin("-m", "tests.support.rl_loop.engines.expert_values_compiled")
        == "compiled\n"
    )


def test_mxfp4_servers_replace_triton_kernels_conversion(tmp_path: Path) -> None:
    """The conversion of triton_kernels would give wrong values for the plugin's layouts."""
    module = "triton_kernels/matmul_ogs_details/_matmul_ogs.py"
    write_modules(tmp_path, {module: "mxfp4_to_bf16_triton = None\n"})
    program = (
        "import gptoss_mxfp4_experts as plugin, gptoss_expert_values as values;"
        "nothing = lambda: None;"
        "plugin._install_loading = plugin._install_checker = nothing;"
        "plugin._install_answers_of_all_ranks = plugin._install_routes = nothing;"
        "plugin.install();"
        "from triton_kernels.matmul_ogs_details import _matmul_ogs as products;"
        "print(products.mxfp4_to_bf16_triton is values.scaled_values)"
    )
    assert run_with_plugin("-c", program, packages=tmp_path) == "True\n"


@pytest.mark.gpu
def test_products_with_the_conversion_are_bitwise_equal(values: ModuleType) -> None:
    pytest.importorskip("triton_kernels", reason="sglang-kernel is not installed")
    assert hashes_of_products(values.__name__) == hashes_of_products()
