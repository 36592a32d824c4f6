"""Hugging Face directories: transformers loads the written ones, and errors name the fault."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import GptOssForCausalLM

from converters.errors import ConversionError
from converters.hf_directory import HfDirectory, write_hf_directory
from converters.model_extras import read_extras
from megatron_gptoss.new_directory import DirectoryError
from tests.support.converters.file_limits import files_limited_to
from tests.support.converters.models import TINY, save_hf

Weights = dict[str, torch.Tensor]
NORM = "model.norm.weight"


def sharded(directory: Path, weights: Weights) -> Path:
    write_hf_directory(directory, TINY, weights.items(), max_shard_bytes=20_000)
    return directory


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# -- writing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shard_bytes", [10**9, 20_000])
def test_transformers_loads_written_directory_with_equal_logits(
    tmp_path: Path, weights: Weights, reference: GptOssForCausalLM, shard_bytes: int
) -> None:
    write_hf_directory(
        tmp_path / "out", TINY, weights.items(), eos_token_ids=[7, 9], max_shard_bytes=shard_bytes
    )
    loaded, info = GptOssForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert loaded.dtype == torch.float32
    assert loaded.generation_config.eos_token_id == [7, 9]
    ids = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, reference(ids).logits)


def test_shards_stay_below_the_limit_and_hold_everything(tmp_path: Path, weights: Weights) -> None:
    directory = sharded(tmp_path / "out", weights)
    files = sorted(directory.glob("*.safetensors"))
    assert len(files) > 2 and not list(directory.glob("shard-*"))
    for file in files:
        tensors = load_file(file)
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= 20_000
    source = HfDirectory(directory)
    assert all(torch.equal(source.get(name), weights[name]) for name in weights)


def test_weight_files_have_permissions_of_other_files(tmp_path: Path, weights: Weights) -> None:
    write_hf_directory(tmp_path / "out", TINY, weights.items())
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()}
    assert len(modes) == 1


def test_one_expert_can_be_read_alone(hf_dir: Path, weights: Weights) -> None:
    name = "model.layers.1.mlp.experts.gate_up_proj"
    assert torch.equal(HfDirectory(hf_dir).get(name, 2), weights[name][2])


def test_tokenizer_and_generation_settings_are_copied(tmp_path: Path, weights: Weights) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "tokenizer.json").write_text("{}")
    (source / "generation_config.json").write_text('{"eos_token_id": [3], "pad_token_id": 5}')
    extras = read_extras(source)
    write_hf_directory(tmp_path / "out", TINY, weights.items(), extras=extras)
    assert (tmp_path / "out/tokenizer.json").read_text() == "{}"
    generation = json.loads((tmp_path / "out/generation_config.json").read_text())
    assert generation == {"eos_token_id": [3], "pad_token_id": 5}
    assert json.loads((tmp_path / "out/config.json").read_text())["eos_token_id"] == [3]


def test_existing_directory_is_replaced_only_on_request(tmp_path: Path, weights: Weights) -> None:
    out = save_hf(tmp_path / "out", weights)
    (out / "old_file").touch()
    with pytest.raises(DirectoryError, match="out: exists already"):
        write_hf_directory(out, TINY, weights.items())
    assert (out / "old_file").exists()
    write_hf_directory(out, TINY, weights.items(), overwrite=True)
    assert not (out / "old_file").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_full_disk_keeps_the_old_directory_and_names_the_file(
    tmp_path: Path, weights: Weights
) -> None:
    out = save_hf(tmp_path / "out", weights)
    changed = {name: tensor + 1 for name, tensor in weights.items()}
    with (
        files_limited_to(50_000),
        pytest.raises(DirectoryError, match=r"shard-0: cannot be written .*MiB are free in"),
    ):
        write_hf_directory(out, TINY, changed.items(), overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert torch.equal(HfDirectory(out).get(NORM), weights[NORM])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop(NORM), f"{NORM} is missing"),
        (lambda w: w.update({NORM: torch.ones(3)}), rf"{NORM} has shape \[3\]"),
        (lambda w: w.update(extra=torch.ones(3)), "extra is not part of the model"),
    ],
)
def test_an_incomplete_or_wrong_set_of_tensors_is_not_written(
    tmp_path: Path, weights: Weights, change: object, message: str
) -> None:
    wrong = dict(weights)
    change(wrong)
    with pytest.raises(ConversionError, match=message):
        write_hf_directory(tmp_path / "out", TINY, wrong.items())
    assert not list(tmp_path.iterdir())


# -- reading ---------------------------------------------------------------------------------------


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="nowhere: no such directory"):
        HfDirectory(tmp_path / "nowhere")


def test_a_missing_config_is_named(hf_dir: Path) -> None:
    (hf_dir / "config.json").unlink()
    with pytest.raises(ConversionError, match=r"config\.json: no such file"):
        HfDirectory(hf_dir)


def test_a_wrong_value_in_the_config_is_named_with_its_file(hf_dir: Path) -> None:
    edit_json(hf_dir / "config.json", num_hidden_layers="many")
    with pytest.raises(ConversionError, match=r"config\.json: .*num_hidden_layers"):
        HfDirectory(hf_dir)


def test_a_directory_without_weights_is_rejected(hf_dir: Path) -> None:
    (hf_dir / "model.safetensors").unlink()
    with pytest.raises(ConversionError, match=r"neither model\.safetensors nor"):
        HfDirectory(hf_dir)


@pytest.mark.parametrize("length", [0, 4, 5000, -1])
def test_a_truncated_file_is_named(hf_dir: Path, length: int) -> None:
    path = hf_dir / "model.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ConversionError, match=r"model\.safetensors: truncated or not"):
        HfDirectory(hf_dir)


def test_a_missing_tensor_is_named_with_its_file(tmp_path: Path, weights: Weights) -> None:
    directory = save_hf(tmp_path / "hf", {name: t for name, t in weights.items() if name != NORM})
    with pytest.raises(ConversionError, match=rf"model\.safetensors: tensor {NORM} is missing"):
        HfDirectory(directory)


def test_an_unknown_tensor_is_not_dropped_silently(tmp_path: Path, weights: Weights) -> None:
    directory = save_hf(tmp_path / "hf", weights | {"model.adapter": torch.ones(2)})
    with pytest.raises(ConversionError, match=r"model\.adapter is not part"):
        HfDirectory(directory)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(
    tmp_path: Path, weights: Weights
) -> None:
    directory = save_hf(tmp_path / "hf", weights | {NORM: torch.ones(3)})
    with pytest.raises(
        ConversionError, match=rf"{NORM} has shape \[3\], but config.json describes \[40\]"
    ):
        HfDirectory(directory)


def test_an_index_that_names_an_absent_file_is_rejected(tmp_path: Path, weights: Weights) -> None:
    directory = sharded(tmp_path / "hf", weights)
    gone = sorted(directory.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(
        ConversionError, match=f"index.json: names the file {gone.name}, which is missing"
    ):
        HfDirectory(directory)


def test_an_index_that_names_the_wrong_file_is_rejected(tmp_path: Path, weights: Weights) -> None:
    directory = sharded(tmp_path / "hf", weights)
    index = directory / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    wrong = next(file for file in weight_map.values() if file != weight_map[NORM])
    edit_json(index, weight_map=weight_map | {NORM: wrong})
    with pytest.raises(ConversionError, match=f"{wrong}: tensor {NORM} is missing, but"):
        HfDirectory(directory)


def test_a_broken_index_is_named(tmp_path: Path, weights: Weights) -> None:
    directory = sharded(tmp_path / "hf", weights)
    index = directory / "model.safetensors.index.json"
    index.write_text("{")
    with pytest.raises(ConversionError, match=r"index\.json: not valid JSON"):
        HfDirectory(directory)
    index.write_text("{}")
    with pytest.raises(ConversionError, match=r"index\.json: key weight_map is missing"):
        HfDirectory(directory)
