"""benchmarks/loop.py runs the whole loop on a CPU, and its random policy does what it says."""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GptOssConfig

from rl_loop.config.load import load_rl_config
from rl_loop.harmony.codec import Harmony, ParsedMessage
from rl_loop.session import codec_settings
from rl_loop.tasks.codec import codec_of

ROOT = Path(__file__).parents[2]
TINY = ROOT / "configs/rl/tiny_retool.yaml"
TURN_TOKENS = 12
TEXT = "12+34-5*6/8"
"""Nothing of what a call begins with, whose tokens have certain successors."""


@pytest.fixture
def random_policy(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("random_policy")


@pytest.fixture(scope="module")
def harmony() -> Harmony:
    return codec_of(codec_settings(load_rl_config(TINY)))


@pytest.fixture
def policy(random_policy: ModuleType, harmony: Harmony) -> Any:
    """The tiny policy in transformers."""
    config = load_rl_config(TINY).model
    following = random_policy.next_tokens(harmony, TURN_TOKENS)
    weights = random_policy.policy_weights(config, following, torch.float32, "cpu")
    model = AutoModelForCausalLM.from_config(GptOssConfig(**config.to_hf_config()))
    model.load_state_dict(dict(weights), strict=True)
    return model.eval()


def call_of(harmony: Harmony) -> list[int]:
    """A prompt, the header of its answer, and the call that the policy writes."""
    prompt = harmony.render_prompt([{"role": "user", "content": "(8-3)*(2+7)"}])
    call = ParsedMessage("analysis", "python", "code", "print(7) #")
    return [*prompt, *harmony.render_assistant([call], "<|call|>")[:-1]]


@torch.no_grad()
def next_log_probs(policy: Any, ids: list[int]) -> torch.Tensor:
    return policy(torch.tensor([ids])).logits[0].float().log_softmax(-1)


def test_a_turn_begins_with_a_call_of_python(policy: Any, harmony: Harmony) -> None:
    ids = call_of(harmony)
    log_probs = next_log_probs(policy, ids)
    begin = len(harmony.render_prompt([{"role": "user", "content": "(8-3)*(2+7)"}]))
    for place in range(begin, len(ids)):
        assert log_probs[place - 1, ids[place]] > math.log(0.999)


def test_text_ends_as_often_as_it_was_asked_to_and_is_never_special(
    policy: Any, harmony: Harmony, random_policy: ModuleType
) -> None:
    following = random_policy.next_tokens(harmony, TURN_TOKENS)
    text = harmony.vocabulary.encode_text(TEXT)
    probs = next_log_probs(policy, call_of(harmony) + text)[-len(text) :].exp()
    assert probs[:, following.impossible].sum(-1).max() < 1e-6
    ends = probs[:, following.end].mean()
    assert 0.5 / TURN_TOKENS < ends < 2 / TURN_TOKENS
    # Random, but not all tokens alike.
    entropy = -(probs * probs.clamp(min=1e-12).log()).sum(-1)
    assert (entropy > 3).all() and (entropy < math.log(harmony.vocabulary.size)).all()


def test_log_probs_of_text_depend_on_the_layers(policy: Any, harmony: Harmony) -> None:
    ids = call_of(harmony) + harmony.vocabulary.encode_text(TEXT)
    before = next_log_probs(policy, ids)[-1]
    with torch.no_grad():
        policy.model.layers[1].mlp.experts.down_proj.zero_()
    after = next_log_probs(policy, ids)[-1]
    changed = (after - before).abs()[before > -10].mean()
    assert changed > 0.05


def test_a_header_with_a_repeated_token_is_refused(
    random_policy: ModuleType, harmony: Harmony, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random_policy, "PROGRAM", "((")
    with pytest.raises(ValueError, match="repeats"):
        random_policy.next_tokens(harmony, TURN_TOKENS)


@pytest.mark.slow
def test_the_whole_loop_runs_and_its_table_adds_up(tmp_path: Path) -> None:
    out = tmp_path / "loop.md"
    program = [
        sys.executable,
        "benchmarks/loop.py",
        str(TINY),
        "--steps",
        "2",
        "--seconds",
        "100000",
    ]
    program += ["--turn-tokens", str(TURN_TOKENS), "--out", str(out)]
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
        phases = ("rollout", "sync", "sleep", "prepare", "estimate", "train")
        counted = sum(step.get(f"seconds/{phase}", 0) for phase in phases)
        assert 0 < counted < step["seconds/step"]
    assert "routing/kl_k3_without_replay" in steps[0]

    table = out.read_text()
    assert "| **tokens/s/GPU** |" in table and "| mismatch k3 without R3 |" in table
    assert not list(tmp_path.glob("loop_*"))


@pytest.mark.slow
def test_a_loop_without_time_for_a_second_step_shows_its_first(tmp_path: Path) -> None:
    out = tmp_path / "loop.md"
    program = [sys.executable, "benchmarks/loop.py", str(TINY), "--steps", "9", "--seconds", "1"]
    program += ["--turn-tokens", str(TURN_TOKENS), "--out", str(out)]
    program += ["rollout.workers=1", "rollout.tasks_per_step=4", "rollout.samples_per_task=4"]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]

    assert "stopped after 1 steps: the time is up" in done.stdout
    assert len(json.loads(out.with_suffix(".json").read_text())) == 1
    assert "| **tokens/s/GPU** |" in out.read_text()
