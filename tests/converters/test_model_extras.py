"""Tokenizers, chat templates, token ids and generation settings survive every conversion."""

from __future__ import annotations

import ast
import importlib
import json
import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, GenerationConfig

from converters.errors import ConversionError
from converters.merge_adapter import merge_adapter
from converters.model_extras import is_tokenizer_file, read_extras
from converters.torch_dist import export_checkpoint, import_checkpoint
from tests.support.converters.models import TINY
from tests.support.converters.peft_adapters import write_adapter

TEXT = "hello low world"
WAYS = ["export", "export with reference", "merge"]


def converted(way: str, source: Path, root: Path) -> Path:
    """Convert ``source`` in the given way, and return the written directory."""
    out = root / "out"
    if way == "merge":
        adapter = write_adapter(root / "adapter", TINY, ["q_proj"])
        merge_adapter(source, adapter, out, "fp32")
        return out
    import_checkpoint(source, root / "megatron")
    reference = source if way == "export with reference" else None
    export_checkpoint(root / "megatron", out, "fp32", reference=reference)
    return out


def edit(path: Path, **changes: object) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | changes))


def byte_pairs() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=90, special_tokens=["<|e|>"], show_progress=False)
    tokenizer.train_from_iterator([f"{TEXT} lower newest widest"] * 5, trainer)
    return tokenizer


def save_tokenizer(kind: str, directory: Path) -> None:
    tokenizer = byte_pairs()
    settings: dict[str, object] = {"eos_token": "<|e|>"}
    if kind == "vocab.json and merges.txt":
        tokenizer.model.save(str(directory))
        settings["tokenizer_class"] = "GPT2Tokenizer"
    elif kind == "tokenizer.json":
        tokenizer.save(str(directory / "tokenizer.json"))
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        (directory / "special_tokens_map.json").write_text('{"pad_token": "<|e|>"}')
    elif kind == "vocab.txt":
        (directory / "vocab.txt").write_text("\n".join(["[UNK]", "hello", "low", "world"]))
        settings = {"tokenizer_class": "BertTokenizer"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["tokenizer.json", "vocab.json and merges.txt", "vocab.txt"])
def test_tokenizer_survives(kind: str, way: str, hf_dir: Path, tmp_path: Path) -> None:
    save_tokenizer(kind, hf_dir)
    expected: Any = AutoTokenizer.from_pretrained(hf_dir)
    found: Any = AutoTokenizer.from_pretrained(converted(way, hf_dir, tmp_path))
    assert expected(TEXT).input_ids
    assert found(TEXT).input_ids == expected(TEXT).input_ids
    assert found.get_vocab() == expected.get_vocab()
    assert found.special_tokens_map == expected.special_tokens_map


@pytest.mark.parametrize("way", WAYS)
def test_all_chat_templates_survive(way: str, hf_dir: Path, tmp_path: Path) -> None:
    save_tokenizer("tokenizer.json", hf_dir)
    (hf_dir / "chat_template.jinja").write_text("main {{ messages[0].content }}")
    (hf_dir / "additional_chat_templates").mkdir()
    (hf_dir / "additional_chat_templates/rag.jinja").write_text("rag {{ messages[0].content }}")
    (hf_dir / "chat_template.json").write_text('{"chat_template": "legacy"}')
    out = converted(way, hf_dir, tmp_path)
    tokenizer: Any = AutoTokenizer.from_pretrained(out)
    assert tokenizer.chat_template == {
        "default": "main {{ messages[0].content }}",
        "rag": "rag {{ messages[0].content }}",
    }
    assert (out / "chat_template.json").exists()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("has_generation", [True, False])
def test_token_ids_survive(has_generation: bool, way: str, hf_dir: Path, tmp_path: Path) -> None:
    """config.json and generation_config.json have different ids, as in the released models."""
    ids = {"eos_token_id": [1, 2], "pad_token_id": 0, "bos_token_id": 3, "temperature": 0.6}
    edit(hf_dir / "config.json", **ids, use_cache=False, router_aux_loss_coef=0.9)
    generation = {"eos_token_id": [1, 2, 5], "do_sample": True, "top_k": 7}
    if has_generation:
        edit(hf_dir / "generation_config.json", **generation)
    out = converted(way, hf_dir, tmp_path)
    config = json.loads((out / "config.json").read_text())
    expected = ids | {"use_cache": False, "router_aux_loss_coef": 0.9}
    assert {key: config.get(key) for key in expected} == expected
    if has_generation:
        assert json.loads((out / "generation_config.json").read_text()) == generation
        assert GenerationConfig.from_pretrained(out).eos_token_id == [1, 2, 5]


def test_files_of_all_tokenizers_are_copied() -> None:
    """The names are those of all tokenizer files in transformers."""
    names: set[str] = set()
    for module in pkgutil.iter_modules(transformers.models.__path__):
        folder = Path(importlib.util.find_spec(f"transformers.models.{module.name}").origin).parent  # type: ignore[union-attr, attr-defined, arg-type]
        for file in folder.glob("tokenization_*.py"):
            for found in re.findall(
                r"^VOCAB_FILES_NAMES = (\{.*?\})", file.read_text(), re.M | re.S
            ):
                try:
                    names |= set(ast.literal_eval(found).values())
                except ValueError:  # constants, whose values are literals in other files
                    continue
    assert len(names) > 10
    names |= {"special_tokens_map.json", "added_tokens.json", "tokenizer.model.v3", "tekken.json"}
    names |= {"qwen.tiktoken", "tokenizer.4.0.0.json", "chat_template.json", "chat_template.jinja"}
    assert not [name for name in names if not is_tokenizer_file(name)]
    others = ("config.json", "generation_config.json", "model.safetensors", "pytorch_model.bin")
    others += ("tokenization_x.py", "tokenizer.py", "README.md", "model.safetensors.index.json")
    assert not [name for name in others if is_tokenizer_file(name)]


def test_tokenizer_with_custom_code_is_rejected(hf_dir: Path, tmp_path: Path) -> None:
    (hf_dir / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["x.T", null]}}')
    with pytest.raises(ConversionError, match=r"tokenizer_config\.json: auto_map is"):
        import_checkpoint(hf_dir, tmp_path / "megatron")
    assert not (tmp_path / "megatron").exists()


@pytest.mark.parametrize("text", ["one", "another"])
@pytest.mark.parametrize("file", ["chat_template.jinja", "additional_chat_templates/rag.jinja"])
def test_chat_template_in_two_places_must_agree(text: str, file: str, hf_dir: Path) -> None:
    (hf_dir / file).parent.mkdir(exist_ok=True)
    (hf_dir / file).write_text("one\n")
    name = "default" if file == "chat_template.jinja" else "rag"
    templates = [{"name": name, "template": text}, {"name": "other", "template": "x"}]
    edit(hf_dir / "tokenizer_config.json", chat_template=templates)
    if text == "one":
        assert file in read_extras(hf_dir).files
        return
    with pytest.raises(ConversionError, match=f"{file}: differs from the chat template '{name}'"):
        read_extras(hf_dir)


def test_damaged_tokenizer_is_rejected_before_weights_are_read(hf_dir: Path) -> None:
    (hf_dir / "tokenizer.json").write_text('{"model":')
    with pytest.raises(ConversionError, match=r"tokenizer\.json: not valid JSON"):
        read_extras(hf_dir)


def test_export_replaces_end_tokens_of_both_files(hf_dir: Path, tmp_path: Path) -> None:
    from converters.hf_directory import HfDirectory, write_hf_directory

    edit(hf_dir / "config.json", eos_token_id=1, bos_token_id=3)
    edit(hf_dir / "generation_config.json", eos_token_id=2, top_p=0.5)
    source = HfDirectory(hf_dir)
    tensors = ((name, source.get(name)) for name in source.names())
    extras = read_extras(hf_dir)
    write_hf_directory(tmp_path / "out", TINY, tensors, extras=extras, eos_token_ids=[7])
    config, generation = (
        json.loads((tmp_path / "out" / name).read_text())
        for name in ("config.json", "generation_config.json")
    )
    assert (config["eos_token_id"], config["bos_token_id"]) == ([7], 3)
    assert generation == {"eos_token_id": [7], "top_p": 0.5}
    assert torch.equal(
        HfDirectory(tmp_path / "out").get("model.norm.weight"), source.get("model.norm.weight")
    )
