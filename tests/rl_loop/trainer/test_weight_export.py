"""Export by the trainer's first rank: memory of one tensor, and failures on any rank."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from converters.errors import ConversionError
from converters.gathering import GatheredWeights, WeightGathering
from converters.hf_directory import HfDirectory
from converters.mapping import NamedTensor
from converters.model_extras import ModelExtras
from converters.model_weights import load_hf_weights
from converters.names import hf_shapes
from megatron_gptoss import distributed
from megatron_gptoss.config import ModelConfig, ParallelConfig
from megatron_gptoss.model import build_model
from megatron_gptoss.new_directory import DirectoryError
from rl_loop.trainer import gathered_export
from rl_loop.trainer.gathered_export import export_weights, write_export
from rl_loop.trainer.weight_export import WeightExport
from tests.support.converters.models import TINY, tiny_weights
from tests.support.distributed import free_port, run_distributed

EXTRAS = ModelExtras(files={"tokenizer.json": b"{}"})


def every_tensor_alone(alive: list[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield random weights. Append the number of earlier weights that are still alive."""
    memories: list[weakref.ref[np.ndarray]] = []
    for name, shape in hf_shapes(TINY).items():
        alive.append(sum(memory() is not None for memory in memories))
        # The array lives as long as any tensor that shares its memory.
        memory = np.random.default_rng(0).random(shape, np.float32)
        memories.append(weakref.ref(memory))
        yield name, torch.from_numpy(memory)
        del memory


def test_export_holds_one_tensor_at_a_time(tmp_path: Path) -> None:
    alive: list[int] = []
    export = WeightExport(tmp_path / "export", EXTRAS, (3, 5))
    write_export(export, TINY, every_tensor_alone(alive))
    assert max(alive) == 0, "what was written is gone when the next one comes"
    assert (tmp_path / "export/tokenizer.json").read_bytes() == b"{}"
    assert set(HfDirectory(tmp_path / "export").names()) == set(hf_shapes(TINY))


def test_export_compares_the_written_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The export compares tensors without experts, and the experts of one layer."""
    read = HfDirectory.get

    def damaged(self: HfDirectory, name: str, expert: int | None = None) -> torch.Tensor:
        tensor = read(self, name, expert)
        return tensor + 1 if name == "model.norm.weight" else tensor

    monkeypatch.setattr(HfDirectory, "get", damaged)
    with pytest.raises(ConversionError, match=r"model\.norm\.weight"):
        write_export(WeightExport(tmp_path / "export"), TINY, every_tensor_alone([]))
    assert not (tmp_path / "export").exists()


def write_slowly(export: WeightExport, model: ModelConfig, weights: Iterable[NamedTensor]) -> None:
    """Wait a second at the last tensor of layer 0. Write nothing."""
    *_, last = (name for name in hf_shapes(model) if ".layers.0." in name)
    for name, _ in weights:
        if name == last:
            time.sleep(1)
            ahead = (export.directory.parent / "rank 1 sends of layer 1").exists()
            assert not ahead, "its message waits, and its time runs"


def export_with_faults(rank: int, port: int, directory: Path) -> list[str]:
    """Export with a fault in either rank and then without. Return the result of each attempt."""
    torch.set_num_threads(1)
    parallel = ParallelConfig(world_size=2, expert=2)
    distributed.initialize(parallel, rank, port=port)
    model = build_model(TINY, parallel)
    load_hf_weights(model, TINY, tiny_weights().__getitem__)
    gathering = WeightGathering(model, TINY)

    def attempt(export: WeightExport) -> str:
        try:
            export_weights(gathering, export)
        except (ConversionError, DirectoryError) as error:
            return str(error)
        return "exported"

    (directory / "file").touch()
    said = [attempt(WeightExport(directory / "file/export"))]

    reads = 0
    read = gathering.local.read

    def read_badly(*arguments: Any) -> Any:
        nonlocal reads
        reads += 1
        if reads == 3:
            raise RuntimeError("CUDA out of memory")
        return read(*arguments)

    if rank == 1:
        gathering.local.read = read_badly  # type: ignore[method-assign]
    said.append(attempt(WeightExport(directory / "export")))
    assert not (directory / "export").exists()
    if rank == 1:
        gathering.local.read = read  # type: ignore[method-assign]

    said.append(attempt(WeightExport(directory / "export", EXTRAS)))

    if rank == 1:
        exchange = GatheredWeights._send_or_receive

        def tell_and_exchange(self: GatheredWeights, name: str, *arguments: Any) -> None:
            if ".layers.1." in name:
                (directory / "rank 1 sends of layer 1").touch()
            exchange(self, name, *arguments)

        GatheredWeights._send_or_receive = tell_and_exchange  # type: ignore[method-assign]
    # No cleanup of this change, because the process ends with this function.
    gathered_export.write_export = write_slowly
    said.append(attempt(WeightExport(directory / "slow")))
    distributed.shutdown()
    return said


def test_failing_rank_aborts_the_export_on_all_ranks(tmp_path: Path) -> None:
    first, second = run_distributed(export_with_faults, 2, free_port(), tmp_path, timeout=120)
    assert "file" in first[0] and first[0] != "exported"
    assert second[0] == "exported", "it has nothing to write"
    assert first[1] == second[1] == "rank 1 could not read its weights: CUDA out of memory"
    assert first[2] == second[2] == "exported"
    assert first[3] == second[3] == "exported"
    assert (tmp_path / "rank 1 sends of layer 1").exists()

    written = HfDirectory(tmp_path / "export")
    for name, tensor in tiny_weights().items():
        assert torch.equal(written.get(name), tensor), name
