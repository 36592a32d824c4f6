"""How groups of commands behave: failures in one line, and a command that may be left out."""

import inspect
import os
import select
import signal
import sys
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import typer
import typer.core

from rl_loop.config.shipped import find_config
from rl_loop.logs import configure_logging


class UnbrokenHelp(typer.core.TyperGroup):
    """Joins the lines of its commands' help, which --help of the group would break twice."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for command in self.commands.values():
            if command.help is not None:
                paragraphs = inspect.cleandoc(command.help).split("\n\n")
                joined = (" ".join(paragraph.split()) for paragraph in paragraphs)
                command.help = "\n\n".join(joined)


class ErrorsInOneLine(UnbrokenHelp):
    """Ends every failure in one line; that of a bug of ours names the file with the traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            configure_logging()
            return super().invoke(ctx)
        except KeyboardInterrupt:
            print("gptoss: stopped", file=sys.stderr)
            raise typer.Exit(130) from None
        except BrokenPipeError as error:
            if not drop_output_that_nobody_reads():
                print_failure(error)
                raise typer.Exit(1) from None
            raise typer.Exit(128 + signal.SIGPIPE) from None
        except Exception as error:
            # --help and wrong options are answered by typer itself, without waiting for torch.
            if type(error).__module__.split(".")[0] in ("typer", "click"):
                raise
            print_failure(error)
        raise typer.Exit(1)


def drop_output_that_nobody_reads() -> bool:
    """Tell whether the reader of standard output has gone, as ``head`` does when it has its lines. What is left
    to print goes nowhere then."""
    output = sys.stdout.fileno()
    state = select.poll()
    state.register(output, 0)
    is_gone = any(event & select.POLLERR for _, event in state.poll(0))
    if is_gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    return is_gone


def print_failure(error: Exception, directory: Path | None = None) -> None:
    """Print one line on standard error; where a traceback helps, write it into ``directory``."""
    from launch.control_characters import show_control_characters
    from rl_loop.lifecycle.failures import explain

    print(f"gptoss: {show_control_characters(explain(error, directory))}", file=sys.stderr)


class GroupWithDefault(UnbrokenHelp):
    """Runs the command that was added first if the first argument is no command: ``gptoss launch
    CONFIG``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] != "--help" and not self._is_meant_as_command(args[0]):
            args = [next(iter(self.commands)), *args]
        return super().parse_args(ctx, args)

    def _is_meant_as_command(self, word: str) -> bool:
        """Whether ``word`` is a subcommand, or a misspelled one rather than a configuration."""
        if word in self.commands:
            return True
        is_config = any(find_config(Path(word), folder).exists() for folder in ("rl", "sft"))
        return not is_config and bool(get_close_matches(word, self.commands))
