"""Secrets of a launch stay private, and values of a cluster file cannot become commands."""

from __future__ import annotations

import logging
import os
import re
import stat
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml

from launch import snapshot
from launch.cli.serving import read_keys
from launch.cluster import ClusterConfig, load_cluster
from rl_loop.config.errors import ConfigError
from rl_loop.gateway.serve import ServeError
from rl_loop.tracking.run_directory import make_run_directory
from tests.support.launch.forked_command import Ended, ForkedCommand

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs/rl/tiny_retool.yaml"
SECRET = "hunter2-is-no-good"
KEY_FILES = {
    ".env": "A=1",
    ".env.local": "A=1",
    "deploy/prod.env": "A=1",
    "certs/server.pem": "x",
    "server.key": "x",
    ".netrc": "machine x",
    "id_ed25519": "x",
    "hf_token": "x",
    "secrets/anything": "x",
    "wandb_api_key.txt": "x",
    "credentials.json": "{}",
    # Detected by content.
    "notes.txt": "my key: hf_" + "a" * 34,
    "run.sh": "export OPENAI_API_KEY=sk-" + "b" * 40,
    "key_in_code.py": 'KEY = "AKIA' + "C" * 16 + '"',
    "login": "-----BEGIN OPENSSH PRIVATE KEY-----",
}
OTHER_FILES = {
    "new_module.py": "x = 1",
    "tests/test_secret_sharing.py": "x = 1",
    "tokenizer.json": "{}",
    "data/tasks.jsonl": "{}",
    "environment.yaml": "x: 1",
}


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a checkout with untracked files of all kinds."""
    project = tmp_path / "project"
    for name, text in {**KEY_FILES, **OTHER_FILES}.items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(text)
    (project / "tracked.env").write_text("in git on purpose")
    git = ["git", "-C", str(project), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init"], ["add", "tracked.env"], ["commit", "-m", "first"]):
        subprocess.run([*git, *command], check=True, capture_output=True)
    monkeypatch.setattr(snapshot, "PROJECT", project)
    return project


def test_snapshot_leaves_keys_out_and_names_them(
    checkout: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        path = snapshot.write_snapshot(tmp_path / "code.tar.gz", {"run.yaml": ""})
    with tarfile.open(path) as archive:
        names = set(archive.getnames())
    assert names == {*OTHER_FILES, "tracked.env", ".gptoss/git.txt", ".gptoss/run.yaml"}
    for name in KEY_FILES:
        assert f"{name}: looks like a key and is left out of the job's code" in caplog.text


def test_snapshot_is_private(checkout: Path, tmp_path: Path) -> None:
    path = snapshot.write_snapshot(tmp_path / "code.tar.gz", {"cluster.yaml": ""})
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with tarfile.open(path) as archive:
        assert [entry.name for entry in archive if entry.mode & 0o077] == []


def slurm_cluster(tmp_path: Path, **changes: object) -> ClusterConfig:
    file = tmp_path / "cluster.yaml"
    values = {"kind": "slurm", "shared_dir": "/shared", "python": "/venv/bin/python", **changes}
    file.write_text(yaml.safe_dump(values))
    return load_cluster(str(file))


def dry_run(command: ForkedCommand, folder: Path, *overrides: str) -> Ended:
    """Run ``gptoss launch --dry-run`` with the cluster of ``slurm_cluster``."""
    cluster = ["--cluster", str(folder / "cluster.yaml")]
    weights = "initial_weights=null"
    return command.run("launch", str(CONFIG), weights, *overrides, *cluster, "--dry-run")


def test_dry_run_and_script_hide_variables(slurm_command: ForkedCommand, tmp_path: Path) -> None:
    """bash also prints every line of the script into the job's log."""
    slurm_cluster(tmp_path, env={"WANDB_API_KEY": SECRET})
    done = dry_run(slurm_command, tmp_path)
    assert "#SBATCH" in done.stdout, done.stderr
    assert SECRET not in done.stdout + done.stderr
    assert "WANDB_API_KEY=***" in done.stdout


def test_node_program_starts_again_with_variables(tmp_path: Path) -> None:
    """The nodes read the variables from the snapshot. Python then has them at its start."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os\nprint('started with', os.environ.get('A_SECRET'))\n"
    )
    paths = f"{ROOT}:{ROOT}/kernels"
    slurm_cluster(tmp_path, env={"A_SECRET": SECRET, "PYTHONPATH": f"{tmp_path}:{paths}"})
    done = subprocess.run(
        [sys.executable, "-m", "launch.node", "no.yaml", str(tmp_path / "cluster.yaml"), "rl", "0"],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    # The program restarts only once.
    assert done.stdout == f"started with {SECRET}\n"
    assert "no.yaml" in done.stderr


@pytest.mark.parametrize(
    "key",
    ["account", "partition", "qos", "constraint", "exclude", "gpu_type", "memory_per_node"],
)
@pytest.mark.parametrize("bad", ["batch\n#SBATCH --uid=0", "batch\r", "a\x1bb"])
def test_value_of_a_cluster_stays_in_its_line(key: str, bad: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{key} .* contains a line break"):
        slurm_cluster(tmp_path, **{key: bad})


@pytest.mark.parametrize(
    "bad", ["/a b", "/a;id", "/$(id)", "/`id`", "/a\nid", "/a'b", "/a&b", "/*"]
)
@pytest.mark.parametrize("key", ["shared_dir", "python", "container.image", "container.mounts"])
def test_path_of_a_cluster_stays_one_word(key: str, bad: str, tmp_path: Path) -> None:
    value: dict[str, object] = {key: bad}
    if key == "container.image":
        value = {"container": {"image": bad}}
    elif key == "container.mounts":
        value = {"container": {"image": "i", "mounts": [bad]}}
    with pytest.raises(ConfigError, match=f"{re.escape(key)} .* which a shell would interpret"):
        slurm_cluster(tmp_path, **value)


def test_every_value_of_a_cluster_in_the_script_is_checked(
    slurm_command: ForkedCommand, tmp_path: Path
) -> None:
    """A new field in the script therefore also needs a check."""
    marked = {
        name: "XX" + name.replace("_", "")
        for name, field in ClusterConfig.model_fields.items()
        if field.annotation in (str, str | None)
        and name not in ("kind", "login", "time_limit", "engine_python")
    }
    marked["memory_per_node"] = "XXmemorypernode"
    slurm_cluster(tmp_path, gpus_per_node=1, **marked)
    done = dry_run(slurm_command, tmp_path)
    assert "#SBATCH" in done.stdout, done.stderr
    script = done.stdout.partition("# sbatch script")[2].partition("# configuration")[0]
    for name, value in marked.items():
        assert value in script, f"{name} is not in the script: leave it out here"
        with pytest.raises(ConfigError):
            slurm_cluster(tmp_path, gpus_per_node=1, **{**marked, name: f"{value}\nid"})


def test_directory_of_a_run_stays_one_word(slurm_command: ForkedCommand, tmp_path: Path) -> None:
    slurm_cluster(tmp_path)
    done = dry_run(slurm_command, tmp_path, "output_dir=/shared/my runs")
    assert done.returncode != 0
    assert "the directory of the run ('/shared/my runs/tiny_retool') contains ' '" in done.stderr


def test_run_directory_is_private(tmp_path: Path) -> None:
    make_run_directory(tmp_path / "runs" / "one")
    assert stat.S_IMODE((tmp_path / "runs" / "one").stat().st_mode) == 0o700


def test_keys_of_a_server_come_from_a_private_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\n\n two \n")
    file.chmod(0o600)
    assert read_keys(file) == ("one", "two")
    file.chmod(0o640)
    with pytest.raises(ServeError, match=r"readable by other users \(mode 0640\)"):
        read_keys(file)
    file.chmod(0o600)
    file.write_text("\n")
    with pytest.raises(ServeError, match="has no key"):
        read_keys(file)
    with pytest.raises(ServeError, match="cannot be read"):
        read_keys(tmp_path / "missing")
