"""A dense model becomes a GPT-OSS model that is healed by distillation and trained by RL."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from converters.upcycling.architecture import UpcycleOptions
from converters.upcycling.calibration_text import calibration_tokens
from converters.upcycling.convert import upcycle
from launch.cli import app
from rl_loop.chatml.codec import ChatMl
from rl_loop.config.load import load_config
from rl_loop.config.run import RlConfig, SftConfig
from rl_loop.config.served import load_served_config
from rl_loop.data.samples import to_samples
from rl_loop.data.trajectory import FinishReason
from rl_loop.harmony.codec import Harmony
from rl_loop.harmony.vocabulary import SPECIAL_TOKENS, HarmonyTokenizer
from rl_loop.lifecycle.start_checks import check_run_requirements, check_server_requirements
from rl_loop.rollout.group_stream import GroupRequest
from rl_loop.run import run_sft
from rl_loop.tracking.run_directory import read_json_lines, read_training_steps
from tests.support.forked_workers import local_ray
from tests.support.in_process import local_loop
from tests.support.rl_loop.tiny_runs import Quiet
from tests.support.rl_loop.unused_tokens import add_unused_tokens

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
BALANCED = "load_balancing_loss=0.01"
"""Setting of configs/sft/upcycled_heal.yaml."""


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


def heal(upcycled: Path, teacher: Path, steps: int, options: list[str]) -> Path:
    """Distill the teacher into an upcycled model, and return the directory of the run."""
    loss = f"loss={{type: distillation, teacher: {teacher}, all_tokens: false}}"
    training = ["name=healed", f"training.steps={steps}", "optimizer.lr=2e-3"]
    healing = load_config(
        CONFIGS / "sft/tiny_dense.yaml",
        SftConfig,
        [*upcycled_options(upcycled), loss, *training, *options],
    )
    check_run_requirements(healing)
    return run_sft(healing, Quiet())


def upcycled_options(directory: Path) -> list[str]:
    return [
        f"model={directory}",
        f"initial_weights={directory}",
        "vocabulary=tokenizer",
        "chatml={system: null, describe_tools: false}",
    ]


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("chain") / "chats.jsonl", 400, seed=0)


@pytest.fixture(scope="module")
def data(chats: Path) -> list[str]:
    """Return the options of runs on conversations."""
    return [
        f"data={{path: {chats}, validation_fraction: 0.1, validate_every: 1000, workers: 0}}",
        f"output_dir={chats.parent}",
        "sequences_per_step=16",
        "optimizer.warmup_steps=2",
    ]


@pytest.fixture(scope="module")
def teacher(data: list[str]) -> Path:
    """Return the directory of a dense model. Its tokenizer has unused tokens, as SmolLM2's has."""
    directory = train_dense(data)
    add_unused_tokens(directory, 6)
    return directory


def test_upcycled_model_heals_and_learns_by_rl(
    chats: Path, data: list[str], teacher: Path, tmp_path: Path
) -> None:
    upcycled = tmp_path / "upcycled"
    # Experts are balanced on text like the training data.
    tokens = calibration_tokens(teacher, chats.read_text())
    upcycle(teacher, upcycled, OPTIONS, tokens, torch.float32)

    # -- healing
    run = heal(upcycled, teacher, 40, [*data, f"output_dir={tmp_path}", BALANCED])

    [of_teacher, again] = values(run, "validation/teacher_loss")
    assert of_teacher == again == pytest.approx(values(teacher.parent, "validation/loss")[-1])
    before, after = values(run, "validation/loss")
    # Windows of the untrained model cost much of the perplexity, and healing restores it.
    assert math.exp(before - of_teacher) > 2
    assert math.exp(after - of_teacher) < 1.05

    # The conversations have only 20 words, so some experts get few tokens in single steps.
    assert fmean(values(run, "routing/load_min")[-10:]) > 0.4
    assert values(run, "routing/load_balancing_loss")[-1] == pytest.approx(1, abs=0.02)

    sinks = load_file(run / "export/model.safetensors")["model.layers.0.self_attn.sinks"]
    assert sinks.abs().min() > 0

    # -- RL
    options = [
        *upcycled_options(run / "export"),
        f"output_dir={tmp_path}",
        "training.steps=2",
        "rollout.tasks_per_step=2",
        "rollout.samples_per_task=6",
        "rollout.max_sampled_tokens_per_turn=64",
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
        # The settings of supervised runs do not reach RL.
        assert "routing/load_min" in step and "routing/load_balancing_loss" not in step
        assert step.get("ratio/deviation_max", 0) == 0
        assert step["mismatch/canary_gap"] < 1e-5
        assert step.get("mismatch/log_prob_gap_max", 0) < 1e-4


@pytest.mark.slow
def test_balanced_experts_stay_in_use(
    chats: Path, data: list[str], teacher: Path, tmp_path: Path
) -> None:
    """Without the load-balancing loss, some of 8 experts get no tokens."""
    upcycled = tmp_path / "upcycled"
    tokens = calibration_tokens(teacher, chats.read_text())
    upcycle(teacher, upcycled, replace(OPTIONS, num_experts=8), tokens, torch.float32)

    smallest, largest = {}, {}
    for setting in ("load_balancing_loss=0", BALANCED):
        options = [
            *data,
            f"output_dir={tmp_path}",
            f"name={setting.replace(chr(61), '_')}",
            setting,
        ]
        run = heal(upcycled, teacher, 60, options)
        smallest[setting] = fmean(values(run, "routing/load_min")[-12:])
        largest[setting] = fmean(values(run, "routing/load_max")[-12:])
        relative = values(run, "validation/loss")[-1] - values(run, "validation/teacher_loss")[-1]
        assert math.exp(relative) < 1.05
    assert smallest["load_balancing_loss=0"] < 0.01 and largest["load_balancing_loss=0"] > 2
    assert smallest[BALANCED] > 0.4 and largest[BALANCED] < 2


HARMONY = [
    "vocabulary=tokenizer",
    # Short prompts, because most text has one token per character here.
    "prompt={model_identity: null, knowledge_cutoff: null, reasoning_effort: null}",
    "prompt.channels=false",
    "prompt.describe_builtin_tools=false",
]
CALL = re.compile(
    r"<\|start\|>assistant<\|channel\|>analysis to=python code<\|message\|>print\((.*)\)<\|call\|>"
    r"<\|start\|>python to=assistant<\|channel\|>analysis<\|message\|>(-?\d+)\n<\|end\|>"
    r"<\|start\|>assistant"
)
"""Call of Python that prints a number, and its output, in Harmony."""


def test_upcycled_model_calls_python_in_harmony(teacher: Path, tmp_path: Path) -> None:
    """Harmony's special tokens are tokens of the dense model with other names."""
    upcycled = tmp_path / "upcycled"
    options = UpcycleOptions(sliding_window=8, harmony=True)
    upcycle(teacher, upcycled, options, calibration_tokens(teacher), torch.float32)

    # -- SFT on demonstrations of tool use
    options = [
        f"model={upcycled}",
        f"initial_weights={upcycled}",
        f"output_dir={tmp_path}",
        *HARMONY,
        "name=harmony",
        "demonstrations.correct_fraction=1",
        "optimizer={lr: 5.0e-3, warmup_steps: 2}",
        "sequences_per_step=8",
        "training={steps: 45, checkpoint_every: 45}",
    ]
    sft = load_config(CONFIGS / "sft/tiny_dense.yaml", SftConfig, options)
    check_run_requirements(sft)
    run = run_sft(sft, Quiet())

    # -- episodes
    options = [
        f"model={upcycled}",
        f"initial_weights={run}",
        f"output_dir={tmp_path}",
        *HARMONY,
        "name=episodes",
    ]
    rl = load_config(CONFIGS / "rl/tiny_dense.yaml", RlConfig, options)
    check_run_requirements(rl)
    with local_loop(rl) as loop:
        codec = loop.tasks.codec
        assert isinstance(codec, Harmony) and isinstance(codec.vocabulary, HarmonyTokenizer)
        loop.rollouts.sync_weights(loop.trainer, 1)
        requests = [GroupRequest(task, (0, 1), 0.3) for task in loop.tasks.train(0, 4)]
        groups = loop.rollouts.run(requests)
        episodes = [episode for group in groups for episode in group.trajectories]
        samples = to_samples(groups, rl.algorithm, version=1)
        scores = loop.trainer.score(samples, temperature=0.3)
    assert np.abs(scores - samples.rollout_log_probs)[samples.loss_mask].max() < 1e-3

    assert sum(episode.tool_calls > 0 for episode in episodes) >= 6
    ids = codec.vocabulary.markup
    computed = 0
    for episode in episodes:
        tokens = episode.token_ids.tolist()
        text = codec.decode(tokens)
        for name in SPECIAL_TOKENS:
            assert text.count(name) == tokens.count(ids[name]), f"{name} is not one token"
        for program, output in CALL.findall(text):
            assert str(eval(program)) == output
            computed += 1

        # The header of a turn is in the prompt. The policy samples the rest, with an end token.
        edges = np.flatnonzero(np.diff(episode.loss_mask, prepend=False, append=False))
        turns = edges.reshape(-1, 2).tolist()
        assert {tokens[first] for first, _ in turns} == {ids["<|channel|>"]}
        ends = [tokens[last - 1] for _, last in turns]
        assert set(ends[:-1]) <= {ids["<|call|>"]}
        if episode.finish_reason is FinishReason.STOP:
            assert ends[-1] == ids["<|return|>"]
    assert computed > 0

    # -- commands
    check_server_requirements(load_served_config(run), None)
    arguments = [str(CONFIGS / "rl/tiny_dense.yaml"), f"model={upcycled}", *HARMONY]
    arguments += ["--weights", str(run), "--output", str(tmp_path / "evaluation.jsonl")]
    arguments += ["tasks.held_out_tasks=2", "rollout.workers=1", "sandbox.servers=1"]
    result = CliRunner().invoke(app, ["eval", *arguments])
    assert result.exit_code == 0, result.output
    assert len(read_json_lines(tmp_path / "evaluation.jsonl")) == 2
