"""The ``gptoss`` application with the commands of all groups."""

import logging
import warnings
from typing import Annotated

import typer
from typer import Option

from launch.cli import (
    certify,
    convert,
    data,
    inspection,
    jobs,
    listing,
    play,
    serving,
    tinker,
    training,
)
from launch.cli.groups import OneLineErrorGroup
from rl_loop.process_memory import collect_rarely

app = typer.Typer(
    cls=OneLineErrorGroup,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    help="Agentic reinforcement learning for GPT-OSS on Megatron-Core.",
)


def print_version(is_requested: bool) -> None:
    """Print the installed version and exit."""
    if is_requested:
        from megatron_gptoss.package_version import package_version

        print(f"gptoss {package_version()}")
        raise typer.Exit()


@app.callback()
def options_of_all_commands(
    version: Annotated[
        bool,
        Option(
            "--version",
            callback=print_version,
            is_eager=True,
            help="Print the version and exit.",
        ),
    ] = False,
) -> None:
    pass


# In the order of --help.
app.command()(training.sft)
app.command()(training.rl)
app.command(name="eval")(training.evaluate)
app.command()(play.play)
app.command()(serving.serve)
app.command()(tinker.tinker)
app.command(name="list")(listing.list_configs)
app.command()(inspection.report)
app.command()(inspection.view)
app.command()(inspection.plan)
app.command()(inspection.config)
app.command()(inspection.doctor)
app.add_typer(jobs.launch, name="launch")
app.add_typer(convert.convert, name="convert")
app.add_typer(certify.commands, name="certify")
app.add_typer(data.data, name="data")


def main() -> None:
    """Run the command line. Entry point of the ``gptoss`` script."""
    # Megatron and torch would report in every command that Apex and CUDA are missing. `gptoss
    # doctor` reports it instead.
    warnings.filterwarnings("ignore", module=r"megatron\.")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    collect_rarely()
    app()
