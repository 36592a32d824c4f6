"""Tenants of a trainer rank: each computes the bits that it computes alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_gptoss.optimizer import AdamSettings
from megatron_gptoss.samples import TrainingSamples
from rl_loop.algorithms.summed_losses import SummedLoss
from rl_loop.config.load import load_config
from rl_loop.config.tinker import TinkerConfig
from rl_loop.trainer.local_rank import LocalRank
from rl_loop.trainer.tenant_group import TenantGroup
from rl_loop.trainer.tenant_worker import TenantWorker
from tests.support.rl_loop.tinker_server import SMALLER

SETTINGS = AdamSettings(
    learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.01, clip_grad=1.0
)
LOSS = SummedLoss("cross_entropy")
KINDS = {"a": (8, 1), "b": (4, 2), "c": (8, 3)}
"""Rank and seed by tenant."""
STEPS = 3


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def group(request: pytest.FixtureRequest) -> Iterator[TenantGroup]:
    config = load_config(Path("tiny"), TinkerConfig, [*SMALLER, f"dtype={request.param}"])
    group = TenantGroup(config, LocalRank(config, TenantWorker))
    group.ready()
    yield group
    group.close()


def samples(number: int) -> TrainingSamples:
    """Return two sequences whose lengths and tokens depend on ``number``."""
    random = np.random.default_rng(number)
    rows = []
    for length in (5 + number % 3, 9):
        tokens = random.integers(0, 100, length).astype(np.int32)
        rows.append(
            {
                "token_ids": tokens,
                "target_ids": tokens,
                "loss_mask": np.ones(length, np.bool_),
                "loss_weights": random.random(length, np.float32),
            }
        )
    return TrainingSamples.join(rows, ["first", "second"])


def run_pass(group: TenantGroup, name: str, step: int, part: int) -> np.ndarray:
    number = 100 * list(KINDS).index(name) + 10 * step + part
    return group.accumulate(name, samples(number), LOSS).log_probs


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_interleaved_tenants_have_bits_of_tenants_alone(group: TenantGroup) -> None:
    """Factors, master weights, moments and log-probs are compared, after switches within steps."""
    alone = {}
    for name, kind in KINDS.items():
        group.new_tenant(name, *kind)
        seen = []
        for step in range(STEPS):
            seen += [run_pass(group, name, step, part) for part in range(2)]
            group.take_step(name, SETTINGS)
        alone[name] = (seen, group.copy_tenant(name))
        group.drop_tenant(name)

    together: dict[str, list[np.ndarray]] = {name: [] for name in KINDS}
    for name, kind in KINDS.items():
        group.new_tenant(name, *kind)
    # Tenants start one after the other, so that one steps between two passes of another.
    for time in range(3 * STEPS + len(KINDS)):
        for start, name in enumerate(KINDS):
            step, part = divmod(time - start, 3)
            if not 0 <= step < STEPS:
                continue
            if part < 2:
                together[name].append(run_pass(group, name, step, part))
            else:
                group.take_step(name, SETTINGS)
    for name, (seen, tensors) in alone.items():
        assert all(map(np.array_equal, together[name], seen))
        assert_same(group.copy_tenant(name), tensors)
        assert any(key.startswith("moment.") for key in tensors)
        group.drop_tenant(name)
    assert not np.array_equal(alone["a"][0][0], alone["c"][0][0])


def test_tenant_without_finite_numbers_changes_no_other(group: TenantGroup) -> None:
    group.new_tenant("good", 8, 1)
    group.accumulate("good", samples(1), LOSS)
    group.new_tenant("bad", 8, 2)
    broken = {key: torch.full_like(t, torch.nan) for key, t in group.copy_adapter("bad").items()}
    group.load_tenant("bad", 8, broken, optimizer=False)
    assert not math.isfinite(group.evaluate("bad", samples(1), LOSS).loss)
    group.accumulate("bad", samples(1), LOSS)
    assert not group.take_step("bad", SETTINGS).parameters_updated

    group.take_step("good", SETTINGS)
    found = group.copy_tenant("good")
    group.drop_tenant("bad")
    group.new_tenant("expected", 8, 1)
    group.accumulate("expected", samples(1), LOSS)
    group.take_step("expected", SETTINGS)
    assert_same(found, group.copy_tenant("expected"))
    for name in ("good", "expected"):
        group.drop_tenant(name)


def test_failed_load_leaves_the_tenant_unchanged(group: TenantGroup) -> None:
    group.new_tenant("a", 8, 1)
    group.accumulate("a", samples(1), LOSS)
    group.take_step("a", SETTINGS)
    before = group.copy_tenant("a")
    broken = {key: tensor + 1 for key, tensor in before.items()}
    incomplete = dict(list(broken.items())[:3])
    with pytest.raises(KeyError):
        group.load_tenant("a", 8, incomplete, optimizer=True)
    assert_same(group.copy_tenant("a"), before)
    with pytest.raises(KeyError):
        group.evaluate("unknown", samples(1), LOSS)
    assert_same(group.copy_tenant("a"), before)
    group.drop_tenant("a")
