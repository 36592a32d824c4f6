"""What the tab key completes: names of configurations, files, and keys of overrides."""

from glob import glob
from pathlib import Path

import typer

from rl_loop.config.shipped import shipped_names


def complete_config(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return shipped configurations of the command, YAML files and directories that begin with what
    was typed."""
    names = [name for name in shipped_names(_command_of(ctx)) if name.startswith(incomplete)]
    paths = []
    for path in sorted(glob(f"{incomplete}*")):
        if Path(path).is_dir():
            paths.append(f"{path}/")
        elif path.endswith((".yaml", ".yml")):
            paths.append(path)
    return [*names, *paths]


def complete_override(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the keys that begin with what was typed, as ``KEY=``."""
    # Nothing but this completes with the schema of configurations, which takes half a second.
    from rl_loop.config.load import keys_of_command

    return [f"{key}=" for key in keys_of_command(_command_of(ctx)) if key.startswith(incomplete)]


def _command_of(ctx: typer.Context) -> str:
    """Return the command, rl or sft, whose configuration is typed."""
    is_sft = ctx.info_name in ("sft", "preview") or bool(ctx.params.get("sft"))
    return "sft" if is_sft else "rl"
