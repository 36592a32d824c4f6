"""Tools and calls in ChatML, which knows only functions."""

import json
from typing import Any

from rl_loop.chat.messages import ParsedMessage
from rl_loop.chat.tools import FUNCTIONS, BuiltinTool, Tool
from rl_loop.chatml.conversation import RenderedCall

PYTHON = "python"
"""Name of the built-in tool."""


def openai_function(tool: Tool) -> dict[str, Any]:
    """Return a tool in OpenAI's format, as Qwen2.5's template shows it."""
    parameters = tool.parameters or {"type": "object", "properties": {}}
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}


def python_function(tool: BuiltinTool) -> Tool:
    """Return Python as a function. Raises ValueError for another built-in tool."""
    if tool.name != PYTHON or tool.functions:
        raise ValueError(
            f"the built-in tool {tool.name!r} is for GPT-OSS only. ChatML supports only python"
        )
    # ChatML has no built-in tools, so a program is the argument of a function.
    code = {"type": "string", "description": "The Python program to run."}
    schema = {"type": "object", "properties": {"code": code}, "required": ["code"]}
    return Tool(tool.name, tool.description, schema)


def build_call(message: ParsedMessage) -> RenderedCall:
    """Return a call in ChatML's form. Raises ValueError if its arguments are not JSON."""
    assert message.recipient is not None
    if message.recipient == PYTHON:
        return RenderedCall(PYTHON, json.dumps({"code": message.text}, ensure_ascii=False))
    name = message.recipient.removeprefix(FUNCTIONS)
    # Written again, so that demonstrations have the spacing of the template.
    return RenderedCall(name, json.dumps(json.loads(message.text), ensure_ascii=False))


def call_recipient(call: RenderedCall) -> str:
    """Return the recipient of a call for environments."""
    return PYTHON if call.name == PYTHON else f"{FUNCTIONS}{call.name}"
