"""``gptoss list``: every shipped configuration, its hardware, its predicted memory and its real run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from launch import gpus
from launch.cli import app
from launch.config_list import listed_configs
from megatron_gptoss.planning.memory import predict_fullest_stage
from rl_loop.config.load import load_rl_config
from rl_loop.config.shipped import shipped_files
from tests.support.processor_speed import slowness
from tests.support.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).parents[2]
CLERK = "examples.clerk_agent"
"""Module that tiny_clerk and tiny_order name."""


def listed(*options: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the rows of ``gptoss list --json`` by command and name."""
    result = CliRunner().invoke(app, ["list", "--json", *options])
    assert result.exit_code == 0, result.output
    return {(row["command"], row["name"]): row for row in json.loads(result.stdout)}


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan for the GPUs of the configurations, not for this machine's."""
    monkeypatch.setattr(gpus, "local_gpu", lambda: None)


@pytest.fixture
def without_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the examples impossible to import, as in an installed wheel."""
    monkeypatch.setitem(sys.modules, CLERK, None)


def test_every_shipped_configuration_has_a_row() -> None:
    files = [(command, path) for command in ("rl", "sft") for path in shipped_files(command)]
    rows = listed()
    assert list(rows) == [(command, path.stem) for command, path in files]
    assert [row["path"] for row in rows.values()] == [str(path) for _, path in files]
    for command, path in files:
        row = rows[command, path.stem]
        assert (row["ran"] is None) == ("untested" in path.parts), path
        assert row["error"] is None and row["fit"] in ("fits", "tight"), path
        # Names of files state nodes x GPUs.
        hardware = re.search(r"_(\d)x(\d)", path.stem)
        expected = 0 if hardware is None else int(hardware[1]) * int(hardware[2])
        if path.stem != "upcycled_heal":
            assert row["gpus"] == expected, path


def test_row_has_the_values_of_configuration_and_header() -> None:
    row = listed("--fits", "80")["rl", "gpt-oss-20b-adapter_1x1_80gb"]
    config = load_rl_config(Path("gpt-oss-20b-adapter_1x1_80gb"))
    peak = predict_fullest_stage(config.memory_inputs, 80).peak.total / 1e9
    assert row == {
        "name": "gpt-oss-20b-adapter_1x1_80gb",
        "command": "rl",
        "path": str(ROOT / "configs/rl/gpt-oss-20b-adapter_1x1_80gb.yaml"),
        "description": "RL of GPT-OSS-20B with adapters on one GPU of 80 GB.",
        "ran": "for 3 steps on one H100",
        "model": "gpt-oss-20b",
        "method": "grpo, adapters, mxfp4",
        "gpus": 1,
        "fit": "fits",
        "needed_gb": pytest.approx(peak, abs=0.05),
        "gpu_gb": 80,
        "error": None,
    }


def test_filters_leave_out_other_configurations() -> None:
    everything = listed()
    one_gpu = listed("--gpus", "1")
    assert {row["gpus"] for row in one_gpu.values()} == {0, 1}
    assert (
        Counter(row["gpus"] for row in everything.values())[1]
        == Counter(row["gpus"] for row in one_gpu.values())[1]
    )

    large = listed("--model", "120B", "--command", "sft")
    assert large.keys() == {("sft", "gpt-oss-120b_2x8"), ("sft", "gpt-oss-120b_2x8_80gb")}
    assert all(row["ran"] is not None for row in listed("--ran").values())

    # The same configurations are too large for a smaller GPU.
    small = listed("--gpus", "1", "--model", "20b", "--fits", "60", "--command", "rl")
    assert small == {}
    h100 = listed("--gpus", "1", "--model", "20b", "--fits", "h100", "--command", "rl")
    assert ("rl", "gpt-oss-20b-adapter_1x1_80gb") in h100


@pytest.mark.parametrize("gpu", ["a100x", "0", "-1", "nan", "inf"])
def test_unknown_gpu_is_named(gpu: str) -> None:
    result = CliRunner().invoke(app, ["list", f"--fits={gpu}"])
    assert result.exit_code == 1
    assert f"--fits {gpu}: must be one of h100, h200, b200" in result.stderr


@pytest.mark.usefixtures("without_examples")
def test_configuration_that_cannot_be_loaded_is_listed() -> None:
    result = CliRunner().invoke(app, ["list", "--model", "tiny_words", "--command", "rl"])
    assert result.exit_code == 0, result.output
    (row,) = [line for line in result.stdout.splitlines() if line.startswith("tiny_clerk")]
    assert row.split()[:5] == ["tiny_clerk", "rl", "tiny_words", "?", "?"]
    assert "on two CPU cores" in row
    functions = {"tiny_clerk": "tasks", "tiny_order": "orders"}
    messages = zip(functions.items(), result.stderr.splitlines(), strict=True)
    for (name, function), message in messages:
        assert message.startswith(f"gptoss: {name} cannot be loaded: ")
        assert f"{CLERK}:{function}' cannot be imported" in message
    # A number of GPUs is unknown, so no filter may show it.
    assert ("rl", "tiny_clerk") not in listed("--gpus", "8")


@pytest.mark.parametrize("name", ["tiny_clerk", "tiny_order"])
def test_configuration_with_an_example_needs_no_pythonpath(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script ``gptoss`` of an editable installation does not have the checkout in its path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if Path(path).resolve() != ROOT])
    for module in ("examples", CLERK):
        monkeypatch.delitem(sys.modules, module, raising=False)
    config = load_rl_config(Path(name))
    assert CLERK in sys.modules
    assert config.tasks.sources["clerk"].options["agent"].startswith(f"{CLERK}:")


def test_listed_gpu_memory_is_that_of_the_configuration() -> None:
    rows = {row.name: row for row in listed_configs(["sft"])}
    assert rows["gpt-oss-20b_1x8_80gb"].gpu_gb == 75
    assert rows["gpt-oss-120b_2x8"].gpu_gb == pytest.approx(150.1)


def test_list_takes_seconds_and_does_not_import_torch() -> None:
    """Alone, the command takes 1.3 s of processor time. Other tests run at the same time."""
    before = os.times()
    program = "import sys; from launch.cli import app; app(['list'], standalone_mode=False)"
    report = "; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program + report],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    after = os.times()
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "False"
    user = after.children_user - before.children_user
    system = after.children_system - before.children_system
    assert user + system < 4 * slowness()
