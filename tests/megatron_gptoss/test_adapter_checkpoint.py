"""A checkpoint of adapters contains them, their optimizer, and a description of their base."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from converters.adapter_checkpoint import CheckpointAdapters
from converters.adapter_weights import load_adapter
from converters.errors import ConversionError
from converters.megatron_checkpoint import MegatronCheckpoint
from converters.model_weights import load_hf_weights
from megatron_gptoss.checkpoint.base_digest import base_digest
from megatron_gptoss.checkpoint.directory import (
    ADAPTER_FILE,
    MODEL_CONFIG_FILE,
    latest_checkpoint,
)
from megatron_gptoss.checkpoint.errors import CheckpointError
from megatron_gptoss.checkpoint.loader import load_checkpoint, load_model_weights
from megatron_gptoss.checkpoint.state import describe_adapters, load_model_state, model_state
from megatron_gptoss.config import AdapterConfig, OptimizerConfig, ParallelConfig, Quantization
from megatron_gptoss.layers.adapters import initialize_adapters, named_adapters
from megatron_gptoss.model import build_model
from megatron_gptoss.packing import build_batch
from megatron_gptoss.tensor_hash import digest_of_values
from megatron_gptoss.trainer import PolicyTrainer
from tests.support.megatron_gptoss.adapted import ADAPTER, MODEL, adapted_model, base_weights
from tests.support.megatron_gptoss.reference import documents, mean_cross_entropy, save_checkpoint

pytestmark = pytest.mark.usefixtures("process_groups")


BATCH = build_batch(documents([20, 13]))


def trainer(
    adapter: AdapterConfig = ADAPTER,
    quantization: Quantization | None = None,
    b_std: float = 0.05,
    dtype: torch.dtype = torch.float32,
) -> PolicyTrainer:
    model = adapted_model(ParallelConfig(), adapter, dtype, b_std=b_std, quantization=quantization)
    return PolicyTrainer(model, OptimizerConfig())


def steps(policy: PolicyTrainer, count: int) -> list[float]:
    return [
        policy.train_step([BATCH], mean_cross_entropy(31), 1e-2).sums["loss"] for _ in range(count)
    ]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """Save a checkpoint after 2 steps, and return the losses of the next 3."""
    root = tmp_path_factory.mktemp("adapters")
    policy = trainer()
    steps(policy, 2)
    save_checkpoint(root, policy, 2, {"step": 2})
    return latest_checkpoint(root), steps(policy, 3)


@pytest.mark.parametrize("quantization", [None, "mxfp4"])
def test_resumed_adapters_continue_the_same_curve_to_the_bit(
    quantization: Quantization | None, saved: tuple[Path, list[float]]
) -> None:
    path, expected = saved
    policy = trainer(quantization=quantization, b_std=0.2)
    assert load_checkpoint(path, policy) == {"step": 2}
    assert steps(policy, 3) == expected


def test_bf16_adapters_resume_with_their_master_weights(tmp_path: Path) -> None:
    policy = trainer(dtype=torch.bfloat16)
    steps(policy, 2)
    path = save_checkpoint(tmp_path, policy, 2, {})
    expected = steps(policy, 3)
    other = trainer(dtype=torch.bfloat16, b_std=0.2)
    load_checkpoint(path, other)
    assert steps(other, 3) == expected


def test_a_checkpoint_holds_no_base(saved: tuple[Path, list[float]]) -> None:
    adapters = sum(a.a.numel() + a.b.numel() for _, a in named_adapters(trainer().module))
    size = sum(file.stat().st_size for file in saved[0].glob("*.distcp"))
    # weights and two moments in fp32, plus torch's description of each tensor
    assert 12 * adapters < size < 20 * adapters + 500_000
    with pytest.raises(ConversionError, match="adapters that must be merged first"):
        MegatronCheckpoint(saved[0])


def factors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        f"{name}.{factor}": parameter.detach().clone()
        for name, adapter in named_adapters(model)
        for factor, parameter in adapter.named_parameters()
    }


def test_expert_adapters_of_a_layer_are_two_tensors_per_matrix() -> None:
    # Saving takes time per tensor. With one tensor per expert, most of a save was this overhead.
    saved = model_state(adapted_model(ParallelConfig()))["0"]
    of_experts = [tensor for name, tensor in saved.items() if ".experts." in name]
    assert len(of_experts) == MODEL.num_layers * 2 * 2
    for tensor in of_experts:
        assert tensor.global_shape[:2] == (MODEL.num_layers, MODEL.num_experts)
        assert tensor.local_shape[0] == MODEL.num_experts


def split_by_expert(state: dict[str, ShardedTensor]) -> dict[str, ShardedTensor]:
    """Describe adapters in the older format, with a separate factor for every expert."""
    split = {}
    for name, tensor in state.items():
        if ".experts." not in name:
            split[name] = tensor
            continue
        layers, experts = tensor.global_shape[:2]
        for expert, part in enumerate(tensor.data):
            split[f"{name}.{expert}"] = ShardedTensor.from_rank_offsets(
                tensor.key,
                part,
                (0, tensor.global_offset[0], layers),
                (1, expert, experts),
                prepend_axis_num=2,
            )
    return split


def test_older_checkpoints_with_one_tensor_per_expert_are_read(
    tmp_path: Path,
) -> None:
    model = adapted_model(ParallelConfig())
    expected = factors(model)
    split = split_by_expert(model_state(model)["0"])
    assert len(split) > MODEL.num_layers * MODEL.num_experts * 4
    dist_checkpointing.save({"model": {"0": split}}, str(tmp_path))

    other = adapted_model(ParallelConfig(), b_std=0.2)
    initialize_adapters(other, seed=1)
    loaded = dist_checkpointing.load({"model": model_state(other)}, str(tmp_path))
    load_model_state(other, loaded["model"])
    assert factors(other).keys() == expected.keys()
    for name, factor in factors(other).items():
        assert torch.equal(factor, expected[name]), name

    (tmp_path / ADAPTER_FILE).write_text(json.dumps(describe_adapters(model)))
    (tmp_path / MODEL_CONFIG_FILE).write_text(MODEL.model_dump_json())
    third = adapted_model(ParallelConfig(), b_std=0.2)
    load_adapter(third, MODEL, CheckpointAdapters(tmp_path))
    for name, factor in factors(third).items():
        assert torch.equal(factor, expected[name]), name


def test_adapters_of_another_base_are_rejected(saved: tuple[Path, list[float]]) -> None:
    policy = trainer()
    weight = policy.module.decoder.layers[1].self_attention.linear_qkv.weight
    with torch.no_grad():
        weight[3, 5] += 1e-3
    with pytest.raises(CheckpointError, match="holds adapters of a different base"):
        load_checkpoint(saved[0], policy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 4}, "adapter.rank=8, but the configuration has 4"),
        ({"alpha": 8.0}, "adapter.alpha=16.0, but the configuration has 8.0"),
        ({"targets": ("q", "o")}, "adapter.targets="),
    ],
)
def test_other_adapters_are_rejected(
    change: dict[str, object], message: str, saved: tuple[Path, list[float]]
) -> None:
    policy = trainer(ADAPTER.model_copy(update=change))
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(saved[0], policy)


def test_model_without_adapters_rejects_adapter_checkpoint(saved: tuple[Path, list[float]]) -> None:
    model = build_model(MODEL, ParallelConfig())
    with pytest.raises(CheckpointError, match="holds adapters, but adapter is null in this run"):
        load_checkpoint(saved[0], PolicyTrainer(model, OptimizerConfig()))
    with pytest.raises(CheckpointError, match="holds adapters, but adapter is null in this run"):
        load_model_weights(saved[0], model)


def test_complete_checkpoint_is_not_loaded_as_adapters(tmp_path: Path) -> None:
    model = build_model(MODEL, ParallelConfig())
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.1)
    path = save_checkpoint(tmp_path, PolicyTrainer(model, OptimizerConfig()), 1, {})
    with pytest.raises(CheckpointError, match="holds a whole model, but this run trains adapters"):
        load_checkpoint(path, trainer())


def test_equal_settings_in_other_spelling_are_accepted(
    saved: tuple[Path, list[float]],
) -> None:
    path, expected = saved
    same = ADAPTER.model_copy(update={"targets": ADAPTER.targets[::-1], "expert_rank": 2})
    assert ADAPTER.rank_of_experts(MODEL) == 2
    policy = trainer(same, b_std=0.2)
    load_checkpoint(path, policy)
    assert steps(policy, 3) == expected


def test_base_digest_covers_all_weights_and_no_adapter() -> None:
    model = adapted_model(ParallelConfig())
    digest = base_digest(model)
    packed = adapted_model(ParallelConfig(), b_std=0.2, quantization="mxfp4")
    assert base_digest(packed) == digest

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = parameter.flatten()[0].item()
            parameter.view(-1)[0] = value + 1.0
            assert (base_digest(model) == digest) == (".adapters." in name), name
            parameter.view(-1)[0] = value
    assert base_digest(model) == digest


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the layers whose weights are read for the digests."""
    layers = []

    def count(weight: torch.Tensor, layer: int) -> torch.Tensor:
        layers.append(layer)
        return digest_of_values(weight, layer)

    monkeypatch.setattr("megatron_gptoss.checkpoint.base_digest.digest_of_values", count)
    return layers


@pytest.mark.parametrize("quantization", [None, "mxfp4"])
def test_saving_and_loading_do_not_read_the_base(
    quantization: Quantization | None, tmp_path: Path, reads: list[int]
) -> None:
    policy = trainer(quantization=quantization)
    loaded = len(reads)
    assert loaded > MODEL.num_layers * MODEL.num_experts
    for step in (1, 2):
        steps(policy, 1)
        path = save_checkpoint(tmp_path, policy, step, {})
    load_checkpoint(path, policy)
    assert len(reads) == loaded


@pytest.mark.parametrize("quantization", [None, "mxfp4"])
def test_reloaded_base_gets_a_new_digest(
    quantization: Quantization | None, reads: list[int]
) -> None:
    model = adapted_model(ParallelConfig(), quantization=quantization)
    digest = base_digest(model)
    loaded = len(reads)
    name = "model.layers.1.mlp.experts.down_proj"
    weights = base_weights()
    # multiplied by 2, a value of MXFP4 stays one
    weights[name] = 2 * weights[name]
    load_hf_weights(model, MODEL, weights.__getitem__)
    assert len(reads) == 2 * loaded
    assert base_digest(model) != digest
    load_hf_weights(model, MODEL, base_weights().__getitem__)
    assert base_digest(model) == digest
