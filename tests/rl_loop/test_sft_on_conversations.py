"""SFT on a user's conversations with real rendering, Ray, Megatron, checkpoints and export."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from rl_loop import session
from rl_loop.config.errors import ConfigError
from rl_loop.config.load import load_config
from rl_loop.config.run import SftConfig
from rl_loop.conversations.errors import DataError
from rl_loop.evaluation.chat_statistics import chat_figures, chat_statistics
from rl_loop.lifecycle.vocabulary_checks import check_chat_format
from rl_loop.run import RunInterrupted, run_evaluation, run_sft
from rl_loop.tracking.episode_reader import EpisodeReader
from rl_loop.tracking.run_directory import read_json, read_json_lines
from tests.support.forked_workers import local_ray
from tests.support.metric_names import undocumented_metrics
from tests.support.rl_loop.conversations.written_by_hand import chat, said, user
from tests.support.rl_loop.tiny_runs import Quiet
from tests.support.rl_loop.tiny_sft import ROOT, config


@pytest.fixture(scope="module", autouse=True)
def one_ray() -> Iterator[None]:
    with local_ray(num_cpus=2, object_store_bytes=200 << 20):
        yield


def write_chats(folder: Path, count: int, bad: int = 0) -> Path:
    """Write conversations of one or two turns, and lines that are not conversations."""
    path = folder / "chats.jsonl"
    lines = []
    for i in range(count):
        turns = [user(f"What is {i}?"), said(f"A number, {i}.", thinking="A number.")]
        lines.append(json.dumps(chat(*(turns * (1 + i % 2)))))
    lines += ["no conversation"] * bad
    path.write_text("\n".join(lines) + "\n")
    return path


def write_plain_chats(folder: Path) -> Path:
    """Write conversations without thinking, which ChatML can also represent."""
    path = folder / "chats.jsonl"
    lines = [json.dumps(chat(user(f"What is {i}?"), said(f"A number, {i}."))) for i in range(40)]
    path.write_text("\n".join(lines) + "\n")
    return path


def losses(run: Path, name: str = "loss") -> dict[int, float]:
    records = read_json_lines(run / "metrics.jsonl")
    return {record["step"]: record[name] for record in records if name in record}


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "export/model.safetensors")


def test_sft_run_validates_reports_rejected_lines_and_exports(tmp_path: Path) -> None:
    path = write_chats(tmp_path, 40, bad=2)
    quiet = Quiet()
    overrides = ["data.validation_fraction=0.2", "data.validate_every=4", "data.workers=2"]
    run = run_sft(config(path, *overrides), quiet)

    measured = losses(run, "validation/loss")
    assert sorted(measured) == [0, 4, 6]
    assert sorted(losses(run)) == list(range(1, 7))
    assert measured[6] < measured[0]
    # Before the first step the policy is random, so all tokens are about equally likely.
    assert measured[0] == pytest.approx(math.log(600), rel=0.2)

    records = read_json_lines(run / "metrics.jsonl")
    assert undocumented_metrics(set().union(*records)) == []

    summary = read_json(run / "summary.json")
    assert summary["steps"] == 6
    assert summary["validation_loss"] == pytest.approx(measured[6])
    assert summary["refused"] == 2
    refused = read_json_lines(run / "rejected.jsonl")
    assert [record["line"] for record in refused] == [41, 42]
    assert {record["reason"] for record in refused} == {"not JSON: Expecting value at character 1"}
    assert any("chats.jsonl, line 41: not JSON" in note for note in quiet.notes)
    assert any("2 rejected: 2 x not JSON" in note for note in quiet.notes)
    assert (run / "export/tokenizer.json").exists()


def test_dense_model_learns_conversations_in_chatml(tmp_path: Path) -> None:
    path = write_plain_chats(tmp_path)
    overrides = [
        "model.vocab_size=600",
        "sequences_per_step=4",
        "training.steps=6",
        "optimizer.warmup_steps=0",
        f"data={{path: {path}, validation_fraction: 0.2, validate_every: 6, workers: 1}}",
        f"output_dir={tmp_path}",
    ]
    dense = load_config(ROOT / "configs/sft/tiny_dense.yaml", SftConfig, overrides)
    check_chat_format(dense)
    run = run_sft(dense, Quiet())

    measured = losses(run, "validation/loss")
    assert measured[0] == pytest.approx(math.log(600), rel=0.2)
    assert measured[6] < measured[0] - 0.5
    # The chat template of the export is the trained format.
    shown = AutoTokenizer.from_pretrained(run / "export").apply_chat_template(
        [user("What is 3?")], tokenize=False, add_generation_prompt=True
    )
    assert shown == "<|im_start|>user\nWhat is 3?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.slow
def test_validations_sample_held_out_conversations(tmp_path: Path) -> None:
    """The trainer's weights, its engine, the curves, the summary and the recorded turns agree."""
    path = write_chats(tmp_path, 40)
    overrides = [
        "data.validation_fraction=0.3",
        "data.validate_every=4",
        "data.sampled_conversations=3",
        "rollout.max_sampled_tokens_per_turn=8",
    ]
    run = run_sft(config(path, *overrides), Quiet())
    measured = losses(run, "validation/answer_accuracy")
    assert measured == dict.fromkeys((0, 4, 6), 0.0)
    perplexity = losses(run, "validation/perplexity")
    assert perplexity[0] == pytest.approx(600, rel=0.5)
    assert perplexity[6] < perplexity[0]
    summary = read_json(run / "summary.json")
    assert summary["perplexity"] == pytest.approx(perplexity[6])
    low, high = summary["answer_accuracy_interval"]
    assert low <= summary["answer_accuracy"] == 0 <= high

    episodes = EpisodeReader(run / "episodes")
    episodes.refresh()
    # The others are conversations of the training data.
    rows = episodes.summary_table.to_pylist()
    turns = [row for row in rows if row["split"] == "held_out"]
    assert {turn["step"] for turn in turns} == {0, 4, 6}
    assert len(turns) == 3 * summary["evaluated_turns"]
    # Every conversation has one or two turns.
    assert 3 <= summary["evaluated_turns"] <= 6


@pytest.mark.slow
def test_killed_sft_run_resumes_with_the_next_samples(tmp_path: Path) -> None:
    path = write_chats(tmp_path, 30)
    overrides = ["training.checkpoint_every=2", "data.validation_fraction=0.1"]
    whole = run_sft(config(path, "name=whole", *overrides), Quiet())

    # The run is killed in step 5. A checkpoint is complete before the next update.
    program = f"""
    import os, signal
    from pathlib import Path
    from rl_loop.run import run_sft
    from tests.support.rl_loop.tiny_runs import Quiet
    from tests.support.rl_loop.tiny_sft import config

    def kill(step):
        if step == 5:
            os.kill(os.getpid(), signal.SIGKILL)

    if __name__ == "__main__":
        run_sft(config(Path({str(path)!r}), "name=killed", *{overrides!r}), Quiet(kill))
    """
    file = tmp_path / "killed.py"
    file.write_text(textwrap.dedent(program))
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    done = subprocess.run(
        [sys.executable, str(file)],
        env={**os.environ, "PYTHONPATH": paths, "RAY_ADDRESS": ""},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    killed = tmp_path / "killed"
    assert (killed / "checkpoints/latest").read_text() in ("step_000002", "step_000004")

    resumed = run_sft(config(path, "name=killed", *overrides), Quiet(), resume=True)
    assert losses(resumed) == losses(whole)
    assert losses(resumed, "validation/loss") == losses(whole, "validation/loss")
    expected = weights(whole)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(resumed).items())


def test_interrupted_sft_run_resumes_at_its_place_in_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second interrupt comes in the last step, when only the export is missing."""
    path = write_chats(tmp_path, 30)
    whole = run_sft(config(path, "training.steps=4", "name=whole"), Quiet())
    settings = config(path, "training.steps=4", "name=stopped")
    stopping = Quiet(lambda step: os.kill(os.getpid(), signal.SIGINT) if step == 2 else None)
    with pytest.raises(RunInterrupted, match="saved after step 2 of 4"):
        run_sft(settings, stopping)
    with pytest.raises(ConfigError, match=r"--resume cannot change data.seed: 0 -> 1"):
        run_sft(
            config(path, "training.steps=4", "name=stopped", "data.seed=1"), Quiet(), resume=True
        )

    unfinished = settings.directory / "export.partial"

    def stop(step: int) -> None:
        if step == 4:
            unfinished.mkdir()
            (unfinished / "shard-0").write_bytes(b"as of a rank that was killed")
            os.kill(os.getpid(), signal.SIGINT)

    # The number of rendering processes may change, because the samples do not depend on it.
    fewer = config(path, "training.steps=4", "name=stopped", "data.workers=0")
    with pytest.raises(RunInterrupted, match=r"saved after step 4 of 4 .*\. The export is missing"):
        run_sft(fewer, Quiet(stop), resume=True)
    assert losses(settings.directory) == losses(whole)
    assert not (settings.directory / "export").exists()
    assert not unfinished.exists(), "it takes the room of a whole model"

    # A killed driver has deleted nothing, and the resumed run may need the disk space.
    unfinished.mkdir()
    check = session.check_run_requirements

    def check_disk_space(*arguments: object) -> None:
        assert not unfinished.exists()
        check(*arguments)

    monkeypatch.setattr(session, "check_run_requirements", check_disk_space)
    expected = weights(whole)
    resumed = weights(run_sft(fewer, Quiet(), resume=True))
    assert resumed.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in resumed.items())


def test_sft_run_ends_with_its_data(tmp_path: Path) -> None:
    path = write_chats(tmp_path, 6)  # nine samples
    run = run_sft(config(path, "data.epochs=2", "training.steps=50"), Quiet())
    assert sorted(losses(run)) == [1, 2, 3, 4, 5]
    assert (run / "checkpoints/latest").read_text() == "step_000005"
    assert read_json(run / "summary.json")["steps"] == 5

    # No data is left, so a resumed run takes no step.
    again = run_sft(config(path, "data.epochs=2", "training.steps=50"), Quiet(), resume=True)
    assert sorted(losses(again)) == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_tiny_model_answers_held_out_conversations_with_tools(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/data.md publishes the shares of these runs."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    from chat_with_tools import write_files

    shares = []
    for seed in range(3):
        folder = tmp_path / f"shop_{seed}"
        write_files(folder, seed)
        overrides = [
            f"data.path={folder / 'train.jsonl'}",
            f"data.validation_path={folder / 'held_out.jsonl'}",
            f"data.seed={seed}",
            f"seed={seed}",
            f"name=tiny_shop_{seed}",
            f"output_dir={tmp_path}",
        ]
        shop = load_config(ROOT / "configs/sft/tiny_shop.yaml", SftConfig, overrides)
        run = run_sft(shop, Quiet())
        records = run_evaluation(shop, run / "export", tmp_path / f"{seed}.jsonl")
        assert len(records) == 400
        shares.append(chat_statistics(records).correct.value)
        assert read_json(run / "summary.json")["evaluation"] == chat_figures(records)
    assert min(shares) >= 0.9, shares


def test_run_is_rejected_when_much_of_its_data_is_malformed(tmp_path: Path) -> None:
    path = write_chats(tmp_path, 10, bad=5)
    with pytest.raises(DataError, match="5 of 15 conversations are rejected"):
        run_sft(config(path), Quiet())
    assert not (tmp_path / "tiny_shop").exists()
