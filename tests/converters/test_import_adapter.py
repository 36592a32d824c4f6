"""A PEFT adapter becomes an adapter checkpoint, from Python and from the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from megatron.core import dist_checkpointing
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM
from typer.testing import CliRunner

from converters import adapter_checkpoint
from converters.adapter_checkpoint import CheckpointAdapters, export_adapter, import_adapter
from converters.adapter_weights import load_adapter
from converters.errors import ConversionError
from converters.hf_directory import HfDirectory, write_hf_directory
from converters.merge_adapter import merge_adapter
from converters.model_weights import export_hf_weights, load_hf_weights
from converters.names import hf_shapes
from converters.peft_format import PREFIX, WEIGHTS_FILE
from launch.cli import app
from megatron_gptoss.checkpoint.state import load_model_state, model_state
from megatron_gptoss.config import OptimizerConfig, ParallelConfig, Quantization
from megatron_gptoss.layers.adapters import initialize_adapters, named_adapters
from megatron_gptoss.new_directory import DirectoryError
from megatron_gptoss.trainer import PolicyTrainer
from tests.support.megatron_gptoss.adapted import ADAPTER, MODEL, adapted_model, base_weights
from tests.support.megatron_gptoss.reference import save_checkpoint

pytestmark = pytest.mark.usefixtures("process_groups")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a directory with a model, an adapter checkpoint and its conversions.

    ``base`` is the model, ``trained`` the checkpoint, ``peft`` the checkpoint in PEFT's format, and
    ``imported`` a checkpoint made from ``peft``.
    """
    root = tmp_path_factory.mktemp("adapters")
    weights = base_weights()
    write_hf_directory(root / "base", MODEL, ((name, weights[name]) for name in hf_shapes(MODEL)))
    policy = PolicyTrainer(adapted_model(ParallelConfig()), OptimizerConfig())
    save_checkpoint(root, policy, 1, {}).rename(root / "trained")
    export_adapter(root / "trained", root / "peft", base="openai/gpt-oss-20b")
    import_adapter(root / "peft", root / "imported", root / "base", dtype="fp32")
    return root


def test_adapter_round_trip_is_byte_exact(root: Path, tmp_path: Path) -> None:
    export_adapter(root / "imported", tmp_path / "again", base="openai/gpt-oss-20b")
    for file in (root / "peft").iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes(), file.name

    files = [root / name / "adapter.json" for name in ("trained", "imported")]
    trained, imported = (json.loads(file.read_text()) for file in files)
    assert imported["base"] == trained["base"]
    assert CheckpointAdapters(root / "imported").adapter.difference(ADAPTER, MODEL) is None


@pytest.mark.parametrize("quantization", [None, "mxfp4"])
def test_a_training_starts_from_an_imported_adapter(
    quantization: Quantization | None, root: Path
) -> None:
    expected = dict(named_adapters(adapted_model(ParallelConfig())))
    model = adapted_model(ParallelConfig(), b_std=0.3, quantization=quantization)
    load_adapter(model, MODEL, CheckpointAdapters(root / "imported"))
    for name, adapter in named_adapters(model):
        assert torch.equal(adapter.a, expected[name].a), name
        assert torch.equal(adapter.b, expected[name].b), name


def test_megatron_loads_an_imported_adapter(root: Path) -> None:
    model = adapted_model(ParallelConfig())
    expected = {name: tensor.clone() for name, tensor in export_hf_weights(model, MODEL)}
    initialize_adapters(model, seed=5)
    loaded = dist_checkpointing.load({"model": model_state(model)}, str(root / "imported"))
    load_model_state(model, loaded["model"])
    for name, tensor in export_hf_weights(model, MODEL):
        assert torch.equal(tensor, expected[name]), name


def test_a_model_with_another_base_rejects_an_imported_adapter(root: Path) -> None:
    model = adapted_model(ParallelConfig())
    name = "model.layers.0.self_attn.q_proj.weight"
    other = base_weights()
    other[name][2, 3] += 1e-3
    load_hf_weights(model, MODEL, other.__getitem__)
    with pytest.raises(
        ConversionError, match=r"imported: was trained on a different base than that of"
    ):
        load_adapter(model, MODEL, CheckpointAdapters(root / "imported"))


def test_wrong_adapters_are_rejected_before_the_base_is_read(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*args: object) -> str:
        raise AssertionError("the base was read")

    monkeypatch.setattr(adapter_checkpoint, "directory_digest", read)
    with pytest.raises(DirectoryError, match="imported: exists already"):
        import_adapter(root / "peft", root / "imported", root / "base")

    tensors = load_file(root / "peft" / WEIGHTS_FILE)
    name = f"{PREFIX}lm_head.base_layer.weight"
    tensors[name] = base_weights()["lm_head.weight"] + 1e-3
    shutil.copytree(root / "peft", tmp_path / "trained_head")
    save_file(tensors, tmp_path / "trained_head" / WEIGHTS_FILE)
    with pytest.raises(ConversionError, match=r"lm_head.base_layer.weight differs from the base's"):
        import_adapter(tmp_path / "trained_head", tmp_path / "out", root / "base")

    larger = MODEL.model_copy(update={"num_layers": 3})
    shapes = hf_shapes(larger)
    write_hf_directory(
        tmp_path / "larger", larger, ((name, torch.ones(shapes[name])) for name in shapes)
    )
    with pytest.raises(
        ConversionError, match=r"layers.2.self_attn.q_proj.lora_A.weight is missing"
    ):
        import_adapter(root / "peft", tmp_path / "out", tmp_path / "larger")
    assert not list(tmp_path.glob("out*"))


def test_adapter_import_is_deleted_when_read_back_differs(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = adapter_checkpoint.TorchDistWriter.add_tensor

    def add_damaged(
        self: object, key: str, shape: object, index: object, tensor: torch.Tensor
    ) -> object:
        if key.endswith("adapters.head.b"):
            tensor = tensor.clone()
            tensor[5, 3] = -tensor[5, 3]
        return write(self, key, shape, index, tensor)

    monkeypatch.setattr(adapter_checkpoint.TorchDistWriter, "add_tensor", add_damaged)
    with pytest.raises(
        ConversionError, match=r"out: .*lm_head.lora_A.weight differs from the written"
    ):
        import_adapter(root / "peft", tmp_path / "out", root / "base", dtype="fp32")
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"base": "", "settings": {"rang": 8}}'])
def test_a_damaged_checkpoint_of_adapters_is_rejected(
    content: str, root: Path, tmp_path: Path
) -> None:
    shutil.copytree(root / "imported", tmp_path / "damaged")
    (tmp_path / "damaged" / "adapter.json").write_text(content)
    with pytest.raises(
        ConversionError, match=r"adapter.json: damaged, or written by another version \("
    ):
        CheckpointAdapters(tmp_path / "damaged")


def test_adapter_written_by_peft_is_imported(root: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(
        r=4,
        lora_alpha=12,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "embed_tokens", "lm_head"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        rank_pattern={"mlp.experts.gate_up_proj": 3, "mlp.experts.down_proj": 3},
    )
    hf_config = GptOssConfig(**MODEL.to_hf_config(), attn_implementation="eager")
    model = GptOssForCausalLM(hf_config).float()
    model.load_state_dict(base_weights())
    adapted = peft.get_peft_model(model, settings)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.05)
    adapted.save_pretrained(tmp_path / "foreign")
    expected = adapted.merge_and_unload().state_dict()

    import_adapter(tmp_path / "foreign", tmp_path / "imported", root / "base", dtype="fp32")
    merge_adapter(root / "base", tmp_path / "imported", tmp_path / "merged", dtype="fp32")
    merged = HfDirectory(tmp_path / "merged")
    base = base_weights()
    for name, tensor in expected.items():
        torch.testing.assert_close(merged.get(name), tensor, atol=1e-6, rtol=0, msg=name)
    changed = [name for name in expected if (expected[name] - base[name]).abs().max() > 1e-3]
    assert len(changed) == 6 * MODEL.num_layers + 2


# -- the command line -------------------------------------------------------------------------


def convert(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["convert", *(str(argument) for argument in arguments)])
    assert result.exit_code == 0, result.output
    return result.output


def refusal(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["convert", *(str(argument) for argument in arguments)])
    assert result.exit_code == 1
    assert result.output.startswith("gptoss: ")
    assert result.output.count("\n") == 1
    return result.output


def test_the_commands_convert_adapters_and_merge_them(root: Path, tmp_path: Path) -> None:
    base, trained = root / "base", root / "trained"
    convert("export-adapter", trained, tmp_path / "peft", "--base", base)
    convert(
        "import-adapter", tmp_path / "peft", tmp_path / "imported", "--base", base, "--format=fp32"
    )
    convert("export-adapter", tmp_path / "imported", tmp_path / "again", "--base", base)
    first, second = (tmp_path / name / WEIGHTS_FILE for name in ("peft", "again"))
    assert first.read_bytes() == second.read_bytes()

    merged = [tmp_path / name for name in ("of_trained", "of_imported", "of_peft")]
    adapters = (trained, tmp_path / "imported", tmp_path / "peft")
    for adapter, output in zip(adapters, merged, strict=True):
        assert str(output) in convert("merge", base, adapter, output, "--format=fp32")
    directories = [HfDirectory(path) for path in merged]
    for name in directories[0].names():
        expected = directories[0].get(name)
        assert all(torch.equal(other.get(name), expected) for other in directories[1:]), name

    # The recorded base is fp32. A base in bf16 is accepted only without the digest.
    wrong = refusal("merge", base, tmp_path / "peft", tmp_path / "packed", "--format=mxfp4")
    assert "in torch.bfloat16, or in a different dtype" in wrong
    foreign = shutil.copytree(tmp_path / "peft", tmp_path / "foreign")
    save_file(load_file(foreign / WEIGHTS_FILE), foreign / WEIGHTS_FILE)
    output = convert("merge", base, foreign, tmp_path / "packed", "--format=mxfp4")
    assert "layer 1: relative error 0." in output
    assert "worst tensor: model.layers." in output


def test_convert_commands_reject_misfits_in_one_line(root: Path, tmp_path: Path) -> None:
    base, peft, trained = root / "base", root / "peft", root / "trained"
    out = tmp_path / "out"
    assert "adapter_config.json: missing" in refusal("import-adapter", base, out, "--base", base)
    assert "config.json" in refusal("import-adapter", peft, out, "--base", peft)
    assert "gptoss_config.json: missing" in refusal("export-adapter", base, out)
    assert "exists already" in refusal("export-adapter", trained, peft)
    assert "trained on a different base" in refusal("merge", base, trained, out, "--format=bf16")
    assert "no such directory" in refusal("merge", tmp_path / "nothing", peft, out)
    assert not list(tmp_path.iterdir())

    result = CliRunner().invoke(app, ["convert", "import-adapter", str(peft), str(out)])
    assert result.exit_code == 2
    assert "--base" in result.output
