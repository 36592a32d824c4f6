"""A dense model becomes a GPT-OSS model that is healed by distillation and trained by RL."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from converters.upcycle import UpcycleOptions, calibration_tokens, upcycle
from rl_loop.chatml.codec import ChatMl
from rl_loop.config.load import load_config
from rl_loop.config.run import RlConfig, SftConfig
from rl_loop.lifecycle.start_checks import check_run_requirements
from rl_loop.run import run_sft
from rl_loop.tracking.run_directory import read_json_lines, read_training_steps
from tests.support.forked_workers import local_ray
from tests.support.in_process import local_loop
from tests.support.rl_loop.tiny_runs import Quiet

CONFIGS = Path(__file__).parents[2] / "configs"
DENSE = [
    "model.model_type=llama",
    "model.num_layers=2",
    "model.hidden_size=64",
    "model.intermediate_size=96",
    "model.num_attention_heads=2",
    "model.vocab_size=600",
]
OPTIONS = UpcycleOptions(sliding_window=8)
"""Windows are shorter than the distance between a word and its repetition."""


@pytest.fixture(scope="module", autouse=True)
def one_ray() -> Iterator[None]:
    with local_ray(num_cpus=2, object_store_bytes=200 << 20):
        yield


def write_chats(path: Path, count: int, seed: int) -> Path:
    """Write conversations in which the answer repeats words from before its window."""
    chance = random.Random(seed)
    words = ["red", "blue", "green", "one", "two", "three", "four", "five", "six", "seven"]
    lines = []
    for _ in range(count):
        said = [chance.choice(words) for _ in range(10)]
        lines.append(
            json.dumps(
                {
                    "messages": [
                        {"role": "user", "content": "Repeat: " + " ".join(said)},
                        {"role": "assistant", "content": " ".join(said)},
                    ]
                }
            )
        )
    path.write_text("\n".join(lines) + "\n")
    return path


def values(run: Path, name: str) -> list[float]:
    return [record[name] for record in read_json_lines(run / "metrics.jsonl") if name in record]


def train_dense(data: list[str]) -> Path:
    """Train a small Llama in ChatML, and return its Hugging Face directory."""
    options = [*DENSE, *data, "name=dense", "training.steps=60", "optimizer.lr=4e-3"]
    run = run_sft(load_config(CONFIGS / "sft/tiny_dense.yaml", SftConfig, options), Quiet())
    return run / "export"


def upcycled_options(directory: Path) -> list[str]:
    return [
        f"model={directory}",
        f"initial_weights={directory}",
        "vocabulary=tokenizer",
        "chatml={system: null, describe_tools: false}",
    ]


def test_upcycled_model_heals_and_learns_by_rl(tmp_path: Path) -> None:
    path = write_chats(tmp_path / "chats.jsonl", 400, seed=0)
    data = [
        f"data={{path: {path}, validation_share: 0.1, validate_every: 1000, workers: 0}}",
        f"output_dir={tmp_path}",
        "sequences_per_step=16",
        "optimizer.warmup_steps=2",
    ]
    teacher = train_dense(data)
    upcycled = tmp_path / "upcycled"
    upcycle(teacher, upcycled, OPTIONS, calibration_tokens(teacher), torch.float32)

    # -- healing
    loss = f"loss={{type: distillation, teacher: {teacher}, all_tokens: false}}"
    training = ["name=healed", "training.steps=40", "optimizer.lr=2e-3"]
    options = [*data, *upcycled_options(upcycled), loss, *training]
    healing = load_config(CONFIGS / "sft/tiny_dense.yaml", SftConfig, options)
    check_run_requirements(healing)
    run = run_sft(healing, Quiet())

    [of_teacher, again] = values(run, "validation/teacher_loss")
    assert of_teacher == again == pytest.approx(values(tmp_path / "dense", "validation/loss")[-1])
    before, after = values(run, "validation/loss")
    # Windows of the untrained model cost much of the perplexity, and healing restores it.
    assert math.exp(before - of_teacher) > 2
    assert math.exp(after - of_teacher) < 1.05

    sinks = load_file(run / "export/model.safetensors")["model.layers.0.self_attn.sinks"]
    assert sinks.abs().min() > 0

    # -- RL
    options = [
        *upcycled_options(run / "export"),
        f"output_dir={tmp_path}",
        "training.steps=2",
        "rollout.tasks_per_step=2",
        "rollout.samples_per_task=6",
        "rollout.max_new_tokens_per_turn=64",
        # Some episodes end with format errors and some at the limit. Their rewards differ.
        "reward.format_error=-2",
        "tasks.held_out_tasks=2",
        "name=rl",
    ]
    rl = load_config(CONFIGS / "rl/tiny_dense.yaml", RlConfig, options)
    check_run_requirements(rl)
    with local_loop(rl) as loop:
        assert isinstance(loop.tasks.codec, ChatMl)
        loop.train()
    steps = read_training_steps(rl.directory / "metrics.jsonl")
    assert max(step.get("grad_norm", 0) for step in steps) > 0
    for step in steps:
        assert step.get("ratio/deviation_max", 0) == 0
        assert step["mismatch/canary_gap"] < 1e-5
        assert step.get("mismatch/logprob_gap_max", 0) < 1e-4
