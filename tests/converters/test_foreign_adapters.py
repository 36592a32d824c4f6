"""Adapters written by PEFT: all settings are read as in PEFT, or rejected with a reason.

The tests compare a merge with PEFT's formula, W + scale * B A.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from converters.adapter_checkpoint import export_adapter, import_adapter
from converters.errors import ConversionError
from converters.hf_directory import HfDirectory
from converters.merge_adapter import merge_adapter
from converters.names import hf_shapes
from converters.peft_directory import PeftDirectory
from converters.reports import MergeReport
from converters.torch_dist import export_checkpoint, import_checkpoint
from converters.verify import verify
from launch.cli import app
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
from tests.support.converters.models import TINY, save_hf
from tests.support.converters.peft_adapters import PREFIX, write_adapter

Weights = dict[str, torch.Tensor]
GATE_UP = "model.layers.{}.mlp.experts.gate_up_proj"
DOWN = "model.layers.{}.mlp.experts.down_proj"


@pytest.fixture
def base(tmp_path: Path, weights: Weights) -> Path:
    return save_hf(tmp_path / "base", weights)


def weight_updates(base: Path, merged: Path) -> Weights:
    """Return the difference that a merge made, for each changed tensor."""
    before, after = HfDirectory(base), HfDirectory(merged)
    differences = {name: after.get(name) - before.get(name) for name in hf_shapes(TINY)}
    return {name: update for name, update in differences.items() if update.any()}


def lora_products(adapter: Path) -> Weights:
    """Return B A of the attention adapters by Hugging Face weight name."""
    tensors = load_file(adapter / "adapter_model.safetensors")
    result = {}
    for name, a in tensors.items():
        if name.endswith("lora_A.weight"):
            weight = name.removeprefix("base_model.model.").replace(".lora_A", "")
            result[weight] = tensors[name.replace("lora_A", "lora_B")] @ a
    return result


@dataclass(frozen=True)
class PeftCase:
    """Adapter with settings of PEFT, and the updates that PEFT makes with it."""

    modules: list[str]
    layers: list[int]
    settings: dict[str, Any]
    scale: Callable[[str], float] = lambda name: 2.0
    """Expected factor of B A, by Hugging Face weight name."""


SETTINGS = {
    "plain": PeftCase(["q_proj", "k_proj"], [0, 1], {}),
    "layers_to_transform": PeftCase(["q_proj"], [1], {"layers_to_transform": [1]}),
    "one layer as a number": PeftCase(["q_proj"], [0], {"layers_to_transform": 0}),
    "layers_pattern": PeftCase(
        ["q_proj"], [1], {"layers_to_transform": [1], "layers_pattern": "layers"}
    ),
    "exclude_modules": PeftCase(
        ["q_proj"],
        [0, 1],
        {"target_modules": ["q_proj", "k_proj"], "exclude_modules": ["k_proj"]},
    ),
    "exclude_modules as a pattern": PeftCase(
        ["q_proj"], [1], {"exclude_modules": r"model\.layers\.0\..*"}
    ),
    "modules of one layer": PeftCase(
        ["v_proj"], [1], {"target_modules": ["layers.1.self_attn.v_proj"]}
    ),
    "target_modules as a pattern": PeftCase(
        ["q_proj", "o_proj"], [1], {"target_modules": r".*\.1\.self_attn\.(q|o)_proj"}
    ),
    "rsLoRA": PeftCase(["q_proj"], [0, 1], {"use_rslora": True}, lambda name: 8 / math.sqrt(4)),
    "alpha_pattern": PeftCase(
        ["q_proj", "k_proj"],
        [0, 1],
        {"alpha_pattern": {"layers.1.self_attn.k_proj": 3}},
        lambda name: 0.75 if "1.self_attn.k" in name else 2.0,
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_merge_reads_settings_as_peft_does(name: str, base: Path, tmp_path: Path) -> None:
    case = SETTINGS[name]
    adapter = write_adapter(
        tmp_path / "adapter", TINY, case.modules, case.layers, settings=case.settings
    )
    merge_adapter(base, adapter, tmp_path / "out", "fp32")
    expected = lora_products(adapter)
    updates = weight_updates(base, tmp_path / "out")
    assert set(updates) == set(expected)
    for weight, product in expected.items():
        torch.testing.assert_close(
            updates[weight], case.scale(weight) * product, atol=1e-5, rtol=1e-5
        )


def test_rank_stabilized_adapter_trains_on_with_the_same_scale(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", TINY, ["q_proj"], settings={"use_rslora": True})
    import_adapter(adapter, tmp_path / "imported", base, "fp32")
    for source in ("adapter", "imported"):
        merge_adapter(base, tmp_path / source, tmp_path / f"{source}.out", "fp32")
    first, second = (HfDirectory(tmp_path / f"{source}.out") for source in ("adapter", "imported"))
    assert all(torch.equal(first.get(name), second.get(name)) for name in hf_shapes(TINY))


def test_import_of_adapter_of_some_layers_names_the_reason(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(
        tmp_path / "adapter", TINY, ["q_proj"], [1], settings={"layers_to_transform": [1]}
    )
    with pytest.raises(ConversionError, match=r"q has adapters in the layers \[1\] only.*merge"):
        import_adapter(adapter, tmp_path / "imported", base)
    assert not (tmp_path / "imported").exists()


def write_expert_adapter(
    path: Path,
    layers: list[int],
    swapped: bool,
    rank: int = 2,
    matrices: Sequence[str] = ("gate_up_proj", "down_proj"),
    model: GptOssModelConfig = TINY,
) -> Path:
    """Write expert adapters like PEFT's ParamWrapper. Both layouts hold the same updates."""
    write_adapter(path, model, [], rank=rank)
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    widths = {
        "gate_up_proj": (model.hidden_size, 2 * model.intermediate_size),
        "down_proj": (model.intermediate_size, model.hidden_size),
    }
    for layer in layers:
        # Each matrix wraps the module. The last wrapper is the outermost.
        for matrix, inner in zip(matrices, ("base_layer.", "")[-len(matrices) :], strict=True):
            inputs, outputs = widths[matrix]
            a = 0.2 * torch.randn(TINY.num_experts, rank, inputs, generator=generator)
            b = 0.2 * torch.randn(TINY.num_experts, outputs, rank, generator=generator)
            if swapped:
                a, b = b.mT, a.mT
            name = f"{PREFIX}.{layer}.mlp.experts.{inner}lora_"
            tensors[f"{name}A.weight"] = a.flatten(0, 1).contiguous()
            tensors[f"{name}B.weight"] = b.permute(1, 2, 0).flatten(1).contiguous()
    save_file(tensors, path / "adapter_model.safetensors")
    parameters = [f"{layer}.mlp.experts.{name}" for layer in layers for name in matrices]
    file = path / "adapter_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps(settings | {"target_modules": [], "target_parameters": parameters}))
    return path


@pytest.mark.parametrize("swapped", [False, True])
def test_experts_of_some_layers_are_merged_in_both_layouts(
    swapped: bool, base: Path, tmp_path: Path
) -> None:
    """peft 0.19 and later swaps A and B of experts if transformers is version 4."""
    adapter = write_expert_adapter(tmp_path / "adapter", [1], swapped)
    merge_adapter(base, adapter, tmp_path / "out", "fp32")
    updates = weight_updates(base, tmp_path / "out")
    assert set(updates) == {GATE_UP.format(1), DOWN.format(1)}

    tensors = load_file(adapter / "adapter_model.safetensors")
    for inner, name in (("base_layer.", GATE_UP), ("", DOWN)):
        a = tensors[f"{PREFIX}.1.mlp.experts.{inner}lora_A.weight"].view(TINY.num_experts, 2, -1)
        b = tensors[f"{PREFIX}.1.mlp.experts.{inner}lora_B.weight"]
        b = b.view(len(b), 2, TINY.num_experts)
        # PEFT's get_delta_weight, for parameters that are [experts, in, out]
        formula = "ore,eri->eoi" if swapped else "ore,eri->eio"
        update = 2.0 * torch.einsum(formula, b, a)
        torch.testing.assert_close(updates[name.format(1)], update, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("matrix", ["gate_up_proj", "down_proj"])
def test_one_matrix_of_experts_is_merged(
    matrix: str, swapped: bool, base: Path, tmp_path: Path
) -> None:
    """PEFT's target_parameters may name one of the two matrices, without an inner base_layer."""
    adapter = write_expert_adapter(tmp_path / "adapter", [1], swapped, matrices=[matrix])
    merge_adapter(base, adapter, tmp_path / "out", "fp32")
    updates = weight_updates(base, tmp_path / "out")
    name = {"gate_up_proj": GATE_UP, "down_proj": DOWN}[matrix].format(1)
    assert set(updates) == {name}

    tensors = load_file(adapter / "adapter_model.safetensors")
    a = tensors[f"{PREFIX}.1.mlp.experts.lora_A.weight"].view(TINY.num_experts, 2, -1)
    b = tensors[f"{PREFIX}.1.mlp.experts.lora_B.weight"]
    formula = "ore,eri->eoi" if swapped else "ore,eri->eio"
    update = 2.0 * torch.einsum(formula, b.view(len(b), 2, TINY.num_experts), a)
    torch.testing.assert_close(updates[name], update, atol=1e-5, rtol=1e-5)

    with pytest.raises(
        ConversionError, match=rf"only {matrix} of the experts in layer 1.*both matrices or none"
    ):
        import_adapter(adapter, tmp_path / "imported", base)


def test_square_matrix_of_experts_alone_is_rejected(tmp_path: Path) -> None:
    """In the released models, down_proj is 2880 x 2880, so A and B have the same shape."""
    square = TINY.model_copy(update={"intermediate_size": TINY.hidden_size})
    for swapped in (False, True):
        path = tmp_path / str(swapped)
        write_expert_adapter(path, [0, 1], swapped, matrices=["down_proj"], model=square)
        with pytest.raises(ConversionError, match=r"only down_proj of the experts.*exchanged"):
            PeftDirectory(path, square)


# -- the base ---------------------------------------------------------------------------------


@pytest.fixture
def trained(base: Path, tmp_path: Path) -> Path:
    """Create ``checkpoint``, adapters that know their base, and ``peft``, their export."""
    write_adapter(tmp_path / "foreign", TINY, ["q_proj", "v_proj"])
    import_adapter(tmp_path / "foreign", tmp_path / "checkpoint", base, "fp32")
    export_adapter(tmp_path / "checkpoint", tmp_path / "peft", str(base))
    return tmp_path


def other_base(weights: Weights, path: Path) -> Path:
    changed = dict(weights)
    changed["model.norm.weight"] = changed["model.norm.weight"] + 1e-3
    return save_hf(path, changed)


@pytest.mark.parametrize("source", ["checkpoint", "peft"])
def test_adapter_on_another_base_is_rejected(source: str, trained: Path, weights: Weights) -> None:
    other = other_base(weights, trained / "other")
    merge_adapter(trained / "base", trained / source, trained / "out", "fp32")
    with pytest.raises(ConversionError, match=r"was trained on a different base than .*other"):
        merge_adapter(other, trained / source, trained / "wrong", "fp32")
    assert not (trained / "wrong").exists()


def test_exported_adapter_is_not_imported_onto_another_base(
    trained: Path, weights: Weights
) -> None:
    other = other_base(weights, trained / "other")
    import_adapter(trained / "peft", trained / "again", trained / "base", "fp32")
    with pytest.raises(ConversionError, match=r"was trained on a different base than .*other"):
        import_adapter(trained / "peft", trained / "wrong", other, "fp32")


@pytest.mark.parametrize("source", ["foreign", "checkpoint", "peft"])
def test_adapter_is_not_merged_twice(source: str, trained: Path) -> None:
    """A merge that went through a checkpoint or another format is also recognized."""
    merge_adapter(trained / "base", trained / "foreign", trained / "merged", "fp32")
    import_checkpoint(trained / "merged", trained / "megatron")
    export_checkpoint(trained / "megatron", trained / "exported", "fp32")
    for model in ("merged", "exported"):
        with pytest.raises(ConversionError, match=r"is already merged into"):
            merge_adapter(trained / model, trained / source, trained / "twice", "fp32")

    # Another adapter counts as further training.
    write_adapter(trained / "second", TINY, ["k_proj"])
    merge_adapter(trained / "merged", trained / "second", trained / "both", "fp32")
    with pytest.raises(ConversionError, match=r"is already merged into"):
        merge_adapter(trained / "both", trained / source, trained / "twice", "fp32")


@pytest.mark.parametrize(
    ("name", "warning"),
    [
        (None, "has no record of its base"),
        ("openai/gpt-oss-120b", "was trained on openai/gpt-oss-120b"),
        ("BASE", None),
        ("somebody/base", None),
        ("OTHER", "was trained on .*other"),
    ],
)
def test_adapter_that_names_another_base_is_reported(
    name: str | None, warning: str | None, base: Path, weights: Weights, tmp_path: Path
) -> None:
    names = {"BASE": str(base), "OTHER": str(other_base(weights, tmp_path / "other"))}
    settings = {"base_model_name_or_path": names.get(name or "", name)}
    adapter = write_adapter(tmp_path / "adapter", TINY, ["q_proj"], settings=settings)
    results = [
        CliRunner().invoke(app, ["convert", *map(str, arguments)])
        for arguments in (
            ("merge", base, adapter, tmp_path / "merged", "--format", "fp32"),
            ("import-adapter", adapter, tmp_path / "imported", "--base", base),
        )
    ]
    for result in results:
        assert result.exit_code == 0, result.output
        output = " ".join(result.output.split())
        assert ("warning:" in output) == (warning is not None), output
        if warning is not None:
            assert re.search(warning, output), output


# -- reports ----------------------------------------------------------------------------------


def test_report_of_a_merge_without_rounding_error_is_text(trained: Path) -> None:
    assert str(MergeReport())
    report = merge_adapter(trained / "base", trained / "peft", trained / "out", "fp32")
    assert str(report) == "the merged weights equal the trainer's bit for bit"


@pytest.mark.parametrize(("scale", "least", "most"), [(0.2, 0.0, 0.1), (2e-3, 0.3, 1.5)])
def test_report_measures_bf16_error_of_a_peft_update(
    scale: float, least: float, most: float, base: Path, tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path / "adapter", TINY, ["q_proj", "o_proj"], scale=scale)
    report = merge_adapter(base, adapter, tmp_path / "out", "bf16")
    merged, before = HfDirectory(tmp_path / "out"), HfDirectory(base)
    error = 0.0
    size = 0.0
    for name, product in lora_products(adapter).items():
        # The training uses bf16, so the base is rounded to bf16 first.
        start = before.get(name).bfloat16().double()
        update = 2.0 * product.double()
        error += (merged.get(name).double() - start - update).square().sum().item()
        size += update.square().sum().item()
    lost = math.sqrt(error / size)
    assert least < lost < most
    assert f"loses {lost:.1%} of the adapter's updates" in str(report)


# -- values that are not finite ----------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weight_that_is_not_finite_is_named(
    value: float, base: Path, weights: Weights, tmp_path: Path
) -> None:
    name = DOWN.format(0)
    import_checkpoint(base, tmp_path / "good")
    damaged = {key: tensor.clone() for key, tensor in weights.items()}
    damaged[name][1, 2, 3] = value
    directory = save_hf(tmp_path / "damaged", damaged)
    adapter = write_adapter(tmp_path / "adapter", TINY, ["q_proj"])
    named = rf"model\.safetensors: tensor {name} holds {value} at \[1, 2, 3\]"
    for convert in (
        lambda: import_checkpoint(directory, tmp_path / "out"),
        lambda: merge_adapter(directory, adapter, tmp_path / "out", "fp32"),
        lambda: verify(directory, tmp_path / "good"),
    ):
        with pytest.raises(ConversionError, match=named):
            convert()
    assert not (tmp_path / "out").exists()


def test_checkpoint_that_is_not_finite_is_not_exported(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A diverged training writes such a checkpoint. The test disables the import's check for it."""
    with monkeypatch.context() as patch:
        read = HfDirectory.get

        def diverged(self: HfDirectory, name: str, expert: int | None = None) -> torch.Tensor:
            tensor = read(self, name, expert)
            return tensor * math.nan if name == "model.norm.weight" else tensor

        patch.setattr(HfDirectory, "get", diverged)
        import_checkpoint(base, tmp_path / "megatron")
    for dtype in ("bf16", "fp32"):
        with pytest.raises(ConversionError, match=r"tensor model\.norm\.weight holds nan"):
            export_checkpoint(tmp_path / "megatron", tmp_path / "out", dtype)
    with pytest.raises(ConversionError, match=r"tensor model\.norm\.weight holds nan"):
        verify(base, tmp_path / "megatron")


def test_adapter_that_is_not_finite_is_named(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", TINY, ["q_proj"])
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(iter(tensors))
    tensors[name][1, 2] = math.nan
    save_file(tensors, file)
    named = rf"adapter_model\.safetensors: tensor {name} holds nan at \[1, 2\]"
    with pytest.raises(ConversionError, match=named):
        merge_adapter(base, adapter, tmp_path / "out", "fp32")
    with pytest.raises(ConversionError, match=named):
        import_adapter(adapter, tmp_path / "out", base)
