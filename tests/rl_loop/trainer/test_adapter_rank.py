"""Trainer rank with adapters: its base, its reference policy, and its resume."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from converters.adapter_checkpoint import export_adapter
from converters.errors import ConversionError
from megatron_gptoss.checkpoint.errors import CheckpointError
from megatron_gptoss.samples import TrainingSamples
from tests.support.rl_loop.trainer.adapter_rank import (
    ADAPTER,
    SAMPLES,
    Weights,
    open_trainer,
    packable,
)
from tests.support.rl_loop.trainer.adapter_rank import base as base
from tests.support.rl_loop.trainer.adapter_rank import no_group_is_left as no_group_is_left

KL = "algorithm.kl={coefficient: 0.1}"


def scores(directory: Path, *overrides: str) -> np.ndarray:
    with open_trainer(directory, *overrides) as (group, _):
        return group.score(SAMPLES)


@pytest.mark.parametrize("precision", ["null", "mxfp4"])
@pytest.mark.parametrize("source", ["hf", "run"])
def test_merged_weights_of_new_adapters_equal_their_base(
    source: str, precision: str, base: Path, tmp_path: Path
) -> None:
    initial = f"initial_weights={base}/{source}"
    with open_trainer(tmp_path / "plain", initial) as (group, _):
        expected = group.weights()
    with open_trainer(tmp_path / "x", initial, ADAPTER, f"quantization={precision}") as (group, _):
        found = group.weights()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_random_mxfp4_base_is_rounded(tmp_path: Path) -> None:
    options = ["initial_weights=null", ADAPTER]
    with open_trainer(tmp_path / "a", *options) as (group, _):
        dense = group.weights()
    with open_trainer(tmp_path / "b", *options, "quantization=mxfp4") as (group, _):
        packed = group.weights()
    expected = packable(dense)
    assert all(torch.equal(packed[name], tensor) for name, tensor in expected.items())


def test_base_that_is_not_mxfp4_is_rejected_by_name(base: Path, tmp_path: Path) -> None:
    with open_trainer(tmp_path / "random", "initial_weights=null") as (group, _):
        group.save(1, {"step": 1}, True)
    options = [f"initial_weights={tmp_path}/random", ADAPTER, "quantization=mxfp4"]
    message = r"linear_fc1.weight: \d+ of \d+ values are not MXFP4 values"
    with pytest.raises(ConversionError, match=message), open_trainer(tmp_path / "x", *options):
        pass


def test_reference_policy_is_the_base_without_a_second_model(base: Path, tmp_path: Path) -> None:
    initial = f"initial_weights={base}/hf"
    expected = scores(tmp_path / "plain", initial)
    with open_trainer(tmp_path / "x", initial, ADAPTER, "quantization=mxfp4", KL) as (group, rank):
        before = group.compute_estimates(SAMPLES)["reference_log_probs"]
        assert np.array_equal(before, group.score(SAMPLES)), "B is zero"
        for step in range(2):
            group.sft_step(SAMPLES, step)
        after = group.compute_estimates(SAMPLES)["reference_log_probs"]
        assert np.array_equal(after, expected)
        assert np.abs(group.score(SAMPLES) - expected).max() > 0.1

        worker = rank.worker
        assert worker.reference is None
        embeddings = [name for name, _ in list_models(worker) if name.endswith("word_embeddings")]
        assert len(embeddings) == 1


def list_models(worker: object) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield all modules of a worker, each once."""
    seen: set[int] = set()
    for name, value in vars(worker).items():
        owners = [value, getattr(value, "module", None)]
        for owner in owners:
            if not isinstance(owner, torch.nn.Module):
                continue
            for path, module in owner.named_modules():
                if id(module) not in seen:
                    seen.add(id(module))
                    yield f"{name}.{path}", module


def test_full_training_has_a_separate_reference_model(base: Path, tmp_path: Path) -> None:
    with open_trainer(tmp_path / "x", f"initial_weights={base}/hf", KL) as (_, rank):
        embeddings = [n for n, _ in list_models(rank.worker) if n.endswith("word_embeddings")]
        assert len(embeddings) == 2


def test_resumed_trainer_continues_bit_for_bit(base: Path, tmp_path: Path) -> None:
    options = [f"initial_weights={base}/hf", ADAPTER]
    with open_trainer(tmp_path / "x", *options) as (group, _):
        for step in range(2):
            group.sft_step(SAMPLES, step)
        group.save(2, {"step": 2}, True)
        expected = [group.sft_step(SAMPLES, step).sums["loss"] for step in (2, 3)]
        weights = group.weights()

    moved = [f"initial_weights={base}/run", ADAPTER, "quantization=mxfp4"]
    for again in (options, moved):
        with open_trainer(tmp_path / "x", *again) as (group, _):
            assert group.resume().state == {"step": 2}
            assert [group.sft_step(SAMPLES, step).sums["loss"] for step in (2, 3)] == expected
            resumed = group.weights()
        assert all(torch.equal(resumed[name], tensor) for name, tensor in weights.items())


@pytest.fixture(scope="module")
def adapted(base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Weights]:
    """Train adapters.

    Returns:
        The run with its checkpoint and the adapters in PEFT's format, and the merged weights.
    """
    directory = tmp_path_factory.mktemp("adapted") / "run"
    with open_trainer(directory, f"initial_weights={base}/hf", ADAPTER) as (group, _):
        for step in range(2):
            group.sft_step(SAMPLES, step)
        group.save(2, {"step": 2}, True)
        weights = group.weights()
    export_adapter(directory / "checkpoints/step_000002", directory / "adapter")
    return directory, weights


@pytest.mark.parametrize("precision", ["null", "mxfp4"])
@pytest.mark.parametrize("source", [".", "checkpoints/step_000002", "adapter"])
def test_run_starts_from_the_adapters_of_another_run(
    source: str, precision: str, base: Path, adapted: tuple[Path, Weights], tmp_path: Path
) -> None:
    directory, expected = adapted
    options = [
        f"initial_weights={base}/hf",
        f"initial_adapter={directory / source}",
        f"quantization={precision}",
        ADAPTER,
    ]
    with open_trainer(tmp_path / "x", *options) as (group, _):
        found = group.weights()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        group.sft_step(SAMPLES, 0)
        name = "model.layers.1.mlp.experts.down_proj"
        assert not torch.equal(group.weights()[name], expected[name])


def test_reference_of_a_run_with_initial_adapter_includes_it(
    base: Path, adapted: tuple[Path, Weights], tmp_path: Path
) -> None:
    directory, _ = adapted
    options = [f"initial_weights={base}/hf", f"initial_adapter={directory}", ADAPTER, KL]
    with open_trainer(tmp_path / "x", *options) as (group, rank):
        started_with = group.score(SAMPLES)
        for step in range(2):
            group.sft_step(SAMPLES, step)
        weights = group.weights()
        learned = group.score(SAMPLES)

        reference = group.compute_estimates(SAMPLES)["reference_log_probs"]
        assert np.array_equal(reference, started_with)
        assert np.abs(learned - started_with).max() > 0.01
        assert rank.worker.reference is None

        # Scoring the reference does not change the policy or its later updates.
        assert np.array_equal(group.score(SAMPLES), learned)
        assert all(torch.equal(group.weights()[name], x) for name, x in weights.items())
        group.save(2, {"step": 2}, True)
        expected = group.sft_step(SAMPLES, 2).sums["loss"]
    with open_trainer(tmp_path / "x", *options) as (group, _):
        group.resume()
        again = group.compute_estimates(SAMPLES)["reference_log_probs"]
        assert np.array_equal(again, started_with)
        assert group.sft_step(SAMPLES, 2).sums["loss"] == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["initial_weights=null", "quantization=null"], "was trained on a different base"),
        (["adapter.alpha=9"], "adapter.alpha=8.0, but the model was built with adapter.alpha=9.0"),
    ],
)
def test_initial_adapter_of_another_base_or_settings_is_rejected(
    changes: list[str], message: str, base: Path, adapted: tuple[Path, Weights], tmp_path: Path
) -> None:
    options = [f"initial_weights={base}/hf", f"initial_adapter={adapted[0]}", ADAPTER, *changes]
    with pytest.raises(ConversionError, match=message), open_trainer(tmp_path / "x", *options):
        pass


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["initial_weights=null", ADAPTER], "holds adapters of a different base"),
        ([ADAPTER, "adapter.alpha=9"], "adapter.alpha=8.0, but the configuration has 9.0"),
        ([], "holds adapters, but adapter is null in this run"),
    ],
)
def test_resume_with_another_base_or_adapter_is_rejected(
    changes: list[str], message: str, base: Path, tmp_path: Path
) -> None:
    options = [f"initial_weights={base}/hf"]
    with open_trainer(tmp_path / "x", *options, ADAPTER) as (group, _):
        group.sft_step(SAMPLES, 0)
        group.save(1, {"step": 1}, True)
    with (
        open_trainer(tmp_path / "x", *options, *changes) as (group, _),
        pytest.raises(CheckpointError, match=message),
    ):
        group.resume()


def test_adapters_of_frozen_parts_do_not_change(base: Path, tmp_path: Path) -> None:
    options = [f"initial_weights={base}/hf", ADAPTER, "ablation.freeze=[experts]"]
    with open_trainer(tmp_path / "x", *options) as (group, _):
        before = group.weights()
        group.sft_step(SAMPLES, 0)
        after = group.weights()
    changed = {name for name, tensor in before.items() if not torch.equal(after[name], tensor)}
    attention = {f"model.layers.{i}.self_attn.{x}_proj.weight" for i in (0, 1) for x in "qkvo"}
    assert changed == attention


def with_random_routes(lengths: list[int]) -> TrainingSamples:
    """Return documents with random routes: 2 of 4 experts in both layers."""
    random = np.random.default_rng(0)
    samples = []
    for length in lengths:
        scores = random.random((length - 1, 2, 4))
        routes = scores.argsort(axis=-1)[..., :2].astype(np.uint8)
        token_ids = random.integers(0, 128, length)
        samples.append(
            {
                "token_ids": token_ids,
                "loss_mask": [0] + [1] * (length - 1),
                "routed_experts": routes,
            }
        )
    return TrainingSamples.join(samples)


def test_reference_replays_the_engines_routes_like_the_policy(base: Path, tmp_path: Path) -> None:
    replay = ["rollout.routed_experts=true", "algorithm.routing_replay=R3"]
    samples = with_random_routes([30, 12, 25])
    with open_trainer(tmp_path / "x", f"initial_weights={base}/hf", ADAPTER, KL, *replay) as (
        group,
        _,
    ):
        reference = group.compute_estimates(samples)["reference_log_probs"]
        assert group.route_agreement()["routes_compared"] == 0, "only the policy's are counted"
        assert np.array_equal(reference, group.score(samples)), "B is zero"
        assert not np.array_equal(reference, group.score(samples.without_routes()))
