"""MXFP4 experts in the real loop in one process: trained, sampled and exported values are equal."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from converters.errors import ConversionError
from converters.hf_directory import HfDirectory
from converters.torch_dist import export_checkpoint
from megatron_gptoss.checkpoint.directory import latest_checkpoint
from rl_loop.config.load import load_config
from rl_loop.config.run import RlConfig
from rl_loop.export import export_policy, greedy_agreement
from rl_loop.run_parts import build_tasks
from rl_loop.tracking.run_directory import read_training_steps
from rl_loop.trainer.gathered_export import check_mxfp4_experts
from rl_loop.weight_sync.canary import CanaryError
from tests.support.in_process import LocalRollouts, local_loop
from tests.support.rl_loop.small_config import SMALL

CONFIGS = Path(__file__).parents[3] / "configs"
WIDE = [*SMALL, "model.hidden_size=64", "model.intermediate_size=32", "optimizer={lr: 1e-2}"]
EXPERTS = 2 * 2 * 4
"""Number of expert matrices: 2 per expert, 2 layers, 4 experts."""


def config(directory: Path, *overrides: str) -> RlConfig:
    options = [*WIDE, f"output_dir={directory}", *overrides]
    return load_config(CONFIGS / "rl/tiny_retool.yaml", RlConfig, options)


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRollouts]:
    shared = LocalRollouts(config(tmp_path_factory.mktemp("rollouts"), "quantization=mxfp4"))
    yield shared
    shared.close()


def read_steps(settings: RlConfig) -> list[dict[str, Any]]:
    return read_training_steps(settings.directory / "metrics.jsonl")


@pytest.mark.parametrize(
    "algorithm",
    [
        [],
        ["algorithm.kl={coefficient: 0.1}", "algorithm.routing_replay=R3"],
        ["algorithm=ppo", "algorithm.critic={warmup_steps: 1, lr: 1e-2}"],
    ],
    ids=["plain", "kl, R3", "ppo"],
)
def test_mxfp4_engine_and_trainer_have_equal_values_and_ratio_1(
    algorithm: list[str], tmp_path: Path, rollouts: LocalRollouts
) -> None:
    settings = config(tmp_path, "quantization=mxfp4", "training.steps=3", *algorithm)
    with local_loop(settings, rollouts) as loop:
        before = loop.trainer.mxfp4_digests()
        loop.train()
        after = loop.trainer.mxfp4_digests()
    assert before.keys() == after.keys()
    assert len(before) == EXPERTS
    assert any(before[name] != after[name] for name in before)

    for step in read_steps(settings):
        assert all(value is not None and math.isfinite(value) for value in step.values())
        assert step["mismatch/canary_gap"] < 1e-5
        assert step["mismatch/mxfp4_experts_compared"] == EXPERTS
        assert step.get("ratio/deviation_max", 0) == 0
    assert max(step.get("grad_norm", 0) for step in read_steps(settings)) > 0
    if settings.algorithm.kl is not None:
        # The reference is the initial policy with the same quantization.
        assert abs(read_steps(settings)[0]["kl_reference"]) < 1e-6


def test_exported_mxfp4_values_equal_those_of_the_engines(
    tmp_path: Path, rollouts: LocalRollouts
) -> None:
    settings = config(tmp_path, "quantization=mxfp4", "training.steps=2")
    with local_loop(settings, rollouts) as loop:
        loop.train()
        loop.checkpointer.save_finished_steps()
        loop.evaluate()
        harmony = loop.tasks.codec

        # Other quantized values in the engines are an error before the directory is renamed.
        name = next(iter(loop.engine_digests))
        other = loop.engine_digests | {name: "0" * 16}
        with pytest.raises(
            ConversionError, match=r"MXFP4 values of .*, expert 0 differ from those of the engines"
        ):
            export_policy(
                loop.trainer, harmony, tmp_path / "hf", quantization="mxfp4", sampled=other
            )
        assert list(tmp_path.glob("hf*")) == []

        compared = export_policy(
            loop.trainer,
            harmony,
            tmp_path / "hf",
            quantization="mxfp4",
            sampled=loop.engine_digests,
        )
        assert compared == EXPERTS
        agreement = greedy_agreement(
            loop.trainer, build_tasks(settings), tmp_path / "hf", settings.dtype, "mxfp4"
        )
        assert agreement.equal == agreement.compared > 0

    checkpoint = latest_checkpoint(settings.directory / "checkpoints")
    assert checkpoint is not None
    export_checkpoint(checkpoint, tmp_path / "converted", "mxfp4")
    own, converted = HfDirectory(tmp_path / "hf"), HfDirectory(tmp_path / "converted")
    compared = 0
    for name in own.names():
        packed = own.read_mxfp4(name)
        if packed is None:
            continue
        others = converted.read_mxfp4(name)
        assert others is not None
        assert all(torch.equal(*pair) for pair in zip(packed, others, strict=True)), name
        compared += 1
    assert compared == 4


def test_damaged_mxfp4_export_is_rejected(tmp_path: Path, rollouts: LocalRollouts) -> None:
    settings = config(tmp_path, "quantization=mxfp4", "training.steps=1")
    with local_loop(settings, rollouts) as loop:
        export_policy(loop.trainer, loop.tasks.codec, tmp_path / "hf", quantization="mxfp4")
        trained = {"the trainer": loop.trainer.mxfp4_digests()}
        check_mxfp4_experts(tmp_path / "hf", tmp_path / "hf", trained)
        place = HfDirectory(tmp_path / "hf").file_ranges("model.layers.1.mlp.experts.down_proj")[1]
        with place.path.open("r+b") as file:
            file.seek(place.offset + 3)
            byte = file.read(1)[0]
            file.seek(place.offset + 3)
            file.write(bytes([byte ^ 1]))
        message = r"layers\.1\.mlp\.experts\.down_proj, expert 0 differ from those of the trainer"
        with pytest.raises(ConversionError, match=message):
            check_mxfp4_experts(tmp_path / "hf", tmp_path / "hf", trained)


def test_resumed_mxfp4_run_continues_the_same_curve(
    tmp_path: Path, rollouts: LocalRollouts
) -> None:
    options = ["quantization=mxfp4", "optimizer.schedule=constant"]

    def train(directory: Path, steps: int, resume: bool = False) -> list[dict[str, Any]]:
        settings = config(directory, *options, f"training.steps={steps}")
        with local_loop(settings, rollouts, resume) as loop:
            loop.train()
        return read_steps(settings)

    whole = train(tmp_path / "whole", 4)
    train(tmp_path / "cut", 2)
    resumed = train(tmp_path / "cut", 4, resume=True)
    for name in ("reward", "loss", "grad_norm"):
        found, expected = ([step[name] for step in curve] for curve in (resumed, whole))
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-6), name


def test_engines_without_digests_are_not_counted_as_compared(
    tmp_path: Path, rollouts: LocalRollouts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang servers report no digests. Their weights are compared by checksums."""
    monkeypatch.setattr(rollouts, "mxfp4_digests", list)
    settings = config(tmp_path, "quantization=mxfp4", "training.steps=1")
    with local_loop(settings, rollouts) as loop:
        loop.train()
    [step] = read_steps(settings)
    assert "mismatch/canary_gap" in step
    assert "mismatch/mxfp4_experts_compared" not in step


def test_canary_detects_mxfp4_engine_of_unquantized_trainer(
    tmp_path: Path,
) -> None:
    faulty = ["rollout.engine.quantization=mxfp4", "training.steps=1"]
    with (
        local_loop(config(tmp_path / "a", *faulty)) as loop,
        pytest.raises(CanaryError, match="do not compute the same model"),
    ):
        loop.train()

    allowed = config(tmp_path / "b", *faulty, "canary_tolerance=9")
    with local_loop(allowed) as loop:
        loop.train()
    [step] = read_steps(allowed)
    assert step["mismatch/canary_gap"] > 1e-3
    assert step["mismatch/log_prob_gap_mean"] > 1e-3
    assert "mismatch/mxfp4_experts_compared" not in step
