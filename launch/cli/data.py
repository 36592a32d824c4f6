"""``gptoss data``: conversations for supervised fine-tuning."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from launch.cli.arguments import ConfigFile, Overrides
from launch.cli.groups import JoinedHelpGroup

data = typer.Typer(
    cls=JoinedHelpGroup,
    no_args_is_help=True,
    help="Inspect the conversations for `gptoss sft`, or let a model write some.",
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
    from rl_loop.run_parts import open_conversations

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


@data.command("generate")
def data_generate(
    model_dir: Annotated[
        Path,
        Argument(help="Hugging Face directory of a ChatML model, with its chat template."),
    ],
    file: Annotated[
        Path,
        Argument(help="JSONL file to write. An incomplete one is continued."),
    ],
    conversations: Annotated[
        int | None,
        Option(min=1, help="Number of conversations. The model also writes the questions."),
    ] = None,
    prompts: Annotated[
        str | None,
        Option(help="Answer the questions of this file: .jsonl, .parquet or hub:NAME:SPLIT."),
    ] = None,
    column: Annotated[str, Option(help="Column of the questions in --prompts.")] = "question",
    max_tokens: Annotated[
        int,
        Option(min=1, help="Maximum tokens of a message. Longer ones are cut off."),
    ] = 400,
    batch: Annotated[
        int | None,
        Option(min=1, help="Concurrent conversations. Default: 1024, or 16 without a GPU."),
    ] = None,
    seed: Annotated[int, Option(help="Seed of the sampling.")] = 0,
) -> None:
    """Let a model write conversations, for distillation into another model.

    Give either --conversations or --prompts. Run the command again to continue after an
    interruption.
    """
    if (conversations is None) == (prompts is None):
        raise typer.BadParameter("give either --conversations or --prompts")
    from rl_loop.self_written import WritingOptions, read_questions, write_conversations

    questions: list[str] | int
    if prompts is not None:
        questions = read_questions(prompts, column)
    else:
        assert conversations is not None
        questions = conversations

    options = WritingOptions(batch, max_tokens, seed)
    with conversations_bar() as progress:
        unanswered = write_conversations(model_dir, file, questions, options, progress)
    if unanswered:
        print(f"{unanswered:,} conversations are missing, because the model wrote empty messages")
    print(file)


@contextmanager
def conversations_bar() -> Iterator[Callable[[int, int], None]]:
    """Show the progress: a bar on a terminal, else a line per batch.

    Yields a function of (conversations in the file, conversations wanted).
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    is_terminal = sys.stderr.isatty()
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, disable=not is_terminal, transient=True) as bar:
        task = bar.add_task("write", total=None)

        def update(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)
            if not is_terminal:
                print(f"{done:,} of {total:,} conversations", flush=True)

        yield update
