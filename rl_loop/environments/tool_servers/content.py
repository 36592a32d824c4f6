"""Conversion of MCP content to the text that the policy reads."""

from collections.abc import Mapping, Sequence
from typing import Any


def render_blocks(blocks: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of a result's ``content`` blocks, one line each.

    Blocks without text, such as images, become a short description in brackets.
    """
    return "\n".join(_piece(block) for block in blocks)


def _piece(block: Mapping[str, Any]) -> str:
    kind = str(block["type"])
    match kind:
        case "text":
            return str(block["text"])
        case "resource" if block["resource"].get("text") is not None:
            return str(block["resource"]["text"])
        case "resource_link":
            return f"[{block['name']}: {block['uri']}]"
    # The name depends on whether the block comes from ``mcp``'s objects or from JSON.
    media = block.get("mime_type") or block.get("mimeType") or kind
    return f"[{media}: cannot be shown]"
