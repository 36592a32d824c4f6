"""Sockets of local commands admit no other user and no other machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from transformers import GptOssConfig, GptOssForCausalLM

from megatron_gptoss.rendezvous import tcp_store
from rl_loop.cluster.placement import free_port
from rl_loop.cluster.tokens import NotPrivateError, private_directory, write_token
from rl_loop.config.load import load_rl_config
from rl_loop.tracking.run_directory import RunDirectory, read_json_lines
from tests.support.forked_workers import forked_python
from tests.support.open_doors import (
    ATTACKER,
    doors,
    find_places,
    findings,
    missing_parts,
    process_tree,
    speaks_like_a_store,
)
from tests.support.processes import kill, read_command

ROOT = Path(__file__).parents[1]
SMALL = (
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.intermediate_size=48",
    "model.head_size=16",
)
RL = (
    "rl",
    "configs/rl/tiny_retool.yaml",
    *SMALL,
    "initial_weights=null",
    "training.steps=5000",
    # While attackers try the sockets, the run waits in its third step instead of computing.
    "tasks.sources.retool.environment=tests.support.waiting_environment:WaitingEnvironment",
    "tasks.held_out_tasks=2",
    "rollout.workers=1",
    "rollout.tasks_per_step=1",
    "rollout.samples_per_task=2",
    "rollout.max_sampled_tokens_per_turn=16",
    "evaluate_every=10000",
    "training.checkpoint_every=10000",
)
COMMANDS = {
    # Two ranks connect to each other. Each rank listens for the other ranks of its groups.
    "rl": (*RL, "parallel.world_size=2"),
    "sft": ("sft", "configs/sft/tiny_retool.yaml", *SMALL, "training.steps=5000"),
}

MARK = "GPTOSS_DOORS_RUN"
"""Environment variable by which forks of a run are found. They are no descendants of its command."""

needs_attackers = pytest.mark.usefixtures("attackers")


@pytest.fixture(scope="module")
def attackers() -> None:
    """Skip the test unless another user or a network namespace is available."""
    if reason := missing_parts():
        pytest.skip(f"attackers cannot be tried here: {reason}")


@pytest.fixture
def short_directory() -> Iterator[Path]:
    """Create a directory with a short path, because Ray puts Unix sockets there."""
    with tempfile.TemporaryDirectory(prefix="gptoss-doors-", dir="/tmp") as folder:
        yield Path(folder)


@contextmanager
def running(arguments: tuple[str, ...], folder: Path, name: str) -> Iterator[psutil.Process]:
    """Run a gptoss command with its output in ``folder``/log."""
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            [
                *forked_python(),
                "-m",
                "launch",
                *arguments,
                f"name={name}",
                f"output_dir={folder}",
            ],
            cwd=ROOT,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "RAY_TMPDIR": str(folder),
                MARK: str(folder),
            },
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            yield psutil.Process(process.pid)
        finally:
            for started in with_forks(process.pid, folder)[1:]:
                kill(started)
            process.kill()
            process.wait()


def with_forks(pid: int, folder: Path) -> list[psutil.Process]:
    """Return a command's process tree, its driver, ranks and rollout workers, which are forks."""
    found = process_tree(pid)
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended, or is not of this user
            if process.environ().get(MARK) == str(folder) and process not in found:
                found.append(process)
    return found


def wait_until(done: Callable[[], bool], folder: Path, process: psutil.Process) -> None:
    deadline = time.monotonic() + 400
    while not done():
        log = (folder / "log").read_text(errors="replace")
        assert process.is_running() and process.status() != psutil.STATUS_ZOMBIE, log
        assert time.monotonic() < deadline, log
        time.sleep(0.2)


def steps(run: RunDirectory) -> int:
    return len(read_json_lines(run.metrics)) if run.metrics.exists() else 0


@needs_attackers
@pytest.mark.parametrize("command", ["rl", pytest.param("sft", marks=pytest.mark.slow)])
def test_training_has_no_open_door(command: str, short_directory: Path) -> None:
    """The run has Ray, ranks and rollout workers. Attackers try all of its sockets.

    The workers are forks. ``test_local_launch_has_no_open_door`` has workers that Ray starts.
    """
    folder = short_directory
    run = RunDirectory(folder / "run")
    with running(COMMANDS[command], folder, "run") as process:
        wait_until(lambda: steps(run) >= 2, folder, process)
        tree = with_forks(process.pid, folder)
        found = doors(tree)
        assert {door.kind for door in found} == {"tcp", "unix"}
        assert [door for door in found if door.kind != "unix" and not door.is_loopback] == []
        assert findings(found, folder / "loot") == []

        if command == "rl":
            ranks = [p for p in tree if "TrainerProcess" in read_command(p)]
            assert len(ranks) == 2, "both ranks were tried"
            for rank in ranks:
                assert {door.kind for door in doors([rank])} >= {"tcp"}
            # Ray's workers inherit the environment of the raylet.
            (raylet,) = [p for p in tree if "raylet/raylet " in read_command(p)]
            assert raylet.environ()["NCCL_RAS_ENABLE"] == "0"

        # Only the owner can read Ray's directory and the token.
        assert (folder / f"gptoss-{os.getuid()}").stat().st_mode & 0o777 == 0o700
        (token,) = (folder / f"gptoss-{os.getuid()}").glob("token-*")
        assert token.stat().st_mode & 0o777 == 0o600
        assert find_places(token.read_text(), tree, [folder], beside=token) == []


@pytest.mark.slow  # tests/launch/test_launch.py tries the sockets of a fine-tuning
@needs_attackers
def test_local_launch_has_no_open_door(short_directory: Path) -> None:
    """``gptoss launch`` on this machine starts Ray as on a node of a cluster."""
    folder = short_directory
    run = RunDirectory(folder / "run")
    cluster = folder / "cluster.yaml"
    cluster.write_text("kind: local\nmin_free_disk: 0\n")
    started = subprocess.run(
        [
            *(sys.executable, "-m", "launch", "launch", *RL[1:], "name=run"),
            *(f"output_dir={folder}", "--cluster", str(cluster)),
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "XDG_STATE_HOME": str(folder / "state")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert started.returncode == 0, started.stderr
    pid = int(re.search(r"process (\d+) in", started.stdout)[1])  # type: ignore[index]
    try:
        deadline = time.monotonic() + 400
        while steps(run) < 2:
            assert psutil.pid_exists(pid), started.stdout
            assert time.monotonic() < deadline
            time.sleep(0.2)
        tree = process_tree(pid)
        found = doors(tree)
        assert [door for door in found if door.kind != "unix" and not door.is_loopback] == []
        assert findings(found, folder / "loot") == []
        (token,) = folder.glob("run/attempts/*/ray_token")
        assert token.stat().st_mode & 0o777 == 0o600
        assert find_places(token.read_text(), tree, [folder], beside=token) == []
    finally:
        for child in reversed(process_tree(pid)):
            with suppress(psutil.NoSuchProcess):
                child.kill()


@needs_attackers
def test_viewer_shows_nothing_without_its_token(tmp_path: Path) -> None:
    """Other users of the machine can connect to loopback, so loopback alone is no protection."""
    run = tmp_path / "runs" / "one"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    process = subprocess.Popen(
        [sys.executable, "-m", "launch", "view", str(tmp_path / "runs"), "--port", "0"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().split()[0]
        origin, _, token = address.partition("?token=")
        headers = {"Authorization": f"Bearer {token}"}
        request = urllib.request.Request(f"{origin}api/runs", headers=headers)
        with urllib.request.urlopen(request) as answer:
            assert answer.status == 200
        found = doors(process_tree(process.pid))
        assert [door.kind for door in found] == ["tcp"]
        assert found[0].is_loopback
        assert findings(found, tmp_path / "loot") == []
    finally:
        process.kill()
        process.wait()


@needs_attackers
def test_server_answers_nothing_without_its_key(tmp_path: Path) -> None:
    config = load_rl_config(ROOT / RL[1], ["dtype=fp32", *SMALL])
    model = GptOssForCausalLM(GptOssConfig(**config.model.to_hf_config()))
    model.save_pretrained(tmp_path / "weights")
    arguments = ["serve", RL[1], *SMALL, "--weights", str(tmp_path / "weights"), "--port", "0"]
    process = subprocess.Popen(
        [*forked_python(), "-m", "launch", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", MARK: str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("serving")
        found = doors(with_forks(process.pid, tmp_path))
        assert [(door.kind, door.is_loopback) for door in found] == [("tcp", True)]
        assert findings(found, tmp_path / "loot") == []
    finally:
        process.kill()
        process.wait()


@needs_attackers
def test_findings_name_open_doors(tmp_path: Path) -> None:
    """The open sockets are a web page, a store, a Unix socket and a port on all addresses."""
    program = f"""
import http.server, os, socket, threading, torch.distributed as dist
os.chdir({str(tmp_path)!r})
os.umask(0)
store = dist.TCPStore("127.0.0.1", 0, None, True)
store.set("name", "value")
store.set("address", bytes([2, 0, 80, 127, 0, 0, 1, 0, 0, 0, 0]))
store.add("counter", 3)
unix = socket.socket(socket.AF_UNIX)
unix.bind("\\0gptoss-open-door-{os.getpid()}")
unix.listen()
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
print("ready", flush=True)
server.serve_forever()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        text = "\n".join(findings(doors(process_tree(process.pid)), tmp_path / "loot"))
    finally:
        process.kill()
        process.wait()
    assert "GET / is answered" in text
    assert "another user connects" in text
    assert text.count("the store of a process group shows /name") == 2
    assert text.count("the store of a process group shows /address") == 2
    assert "counter" not in text
    assert "from the network: python tcp '::'" in text


def test_store_of_a_group_listens_on_one_address() -> None:
    port = free_port()
    timeout = timedelta(seconds=20)
    server = tcp_store("127.0.0.1", port, 1, is_master=True, timeout=timeout)
    client = tcp_store("127.0.0.1", port, 1, is_master=False, timeout=timeout)
    server.set("key", "value")
    assert client.get("key") == b"value"
    assert speaks_like_a_store("127.0.0.1", port)
    listening = [door for door in doors([psutil.Process()]) if door.port == port]
    assert [door.host for door in listening] == ["127.0.0.1"]


def test_single_rank_opens_no_port() -> None:
    """gloo would choose an interface that other machines reach. Later process groups may do so."""
    clean = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
    program = f"""
from tests.support.open_doors import doors
import os, psutil
from megatron_gptoss import distributed
from megatron_gptoss.config import ParallelConfig
distributed.initialize(ParallelConfig(), port={free_port()})
print([str(door) for door in doors([psutil.Process()]) if not door.is_loopback])
print("GLOO_SOCKET_IFNAME" not in os.environ)
"""
    done = subprocess.run(
        [*forked_python(), "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**clean, "PYTHONPATH": f"{ROOT}:{ROOT}/kernels"},
        check=False,
    )
    assert done.stdout.split() == ["[]", "True"], done.stderr


def test_token_is_new_each_time_and_private(tmp_path: Path) -> None:
    first = write_token(tmp_path / "token")
    (tmp_path / "token").chmod(0o644)
    second = write_token(tmp_path / "token")
    assert first != second and len(second) == 64
    assert (tmp_path / "token").read_text() == second
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600


def test_private_directory_closes_an_open_one(tmp_path: Path) -> None:
    directory = tmp_path / "open"
    directory.mkdir(mode=0o777)
    assert private_directory(directory).stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(os.getuid() != 0, reason="another owner needs root")
def test_private_directory_rejects_another_owner(tmp_path: Path) -> None:
    directory = tmp_path / "squatted"
    directory.mkdir()
    os.chown(directory, ATTACKER, ATTACKER)
    with pytest.raises(NotPrivateError, match="is not a directory of this user"):
        private_directory(directory)
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(NotPrivateError, match="is not a directory of this user"):
        private_directory(tmp_path / "link")
