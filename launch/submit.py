"""From a configuration and a cluster to a running job: what ``gptoss launch`` does."""

import os
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from launch.cluster import ClusterConfig
from launch.gpus import configured_hardware
from launch.job_settings import JobSettings
from launch.jobs import ACTIVE, Launch, known_launches, query, registry
from launch.placement import describe_placement, place
from launch.preflight import check_before_queue
from launch.snapshot import node_arguments, write_snapshot
from megatron_gptoss.planning.memory_advice import Hardware, memory_plan
from rl_loop.config.errors import ConfigError
from rl_loop.config.load import dump_config
from rl_loop.config.run import RlConfig, RunConfig
from rl_loop.data.hub import is_of_hub
from rl_loop.lifecycle.resume import changes_since
from rl_loop.lifecycle.start_checks import check_what_a_run_needs, store_need
from rl_loop.tracking.run_directory import RunDirectory


def resolve_paths[Config: RunConfig](config: Config, cluster: ClusterConfig) -> Config:
    """Return ``config`` with its relative paths below the cluster's shared directory."""
    values = _resolve(config.model_dump(), "", cluster)
    return type(config).model_validate(values)


def _resolve(value: Any, key: str, cluster: ClusterConfig) -> Any:
    """Resolve the paths of a tree of dictionaries whose own key is ``key``."""
    if isinstance(value, dict):
        return {name: _resolve(item, name, cluster) for name, item in value.items()}
    if value == sys.executable:  # a default: the interpreter of this machine
        return cluster.python
    if _is_path(value, key):
        return str(cluster.shared_dir.absolute() / value)
    return value


def _is_path(value: Any, key: str) -> bool:
    """Whether a value of a configuration is a local path; data may be on the Hub ("hub:...")."""
    if isinstance(value, Path):
        return True
    name = key.rpartition(".")[2]
    is_named_so = name == "path" or name.endswith("_path")
    return is_named_so and isinstance(value, str) and not is_of_hub(value)


def job_settings(config: RunConfig) -> JobSettings:
    """Collect what the parts of a launch, and the programs on its nodes, need."""
    # The run makes output_dir itself; every other path must exist on the cluster.
    paths = _paths_below(config.model_dump(exclude={"output_dir"}), key="")
    return JobSettings(
        name=config.name,
        command=config.command,
        directory=config.directory,
        parallel=config.parallel,
        rollout=config.rollout if isinstance(config, RlConfig) else None,
        store=store_need(config),
        paths=tuple(paths),
        configuration=dump_config(config),
    )


def _paths_below(value: Any, key: str) -> list[tuple[str, Path]]:
    """Return (key, path) of every path in a tree of dictionaries whose own key is ``key``."""
    if not isinstance(value, dict):
        return [(key, Path(value))] if _is_path(value, key) else []

    paths = []
    for name, item in value.items():
        paths += _paths_below(item, key=f"{key}.{name}" if key else name)
    return paths


def describe_launch(config: RunConfig, cluster: ClusterConfig) -> str:
    """Return what a launch would do, as text; nothing is written or asked of the cluster."""
    settings = job_settings(config)
    plans = place(settings.parallel, settings.rollout, cluster)
    sections = {"placement": describe_placement(plans, config.rollout, config.sandbox)}

    if cluster.gpus_per_node:
        if cluster.gpu_memory is None:
            hardware = configured_hardware(config.parallel.gpu_memory)
        else:
            hardware = Hardware(cluster.gpu_memory)
        hardware = replace(hardware, gpus_per_node=cluster.gpus_per_node)
        sections["memory plan"] = memory_plan(config.memory_inputs, hardware)

    if cluster.kind == "slurm":
        from launch.slurm_job import SlurmJob  # imports nemo-run

        sections["sbatch script"] = SlurmJob(settings, cluster, stamp="SUBMITTED").script()

    sections["configuration"] = settings.configuration
    return "\n".join(f"# {title}\n{text.rstrip()}\n" for title, text in sections.items())


def start(config: RunConfig, cluster: ClusterConfig) -> Launch:
    """Check everything that can be checked now, then start the run in the background.

    Raises ConfigError."""
    _check_name_is_free(config.name)

    # The cheapest checks come first; ``place`` raises ConfigError if the run does not fit.
    settings = job_settings(config)
    place(settings.parallel, settings.rollout, cluster)
    check_before_queue(settings, cluster)
    if cluster.login is None:
        # Raises ConfigError if the configuration has changed in a way with which the run cannot go
        # on.
        changes_since(RunDirectory(config.directory), config)
    if cluster.kind == "local":
        check_what_a_run_needs(config, has_own_ray=True)

    now = time.localtime()
    stamp = time.strftime("%Y%m%d-%H%M%S", now)
    if cluster.kind == "slurm":
        job = _submit_to_slurm(settings, cluster, stamp)
    else:
        job = str(_start_here(settings, cluster, stamp))

    launch = Launch(
        name=config.name,
        kind=cluster.kind,
        login=cluster.login,
        run_dir=str(config.directory),
        command=config.command,
        steps=config.training.steps,
        job=job,
        submitted=time.strftime("%Y-%m-%d %H:%M", now),
    )
    launch.save()
    return launch


def _check_name_is_free(name: str) -> None:
    """Raise ConfigError if a run of this name is queued or running."""
    for launch in known_launches():
        if launch.name != name:
            continue
        status = query(launch)
        if status.state in ACTIVE:
            advice = f"`gptoss launch cancel {name}` ends it, name=... starts another"
            raise ConfigError(f"{name} is {status.state} ({status.detail}); {advice}")


def _submit_to_slurm(settings: JobSettings, cluster: ClusterConfig, stamp: str) -> str:
    """Submit the run and return the number of its job."""
    from launch.slurm_job import SlurmJob  # imports nemo-run, which takes seconds

    # nemo-run keeps a copy of what it submits: here if the run directory is on another machine.
    base = registry() / settings.name if cluster.login else settings.directory / "launch"
    return SlurmJob(settings, cluster, stamp).submit(base)


def _start_here(settings: JobSettings, cluster: ClusterConfig, stamp: str) -> int:
    """Start the program of a cluster's node on this machine, detached, and return its process id.

    It runs from the same kind of snapshot as on a cluster."""
    folder = settings.directory / "launch" / stamp
    code = folder / "code"
    code.mkdir(parents=True)
    files = {"run.yaml": settings.configuration, "cluster.yaml": dump_config(cluster)}

    # Not from the checkout itself, whose files may change while the run goes on.
    with tarfile.open(write_snapshot(folder / "code.tar.gz", files)) as archive:
        archive.extractall(code, filter="data")

    environment = {
        **os.environ,
        **cluster.env,
        "PYTHONPATH": f"{code}:{code}/kernels",
        "GPTOSS_ATTEMPT": f"local-{stamp}",
    }
    command = [cluster.python, "-m", "launch.node", *node_arguments(settings.command, group=0)]
    with open(folder / "node.log", "ab") as output:
        process = subprocess.Popen(
            command,
            cwd=code,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # a closed terminal is none of its business
        )
    return process.pid
