"""Arguments and options that several commands share, and their shell completion."""

from glob import glob
from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Argument, Option

from rl_loop.config.shipped import shipped_names


def complete_config(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return shipped configurations of the command, YAML files and directories with a prefix."""
    names = [name for name in shipped_names(_detect_command(ctx)) if name.startswith(incomplete)]
    paths = []
    # Other files cannot be a configuration, so completion leaves them out.
    for path in sorted(glob(f"{incomplete}*")):
        if Path(path).is_dir():
            # The slash lets the shell continue into the directory.
            paths.append(f"{path}/")
        elif path.endswith((".yaml", ".yml")):
            paths.append(path)
    return [*names, *paths]


def complete_override(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the configuration keys with a prefix, as ``KEY=``."""
    # A local import, because the schema of configurations takes 0.5 s to load.
    from rl_loop.config.load import keys_of_command

    return [
        f"{key}=" for key in keys_of_command(_detect_command(ctx)) if key.startswith(incomplete)
    ]


def _detect_command(ctx: typer.Context) -> str:
    """Return the command, rl, sft or tinker, whose configuration is being typed."""
    if ctx.info_name == "tinker":
        return "tinker"
    is_sft = ctx.info_name in ("sft", "preview") or bool(ctx.params.get("sft"))
    return "sft" if is_sft else "rl"


ConfigFile = Annotated[
    Path,
    Argument(
        metavar="CONFIG",
        help="YAML file, such as configs/rl/tiny_retool.yaml, or name of a shipped configuration.",
        autocompletion=complete_config,
    ),
]
TrainingCommand = Literal["rl", "sft"]
Overrides = Annotated[
    list[str] | None,
    Argument(
        metavar="[KEY=VALUE]...",
        help="Replace values of the file, such as optimizer.lr=1e-6.",
        autocompletion=complete_override,
    ),
]
Resume = Annotated[
    bool,
    Option(
        "--resume",
        help="Continue the run from its newest checkpoint, with the current CONFIG.",
    ),
]
ResumeOrNew = Annotated[
    bool,
    Option("--resume-or-new", help="Continue the run if it exists, else start it."),
]
Overwrite = Annotated[
    bool,
    Option("--overwrite", help="First delete an existing run of the same name."),
]
SftOption = Annotated[bool, Option("--sft", help="Read CONFIG as a configuration of `gptoss sft`.")]
