"""Size of Ray's store: computed from the configuration, and checked before the start."""

from __future__ import annotations

import os
import subprocess
import textwrap
from pathlib import Path

import pytest

from megatron_gptoss import host_memory
from rl_loop.config.errors import StartError
from rl_loop.config.every_run import RunConfig
from rl_loop.config.load import load_config
from rl_loop.config.run import RlConfig, SftConfig
from rl_loop.config.shipped import shipped_files
from rl_loop.lifecycle import store_size
from rl_loop.lifecycle.start_checks import evaluation_need, store_need
from rl_loop.lifecycle.store_size import (
    MIN_STORE_BYTES,
    StoreNeed,
    check_local_store,
    store_bytes,
)
from tests.support.forked_workers import forked_python

ROOT = Path(__file__).parents[3]
CONFIGS = [*shipped_files("rl"), *shipped_files("sft")]
NODE_BYTES = 64 << 30
"""Bytes of /dev/shm and of memory on a small node with GPUs."""

STEP = [
    "tasks.held_out_tasks=8",
    "model.max_length=32768",
    "model.num_layers=24",
    "model.experts_per_token=4",
    "model.num_experts=128",
    "model.yarn_original_length=4096",
    "training.max_tokens_per_micro_batch=32768",
    "rollout.max_episode_tokens=32768",
    "rollout.tasks_per_step=6",
    "rollout.samples_per_task=6",
    "rollout.routed_experts=true",
    "algorithm.routing_replay=R3",
    "rollout.engine.type=sglang",
]
"""Overrides for a step of 36 and an evaluation of 8 episodes, with 24 layers of routes."""


def configuration(path: Path) -> RunConfig:
    return load_config(path, RlConfig if path.parent.name == "rl" else SftConfig)


def rl_config(*overrides: str) -> RlConfig:
    return load_config(
        ROOT / "configs/rl/tiny_retool.yaml", RlConfig, ["initial_weights=null", *overrides]
    )


def run_program(code: str, **environment: str) -> str:
    """Run a Python program that starts its own Ray. Return its output."""
    python = forked_python()
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    done = subprocess.run(
        [*python, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_shipped_configurations_fit_an_ordinary_node(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_size, "shared_memory_bytes", lambda: NODE_BYTES)
    monkeypatch.setattr(host_memory, "available_bytes", lambda: NODE_BYTES)
    need = store_need(configuration(path))
    check_local_store(need)
    assert need.step <= store_bytes(need) <= NODE_BYTES
    if path.stem.startswith("tiny"):
        assert store_bytes(need) == MIN_STORE_BYTES


def test_need_of_a_step_is_the_size_of_its_columns() -> None:
    config = rl_config(*STEP)
    tokens = (36 + 8) * 32_768
    need = store_need(config)
    assert need.episodes == 36 + 8
    # Routes of 128 experts are uint8.
    assert need.routes == 36 * 32_768 * 24 * 4, "an evaluation replays nothing"
    # Every episode has ids, mask, log-probs and text. Episodes of the step also have the columns
    # for the ranks with advantages, the scores of a pass without replay, and the token values of
    # an update.
    assert need.columns == tokens * (4 + 1 + 4 + 5) + 36 * 32_768 * ((4 + 1 + 4 + 4) + 4 + (4 + 4))
    unrecorded = store_need(rl_config(*STEP, "tracking.episodes=0"))
    assert unrecorded.columns == need.columns, "episodes are compared whether or not recorded"
    assert need.weights == 0, "servers get weights without Ray's store"
    assert (
        store_need(
            rl_config(*STEP, "algorithm.routing_replay=none", "rollout.routed_experts=false")
        ).routes
        == 0
    )


def test_need_grows_with_staleness_rounds_and_estimates() -> None:
    plain = store_need(rl_config())
    assert plain.episodes == 12 * 8 + 128

    asynchronous = store_need(rl_config("algorithm.max_staleness=1"))
    assert asynchronous.episodes == plain.episodes + 12 * 8
    assert "algorithm.max_staleness" in asynchronous.keys
    assert store_need(rl_config("algorithm.max_staleness=4")).episodes == plain.episodes + 4 * 96

    rounds = store_need(rl_config("algorithm.dynamic_sampling_rounds=3"))
    assert rounds.episodes == plain.episodes + 2 * 12 * 8
    assert "algorithm.dynamic_sampling_rounds" in rounds.keys
    both = store_need(rl_config("algorithm.dynamic_sampling_rounds=3", "algorithm.max_staleness=2"))
    assert both.episodes == plain.episodes + 2 * 3 * 96

    estimates = [
        "algorithm=ppo",
        "algorithm.critic.warmup_steps=0",
        "algorithm.kl.coefficient=0.001",
    ]
    estimated = store_need(rl_config(*estimates))
    # Adds values, returns, reference log-probs, and two results of earlier passes. Ids and mask
    # are sent once.
    assert estimated.columns == plain.columns + 12 * 8 * 384 * (4 + 4 + 4 + (4 + 4))

    # With mini-batches, ranks get other sequences than in the pass before, so ids and mask are
    # sent again. Mini-batches also need the old log-probs.
    cut = store_need(rl_config(*estimates, "algorithm.mini_batches=2"))
    assert cut.columns == estimated.columns + 12 * 8 * 384 * (4 + 1 + 4)

    # Three fp32 copies: the returned weights, the stored weights, and the earlier version.
    assert plain.weights == 3 * 4 * rl_config().model.num_parameters


def test_need_of_an_evaluation_counts_all_samples() -> None:
    need = evaluation_need(rl_config("evaluation.samples_per_task=32"), tasks=128)
    assert need.episodes == 128 * 32
    assert need.columns == 128 * 32 * 384 * (4 + 1 + 4 + 5)


def build_need(step: int) -> StoreNeed:
    columns = int(step / store_size.HEAD_ROOM)
    return StoreNeed(
        episodes=1,
        longest=1,
        columns=columns,
        routes=0,
        weights=0,
        keys=["rollout.max_episode_tokens"],
    )


@pytest.mark.parametrize(
    ("shared", "memory", "message"),
    [
        (
            1 << 30,
            8 << 30,
            "but /dev/shm has only 1.1 GB free. Lower rollout.max_episode_tokens, or enlarge /dev/shm",
        ),
        (8 << 30, 1 << 30, "but only 1.1 GB of memory are free. Lower rollout.max_episode_tokens"),
    ],
)
def test_step_that_does_not_fit_is_rejected_in_one_line(
    shared: int, memory: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_size, "shared_memory_bytes", lambda: shared)
    monkeypatch.setattr(host_memory, "available_bytes", lambda: memory)
    check_local_store(build_need(1 << 30))
    with pytest.raises(StartError) as refused:
        check_local_store(build_need(2 << 30))
    assert message in str(refused.value)
    assert str(refused.value).startswith("a step needs 2.1 GB of Ray's object store for 1 episodes")
    assert "\n" not in str(refused.value)


def test_small_run_fits_a_container_with_64_mb_of_shared_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """64 MB is Docker's default. Ray then uses a directory on the disk."""
    monkeypatch.setattr(store_size, "shared_memory_bytes", lambda: 64 << 20)
    need = store_need(rl_config())
    check_local_store(need)
    assert store_bytes(need) == MIN_STORE_BYTES


FILL = f"""
import time

import ray
import numpy as np
from pathlib import Path
from ray._private.internal_api import memory_summary
from megatron_gptoss.routes import route_dtype
from megatron_gptoss.samples import TrainingSamples
from rl_loop.cluster.ray_session import start_local_ray
from rl_loop.config.errors import StartError
from rl_loop.config.load import load_config
from rl_loop.config.run import RlConfig
from rl_loop.lifecycle.start_checks import store_need
from rl_loop.lifecycle.store_size import check_running_store
from rl_loop.trainer.rank_inputs import SCORED_COLUMNS, RankInputStore
from rl_loop.trainer.step_plan import plan_step

config = load_config(Path("configs/rl/tiny_retool.yaml"), RlConfig, ["initial_weights=null", *{STEP!r}])
need = store_need(config)
tokens = config.rollout.max_episode_tokens
model = config.model
routes_shape = (tokens - 1, model.num_layers, model.experts_per_token)

def episode():
    log_probs = np.zeros(tokens, np.float32)
    return dict(
        token_ids=np.ones(tokens, np.int32),
        loss_mask=np.ones(tokens, bool),
        rollout_log_probs=log_probs,
    )

def hold_step():
    # 36 episodes to train on, with routes, and 8 held-out ones; what two passes send and one brings back
    held = []
    for number in range(44):
        held.append(ray.put((episode(), b"." * (5 * tokens))))
        if number < 36:
            held.append(ray.put(np.ones(routes_shape, route_dtype(model.num_experts))))

    samples = TrainingSamples.join([episode() for _ in range(36)])
    samples = samples.with_columns(advantages=np.zeros(samples.tokens, np.float32))
    plan = plan_step(samples, config)
    inputs = RankInputStore(ray.put)
    held += inputs.store(samples, plan, SCORED_COLUMNS)
    held.append(ray.put(np.zeros(samples.tokens, np.float32)))
    held += inputs.store(samples, plan)
    return held

def is_spilled():
    time.sleep(3)  # the disk is written to in the background
    # The address, because other tests may have a Ray of their own.
    address = ray.get_runtime_context().gcs_address
    return "Spilled" in memory_summary(address, stats_only=True)
"""


def test_store_of_the_computed_size_holds_a_step() -> None:
    program = f"""{FILL}
start_local_ray(num_cpus=1, object_store_bytes=need.step)
check_running_store(need)
held = hold_step()
print(is_spilled())
ray.shutdown()
"""
    assert run_program(program).split() == ["False"]


def test_running_ray_that_would_spill_a_step_is_rejected() -> None:
    program = f"""{FILL}
start_local_ray(num_cpus=1, object_store_bytes=need.step // 2)
try:
    check_running_store(need)
except StartError as refused:
    print(refused)
held = hold_step()
print(is_spilled())
ray.shutdown()
"""
    refused, spilled = run_program(program).strip().split("\n")
    assert (
        "a step needs 0.2 GB of Ray's object store for 44 episodes of up to 32,768 tokens"
        in refused
    )
    assert "but the store has only 0.1 GB. Lower rollout.tasks_per_step, " in refused
    assert "start Ray's nodes with a larger --object-store-memory" in refused
    assert spilled == "True"


def test_too_small_ray_is_rejected_before_anything_is_written(
    tmp_path: Path,
) -> None:
    program = f"""
    import ray
    from pathlib import Path
    from rl_loop.cluster.ray_session import start_local_ray
    from rl_loop.config.errors import StartError
    from rl_loop.config.load import load_config
    from rl_loop.config.run import RlConfig
    from rl_loop.run import run_rl

    overrides = ["initial_weights=null", "output_dir={tmp_path}", "rollout.tasks_per_step=20000"]
    config = load_config(Path("configs/rl/tiny_retool.yaml"), RlConfig, overrides)
    start_local_ray(num_cpus=2, object_store_bytes=100 << 20)
    try:
        run_rl(config, None)
    except StartError as refused:
        print(refused)
    print(config.directory.exists())
    ray.shutdown()
    """
    refused, exists = run_program(program).strip().split("\n")
    assert "a step needs 3.3 GB" in refused
    assert "but the store has only 0.1 GB. Lower rollout.tasks_per_step" in refused
    assert exists == "False"
