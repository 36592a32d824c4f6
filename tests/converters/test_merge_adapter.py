"""A model merged with an adapter has the same bits as the weights in the trainer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from converters import mxfp4_export
from converters.adapter_checkpoint import export_adapter
from converters.bits import FileRange
from converters.errors import ConversionError
from converters.hf_directory import HfDirectory, write_hf_directory
from converters.merge_adapter import merge_adapter
from converters.model_weights import export_hf_weights
from converters.names import hf_shapes
from converters.peft_directory import PeftDirectory
from converters.peft_format import WEIGHTS_FILE
from converters.reports import MergeReport, MergeRoundingError
from converters.safetensors_files import SafetensorsWriter
from gptoss_kernels import mxfp4
from megatron_gptoss.checkpoint.checksums import CHECKSUMS_FILE
from megatron_gptoss.config import OptimizerConfig, ParallelConfig
from megatron_gptoss.config.hf_config import MERGED_KEY
from megatron_gptoss.config.precision import torch_dtype
from megatron_gptoss.trainer import PolicyTrainer
from megatron_gptoss.weights import lost_by_merging
from tests.support.megatron_gptoss.adapted import ADAPTER, MODEL, adapted_model, base_weights
from tests.support.megatron_gptoss.reference import save_checkpoint

pytestmark = pytest.mark.usefixtures("process_groups")


def write_base(path: Path, **changed: torch.Tensor) -> Path:
    weights = base_weights() | changed
    write_hf_directory(path, MODEL, ((name, weights[name]) for name in hf_shapes(MODEL)))
    return path


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("base") / "hf")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("targets", [ADAPTER.targets, ("k", "experts")])
def test_merged_weights_are_those_of_the_trainer(
    dtype: str, targets: tuple[str, ...], base: Path, tmp_path: Path
) -> None:
    adapter = ADAPTER.model_copy(update={"targets": targets})
    model = adapted_model(ParallelConfig(), adapter, torch_dtype(dtype))
    checkpoint = save_checkpoint(tmp_path, PolicyTrainer(model, OptimizerConfig()), 1, {})
    export_adapter(checkpoint, tmp_path / "peft")
    for number, source in enumerate((checkpoint, tmp_path / "peft")):
        merged = tmp_path / f"merged {number}"
        merge_adapter(base, source, merged, dtype=dtype)
        directory = HfDirectory(merged)
        for name, tensor in export_hf_weights(model, MODEL):
            assert torch.equal(directory.get(name), tensor.to(torch_dtype(dtype))), name


def test_merge_reports_the_rounding_error_of_unmerged_experts(base: Path, tmp_path: Path) -> None:
    """Checkpoint and PEFT's format give the same report. Attention was trained merged, and loses nothing."""
    adapter = ADAPTER.model_copy(update={"merge_experts": False})
    model = adapted_model(
        ParallelConfig(), adapter, torch.bfloat16, b_std=1e-3, quantization="mxfp4"
    )
    checkpoint = save_checkpoint(tmp_path, PolicyTrainer(model, OptimizerConfig()), 1, {})
    export_adapter(checkpoint, tmp_path / "peft")
    assert not PeftDirectory(tmp_path / "peft", MODEL).adapter.merge_experts

    reports = [
        merge_adapter(base, source, tmp_path / f"merged {number}", dtype="bf16")
        for number, source in enumerate((checkpoint, tmp_path / "peft"))
    ]
    assert reports[0] == reports[1]
    assert all(".experts." in name for name in reports[0].updates)
    errors, updates = (
        sum(getattr(rounding, name) for rounding in reports[0].updates.values())
        for name in ("squared_error", "squared_update")
    )
    lost = (errors / updates) ** 0.5
    assert lost > 0.1
    assert f"loses {lost:.1%} of the adapter's updates" in str(reports[0])
    assert lost_by_merging(model) == pytest.approx(lost, rel=1e-3)


def merged_in_bf16(base: Path, adapter: Path, root: Path) -> dict[str, torch.Tensor]:
    merge_adapter(base, adapter, root / "bf16", dtype="bf16")
    directory = HfDirectory(root / "bf16")
    return {name: directory.get(name) for name in directory.names()}


def save_adapter(root: Path, targets: tuple[str, ...], b_std: float = 0.05) -> Path:
    adapter = ADAPTER.model_copy(update={"targets": targets})
    model = adapted_model(ParallelConfig(), adapter, torch.bfloat16, b_std=b_std)
    checkpoint = save_checkpoint(root, PolicyTrainer(model, OptimizerConfig()), 1, {})
    export_adapter(checkpoint, root / "peft")
    return root / "peft"


def is_expert_matrix(name: str) -> bool:
    return name.endswith(("gate_up_proj", "down_proj"))


def test_mxfp4_merge_quantizes_only_experts_and_reports_errors(base: Path, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path, ADAPTER.targets)
    exact = merged_in_bf16(base, adapter, tmp_path)
    original = HfDirectory(base)
    report = merge_adapter(base, adapter, tmp_path / "mxfp4", dtype="mxfp4")

    directory = HfDirectory(tmp_path / "mxfp4")
    by_layer: dict[int, list[tuple[torch.Tensor, ...]]] = {0: [], 1: []}
    for name, merged in exact.items():
        written = directory.get(name)
        if not is_expert_matrix(name):
            assert torch.equal(written, merged), name
            continue

        packed = mxfp4.quantize(merged.mT.contiguous())
        assert torch.equal(written, mxfp4.dequantize(*packed).mT), name
        error = written.double() - merged.double()
        update = merged.double() - original.get(name).double()
        rounding = report.tensors[name]
        assert rounding.values == error.numel()
        assert rounding.changed == error.count_nonzero()
        assert rounding.relative == pytest.approx(float(error.norm() / merged.double().norm()))
        assert rounding.relative_to_update == pytest.approx(float(error.norm() / update.norm()))
        by_layer[int(name.split(".")[2])].append((error.flatten(), merged.double().flatten()))

    assert len(report.tensors) == 2 * MODEL.num_layers
    for layer, pairs in by_layer.items():
        error, merged = (torch.cat(tensors) for tensors in zip(*pairs, strict=True))
        assert report.layers[layer].relative == pytest.approx(float(error.norm() / merged.norm()))
        assert 0.05 < report.layers[layer].relative < 0.2
    worst = max(report.tensors, key=lambda name: report.tensors[name].relative)
    assert f"worst tensor: {worst}, relative error" in str(report)


def test_experts_without_an_update_keep_their_bytes(base: Path, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path, ("q", "head"))
    report = merge_adapter(base, adapter, tmp_path / "first", dtype="mxfp4")
    assert all(
        rounding.changed == 0 and rounding.relative == 0 for rounding in report.tensors.values()
    )

    # All values of a block are 0.5. The quantizer would write code 4 with a smaller scale.
    name = "model.layers.1.mlp.experts.down_proj"
    tensors = load_file(tmp_path / "first" / "model.safetensors")
    tensors[f"{name}_blocks"][2, 0, 0] = 0x11
    save_file(tensors, tmp_path / "first" / "model.safetensors")

    # Without these two entries, a second merge onto another base is rejected.
    save_file(load_file(adapter / WEIGHTS_FILE), adapter / WEIGHTS_FILE)
    config = json.loads((tmp_path / "first/config.json").read_text())
    del config[MERGED_KEY]
    (tmp_path / "first/config.json").write_text(json.dumps(config))
    merge_adapter(tmp_path / "first", adapter, tmp_path / "second", dtype="mxfp4")
    first, second = (HfDirectory(tmp_path / name) for name in ("first", "second"))
    for name in filter(is_expert_matrix, first.names()):
        for one, other in zip(first.read_mxfp4(name), second.read_mxfp4(name), strict=True):
            assert torch.equal(one, other), name


def test_merge_detects_a_wrong_codec(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = save_adapter(tmp_path, ("experts",))
    right = mxfp4_export.mxfp4.quantize

    def wrong(values: torch.Tensor, hint: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        blocks, scales = right(values, hint)
        return blocks, scales + 1

    monkeypatch.setattr(mxfp4_export.mxfp4, "quantize", wrong)
    with pytest.raises(ConversionError, match="are not the nearest ones"):
        merge_adapter(base, adapter, tmp_path / "mxfp4", dtype="mxfp4")
    assert not (tmp_path / "mxfp4").exists()


def test_merge_report_names_an_update_of_zero() -> None:
    rounding = MergeRoundingError(values=8, changed=2, squared_error=0.5, squared=2.0)
    assert str(rounding) == ("relative error 0.5, the update is 0, 25.0% of the values changed")
    rounding.squared_update = 0.125
    assert ", 2 of the update, " in str(rounding)


def test_merge_detects_wrongly_reported_error(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = save_adapter(tmp_path, ("experts",))
    add = MergeReport.add
    calls = []

    def add_half(self: MergeReport, layer: int, name: str, rounding: MergeRoundingError) -> None:
        calls.append(name)
        if len(calls) == 1:
            rounding = replace(rounding, squared_error=rounding.squared_error / 2)
        add(self, layer, name, rounding)

    monkeypatch.setattr(MergeReport, "add", add_half)
    with pytest.raises(ConversionError, match="two computations of the rounding error differ"):
        merge_adapter(base, adapter, tmp_path / "mxfp4", dtype="mxfp4")
    assert not (tmp_path / "mxfp4").exists()


def test_merge_deletes_wrong_output(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = save_adapter(tmp_path, ("experts",))
    write = SafetensorsWriter.add

    def add_damaged(self: SafetensorsWriter, name: str, tensor: torch.Tensor) -> FileRange:
        if name == "model.layers.1.mlp.experts.down_proj_blocks":
            tensor = tensor.clone()
            tensor[3, 7, 1, 5] ^= 1
        return write(self, name, tensor)

    monkeypatch.setattr(SafetensorsWriter, "add", add_damaged)
    with pytest.raises(
        ConversionError, match=r"1.mlp.experts.down_proj_blocks differs from the written"
    ):
        merge_adapter(base, adapter, tmp_path / "mxfp4", dtype="mxfp4")
    assert not (tmp_path / "mxfp4").exists()


def test_widths_that_mxfp4_cannot_hold_are_rejected(tmp_path: Path) -> None:
    narrow = MODEL.model_copy(update={"intermediate_size": 48})
    shapes = hf_shapes(narrow)
    write_hf_directory(tmp_path / "hf", narrow, ((n, torch.ones(shapes[n])) for n in shapes))
    with pytest.raises(ConversionError, match="intermediate_size: 48 is not a multiple"):
        merge_adapter(tmp_path / "hf", tmp_path / "peft", tmp_path / "mxfp4", dtype="mxfp4")


def test_another_base_is_rejected_and_nothing_is_left(base: Path, tmp_path: Path) -> None:
    model = adapted_model(ParallelConfig())
    checkpoint = save_checkpoint(tmp_path, PolicyTrainer(model, OptimizerConfig()), 1, {})
    name = "model.layers.1.self_attn.k_proj.weight"
    other = write_base(tmp_path / "other", **{name: base_weights()[name] + 1e-3})
    with pytest.raises(ConversionError, match="was trained on a different base"):
        merge_adapter(other, checkpoint, tmp_path / "merged", dtype="fp32")
    with pytest.raises(ConversionError, match=r"in torch\.bfloat16, or in a different dtype"):
        merge_adapter(base, checkpoint, tmp_path / "merged", dtype="bf16")
    assert not list(tmp_path.glob("merged*"))


def test_adapters_of_another_model_are_rejected(base: Path, tmp_path: Path) -> None:
    model = adapted_model(ParallelConfig())
    checkpoint = save_checkpoint(tmp_path, PolicyTrainer(model, OptimizerConfig()), 1, {})
    config = checkpoint / "gptoss_config.json"
    config.write_text(config.read_text().replace('"sliding_window":8', '"sliding_window":9'))
    config.write_text(config.read_text().replace('"sliding_window": 8', '"sliding_window": 9'))
    (checkpoint / CHECKSUMS_FILE).unlink()
    with pytest.raises(ConversionError, match="a different model: sliding_window is 9, but 8"):
        merge_adapter(base, checkpoint, tmp_path / "merged", dtype="fp32")
