"""``gptoss launch`` against a real Slurm of four fake nodes on this machine.

Needs root: ``make test-slurm``.
"""

from __future__ import annotations

import json
import re
import sys
import time
from contextlib import suppress
from pathlib import Path
from secrets import token_hex

import psutil
import pytest

from launch.cluster import load_cluster
from launch.preflight import check_before_queue
from launch.submit import job_settings, resolve_paths
from rl_loop.config.errors import ConfigError
from rl_loop.config.load import load_config
from rl_loop.config.run import RlConfig
from rl_loop.tracking.run_directory import RunDirectory, read_json, read_json_lines
from tests.support.open_doors import doors, findings
from tests.support.slurm.lab import ROOT, SMALL, Lab, find_processes, ray_actors, steps_done

pytestmark = pytest.mark.slurm
STEPS = "training.steps=6"


def curve(run: RunDirectory) -> list[tuple[float, ...]]:
    records = [record for record in read_json_lines(run.metrics) if "reward" in record]
    assert any(record["grad_norm"] > 0 for record in records), "no step had anything to learn from"
    return [
        tuple(record[name] for name in ("step", "reward", "loss", "grad_norm"))
        for record in records
    ]


@pytest.fixture(scope="module")
def uninterrupted(lab: Lab) -> RunDirectory:
    """A run over 4 nodes: a trainer rank on each of the first 2, and 2 nodes with an engine."""
    began = time.monotonic()
    run = lab.launch("uninterrupted", STEPS, nodes=4)
    lab.until(lambda: steps_done(run) > 0, "the first training step", run=run)
    print(f"\nfirst training step {time.monotonic() - began:.0f} s after `gptoss launch`")
    lab.until(lambda: lab.outcomes(run), "the end of the run", run=run)
    assert lab.outcomes(run)[0]["result"] == "finished"
    return run


def test_four_node_run_places_every_part_as_planned(
    lab: Lab,
    uninterrupted: RunDirectory,
) -> None:
    attempt = next((uninterrupted.path / "attempts").iterdir())
    assert sorted(path.stem for path in (attempt / "nodes").iterdir()) == ["n1", "n2", "n3", "n4"]
    assert len(curve(uninterrupted)) == 6
    assert (uninterrupted.export / "model.safetensors").exists()
    text = lab.gptoss("launch", "start", "configs/rl/tiny_retool.yaml", *SMALL, "--cluster",
                      str(lab.cluster_file(nodes=4)), "--dry-run").stdout  # fmt: skip
    assert "trainer 3   rollout workers 1" in text


def test_status_and_logs_return_at_once(lab: Lab, uninterrupted: RunDirectory) -> None:
    for arguments, expected in [
        (("status",), "step 6 of 6"),
        (("logs",), "step 6/6"),
        (("logs", "--node", "n3"), ""),
    ]:
        began = time.monotonic()
        done = lab.gptoss("launch", arguments[0], "uninterrupted", *arguments[1:])
        seconds = time.monotonic() - began
        assert done.returncode == 0, done.stderr
        assert expected in done.stdout
        assert seconds < 3
    assert "uninterrupted" in lab.gptoss("launch", "list").stdout


@pytest.mark.slow
def test_preemption_and_time_limit_do_not_change_the_curve(
    lab: Lab, uninterrupted: RunDirectory
) -> None:
    run = lab.launch("interrupted", STEPS, "training.checkpoint_every=100", nodes=2)
    lab.until(lambda: steps_done(run) >= 2, "two steps of the first attempt", run=run)
    with lab.frozen(run):
        preemptor = lab.cluster.run(
            "sbatch",
            "--parsable",
            "-p",
            "high",
            "-A",
            "team",
            "-N4",
            "--exclusive",
            "--wrap=true",
            "-o",
            "/dev/null",
        )
    lab.until(lambda: len(lab.outcomes(run)) == 1, "the first attempt to save and leave", run=run)
    lab.until(lambda: preemptor not in lab.queue(), "the job of higher priority to run")
    first = lab.outcomes(run)[0]
    assert first["result"] == "interrupted"
    assert 2 <= first["last_step"] < 6

    lab.cluster.skip_requeue_delay()
    lab.until(lambda: steps_done(run) > first["last_step"], "the second attempt to go on", run=run)
    job = lab.cluster.run("squeue", "-h", "-n", "gptoss.interrupted", "-o", "%i")
    with lab.frozen(run):
        minutes = int(lab.cluster.run("squeue", "-h", "-j", job, "-o", "%M").split(":")[-2]) + 2
        lab.cluster.run(
            "scontrol",
            "update",
            f"JobId={job}",
            f"TimeLimit={minutes}",
        )  # the notice comes 100 s before the limit
    lab.until(lambda: len(lab.outcomes(run)) == 2, "the second attempt to save and leave", run=run)
    second = lab.outcomes(run)[1]
    assert second["result"] == "interrupted"
    assert second["first_step"] == first["last_step"] < second["last_step"] < 6

    lab.until(lambda: "PENDING" in lab.state("interrupted"), "the requeue")
    lab.cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=30")
    lab.cluster.skip_requeue_delay()
    lab.until(lambda: len(lab.outcomes(run)) == 3, "the last attempt to finish", run=run)
    assert lab.outcomes(run)[-1]["result"] == "finished"
    assert curve(run) == [pytest.approx(step, rel=1e-5, abs=1e-7) for step in curve(uninterrupted)]


@pytest.mark.parametrize("dashboard", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_launched_job_has_no_open_door(lab: Lab, dashboard: bool, tmp_path: Path) -> None:
    """Two nodes train while another user and another machine try all of their sockets."""
    name = f"doors-{dashboard}".lower()
    # A random value, because the snapshot contains this test file.
    secret = token_hex(16)
    run = lab.launch(
        name,
        "training.steps=5000",
        nodes=2,
        dashboard=dashboard,
        env={"OMP_NUM_THREADS": "1", "A_SECRET": secret},
    )
    lab.until(lambda: steps_done(run) >= 1, "the first step", run=run)
    processes = find_processes(run)
    found = doors(processes)
    (attempt,) = (run.path / "attempts").iterdir()
    token_file = attempt / "ray_token"
    token = token_file.read_text()

    open_doors = findings(found, tmp_path / "loot")
    if dashboard:
        # Only the metrics port listens on 0.0.0.0. It returns metrics for every path. The dashboard
        # shows Ray's version and a page that requests the token.
        metrics = re.compile(r"(python|ray::DashboardAgent) tcp '0\.0\.0\.0' \d+: GET ")
        public = ("GET / is answered", "GET /api/version is answered")
        open_doors = [
            success
            for success in open_doors
            if not metrics.search(success) and not success.endswith(public)
        ]
    assert open_doors == []

    assert token_file.stat().st_mode & 0o777 == 0o600
    assert run.path.stat().st_mode & 0o777 == 0o700
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            assert token not in " ".join(process.cmdline())
            assert token not in str(process.environ())
    for file in run.path.rglob("*"):
        if file.is_file() and file != token_file:
            content = file.read_bytes()
            assert token.encode() not in content, file
            # The snapshot distributes the variables to the nodes. nemo-run's job record also
            # contains them. No script and no log contains them.
            may_have_secrets = file.name == "cluster.yaml" or file.name.endswith("_executor.yaml")
            assert secret.encode() not in content or may_have_secrets, file

    lab.gptoss("launch", "cancel", name)
    lab.until(lambda: lab.state(name) == "", "the end of the job")


def test_killed_rank_is_first_error_of_heterogeneous_job(lab: Lab) -> None:
    """Trainer ranks run on 2 nodes. Rollout workers run on a third, in another job component."""
    run = lab.launch(
        "killed",
        "training.steps=500",
        nodes=2,
        rollout_nodes=1,
        retries=0,
        dashboard=True,
    )
    lab.until(lambda: steps_done(run) >= 1, "the first step", run=run)
    assert "Ray dashboard http://127.0.0.11:" in lab.gptoss("launch", "status", "killed").stdout
    attempt = next((run.path / "attempts").iterdir())
    assert len(list(attempt.glob("nodes/*.json"))) == 3
    scraped = attempt / "prometheus.json"
    lab.until(
        lambda: scraped.exists() and len(json.loads(scraped.read_text() or "[{}]")[0].get("targets", [])) >= 3,
        "every node in the list for Prometheus", seconds=30, run=run,
    )  # fmt: skip
    lab.until(
        lambda: len(ray_actors("RolloutWorker", run, "n3")) == 2,
        "both rollout workers on n3", seconds=30, run=run,
    )  # fmt: skip

    (rank,) = ray_actors("TrainerProcess", run, "n2")
    rank.kill()
    began = time.monotonic()
    lab.until(lambda: lab.outcomes(run) and not lab.state("killed"), "the job to end", seconds=60)
    print(f"\nended {time.monotonic() - began:.0f} s after kill -9")
    outcome = lab.outcomes(run)[0]
    assert outcome["result"] == "failed"
    assert re.search(
        rf"^trainer rank 1 on n2 \(pid {rank.pid}\) died: .*exit",
        str(outcome["error"]),
    )
    status = lab.gptoss("launch", "status", "killed").stdout
    assert "FAILED" in status
    assert "trainer rank 1 on n2" in status


@pytest.mark.slow
def test_run_names_dead_node_and_continues_without_it(
    lab: Lab, uninterrupted: RunDirectory
) -> None:
    """The test kills all processes of a node, including Slurm's daemon.

    Slurm notices the dead daemon after 2 minutes (SlurmdTimeout; 5 by default).
    """
    run = lab.launch("lost", STEPS, "training.checkpoint_every=1", nodes=2)
    lab.until(lambda: steps_done(run) >= 2, "two steps of the first attempt", run=run, seconds=400)
    assert ray_actors("TrainerProcess", run, "n2")
    killed = lab.cluster.kill_node("n2")
    began = time.monotonic()
    try:
        lab.until(lambda: lab.outcomes(run), "the verdict of the head node", seconds=110)
        seconds = time.monotonic() - began
        first = lab.outcomes(run)[0]
        print(f"\n{killed} processes killed; named after {seconds:.0f} s: {first['error']}")
        assert first["result"] == "failed"
        assert re.search(r"\bn2\b", str(first["error"]))
        assert first["last_step"] >= 1

        # Slurm may restart the job on other nodes immediately.
        lab.until(
            lambda: "PENDING" in lab.state("lost") or len(list(run.path.glob("attempts/*"))) == 2,
            "the requeue",
            seconds=400,
        )
        print(f"requeued after {time.monotonic() - began:.0f} s")
        lab.cluster.skip_requeue_delay()
        lab.until(lambda: len(lab.outcomes(run)) == 2, "the second attempt to finish", seconds=400)
    finally:
        lab.cluster.start_node("n2")

    second = lab.outcomes(run)[1]
    assert second["result"] == "finished"
    assert second["first_step"] == first["last_step"]
    nodes = sorted(run.path.glob("attempts/*/nodes"))[1]
    assert "n2" not in [path.stem for path in nodes.iterdir()]
    assert curve(run) == [pytest.approx(step, rel=1e-5, abs=1e-7) for step in curve(uninterrupted)]


def test_missing_node_is_named_and_excluded_from_next_attempt(
    lab: Lab,
    tmp_path: Path,
) -> None:
    hanging = lab.shared / "python-that-hangs-on-n2"
    hanging.write_text(
        f'#!/bin/bash\n[ "$SLURMD_NODENAME" = n2 ] && exec sleep 1000\nexec {sys.executable} "$@"\n'
    )
    hanging.chmod(0o755)

    began = time.monotonic()
    run = lab.launch("missing", STEPS, nodes=2, python=str(hanging), ready_seconds=10)
    lab.until(lambda: lab.outcomes(run), "the verdict about the nodes", seconds=90)
    assert time.monotonic() - began < 60

    outcome = lab.outcomes(run)[0]
    assert outcome["result"] == "bad nodes"
    assert "n2: did not come up within 10 s" in str(outcome["error"])
    assert outcome["exclude"] == ["n2"]

    lab.until(lambda: "PENDING" in lab.state("missing"), "the requeue")
    lab.until(
        lambda: "ExcNodeList=n2" in lab.cluster.run("scontrol", "show", "job"),
        "the exclusion",
        seconds=10,
    )


def test_containers_on_two_nodes_measure_bandwidth_first(lab: Lab) -> None:
    scratch = lab.folder / "scratch"
    scratch.mkdir()
    (scratch / "present").touch()
    container = {"image": "registry/gptoss:latest", "mounts": [f"{scratch}:/gptoss-scratch"]}
    run = lab.launch("slow", STEPS, nodes=2, container=container, min_bandwidth=10_000)
    lab.until(lambda: lab.outcomes(run), "the verdict about the nodes")
    outcome = lab.outcomes(run)[0]
    assert outcome["result"] == "bad nodes"
    assert "n1: all-reduce between nodes at" in str(outcome["error"])
    measured = read_json(next((run.path / "attempts").iterdir()) / "bandwidth.json")
    assert measured.keys() == {"n1", "n2"}
    assert (
        measured["n1"]["between"] == measured["n2"]["between"]
        or min(m["between"] for m in measured.values()) > 0
    )


def test_cancel_ends_the_run_and_its_chained_jobs(lab: Lab) -> None:
    lab.launch("cancelled", STEPS, nodes=2, chain=3)
    assert len(lab.state("cancelled").splitlines()) == 3
    lab.until(lambda: "RUNNING" in lab.state("cancelled"), "the first job to start", seconds=20)
    assert lab.state("cancelled").count("RUNNING") == 1
    assert "cancelled: RUNNING (job" in lab.gptoss("launch", "status", "cancelled").stdout
    again = lab.gptoss("launch", "configs/rl/tiny_retool.yaml", "name=cancelled", *SMALL, "--cluster",
                       str(lab.cluster_file()))  # fmt: skip
    assert "gptoss launch cancel cancelled" in again.stderr
    assert lab.gptoss("launch", "cancel", "cancelled").returncode == 0
    lab.until(lambda: not lab.state("cancelled"), "the queue to be empty", seconds=30)


WRONG = [
    ({"partition": "gpu"}, "cluster.partition: 'gpu' does not exist. The cluster offers"),
    ({"account": "nobody"}, "cluster.account: 'nobody' is not one of your accounts: root, team"),
    ({"qos": "urgent"}, "cluster.qos: 'urgent' is not one of your qualities: normal"),
    (
        {"time_limit": "2-00:00:00"},
        "cluster.time_limit: 2-00:00:00 is not available. The cluster offers batch (4 nodes, 8 GPUs",
    ),
    ({"nodes": 5}, "cluster.nodes: 5 requested, available: batch (4 nodes"),
    (
        {"gpus_per_node": 9},
        "cluster.gpus_per_node: 9 is not available. The cluster offers batch (4 nodes, 8 GPUs h200",
    ),
    (
        {"gpus_per_node": 8, "gpu_type": "b200"},
        "cluster.gpu_type: b200 is not available",
    ),
    ({"cpus_per_node": 64}, "cluster.cpus_per_node: 64 is not available"),
    ({"memory_per_node": "8G"}, "cluster.memory_per_node: 8G is not available"),
    ({"constraint": "nvlink"}, "cluster.constraint: nvlink is not available"),
    ({"exclude": "n99"}, "cluster.exclude: "),
    ({"shared_dir": "/etc/hostname/below"}, "cluster.shared_dir: "),
    ({"python": "/nowhere/python"}, "cluster.python: /nowhere/python does not exist"),
    ({"min_free_disk": 1e9}, "GB free there, but min_free_disk is"),
    (
        {"container": {"image": "/nowhere/image.sqsh"}},
        "cluster.container.image: /nowhere/image.sqsh does not exist",
    ),
    (
        {"container": {"image": "x", "mounts": ["/nowhere:/data"]}},
        "cluster.container.mounts: /nowhere does not exist",
    ),
    ({"login": "nobody@localhost:1"}, "cluster.login: "),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=lambda value: str(value)[:40])
def test_preflight_names_the_field_and_available_values(lab: Lab, change: dict[str, object], message: str,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setenv("SLURM_CONF", lab.cluster.env["SLURM_CONF"])
    cluster = load_cluster(str(lab.cluster_file(**change)))
    config = resolve_paths(
        load_config(ROOT / "configs/rl/tiny_retool.yaml", RlConfig, SMALL),
        cluster,
    )
    with pytest.raises(ConfigError) as raised:
        check_before_queue(job_settings(config), cluster)
    assert message in str(raised.value)


def test_preflight_finds_weights_that_are_not_on_the_cluster(
    lab: Lab,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLURM_CONF", lab.cluster.env["SLURM_CONF"])
    cluster = load_cluster(str(lab.cluster_file()))
    config = resolve_paths(
        load_config(ROOT / "configs/rl/tiny_retool.yaml", RlConfig, []),
        cluster,
    )
    with pytest.raises(
        ConfigError,
        match=f"initial_weights: {lab.shared}/runs/tiny_retool_sft does not exist",
    ):
        check_before_queue(job_settings(config), cluster)
