"""Run of benchmarks.loop on a CPU, and the behavior of its random policy."""

from __future__ import annotations

import asyncio
import importlib
import json
import math
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, GptOssConfig

from converters.hf_directory import HfDirectory
from converters.mxfp4_tensors import rounded_to_mxfp4
from rl_loop.config.load import load_rl_config
from rl_loop.config.run import RlConfig
from rl_loop.harmony.codec import Harmony, ParsedMessage
from rl_loop.tasks.codec import build_codec
from tests.support.forked_workers import forked_python
from tests.support.rl_loop.sglang_protocol import LocalServer

ROOT = Path(__file__).parents[2]
TINY = ROOT / "configs/rl/tiny_retool.yaml"
TURN_TOKENS = 12
SCRIPTED_MODEL = [
    "model.num_layers=2", "model.num_experts=4", "model.experts_per_token=2", "model.hidden_size=32",
    "model.intermediate_size=48", "model.head_size=16", "dtype=bf16", "tasks.held_out_tasks=2",
    "rollout.workers=1", "rollout.tasks_per_step=4", "rollout.samples_per_task=2",
    "canary_tolerance=1e5",
]  # fmt: skip
"""Model with the layers, experts and routes of the scripted servers.

The servers sample other tokens than the model.
"""
TEXT = "12+34-5*6/8"
"""Text without the first tokens of a call, whose next tokens are certain."""


@pytest.fixture
def random_policy(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return importlib.import_module("benchmarks.loop.random_policy")


@pytest.fixture(scope="module")
def harmony() -> Harmony:
    return build_codec(load_rl_config(TINY))


@pytest.fixture
def policy(random_policy: ModuleType, harmony: Harmony) -> Any:
    """Return the tiny policy in transformers."""
    config = load_rl_config(TINY).model
    following = random_policy.next_tokens(harmony, TURN_TOKENS)
    weights = random_policy.policy_weights(config, following, torch.float32, "cpu")
    model = AutoModelForCausalLM.from_config(GptOssConfig(**config.to_hf_config()))
    model.load_state_dict(dict(weights), strict=True)
    return model.eval()


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return importlib.import_module("benchmarks.loop.run")


def loop_policy() -> ModuleType:
    return importlib.import_module("benchmarks.loop.random_policy")


def scripted_engine(config: RlConfig, servers: int) -> dict[str, Any]:
    """Return settings of mock SGLang servers that call Python in every turn."""
    call = ParsedMessage("analysis", "python", "code", "print(7)")
    says = build_codec(config).render_assistant([call], "<|call|>")
    environment = {
        "PYTHONPATH": f"{ROOT / 'tests/support/rl_loop/sglang_process'}:{ROOT}:{ROOT / 'kernels'}",
        "OMP_NUM_THREADS": "1",
        "SAYS": json.dumps(says),
        "TOKEN_SECONDS": "0.02",
    }
    return {
        "type": "sglang",
        "servers": servers,
        "weight_sync": "gloo",
        "python": sys.executable,
        "env": environment,
        # On a busy machine, a process may be slow.
        "sync_seconds": 120.0,
    }


def build_call(harmony: Harmony) -> list[int]:
    """Return a prompt, the header of its answer, and the call that the policy writes."""
    prompt = harmony.render_prompt([{"role": "user", "content": "(8-3)*(2+7)"}])
    call = ParsedMessage("analysis", "python", "code", "print(7) #")
    return [*prompt, *harmony.render_assistant([call], "<|call|>")[:-1]]


@torch.no_grad()
def next_log_probs(policy: Any, ids: list[int]) -> torch.Tensor:
    return policy(torch.tensor([ids])).logits[0].float().log_softmax(-1)


def test_policy_turn_begins_with_a_python_call(policy: Any, harmony: Harmony) -> None:
    ids = build_call(harmony)
    log_probs = next_log_probs(policy, ids)
    begin = len(harmony.render_prompt([{"role": "user", "content": "(8-3)*(2+7)"}]))
    for place in range(begin, len(ids)):
        assert log_probs[place - 1, ids[place]] > math.log(0.999)


def test_text_ends_at_the_requested_rate_without_special_tokens(
    policy: Any, harmony: Harmony, random_policy: ModuleType
) -> None:
    following = random_policy.next_tokens(harmony, TURN_TOKENS)
    text = harmony.vocabulary.encode_text(TEXT)
    probs = next_log_probs(policy, build_call(harmony) + text)[-len(text) :].exp()
    assert probs[:, following.impossible].sum(-1).max() < 1e-6
    ends = probs[:, following.end].mean()
    assert 0.5 / TURN_TOKENS < ends < 2 / TURN_TOKENS
    # Random, but not all tokens are equal.
    entropy = -(probs * probs.clamp(min=1e-12).log()).sum(-1)
    assert (entropy > 3).all() and (entropy < math.log(harmony.vocabulary.size)).all()


def test_log_probs_of_text_depend_on_the_layers(policy: Any, harmony: Harmony) -> None:
    ids = build_call(harmony) + harmony.vocabulary.encode_text(TEXT)
    before = next_log_probs(policy, ids)[-1]
    with torch.no_grad():
        policy.model.layers[1].mlp.experts.down_proj.zero_()
    after = next_log_probs(policy, ids)[-1]
    changed = (after - before).abs()[before > -10].mean()
    assert changed > 0.05


def test_a_header_with_a_repeated_token_is_rejected(
    random_policy: ModuleType, harmony: Harmony, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random_policy, "PROGRAM", "((")
    with pytest.raises(ValueError, match="repeats"):
        random_policy.next_tokens(harmony, TURN_TOKENS)


def build_step(
    max_staleness: int, seconds: float, training: float, **figures: float
) -> dict[str, Any]:
    """Return metrics of a step in which the trainer works ``training`` + 1 of ``seconds``."""
    return {
        "loop/max_staleness": max_staleness,
        "seconds/step": seconds,
        "seconds/sync": 1.0,
        "seconds/rollout": seconds - training - 1,
        "seconds/update": training,
        "tokens_per_second": 8000.0 / seconds,
        "response_tokens": 10.0,
        **figures,
    }


def cells(table: str, begin: str) -> list[str]:
    """Return the cells of the only line that starts with ``begin``."""
    (line,) = (line for line in table.splitlines() if line.startswith(begin))
    return [cell.strip() for cell in line.split("|")[1:-1]]


def test_staleness_comparison_excludes_pipeline_filling_steps(
    loop: ModuleType,
) -> None:
    config = load_rl_config(TINY)
    watch = loop.Watch()
    watch.steps = [
        build_step(0, 900.0, 300.0),
        build_step(0, 40.0, 9.0, **{"servers/idle": 0.25, "servers/running": 12.0}),
        build_step(1, 900.0, 300.0),
        build_step(1, 800.0, 300.0),
        build_step(1, 20.0, 9.0, **{"servers/idle": 0.0, "rollout/staleness_mean": 0.5}),
    ]
    table = loop.report_text(config, watch, [])
    assert table.count("algorithm.max_staleness ") == 2

    titles = cells(table, "| max_staleness")
    in_turns = dict(zip(titles, cells(table, "| 0 |"), strict=True))
    asynchronous = dict(zip(titles, cells(table, "| 1 |"), strict=True))
    assert (in_turns["steps"], asynchronous["steps"]) == ("1 of 2", "1 of 3")
    assert (in_turns["trainer idle"], asynchronous["trainer idle"]) == ("75.0%", "50.0%")
    assert (in_turns["servers idle"], asynchronous["servers idle"]) == ("25.0%", "0.0%")
    assert asynchronous["staleness of a trained token, versions"] == "0.50"
    assert (in_turns["**tokens/s/GPU**"], asynchronous["**tokens/s/GPU**"]) == ("200", "400")


def test_table_shows_measured_and_planned_memory(loop: ModuleType) -> None:
    def memory(allocated: float) -> dict[str, float]:
        return {
            "memory/update/allocated_gb": allocated,
            "memory/update/predicted_allocated_gb": 100.0,
            "memory/update/reserved_gb": 99.0,
            "memory/update/gpu_gb": 120.0,
            "memory/update/predicted_gpu_gb": 125.0,
            "memory/other/gpu_gb": 7.0,
        }

    watch = loop.Watch()
    watch.steps = [
        build_step(0, 40.0, 9.0, **memory(allocated)) for allocated in (90.0, 103.0, 95.0)
    ]
    table = loop.report_text(load_rl_config(TINY), watch, [])
    assert cells(table, "| update |")[1:] == [
        "103.0",
        "100.0",
        "+3.0%",
        "99.0",
        "120.0",
        "125.0",
        "-4.0%",
    ]
    assert cells(table, "| other |")[1:] == ["-", "-", "-", "-", "7.0", "-", "-"]


def test_a_server_is_idle_while_it_has_no_request(loop: ModuleType) -> None:
    async def ask() -> dict[str, float]:
        server = LocalServer()
        url = await server.start()
        with ExitStack() as asking:
            loads = asking.enter_context(loop.ServerLoads([url]))
            while server.calls.count("/v1/loads") < 2:
                await asyncio.sleep(0.01)
            server.running = {"a": asyncio.Event(), "b": asyncio.Event()}
            while server.calls.count("/v1/loads") < 5:
                await asyncio.sleep(0.01)
            # The sampling thread needs an answer of this event loop before it ends, so join it in
            # another thread. After its end, no sample follows.
            await asyncio.to_thread(asking.close)
        await server.stop()
        taken = loads.take()
        assert loads.take() == {}
        return taken

    loop.LOAD_SECONDS = 0.02
    taken = asyncio.run(ask())
    assert 0 < taken["servers/idle"] < 1
    assert taken["servers/running"] == pytest.approx(2 * (1 - taken["servers/idle"]))


def test_requests_of_all_ranks_of_a_server_count(loop: ModuleType) -> None:
    ranks = [
        {"dp_rank": 0, "num_running_reqs": 0, "num_waiting_reqs": 0},
        {"dp_rank": 1, "num_running_reqs": 0, "num_waiting_reqs": 3},
    ]
    assert not loop.load_sample({"loads": ranks}).is_idle
    assert loop.load_sample({"loads": ranks[:1]}).is_idle


def test_experts_of_a_mxfp4_base_are_written_as_blocks(loop: ModuleType, tmp_path: Path) -> None:
    """The directory has the drawn weights, rounded to MXFP4."""
    options = ["model.num_layers=2", "model.hidden_size=64", "model.intermediate_size=96"]
    options += ["dtype=bf16", f"initial_weights={tmp_path / 'weights'}", "quantization=mxfp4"]
    config = load_rl_config(ROOT / "configs/rl/tiny_retool_adapter.yaml", options)
    loop.write_weights(config, TURN_TOKENS)

    following = loop_policy().next_tokens(build_codec(config), TURN_TOKENS)
    drawn = loop_policy().policy_weights(
        config.model, following, torch.bfloat16, "cpu", config.seed
    )
    written = HfDirectory(tmp_path / "weights")
    packed = 0
    for name, tensor in drawn:
        packed += written.read_mxfp4(name) is not None
        assert torch.equal(written.get(name), rounded_to_mxfp4(name, tensor)), name
    assert packed == 2 * 2


@pytest.mark.slow
def test_all_staleness_values_run_after_a_single_start(tmp_path: Path) -> None:
    config = yaml.safe_load(TINY.read_text())
    config["rollout"]["engine"] = scripted_engine(load_rl_config(TINY), servers=2)
    path = tmp_path / "servers.yaml"
    path.write_text(yaml.safe_dump(config))
    out = tmp_path / "loop.md"
    program = [
        *forked_python(),
        "-m",
        "benchmarks.loop",
        str(path),
        *SCRIPTED_MODEL,
        "--steps",
        "3",
    ]
    program += ["--turn-tokens", str(TURN_TOKENS), "--out", str(out), "--max-staleness", "0", "2"]
    environment = {**os.environ, "RAY_memory_monitor_refresh_ms": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        program, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]

    steps = json.loads(out.with_suffix(".json").read_text())
    assert [step["loop/max_staleness"] for step in steps] == [0, 0, 0, 2, 2, 2]
    assert [step["ratio/deviation_max"] for step in steps[:3]] == [0, 0, 0]
    assert [step["rollout/staleness_max"] for step in steps] == [0, 0, 0, 0, 1, 2]
    # Sampling of the servers may hit them between requests, because the steps are short.
    assert all(0 <= step["servers/idle"] <= 1 for step in steps)
    for of_staleness in (steps[:3], steps[3:]):
        assert any(
            step["servers/idle"] < 1 and step["servers/running"] > 0 for step in of_staleness
        )
    table = out.read_text()
    assert cells(table, "| 0 |")[1] == "2 of 3"
    assert cells(table, "| 2 |")[1] == "0 of 3"


@pytest.mark.slow
def test_complete_loop_runs_and_its_table_is_consistent(tmp_path: Path) -> None:
    out = tmp_path / "loop.md"
    scratch = tmp_path / "not" / "there yet"
    program = [
        *forked_python(),
        "-m",
        "benchmarks.loop",
        str(TINY),
        "--steps",
        "2",
        "--seconds",
        "100000",
    ]
    program += ["--turn-tokens", str(TURN_TOKENS), "--out", str(out), "--scratch", str(scratch)]
    program += ["rollout.workers=1", "rollout.tasks_per_step=4", "rollout.samples_per_task=4"]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]

    steps = json.loads(out.with_suffix(".json").read_text())
    assert len(steps) == 2
    for step in steps:
        assert step["tool_call_rate"] > 0.5 and step["rollout/tool_errors"] == 0
        assert step["turns"] > 1
        assert step["ratio/deviation_max"] == 0
        assert 0 <= step["mismatch/kl_k3"] < 1e-4
        phases = ("rollout", "sync", "sleep", "prepare", "estimate", "update")
        counted = sum(step.get(f"seconds/{phase}", 0) for phase in phases)
        assert 0 < counted < step["seconds/step"]
    assert "routing/kl_k3_without_replay" in steps[0]

    table = out.read_text()
    assert "| **tokens/s/GPU** |" in table and "| mismatch k3 without R3 |" in table
    assert not list(scratch.iterdir())


@pytest.mark.slow
def test_short_loop_run_shows_its_first_step(tmp_path: Path) -> None:
    out = tmp_path / "loop.md"
    program = [
        *forked_python(),
        "-m",
        "benchmarks.loop",
        str(TINY),
        "--steps",
        "9",
        "--seconds",
        "1",
    ]
    program += ["--turn-tokens", str(TURN_TOKENS), "--out", str(out)]
    program += ["rollout.workers=1", "rollout.tasks_per_step=4", "rollout.samples_per_task=4"]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]

    assert "stopped after 1 steps: the time is up" in done.stdout
    assert len(json.loads(out.with_suffix(".json").read_text())) == 1
    assert "| **tokens/s/GPU** |" in out.read_text()
