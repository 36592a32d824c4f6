"""Import and export of MXFP4 directories, OpenAI's names, and checks beyond the name table."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import GptOssForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from converters import names, torch_dist
from converters.errors import ConversionError
from converters.families.gpt_oss.table import _transpose
from converters.families.registry import hugging_face_reference
from converters.hf_directory import HfDirectory, LazyExpertStack, written_shapes
from converters.hf_layouts import openai_name
from converters.mapping import identity, single_part
from converters.megatron_checkpoint import MegatronCheckpoint
from converters.model_weights import export_hf_weights, load_hf_weights
from converters.names import hf_shapes
from converters.torch_dist import export_checkpoint, import_checkpoint
from converters.torch_dist_files import TorchDistReader
from converters.verify import verify
from megatron_gptoss import distributed
from megatron_gptoss.config import ParallelConfig
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
from megatron_gptoss.model import build_model
from tests.support.converters.models import TINY
from tests.support.converters.quantized_models import DOWN, MODEL, Weights, quantized_weights, save
from tests.support.distributed import free_port, run_distributed

SQUARE = MODEL.model_copy(update={"intermediate_size": 64})
EXPERT_MATRICES = ("gate_up_proj", "down_proj")


def same_bytes(directory: Path, weights: Weights) -> None:
    exported: Weights = {}
    for file in directory.glob("*.safetensors"):
        exported |= load_file(file)
    assert exported.keys() == weights.keys()
    for name, tensor in weights.items():
        assert exported[name].dtype == tensor.dtype
        assert torch.equal(exported[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.fixture
def quantized(tmp_path: Path) -> Path:
    return save(tmp_path / "mxfp4", MODEL, quantized_weights(MODEL))


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    layers=st.integers(1, 3),
    experts=st.integers(2, 5),
    hidden=st.sampled_from([32, 64, 96]),
    intermediate=st.sampled_from([32, 64]),
    vocabulary=st.integers(33, 131),
    seed=st.integers(0, 99),
)
def test_mxfp4_round_trip_is_byte_exact(
    tmp_path_factory: Any,
    layers: int,
    experts: int,
    hidden: int,
    intermediate: int,
    vocabulary: int,
    seed: int,
) -> None:
    config = MODEL.model_copy(
        update={
            "num_layers": layers,
            "num_experts": experts,
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "vocab_size": vocabulary,
        }
    )
    tmp = tmp_path_factory.mktemp("property")
    weights = quantized_weights(config, seed, (0, 253))
    source = save(tmp / "hf", config, weights)
    import_checkpoint(source, tmp / "megatron")
    report = export_checkpoint(
        tmp / "megatron", tmp / "back", "mxfp4", source, max_shard_bytes=40_000
    )
    same_bytes(tmp / "back", weights)
    assert not any(error.changed for error in report.errors.values())
    export_checkpoint(tmp / "megatron", tmp / "bf16", "bf16")
    import_checkpoint(tmp / "bf16", tmp / "again")
    first, second = HfDirectory(source), MegatronCheckpoint(tmp / "again")
    for name, tensor in second.hf_tensors():
        assert torch.equal(
            first.get(name).contiguous().view(torch.int16), tensor.view(torch.int16)
        ), name


def test_mxfp4_import_values_equal_transformers(quantized: Path) -> None:
    source = HfDirectory(quantized)
    for name in names.hf_shapes(MODEL):
        packed = source.read_mxfp4(name) if name.endswith("_proj") else None
        if packed is not None:
            assert torch.equal(source.get(name), convert_moe_packed_tensors(*packed))


def test_mxfp4_and_bf16_exports_are_equal_in_transformers(tmp_path: Path, quantized: Path) -> None:
    import_checkpoint(quantized, tmp_path / "megatron")
    export_checkpoint(tmp_path / "megatron", tmp_path / "mxfp4_back", "mxfp4", quantized)
    export_checkpoint(tmp_path / "megatron", tmp_path / "bf16", "bf16", quantized)
    ids = torch.arange(20)[None]
    logits = []
    for directory, options in (
        (tmp_path / "mxfp4_back", {"quantization_config": Mxfp4Config(dequantize=True)}),
        (tmp_path / "bf16", {}),
    ):
        model: Any = GptOssForCausalLM.from_pretrained(
            directory, attn_implementation="eager", dtype="auto", **options
        )
        with torch.no_grad():
            logits.append(model(ids).logits)
    assert torch.equal(*logits)


def test_only_the_changed_expert_loses_its_bytes_and_is_reported(
    tmp_path: Path, quantized: Path
) -> None:
    import_checkpoint(quantized, tmp_path / "megatron")
    export_checkpoint(tmp_path / "megatron", tmp_path / "bf16", "bf16")
    weights = load_file(tmp_path / "bf16/model.safetensors")
    weights[DOWN][1] += 0.01
    save_file(weights, tmp_path / "bf16/model.safetensors")
    import_checkpoint(tmp_path / "bf16", tmp_path / "trained")
    report = export_checkpoint(tmp_path / "trained", tmp_path / "out", "mxfp4", quantized)
    assert {name: error.changed for name, error in report.errors.items() if error.changed} == {
        DOWN: 1
    }
    assert 0 < report.errors[DOWN].relative < 0.3
    assert f"{DOWN}: 1 of 3 experts quantized" in str(report) and "11 of 12 expert matrices" in str(
        report
    )
    before, after = (
        load_file(quantized / "model.safetensors"),
        load_file(tmp_path / "out/model.safetensors"),
    )
    assert [
        torch.equal(before[f"{DOWN}_blocks"][e], after[f"{DOWN}_blocks"][e]) for e in range(3)
    ] == [1, 0, 1]


def test_export_reports_error_of_change_too_small_for_bytes(
    tmp_path: Path, quantized: Path
) -> None:
    """A value that moved by one bf16 step rounds to its old code: equal bytes, but an error."""
    import_checkpoint(quantized, tmp_path / "megatron")
    export_checkpoint(tmp_path / "megatron", tmp_path / "bf16", "bf16")
    weights = load_file(tmp_path / "bf16/model.safetensors")
    first_row = weights[DOWN][1, :, 0]
    moved = int((first_row.abs() == first_row.abs().max() / 2).nonzero()[0])
    before = float(first_row[moved])
    first_row[moved] *= 1 + 2**-7
    save_file(weights, tmp_path / "bf16/model.safetensors")
    import_checkpoint(tmp_path / "bf16", tmp_path / "trained")

    report = export_checkpoint(
        tmp_path / "trained", tmp_path / "out", "mxfp4", quantized, check="all"
    )
    same_bytes(tmp_path / "out", load_file(quantized / "model.safetensors"))
    assert {name: error.changed for name, error in report.errors.items() if error.changed} == {
        DOWN: 1
    }
    assert report.errors[DOWN].largest == abs(float(first_row[moved]) - before) > 0


def test_openai_names_give_the_same_checkpoint(tmp_path: Path, quantized: Path) -> None:
    weights = load_file(quantized / "model.safetensors")
    original: Weights = {}
    for name, tensor in weights.items():
        if name.endswith(("_blocks", "_scales")):
            base, kind = name.rsplit("_", 1)
            original[f"{openai_name(base)}.{kind}"] = tensor
        elif "q_proj" in name:
            qkv = [weights[name.replace("q_proj", f"{x}_proj")] for x in "qkv"]
            original[openai_name(name)] = torch.cat(qkv)
        elif "k_proj" not in name and "v_proj" not in name:
            original[openai_name(name)] = tensor
    assert {
        "block.0.attn.qkv.bias",
        "block.1.mlp.mlp2_weight.scales",
        "unembedding.weight",
    } < original.keys()
    directory = tmp_path / "original"
    directory.mkdir()
    names_in_order = list(original)
    for part in range(2):
        save_file(
            {name: original[name] for name in names_in_order[part::2]},
            directory / f"model--0000{part + 1}-of-00002.safetensors",
        )
    config = {
        "num_hidden_layers": 2, "num_experts": 3, "experts_per_token": 2, "vocab_size": 96, "hidden_size": 64,
        "intermediate_size": 32, "swiglu_limit": 7.0, "head_dim": 6, "num_attention_heads": 8, "num_key_value_heads": 2,
        "sliding_window": 8, "initial_context_length": 4096, "rope_theta": 150000, "rope_scaling_factor": 32.0,
        "rope_ntk_alpha": 1, "rope_ntk_beta": 32,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    assert HfDirectory(directory).config == MODEL
    import_checkpoint(directory, tmp_path / "megatron")
    assert verify(quantized, tmp_path / "megatron").equal


def test_expert_stack_reads_only_the_requested_expert(
    quantized: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = HfDirectory(quantized)
    read: list[int | None] = []
    original = source.get
    monkeypatch.setattr(
        source, "get", lambda name, expert=None: (read.append(expert), original(name, expert))[1]
    )
    stack = source.view(DOWN)
    assert isinstance(stack, LazyExpertStack) and stack.shape == (3, 32, 64) and not read
    assert torch.equal(stack[2], original(DOWN)[2])
    assert read == [2]


def fill_from_mxfp4(rank: int, directory: Path, port: int) -> tuple[Weights, set[int]]:
    parallel = ParallelConfig(world_size=2, expert=2)
    distributed.initialize(parallel, rank, port=port)
    source = HfDirectory(directory)
    read: set[int] = set()
    get = source.get

    def recording(name: str, expert: int | None = None) -> torch.Tensor:
        if name.endswith(EXPERT_MATRICES):
            read.add(-1 if expert is None else expert)
        return get(name, expert)

    source.get = recording  # type: ignore[method-assign]
    model = build_model(source.config, parallel, torch.float32)
    load_hf_weights(model, source.config, source.view)
    exported = {name: tensor.clone() for name, tensor in export_hf_weights(model, source.config)}
    distributed.shutdown()
    return exported, read


def test_ranks_load_only_own_experts_from_mxfp4_directory(
    tmp_path: Path,
) -> None:
    config = MODEL.model_copy(update={"num_experts": 4})
    directory = save(tmp_path / "mxfp4", config, quantized_weights(config))
    ranks = run_distributed(fill_from_mxfp4, 2, directory, free_port())
    assert [read for _, read in ranks] == [{0, 1}, {2, 3}]
    exported, original = ranks[0][0], quantized_weights(config)
    for name in hf_shapes(config):
        if name.endswith(EXPERT_MATRICES):
            expected = convert_moe_packed_tensors(
                original[f"{name}_blocks"], original[f"{name}_scales"]
            )
        else:
            expected = original[name]
        assert torch.equal(exported[name], expected.float()), name


@pytest.mark.usefixtures("nothing_is_read_back")
@pytest.mark.parametrize(
    ("kind", "to_megatron", "to_hf", "stage"),
    [
        ("linear_fc2.weight", identity, single_part(identity), "layer 0"),
        ("linear_fc1.weight", _transpose, single_part(_transpose), "layer 0"),
        (
            ".1.mlp.experts.local_experts.0.linear_fc1.bias",
            identity,
            single_part(identity),
            "layer 1",
        ),
    ],
)
def test_verify_detects_table_that_is_wrong_in_both_directions(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    to_megatron: Any,
    to_hf: Any,
    stage: str,
) -> None:
    def mistaken(config: GptOssModelConfig) -> dict[str, names.ParameterMapping]:
        return {
            name: replace(mapping, to_megatron=to_megatron, to_hf=to_hf)
            if name.endswith(kind)
            else mapping
            for name, mapping in names.parameter_mappings(config).items()
        }

    source = save(tmp_path / "hf", SQUARE, quantized_weights(SQUARE))
    monkeypatch.setattr(torch_dist, "parameter_mappings", mistaken)
    monkeypatch.setattr("converters.verify.parameter_mappings", mistaken)
    import_checkpoint(source, tmp_path / "megatron")
    report = verify(source, tmp_path / "megatron")
    assert not report.differences  # the bits survive both directions
    assert report.first_stage == stage and not report.equal
    assert f"differ first in {stage}" in str(report)


def test_reference_reads_mxfp4_experts(tmp_path: Path, quantized: Path) -> None:
    import_checkpoint(quantized, tmp_path / "megatron")
    export_checkpoint(tmp_path / "megatron", tmp_path / "fp32", "fp32")
    model: Any = GptOssForCausalLM.from_pretrained(
        tmp_path / "fp32", attn_implementation="eager", dtype="float32"
    )
    source = HfDirectory(quantized)
    ids = torch.arange(16) * 7 % MODEL.vocab_size
    with torch.no_grad():
        found = hugging_face_reference(source.config, source.get).logits(ids)
        assert (found - model(ids[None]).logits[0]).abs().max() <= 2e-5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop(f"{DOWN}_scales"), rf"{DOWN}_scales is missing"),
        (
            lambda w: w.update({f"{DOWN}_blocks": w[f"{DOWN}_blocks"][:, :, :, :8].contiguous()}),
            r"shape .*16\]",
        ),
        (
            lambda w: w.update({f"{DOWN}_scales": w[f"{DOWN}_scales"].bfloat16()}),
            "unsupported dtype BF16",
        ),
        (
            lambda w: w.update({f"{DOWN}_scales": torch.full_like(w[f"{DOWN}_scales"], 255)}),
            "scales above 252",
        ),
    ],
)
def test_misfit_is_named_and_nothing_is_written(tmp_path: Path, change: Any, message: str) -> None:
    weights = quantized_weights(MODEL)
    change(weights)
    source = save(tmp_path / "hf", MODEL, weights)
    with pytest.raises(ConversionError, match=message):
        import_checkpoint(source, tmp_path / "megatron")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_widths_that_are_no_multiple_of_a_block_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="hidden_size: 40 is not a multiple of 32"):
        written_shapes(TINY, quantized=True)


def test_a_killed_import_starts_again(tmp_path: Path, quantized: Path) -> None:
    target = tmp_path / "megatron"
    code = (
        "import sys, time; from converters.torch_dist import import_checkpoint as i; "
        "i(*sys.argv[1:], progress=lambda d, t: time.sleep(1))"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(quantized), str(target)])
    partial = tmp_path / "megatron.partial"
    while not partial.exists() and process.poll() is None:
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert partial.exists() and not target.exists()
    import_checkpoint(quantized, target)
    assert not partial.exists() and verify(quantized, target).equal


def test_checkpoint_names_and_checksums_equal_golden_file(tmp_path: Path, quantized: Path) -> None:
    config = MODEL.model_copy(update={"num_layers": 1, "num_experts": 2})
    weights: Weights = {}
    for name, shape in written_shapes(config, quantized=True).items():
        start = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
        numbers = (torch.arange(torch.Size(shape).numel()) * 40503 + start) % 65521
        weights[name] = (
            (numbers % 200).to(torch.uint8)
            if name.endswith(("_blocks", "_scales"))
            else (numbers / 65521).bfloat16()
        ).view(shape)
    import_checkpoint(save(tmp_path / "golden", config, weights), tmp_path / "megatron")
    reader = TorchDistReader(tmp_path / "megatron")
    found = {}
    for mapping in names.parameter_mappings(config).values():
        tensor = reader.get(mapping.checkpoint_key, mapping.checkpoint_index, mapping.shape)
        digest = hashlib.sha256(
            tensor.contiguous().view(torch.uint8).numpy().tobytes()
        ).hexdigest()[:16]
        found[f"{mapping.checkpoint_key}{list(mapping.checkpoint_index)}"] = [
            list(tensor.shape),
            digest,
        ]
    golden = Path(__file__).with_name("golden.json")
    assert found == json.loads(golden.read_text())
