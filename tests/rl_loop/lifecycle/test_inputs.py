"""Comparison of input files by content at a resume."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatron_gptoss.checkpoint.checksums import write_checksums
from rl_loop.config.errors import ConfigError
from rl_loop.config.every_run import RunConfig
from rl_loop.config.load import dump_config, load_config
from rl_loop.config.run import RlConfig, SftConfig
from rl_loop.lifecycle import inputs
from rl_loop.lifecycle.inputs import to_json, weights_digest
from rl_loop.lifecycle.resume import changes_since, read_run_inputs
from rl_loop.run_parts import pinned_settings
from rl_loop.tracking.run_directory import RunDirectory, start_run, write_json
from tests.support.rl_loop.lifecycle.config_keys import CONFIGS

KL = "algorithm.kl={}"


def saved_run(config: RunConfig) -> RunDirectory:
    """Make a run that has a checkpoint."""
    run = start_run(config.directory, dump_config(config))
    write_json(run.inputs, to_json(read_run_inputs(config)))
    run.checkpoints.mkdir(exist_ok=True)
    (run.checkpoints / "latest").write_text("step_000003")
    return run


def rl(directory: Path, *overrides: str) -> Any:
    options = ["initial_weights=null", f"output_dir={directory}", "name=r", *overrides]
    return load_config(CONFIGS / "rl/tiny_gsm8k.yaml", RlConfig, options)


def save_checkpoint(run: Path, step: int, value: str) -> Path:
    """Write the files of a checkpoint that a digest reads."""
    directory = run / f"checkpoints/step_{step:06}"
    directory.mkdir(parents=True)
    (directory / "weights.distcp").write_text(value)
    (directory / "metadata.json").write_text("{}")
    write_checksums(directory, {})
    (directory / "training_state.json").write_text("{}")
    (run / "checkpoints/latest").write_text(directory.name)
    return directory


def task_files(directory: Path) -> str:
    for name, rows in (("train", 8), ("held", 2)):
        lines = [{"question": f"{name} {i}?", "answer": f"#### {i}"} for i in range(rows)]
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    source = f"environment: gsm8k, train_path: {directory}/train.jsonl, held_out_path: {directory}/held.jsonl"
    return f"tasks.sources={{gsm8k: {{{source}}}}}"


def test_resume_rejects_a_reference_that_was_trained_further(tmp_path: Path) -> None:
    """``initial_weights: runs/sft`` means the newest checkpoint of that run."""
    sft = tmp_path / "sft"
    old = save_checkpoint(sft, 100, "first")
    config = rl(tmp_path, f"initial_weights={sft}", KL)
    run = saved_run(config)
    assert changes_since(run, config) == []

    save_checkpoint(sft, 200, "second")
    with pytest.raises(ConfigError, match=r"^initial_weights: .*reference policy") as refused:
        changes_since(run, config)
    before, now = weights_digest(old), weights_digest(sft / "checkpoints/step_000200")
    assert before in str(refused.value) and now in str(refused.value)
    assert f"Set initial_weights={old}" in str(refused.value)
    assert changes_since(run, rl(tmp_path, f"initial_weights={old}", KL)), "the remedy works"


def test_resume_accepts_other_initial_weights_without_reference(tmp_path: Path) -> None:
    """A run without a reference policy continues from its own checkpoint only."""
    save_checkpoint(tmp_path / "sft", 100, "first")
    config = rl(tmp_path, f"initial_weights={tmp_path}/sft")
    run = saved_run(config)
    save_checkpoint(tmp_path / "sft", 200, "second")
    assert changes_since(run, config) == []


def test_trainer_reads_the_recorded_checkpoint(tmp_path: Path) -> None:
    """The other run may save a newer checkpoint before the ranks have started."""
    old = save_checkpoint(tmp_path / "sft", 100, "first")
    config = rl(tmp_path, f"initial_weights={tmp_path}/sft")
    recorded = read_run_inputs(config)
    save_checkpoint(tmp_path / "sft", 200, "second")
    assert pinned_settings(config, recorded).initial_weights == old


@pytest.mark.parametrize("name", ["train", "held"])
def test_resume_rejects_a_changed_task_file(name: str, tmp_path: Path) -> None:
    config = rl(tmp_path, task_files(tmp_path))
    run = saved_run(config)
    assert changes_since(run, config) == []

    with (tmp_path / f"{name}.jsonl").open("a") as file:
        file.write('{"question": "One more?", "answer": "#### 1"}\n')
    key = {"train": "train_path", "held": "held_out_path"}[name]
    with pytest.raises(
        ConfigError, match=rf"^tasks\.sources\.gsm8k\.{key}: the content of .*twice"
    ):
        changes_since(run, config)


def test_resume_accepts_a_copy_of_the_data(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    run = saved_run(rl(tmp_path, task_files(tmp_path / "a")))
    assert changes_since(run, rl(tmp_path, task_files(tmp_path / "b")))


@pytest.mark.parametrize("section", ["data", "vocabulary_data"])
def test_resume_rejects_changed_conversations(section: str, tmp_path: Path) -> None:
    """The changed file has the same length."""
    file = tmp_path / "chats.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    kind = SftConfig if section == "data" else RlConfig
    options = ["initial_weights=null", f"output_dir={tmp_path}", f"{section}={{path: {file}}}"]
    config = load_config(CONFIGS / f"{kind.command}/tiny_retool.yaml", kind, options)
    run = saved_run(config)
    assert changes_since(run, config) == []
    file.write_text(file.read_text().replace('"a"', '"b"'))
    with pytest.raises(ConfigError, match=rf"^{section}\.sources\.data\.path: the content of"):
        changes_since(run, config)


def test_resume_rejects_another_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    options = ["initial_weights=null", f"output_dir={tmp_path}", f"tokenizer={tmp_path}"]
    file = CONFIGS / "rl/tiny_dense.yaml"
    config = load_config(file, RlConfig, [*options, "vocabulary=tokenizer"])
    run = saved_run(config)
    (tmp_path / "tokenizer.json").write_text("{ }")
    with pytest.raises(ConfigError, match=r"^tokenizer: .* trained with different token ids"):
        changes_since(run, config)


@pytest.mark.parametrize("whole_file", [1 << 24, 1 << 10])
def test_weights_digest_detects_training(
    whole_file: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest reads small files completely, and a middle block of each tensor of large files."""
    monkeypatch.setattr(inputs, "WHOLE_FILE", whole_file)
    file = tmp_path / "model.safetensors"
    tensors = {f"layer.{i}": torch.randn(100, 200) for i in range(4)}
    save_file(tensors, file)
    before = weights_digest(tmp_path)
    assert weights_digest(tmp_path) == before
    for name in tensors:
        trained = {**tensors, name: tensors[name] * 1.001}
        save_file(trained, file)
        assert weights_digest(tmp_path) != before, name
    renamed = {f"other.{name}": tensor for name, tensor in tensors.items()}
    save_file(renamed, file)
    assert weights_digest(tmp_path) != before


def test_weights_digest_reads_little_of_large_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "WHOLE_FILE", 1 << 10)
    save_file({"a": torch.zeros(1 << 20), "b": torch.ones(1 << 20)}, tmp_path / "m.safetensors")
    blocks = list(inputs._blocks(tmp_path / "m.safetensors"))
    assert sum(map(len, blocks)) < 3 * inputs.WEIGHT_BLOCK


# -- data sets of the hub ------------------------------------------------------------------------


def write_hub(folder: Path, rows: list[dict[str, Any]]) -> None:
    """Write a data set. ``load_dataset`` accepts a folder like a name of the hub."""
    from datasets import Dataset

    folder.mkdir(exist_ok=True)
    Dataset.from_list(rows).to_parquet(folder / "train.parquet")


def hub_config(directory: Path, kind: str) -> Any:
    if kind == "rl":
        place = f"hub:{directory}/hub:train"
        source = f"environment: gsm8k, train_path: '{place}', held_out_path: '{place}'"
        return rl(directory, f"tasks.sources={{gsm8k: {{{source}}}}}")
    options = ["initial_weights=null", f"output_dir={directory}", "name=r"]
    data = f"data={{path: 'hub:{directory}/hub:train'}}"
    return load_config(CONFIGS / "sft/tiny_retool.yaml", SftConfig, [*options, data])


HUB_KEYS = {"rl": "tasks.sources.gsm8k.train_path", "sft": "data.sources.data.path"}


@pytest.mark.parametrize("kind", ["rl", "sft"])
def test_resume_compares_a_data_set_of_the_hub(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The published rows change under the same name."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [{"question": f"{i}?", "answer": f"#### {i}"} for i in range(6)]
    write_hub(tmp_path / "hub", rows)
    config = hub_config(tmp_path, kind)
    run = saved_run(config)
    assert changes_since(run, config) == []

    # The cache is empty on another machine, or after its deletion.
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "other_cache")
    assert changes_since(run, config) == []

    for changed in ([*rows, rows[0]], [rows[1], rows[0], *rows[2:]]):
        write_hub(tmp_path / "hub", changed)
        with pytest.raises(ConfigError, match=f"^{HUB_KEYS[kind]}: the content of hub:"):
            changes_since(run, config)
    write_hub(tmp_path / "hub", rows)
    assert changes_since(run, config) == []


# -- tool servers --------------------------------------------------------------------------------


def mcp(directory: Path, server: str) -> Any:
    rows = directory / "tasks.jsonl"
    task = {"environment": "mcp", "id": "1", "messages": [{"role": "user", "content": "Buy."}]}
    rows.write_text(json.dumps(task) + "\n")
    source = (
        f"environment: mcp, train_path: {rows}, held_out_path: {rows}, "
        f"options: {{servers: {{shop: {server}}}}}"
    )
    return rl(directory, f"tasks.sources={{shop: {{{source}}}}}")


@pytest.mark.parametrize(
    "server",
    [
        "{command: [python, DIR/server.py]}",
        "{command: [python, server.py], cwd: DIR}",
        "{command: [DIR/server.py]}",
        "{in_process: 'resumed_tool_server:make'}",
    ],
)
def test_resume_compares_scripts_of_tool_servers(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("server.py", "resumed_tool_server.py"):
        (tmp_path / name).write_text("#!/usr/bin/env python\ndef make(task): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = mcp(tmp_path, server.replace("DIR", str(tmp_path)))
    run = saved_run(config)
    assert changes_since(run, config) == []
    for name in ("server.py", "resumed_tool_server.py"):
        with (tmp_path / name).open("a") as file:
            file.write("# the answer is 7\n")
    key = r"tasks\.sources\.shop\.options\.servers\.shop\.script_"
    with pytest.raises(ConfigError, match=rf"^{key}\d: the content of .*different tools"):
        changes_since(run, config)


def test_interpreter_of_a_tool_server_is_not_an_input(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text("")
    config = mcp(tmp_path, f"{{command: [{sys.executable}, {tmp_path}/server.py]}}")
    scripts = [known.path for key, known in read_run_inputs(config).items() if ".servers." in key]
    assert scripts == [str(tmp_path / "server.py")]
