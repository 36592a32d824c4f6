"""Directories that two loaders read differently are rejected with the second reading."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from converters.errors import ConversionError
from converters.hf_directory import HfDirectory, write_hf_directory
from converters.torch_dist import export_checkpoint, import_checkpoint
from rl_loop.config.errors import StartError
from rl_loop.lifecycle.weight_checks import check_weights
from tests.support.converters.dense_models import save_dense
from tests.support.converters.models import TINY, save_hf
from tests.support.megatron_gptoss.dense_reference import MODELS, dense_weights

Weights = dict[str, torch.Tensor]
NORM = "model.norm.weight"


def sharded(directory: Path, weights: Weights) -> Path:
    write_hf_directory(directory, TINY, weights.items(), max_shard_bytes=20_000)
    return directory


def add_shards(directory: Path, weights: Weights) -> None:
    sharded(directory.with_name("other"), weights)
    for file in directory.with_name("other").iterdir():
        shutil.copy(file, directory)


SECOND_SETS: dict[str, tuple[str, Callable[[Path, Weights], object]]] = {
    "index beside single file": ("model.safetensors: is a second set", add_shards),
    "shards without index": (
        "model-00001-of-00002.safetensors: is a second set",
        lambda d, w: save_file(w, d / "model-00001-of-00002.safetensors"),
    ),
    "variant": (
        "model.fp16.safetensors: is a second set",
        lambda d, w: save_file(w, d / "model.fp16.safetensors"),
    ),
    "OpenAI's format": (
        "model--00001-of-00001.safetensors: is a second set",
        lambda d, w: save_file(w, d / "model--00001-of-00001.safetensors"),
    ),
    "pickle": (
        "pytorch_model.bin: is a second set",
        lambda d, w: torch.save(w, d / "pytorch_model.bin"),
    ),
    "index of pickles": (
        "pytorch_model.bin.index.json: is a second set",
        lambda d, w: (d / "pytorch_model.bin.index.json").write_text("{}"),
    ),
    "adapter": (
        "adapter_config.json: is in the directory",
        lambda d, w: (d / "adapter_config.json").write_text('{"base_model_name_or_path": "x"}'),
    ),
    "auto_map": (
        "auto_map must be no value",
        lambda d, w: edit(d / "config.json", auto_map={"AutoModelForCausalLM": "evil.Model"}),
    ),
}


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("name", SECOND_SETS)
def test_second_set_of_weights_is_rejected(name: str, hf_dir: Path, weights: Weights) -> None:
    message, add = SECOND_SETS[name]
    add(hf_dir, {key: tensor + 1 for key, tensor in weights.items()})
    with pytest.raises(ConversionError, match=message):
        HfDirectory(hf_dir)
    with pytest.raises(ConversionError, match=message):
        import_checkpoint(hf_dir, hf_dir.with_name("megatron"))
    with pytest.raises(StartError, match=message):
        check_weights("initial_weights", hf_dir, TINY)


def test_index_of_the_single_file_is_one_set(hf_dir: Path, weights: Weights) -> None:
    weight_map = dict.fromkeys(weights, "model.safetensors")
    index = {"metadata": {}, "weight_map": weight_map}
    (hf_dir / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(HfDirectory(hf_dir).get(NORM), weights[NORM])


def test_file_that_is_not_in_the_index_is_rejected(tmp_path: Path, weights: Weights) -> None:
    directory = sharded(tmp_path / "hf", weights)
    save_file({NORM: weights[NORM] + 1}, directory / "model-extra.safetensors")
    with pytest.raises(ConversionError, match=r"model-extra\.safetensors: is a second set"):
        HfDirectory(directory)


def test_tensor_in_two_files_is_rejected(tmp_path: Path, weights: Weights) -> None:
    directory = sharded(tmp_path / "hf", weights)
    weight_map = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    other = next(file for file in sorted(set(weight_map.values())) if file != weight_map[NORM])
    content = load_file(directory / other) | {NORM: weights[NORM] + 1}
    save_file(content, directory / other)
    with pytest.raises(
        ConversionError, match=rf"{other}: tensor {NORM} is also in {weight_map[NORM]}"
    ):
        HfDirectory(directory)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json"])
def test_json_key_that_is_there_twice_is_rejected(
    file: str, tmp_path: Path, weights: Weights
) -> None:
    path = sharded(tmp_path / "hf", weights) / file
    path.write_text(path.read_text().replace("{", '{"vocab_size": 1, "vocab_size": 2,', 1))
    with pytest.raises(
        ConversionError, match=f"{file}: not valid JSON .*'vocab_size' appears twice"
    ):
        HfDirectory(tmp_path / "hf")


def test_quantization_must_be_that_of_the_tensors(
    tmp_path: Path, hf_dir: Path, weights: Weights
) -> None:
    """transformers creates random experts if config.json does not describe the blocks."""
    edit(hf_dir / "config.json", quantization_config={"quant_method": "mxfp4"})
    with pytest.raises(ConversionError, match="quantization_config says MXFP4, but experts"):
        HfDirectory(hf_dir)


@pytest.mark.parametrize("same", [True, False])
def test_stored_output_layer_of_tied_embeddings(same: bool, tmp_path: Path) -> None:
    config = MODELS["qwen2, tied"]
    weights = dense_weights(config)
    output = weights["model.embed_tokens.weight"].clone()
    if not same:
        output[-1, -1] += 1
    directory = save_dense(tmp_path / "hf", config, weights | {"lm_head.weight": output})
    if not same:
        with pytest.raises(ConversionError, match=r"lm_head\.weight differs from model\.embed"):
            HfDirectory(directory)
        return

    import_checkpoint(directory, tmp_path / "megatron")
    export_checkpoint(tmp_path / "megatron", tmp_path / "out", "fp32")
    ids = torch.arange(20)[None]
    with torch.no_grad():
        logits = [
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(ids).logits
            for path in (directory, tmp_path / "out")
        ]
    assert torch.equal(*logits)


def test_config_of_a_reference_is_that_of_the_model(
    tmp_path: Path, hf_dir: Path, weights: Weights
) -> None:
    """The export gets no second configuration if --reference is the original directory."""
    import_checkpoint(hf_dir, tmp_path / "megatron")
    export_checkpoint(tmp_path / "megatron", tmp_path / "out", "fp32", reference=hf_dir)
    save_hf(tmp_path / "again", weights)
    assert HfDirectory(tmp_path / "out").config == HfDirectory(tmp_path / "again").config
