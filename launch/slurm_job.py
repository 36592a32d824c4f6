"""A run as a Slurm job, through nemo-run. Importing this module imports nemo-run, which takes seconds."""

import shlex
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import nemo_run
from nemo_run.core.frontend.console.api import CONSOLE

from launch.cluster import SBATCH_FIELDS, ClusterConfig
from launch.snapshot import JOB_FOLDER, write_snapshot
from rl_loop.config.load import dump_config
from rl_loop.config.run import RunConfig

CODE = "/nemo_run/code"  # where the snapshot lies in a container; without one nemo-run puts the real path in its place


@dataclass(kw_only=True)
class SnapshotPackager(nemo_run.Packager):
    """Like nemo-run's own for git, but with the changes that are not committed."""

    texts: dict[str, str] = field(default_factory=dict)

    def package(self, path: Path, job_dir: str, name: str) -> str:
        return str(write_snapshot(Path(job_dir) / f"{name}.tar.gz", self.texts))


class SlurmJob:
    """One submission; ``stamp`` tells it from others of the same run."""

    def __init__(self, config: RunConfig, cluster: ClusterConfig, stamp: str) -> None:
        self.config, self.cluster, self.stamp = config, cluster, stamp
        self.jobs_dir = config.directory / "launch" / "experiments"
        self.files = {"run.yaml": dump_config(config), "cluster.yaml": dump_config(cluster)}

    def script(self) -> str:
        """The sbatch script. Nothing is left behind."""
        with tempfile.TemporaryDirectory() as scratch, self._experiment(scratch) as experiment:
            self._add_tasks(experiment)
            experiment.dryrun(log=False, delete_exp_dir=False)
            return self._script_in(scratch).read_text()

    def submit(self, base: Path) -> str:
        """Copy the snapshot to the cluster and submit; the job's number. ``base``: where nemo-run keeps its copy."""
        with self._experiment(str(base)) as experiment:
            self._add_tasks(experiment)
            experiment.run(detach=True)
            tunnel = next(iter(experiment.tunnels.values()))
            job = experiment.jobs[0]
            handle = job.handles[0] if hasattr(job, "handles") else job.handle
            for _ in range(self.cluster.chain - 1):
                script = Path(tunnel.job_dir) / self._script_in(str(base)).name
                tunnel.run(f"sbatch --requeue --parsable {shlex.quote(str(script))}")
        return handle.rpartition("/")[2]

    def _script_in(self, base: str) -> Path:
        folder = Path(base) / "experiments" / self.config.name / f"{self.config.name}_{self.stamp}"
        return next(folder.glob("*_sbatch.sh"))

    def _experiment(self, base: str) -> nemo_run.Experiment:
        CONSOLE.quiet = True
        return nemo_run.Experiment(
            self.config.name, id=f"{self.config.name}_{self.stamp}", base_dir=base, log_level="WARN",
            clean_mode=True, enable_goodbye_message=False, skip_status_at_exit=True,
        )  # fmt: skip

    def _add_tasks(self, experiment: nemo_run.Experiment) -> None:
        groups = [nodes for nodes in (self.cluster.nodes, self.cluster.rollout_nodes) if nodes]
        tasks = [self._task(group) for group in range(len(groups))]
        executors = [self._executor(nodes) for nodes in groups]
        if len(groups) == 1:
            tasks, executors = tasks[0], executors[0]
        experiment.add(tasks, executor=executors, name=self.config.name)

    def _task(self, group: int) -> nemo_run.Script:
        folder = f"{CODE}/{JOB_FOLDER}"
        arguments = [f"{folder}/run.yaml", f"{folder}/cluster.yaml", self.config.command, str(group)]
        return nemo_run.Script(path="launch.node", entrypoint=self.cluster.python, m=True, args=arguments)

    def _executor(self, nodes: int) -> nemo_run.SlurmExecutor:
        cluster = self.cluster
        container = cluster.container
        shared = f"{cluster.shared_dir}:{cluster.shared_dir}"
        gpus = ("gpu", cluster.gpu_type, str(cluster.gpus_per_node))
        paths = {"GPTOSS_RUN_DIR": str(self.config.directory), "PYTHONPATH": f"{CODE}:{CODE}/kernels"}
        environment = {**paths, "PYTHONUNBUFFERED": "1", **cluster.env}
        return nemo_run.SlurmExecutor(
            **cluster.model_dump(include=set(SBATCH_FIELDS)),
            nodes=nodes,
            ntasks_per_node=1,
            gres=":".join(filter(None, gpus)) if cluster.gpus_per_node else None,
            cpus_per_task=cluster.cpus_per_node,
            mem=cluster.memory_per_node,
            exclusive=cluster.exclusive or None,
            time=cluster.time_limit,
            signal=f"USR1@{cluster.stop_before_end}",
            job_name_prefix="gptoss.",
            additional_parameters={"dependency": "singleton"} if cluster.chain > 1 else None,
            container_image=container.image if container else None,
            container_mounts=[shared, *container.mounts] if container else [],
            env_vars={name: shlex.quote(value) for name, value in environment.items()},
            setup_lines=(Path(__file__).parent / "job_setup.sh").read_text(),
            tunnel=self._tunnel(),
            packager=SnapshotPackager(texts=self.files),
            heterogeneous=cluster.rollout_nodes > 0,
            poll_estimated_start_time=False,
            wait_time_for_group_job=0,
            monitor_group_job_wait_time=5,
        )

    def _tunnel(self) -> nemo_run.LocalTunnel | nemo_run.SSHTunnel:
        if self.cluster.login is None:
            return nemo_run.LocalTunnel(job_dir=str(self.jobs_dir))
        user, _, host = self.cluster.login.partition("@")
        return nemo_run.SSHTunnel(host=host, user=user, job_dir=str(self.jobs_dir))
