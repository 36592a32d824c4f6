"""``gptoss launch``: runs in the background, on this machine or on Slurm."""

from typing import Annotated

import typer
from typer import Argument, Option

from launch.cli.arguments import ConfigFile, OfSft, Overrides
from launch.cli.groups import GroupWithDefault

launch = typer.Typer(
    cls=GroupWithDefault,
    no_args_is_help=True,
    help="gptoss launch CONFIG [KEY=VALUE]... [--cluster NAME]: start a run in the background, here or on Slurm. "
    "Options: gptoss launch start --help.",
)
Name = Annotated[str, Argument(help="The name of the run: `name` of its configuration.")]


@launch.command("start")
def launch_start(
    path: ConfigFile,
    overrides: Overrides = None,
    cluster: Annotated[str, Option(help="A YAML file, or the name of a shipped one.")] = "local",
    nodes: Annotated[int | None, Option(help="Replaces `nodes` of the cluster.")] = None,
    sft: OfSft = False,
    dry_run: Annotated[
        bool,
        Option("--dry-run", help="Print script, placement and plan; change nothing."),
    ] = False,
) -> None:
    """Check the cluster, copy the code as it is now, and start the run. It resumes by itself."""
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

    run = submit.start(config, cluster_config)
    unit = "job" if run.kind == "slurm" else "process"
    print(f"{run.name}: {unit} {run.job} in {run.run_dir}")
    print(f"gptoss launch status {run.name} | logs {run.name} --follow | cancel {run.name}")


@launch.command("list")
def launch_list() -> None:
    """Runs that were launched from this machine, with their states."""
    from launch.jobs import describe_launches

    for line in describe_launches():
        print(line)


@launch.command("status")
def launch_status(name: Name) -> None:
    """State, step, attempts and the first error of each."""
    from launch.jobs import describe_status, find_launch

    print(describe_status(find_launch(name)))


@launch.command("logs")
def launch_logs(
    name: Name,
    attempt: Annotated[
        str | None,
        Option(help="As `status` names it; without it the newest."),
    ] = None,
    node: Annotated[
        str | None,
        Option(help="The log of this node instead of the driver's."),
    ] = None,
    lines: Annotated[int, Option(help="How many of the last lines.")] = 100,
    follow: Annotated[bool, Option("--follow", help="Go on as lines are written.")] = False,
) -> None:
    """What the run said."""
    from launch import jobs

    run = jobs.find_launch(name)
    for line in jobs.read_log(run, attempt=attempt, node=node, lines=lines, follow=follow):
        print(line, flush=follow)


@launch.command("cancel")
def launch_cancel(name: Name) -> None:
    """End a run and what is queued for it."""
    from launch import jobs

    print(jobs.cancel(jobs.find_launch(name)))
