"""Renders developer messages of any length in linear time.

openai-harmony tokenizes the text of a message as a whole and holds the interpreter lock. Its time
is quadratic in the longest word. Therefore it gets only short descriptions of single functions, and
long words are inserted afterwards. The text is the same as openai-harmony's. It is tokenized in
parts (``rl_loop.harmony.bounded_encoding``).
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from openai_harmony import DeveloperContent, Message, Role, ToolDescription

from rl_loop.harmony.vocabulary import harmony_encoding

SHORT_CHARACTERS = 8192
"""Maximum length of a message that openai-harmony renders within 1-2 ms."""
LONG_WORD = re.compile(r"\S{256,}|[^\S\r\n]{256,}")
"""Text within a line for which byte-pair encoding is slow."""
LONG_RUN = re.compile(r"\S{256,}|\s{256,}")
"""Text across lines for which byte-pair encoding is slow.

Functions are described line by line, but instructions are not.
"""
FUNCTIONS_BEGIN = "# Tools\n\n## functions\n\nnamespace functions {\n\n"
FUNCTIONS_END = "} // namespace functions"


def takes_long(messages: Sequence[Message]) -> bool:
    """Return True if openai-harmony would render messages slowly."""
    size = 0
    for message in messages:
        for part in message.content:
            text = getattr(part, "text", None)
            # Contents of system and developer messages have no text. Their repr contains all their
            # texts.
            text = repr(part) if text is None else text
            size += len(text)
            if size > SHORT_CHARACTERS or LONG_RUN.search(text):
                return True
    return False


def developer_text(content: DeveloperContent) -> str | None:
    """Return the text of a developer message as openai-harmony writes it.

    Returns None if it describes tools other than functions.
    """
    parts: list[str] = []
    if content.instructions:
        parts.append(f"# Instructions\n\n{content.instructions}")
    namespaces = content.tools or {}
    if set(namespaces) - {"functions"}:
        return None
    if "functions" in namespaces:
        namespace = namespaces["functions"]
        # Only functions are reproduced here. openai-harmony renders everything else.
        if namespace.description:
            return None
        described = "".join(map(_function_text, namespace.tools))
        parts.append(f"{FUNCTIONS_BEGIN}{described}{FUNCTIONS_END}")
    return "\n\n".join(parts)


def _function_text(tool: ToolDescription) -> str:
    """Return the description of one function as openai-harmony writes it."""
    words: list[str] = []
    written = json.dumps([tool.name, tool.description, tool.parameters], ensure_ascii=False)
    # A run of private-use characters that is longer than any run in the description.
    mark = "\ue000"
    while mark in written:
        mark += "\ue000"

    def shorten(match: re.Match[str]) -> str:
        words.append(match.group())
        return f"{mark}{len(words) - 1}\ue001"

    short = ToolDescription.new(
        tool.name,
        _replace_texts(tool.description, shorten),
        _replace_texts(tool.parameters, shorten),
    )
    content = DeveloperContent.new().with_function_tools([short])
    message = Message.from_role_and_content(Role.DEVELOPER, content)
    text = harmony_encoding().decode(harmony_encoding().render(message))
    # Keep only the function, because the caller writes the frame around all of them.
    text = text.partition(FUNCTIONS_BEGIN)[2].rpartition(FUNCTIONS_END)[0]
    return re.sub(f"{mark}(\\d+)\ue001", lambda match: words[int(match.group(1))], text)


def _replace_texts(value: Any, shorten: Any) -> Any:
    """Return a JSON value with its long words replaced."""
    match value:
        case str():
            return LONG_WORD.sub(shorten, value)
        case dict():
            return {
                _replace_texts(k, shorten): _replace_texts(v, shorten) for k, v in value.items()
            }
        case list():
            return [_replace_texts(item, shorten) for item in value]
    return value
