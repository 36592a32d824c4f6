"""The closed loop with real Ray actors, Megatron, sandbox, Harmony, checkpoints and export."""

from __future__ import annotations

import gc
import io
import json
import math
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from converters.hf_directory import HfDirectory
from converters.merge_adapter import merge_adapter
from launch.progress import TrainingProgress
from launch.report import build_report
from launch.viewer.run_view import RunView
from megatron_gptoss.checkpoint import gathered_state
from megatron_gptoss.user_error import UserError
from rl_loop import run as run_module
from rl_loop.config.errors import ConfigError
from rl_loop.config.load import load_config
from rl_loop.config.run import RlConfig, SftConfig
from rl_loop.data.tensor_bytes import StoredTensors
from rl_loop.infrastructure import COMPONENTS, InfrastructureOutageError
from rl_loop.loop import RlLoop
from rl_loop.rollout.group_stream import GroupRequest
from rl_loop.run import RunInterrupted, run_engine_report, run_rl, run_sft
from rl_loop.run_parts import build_rollouts, build_tasks, build_trainer
from rl_loop.tracking.run_directory import (
    is_training_step,
    metric_curve,
    read_json,
    read_json_lines,
    read_training_steps,
)
from rl_loop.trainer.ray_ranks import RankDiedError, TrainerProcess
from rl_loop.weight_sync.canary import CanaryError, CanaryTolerance, check_canary
from rl_loop.weight_sync.source import LoadedWeights
from tests.support.forked_workers import local_ray
from tests.support.metric_names import undocumented_metrics
from tests.support.rl_loop.tiny_runs import CONFIGS, RL, SMALL, Quiet, curve
from tests.support.waiting import wait_until


@pytest.fixture(scope="module", autouse=True)
def one_ray() -> Iterator[None]:
    with local_ray(num_cpus=2, object_store_bytes=200 << 20):
        yield


def rl_config(tmp_path: Path, *overrides: str) -> RlConfig:
    return load_config(
        CONFIGS / "rl/tiny_retool.yaml", RlConfig, [*RL, f"output_dir={tmp_path}", *overrides]
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a few steps of supervised fine-tuning."""
    options = [
        *SMALL,
        f"output_dir={tmp_path_factory.mktemp('sft')}",
        "training.steps=3",
        "sequences_per_step=8",
    ]
    return run_sft(load_config(CONFIGS / "sft/tiny_retool.yaml", SftConfig, options), Quiet())


@pytest.fixture(scope="module")
def terminal() -> io.StringIO:
    """The output of ``whole`` in a terminal."""
    return io.StringIO()


@pytest.fixture(scope="module")
def whole(
    trained: Path, terminal: io.StringIO, tmp_path_factory: pytest.TempPathFactory
) -> RlConfig:
    """The configuration of an uninterrupted RL run of three steps, started from ``trained``."""
    options = [f"initial_weights={trained}", "training.steps=3", "evaluate_every=2"]
    config = rl_config(tmp_path_factory.mktemp("whole"), *options, "tracking.episodes=all")
    run_rl(config, lambda *title: TrainingProgress(*title, Console(file=terminal, width=500)))
    return config


def test_sft_then_rl_export_is_decoded_equally_by_transformers(whole: RlConfig) -> None:
    config, run = whole, whole.directory
    summary = json.loads((run / "summary.json").read_text())
    assert summary["greedy_answers_equal"] == summary["greedy_answers_compared"] == 4
    assert summary["max_clip_fraction"] == 0
    assert summary["max_ratio_deviation"] == 0
    assert summary["mean_log_prob_gap"] < 1e-4
    assert {
        "held_out_accuracy_sft",
        "held_out_accuracy_rl",
        "seconds",
        "tool_call_rate",
        "mean_turns",
    } <= set(summary)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(run / "export")
    tokenizer = AutoTokenizer.from_pretrained(run / "export")
    prompt = build_tasks(config).prompt_ids(build_tasks(config).held_out()[0])
    assert tokenizer.decode(prompt).startswith("<|start|>user<|message|>")
    question = [
        {"role": "user", "content": build_tasks(config).held_out()[0].messages[-1]["content"]}
    ]
    assert prompt == tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_dict=False
    )
    assert "held_out_accuracy_rl" in (run / "export/README.md").read_text()
    assert torch.isfinite(model(torch.tensor([prompt])).logits).all()


def test_adapters_of_sft_and_rl_export_alone_and_merged(trained: Path, tmp_path: Path) -> None:
    sft = [*SMALL, *ADAPTER, f"output_dir={tmp_path}", f"initial_weights={trained}"]
    sft += ["training.steps=2", "sequences_per_step=8"]
    first = run_sft(load_config(CONFIGS / "sft/tiny_retool.yaml", SftConfig, sft), Quiet())
    start = first / "export"
    rl = [*ADAPTER, f"initial_weights={start}", "training.steps=2", "algorithm.kl={}"]
    config = rl_config(tmp_path, *rl)
    run = run_rl(config, Quiet())

    summary = json.loads((run / "summary.json").read_text())
    assert summary["greedy_answers_equal"] == summary["greedy_answers_compared"] == 4
    assert summary["max_ratio_deviation"] == 0
    steps = [step for step in read_json_lines(run / "metrics.jsonl") if "loss" in step]
    assert steps[0]["kl_reference"] == 0
    assert max(step["grad_norm"] for step in steps) > 0

    # The adapter merged into its base equals the export.
    settings = json.loads((run / "adapter/adapter_config.json").read_text())
    assert (settings["r"], settings["base_model_name_or_path"]) == (4, str(start))
    merge_adapter(start, run / "adapter", tmp_path / "merged", dtype="fp32")
    exported, merged = HfDirectory(run / "export"), HfDirectory(tmp_path / "merged")
    changed = 0
    for name in exported.names():
        assert torch.equal(exported.get(name), merged.get(name)), name
        changed += not torch.equal(exported.get(name), HfDirectory(start).get(name))
    assert changed == 2 * 6, "q, k, v, o and the two of experts in either layer"

    # A rejected resume does not change the run's directory.
    kept = (run / "config.yaml").read_text()
    for override, message in (
        ("adapter.rank=2", r"--resume cannot change adapter.rank: 4 -> 2"),
        (f"initial_weights={trained}", "holds adapters of a different base"),
    ):
        with pytest.raises(Exception, match=message):
            run_rl(rl_config(tmp_path, *rl, override), Quiet(), resume=True)
        assert (run / "config.yaml").read_text() == kept


def test_terminal_files_and_pages_have_equal_step_numbers(
    whole: RlConfig, terminal: io.StringIO
) -> None:
    """In the terminal, files and pages, step N means that N steps are completed."""
    run = whole.directory
    build_report(run)

    trained, evaluated = [1, 2, 3], [0, 2, 3]
    lines = re.findall(r"^step (\d+)/3  (.*)", terminal.getvalue(), re.MULTILINE)
    assert [int(step) for step, text in lines if text.startswith("reward")] == trained
    assert [int(step) for step, text in lines if text.startswith("held-out accuracy")] == evaluated

    records = read_json_lines(run / "metrics.jsonl")
    assert undocumented_metrics(set().union(*records)) == []
    assert metric_curve(records, "reward")[0] == trained
    assert metric_curve(records, "held_out/accuracy")[0] == evaluated
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("reward")] == trained
    assert [event.step for event in events.Scalars("held_out/accuracy")] == evaluated

    viewed = RunView("run", run)
    assert viewed.overview()["step"] == 3 and viewed.overview()["state"] == "finished"
    curves = viewed.curves(-1, 0)
    shown_rewards = curves["metrics"]["reward"]
    pairs = zip(curves["steps"], shown_rewards, strict=True)
    assert [step for step, reward in pairs if reward is not None] == trained
    viewed.episodes.refresh()
    rows = viewed.episodes.summary_table.to_pylist()
    assert sorted({row["step"] for row in rows if row["split"] == "train"}) == trained
    assert sorted({row["step"] for row in rows if row["split"] == "held_out"}) == evaluated

    assert read_json(run / "summary.json")["steps"] == 3
    assert (run / "checkpoints/latest").read_text() == "step_000003"
    page = (run / "report.html").read_text()
    assert re.search(r"3 steps in \d", page)
    shown = {int(step) for step in re.findall(r"<summary><b>step (\d+)</b>", page)}
    assert {0, 3} <= shown <= {*trained, *evaluated}


def test_mxfp4_experts_train_in_sft_and_rl_and_export_mxfp4(
    tmp_path: Path,
) -> None:
    options = ["quantization=mxfp4", "model.hidden_size=32", "model.intermediate_size=64"]
    sft = [*SMALL, *options, f"output_dir={tmp_path}", "training.steps=2", "sequences_per_step=8"]
    first = run_sft(load_config(CONFIGS / "sft/tiny_retool.yaml", SftConfig, sft), Quiet())
    rl = [*options, f"initial_weights={first}", "training.steps=2", "rollout.workers=2"]
    config = rl_config(tmp_path, *rl)
    run = run_rl(config, Quiet())

    summary = json.loads((run / "summary.json").read_text())
    assert summary["mxfp4_experts_equal"] == 2 * 2 * 4
    assert summary["greedy_answers_equal"] == summary["greedy_answers_compared"] == 4
    assert summary["max_ratio_deviation"] == 0
    for step in read_training_steps(run / "metrics.jsonl"):
        assert step["mismatch/mxfp4_experts_compared"] == 2 * 2 * 4
    exported = HfDirectory(run / "export")
    assert exported.read_mxfp4("model.layers.0.mlp.experts.down_proj") is not None

    with pytest.raises(ConfigError, match="--resume cannot change quantization: mxfp4 -> null"):
        run_rl(rl_config(tmp_path, *rl, "quantization=null"), Quiet(), resume=True)


def test_engine_report_compares_log_probs_and_routes(tmp_path: Path) -> None:
    replayed = [
        "rollout.routed_experts=true",
        "algorithm.routing_replay=R3",
        "tasks.held_out_tasks=2",
    ]
    report = run_engine_report(rl_config(tmp_path, *replayed))
    free, given = (part.splitlines() for part in report.split("|d log p|, the trainer ")[1:])
    assert (free[0], given[0]) == ("routes freely", "takes the engine's routes")
    for table in (free, given):
        assert float(table[2].split()[2]) < 1e-5, "the mean gap of all tokens"
    assert re.fullmatch(
        r"the trainer would have chosen the same experts for 100.00% of \d\d+ routes", given[-1]
    )


ADAPTER = ["adapter={rank: 4, alpha: 8}", "optimizer={lr: 1e-2}"]
EVERYTHING = [
    "model.num_layers=4",
    "algorithm.advantage=gae",
    "algorithm.critic={warmup_steps: 0}",
    "algorithm.kl={apply_to: loss, coefficient: 0.01}",
    "algorithm.routing_replay=R2",
    "algorithm.mini_batches=2",
]


# Slow, because tests/slurm runs two ranks over Ray, and tests/megatron_gptoss compares every
# layout with one process.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "layout"),
    [
        ([], ["parallel.expert=2"]),
        (EVERYTHING, ["parallel.pipeline=2", "parallel.virtual_pipeline=2"]),
        ([*EVERYTHING, *ADAPTER], ["parallel.pipeline=2"]),
    ],
)
def test_two_trainer_ranks_have_the_curve_of_one(
    algorithm: list[str], layout: list[str], tmp_path: Path
) -> None:
    settings = ["training.steps=2", *algorithm]
    one = run_rl(rl_config(tmp_path / "one", *settings), Quiet())
    two = run_rl(rl_config(tmp_path / "two", *settings, "parallel.world_size=2", *layout), Quiet())
    assert curve(two) == pytest.approx(curve(one), rel=1e-3, abs=1e-5)


def test_interrupted_run_saves_and_resumes_with_the_same_curve(
    trained: Path, whole: RlConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = rl_config(tmp_path, f"initial_weights={trained}", "training.steps=3")
    happened: list[str] = []
    # The driver's objects are exempt from garbage collection before the first step.
    monkeypatch.setattr("rl_loop.run.exempt_from_collection", lambda: happened.append("exempted"))

    def stop(step: int) -> None:
        happened.append(f"step {step}")
        os.kill(os.getpid(), signal.SIGINT)

    stopping = Quiet(on_step=stop)
    with pytest.raises(RunInterrupted, match="saved after step 1 of 3"):
        run_rl(config, stopping)
    assert stopping.notes
    assert happened == ["exempted", "step 1"]
    resumed = run_rl(config, Quiet(), resume=True)
    assert curve(resumed) == pytest.approx(curve(whole.directory), rel=1e-4, abs=1e-6)


def test_resume_applies_changed_settings_and_records_them(
    tmp_path: Path,
) -> None:
    def config(*overrides: str) -> SftConfig:
        options = [*SMALL, f"output_dir={tmp_path}", "sequences_per_step=4", *overrides]
        options += ["optimizer.warmup_steps=0", "optimizer.schedule=constant"]
        return load_config(CONFIGS / "sft/tiny_retool.yaml", SftConfig, options)

    run = run_sft(config("training.steps=1", "optimizer.lr=1e-3"), Quiet())
    kept = (run / "config.yaml").read_text()
    with pytest.raises(ConfigError, match=r"--resume cannot change model.num_layers: 2 -> 4"):
        run_sft(config("training.steps=2", "model.num_layers=4"), Quiet(), resume=True)
    assert (run / "config.yaml").read_text() == kept
    run_sft(
        config("training.steps=2", "optimizer.lr=1e-4", "optimizer.beta1=0.5"), Quiet(), resume=True
    )
    rates = [record["learning_rate"] for record in read_json_lines(run / "metrics.jsonl")]
    assert rates == [1e-3, 1e-4]
    assert (run / "config.yaml").read_text().splitlines()[0] == (
        "# from step 2 on: optimizer.lr: 0.001 -> 0.0001; optimizer.beta1: 0.9 -> 0.5; training.steps: 1 -> 2"
    )


def test_interrupt_ends_rollouts_that_overlap_training(tmp_path: Path) -> None:
    config = rl_config(tmp_path, "algorithm.max_staleness=1", "training.steps=40")
    with pytest.raises(RunInterrupted, match="saved after step 2 of 40"):
        run_rl(
            config,
            Quiet(on_step=lambda step: os.kill(os.getpid(), signal.SIGINT) if step == 2 else None),
        )
    assert [
        step["rollout/staleness_max"]
        for step in read_training_steps(config.directory / "metrics.jsonl")
    ] == [0, 1]
    assert (config.directory / "checkpoints/latest").read_text() == "step_000002"


def test_rank_exempts_its_objects_from_collection_after_a_step(tmp_path: Path) -> None:
    config = load_config(
        CONFIGS / "sft/tiny_retool.yaml", SftConfig, [*SMALL, f"output_dir={tmp_path}"]
    )
    trainer, samples = (
        build_trainer(config),
        build_tasks(config).demonstrations(0, 8, config.demonstrations),
    )

    def searched() -> int:
        (actor,) = trainer.ranks.actors
        return ray.get(actor.__ray_call__.remote(lambda worker: len(gc.get_objects())))

    try:
        trainer.ready()
        before = searched()
        trainer.sft_step(samples, 0)
        frozen = searched()
        trainer.sft_step(samples, 1)
        # A forked rank begins with the frozen imports of its server.
        assert before > 20_000
        assert frozen < 0.1 * before
        assert searched() < 0.1 * before
    finally:
        trainer.close()


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_rank_that_dies_in_a_gather_is_named_and_all_ranks_end(victim: int, tmp_path: Path) -> None:
    """A checkpoint on GPUs gathers the optimizer state of all ranks.

    NCCL does not detect a dead rank. Without the driver the other rank would wait for 10 minutes.
    """

    def gather_before_saving(rank: TrainerProcess, is_victim: bool) -> None:
        def gather(shard: torch.Tensor, *arguments: object, **options: object) -> None:
            if is_victim:
                os.kill(os.getpid(), signal.SIGKILL)
            threading.Event().wait()

        def start(*arguments: object) -> None:
            gathered_state.dist.gather = gather
            torch.cuda.current_device = lambda: torch.device("cpu")
            bucket = SimpleNamespace(param_to_index={})
            gathered_state._gather_parameters(torch.zeros(8), bucket, torch.distributed.group.WORLD)

        # The optimizer on CPUs is not distributed, so a real save would gather nothing.
        writer, _ = rank.worker._checkpoints._writers[0]
        writer.start = start

    overrides = [*SMALL, f"output_dir={tmp_path}", "parallel.world_size=2"]
    trainer = build_trainer(load_config(CONFIGS / "sft/tiny_retool.yaml", SftConfig, overrides))
    try:
        trainer.ready()
        actors = trainer.ranks.actors
        processes = []
        for rank, actor in enumerate(actors):
            ray.get(actor.__ray_call__.remote(gather_before_saving, rank == victim))
            pid = ray.get(actor.__ray_call__.remote(lambda worker: os.getpid()))
            processes.append(psutil.Process(pid))

        began = time.monotonic()
        with pytest.raises(RankDiedError, match=rf"^trainer rank {victim} on .* died: "):
            trainer.save(1, {}, block=True)
        assert time.monotonic() - began < 120
        assert processes[1 - victim].is_running(), "it still waits"
    finally:
        trainer.close()
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert not alive


@pytest.mark.slow  # tests/rl_loop/rollout/test_pool_stream.py kills workers at other moments
def test_killed_rollout_worker_loses_no_episode(tmp_path: Path) -> None:
    config = rl_config(tmp_path, "rollout.max_sampled_tokens_per_turn=200", "rollout.workers=2")
    trainer = build_trainer(config)
    pool, tasks = build_rollouts(config), build_tasks(config)
    try:
        pool.ready()
        trainer.ready()
        pool.sync_weights(trainer, 7)
        requests = [GroupRequest(task, (1, 2), 1.0) for task in tasks.train(0, 8)]
        expected = pool.run(requests)
        victim = pool._workers.call(0, "__ray_call__", lambda worker: os.getpid())
        killer = threading.Timer(0.3, os.kill, (victim, signal.SIGKILL))
        killer.start()
        groups = pool.run(requests)
        killer.join()
        wait_until(
            lambda: pool._workers.call(0, "__ray_call__", lambda worker: os.getpid()) != victim
        )
        assert len(pool._workers.deaths) == 1
        assert [[t.token_ids.tolist() for t in g.trajectories] for g in groups] == [
            [t.token_ids.tolist() for t in g.trajectories] for g in expected
        ]
        assert all(
            span.version == 7 for g in groups for t in g.trajectories for span in t.weight_versions
        )
    finally:
        pool.close()
        trainer.close()


def test_off_policy_run_continues_after_a_worker_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["algorithm.max_staleness=2", "training.steps=5", "training.checkpoint_every=2"]
    config = rl_config(tmp_path, *options, "rollout.workers=2")
    pools: list[Any] = []
    killed: list[int] = []
    build_loop = run_module.build_loop

    def noted_loop(*arguments: Any) -> RlLoop:
        loop = build_loop(*arguments)
        pools.append(loop.rollouts)
        return loop

    def kill_a_worker(step: int) -> None:
        if step == 2:
            victim = pools[0]._workers.call(0, "__ray_call__", lambda worker: os.getpid())
            killed.append(victim)
            os.kill(victim, signal.SIGKILL)

    monkeypatch.setattr(run_module, "build_loop", noted_loop)

    run = run_rl(config, Quiet(on_step=kill_a_worker))
    assert len(killed) == 1
    steps = [step for step in read_json_lines(run / "metrics.jsonl") if "reward" in step]
    assert [step["rollout/async_groups"] for step in steps] == [4, 4, 4, 2, 0]
    assert steps[0]["rollout/staleness_max"] == 0
    assert max(step["rollout/staleness_max"] for step in steps) <= 2
    assert all(step["correction/dropped_fraction/too_old"] == 0 for step in steps)
    for step in steps:
        assert sum(step[f"rollout/invalid_fraction/{component}"] for component in COMPONENTS) == 0


def test_canary_detects_one_wrong_weight_tensor(tmp_path: Path) -> None:
    config = rl_config(tmp_path)
    trainer = build_trainer(config)
    pool, tasks = build_rollouts(config), build_tasks(config)
    try:
        pool.ready()
        trainer.ready()
        weights = trainer.weights()
        pool.sync_weights(LoadedWeights(weights), 1)
        # Workers read the rank's objects from Ray's store. The driver copies nothing.
        assert isinstance(weights, StoredTensors)
        assert pool._workers.last_sync == ("load_weights", weights.stored, 1)
        with pytest.raises(AttributeError, match="no_such_method"):
            trainer.ranks.call_and_store("no_such_method")()
        tolerance = CanaryTolerance.of(None, "fp32")
        assert check_canary(trainer, pool, tasks.canary(), tolerance=tolerance, version=1) < 1e-5
        down = "model.layers.1.mlp.experts.down_proj"
        faulty = dict(weights) | {down: weights[down] + 0.3 * torch.randn_like(weights[down])}
        pool.sync_weights(LoadedWeights(faulty), 2)
        with pytest.raises(CanaryError, match="after syncing weights 2, rollout worker 0"):
            check_canary(trainer, pool, tasks.canary(), tolerance=tolerance, version=2)
    finally:
        pool.close()
        trainer.close()


UNRELIABLE = "tests.support.rl_loop.unreliable_tools:UnreliableEnvironment"


def test_unreachable_tool_server_ends_training_with_one_line(tmp_path: Path) -> None:
    only_tools = [f"tasks.sources.tools.environment={UNRELIABLE}", "tasks.sources.retool.weight=0"]
    config = rl_config(
        tmp_path, *only_tools, "tasks.held_out_tasks=2", "rollout.max_invalid_fraction=0.05"
    )
    with pytest.raises(InfrastructureOutageError) as outage:
        run_rl(config, Quiet())
    message = str(outage.value)
    assert "\n" not in message
    assert len(message) < 500
    failure_source = r"environment in \d+ \(UnreliableEnvironment.* in \d+\)"
    assert re.search(
        rf"ended \d+ of \d+ episodes .*: {failure_source}, such as: .*Connection refused", message
    )
    assert isinstance(outage.value, UserError)


def test_run_continues_without_episodes_of_failed_infrastructure(
    tmp_path: Path,
) -> None:
    source = f"{{environment: '{UNRELIABLE}', options: {{failing: 0.5, long_prompts: 0.3}}}}"
    only_tools = [
        f"tasks.sources.tools={source}",
        "tasks.sources.retool.weight=0",
        "tasks.held_out_tasks=8",
    ]
    limits = ["rollout.max_invalid_fraction=0.95", "training.steps=3", "evaluate_every=1"]
    config = rl_config(tmp_path, *only_tools, *limits)
    run_rl(config, Quiet())
    records = read_json_lines(config.directory / "metrics.jsonl")
    steps = [record for record in records if is_training_step(record)]
    evaluations = [record for record in records if not is_training_step(record)]
    assert len(evaluations) == 4
    assert all(record["held_out/invalid_fraction/environment"] <= 1 for record in evaluations)
    lost = [step["rollout/invalid_fraction/environment"] for step in steps]
    assert any(0 < share < 1 for share in lost)
    for step in steps:
        assert math.isfinite(step["reward"])
        assert step["rollout/skipped_tasks"] == 0

    # The count grows with the tasks drawn. The generator's first tasks may all have short prompts.
    left_out = [step["tasks_left_out"] for step in steps]
    assert left_out == sorted(left_out)
    assert left_out[-1] > 0
