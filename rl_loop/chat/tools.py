"""Tools of environments, which codecs describe in prompts."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

NAME = re.compile(r"[\w.-]+")
FUNCTIONS = "functions."
"""Prefix of a function call's recipient."""


@dataclass(frozen=True)
class Tool:
    """Function that the policy calls as ``functions.name`` with JSON arguments.

    Harmony shows ``parameters`` in TypeScript (``rl_loop.harmony.json_schema``). ChatML shows the
    schema itself.

    Raises:
        ValueError: if a header cannot contain the name.
    """

    name: str
    description: str
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments. None for a function without arguments."""

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise ValueError(
                f"{self.name!r} is not a valid name of a tool. Use letters, digits and any of _ . -"
            )


@dataclass(frozen=True)
class BuiltinTool:
    """Tool that GPT-OSS knows from its training, or a namespace of such tools.

    The policy calls it by its name.
    """

    name: str
    """Name "python", or a namespace such as "browser" with functions such as browser.search."""
    description: str
    functions: tuple[Tool, ...] = ()


@dataclass(frozen=True)
class PythonTool:
    """Built-in ``python`` tool, run by this project's sandbox."""

    name: ClassVar[str] = "python"
    stateful: bool = False
    """True if variables persist from one call of an episode to the next."""

    def in_sandbox(self, timeout_seconds: float) -> BuiltinTool:
        """Return the tool's description for a sandbox with this time limit per call."""
        text = STATEFUL_PYTHON if self.stateful else STATELESS_PYTHON
        # float, because the text from the training has a decimal point: "120.0 seconds".
        return BuiltinTool(self.name, text.format(seconds=float(timeout_seconds)))


# The text from the training of the released models, with three changes. The seconds are the
# sandbox's, the drive /mnt/data is left out because there is none, and the internet is declared
# inaccessible.
STATEFUL_PYTHON = """\
Use this tool to execute Python code in your chain of thought. The code will not be shown to the user. This tool \
should be used for internal reasoning, but not for code that is intended to be visible to the user (e.g. when \
creating plots, tables, or files).

When you send a message containing Python code to python, it will be executed in a stateful Jupyter notebook \
environment. python will respond with the output of the execution or time out after {seconds} seconds. Internet \
access for this session is disabled."""

# Adapted from the text that OpenAI's reference implementation uses for a stateless tool
# (github.com/openai/gpt-oss, gpt_oss/tools/python_docker/docker_tool.py). That tool runs in a
# Docker container without a time limit, and does not print the value of the last expression.
STATELESS_PYTHON = """\
Use this tool to execute STATELESS Python code in your chain of thought. The code will not be shown to the user. This \
tool should be used for internal reasoning, but not for code that is intended to be visible to the user (e.g. when \
creating plots, tables, or files).
When you send a message containing Python code to python, it will be executed in a stateless sandbox. python will \
respond with the output of the execution (what it prints, and the value of a last expression) or time out after \
{seconds} seconds. Internet access for this session is disabled.

IMPORTANT: Your python environment is not shared between calls. You will have to pass your entire code each time."""


def check_names(tools: Sequence[Tool | BuiltinTool | PythonTool]) -> None:
    """Raise ValueError if two tools have the same name."""
    names: set[str] = set()
    # The policy calls tools by their names, so one of two equal names could never be called.
    for tool in tools:
        if tool.name in names:
            raise ValueError(f"two tools have the name {tool.name!r}. Rename one")
        names.add(tool.name)
