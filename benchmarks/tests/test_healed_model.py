"""Sinks, expert loads and losses of an upcycled model against transformers."""

from __future__ import annotations

import dataclasses
import json
import sys
from math import exp
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from benchmarks.learning import healed_model
from converters.upcycling.architecture import UpcycleOptions
from converters.upcycling.convert import upcycle
from rl_loop.config.load import load_config
from rl_loop.config.run import SftConfig
from tests.support.converters.dense_models import save_dense

ROOT = Path(__file__).parents[2]
RUN = ROOT / "configs/sft/tiny_dense.yaml"
SIZES = ["model.num_layers=2", "model.hidden_size=64", "model.intermediate_size=96"]
SIZES += ["model.num_attention_heads=2", "model.vocab_size=600", "model.model_type=llama"]


@pytest.fixture
def overrides(tmp_path: Path) -> list[str]:
    rows = []
    for i in range(60):
        messages = [
            {"role": "user", "content": f"Count to {i}."},
            {"role": "assistant", "content": " ".join(map(str, range(i % 7 + 1)))},
        ]
        rows.append(json.dumps({"messages": messages}))
    chats = tmp_path / "chats.jsonl"
    chats.write_text("\n".join(rows) + "\n")
    return [*SIZES, f"data={{path: {chats}, validation_fraction: 0.3, workers: 0}}"]


@pytest.fixture
def models(tmp_path: Path, overrides: list[str]) -> tuple[Path, Path]:
    """Return a dense model and the GPT-OSS model that it becomes."""
    dense = save_dense(tmp_path / "dense", load_config(RUN, SftConfig, overrides).model)
    options = UpcycleOptions(sliding_window=8, sink=1.0)
    upcycle(dense, tmp_path / "moe", options, [i * 37 % 600 for i in range(60)], torch.float32)
    return dense, tmp_path / "moe"


def read_documents(overrides: list[str]) -> list[healed_model.Document]:
    config = load_config(RUN, SftConfig, overrides)
    return list(healed_model.validation_documents(config))


def losses_in_transformers(
    model: Any, documents: list[healed_model.Document]
) -> tuple[float, float]:
    """Return the losses on the tokens in the loss and on the assistant's."""
    in_loss, of_assistant = [], []
    for document in documents:
        tokens = document.token_ids
        logits = model(tokens[None]).logits[0, :-1].double()
        losses = cross_entropy(logits, tokens[1:], reduction="none")
        in_loss.append(losses[document.in_loss[1:]])
        of_assistant.append(losses[document.of_assistant[1:]])
    return torch.cat(in_loss).mean().item(), torch.cat(of_assistant).mean().item()


@torch.no_grad()
def test_measurements_equal_those_of_transformers(
    models: tuple[Path, Path], overrides: list[str]
) -> None:
    # Distillation has all tokens in the loss.
    documents = read_documents([*overrides, f"loss={{type: distillation, teacher: {models[0]}}}"])
    assert len(documents) > 5
    assert all(document.in_loss[1:].all() for document in documents)
    assert not any(document.of_assistant.all() for document in documents)
    result = healed_model.measure(models[1], models[0], documents)
    theirs, dense = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
        for path in reversed(models)
    )
    measured = (result.in_loss.model, result.of_assistant.model)
    assert measured == pytest.approx(losses_in_transformers(theirs, documents), abs=1e-5)
    measured = (result.in_loss.dense, result.of_assistant.dense)
    assert measured == pytest.approx(losses_in_transformers(dense, documents), abs=1e-5)

    outputs = [
        theirs(document.token_ids[None], output_attentions=True, output_router_logits=True)
        for document in documents
    ]
    for layer in range(2):
        # Keys have the rest of the probability.
        sinks = [1 - output.attentions[layer][0].sum(-1).flatten() for output in outputs]
        assert result.sinks[layer] == pytest.approx(torch.cat(sinks).mean().item(), abs=1e-5)
        logits = torch.cat([output.router_logits[layer] for output in outputs])
        counts = logits.topk(2).indices.flatten().bincount(minlength=4)
        assert result.loads[layer] == pytest.approx((counts / counts.float().mean()).tolist())


def run_command(
    monkeypatch: pytest.MonkeyPatch, models: tuple[Path, Path], overrides: list[str]
) -> int:
    """Return the exit code of the command."""
    dense, moe = models
    options = ["--model", str(moe), "--dense", str(dense), "--conversations", "6"]
    monkeypatch.setattr(sys, "argv", ["healed-model", str(RUN), *overrides, *options])
    try:
        healed_model.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_command_reports_unused_sinks(
    models: tuple[Path, Path],
    overrides: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_command(monkeypatch, models, overrides) == 0
    output = capsys.readouterr().out
    assert output.startswith("6 conversations, ") and "missed" not in output
    assert output.count("% |") == 2

    weights = models[1] / "model.safetensors"
    tensors = load_file(weights)
    for layer in range(2):
        tensors[f"model.layers.{layer}.self_attn.sinks"].fill_(-20)
    save_file(tensors, weights, metadata={"format": "pt"})
    assert run_command(monkeypatch, models, overrides) == 1
    output = capsys.readouterr().out
    assert "missed: the mean of the sinks is below 1%\n" in output


def test_missed_bars_are_listed_with_their_layers() -> None:
    good = healed_model.Result(
        sinks=[0.0, 0.6],
        loads=[[0.5, 1.5], [1.0, 1.0]],
        in_loss=healed_model.Losses(3.04, 3.0),
        of_assistant=healed_model.Losses(3.2, 3.0),
    )
    assert good.missed() == [] and good.in_loss.perplexity == pytest.approx(exp(0.04))
    bad = dataclasses.replace(
        good, loads=[[2.0, 0.0], [0.9, 2.1]], in_loss=healed_model.Losses(3.1, 3.0)
    )
    assert bad.missed() == [
        "an expert is not used in layers 0",
        "an expert has more than 2 even shares in layers 1",
        "the relative perplexity is above 1.05",
    ]
    assert dataclasses.replace(good, sinks=[0.009, 0.61]).missed() == [
        "the sink is above 60% in layers 1"
    ]
    assert dataclasses.replace(good, sinks=[0.009, 0.009]).missed() == [
        "the mean of the sinks is below 1%"
    ]
