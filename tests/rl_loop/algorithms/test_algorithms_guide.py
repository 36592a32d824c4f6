"""The loss and the advantage of docs/algorithms.md: their code is extracted and run."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_gptoss.step_reductions import reduce_scalars
from megatron_gptoss.step_results import StepStatistics
from rl_loop.algorithms.advantages import BatchRewards, sample_advantages
from rl_loop.algorithms.config import AlgorithmConfig
from rl_loop.algorithms.objectives import policy_objective
from rl_loop.algorithms.policy_loss import LossInputs, PolicyLoss
from rl_loop.algorithms.registry import POLICY_LOSSES
from rl_loop.algorithms.sequences import SequenceIndex
from rl_loop.config.errors import ConfigError
from rl_loop.config.load import load_config
from rl_loop.config.run import RlConfig
from rl_loop.data.rollout_batch import RlUpdates
from rl_loop.tracking.metrics import StepMetrics
from rl_loop.tracking.step_metrics import add_update_metrics
from tests.support.rl_loop.algorithms import build_sample_batch, loss_tokens, samples
from tests.support.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).resolve().parents[3]
GUIDE = ROOT / "docs/algorithms.md"
GPTOSS = f'gptoss() {{ "{sys.executable}" -c "from launch.cli import main; main()" "$@"; }}\n'
"""Shell function for the installed command, with the code of this checkout."""
SHORT = [
    "training.steps=3",
    "model.num_layers=1",
    "initial_weights=null",
    "rollout.tasks_per_step=2",
    "rollout.samples_per_task=4",
    "rollout.max_sampled_tokens_per_turn=32",
    "reward.format_error=-2",
    "tasks.held_out_tasks=1",
    "sandbox.servers=1",
]
"""Overrides for three steps of an untrained model.

Some episodes end with a format error and some at the limit, so their rewards differ.
"""


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directory with the guide's files and our configs, in Python's search path."""
    files = re.findall(r"```\w+ (\S+)\n(.*?)```", GUIDE.read_text(), flags=re.S)
    assert [name for name, _ in files] == ["my_algorithms.py", "configs/algorithm/sapo.yaml"]
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    for name, text in files:
        (tmp_path / name).write_text(text)

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_algorithms", raising=False)
    return tmp_path


def load(workplace: Path, *overrides: str) -> AlgorithmConfig:
    config = load_config(
        workplace / "configs/rl/tiny_retool.yaml", RlConfig, ["algorithm=sapo", *overrides]
    )
    return config.algorithm


def vector(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_guides_functions_have_at_most_20_lines(workplace: Path) -> None:
    code = (workplace / "my_algorithms.py").read_text()
    functions = code[code.index("def sapo") :].split("def ")[1:]
    assert len(functions) == 2
    assert all(function.count("\n") <= 20 for function in functions)


def test_guides_loss_equals_its_formula_and_reinforce_on_policy(workplace: Path) -> None:
    options = load(workplace).policy_loss.arguments
    assert options == {"tau_negative": 1.1}
    loss = POLICY_LOSSES.resolve("my_algorithms:sapo")
    log_probs = [-0.5, -1.2, -0.1]
    old_log_probs = [-0.7, -1.0, -0.1]
    advantages = [1.5, -0.5, 2.0]

    def inputs(new: torch.Tensor, old: torch.Tensor | None) -> LossInputs:
        mask = torch.ones(3, dtype=torch.bool)
        return LossInputs(
            new, old, vector(advantages), mask, SequenceIndex(torch.tensor([0, 0, 1]), count=2)
        )

    got = loss(inputs(vector(log_probs), vector(old_log_probs)), **options).loss
    for i, (new, old, advantage) in enumerate(
        zip(log_probs, old_log_probs, advantages, strict=True)
    ):
        tau = 1.0 if advantage > 0 else 1.1
        gate = 4 / tau / (1 + math.exp(-tau * (math.exp(new - old) - 1)))
        assert float(got[i]) == pytest.approx(-gate * advantage, rel=1e-6)

    on_policy = vector(log_probs).requires_grad_()
    loss(inputs(on_policy, None), **options).loss.sum().backward()
    assert on_policy.grad is not None
    assert on_policy.grad.tolist() == pytest.approx([-a for a in advantages], rel=1e-6)


def test_guides_advantage_subtracts_a_quantile_of_the_group(workplace: Path) -> None:
    config = load(workplace)
    assert config.advantage_arguments == {"share": 0.5}
    groups = [[0.0, 0.0, 0.0, 1.0], [0.0, 1.0, 1.0, 1.0], [1.0], [0.3, 0.3]]
    totals = vector([reward for group in groups for reward in group])
    rewards = BatchRewards(totals, totals[:, None][:, :0], [], [len(group) for group in groups])

    expected = []
    for group in groups:
        baseline = sorted(group)[math.ceil(0.5 * len(group)) - 1]
        expected += [(reward - baseline) / (statistics.pstdev(group) + 1e-6) for reward in group]
    assert sample_advantages(config, rewards).tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "policy_loss=my_algorithms:spao",
            "policy loss 'my_algorithms:spao' cannot be imported: .* has no 'spao'",
        ),
        (
            "policy_loss=my_algorithm:sapo",
            "No module named 'my_algorithm'. Is its directory in PYTHONPATH",
        ),
        (
            "policy_loss=sapo",
            "there is no policy loss 'sapo'. Known names: cispo, gspo, ppo, reinforce. For your own, write MODULE:NAME",
        ),
        (
            "policy_loss=my_algorithms:PolicyLoss",
            "is the class PolicyLoss, expected a function of LossInputs",
        ),
        (
            "policy_loss.options={tau: 1}",
            "unexpected keyword argument 'tau'. Its signature is .*tau_positive",
        ),
        (
            "advantage=quantile",
            "there is no advantage 'quantile'. Known names: dr_grpo, gae, gdpo, grpo, ",
        ),
        ("advantage.options={shares: 1}", "unexpected keyword argument 'shares'"),
        ("advantage={type: grpo, options: {}}", "advantage.options: unknown key for this"),
        ("policy_loss.dual_clip=3", "policy_loss.dual_clip: unknown key for this"),
    ],
)
def test_custom_function_with_wrong_signature_is_rejected_early(
    workplace: Path, override: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(workplace, f"algorithm.{override}")


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (vector([1.0, 2.0]), r"returned \(2,\), expected a tensor of shape \[3\]"),
        (1.0, r"returned float, expected a tensor of shape \[3\]"),
        (vector([1.0, math.nan, 2.0]), "returned .*nan"),
    ],
)
def test_custom_advantage_with_invalid_result_stops_the_run(
    result: Any, message: str, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load(workplace)
    monkeypatch.setattr(sys.modules["my_algorithms"], "quantile", lambda rewards, **options: result)
    rewards = vector([1.0, 0.0, 0.5])
    with pytest.raises(ValueError, match=f"algorithm.advantage my_algorithms:quantile {message}"):
        sample_advantages(config, BatchRewards(rewards, rewards[:, None][:, :0], [], [3]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda result: result.loss, "returned Tensor, expected PolicyLoss"),
        (
            lambda result: replace(result, loss=result.loss.mean()),
            r"returned loss \[\], expected \[\d+\]",
        ),
        (
            lambda result: replace(result, loss=result.loss.detach()),
            "returned a loss that has no gradient",
        ),
        (
            lambda result: replace(result, sums={"gate": result.ratio}),
            r"returned sums\['gate'\] \[\d+\], expected a scalar tensor",
        ),
        (
            lambda result: replace(result, sums={"gate": 1.0}),
            r"returned sums\['gate'\] float, expected a scalar tensor",
        ),
    ],
)
def test_custom_loss_with_invalid_result_stops_the_run(
    change: Callable[[PolicyLoss], Any],
    message: str,
    workplace: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = load(workplace)
    everyone = samples()
    batch = build_sample_batch(everyone)
    log_probs = batch.rollout_log_probs.clone().requires_grad_()
    objective = policy_objective(config, loss_tokens(everyone))
    assert objective(log_probs, log_probs.abs(), batch).loss.requires_grad

    sapo = POLICY_LOSSES.resolve("my_algorithms:sapo")
    wrong = lambda inputs, **options: change(sapo(inputs, **options))  # noqa: E731
    monkeypatch.setattr(sys.modules["my_algorithms"], "sapo", wrong)
    with pytest.raises(ValueError, match=f"algorithm.policy_loss my_algorithms:sapo {message}"):
        objective(log_probs, log_probs.abs(), batch)


def test_metrics_of_a_custom_loss_are_logged(workplace: Path) -> None:
    """The metric is the mean over sampled tokens. The loss chooses its name."""
    everyone = samples()
    batch = build_sample_batch(everyone)
    objective = policy_objective(load(workplace), loss_tokens(everyone))
    output = objective(batch.rollout_log_probs.clone().requires_grad_(), batch.advantages, batch)
    assert not output.sums["policy_loss/gate"].requires_grad

    metrics = StepMetrics(step=0)
    add_update_metrics(
        metrics, build_updates({n: float(v.detach()) for n, v in output.sums.items()})
    )
    mean = float(output.sums["policy_loss/gate"] / output.sums["tokens"])
    assert mean > 0
    assert metrics.values()["policy_loss/gate"] == pytest.approx(mean)


def test_custom_sum_of_unknown_name_is_an_error() -> None:
    """If the sum were dropped, the author of the loss would see no curve and no reason."""
    sums = {"loss": 0.0, "tokens": 1.0, "comparable": 1.0, "sequences": 1.0}
    add_update_metrics(StepMetrics(step=0), build_updates(sums))
    with pytest.raises(ValueError, match="unknown name 'gate'"):
        add_update_metrics(StepMetrics(step=0), build_updates(sums | {"gate": 1.0}))


def build_updates(sums: dict[str, float]) -> RlUpdates:
    statistics = StepStatistics(
        sums=sums, maxima={}, grad_norm=1.0, learning_rate=1e-6, parameters_updated=True
    )
    return RlUpdates(policy=[statistics], critic=[])


@pytest.mark.slow  # tests/rl_loop/engines/test_outside_backend.py trains with a module that only workers import
def test_guides_commands_train_in_separate_processes(workplace: Path) -> None:
    commands = re.search(r"```bash\n(export PYTHONPATH=\.\n.*?)```", GUIDE.read_text(), flags=re.S)[
        1
    ]
    assert commands.count("gptoss ") == 1
    # The additions only shorten the run (an untrained model of one layer) or select this checkout.
    pasted = commands.replace("PYTHONPATH=.", "PYTHONPATH=.:$PYTHONPATH")
    last = "reward.format_error=-2\n"
    assert pasted.count(last) == 1
    pasted = pasted.replace(last, f"{last.strip()} {' '.join(SHORT)}\n")

    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    done = subprocess.run(
        ["bash", "-euc", GPTOSS + pasted],
        cwd=workplace,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        text=True,
        capture_output=True,
        timeout=2 * PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr

    lines = (workplace / "runs/sapo/metrics.jsonl").read_text().splitlines()
    steps = [record for record in map(json.loads, lines) if "loss" in record]
    assert len(steps) == 3
    assert all(math.isfinite(step["loss"]) for step in steps)
    assert any(step["grad_norm"] > 0 for step in steps)


def test_metrics_that_some_micro_batches_lack_are_an_error() -> None:
    """Ranks sum metrics by position, so all micro-batches need the same names."""
    one, two = torch.tensor(1.0), torch.tensor(2.0)
    for batches in ([{"a": one}, {"a": one, "b": two}], [{"a": one, "b": two}, {"a": one}]):
        with pytest.raises(ValueError, match="loss metrics b are missing"):
            reduce_scalars(batches, torch.distributed.ReduceOp.SUM)
