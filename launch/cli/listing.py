"""The command ``gptoss list``."""

import json
import sys
from typing import Annotated

from typer import Option

from launch.cli.arguments import TrainingCommand


def list_configs(
    command: Annotated[
        TrainingCommand | None, Option(help="Only configurations of this command.")
    ] = None,
    gpus: Annotated[
        int | None, Option(min=0, help="Only configurations for at most this number of GPUs.")
    ] = None,
    model: Annotated[
        str | None, Option(help="Only models with this text in their name, such as 20b.")
    ] = None,
    fits: Annotated[
        str | None,
        Option(
            metavar="GPU",
            help="Only configurations that are predicted to fit this GPU: h100, h200, b200, or its "
            "memory in GB, such as 80.",
        ),
    ] = None,
    ran: Annotated[bool, Option("--ran", help="Only configurations that ran.")] = False,
    as_json: Annotated[
        bool, Option("--json", help="Print JSON, with paths and descriptions.")
    ] = False,
) -> None:
    """List the shipped configurations: hardware, predicted memory, and real runs.

    The prediction is for the GPU of --fits, else this machine's GPU, else the GPU that the
    configuration names. `gptoss plan NAME` explains it, and `gptoss config NAME` prints the settings.
    """
    from launch import config_list

    commands = ("rl", "sft") if command is None else (command,)
    rows = [
        row
        for row in config_list.listed_configs(commands, fits)
        if row.matches(gpus, model, ran, must_fit=fits is not None)
    ]
    if as_json:
        print(json.dumps(config_list.as_json(rows), indent=2))
        return
    config_list.print_configs(rows)
    for row in rows:
        if row.error is not None:
            print(f"gptoss: {row.name} cannot be loaded: {row.error}", file=sys.stderr)
