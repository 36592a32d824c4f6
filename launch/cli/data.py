"""``gptoss data``: inspection of conversation data."""

from typing import Annotated

import typer
from typer import Option

from launch.cli.arguments import ConfigFile, Overrides
from launch.cli.groups import JoinedHelpGroup

data = typer.Typer(
    cls=JoinedHelpGroup,
    no_args_is_help=True,
    help="Inspect the conversations for `gptoss sft`.",
)


@data.command("preview")
def data_preview(
    path: ConfigFile,
    overrides: Overrides = None,
    source: Annotated[
        str | None,
        Option(help="Name of one of data.sources. Default: all."),
    ] = None,
    samples: Annotated[int, Option(min=0, help="Number of samples to show per source.")] = 2,
    conversations: Annotated[
        int,
        Option(min=1, help="Number of conversations to read per source, for the statistics."),
    ] = 1000,
) -> None:
    """Show samples token by token with their loss mask, lengths, and rejected conversations.

    Exit code 1 if all conversations of a source are rejected.
    """
    from rich.console import Console

    from launch.data_preview import print_preview
    from rl_loop.config.load import load_run_config
    from rl_loop.session import open_conversations

    codec, opened = open_conversations(load_run_config(path, "sft", overrides))
    with opened:
        all_learn = print_preview(
            opened,
            codec,
            Console(),
            sources=opened.sources if source is None else [source],
            samples=samples,
            conversations=conversations,
        )
    # A script can test the status to reject a data set.
    raise typer.Exit(0 if all_learn else 1)
