"""The commands of docs/getting_started/slurm.md run verbatim on a real Slurm."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch
import yaml
from transformers import GptOssConfig
from transformers.models.gpt_oss import GptOssForCausalLM

from rl_loop.config.load import load_config
from rl_loop.config.run import RlConfig
from rl_loop.harmony.codec import ParsedMessage
from rl_loop.run_parts import build_tasks
from rl_loop.tracking.run_directory import RunDirectory, read_json
from tests.support.slurm.lab import ROOT, SMALL, Lab, steps_done

pytestmark = pytest.mark.slurm

PAGE = ROOT / "docs/getting_started/slurm.md"
PLACE = "/shared/gptoss"
NAME = "gpt-oss-20b_2x8"
NOT_HERE = ("git clone", "source ", "pip install", "gptoss doctor --install-engine", "hf download")
"""Commands that download or compile. The test creates their results."""
THIS_CLUSTER = {
    "account": "team",
    "partition": "batch",
    "nodes": 2,
    "gpus_per_node": 0,
    "cpus_per_node": 2,
    "memory_per_node": None,
    "time_limit": "00:30:00",
    "stop_before_end": 100,
    "min_bandwidth": None,
    "min_free_disk": 0.5,
    "ready_seconds": 300,
    "dashboard": False,
    "env": {"OMP_NUM_THREADS": "1"},
}
"""Keys of the cluster's file that depend on the cluster. All others keep the page's values."""
ON_CPUS = [
    *(setting for setting in SMALL if setting != "initial_weights=null"),
    "model=tiny",
    "dtype=fp32",
    "vocabulary=tiny",
    "prompt={channels: false, describe_builtin_tools: false, model_identity: null, knowledge_cutoff: null, "
    "reasoning_effort: null}",
    "tasks.sources={retool: {environment: retool, options: {instructions: null}}}",
    "parallel.expert=1",
    "rollout.max_episode_tokens=384",
    "training.max_tokens_per_micro_batch=4096",
    "training.steps=2",
    "rollout.routed_experts=true",
    "algorithm.routing_replay=R3",
    "sandbox.servers=1",
    "rollout.engine.servers=2",
    "rollout.engine.arguments=[--device, cpu]",
    "rollout.engine.attention_backend=intel_amx",
    "rollout.engine.weight_sync=gloo",
]


def commands_of_page() -> list[str]:
    """Return all commands of the page, in order. A line is one command."""
    blocks = re.findall(r"^ *```bash\n(.*?)^ *```", PAGE.read_text(), flags=re.S | re.M)
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line]


class Shared:
    """Files on the shared file system after the first steps of the page."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.path = lab.shared / "gptoss"
        self.code = self.path / "code"
        self.code.mkdir(parents=True)
        (self.code / ".venv").symlink_to(sys.prefix)
        shutil.copytree(ROOT / "configs", self.code / "configs")
        # A new environment, not a link. With a link, the page's command would write into this
        # checkout.
        self.engine = self.path / "sglang"

    def run(
        self, command: str, *more: str, timeout: float = 120
    ) -> subprocess.CompletedProcess[str]:
        words = shlex.split(command.replace(PLACE, str(self.path)))
        bin_directory = str(self.code / ".venv/bin")
        return subprocess.run(
            [*words, *more],
            cwd=self.code,
            env={**self.lab.environment, "PATH": f"{bin_directory}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def describe_cluster(self) -> None:
        """Set the keys of the page's table for this cluster."""
        file = self.code / "configs/cluster/mine.yaml"
        values = yaml.safe_load(file.read_text().replace(PLACE, str(self.path))) | THIS_CLUSTER
        file.write_text(yaml.safe_dump(values))

    def install_engine(self) -> None:
        """Create an engine environment with a server of SGLang's protocol and without a trainer."""
        venv.create(self.engine, symlinks=True)
        (site,) = self.engine.glob("lib/python*/site-packages")
        packages = next(Path(sys.prefix).glob("lib/python*/site-packages"))
        paths = [ROOT / "tests/faults/sglang_process", ROOT, ROOT / "kernels", packages]
        (site / "server.pth").write_text("".join(f"{path}\n" for path in paths))

    def write_weights(self, config: RlConfig) -> None:
        torch.manual_seed(0)
        model = GptOssForCausalLM(GptOssConfig(**config.model.to_hf_config()))
        model.save_pretrained(self.path / "models/gpt-oss-20b")


def settings_of_server(config: RlConfig, folder: Path) -> str:
    """Return the override with the begin and end of the policy's turns for the servers."""
    codec = build_tasks(config).codec
    call = ParsedMessage("analysis", "python", "code", "print(sum(range(100)))")
    answer = ParsedMessage("final", None, None, "\\boxed{1/2 + 1/3}")
    told = {
        "call": codec.render_assistant([call], "<|call|>"),
        "answer": codec.render_assistant([answer], "<|return|>"),
        "orders": str(folder),
        "deterministic": False,
        "header": codec.assistant_header,
    }
    variables = {"POLICY_SERVER": json.dumps(told), "OMP_NUM_THREADS": "1"}
    return f"rollout.engine.env={json.dumps(variables)}"


def test_page_commands_run_on_slurm(lab: Lab) -> None:
    shared = Shared(lab)
    commands = [line for line in commands_of_page() if not line.startswith(NOT_HERE)]
    copy, dry_run, launch, status, follow = commands
    assert copy.startswith("cp ") and dry_run.endswith(" --dry-run")
    assert launch == dry_run.removesuffix(" --dry-run")

    assert shared.run(copy).returncode == 0
    shown = shared.run(dry_run)
    assert shown.returncode == 0, shown.stderr
    assert f"trainer  {PLACE}/code/.venv/bin/python  (cluster.python)" in shown.stdout
    assert f"engine   {PLACE}/sglang/bin/python  (cluster.engine_python)" in shown.stdout
    assert f"    python: {PLACE}/sglang/bin/python" in shown.stdout
    assert f"file     {PLACE}/models/gpt-oss-20b  (initial_weights)" in shown.stdout
    assert "# memory plan\nfits: " in shown.stdout

    shared.describe_cluster()
    config = load_config(ROOT / f"configs/rl/{NAME}.yaml", RlConfig, ON_CPUS)
    small = [*ON_CPUS, settings_of_server(config, lab.folder)]

    # The error names each missing item and the command that creates it.
    refused = shared.run(launch, *small).stderr
    assert f"cluster.engine_python: {shared.engine}/bin/python does not exist" in refused
    assert "gptoss doctor --install-engine" in refused
    assert f"initial_weights: {shared.path}/models/gpt-oss-20b does not exist" in refused
    assert f"hf download openai/gpt-oss-20b --local-dir {shared.path}/models/gpt-oss-20b" in refused
    venv.create(shared.engine, symlinks=True)
    assert f"{shared.engine}/bin/python there has no SGLang" in shared.run(launch, *small).stderr

    shared.install_engine()
    shared.write_weights(config)
    launched = shared.run(launch, *small)
    assert launched.returncode == 0, launched.stderr
    run = RunDirectory(shared.path / "runs" / NAME)
    lab.until(lambda: lab.outcomes(run), "the end of the run", seconds=300, run=run)
    assert lab.outcomes(run)[0]["result"] == "finished", lab.outcomes(run)
    assert steps_done(run) == 2
    assert "step 2 of 2" in shared.run(status).stdout

    with pytest.raises(subprocess.TimeoutExpired) as followed:
        shared.run(follow, timeout=5)
    assert b"step 2/2" in (followed.value.stdout or b"")
    # The servers ran in the engine's interpreter.
    first = read_json(next((run.path / "attempts").glob("*/nodes/*.json")))
    assert first["state"] == "ready"


def test_nodes_try_the_engine_interpreter(lab: Lab) -> None:
    """The submitting machine may have an interpreter that a node lacks."""
    shared = lab.shared / "partly"
    shared.mkdir()
    engine = shared / "python"
    engine.write_text(
        f'#!/bin/bash\n[ "$SLURMD_NODENAME" = n2 ] && exit 1\nexec {sys.executable} "$@"\n'
    )
    engine.chmod(0o755)
    # Preflight on the submitting machine passes. The nodes with servers check the interpreter
    # again.
    packages = {"PYTHONPATH": str(ROOT / "tests/faults/sglang_process")}
    settings = [
        "rollout.engine={type: sglang, servers: 2, weight_sync: gloo, arguments: [--device, cpu], "
        f"attention_backend: intel_amx, env: {json.dumps(packages)}}}"
    ]
    file = lab.cluster_file(engine_python=str(engine))
    lab.environment["PYTHONPATH"] = packages["PYTHONPATH"]
    try:
        arguments = ["configs/rl/tiny_retool.yaml", "name=partly", *SMALL, *settings]
        done = lab.gptoss("launch", *arguments, "--cluster", str(file))
    finally:
        del lab.environment["PYTHONPATH"]
    assert done.returncode == 0, done.stderr
    run = RunDirectory(lab.shared / "runs/partly")
    lab.until(lambda: lab.outcomes(run), "the verdict about the nodes", seconds=120)
    outcome = lab.outcomes(run)[0]
    assert outcome["result"] == "bad nodes"
    assert f"n2: rollout.engine.python: {engine} has no SGLang" in str(outcome["error"])
