"""Builds the system message of a prompt, and describes tools in it and in the developer message."""

from collections.abc import Sequence

from openai_harmony import (
    ChannelConfig,
    DeveloperContent,
    Message,
    ReasoningEffort,
    Role,
    SystemContent,
    ToolDescription,
    ToolNamespaceConfig,
)

from rl_loop.chat.tools import BuiltinTool, PythonTool, Tool
from rl_loop.harmony.conversation import CHANNELS
from rl_loop.harmony.json_schema import harmony_schema
from rl_loop.harmony.prompt_config import PromptConfig


def system_message(
    prompt: PromptConfig,
    builtin_tools: Sequence[BuiltinTool | PythonTool],
    python_seconds: float,
    effort: ReasoningEffort | None = None,
) -> Message | None:
    """Return the system message. None if the configuration leaves it empty.

    Args:
        prompt: contents of the message.
        builtin_tools: built-in tools to describe.
        python_seconds: time limit of the sandbox, for the description of Python.
        effort: replacement for the configured effort. None uses the configured one.
    """
    if effort is None and prompt.reasoning_effort:
        effort = ReasoningEffort(prompt.reasoning_effort.capitalize())

    channel_config = None
    if prompt.channels:
        channels = list(CHANNELS) if prompt.channels is True else prompt.channels
        channel_config = ChannelConfig.require_channels(channels)

    content = SystemContent(
        model_identity=prompt.model_identity,
        knowledge_cutoff=prompt.knowledge_cutoff,
        conversation_start_date=prompt.current_date,
        reasoning_effort=effort,
        channel_config=channel_config,
    )
    if prompt.describe_builtin_tools:
        for tool in builtin_tools:
            # The description has the sandbox's time limit, which is known only here.
            if isinstance(tool, PythonTool):
                tool = tool.in_sandbox(python_seconds)
            content = content.with_tools(describe_builtin_tool(tool))

    # An empty message would only cost tokens.
    if not content.model_dump(exclude_none=True):
        return None
    return Message.from_role_and_content(Role.SYSTEM, content)


def describe_functions(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """Describe functions in the first developer message. Add one in front if there is none."""
    rendered = list(messages)
    developer = [i for i, m in enumerate(rendered) if m.author.role is Role.DEVELOPER]
    place = 0
    content = DeveloperContent.new()
    if developer:
        place = developer[0]
        # A developer message has one part, with instructions and tools.
        content = rendered.pop(place).content[0]

    content = content.with_function_tools([describe_function(tool) for tool in tools])
    rendered.insert(place, Message.from_role_and_content(Role.DEVELOPER, content))
    return rendered


def describe_function(tool: Tool) -> ToolDescription:
    """Return openai-harmony's description of a function."""
    return ToolDescription.new(tool.name, tool.description, harmony_schema(tool.parameters))


def describe_builtin_tool(tool: BuiltinTool) -> ToolNamespaceConfig:
    """Return openai-harmony's description of a built-in tool."""
    return ToolNamespaceConfig(
        name=tool.name,
        description=tool.description,
        tools=[describe_function(function) for function in tool.functions],
    )
