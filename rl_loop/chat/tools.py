"""Tools, as environments offer them and codecs describe them in a prompt."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

NAME = re.compile(r"[\w.-]+")
FUNCTIONS = "functions."
"""How the recipient of a function's call begins."""


@dataclass(frozen=True)
class Tool:
    """A function that the policy calls as ``functions.name`` with JSON arguments.

    Harmony shows ``parameters`` in TypeScript, see ``rl_loop.harmony.json_schema``. ChatML shows the
    schema itself. Raises ValueError for a name that no header can carry.
    """

    name: str
    description: str
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments; None for a function without any."""

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise ValueError(
                f"a tool is named {self.name!r}; a name has letters, digits and any of _ . - only"
            )


@dataclass(frozen=True)
class BuiltinTool:
    """A tool that GPT-OSS knows from its training, or a namespace of such tools, called by its
    own name."""

    name: str
    """"python", or the namespace "browser" with functions such as browser.search."""
    description: str
    functions: tuple[Tool, ...] = ()


@dataclass(frozen=True)
class PythonTool:
    """The built-in ``python`` of this project's sandbox."""

    name: ClassVar[str] = "python"
    stateful: bool = False
    """Whether variables last from one call of an episode to the next."""

    def in_sandbox(self, timeout_seconds: float) -> BuiltinTool:
        """Describe the tool as it is in a sandbox with this limit for one call."""
        text = STATEFUL_PYTHON if self.stateful else STATELESS_PYTHON
        return BuiltinTool(self.name, text.format(seconds=float(timeout_seconds)))


# The text that the released models were trained with, but for three things: the seconds are those
# of the sandbox, the drive /mnt/data is left out because there is none, and the internet is known
# to be out of reach.
STATEFUL_PYTHON = """\
Use this tool to execute Python code in your chain of thought. The code will not be shown to the user. This tool \
should be used for internal reasoning, but not for code that is intended to be visible to the user (e.g. when \
creating plots, tables, or files).

When you send a message containing Python code to python, it will be executed in a stateful Jupyter notebook \
environment. python will respond with the output of the execution or time out after {seconds} seconds. Internet \
access for this session is disabled."""

# After the text that OpenAI's reference implementation puts in place of the one above where the
# tool is stateless (github.com/openai/gpt-oss, gpt_oss/tools/python_docker/docker_tool.py). There
# it runs in a Docker container without a limit of time, and values of last expressions are not
# printed.
STATELESS_PYTHON = """\
Use this tool to execute STATELESS Python code in your chain of thought. The code will not be shown to the user. This \
tool should be used for internal reasoning, but not for code that is intended to be visible to the user (e.g. when \
creating plots, tables, or files).
When you send a message containing Python code to python, it will be executed in a stateless sandbox. python will \
respond with the output of the execution (what it prints, and the value of a last expression) or time out after \
{seconds} seconds. Internet access for this session is disabled.

IMPORTANT: Your python environment is not shared between calls. You will have to pass your entire code each time."""


def check_names(tools: Sequence[Tool | BuiltinTool | PythonTool]) -> None:
    """Raise ValueError if two tools have one name."""
    names: set[str] = set()
    for tool in tools:
        if tool.name in names:
            raise ValueError(f"two tools are named {tool.name!r}")
        names.add(tool.name)
