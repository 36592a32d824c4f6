"""Implementation of ``gptoss launch``: from a configuration and a cluster to a running job."""

import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from launch.cluster import ClusterConfig
from launch.gpus import configured_hardware, planned_hardware
from launch.job_settings import JobSettings
from launch.jobs import ACTIVE, Launch, known_launches, query_status, registry
from launch.output import make_files_private
from launch.placement import describe_placement, gpus_needed, plan_nodes
from launch.preflight import check_before_queue
from launch.snapshot import node_arguments, write_snapshot
from megatron_gptoss.planning.memory_advice import Hardware, memory_plan
from rl_loop.config.errors import ConfigError
from rl_loop.config.every_run import RunConfig
from rl_loop.config.load import dump_config
from rl_loop.data.hub import is_hub_dataset
from rl_loop.lifecycle.resume import changes_since
from rl_loop.lifecycle.start_checks import check_run_requirements, store_need
from rl_loop.tracking.run_directory import RunDirectory, make_run_directory


def resolve_paths[Config: RunConfig](config: Config, cluster: ClusterConfig) -> Config:
    """Return ``config`` with relative paths resolved against the cluster's shared directory."""
    # Validated again, so that the result is a complete configuration.
    values = _resolve(config.model_dump(), "", cluster)
    return type(config).model_validate(values)


def _resolve(value: Any, key: str, cluster: ClusterConfig) -> Any:
    """Resolve the paths in nested dictionaries. ``key`` is the key of ``value``."""
    if isinstance(value, dict):
        return {name: _resolve(item, name, cluster) for name, item in value.items()}
    if _is_path(value, key):
        return str(cluster.shared_dir.absolute() / value)
    return value


def _is_path(value: Any, key: str) -> bool:
    """Return True if a value is a local path. Data may be on the Hub ("hub:...") instead."""
    if isinstance(value, Path):
        return True
    name = key.rpartition(".")[2]
    # Paths of data sources are strings, because a source may be on the Hub.
    is_named_so = name == "path" or name.endswith("_path")
    return is_named_so and isinstance(value, str) and not is_hub_dataset(value)


def with_engine_python[Config: RunConfig](
    config: Config, cluster: ClusterConfig, overrides: Sequence[str] = ()
) -> Config:
    """Return ``config`` with the cluster's interpreter for SGLang.

    The command line has the highest precedence, then the cluster's file, then the run's file.

    Args:
        config: configuration of the run.
        cluster: settings of the cluster.
        overrides: overrides of the command line, KEY=VALUE.

    Raises:
        ConfigError: if none of them names an interpreter for a Slurm job. The servers would then
            start with the interpreter of the submitting machine.
    """
    named = engine_python(config)
    if named is None:
        return config
    if any(override.partition("=")[0] == ENGINE_PYTHON for override in overrides):
        return config
    if cluster.engine_python is not None:
        values = config.model_dump()
        values["rollout"]["engine"]["python"] = cluster.engine_python
        return type(config).model_validate(values)
    # The default of the key is the submitting machine's interpreter.
    if cluster.kind == "slurm" and named == sys.executable:
        raise ConfigError(
            "cluster.engine_python: null, but the run's SGLang servers need a separate "
            "interpreter. Run `gptoss doctor --install-engine DIR` on the cluster and set this key "
            "to DIR/bin/python"
        )
    return config


ENGINE_PYTHON = "rollout.engine.python"


def engine_python(config: RunConfig) -> str | None:
    """Return the interpreter of the run's rollout servers; None if they have no separate one."""
    if not config.samples:
        return None
    python: str | None = getattr(config.rollout.engine, "python", None)
    return python


def job_settings(config: RunConfig) -> JobSettings:
    """Return the settings that the launch and the node programs need."""
    # The run creates output_dir. All other paths must exist on the cluster.
    paths = _paths_below(config.model_dump(exclude={"output_dir"}), key="")
    return JobSettings(
        name=config.name,
        command=config.command,
        directory=config.directory,
        parallel=config.parallel,
        rollout=config.rollout if config.samples else None,
        store=store_need(config),
        paths=tuple(paths),
        engine_python=engine_python(config),
        configuration=dump_config(config),
    )


def _paths_below(value: Any, key: str) -> list[tuple[str, Path]]:
    """Return (key, path) of every path in nested dictionaries. ``key`` is the key of ``value``."""
    if not isinstance(value, dict):
        return [(key, Path(value))] if _is_path(value, key) else []

    paths = []
    for name, item in value.items():
        paths += _paths_below(item, key=f"{key}.{name}" if key else name)
    return paths


def describe_launch(config: RunConfig, cluster: ClusterConfig) -> str:
    """Return the text of a dry run. Does not write files and does not contact the cluster.

    Args:
        config: configuration of the run.
        cluster: settings of the cluster.
    """
    settings = job_settings(config)
    notes = []
    if cluster.kind == "local" and not cluster.gpus_per_node and config.dtype == "bf16":
        # A dry run on a laptop plans for the GPUs that the run needs.
        needed = gpus_needed(settings.parallel, settings.rollout)
        cluster = cluster.model_copy(update={"gpus_per_node": needed})
        notes = [f"  This machine has no GPU. The run needs {needed}."]
    plans = plan_nodes(settings.parallel, settings.rollout, cluster)
    placement = [describe_placement(plans, config.rollout, config.sandbox), *notes]
    sections = {
        "placement": "\n".join(placement),
        "interpreters and files": _describe_requirements(settings, cluster),
    }

    if cluster.gpus_per_node:
        hardware = _hardware(cluster, config.gpu_gb)
        hardware = replace(hardware, gpus_per_node=cluster.gpus_per_node)
        sections["memory plan"] = memory_plan(config.memory_inputs, hardware)

    if cluster.env:
        # Values may be secrets.
        sections["variables"] = "\n".join(f"{name}=***" for name in cluster.env)

    if cluster.kind == "slurm":
        from launch.slurm_job import SlurmJob  # imports nemo-run

        sections["sbatch script"] = SlurmJob(settings, cluster, stamp="SUBMITTED").script()

    sections["configuration"] = settings.configuration
    return "\n".join(f"# {title}\n{text.rstrip()}\n" for title, text in sections.items())


def _hardware(cluster: ClusterConfig, configured: float | None) -> Hardware:
    """Return the GPU of a cluster's nodes. ``configured``: ``gpu_gb`` in GB."""
    # The cluster's own setting describes its nodes best.
    if cluster.gpu_gb is not None:
        return Hardware(cluster.gpu_gb)
    if cluster.kind == "local":
        return planned_hardware(configured_gigabytes=configured)
    return configured_hardware(configured)


def _describe_requirements(settings: JobSettings, cluster: ClusterConfig) -> str:
    """Return the interpreters of a run and the files that must exist before it starts."""
    lines = [("trainer", cluster.python, "cluster.python")]
    if settings.engine_python is not None:
        key = settings.engine_key(cluster)
        if settings.engine_python == cluster.python:
            key += ": the trainer's interpreter, which cannot have SGLang"
        lines.append(("engine", settings.engine_python, key))
    lines += [("file", str(path), key) for key, path in settings.paths]
    return "\n".join(f"  {what:8} {path}  ({key})" for what, path, key in lines)


def start_launch(config: RunConfig, cluster: ClusterConfig) -> Launch:
    """Run all possible checks, then start the run in the background.

    Args:
        config: configuration of the run.
        cluster: settings of the cluster.

    Returns:
        The registered launch.

    Raises:
        ConfigError: if a check fails.
    """
    # Two runs in one directory would overwrite each other's checkpoints.
    _check_name_is_free(config.name)
    make_files_private()

    # Cheap checks come first. ``plan_nodes`` raises ConfigError if the run does not fit.
    settings = job_settings(config)
    plan_nodes(settings.parallel, settings.rollout, cluster)
    check_before_queue(settings, cluster)
    if cluster.login is None:
        # Raises ConfigError if the configuration has changed so that the run cannot resume.
        changes_since(RunDirectory(config.directory), config)
    if cluster.kind == "local":
        # Only a local run uses the files and the memory of this machine.
        check_run_requirements(config, has_own_ray=True)

    # On a remote cluster, the node program creates the directory.
    if cluster.login is None:
        make_run_directory(config.directory)
    now = time.localtime()
    # Unique among launches of a run, and sorted by time.
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
        status = query_status(launch)
        if status.state in ACTIVE:
            advice = f"`gptoss launch cancel {name}` ends it, name=... starts another run"
            raise ConfigError(f"{name} is {status.state} ({status.detail}). {advice}")


def _submit_to_slurm(settings: JobSettings, cluster: ClusterConfig, stamp: str) -> str:
    """Submit the run and return the number of its job."""
    from launch.slurm_job import SlurmJob  # imports nemo-run, which takes seconds

    # nemo-run keeps a copy of its submission. Keep it here if the run directory is remote.
    base = registry() / settings.name if cluster.login else settings.directory / "launch"
    return SlurmJob(settings, cluster, stamp).submit(base)


def _start_here(settings: JobSettings, cluster: ClusterConfig, stamp: str) -> int:
    """Start the node program on this machine, detached, and return its process id.

    It runs from a snapshot, as on a cluster.
    """
    folder = settings.directory / "launch" / stamp
    code = folder / "code"
    code.mkdir(parents=True)
    files = {"run.yaml": settings.configuration, "cluster.yaml": dump_config(cluster)}

    # Not from the checkout, whose files may change during the run.
    with tarfile.open(write_snapshot(folder / "code.tar.gz", files)) as archive:
        archive.extractall(code, filter="data")

    # The snapshot precedes installed packages, also in Ray's workers.
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
            start_new_session=True,  # a closed terminal must not end the run
        )
    return process.pid
