"""Messages of scripted policies, for ``Environment.solve``."""

import json
from typing import Any

from rl_loop.chat.messages import ParsedMessage
from rl_loop.chat.tools import FUNCTIONS


def think(text: str) -> ParsedMessage:
    """Return a message on the channel ``analysis``."""
    return ParsedMessage("analysis", None, None, text)


def final(text: str) -> ParsedMessage:
    """Return a message with a final answer."""
    return ParsedMessage("final", None, None, text)


def function_call(name: str, /, **arguments: Any) -> ParsedMessage:
    """Return a message that calls one of the ``tools``.

    Example:
        >>> message = function_call("look_up", word="sink")
        >>> message.recipient, message.text
        ('functions.look_up', '{"word": "sink"}')
    """
    # Arguments are JSON text, as a policy samples them.
    text = json.dumps(arguments)
    return ParsedMessage("commentary", f"{FUNCTIONS}{name}", "<|constrain|>json", text)
