"""A model that is merged with an adapter has the very bits that the trainer multiplied with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from converters.adapter_checkpoint import export_adapter
from converters.errors import ConversionError
from converters.hf_directory import HfDirectory, write_hf_directory
from converters.live import export_hf_weights
from converters.merge_adapter import merge_adapter
from converters.names import hf_shapes
from megatron_gptoss import distributed
from megatron_gptoss.config import OptimizerConfig, ParallelConfig
from megatron_gptoss.trainer import PolicyTrainer
from tests.distributed import free_port
from tests.megatron_gptoss.adapted import ADAPTER, MODEL, adapted_model, base_weights
from tests.megatron_gptoss.reference import save_checkpoint

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    distributed.initialize(ParallelConfig(), port=free_port())
    yield
    distributed.shutdown()


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
    model = adapted_model(ParallelConfig(), adapter, DTYPES[dtype])
    checkpoint = save_checkpoint(tmp_path, PolicyTrainer(model, OptimizerConfig()), 1, {})
    export_adapter(checkpoint, tmp_path / "peft")
    for number, source in enumerate((checkpoint, tmp_path / "peft")):
        merged = tmp_path / f"merged {number}"
        merge_adapter(base, source, merged, dtype=dtype)
        directory = HfDirectory(merged)
        for name, tensor in export_hf_weights(model, MODEL):
            assert torch.equal(directory.get(name), tensor.to(DTYPES[dtype])), name


def test_another_base_is_refused_and_nothing_is_left(base: Path, tmp_path: Path) -> None:
    model = adapted_model(ParallelConfig())
    checkpoint = save_checkpoint(tmp_path, PolicyTrainer(model, OptimizerConfig()), 1, {})
    name = "model.layers.1.self_attn.k_proj.weight"
    other = write_base(tmp_path / "other", **{name: base_weights()[name] + 1e-3})
    with pytest.raises(ConversionError, match="was trained on another base"):
        merge_adapter(other, checkpoint, tmp_path / "merged", dtype="fp32")
    with pytest.raises(ConversionError, match=r"or in another dtype than torch\.bfloat16"):
        merge_adapter(base, checkpoint, tmp_path / "merged", dtype="bf16")
    assert not list(tmp_path.glob("merged*"))


def test_adapters_of_another_model_are_refused(base: Path, tmp_path: Path) -> None:
    model = adapted_model(ParallelConfig())
    checkpoint = save_checkpoint(tmp_path, PolicyTrainer(model, OptimizerConfig()), 1, {})
    config = checkpoint / "gptoss_config.json"
    config.write_text(config.read_text().replace('"sliding_window":8', '"sliding_window":9'))
    config.write_text(config.read_text().replace('"sliding_window": 8', '"sliding_window": 9'))
    with pytest.raises(ConversionError, match="another model, whose sliding_window is 9, not 8"):
        merge_adapter(base, checkpoint, tmp_path / "merged", dtype="fp32")
