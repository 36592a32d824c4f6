"""Typer groups: errors in one line, and a default command."""

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


class JoinedHelpGroup(typer.core.TyperGroup):
    """Joins the lines of the commands' help, because --help of a group would keep the line breaks."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for command in self.commands.values():
            if command.help is not None:
                paragraphs = inspect.cleandoc(command.help).split("\n\n")
                joined = (" ".join(paragraph.split()) for paragraph in paragraphs)
                command.help = "\n\n".join(joined)


class OneLineErrorGroup(JoinedHelpGroup):
    """Prints every error in one line. For an unexpected error, it names the file of the traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            configure_logging()
            return super().invoke(ctx)
        except KeyboardInterrupt:
            print("gptoss: stopped", file=sys.stderr)
            # 128 + SIGINT, as shells report it.
            raise typer.Exit(130) from None
        except BrokenPipeError as error:
            # If standard output is intact, another pipe broke, such as a child process's.
            if not discard_unread_output():
                print_failure(error)
                raise typer.Exit(1) from None
            raise typer.Exit(128 + signal.SIGPIPE) from None
        except Exception as error:
            # typer reports its own exceptions, such as invalid options.
            if type(error).__module__.split(".")[0] in ("typer", "click"):
                raise
            print_failure(error)
        raise typer.Exit(1)


def discard_unread_output() -> bool:
    """Discard further output if its reader has exited, like ``head`` after its last line.

    Returns:
        True if the reader of standard output has exited.
    """
    output = sys.stdout.fileno()
    state = select.poll()
    # Without requested events, poll reports only errors and hang-ups.
    state.register(output, 0)
    # POLLERR: the reading end of the pipe is closed.
    is_gone = any(event & select.POLLERR for _, event in state.poll(0))
    if is_gone:
        # Otherwise Python's flush at exit would raise a second BrokenPipeError.
        os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    return is_gone


def print_failure(error: Exception, directory: Path | None = None) -> None:
    """Print an error in one line on standard error.

    Args:
        error: error to print.
        directory: directory for the traceback of an unexpected error.
    """
    from launch.control_characters import show_control_characters
    from rl_loop.lifecycle.failures import explain

    print(f"gptoss: {show_control_characters(explain(error, directory))}", file=sys.stderr)


class GroupWithDefault(JoinedHelpGroup):
    """Runs the group's first command if the first argument is not a command.

    Example: ``gptoss launch CONFIG``.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] != "--help" and not self._is_meant_as_command(args[0]):
            args = [next(iter(self.commands)), *args]
        return super().parse_args(ctx, args)

    def _is_meant_as_command(self, word: str) -> bool:
        """Return True if ``word`` is a command, or a misspelled command and not a configuration."""
        if word in self.commands:
            return True
        # A configuration may be named like a command with a typo.
        is_config = any(find_config(Path(word), folder).exists() for folder in ("rl", "sft"))
        return not is_config and bool(get_close_matches(word, self.commands))
