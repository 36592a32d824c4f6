"""``gptoss launch``: runs in the background, on this machine or on Slurm."""

from typing import Annotated

import typer
from typer import Argument, Option

from launch.cli.arguments import ConfigFile, Overrides, SftOption
from launch.cli.groups import GroupWithDefault

launch = typer.Typer(
    cls=GroupWithDefault,
    no_args_is_help=True,
    help="gptoss launch CONFIG [KEY=VALUE]... [--cluster NAME]: start a run in the background, on "
    "this machine or on Slurm. Options: gptoss launch start --help.",
)
Name = Annotated[str, Argument(help="Name of the run: `name` in its configuration.")]


@launch.command("start")
def launch_start(
    path: ConfigFile,
    overrides: Overrides = None,
    cluster: Annotated[
        str, Option(help="YAML file, or name of a shipped cluster configuration.")
    ] = "local",
    nodes: Annotated[int | None, Option(help="Replace `nodes` of the cluster.")] = None,
    sft: SftOption = False,
    dry_run: Annotated[
        bool,
        Option("--dry-run", help="Print script, placement and plan without starting the run."),
    ] = False,
) -> None:
    """Check the cluster, copy the current code and start the run, which resumes automatically."""
    from launch import submit
    from launch.cluster import load_cluster
    from rl_loop.config.load import load_run_config

    cluster_config = load_cluster(cluster, nodes)
    config = load_run_config(path, "sft" if sft else "rl", overrides)
    config = submit.with_engine_python(config, cluster_config, overrides or ())
    config = submit.resolve_paths(config, cluster_config)
    if dry_run:
        print(submit.describe_launch(config, cluster_config))
        return

    run = submit.start_launch(config, cluster_config)
    unit = "job" if run.kind == "slurm" else "process"
    print(f"{run.name}: {unit} {run.job} in {run.run_dir}")
    print(f"gptoss launch status {run.name} | logs {run.name} --follow | cancel {run.name}")


@launch.command("list")
def launch_list() -> None:
    """List the runs launched from this machine, with their states."""
    from launch.jobs import describe_launches

    for line in describe_launches():
        print(line)


@launch.command("status")
def launch_status(name: Name) -> None:
    """Show state, step and attempts of a run, with the first error of each attempt."""
    from launch.jobs import describe_status, find_launch

    print(describe_status(find_launch(name)))


@launch.command("logs")
def launch_logs(
    name: Name,
    attempt: Annotated[
        str | None,
        Option(help="Attempt, as named by `status`. Default: the newest."),
    ] = None,
    node: Annotated[
        str | None,
        Option(help="Show the log of this node instead of the driver's."),
    ] = None,
    lines: Annotated[int, Option(help="Number of last lines to show.")] = 100,
    follow: Annotated[bool, Option("--follow", help="Continue with new lines.")] = False,
) -> None:
    """Show the log of a run."""
    from launch import jobs

    run = jobs.find_launch(name)
    for line in jobs.read_log(run, attempt=attempt, node=node, lines=lines, follow=follow):
        # Flushed, so that each new line is visible at once in a pipe.
        print(line, flush=follow)


@launch.command("cancel")
def launch_cancel(name: Name) -> None:
    """Cancel a run and its queued jobs."""
    from launch import jobs

    print(jobs.cancel(jobs.find_launch(name)))
