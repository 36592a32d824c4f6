"""A conversion that writes wrong data is detected before the output gets its final name."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from typer.testing import CliRunner

from converters import compared_parameters, hf_directory, names, read_back, torch_dist
from converters.bits import same_bits
from converters.compared_parameters import (
    choose_compared_parameters,
    next_layer,
    save_compared_layer,
)
from converters.errors import ConversionError
from converters.hf_directory import HfDirectory, write_hf_directory
from converters.megatron_checkpoint import MegatronCheckpoint
from converters.names import hf_shapes
from converters.read_back import check_weights
from converters.reference.mxfp4 import defined_values, nearest
from converters.safetensors_files import SafetensorsWriter
from converters.torch_dist import export_checkpoint, import_checkpoint
from converters.torch_dist_files import TorchDistReader, TorchDistWriter
from converters.verify import verify
from gptoss_kernels import mxfp4
from launch.cli import app
from megatron_gptoss import new_directory
from megatron_gptoss.checkpoint.errors import CheckpointError
from megatron_gptoss.checkpoint.loader import load_model_weights
from tests.support.converters.quantized_models import DOWN, MODEL, quantized_weights, save

Patch = pytest.MonkeyPatch
LAYER, EXPERT = 1, 2
"""Layer and expert that the check samples here, and where the tests inject faults."""
MEGATRON_DOWN = "decoder.layers.mlp.experts.experts.linear_fc2.weight"
NORM = "model.layers.0.input_layernorm.weight"
MEGATRON_NORM = "decoder.layers.self_attention.linear_qkv.layer_norm_weight"


@pytest.fixture(autouse=True)
def the_sample_is_layer_1(monkeypatch: Patch) -> None:
    monkeypatch.setattr(compared_parameters, "next_layer", lambda kind, config: LAYER)
    monkeypatch.setattr(read_back, "save_compared_layer", lambda kind, config, layer: None)


@pytest.fixture
def quantized(tmp_path: Path) -> Path:
    return save(tmp_path / "mxfp4", MODEL, quantized_weights(MODEL))


@pytest.fixture
def floats(tmp_path: Path, quantized: Path) -> Path:
    """Write the same model in bf16."""
    source = HfDirectory(quantized)
    write_hf_directory(
        tmp_path / "bf16", MODEL, ((name, source.get(name)) for name in source.names())
    )
    return tmp_path / "bf16"


class Conversion:
    """One of the four conversions as a user starts it. It writes the directory ``output``."""

    def __init__(self, kind: str, tmp_path: Path, quantized: Path, floats: Path) -> None:
        self.is_import, self.quantized = kind.startswith("import"), kind.endswith("mxfp4")
        self.output, self.original = tmp_path / "output", quantized if self.quantized else floats
        if not self.is_import:
            import_checkpoint(self.original, tmp_path / "megatron", check="all")
            self.megatron = tmp_path / "megatron"

    def run(self, check: Any = "sample") -> None:
        if self.is_import:
            import_checkpoint(self.original, self.output, check=check)
        elif self.quantized:
            export_checkpoint(self.megatron, self.output, "mxfp4", self.original, check=check)
        else:
            export_checkpoint(self.megatron, self.output, "bf16", check=check)

    def command(self) -> list[str]:
        if self.is_import:
            return ["convert", "import", str(self.original), str(self.output)]
        more = ["--format", "mxfp4", "--reference", str(self.original)] if self.quantized else []
        return ["convert", "export", str(self.megatron), str(self.output), *more]

    def output_is_right(self) -> bool:
        try:
            if self.is_import:
                return verify(self.original, self.output).equal
            return verify(self.output, self.megatron).equal
        except ConversionError:
            return False


@pytest.fixture(params=["import bf16", "import mxfp4", "export bf16", "export mxfp4"])
def conversion(
    request: pytest.FixtureRequest, tmp_path: Path, quantized: Path, floats: Path
) -> Conversion:
    return Conversion(request.param, tmp_path, quantized, floats)


# -- faults ----------------------------------------------------------------------------------------


def one_wrong_result(conversion: Conversion, monkeypatch: Patch) -> None:
    """Make one call of the codec return a wrong result.

    Without a codec, one call of the transform returns a wrong result.
    """
    if not conversion.quantized:
        monkeypatch.setattr(torch_dist, "parameter_mappings", table_that_is_wrong_once)
        return
    name = "dequantize" if conversion.is_import else "quantize"
    correct = getattr(mxfp4, name)
    blocks, scales = HfDirectory(conversion.original).read_mxfp4(DOWN, EXPERT) or ()
    meant = blocks if conversion.is_import else mxfp4.dequantize(blocks, scales)
    calls = []

    def wrong_once(x: torch.Tensor, *rest: Any) -> Any:
        result = correct(x, *rest)
        if not torch.equal(x, meant) or calls:
            return result
        calls.append(x)
        wrong = result.clone() if conversion.is_import else result[0].clone()
        wrong.view(torch.uint8).view(-1)[100:200] ^= 1
        return wrong if conversion.is_import else (wrong, result[1])

    monkeypatch.setattr(mxfp4, name, wrong_once)


def table_that_is_wrong_once(config: Any) -> dict[str, names.ParameterMapping]:
    table = names.parameter_mappings(config)
    name = f"decoder.layers.{LAYER}.mlp.experts.local_experts.{EXPERT}.linear_fc2.weight"
    mapping, calls = table[name], []

    def once(transform: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> Any:
        calls.append(tensor)
        return transform(tensor.flip(0) if len(calls) == 1 else tensor)

    to_megatron, to_hf = partial(once, mapping.to_megatron), partial(once, mapping.to_hf)
    return table | {name: replace(mapping, to_megatron=to_megatron, to_hf=to_hf)}


def an_expert_at_anothers_place(conversion: Conversion, monkeypatch: Patch) -> None:
    swapped = {EXPERT: EXPERT - 1, EXPERT - 1: EXPERT}
    if conversion.is_import:
        add = TorchDistWriter.add_tensor

        def misplacing(self: Any, key: str, shape: Any, index: Any, tensor: torch.Tensor) -> Any:
            if key == MEGATRON_DOWN and index[0] == LAYER:
                index = (LAYER, swapped.get(index[1], index[1]))
            return add(self, key, shape, index, tensor)

        monkeypatch.setattr(TorchDistWriter, "add_tensor", misplacing)
        return
    add_hf = SafetensorsWriter.add

    def misplacing_rows(self: Any, name: str, tensor: torch.Tensor) -> Any:
        if name.startswith(DOWN) and "bias" not in name:
            tensor = tensor[[swapped.get(expert, expert) for expert in range(len(tensor))]]
        return add_hf(self, name, tensor)

    monkeypatch.setattr(SafetensorsWriter, "add", misplacing_rows)


def after_writing(
    conversion: Conversion, monkeypatch: Patch, damage: Callable[[Path], None]
) -> None:
    """Apply ``damage`` to the weight file after the writer has finished it."""
    writer: Any = TorchDistWriter if conversion.is_import else SafetensorsWriter
    close = writer.close

    def closing(self: Any) -> None:
        close(self)
        damage(self.directory / "__0_0.distcp" if conversion.is_import else self.path)

    monkeypatch.setattr(writer, "close", closing)


def a_flipped_bit(layer: int | None, conversion: Conversion, monkeypatch: Patch) -> None:
    """Flip a bit in the expert's matrix of ``layer``, or in a norm if ``layer`` is None."""

    def flip(path: Path) -> None:
        if conversion.is_import:
            reader = TorchDistReader(path.parent, unfinished=True)
            key, index = (
                (MEGATRON_NORM, (0,)) if layer is None else (MEGATRON_DOWN, (layer, EXPERT))
            )
            value = reader.get(key, index, reader.shape(key)[len(index) :])
        else:
            name = DOWN.replace("1", str(layer)) + ("_blocks" if conversion.quantized else "")
            with safe_open(path, "pt") as file:
                value = file.get_tensor(NORM) if layer is None else file.get_tensor(name)[EXPERT]
        content = bytearray(path.read_bytes())
        found = content.find(value.contiguous().view(torch.uint8).numpy().tobytes())
        content[found + 37] ^= 16
        path.write_bytes(content)

    after_writing(conversion, monkeypatch, flip)


def a_truncated_file(conversion: Conversion, monkeypatch: Patch) -> None:
    after_writing(
        conversion, monkeypatch, lambda path: os.truncate(path, path.stat().st_size * 2 // 3)
    )


OF_THE_EXPERT = rf"output/.*: tensor {re.escape(DOWN)}\w*, expert {EXPERT} "
FAULTS = {
    "a wrong result of one call": (one_wrong_result, OF_THE_EXPERT),
    "an expert at another's place": (
        an_expert_at_anothers_place,
        OF_THE_EXPERT.replace(f"expert {EXPERT}", "expert 1"),
    ),
    "a flipped bit in an expert": (partial(a_flipped_bit, LAYER), OF_THE_EXPERT),
    "a flipped bit in a norm": (
        partial(a_flipped_bit, None),
        rf"output/.*: tensor {re.escape(NORM)} ",
    ),
    "a truncated file": (
        a_truncated_file,
        r"output.*(distcp|shard-0|safetensors): truncated .*(where|ends in tensor) ",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_injected_fault_is_named_and_nothing_is_left(
    tmp_path: Path, monkeypatch: Patch, conversion: Conversion, fault: str
) -> None:
    before = {path.name for path in tmp_path.iterdir()}
    plant, message = FAULTS[fault]
    with monkeypatch.context() as patch:
        plant(conversion, patch)
        with pytest.raises(ConversionError, match=message):
            conversion.run()
    assert {path.name for path in tmp_path.iterdir()} == before
    conversion.run("all")
    assert conversion.output_is_right()


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_injected_fault_is_missed_without_read_back(
    monkeypatch: Patch, conversion: Conversion, fault: str
) -> None:
    """This shows that the test above detects the faults by reading back."""
    with monkeypatch.context() as patch:
        patch.setattr(torch_dist, "check_import", lambda *args: None)
        patch.setattr(torch_dist, "check_export", lambda *args, **options: None)
        FAULTS[fault][0](conversion, patch)
        conversion.run()
    assert conversion.output.is_dir() and not conversion.output_is_right()


def test_complete_check_finds_fault_in_unsampled_layer(
    monkeypatch: Patch, conversion: Conversion
) -> None:
    a_flipped_bit(0, conversion, monkeypatch)
    with pytest.raises(
        ConversionError, match=rf"layers\.0\.mlp\.experts\.down_proj\w*, expert {EXPERT} differs"
    ):
        conversion.run("all")
    conversion.run("sample")
    assert not conversion.output_is_right()


def test_convert_command_fails_in_one_line(monkeypatch: Patch, conversion: Conversion) -> None:
    with monkeypatch.context() as patch:
        a_flipped_bit(LAYER, conversion, patch)
        result = CliRunner().invoke(app, conversion.command())
    assert result.exit_code == 1 and not conversion.output.exists()
    assert re.match(rf"gptoss: .*{OF_THE_EXPERT}", result.output) and result.output.count("\n") == 1
    result = CliRunner().invoke(app, [*conversion.command(), "--check", "all"])
    assert result.exit_code == 0, result.output
    assert "read back and compared in" in result.output


def test_a_report_that_claims_another_error_is_rejected(tmp_path: Path, monkeypatch: Patch) -> None:
    trained = [(name, torch.randn(shape).bfloat16()) for name, shape in hf_shapes(MODEL).items()]
    write_hf_directory(tmp_path / "trained", MODEL, trained)
    import_checkpoint(tmp_path / "trained", tmp_path / "megatron")
    convert = torch_dist.quantize

    def claiming(name: str, *args: Any) -> Any:
        packed, error = convert(name, *args)
        error.squared_error *= 0.5
        return packed, error

    monkeypatch.setattr(torch_dist, "quantize", claiming)
    with pytest.raises(
        ConversionError, match=r"the rounding error of model\.layers\.1\.mlp.* was reported as"
    ):
        export_checkpoint(tmp_path / "megatron", tmp_path / "output", "mxfp4")
    assert not (tmp_path / "output").exists()


def test_format_definition_detects_a_wrong_codec(
    tmp_path: Path, monkeypatch: Patch, quantized: Path
) -> None:
    dequantize, quantize = mxfp4.dequantize, mxfp4.quantize
    import_checkpoint(quantized, tmp_path / "megatron")
    with monkeypatch.context() as patch:
        patch.setattr(mxfp4, "dequantize", lambda *packed: 2 * dequantize(*packed))
        with pytest.raises(ConversionError, match=r"experts\.\w+, expert \d differs from"):
            import_checkpoint(quantized, tmp_path / "output")
    with monkeypatch.context() as patch:
        patch.setattr(mxfp4, "quantize", lambda x, hint=None: quantize(x.roll(1, dims=-1), None))
        with pytest.raises(ConversionError, match="are not the nearest ones"):
            export_checkpoint(tmp_path / "megatron", tmp_path / "output", "mxfp4")
    assert not (tmp_path / "output").exists()


def test_trainer_weights_are_compared_with_their_export(
    tmp_path: Path, monkeypatch: Patch, floats: Path
) -> None:
    source = HfDirectory(floats)
    weights = {name: source.get(name) for name in source.names()}
    write = partial(
        write_hf_directory,
        tmp_path / "output",
        MODEL,
        check=lambda made: check_weights(
            weights, made, choose_compared_parameters("weights", MODEL, "sample")
        ),
    )
    changed = {name: tensor.clone() for name, tensor in weights.items()}
    changed[DOWN][EXPERT, 0, 0] += 1
    with pytest.raises(ConversionError, match=OF_THE_EXPERT):
        write(changed.items())
    assert not (tmp_path / "output").exists()
    write(weights.items())
    assert (tmp_path / "output").is_dir()


# -- definitions -----------------------------------------------------------------------------------


def test_codec_values_equal_format_definition() -> None:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (64, 3, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0, 253, (64, 3), dtype=torch.uint8, generator=generator)
    assert same_bits(defined_values(blocks, scales).bfloat16(), mxfp4.dequantize(blocks, scales))


def test_quantizer_result_is_nearest_and_neighbor_is_not() -> None:
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    blocks, scales = mxfp4.quantize(x)
    assert nearest(defined_values(blocks, scales), x, scales)
    blocks[3, 1, 5] ^= 1
    assert not nearest(defined_values(blocks, scales), x, scales)


def test_read_back_compares_bits_instead_of_numbers() -> None:
    zeros, nan = torch.zeros(8), torch.full((4,), float("nan"))
    assert not same_bits(zeros, -zeros) and same_bits(nan, nan.clone())
    matrix = torch.arange(12.0).view(3, 4)
    assert same_bits(matrix.T, matrix.T.contiguous()) and same_bits(matrix.T.contiguous(), matrix.T)
    assert not same_bits(matrix, matrix.double()) and not same_bits(matrix, matrix.T)


# -- rotation and progress -------------------------------------------------------------------------


def test_sampled_layer_rotates_between_runs(
    tmp_path: Path, monkeypatch: Patch, quantized: Path
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(compared_parameters, "cache_directory", lambda: tmp_path)
    many = MODEL.model_copy(update={"num_layers": 24})
    turns = []
    for _ in range(30):
        turns.append(next_layer("import", many))
        save_compared_layer("import", many, turns[-1])
        save_compared_layer("export_bf16", many, 5)  # other conversions have a separate rotation
    assert turns == [(turns[0] + run) % 24 for run in range(30)]

    layers = [import_checkpoint(quantized, tmp_path / f"run{run}").layer for run in range(4)]
    assert layers in ([0, 1, 0, 1], [1, 0, 1, 0])
    result = import_checkpoint(quantized, tmp_path / "once_more")
    assert f"experts of layer {result.layer} (next time: layer {1 - result.layer})" in str(result)
    everything = import_checkpoint(quantized, tmp_path / "everything", check="all")
    assert (
        everything.layer is None and everything.compared == everything.parameters > result.compared
    )


def test_layer_with_a_fault_is_sampled_again(
    tmp_path: Path, monkeypatch: Patch, quantized: Path
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(compared_parameters, "cache_directory", lambda: tmp_path)
    save_compared_layer("import", MODEL, LAYER - 1)
    conversion = Conversion("import mxfp4", tmp_path, quantized, quantized)
    with monkeypatch.context() as patch:
        a_flipped_bit(LAYER, conversion, patch)
        for _ in range(2):
            with pytest.raises(ConversionError, match=OF_THE_EXPERT):
                conversion.run()


def test_all_layers_can_be_sampled_without_a_cache(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(compared_parameters, "cache_directory", lambda: tmp_path / "file" / "below")
    (tmp_path / "file").touch()
    for _ in range(100):
        save_compared_layer("import", MODEL, 0)
    assert {next_layer("import", MODEL) for _ in range(100)} == {0, 1}


def test_read_back_reports_its_progress(tmp_path: Path, quantized: Path) -> None:
    calls: list[tuple[int, int]] = []
    import_checkpoint(
        quantized,
        tmp_path / "output",
        check_progress=lambda done, total: calls.append((done, total)),
    )
    assert calls == sorted(calls) and calls[-1][0] == calls[-1][1]


# -- directories that were never finished ----------------------------------------------------------


def test_output_of_killed_conversion_is_not_loaded(tmp_path: Path, quantized: Path) -> None:
    """The directory may be complete, but the conversion has not compared it."""
    import_checkpoint(quantized, tmp_path / "megatron")
    (tmp_path / "megatron").rename(tmp_path / "megatron.partial")
    quantized.rename(tmp_path / "hf.partial")
    with pytest.raises(ConversionError, match=r"hf\.partial: unfinished"):
        HfDirectory(tmp_path / "hf.partial")
    with pytest.raises(ConversionError, match=r"megatron\.partial: unfinished"):
        MegatronCheckpoint(tmp_path / "megatron.partial")
    with pytest.raises(CheckpointError, match=r"megatron\.partial is incomplete"):
        load_model_weights(tmp_path / "megatron.partial", torch.nn.Linear(1, 1))


def test_directory_is_synced_before_its_rename(
    monkeypatch: Patch, conversion: Conversion, quantized: Path
) -> None:
    synced: set[int] = set()
    fsync, rename = os.fsync, Path.rename

    def recording(descriptor: int) -> None:
        fsync(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    def checking(self: Path, target: Path) -> Path:
        if self.suffix == new_directory.PARTIAL:
            for path in (self, *self.rglob("*")):
                assert path.stat().st_ino in synced, f"{path.name} is not on the disk"
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", recording)
    monkeypatch.setattr(Path, "rename", checking)
    conversion.run()
    assert conversion.output.parent.stat().st_ino in synced


def test_tensor_names_of_these_tests_exist_in_the_model() -> None:
    assert {DOWN, NORM} < set(hf_shapes(MODEL)) and hf_directory.written_shapes(
        MODEL, quantized=True
    )


def test_export_without_tokenizer_names_a_source_for_it(tmp_path: Path, floats: Path) -> None:
    import_checkpoint(floats, tmp_path / "megatron")
    export = ["convert", "export", str(tmp_path / "megatron")]
    done = CliRunner().invoke(app, [*export, str(tmp_path / "bare")])
    assert "bare has no tokenizer and no chat template: --reference" in done.output

    (floats / "tokenizer.json").write_text("{}")
    done = CliRunner().invoke(app, [*export, str(tmp_path / "whole"), "--reference", str(floats)])
    assert done.exit_code == 0, done.output
    assert "has no tokenizer" not in done.output
