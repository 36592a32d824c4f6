"""Hugging Face -> torch_dist -> Hugging Face is exact, and Megatron loads the import."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from transformers import GptOssForCausalLM

from converters import names, torch_dist
from converters.adapter_checkpoint import export_adapter
from converters.errors import ConversionError
from converters.hf_directory import HfDirectory
from converters.torch_dist import export_checkpoint, import_checkpoint
from converters.verify import verify
from megatron_gptoss import distributed
from megatron_gptoss.checkpoint.loader import load_model_weights
from megatron_gptoss.checkpoint.state import sharding_metadata
from megatron_gptoss.config import OptimizerConfig, ParallelConfig
from megatron_gptoss.config.precision import torch_dtype
from megatron_gptoss.model import build_model
from megatron_gptoss.new_directory import DirectoryError
from megatron_gptoss.packed_sequence import PackedSequence
from megatron_gptoss.packing import build_batch
from megatron_gptoss.trainer import PolicyTrainer
from tests.support.converters.file_limits import files_limited_to
from tests.support.converters.models import TINY, save_hf, tiny_weights
from tests.support.distributed import free_port, run_distributed
from tests.support.megatron_gptoss.reference import documents, hf_logits, save_checkpoint

Weights = dict[str, torch.Tensor]
DOWN_PROJ = "model.layers.1.mlp.experts.down_proj"


@pytest.fixture
def megatron_dir(tmp_path: Path, hf_dir: Path) -> Path:
    import_checkpoint(hf_dir, tmp_path / "megatron")
    return tmp_path / "megatron"


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


# -- exactness -------------------------------------------------------------------------------------


def test_round_trip_is_bit_exact(tmp_path: Path, weights: Weights, precision: Any) -> None:
    dtype = torch_dtype(precision)
    hf_dir = save_hf(tmp_path / "hf", weights, dtype)
    import_checkpoint(hf_dir, tmp_path / "megatron")
    assert verify(hf_dir, tmp_path / "megatron").equal
    export_checkpoint(tmp_path / "megatron", tmp_path / "back", precision, max_shard_bytes=20_000)
    back = HfDirectory(tmp_path / "back")
    for name, tensor in weights.items():
        assert back.dtype(name) == dtype
        assert torch.equal(as_bits(back.get(name)), as_bits(tensor.to(dtype))), name
    assert back.config == TINY


def test_import_converts_to_requested_precision(
    tmp_path: Path, hf_dir: Path, weights: Weights
) -> None:
    import_checkpoint(hf_dir, tmp_path / "megatron", "bf16")
    report = verify(save_hf(tmp_path / "bf16", weights, torch.bfloat16), tmp_path / "megatron")
    assert report.equal and report.tensors == len(weights)
    assert not verify(hf_dir, tmp_path / "megatron").equal  # verify compares with fp32 values


def test_export_converts_to_requested_precision(
    tmp_path: Path, megatron_dir: Path, weights: Weights
) -> None:
    export_checkpoint(megatron_dir, tmp_path / "back", "bf16")
    back = HfDirectory(tmp_path / "back")
    assert all(torch.equal(back.get(name), tensor.bfloat16()) for name, tensor in weights.items())


def test_import_reports_its_progress(tmp_path: Path, hf_dir: Path) -> None:
    calls: list[tuple[int, int]] = []
    import_checkpoint(
        hf_dir, tmp_path / "megatron", progress=lambda done, total: calls.append((done, total))
    )
    assert len(calls) == len(names.parameter_mappings(TINY))
    assert calls == sorted(calls)
    assert calls[-1] == (4 * sum(tensor.numel() for tensor in tiny_weights().values()),) * 2


# -- Megatron itself -------------------------------------------------------------------------------


def test_megatron_loads_import_with_logits_of_transformers(
    process_groups: None, megatron_dir: Path, reference: GptOssForCausalLM
) -> None:
    model = build_model(TINY, ParallelConfig()).eval()
    state, missing, unexpected = dist_checkpointing.load(
        {"model": model.sharded_state_dict(metadata=sharding_metadata())},
        str(megatron_dir),
        strict="return_all",
    )
    model.load_state_dict(state["model"], strict=True)
    # "unexpected" are model keys that the checkpoint lacks; "missing" are unrequested checkpoint
    # keys
    assert not unexpected
    assert all("_extra_state" in key for key in missing), missing
    samples = documents([30, 9, 21], TINY.vocab_size)
    batch = build_batch(samples)
    with torch.no_grad():
        logits = model(
            batch.token_ids[None],
            batch.position_ids[None],
            None,
            packed_seq_params=PackedSequence.of(batch),
        )
        assert (logits[0, :57] - hf_logits(reference, samples)).abs().max() <= 2e-5


def test_export_reads_checkpoint_of_the_trainer(
    process_groups: None, tmp_path: Path, megatron_dir: Path, hf_dir: Path
) -> None:
    model = build_model(TINY, ParallelConfig())
    load_model_weights(megatron_dir, model)
    saved = save_checkpoint(tmp_path / "run", PolicyTrainer(model, OptimizerConfig()), 3, {})
    assert verify(hf_dir, saved).equal
    export_checkpoint(saved, tmp_path / "back", "fp32")
    assert HfDirectory(tmp_path / "back").config == TINY


LAYOUTS = {"expert": {"expert": 2}, "pipeline": {"pipeline": 2}, "tensor": {"tensor": 2}}


def load_and_save(rank: int, megatron_dir: Path, out: Path, ports: list[int]) -> None:
    for (name, layout), port in zip(LAYOUTS.items(), ports, strict=True):
        parallel = ParallelConfig(world_size=2, **layout)
        distributed.initialize(parallel, rank, port=port)
        model = build_model(TINY, parallel)
        load_model_weights(megatron_dir, model)
        save_checkpoint(out / name, PolicyTrainer(model, OptimizerConfig()), 1, {})
        distributed.shutdown()


def test_import_and_export_work_in_any_layout(
    tmp_path: Path, megatron_dir: Path, hf_dir: Path
) -> None:
    run_distributed(
        load_and_save, 2, megatron_dir, tmp_path / "saved", [free_port() for _ in LAYOUTS]
    )
    for name in LAYOUTS:
        assert verify(hf_dir, tmp_path / "saved" / name / "step_000001").equal, name


# -- verify detects mistakes -----------------------------------------------------------------------


def test_verify_names_a_changed_tensor_and_how_far_it_is(
    tmp_path: Path, weights: Weights, megatron_dir: Path
) -> None:
    changed = weights[DOWN_PROJ].clone()
    changed[3, 2, 7] += 0.5
    report = verify(save_hf(tmp_path / "other", weights | {DOWN_PROJ: changed}), megatron_dir)
    assert not report.equal
    [difference] = report.differences
    assert (difference.name, difference.elements) == (DOWN_PROJ, 1)
    assert difference.largest == pytest.approx(0.5)
    assert f"{DOWN_PROJ}: 1 elements, largest difference 0.5" in str(report)


def test_verify_detects_the_sign_of_zero(tmp_path: Path, weights: Weights) -> None:
    zero = {DOWN_PROJ: torch.zeros_like(weights[DOWN_PROJ])}
    import_checkpoint(save_hf(tmp_path / "hf", weights | zero), tmp_path / "megatron")
    negative = save_hf(tmp_path / "negative", weights | {DOWN_PROJ: -zero[DOWN_PROJ]})
    assert not verify(negative, tmp_path / "megatron").equal


def mistaken_table(kind: str, to_megatron: Any) -> Any:
    def mappings(config: Any) -> dict[str, names.ParameterMapping]:
        return {
            name: replace(mapping, to_megatron=to_megatron) if name.endswith(kind) else mapping
            for name, mapping in names.parameter_mappings(config).items()
        }

    return mappings


@pytest.mark.usefixtures("nothing_is_read_back")
@pytest.mark.parametrize(
    ("kind", "mistake", "tensor"),
    [
        # same number of elements, and the same shape if the model were square
        ("linear_fc2.weight", lambda down: down.reshape(down.shape[::-1]), "down_proj"),
        ("linear_fc1.weight", lambda gate_up: gate_up.T, "gate_up_proj"),
        ("linear_fc1.bias", lambda gate_up: gate_up, "gate_up_proj_bias"),
        ("linear_qkv.weight", lambda q, k, v: torch.cat([q, k, v]), "q_proj.weight"),
    ],
)
def test_verify_detects_a_missed_transform(
    tmp_path: Path,
    hf_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    mistake: Any,
    tensor: str,
) -> None:
    monkeypatch.setattr(torch_dist, "parameter_mappings", mistaken_table(kind, mistake))
    import_checkpoint(hf_dir, tmp_path / "megatron")
    report = verify(hf_dir, tmp_path / "megatron")
    assert any(difference.name.endswith(tensor) for difference in report.differences)


@pytest.mark.usefixtures("nothing_is_read_back")
def test_missed_transpose_changes_shape_of_non_square_matrix(
    tmp_path: Path, hf_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        torch_dist, "parameter_mappings", mistaken_table("linear_fc2.weight", lambda down: down)
    )
    import_checkpoint(hf_dir, tmp_path / "megatron")
    with pytest.raises(ConversionError, match=r"linear_fc2\.weight has shape"):
        verify(hf_dir, tmp_path / "megatron")


def test_verify_rejects_models_of_different_architecture(
    tmp_path: Path, megatron_dir: Path, weights: Weights
) -> None:
    other = save_hf(tmp_path / "other", weights)
    config = (
        (other / "config.json")
        .read_text()
        .replace('"rms_norm_eps": 1e-05', '"rms_norm_eps": 1e-06')
    )
    (other / "config.json").write_text(config)
    with pytest.raises(ConversionError, match=r"rms_norm_eps is 1e-06 in .*other, but 1e-05"):
        verify(other, megatron_dir)


def test_a_tokenizer_for_another_vocabulary_is_rejected(
    tmp_path: Path, megatron_dir: Path, weights: Weights
) -> None:
    other = save_hf(tmp_path / "other", weights)
    export_checkpoint(megatron_dir, tmp_path / "fits", reference=other)

    config = json.loads((other / "config.json").read_text())
    config["vocab_size"] += 1
    (other / "config.json").write_text(json.dumps(config))
    said = rf"--reference {other}: vocab_size is {TINY.vocab_size + 1}, but {TINY.vocab_size} in"
    with pytest.raises(ConversionError, match=said):
        export_checkpoint(megatron_dir, tmp_path / "exported", reference=other)
    assert not (tmp_path / "exported").exists()


# -- bad input loses nothing -----------------------------------------------------------------------


def test_export_error_names_newest_checkpoint_of_a_run(tmp_path: Path, megatron_dir: Path) -> None:
    newest = tmp_path / "run/checkpoints/step_000002"
    newest.parent.mkdir(parents=True)
    megatron_dir.rename(newest)
    (newest / "training_state.json").write_text("{}")
    (newest.parent / "latest").write_text(newest.name)

    for given in (tmp_path / "run", newest.parent):
        with pytest.raises(ConversionError, match=f"Its newest checkpoint is {newest}$"):
            export_checkpoint(given, tmp_path / "exported")
        with pytest.raises(ConversionError, match=f"Its newest checkpoint is {newest}$"):
            export_adapter(given, tmp_path / "exported")
    with pytest.raises(ConversionError, match="missing: no such directory; expected a torch_dist"):
        export_adapter(tmp_path / "missing", tmp_path / "exported")


def test_a_full_disk_leaves_no_checkpoint(tmp_path: Path, hf_dir: Path) -> None:
    with (
        files_limited_to(50_000),
        pytest.raises(DirectoryError, match=r"distcp: cannot be written .*MiB are free"),
    ):
        import_checkpoint(hf_dir, tmp_path / "megatron")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_an_interrupted_import_leaves_no_checkpoint(tmp_path: Path, hf_dir: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        import_checkpoint(hf_dir, tmp_path / "megatron", progress=interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_import_does_not_replace_a_checkpoint(hf_dir: Path, megatron_dir: Path) -> None:
    with pytest.raises(DirectoryError, match="megatron: exists already"):
        import_checkpoint(hf_dir, megatron_dir)


def test_mixed_dtypes_under_one_key_are_rejected_with_the_remedy(
    tmp_path: Path, weights: Weights
) -> None:
    name = "model.layers.1.input_layernorm.weight"
    hf_dir = save_hf(tmp_path / "hf", weights)
    from safetensors.torch import save_file

    save_file(weights | {name: weights[name].bfloat16()}, hf_dir / "model.safetensors")
    with pytest.raises(
        ConversionError, match=r"layer_norm_weight: element \[1\] is torch.bfloat16"
    ):
        import_checkpoint(hf_dir, tmp_path / "megatron")
    import_checkpoint(hf_dir, tmp_path / "megatron", "fp32")


@pytest.mark.parametrize(
    "name", [".metadata", "metadata.json", "gptoss_config.json", "__0_0.distcp"]
)
def test_a_missing_file_of_the_checkpoint_is_named(
    tmp_path: Path, megatron_dir: Path, name: str
) -> None:
    (megatron_dir / name).unlink()
    with pytest.raises(ConversionError, match=name.replace(".", r"\.")):
        export_checkpoint(megatron_dir, tmp_path / "back")
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("name", [".metadata", "gptoss_config.json", "__0_0.distcp"])
def test_a_truncated_file_of_the_checkpoint_is_named(
    tmp_path: Path, megatron_dir: Path, name: str
) -> None:
    os.truncate(megatron_dir / name, (megatron_dir / name).stat().st_size // 2)
    with pytest.raises(ConversionError, match=name.replace(".", r"\.")):
        export_checkpoint(megatron_dir, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_a_checkpoint_of_another_size_is_named(tmp_path: Path, megatron_dir: Path) -> None:
    config = (
        (megatron_dir / "gptoss_config.json")
        .read_text()
        .replace('"num_experts": 4', '"num_experts": 5')
    )
    (megatron_dir / "gptoss_config.json").write_text(config)
    with pytest.raises(ConversionError, match=r"gptoss_config\.json: damaged"):
        export_checkpoint(megatron_dir, tmp_path / "back")
    (megatron_dir / "checksums.json").unlink()
    with pytest.raises(ConversionError, match=r"Check that gptoss_config\.json belongs"):
        export_checkpoint(megatron_dir, tmp_path / "back")
