"""What the tab key completes: names of configurations, files, and keys of overrides."""

from glob import glob
from pathlib import Path

import typer

from rl_loop.config.run import RlConfig, RunConfig, SftConfig
from rl_loop.config.shipped import shipped_names
from rl_loop.config.suggestions import known_keys


def complete_config(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return shipped configurations of the command, YAML files and directories that begin with what
    was typed."""
    names = [name for name in shipped_names(_kind_of(ctx).command) if name.startswith(incomplete)]
    paths = []
    for path in sorted(glob(f"{incomplete}*")):
        if Path(path).is_dir():
            paths.append(f"{path}/")
        elif path.endswith((".yaml", ".yml")):
            paths.append(path)
    return [*names, *paths]


def complete_override(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the keys that begin with what was typed, as ``KEY=``."""
    return [f"{key}=" for key in known_keys(_kind_of(ctx)) if key.startswith(incomplete)]


def _kind_of(ctx: typer.Context) -> type[RunConfig]:
    is_sft = ctx.info_name in ("sft", "preview") or bool(ctx.params.get("sft"))
    return SftConfig if is_sft else RlConfig
