"""From a configuration and a cluster to a running job: what ``gptoss launch`` does."""

import os
import subprocess
import sys
import tarfile
import time
from typing import Any

from launch.cluster import ClusterConfig
from launch.jobs import ACTIVE, Launch, known_launches, query, registry
from launch.placement import describe, place
from launch.preflight import check_before_queue, is_path
from launch.snapshot import JOB_FOLDER, write_snapshot
from rl_loop.config.errors import ConfigError
from rl_loop.config.load import dump_config
from rl_loop.config.run import RlConfig, RunConfig
from rl_loop.lifecycle.resume import changes_since
from rl_loop.lifecycle.start_checks import check_what_a_run_needs
from rl_loop.tracking.run_directory import RunDirectory


def on_cluster[Config: RunConfig](config: Config, cluster: ClusterConfig) -> Config:
    """``config`` with its relative paths below the cluster's shared directory."""

    def absolute(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: absolute(item, name) for name, item in value.items()}
        if value == sys.executable:  # a default: the interpreter of this machine
            return cluster.python
        return str(cluster.shared_dir.absolute() / value) if is_path(value, key) else value

    return type(config).model_validate(absolute(config.model_dump()))


def dry_run(config: RunConfig, cluster: ClusterConfig) -> str:
    """Everything that a launch would do, as text; nothing is written or asked of the cluster."""
    plans = place(config, cluster, isinstance(config, RlConfig))
    parts = [("placement", describe(plans, config))]
    if cluster.gpus_per_node:
        from megatron_gptoss.planning.memory_advice import memory_plan  # imports torch

        parts.append(("memory plan", memory_plan(config.memory_inputs, cluster.gpu_memory)))
    if cluster.kind == "slurm":
        from launch.slurm_job import SlurmJob

        parts.append(("sbatch script", SlurmJob(config, cluster, "SUBMITTED").script()))
    parts.append(("configuration", dump_config(config)))
    return "\n".join(f"# {title}\n{text.rstrip()}\n" for title, text in parts)


def start(config: RunConfig, cluster: ClusterConfig) -> Launch:
    """Check everything that can be checked now, then start the run in the background. Raises ConfigError."""
    for known in known_launches():
        if known.name == config.name and (status := query(known)).state in ACTIVE:
            advice = f"`gptoss launch cancel {config.name}` ends it, name=... starts another"
            raise ConfigError(f"{config.name} is {status.state} ({status.detail}); {advice}")
    place(config, cluster, isinstance(config, RlConfig))
    check_before_queue(config, cluster)
    if cluster.login is None:
        changes_since(RunDirectory(config.directory), config)  # raises ConfigError if the run cannot go on with them
    if cluster.kind == "local":
        check_what_a_run_needs(config, has_own_ray=True)
    now = time.localtime()
    stamp = time.strftime("%Y%m%d-%H%M%S", now)
    if cluster.kind == "slurm":
        from launch.slurm_job import SlurmJob

        base = registry() / config.name if cluster.login else config.directory / "launch"
        job = SlurmJob(config, cluster, stamp).submit(base)
    else:
        job = str(_start_here(config, cluster, stamp))
    launch = Launch(
        config.name, cluster.kind, cluster.login, str(config.directory), config.command, config.training.steps, job,
        time.strftime("%Y-%m-%d %H:%M", now),
    )  # fmt: skip
    launch.save()
    return launch


def _start_here(config: RunConfig, cluster: ClusterConfig, stamp: str) -> int:
    """The same program as on a cluster's node, from the same kind of snapshot, detached; its process id."""
    folder = config.directory / "launch" / stamp
    (code := folder / "code").mkdir(parents=True)
    files = {"run.yaml": dump_config(config), "cluster.yaml": dump_config(cluster)}
    with tarfile.open(write_snapshot(folder / "code.tar.gz", files)) as archive:
        archive.extractall(code, filter="data")
    environment = os.environ | cluster.env
    environment |= {"PYTHONPATH": f"{code}:{code}/kernels", "GPTOSS_ATTEMPT": f"local-{stamp}"}
    arguments = [f"{JOB_FOLDER}/run.yaml", f"{JOB_FOLDER}/cluster.yaml", config.command, "0"]
    with open(folder / "node.log", "ab") as output:
        process = subprocess.Popen([cluster.python, "-m", "launch.node", *arguments], cwd=code, env=environment,
                                   stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                                   start_new_session=True)  # fmt: skip
    return process.pid
