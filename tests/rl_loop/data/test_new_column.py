"""A new per-token column needs only an attribute of TokenColumns to arrive in the loss."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

DECLARED_IN = "megatron_gptoss/token_columns.py"
BEFORE = "    advantages: Annotated["
DECLARATION = '''    token_weight: Annotated[Array | None, Column("float32", default=1)] = None
    """Weight of the token in the loss."""
'''
"""The whole declaration of a column. Only code that fills and reads the column is added to it."""

PROGRAM = """
import pickle
import sys
from pathlib import Path

import numpy as np
import torch

from megatron_gptoss.token_columns import column_bytes
from rl_loop.algorithms.config import AlgorithmConfig
from rl_loop.algorithms.objectives import policy_objective
from rl_loop.algorithms.policy_loss import LossInputs, PolicyLoss
from rl_loop.data.credit import assign_advantages
from rl_loop.data.samples import to_samples
from rl_loop.data.trajectory import Trajectory, TrajectoryGroup
from rl_loop.rollout.group_store import GroupStore
from rl_loop.trainer.rank_inputs import RankInputStore
from rl_loop.trainer.step_plan import plan_step
from tests.support.rl_loop.trainer.settings import build_settings

read = []


def weighted(inputs: LossInputs) -> PolicyLoss:
    weight = inputs.column("token_weight")
    read.append(weight)
    ratio = inputs.ratio()
    loss = -inputs.advantages * ratio * weight
    return PolicyLoss(loss=loss, ratio=ratio.detach(), clipped=torch.zeros_like(inputs.mask))


def episode(reward: float, **columns: object) -> Trajectory:
    mask = [0, 0, 1, 1, 1, 1]
    log_probs = [-0.5 * on for on in mask]
    return Trajectory(
        "t",
        token_ids=range(6),
        loss_mask=mask,
        rollout_log_probs=log_probs,
        reward=reward,
        **columns,
    )


def send(value: object) -> object:
    return pickle.loads(pickle.dumps(value, protocol=5))


# The episode fills the column. A group of one episode with the column and one without is kept with
# a checkpoint and restored.
weight = np.arange(6, dtype=np.float32)
store = GroupStore(Path(sys.argv[1]), 2, "settings")
store.save(1, {0: (0, TrajectoryGroup("t", [episode(1.0, token_weight=weight), episode(0.0)]))})
_, group = store.load(1)[0]

# Driver: samples of the step, sent to the rank.
config = AlgorithmConfig.model_validate({"policy_loss": {"type": "__main__:weighted"}})
samples = assign_advantages(to_samples([group], config, 1), [group], config, 8)
(inputs,) = RankInputStore(send).store(samples, plan_step(samples, build_settings(1)))

# Rank: packed micro-batches, each split over two context-parallel ranks, and the loss.
(mini_batch,) = inputs.mini_batches
(batches,) = inputs.pack(8)
objective = policy_objective(config, torch.from_numpy(mini_batch.loss_tokens))
rows = {}
for batch in batches:
    for part in (batch.context_parallel_shard(0, 2), batch.context_parallel_shard(1, 2)):
        log_probs = part.column("rollout_log_probs").clone().requires_grad_()
        output = objective(log_probs, log_probs.detach(), part)
        output.loss.backward()
        weight = read.pop()
        for i in np.flatnonzero(part.loss_mask).tolist():
            label = (int(part.sample_ids[i]), int(part.labels[i]))
            advantage = part.column("advantages")[i]
            assert torch.sign(log_probs.grad[i]) == -torch.sign(advantage), label
            rows[label] = float(weight[i])
        assert not weight[~part.loss_mask].any()
assert column_bytes("episode") == 13, "token_ids 4, loss_mask 1, log-probs 4, and the new column 4"
with_column = {(0, token): float(token) for token in range(2, 6)}
without = {(1, token): 1.0 for token in range(2, 6)}
assert rows == with_column | without, rows
"""


def run_with(declaration: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run PROGRAM with a copy of the project that has one more declaration."""
    for package in ("megatron_gptoss", "rl_loop", "converters"):
        shutil.copytree(ROOT / package, directory / package)
    path = directory / DECLARED_IN
    text = path.read_text()
    assert text.count(BEFORE) == 1
    path.write_text(text.replace(BEFORE, declaration + BEFORE))

    (directory / "program.py").write_text(PROGRAM)
    paths = [directory, ROOT / "kernels", ROOT]
    return subprocess.run(
        [sys.executable, "program.py", str(directory / "ahead")],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": ":".join(map(str, paths))},
        capture_output=True,
        text=True,
        check=False,
    )


def test_new_column_arrives_in_the_loss(tmp_path: Path) -> None:
    """The column passes through groups, samples, a rank's data, packing and context parallelism."""
    done = run_with(DECLARATION, tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("declaration", "message"),
    [
        pytest.param("", "unexpected keyword argument 'token_weight'", marks=pytest.mark.slow),
        (
            DECLARATION.replace('"float32"', '"float64"'),
            "column token_weight of task t holds float32, expected float64",
        ),
    ],
    ids=["not declared", "other dtype"],
)
def test_undeclared_or_mistyped_column_is_rejected(
    declaration: str, message: str, tmp_path: Path
) -> None:
    done = run_with(declaration, tmp_path)
    assert done.returncode != 0
    assert message in done.stderr, done.stderr
