"""Reads records in Harmony's own JSON as conversations."""

from typing import Any

from openai_harmony import DeveloperContent, Message, Role, SystemContent
from pydantic import ValidationError

from rl_loop.chat.open_calls import Numbered
from rl_loop.conversations.conversation import BUILTIN_NAMESPACES, Conversation, make_conversation
from rl_loop.conversations.errors import ConversationError
from rl_loop.conversations.record_values import json_type, read_list
from rl_loop.harmony.conversation import describe_message
from rl_loop.harmony.json_schema import harmony_schema


def read_harmony(record: dict[str, Any]) -> Conversation:
    """Read the messages of openai-harmony's ``Conversation.to_json``.

    System and developer messages at the beginning are rendered unchanged.
    """
    messages = read_list(record, "messages")
    system: Message | None = None
    developer_messages: list[Message] = []
    functions: set[str] = set()
    namespaces = set(BUILTIN_NAMESPACES)
    described = False

    text_messages: list[Numbered] = []
    for number, message in enumerate(messages):
        flat = _without_author(number, message)
        content = _rich_content(number, flat)
        if content is None:
            text_messages.append((number, flat))
            continue
        if text_messages or (isinstance(content, SystemContent) and number > 0):
            raise ConversationError(
                f"{describe_message(number, flat)}: system and developer content must come "
                "first. Later messages can have text only"
            )

        # The system message declares built-in tools, which may then be called.
        if isinstance(content, SystemContent):
            system = Message.from_role_and_content(Role.SYSTEM, content)
            namespaces |= set(content.tools or {})
            continue
        developer_messages.append(Message.from_role_and_content(Role.DEVELOPER, content))
        # If tools are described, only these functions may be called.
        for namespace in (content.tools or {}).values():
            described = True
            namespaces.add(namespace.name)
            functions |= {tool.name for tool in namespace.tools if namespace.name == "functions"}

    return make_conversation(
        text_messages,
        developer_messages=developer_messages,
        callable_functions=frozenset(functions) if described else None,
        namespaces=frozenset(namespaces),
        system=system,
    )


def _without_author(number: int, message: Any) -> dict[str, Any]:
    """Return a message with role and name at the top level. Harmony may have them in ``author``."""
    if not isinstance(message, dict):
        name = describe_message(number, message)
        raise ConversationError(f"{name}: a message is a JSON object, not {json_type(message)}")
    author = message.get("author")
    if author is None:
        return message
    if not isinstance(author, dict):
        raise ConversationError(f"message {number}: 'author' is {json_type(author)}, not an object")
    return {key: value for key, value in message.items() if key != "author"} | author


def _rich_content(number: int, message: dict[str, Any]) -> SystemContent | DeveloperContent | None:
    """Return the content of a system or developer message. None for a message of text."""
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    kinds = [part.get("type") for part in parts if isinstance(part, dict)]
    name = describe_message(number, message)

    reader: type[SystemContent] | type[DeveloperContent]
    if "system_content" in kinds:
        reader, expected = SystemContent, "system"
    elif "developer_content" in kinds:
        reader, expected = DeveloperContent, "developer"
    elif message.get("role") == "system":
        raise ConversationError(
            f"{name}: in Harmony's format, role 'system' needs content of type "
            "'system_content'. Give instructions the role 'developer'"
        )
    else:
        return None

    if message.get("role") != expected or len(parts) != 1:
        raise ConversationError(
            f"{name}: {kinds[0]!r} must be the only content of a message of role {expected!r}"
        )
    fields = {key: value for key, value in parts[0].items() if key != "type"}
    # pydantic would drop unknown keys, and their content would be lost.
    unknown = sorted(set(fields) - set(reader.model_fields))
    if unknown:
        raise ConversationError(f"{name}: {kinds[0]} has no key {unknown[0]!r}")
    try:
        content = reader.model_validate(fields)
    except ValidationError as error:
        mistake = error.errors()[0]
        place = ".".join(map(str, mistake["loc"]))
        raise ConversationError(f"{name}: {kinds[0]}.{place}: {mistake['msg']}") from None
    for namespace in (content.tools or {}).values():
        for tool in namespace.tools:
            tool.parameters = harmony_schema(tool.parameters)
    return content
