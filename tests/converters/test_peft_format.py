"""Adapters round-trip through PEFT's format, and PEFT computes the same outputs."""

from __future__ import annotations

import errno
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM

from converters.adapter_checkpoint import export_adapter
from converters.adapter_weights import load_adapter
from converters.errors import ConversionError
from converters.model_weights import export_hf_weights
from converters.peft_directory import PeftDirectory
from converters.peft_format import PREFIX, WEIGHTS_FILE
from converters.peft_settings import PEFT_CONFIG_FILE
from converters.safetensors_files import SafetensorsWriter
from megatron_gptoss import distributed
from megatron_gptoss.config import OptimizerConfig, ParallelConfig, Quantization
from megatron_gptoss.layers.adapters import initialize_adapters, named_adapters
from megatron_gptoss.new_directory import DirectoryError
from megatron_gptoss.trainer import PolicyTrainer
from rl_loop.export import export_trained_adapter
from tests.support.distributed import free_port, run_distributed
from tests.support.megatron_gptoss.adapted import ADAPTER, MODEL, adapted_model, base_weights
from tests.support.megatron_gptoss.reference import documents, hf_logits, save_checkpoint

EXPERTS, RANK = MODEL.num_experts, ADAPTER.rank_of_experts(MODEL)
LAYER = f"{PREFIX}model.layers.1"


def save_adapters(root: Path) -> Path:
    policy = PolicyTrainer(adapted_model(ParallelConfig()), OptimizerConfig())
    return save_checkpoint(root, policy, 1, {})


def merged_weights(
    parallel: ParallelConfig,
    source: Path | None = None,
    quantization: Quantization | None = None,
) -> dict[str, torch.Tensor]:
    """Return Hugging Face weights merged with the test's adapters or with a PEFT directory."""
    model = adapted_model(parallel, quantization=quantization)
    if source is not None:
        initialize_adapters(model, seed=5)
        load_adapter(model, MODEL, PeftDirectory(source, MODEL))
    return {name: tensor.clone() for name, tensor in export_hf_weights(model, MODEL)}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("peft")
    distributed.initialize(ParallelConfig(), port=free_port())
    export_adapter(save_adapters(root), root / "adapter", base="openai/gpt-oss-20b")
    yield root / "adapter"
    distributed.shutdown()


def test_an_earlier_adapter_stays_until_the_new_one_is_complete(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run replaces its export when it exports the adapters again."""
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    (checkpoints / "step_000001").symlink_to(exported.parent / "step_000001")
    (checkpoints / "latest").write_text("step_000001")
    export_trained_adapter(checkpoints, tmp_path / "adapter", None)
    earlier = (tmp_path / "adapter" / WEIGHTS_FILE).read_bytes()

    def disk_is_full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(SafetensorsWriter, "add", disk_is_full)
        with pytest.raises(DirectoryError, match="No space left"):
            export_trained_adapter(checkpoints, tmp_path / "adapter", None)
    assert (tmp_path / "adapter" / WEIGHTS_FILE).read_bytes() == earlier

    export_trained_adapter(checkpoints, tmp_path / "adapter", None)
    assert (tmp_path / "adapter" / WEIGHTS_FILE).read_bytes() == earlier


def test_exported_adapter_tensors_follow_formula_of_peft(exported: Path) -> None:
    # peft 0.21 computes updates of linear layers, embeddings and expert parameters in this way
    tensors = load_file(exported / WEIGHTS_FILE)
    weights = base_weights()
    updated = set()
    for name in tensors:
        module, _, kind = name.removeprefix(PREFIX).partition(".lora_")
        if kind not in ("A.weight", "embedding_A"):
            continue
        a = tensors[name]
        b = tensors[name.replace("_A", "_B")]

        if ".experts" in module:
            scale = ADAPTER.alpha / RANK
            update = torch.einsum(
                "ore,eri->eio", b.view(len(b), RANK, EXPERTS), a.view(EXPERTS, RANK, -1)
            )
            is_inner = module.endswith(".base_layer")
            parameter = "gate_up_proj" if is_inner else "down_proj"
            weight = f"{module.removesuffix('.base_layer')}.{parameter}"
        else:
            scale = ADAPTER.alpha / ADAPTER.rank
            update = b @ a
            if kind == "embedding_A":
                update = update.T
            weight = f"{module}.weight"
        weights[weight] = weights[weight] + scale * update
        updated.add(weight)

    assert len(updated) == 7 * MODEL.num_layers + 2
    for name, merged in merged_weights(ParallelConfig()).items():
        torch.testing.assert_close(merged, weights[name], atol=1e-6, rtol=0)


def test_peft_computes_same_outputs_from_exported_adapter(exported: Path) -> None:
    peft = pytest.importorskip("peft")
    samples = documents([34, 9])
    merged = merged_weights(ParallelConfig())

    def hugging_face(weights: dict[str, torch.Tensor]) -> GptOssForCausalLM:
        config = GptOssConfig(**MODEL.to_hf_config(), attn_implementation="eager")
        model = GptOssForCausalLM(config).float().eval()
        model.load_state_dict(weights)
        return model

    with torch.no_grad():
        expected = hf_logits(hugging_face(merged), samples)
        base = hf_logits(hugging_face(base_weights()), samples)
        adapted = peft.PeftModel.from_pretrained(hugging_face(base_weights()), exported).eval()
        assert (hf_logits(adapted, samples) - expected).abs().max() < 1e-4
        assert (base - expected).abs().max() > 0.1

        for name, tensor in adapted.merge_and_unload().state_dict().items():
            torch.testing.assert_close(tensor, merged[name], atol=1e-6, rtol=0)


def test_an_exported_adapter_comes_back_bit_for_bit(exported: Path) -> None:
    source = PeftDirectory(exported, MODEL)
    assert set(source.adapter.targets) == set(ADAPTER.targets)
    model = adapted_model(ParallelConfig(), source.adapter, b_std=0.3)
    load_adapter(model, MODEL, source)

    expected = dict(named_adapters(adapted_model(ParallelConfig())))
    for name, adapter in named_adapters(model):
        assert torch.equal(adapter.a, expected[name].a), name
        assert torch.equal(adapter.b, expected[name].b), name


LAYOUTS: list[tuple[dict[str, int], Quantization | None]] = [
    ({"tensor": 2}, None),
    ({"expert": 2}, "mxfp4"),
    ({"pipeline": 2}, None),
]
"""Parallel layouts, and quantization of the base."""


def load_in_every_layout(rank: int, ports: list[int], source: Path) -> list[Any]:
    torch.set_num_threads(1)
    results = []
    for (layout, quantization), port in zip(LAYOUTS, ports, strict=True):
        parallel = ParallelConfig(world_size=2, **layout)
        distributed.initialize(parallel, rank, port=port)
        results.append(merged_weights(parallel, source, quantization))
        distributed.shutdown()
    return results


def test_an_adapter_loads_in_every_layout(exported: Path) -> None:
    expected = merged_weights(ParallelConfig())
    ports = [free_port() for _ in LAYOUTS]
    for found in run_distributed(load_in_every_layout, 2, ports, exported)[0]:
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            assert torch.equal(tensor, expected[name]), name


def change_settings(**changes: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        settings = json.loads((path / PEFT_CONFIG_FILE).read_text())
        (path / PEFT_CONFIG_FILE).write_text(json.dumps(settings | changes))

    return change


def change_tensors(edit: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        tensors = load_file(path / WEIGHTS_FILE)
        edit(tensors)
        save_file({name: x.contiguous() for name, x in tensors.items()}, path / WEIGHTS_FILE)

    return change


def without(pattern: str) -> Callable[[Path], None]:
    def remove(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if re.search(pattern, name)]:
            del tensors[name]

    return change_tensors(remove)


def with_tensor(name: str, tensor: torch.Tensor) -> Callable[[Path], None]:
    return change_tensors(lambda tensors: tensors.update({name: tensor}))


def with_k_of_rank_5(path: Path) -> None:
    def cut(tensors: dict[str, torch.Tensor]) -> None:
        for name in tensors:
            if "k_proj.lora_A" in name:
                tensors[name] = tensors[name][:5]
            if "k_proj.lora_B" in name:
                tensors[name] = tensors[name][:, :5]

    change_tensors(cut)(path)
    experts = dict.fromkeys(("mlp.experts.gate_up_proj", "mlp.experts.down_proj"), RANK)
    change_settings(rank_pattern={"k_proj": 5} | experts)(path)


def without_file(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).unlink()


def with_settings(text: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        (path / PEFT_CONFIG_FILE).write_text(text)

    return write


K_A = f"{LAYER}.self_attn.k_proj.lora_A.weight"
LAYER_2 = f"{PREFIX}model.layers.2.self_attn.k_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_settings(use_dora=True), "use_dora is True"),
        (change_settings(lora_bias=True), "lora_bias is True"),
        (change_settings(bias="all"), "bias is 'all'"),
        (change_settings(modules_to_save=["lm_head"]), "modules_to_save"),
        (change_settings(alpha_pattern={"q_proj": -4}), "q_proj is -4, expected a positive number"),
        (change_settings(alpha_pattern=[4]), r"alpha_pattern is \[4\], expected a table"),
        (change_settings(layers_to_transform=["1"]), "layers_to_transform is .*list of integers"),
        (
            change_settings(layers_to_transform=[1]),
            "does not name this weight, so PEFT would ignore",
        ),
        (change_settings(exclude_modules=["k_proj"]), "k_proj.* does not name this weight"),
        (change_settings(target_modules="(a+)+b"), "target_modules has .*may match too slowly"),
        (change_settings(target_modules="(?>(a+)+)b"), "target_modules has .*may match too slowly"),
        (change_settings(rank_pattern={"(a|a)*": 2}), "rank_pattern has .*may match too slowly"),
        (
            change_settings(exclude_modules="a*b*c*d*e*f"),
            "exclude_modules has .*may match too slowly",
        ),
        (
            change_settings(target_modules=["x"], target_parameters=None),
            "name no weight of a gpt_oss",
        ),
        (change_settings(layer_replication=[[0, 2]]), "layer_replication"),
        (change_settings(init_lora_weights="pissa"), "'pissa', which changes the base"),
        (change_settings(use_something_new=True), "use_something_new is True.* the key is unknown"),
        (change_settings(peft_type="IA3"), "peft_type is 'IA3'"),
        (change_settings(r=0), "r is 0, expected a positive integer"),
        (change_settings(r=8.0), "r is 8.0, expected a positive integer"),
        (change_settings(lora_alpha=None), "lora_alpha is None, expected"),
        (change_settings(rank_pattern={"(": 2}), "rank_pattern has '\\(', which is not a regular"),
        (
            change_settings(r=4),
            r"embed_tokens.lora_embedding_A has shape \[8, 128\], but .* require \[4",
        ),
        (
            change_settings(r=65, rank_pattern={}),
            r"embed_tokens.lora_embedding_A has shape \[8, 128\], but .* require \[65",
        ),
        (
            change_settings(target_parameters=["mlp.router.weight", "mlp.experts.down_proj"]),
            "experts.base_layer.lora_[AB].weight .*does not name this weight",
        ),
        (with_settings("[]"), "adapter_config.json: holds no JSON object"),
        (with_settings("{"), "adapter_config.json: not valid JSON"),
        (with_settings('{"peft_type": "LORA", "r": 8}'), "key lora_alpha is missing"),
        (without_file(PEFT_CONFIG_FILE), r"adapter_config.json: missing"),
        (without_file(WEIGHTS_FILE), r"adapter_model.safetensors: missing. Only safetensors"),
        (without("layers.1"), rf"{LAYER}.self_attn.q_proj.lora_A.weight is missing"),
        (without("layers.0"), r"layers.0.self_attn.q_proj.lora_A.weight is missing"),
        (without("q_proj"), r"layers.0.self_attn.q_proj.lora_A.weight is missing"),
        (without("base_layer"), r"mlp.experts.base_layer.lora_A.weight is missing"),
        (with_tensor(K_A, torch.zeros(5, 64)), r"k_proj.lora_A.weight has shape \[5, 64\]"),
        (with_tensor(K_A, torch.zeros(8, 64).byte()), "has the unsupported dtype U8"),
        (
            with_tensor(LAYER_2, torch.zeros(8, 64)),
            "not a supported adapter: the base has 2 layers, so",
        ),
        (
            with_tensor(f"{LAYER}.mlp.gate.lora_A.weight", torch.zeros(8, 64)),
            "is not a supported adapter",
        ),
    ],
)
def test_an_adapter_that_cannot_be_read_is_rejected_by_name(
    change: Callable[[Path], None], message: str, exported: Path, tmp_path: Path
) -> None:
    shutil.copytree(exported, tmp_path / "changed")
    change(tmp_path / "changed")
    with pytest.raises(ConversionError, match=message):
        PeftDirectory(tmp_path / "changed", MODEL)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            with_k_of_rank_5,
            r"have ranks \[5, 8\], but the trainer has one rank .*gptoss convert merge",
        ),
        (
            change_settings(alpha_pattern={"q_proj": 4}),
            "q by 0.5 at rank 8, but the trainer has one alpha for all",
        ),
        (change_settings(use_rslora=True), "one alpha for all"),
    ],
)
def test_import_of_merge_only_adapter_names_the_reason(
    change: Callable[[Path], None], message: str, exported: Path, tmp_path: Path
) -> None:
    shutil.copytree(exported, tmp_path / "changed")
    change(tmp_path / "changed")
    adapters = PeftDirectory(tmp_path / "changed", MODEL)
    with pytest.raises(ConversionError, match=message):
        _ = adapters.adapter


def test_targets_may_be_a_regular_expression(exported: Path, tmp_path: Path) -> None:
    shutil.copytree(exported, tmp_path / "changed")
    change_settings(target_modules=r".*(_proj|embed_tokens|lm_head)$")(tmp_path / "changed")
    changed = PeftDirectory(tmp_path / "changed", MODEL)
    assert changed.mappings == PeftDirectory(exported, MODEL).mappings


def test_ranks_come_from_the_settings(exported: Path, tmp_path: Path) -> None:
    # r is the rank of the experts here, and rank_pattern has the rank of every other adapter
    shutil.copytree(exported, tmp_path / "changed")
    others = {r"[qkvo]_proj|mlp\.router\.weight|embed_tokens": 8, "lm_head": 8}
    change_settings(r=RANK, rank_pattern=others)(tmp_path / "changed")
    changed = PeftDirectory(tmp_path / "changed", MODEL)
    assert changed.adapter == PeftDirectory(exported, MODEL).adapter
    assert changed.adapter.difference(ADAPTER, MODEL) is None


@pytest.mark.parametrize("name", ["model.embed_tokens", "lm_head"])
def test_base_copies_in_adapter_must_equal_the_base(
    name: str, exported: Path, tmp_path: Path
) -> None:
    # PEFT saves the embedding and the output layer with their adapters
    base = base_weights()
    weight = base[f"{name}.weight"]
    with_copy, with_another = tmp_path / "copy", tmp_path / "another"
    shutil.copytree(exported, with_copy)
    with_tensor(f"{PREFIX}{name}.base_layer.weight", weight)(with_copy)
    PeftDirectory(with_copy, MODEL).check_base_copies(base.__getitem__)

    shutil.copytree(exported, with_another)
    trained = weight.clone()
    trained[3, 5] += 1e-3
    with_tensor(f"{PREFIX}{name}.base_layer.weight", trained)(with_another)
    with pytest.raises(
        ConversionError, match=f"{name}.base_layer.weight differs from the base's {name}"
    ):
        PeftDirectory(with_another, MODEL).check_base_copies(base.__getitem__)


def test_model_with_other_adapters_rejects_checkpoint(exported: Path) -> None:
    model = adapted_model(ParallelConfig(), ADAPTER.model_copy(update={"alpha": 8.0}))
    with pytest.raises(
        ConversionError, match=r"adapter.alpha=16.0, but the model was built with adapter.alpha=8.0"
    ):
        load_adapter(model, MODEL, PeftDirectory(exported, MODEL))


def test_adapter_export_rejects_complete_model_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "gptoss_config.json").write_text(MODEL.model_dump_json())
    with pytest.raises(ConversionError, match=r"adapter.json: missing"):
        export_adapter(tmp_path, tmp_path / "adapter")
