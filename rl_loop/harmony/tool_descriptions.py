"""Tools as Harmony describes them: functions in the developer message, built-in tools in the
system message."""

from openai_harmony import ToolDescription, ToolNamespaceConfig

from rl_loop.chat.tools import BuiltinTool, Tool
from rl_loop.harmony.json_schema import harmony_schema


def described_function(tool: Tool) -> ToolDescription:
    """Return the description of a function that openai-harmony renders."""
    return ToolDescription.new(tool.name, tool.description, harmony_schema(tool.parameters))


def described_builtin(tool: BuiltinTool) -> ToolNamespaceConfig:
    """Return the description of a built-in tool that openai-harmony renders."""
    return ToolNamespaceConfig(
        name=tool.name,
        description=tool.description,
        tools=[described_function(function) for function in tool.functions],
    )
