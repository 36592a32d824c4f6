"""Submission of a run as a Slurm job through nemo-run.

Import this module only to submit a job, because importing nemo-run takes seconds.
"""

import shlex
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nemo_run
from nemo_run.core.frontend.console.api import CONSOLE

from launch.cluster import SBATCH_FIELDS, ClusterConfig, check_script_word
from launch.job_settings import JobSettings
from launch.snapshot import node_arguments, write_snapshot
from rl_loop.config.errors import ConfigError
from rl_loop.config.load import dump_config

CODE = "/nemo_run/code"
"""Path of the snapshot in a container. Without a container, nemo-run inserts the real path."""


@dataclass(kw_only=True)
class SnapshotPackager(nemo_run.Packager):
    """Packs the checkout like nemo-run's packager for git, including uncommitted changes."""

    texts: dict[str, str] = field(default_factory=dict)
    """Contents of the snapshot's additional files, by file name. See ``write_snapshot``."""

    def package(self, path: Path, job_dir: str, name: str) -> str:
        archive = Path(job_dir) / f"{name}.tar.gz"
        return str(write_snapshot(archive, self.texts))


class SlurmJob:
    """One submission of a run. ``stamp`` is unique among submissions of the run."""

    def __init__(self, settings: JobSettings, cluster: ClusterConfig, stamp: str) -> None:
        try:
            # nemo-run writes the directory into the batch script without quotes.
            check_script_word("the directory of the run", settings.directory)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        self.settings = settings
        self.cluster = cluster
        self.stamp = stamp
        self.jobs_dir = settings.directory / "launch" / "experiments"
        self.files = {"run.yaml": settings.configuration, "cluster.yaml": dump_config(cluster)}

    def script(self) -> str:
        """Return the sbatch script without writing files."""
        with tempfile.TemporaryDirectory() as scratch, self._experiment(scratch) as experiment:
            self._add_tasks(experiment)
            experiment.dryrun(log=False, delete_exp_dir=False)
            return self._find_script(Path(scratch)).read_text()

    def submit(self, base: Path) -> str:
        """Copy the snapshot to the cluster and submit the job.

        Args:
            base: directory for the files of nemo-run.

        Returns:
            Slurm id of the job; with ``cluster.chain`` above 1, of the first job.
        """
        with self._experiment(str(base)) as experiment:
            self._add_tasks(experiment)
            experiment.run(detach=True)  # returns when the job is queued

            job = experiment.jobs[0]
            is_heterogeneous = hasattr(job, "handles")
            handle = job.handles[0] if is_heterogeneous else job.handle

            # The jobs of a chain share a name, and the dependency "singleton" runs them in
            # sequence.
            tunnel = next(iter(experiment.tunnels.values()))
            for _ in range(self.cluster.chain - 1):
                script = Path(tunnel.job_dir) / self._find_script(base).name
                tunnel.run(f"sbatch --requeue --parsable {shlex.quote(str(script))}")
        return handle.rpartition("/")[2]

    def _find_script(self, base: Path) -> Path:
        """Return the path of the sbatch script that nemo-run wrote below ``base``."""
        folder = base / "experiments" / self.settings.name / f"{self.settings.name}_{self.stamp}"
        return next(folder.glob("*_sbatch.sh"))

    def _experiment(self, base: str) -> nemo_run.Experiment:
        # ``gptoss launch`` prints its own summary of the submission.
        CONSOLE.quiet = True
        return nemo_run.Experiment(
            self.settings.name,
            id=f"{self.settings.name}_{self.stamp}",
            base_dir=base,
            log_level="WARN",
            clean_mode=True,
            enable_goodbye_message=False,
            skip_status_at_exit=True,
        )

    def _add_tasks(self, experiment: nemo_run.Experiment) -> None:
        """Add a task for the trainer nodes and, if there are any, a task for the rollout nodes."""
        name = self.settings.name
        trainer_task = self._task(group=0)
        trainer_executor = self._executor(self.cluster.nodes)
        if self.cluster.rollout_nodes == 0:
            experiment.add(trainer_task, executor=trainer_executor, name=name)
            return

        rollout_task = self._task(group=1)
        rollout_executor = self._executor(self.cluster.rollout_nodes)
        # nemo-run makes a heterogeneous job of a list of tasks.
        experiment.add(
            [trainer_task, rollout_task],
            executor=[trainer_executor, rollout_executor],
            name=name,
        )

    def _task(self, group: int) -> nemo_run.Script:
        arguments = node_arguments(self.settings.command, group, code=CODE)
        return nemo_run.Script(
            path="launch.node",
            entrypoint=self.cluster.python,
            m=True,
            args=arguments,
        )

    def _executor(self, nodes: int) -> nemo_run.SlurmExecutor:
        """Return nemo-run's executor for one part of the job."""
        return nemo_run.SlurmExecutor(
            **self.cluster.model_dump(include=set(SBATCH_FIELDS)),
            **self._container_options(),
            **self._size_options(nodes),
            **self._time_options(),
            job_name_prefix="gptoss.",
            env_vars=self._environment(),
            setup_lines=(Path(__file__).parent / "job_setup.sh").read_text(),
            packager=SnapshotPackager(texts=self.files),
            tunnel=self._tunnel(),
            # ``gptoss launch`` returns when the job is queued, so nemo-run must not wait for it.
            poll_estimated_start_time=False,
            wait_time_for_group_job=0,
            monitor_group_job_wait_time=5,
        )

    def _size_options(self, nodes: int) -> dict[str, Any]:
        cluster = self.cluster
        return {
            "nodes": nodes,
            # ``launch.node`` starts all other processes of the node.
            "ntasks_per_node": 1,
            "gres": self._gres(),
            "cpus_per_task": cluster.cpus_per_node,
            "mem": cluster.memory_per_node,
            # False would still write the option, None leaves it out.
            "exclusive": cluster.exclusive or None,
            "heterogeneous": cluster.rollout_nodes > 0,
        }

    def _time_options(self) -> dict[str, Any]:
        cluster = self.cluster
        # The jobs of a chain share a name and run in sequence.
        order = {"dependency": "singleton"} if cluster.chain > 1 else None
        return {
            "time": cluster.time_limit,
            # Slurm sends the signal before the time limit, so that the run can save a checkpoint.
            "signal": f"USR1@{cluster.stop_before_end}",
            "additional_parameters": order,
        }

    def _gres(self) -> str | None:
        """Return Slurm's ``gres`` for the GPUs of a node: gpu:TYPE:COUNT or gpu:COUNT."""
        gpus = self.cluster.gpus_per_node
        if not gpus:
            return None
        if self.cluster.gpu_type is None:
            return f"gpu:{gpus}"
        return f"gpu:{self.cluster.gpu_type}:{gpus}"

    def _container_options(self) -> dict[str, Any]:
        container = self.cluster.container
        if container is None:
            return {"container_image": None, "container_mounts": []}
        shared = self.cluster.shared_dir
        return {
            "container_image": container.image,
            # At its own path, because the configuration has absolute paths in it.
            "container_mounts": [f"{shared}:{shared}", *container.mounts],
        }

    def _environment(self) -> dict[str, str]:
        """Return the environment variables of the job, quoted for the shell."""
        # ``cluster.env`` is not here, because its values may be secrets and the script prints every
        # line to the log of the job. Nodes read ``cluster.env`` from the snapshot.
        environment = {
            "GPTOSS_RUN_DIR": str(self.settings.directory),
            "PYTHONPATH": f"{CODE}:{CODE}/kernels",
            "PYTHONUNBUFFERED": "1",
        }
        return {name: shlex.quote(value) for name, value in environment.items()}

    def _tunnel(self) -> nemo_run.LocalTunnel | nemo_run.SSHTunnel:
        if self.cluster.login is None:
            return nemo_run.LocalTunnel(job_dir=str(self.jobs_dir))
        user, _, host = self.cluster.login.partition("@")
        return nemo_run.SSHTunnel(host=host, user=user, job_dir=str(self.jobs_dir))
