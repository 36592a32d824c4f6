"""Decisions and output of ``gptoss launch`` without Slurm. tests/slurm uses a real Slurm."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from launch import jobs, snapshot
from launch.attempts import AttemptOutcome, AttemptResult, decide_requeue, first_error
from launch.cluster import ClusterConfig, load_cluster
from launch.node_checks import NodeCheck, check_node, find_outlier_nodes, find_slow_nodes
from launch.placement import plan_nodes
from launch.preflight import SlurmPartition, parse_seconds
from launch.ray_node import HeadAddress, RayNode, node_address, ray_start_command
from launch.submit import job_settings, resolve_paths, with_engine_python
from rl_loop.config.errors import ConfigError
from rl_loop.config.load import load_config
from rl_loop.config.run import RlConfig, SftConfig
from rl_loop.lifecycle.store_size import StoreNeed
from rl_loop.tracking.run_directory import read_json, read_training_steps
from tests.support.forked_workers import forked_python
from tests.support.launch.forked_command import ForkedCommand
from tests.support.open_doors import doors, find_places, findings, missing_parts, process_tree
from tests.support.processes import kill, list_children, read_command
from tests.support.rl_loop.tiny_runs import SMALL
from tests.support.waiting import PATIENCE_SECONDS, wait_until

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden"
SMALL_STORE = StoreNeed(
    episodes=1, longest=1, columns=1, routes=0, weights=0, keys=["rollout.max_episode_tokens"]
)
EXAMPLES = [
    ("gpt-oss-20b_2x8", "slurm", ()),
    ("gpt-oss-120b_8x8", "slurm_container", ("--nodes", "8")),
]


def gptoss(
    *arguments: str, python: Sequence[str] = (sys.executable,), **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*python, "-m", "launch", *arguments], cwd=ROOT, env={**os.environ, **environment},
        capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(("config", "cluster", "more"), EXAMPLES)
def test_dry_run_of_each_example_equals_golden_file(
    config: str, cluster: str, more: tuple[str, ...], slurm_command: ForkedCommand, tmp_path: Path
) -> None:
    """After an intended change, run ``UPDATE_GOLDEN=1 pytest tests/launch/test_launch.py``.

    Review the difference before the commit.
    """
    options = ["--cluster", cluster, *more, "--dry-run"]
    done = slurm_command.run("launch", config, *options, XDG_STATE_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []
    launching, _, configuration = done.stdout.partition("# configuration\n")
    placement = launching[: launching.index("# memory plan")]
    text = placement + launching[launching.index("# sbatch script") :]
    assert "# memory plan\nfits" in launching, "the example does not fit its GPUs"
    assert "memory per H200" in launching
    golden = GOLDEN / f"{config}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(configuration)
    assert load_config(resolved, RlConfig).initial_weights == Path(
        f"/shared/gptoss/models/{config.rpartition('_')[0]}",
    )


def test_the_sbatch_script_is_valid_bash() -> None:
    for golden in GOLDEN.glob("*.txt"):
        script = golden.read_text().partition("# sbatch script\n")[2]
        assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


@pytest.fixture
def no_launch_survives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Register launches in the test's folder, and kill their processes at the end of the test."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    yield
    processes = []
    for run in jobs.known_launches():
        with suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(int(run.job)))
    for launched in processes:
        for process in [*list_children(launched, recursive=True), launched]:
            kill(process)
    psutil.wait_procs(processes, timeout=PATIENCE_SECONDS)


def test_status_of_chain_shows_running_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm lists the waiting jobs of a chain before the running one."""
    output = """@queue
2|PENDING|0:00|1:00:00|1|(Dependency)
3|PENDING|0:00|1:00:00|1|(Dependency)
1|RUNNING|7:31|1:00:00|1|n1
@accounting
@metrics
"""
    monkeypatch.setattr(jobs, "run_shell", lambda login, script: output)
    launch = jobs.Launch(
        name="chain", kind="slurm", login="me@login", run_dir="/shared/runs/chain", command="rl",
        steps=10, job="1", submitted="2026-01-01 00:00",
    )  # fmt: skip
    status = jobs.query_status(launch)
    assert status.state == "RUNNING"
    assert status.detail == "job 1, 7:31 of 1:00:00, 1 nodes n1, 2 more in the queue"


def test_process_with_the_number_of_an_ended_run_stays(tmp_path: Path) -> None:
    """After the end of a run or a reboot, its process number may belong to another program."""
    with subprocess.Popen(["sleep", "60"], cwd=tmp_path) as other:
        launch = jobs.Launch(
            name="ended", kind="local", login=None, run_dir=str(tmp_path / "ended"), command="rl",
            steps=10, job=str(other.pid), submitted="2026-01-01 00:00",
        )  # fmt: skip
        state = jobs.query_status(launch).state
        message = jobs.cancel(launch)
        still_runs = other.poll() is None
        other.kill()
    assert state == "ENDED"
    assert "has already ended" in message
    assert still_runs


def check_doors(directory: Path, loot: Path) -> None:
    """Check that no attacker reads anything from a launched run, which has Ray like on a cluster."""
    (launch,) = jobs.known_launches()

    def find_ranks() -> list[psutil.Process]:
        tree = process_tree(int(launch.job))
        return [process for process in tree if "TrainerProcess" in read_command(process)]

    # A list of processes is not complete while others start and end.
    wait_until(find_ranks)
    (rank,) = find_ranks()
    tree = process_tree(int(launch.job))
    # Its sockets are tried in tests/test_open_doors.py. Here it would take the attackers' time.
    rank.suspend()
    try:
        found = doors(tree)
        assert {door.kind for door in found} == {"tcp", "unix"}
        assert [door for door in found if door.kind != "unix" and not door.is_loopback] == []
        assert findings(found, loot) == []
    finally:
        rank.resume()
    (token,) = directory.glob("attempts/*/ray_token")
    assert token.stat().st_mode & 0o777 == 0o600
    assert find_places(token.read_text(), tree, [directory], beside=token) == []


@pytest.mark.usefixtures("no_launch_survives")
def test_local_launch_resumes_in_background_until_canceled(
    command: ForkedCommand, tmp_path: Path
) -> None:
    directory = tmp_path / "background"
    start = [
        "configs/sft/tiny_retool.yaml",
        "name=background",
        f"output_dir={tmp_path}",
        "training.max_tokens_per_micro_batch=512",
        "sequences_per_step=4",
        *SMALL,
    ]
    # Ray's dashboard has a dozen processes. The tests with Slurm run it.
    cluster = tmp_path / "local.yaml"
    cluster.write_text("kind: local\nmin_free_disk: 2\ndashboard: false\n")

    def run(*arguments: str, python: Sequence[str] = (sys.executable,)) -> None:
        result = gptoss(*arguments, python=python, OMP_NUM_THREADS="1")
        assert result.returncode == 0, result.stderr

    def ask(*arguments: str) -> str:
        result = command.run("launch", *arguments)
        assert result.returncode == 0, result.stderr
        return result.stdout

    def explain() -> tuple[str, list[str]]:
        logs = [log.read_text(errors="replace")[-800:] for log in tmp_path.rglob("*.log")]
        return ask("status", "background"), logs

    # A forked command takes the first step, because a launch takes 10 s of processor time.
    run("sft", *start, "training.steps=1", python=forked_python())
    # The number of steps is so high that the run is canceled before its end.
    launched = [*start, "--sft", "--cluster", str(cluster), "training.steps=100000"]
    run("launch", *launched)
    metrics = directory / "metrics.jsonl"
    wait_until(lambda: len(read_training_steps(metrics)) >= 2, explain)
    if not missing_parts():
        check_doors(directory, tmp_path / "loot")
    run("launch", "cancel", "background")

    # Do not ask for the status, because that command takes processor time from the run.
    wait_until(lambda: list(directory.glob("attempts/*/outcome.json")), explain)
    (launch,) = jobs.known_launches()
    wait_until(lambda: not psutil.pid_exists(int(launch.job)), explain)
    status = ask("status", "background")
    assert "ENDED" in status
    (attempt,) = (directory / "attempts").iterdir()
    saved_steps = int(read_json(attempt / "outcome.json")["last_step"])
    assert f"interrupted at step {saved_steps}" in status
    assert saved_steps == len(read_training_steps(metrics)) >= 2
    said = ask("logs", "background", "--attempt", attempt.name, "--lines", "100000")
    assert "step 2/" in said and "step 1/" not in said
    assert "background" in ask("list")


@pytest.mark.parametrize(
    ("changes", "cluster", "message"),
    [
        ((), {"nodes": 1, "gpus_per_node": 8}, "servers (8 of 1 GPUs): no node has enough free GPUs for server 0"),
        ((), {"nodes": 1, "rollout_nodes": 1, "gpus_per_node": 4}, "needs 8 GPUs, but cluster.nodes x gpus_per_node"),
        (("rollout.engine.servers=9",), {"nodes": 1, "rollout_nodes": 1, "gpus_per_node": 8}, "for server 8"),
        ((), {"nodes": 12, "gpus_per_node": 8}, "cluster.nodes: trainer 9, trainer 10, trainer 11"),
    ],
)  # fmt: skip
def test_a_run_that_does_not_fit_names_the_keys(
    changes: tuple[str, ...],
    cluster: dict[str, int],
    message: str,
) -> None:
    config = load_config(ROOT / "configs/rl/gpt-oss-20b_2x8.yaml", RlConfig, list(changes))
    with pytest.raises(ConfigError, match=re.escape(message)):
        plan_nodes(
            config.parallel,
            config.rollout,
            ClusterConfig(kind="slurm", shared_dir=Path("/shared"), **cluster),
        )


def test_ranks_are_contiguous_and_engines_fill_free_gpus() -> None:
    changes = ["rollout.engine.servers=2", "rollout.engine.tensor_parallel=2", "parallel.expert=2"]
    config = load_config(
        ROOT / "configs/rl/gpt-oss-20b_2x8.yaml",
        RlConfig,
        [*changes, "parallel.world_size=12"],
    )
    plans = plan_nodes(
        config.parallel,
        config.rollout,
        ClusterConfig(kind="slurm", shared_dir=Path("/s"), nodes=2, gpus_per_node=8),
    )
    assert [plan.ranks for plan in plans] == [list(range(8)), [8, 9, 10, 11]]
    assert [plan.servers for plan in plans] == [[], [0, 1]]
    assert [plan.workers for plan in plans] == [[], list(range(16))]


@pytest.mark.parametrize(
    ("yaml", "message"),
    [
        ("kind: slurm\nshared_dir: runs\n", "shared_dir (runs) must be an absolute path"),
        ("kind: slurm\nshared_dir: /s\npartitions: gpu\n", "partitions: unknown key"),
        ("kind: slurm\nshared_dir: /s\nlogin: host\n", "login (host) must be user@host"),
        ("kind: slurm\nshared_dir: /s\nenv: {path: x}\n", "env.path"),
        ("kind: slurm\nshared_dir: /s\ntime_limit: 4h\n", "time_limit"),
        ("kind: local\nnodes: 2\n", "kind local is one machine"),
    ],
)
def test_a_wrong_cluster_file_names_the_key(yaml: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml)
    with pytest.raises(ConfigError) as raised:
        load_cluster(str(file))
    assert message in str(raised.value)


def test_unknown_cluster_error_lists_known_clusters(
    command: ForkedCommand,
) -> None:
    ended = command.run("launch", "configs/rl/tiny_retool.yaml", "--cluster", "mars")
    assert "Clusters in configs/cluster: local, single_node, slurm, slurm_container" in ended.stderr


FAILED, INTERRUPTED, BAD = AttemptResult.FAILED, AttemptResult.INTERRUPTED, AttemptResult.BAD_NODES


@pytest.mark.parametrize(
    ("earlier", "now", "again", "why"),
    [
        ([], (AttemptResult.FINISHED, 0, 9), False, "the run is complete"),
        ([], (FAILED, 0, 0), True, "continues from step 0"),
        (
            [(FAILED, 0, 0)],
            (FAILED, 0, 0),
            False,
            "two attempts in a row did not get beyond step 0",
        ),
        ([(FAILED, 0, 5)], (FAILED, 5, 5), True, "continues from step 5"),
        (
            [(FAILED, 0, 5), (INTERRUPTED, 5, 5)],
            (INTERRUPTED, 5, 5),
            False,
            "did not get beyond step 5",
        ),
        (
            [(FAILED, i, i + 1) for i in range(3)],
            (FAILED, 3, 4),
            False,
            "failed 4 times, cluster.retries is 3",
        ),
        (
            [(INTERRUPTED, i, i + 1) for i in range(9)],
            (INTERRUPTED, 9, 10),
            True,
            "continues from step 10",
        ),
        ([], (BAD, 0, 0), True, "the next attempt does not use them"),
        ([(BAD, 0, 0), (INTERRUPTED, 0, 4)], (BAD, 4, 4), False, "already replaced once"),
    ],
)
def test_retry_budget_ends_without_progress(
    earlier: list[tuple[AttemptResult, int, int]],
    now: tuple[AttemptResult, int, int],
    again: bool,
    why: str,
) -> None:
    def outcome(values: tuple[AttemptResult, int, int]) -> AttemptOutcome:
        return AttemptOutcome(values[0], first_step=values[1], last_step=values[2])

    decided = outcome(now)
    decide_requeue(decided, [outcome(values) for values in earlier], retries=3)
    assert (decided.requeue, why in decided.why) == (again, True)


RAY_ERROR = """step 1/3  reward 0.1
Traceback (most recent call last):
  File "rl_loop/trainer/worker.py", line 80, in ready
KeyError: 'handled'
Traceback (most recent call last):
  File "launch/__main__.py", line 5, in <module>
ray.exceptions.RayTaskError(ValueError): ray::TrainerWorker.rl_step() (pid=7, ip=10.0.0.2)
  File "rl_loop/trainer/worker.py", line 80, in rl_step
ValueError: no token to learn from
first on trainer rank 3 on n2 (pid 7)
"""


@pytest.mark.parametrize(
    ("log", "error"),
    [
        (RAY_ERROR, "ValueError: no token to learn from (first on trainer rank 3 on n2 (pid 7))"),
        ("Traceback (most recent call last):\n  x\n"
         "rl_loop.trainer_group.RankDiedError: rank 1 on n2 (pid 5) died: gone\n",
         "rank 1 on n2 (pid 5) died: gone"),
        ("gptoss: checkpoint /x cannot be loaded: no\n", "checkpoint /x cannot be loaded: no"),
        ("step 1/3\n", ""),
    ],
)  # fmt: skip
def test_first_error_is_root_exception_with_rank_and_host(log: str, error: str) -> None:
    assert first_error(log) == error


def cluster_of_gpus(tmp_path: Path, **changes: object) -> ClusterConfig:
    return ClusterConfig.model_validate(
        {
            "kind": "slurm",
            "shared_dir": tmp_path,
            "gpus_per_node": 2,
            "min_free_disk": 0,
            **changes,
        }
    )


def fake_nvidia_smi(folder: Path, lines: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<'E'\n{lines}\nE\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_a_node_with_a_busy_or_missing_gpu_is_bad(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_nvidia_smi(tmp_path, "H200, 570, 1980, 0, 4\nH200, 570, 1980, 1, 4", monkeypatch)
    check = check_node(cluster_of_gpus(tmp_path), SMALL_STORE)
    assert check == NodeCheck({"GPU": "H200", "driver": "570", "SM clock": "1980"})
    fake_nvidia_smi(tmp_path, "H200, 570, 1980, 0, 40960", monkeypatch)
    problems = check_node(cluster_of_gpus(tmp_path, min_free_disk=1e9), SMALL_STORE).problems
    assert "1 GPUs visible, but cluster.gpus_per_node is 2" in problems
    assert "GPU 0: another job uses 40960 MiB" in problems
    assert any("cluster.min_free_disk is 1e+09" in problem for problem in problems)


def test_node_check_accepts_gpu_without_memory_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPUs that share the machine's main memory report [N/A]."""
    fake_nvidia_smi(tmp_path, "GB10, 570, 1980, 0, [N/A]", monkeypatch)
    assert check_node(cluster_of_gpus(tmp_path, gpus_per_node=1), SMALL_STORE).problems == []


def test_node_is_bad_when_ray_store_does_not_fit(tmp_path: Path) -> None:
    too_much = replace(SMALL_STORE, routes=1 << 60)
    problems = check_node(cluster_of_gpus(tmp_path, gpus_per_node=0), too_much).problems
    assert len(problems) == 1
    assert "a step needs" in problems[0]
    assert "Lower rollout.max_episode_tokens" in problems[0]


def test_node_starts_ray_with_store_for_a_step(tmp_path: Path) -> None:
    head = HeadAddress("10.0.0.1", "", port=1, dashboard_port=2, check_port=3)
    node = RayNode(
        cluster=cluster_of_gpus(tmp_path), name="n0", is_head=True, resources={}, scratch=tmp_path,
        object_store_bytes=12345,
    )  # fmt: skip
    assert "--object-store-memory=12345" in ray_start_command(node, head)


def test_a_node_with_another_driver_or_clock_is_named() -> None:
    reports = {f"n{i}": {"facts": {"driver": "570", "SM clock": "1980"}} for i in range(4)}
    reports["n2"] = {"facts": {"driver": "550", "SM clock": "1980"}}
    assert find_outlier_nodes(reports) == {"n2": "driver is 550, on other nodes 570"}


def test_node_that_is_slow_with_both_neighbors_is_named() -> None:
    measured = {"n1": {"within": 400.0, "between": 45.0}, "n2": {"within": 400.0, "between": 3.0}}
    assert find_slow_nodes(measured, 20) == {
        "n2": "all-reduce between nodes at 3.00 GB/s, but cluster.min_bandwidth is 20",
    }
    assert find_slow_nodes({"n1": {"within": None, "between": None}}, 20) == {}


def test_snapshot_contains_uncommitted_files_and_diff(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "project"
    project.mkdir()

    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(
            ["git", "-C", str(project), *identity, *arguments],
            check=True,
            capture_output=True,
        )

    git("init")
    (project / "kept.py").write_text("old\n")
    (project / "removed.py").write_text("x\n")
    (project / ".gitignore").write_text("runs/\n")
    git("add", "-A")
    git("commit", "-m", "first")
    (project / "kept.py").write_text("new\n")
    (project / "removed.py").unlink()
    (project / "untracked.py").write_text("y\n")
    (project / "runs").mkdir()
    (project / "runs/large").write_text("z\n")
    monkeypatch.setattr(snapshot, "PROJECT", project)
    with tarfile.open(
        snapshot.write_snapshot(tmp_path / "code.tar.gz", {"run.yaml": "name: x\n"}),
    ) as archive:
        archive.extractall(tmp_path / "code", filter="data")
    code = tmp_path / "code"
    assert (code / "kept.py").read_text() == "new\n"
    assert sorted(path.name for path in code.iterdir()) == [
        ".gitignore",
        ".gptoss",
        "kept.py",
        "untracked.py",
    ]
    assert "+new" in (code / ".gptoss/git.txt").read_text()
    assert (code / ".gptoss/run.yaml").read_text() == "name: x\n"


def test_snapshot_of_installation_has_layout_of_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site-packages"
    for name in ("gptoss_kernels", "rl_loop/__pycache__", "another_package"):
        (site / name).mkdir(parents=True)
        (site / name / "__init__.py").write_text("")
    (site / "rl_loop/loop.py").write_text("x = 1\n")
    monkeypatch.setattr(snapshot, "PROJECT", site)

    written = snapshot.write_snapshot(tmp_path / "code.tar.gz", {"run.yaml": "name: x\n"})
    with tarfile.open(written) as archive:
        names = archive.getnames()
        archive.extractall(tmp_path / "code", filter="data")
    outside_configs = sorted(name for name in names if not name.startswith("configs/"))
    assert outside_configs == [
        ".gptoss/git.txt",
        ".gptoss/run.yaml",
        "kernels/gptoss_kernels/__init__.py",
        "rl_loop/loop.py",
    ]
    assert "configs/rl/tiny_retool.yaml" in names
    assert "installed: megatron-gptoss" in (tmp_path / "code/.gptoss/git.txt").read_text()


def test_slurm_formats_are_parsed() -> None:
    gpus = SlurmPartition("p", True, "1:00", 1, "gpu:h100:4(S:0-1),gpu:a100:2", 8, 1000, "").gpus
    assert gpus == {"h100": 4, "a100": 2}
    assert SlurmPartition("p", True, "1:00", 1, "gpu:8", 8, 1000, "").gpus == {"": 8}
    assert [parse_seconds(text) for text in ("1-02:00:00", "30:00", "infinite")] == [
        93_600,
        1800,
        float("inf"),
    ]
    assert re.fullmatch(r"[\d.]+", node_address())


def test_conversation_files_are_also_checked_on_the_cluster() -> None:
    sources = "{a: {path: chats.jsonl, validation_path: /held.jsonl}, b: {path: 'hub:name:train'}}"
    config = load_config(
        ROOT / "configs/sft/tiny_retool.yaml", SftConfig, [f"data={{sources: {sources}}}"]
    )
    cluster = ClusterConfig(kind="slurm", shared_dir=Path("/shared"))
    settings = job_settings(resolve_paths(config, cluster))
    assert dict(settings.paths) == {
        "data.sources.a.path": Path("/shared/chats.jsonl"),
        "data.sources.a.validation_path": Path("/held.jsonl"),
    }


# ---- one node


@pytest.mark.parametrize(
    ("config", "places"),
    [
        (
            "gpt-oss-20b_1x8_80gb",
            "ranks 0 to 7 on GPUs 0 to 7; SGLang server 0 on GPU 0, 1 on GPU 1, 2 on GPU 2, "
            "3 on GPU 3, 4 on GPU 4, 5 on GPU 5, 6 on GPU 6, 7 on GPU 7; ",
        ),
        (
            "gpt-oss-20b_1x8",
            "ranks 0 to 3 on GPUs 0 to 3; SGLang server 0 on GPU 4, 1 on GPU 5, 2 on GPU 6, 3 on GPU 7",
        ),
        ("gpt-oss-20b-adapter_1x1_80gb", "rank 0 on GPU 0; SGLang server 0 on GPU 0; "),
    ],
)
def test_dry_run_on_one_node_has_plan_and_gpus(
    config: str, places: str, command: ForkedCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = command.run("launch", config, "--dry-run", PATH="/usr/bin:/bin")
    assert done.returncode == 0, done.stderr
    assert places in done.stdout
    assert "# memory plan\nfits" in done.stdout
    assert "This machine has no GPU. The run needs " in done.stdout


def test_local_launch_offers_the_machine_s_gpus_to_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without GPUs in Ray, ranks of the 20B model would train on CPUs."""
    fake_nvidia_smi(tmp_path, "GPU-8aa1\nGPU-8ab2", monkeypatch)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    cluster = load_cluster("local")
    assert cluster.gpus_per_node == 2
    head = HeadAddress("10.0.0.1", "", port=1, dashboard_port=2, check_port=3)
    node = RayNode(
        cluster=cluster, name="n0", is_head=True, resources={}, scratch=tmp_path,
        object_store_bytes=1,
    )  # fmt: skip
    assert "--num-gpus=2" in ray_start_command(node, head)

    for visible, count in (("", 0), ("1", 1), ("0,1", 2), ("0,-1,1", 1)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert load_cluster("local").gpus_per_node == count
    own = tmp_path / "cluster.yaml"
    own.write_text("kind: local\ngpus_per_node: 0\n")
    assert load_cluster(str(own)).gpus_per_node == 0


# ---- interpreter of the engine

MATH = "untested/rl/gpt-oss-20b_1x8_80gb_math.yaml"  # names /opt/sglang/bin/python
PLAIN = "rl/gpt-oss-20b_2x8.yaml"


@pytest.mark.parametrize(
    ("config", "cluster_python", "overrides", "expected"),
    [
        (PLAIN, "/s/python", [], "/s/python"),
        (MATH, "/s/python", [], "/s/python"),
        (MATH, None, [], "/opt/sglang/bin/python"),
        (MATH, "/s/python", ["rollout.engine.python=/mine/python"], "/mine/python"),
    ],
)
def test_cluster_names_the_engine_interpreter(
    config: str, cluster_python: str | None, overrides: list[str], expected: str
) -> None:
    cluster = ClusterConfig(
        kind="slurm", shared_dir=Path("/s"), python="/t/python", engine_python=cluster_python
    )
    loaded = load_config(ROOT / "configs" / config, RlConfig, overrides)
    placed = resolve_paths(with_engine_python(loaded, cluster, overrides), cluster)
    assert job_settings(placed).engine_python == expected


def test_slurm_without_engine_interpreter_is_an_error() -> None:
    cluster = ClusterConfig(kind="slurm", shared_dir=Path("/s"), python="/t/python")
    config = load_config(ROOT / "configs" / PLAIN, RlConfig)
    with pytest.raises(ConfigError, match=r"cluster\.engine_python: null.*--install-engine DIR"):
        with_engine_python(config, cluster)
    embedded = load_config(ROOT / "configs/rl/tiny_retool.yaml", RlConfig)
    assert with_engine_python(embedded, cluster) == embedded


def test_node_without_sglang_is_bad(tmp_path: Path) -> None:
    """The tests' interpreter has no SGLang."""
    cluster = cluster_of_gpus(tmp_path, gpus_per_node=0)
    engine = load_config(ROOT / "configs" / PLAIN, RlConfig).rollout.engine
    (problem,) = check_node(cluster, SMALL_STORE, engine).problems
    assert re.search(r"rollout\.engine\.python: .* has no SGLang\. `gptoss doctor", problem)
    assert check_node(cluster, SMALL_STORE).problems == []


def test_shipped_clusters_name_two_interpreters() -> None:
    for name in ("slurm", "single_node", "slurm_container"):
        cluster = load_cluster(name)
        assert cluster.engine_python not in (None, cluster.python)
