"""Run of benchmarks.sglang sync and faults: 2 trainer ranks and 2 server ranks on CPUs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.support.forked_workers import forked_python
from tests.support.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).parents[2]
PARAMETERS = 33
"""Number of checksums per rank of the server: 3 outside the layers and 15 in each layer."""


@pytest.mark.parametrize("adapters", [pytest.param(False, marks=pytest.mark.slow), True])
def test_server_ranks_get_all_trainer_weights_also_after_faults(
    adapters: bool, tmp_path: Path
) -> None:
    stub = f"{ROOT / 'tests/support/rl_loop/sglang_process'}:{ROOT}:{ROOT / 'kernels'}"
    program = [*forked_python(), "-m", "benchmarks.sglang", "sync", "faults", "--device", "cpu"]
    program += ["--tiny", "--layers", "2", "--quantization", "mxfp4"]
    program += ["--transport", "shared_memory", "--bucket-mib", "1"]
    program += ["--server-tensor-parallel", "2", "--expert-parallel", "2"]
    program += ["--pythonpath", stub, "--log", str(tmp_path / "log")]
    if adapters:
        program += ["--expert-adapter-rank", "3"]
    done = subprocess.run(
        program,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr

    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    first, timed = (line for line in lines if line["case"] == "sync")
    assert first["gigabytes"] > 0
    assert len(timed["seconds_all"]) == 5
    assert timed["server_tensor_parallel"] == timed["expert_parallel"] == 2

    errors = [line["error"] for line in lines if line["case"] == "fault"]
    assert [error.split(":")[0] for error in errors] == ["SyncError", "WeightMismatchError"]
    after_start, after_faults = (line for line in lines if line["case"] == "checksums")
    # Each layer has two more pairs of factors.
    parameters = PARAMETERS + 8 if adapters else PARAMETERS
    assert after_start["parameters"] == after_faults["parameters"] == [parameters] * 2
