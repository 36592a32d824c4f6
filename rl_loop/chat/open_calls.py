"""Calls that wait for their answers, in conversations that clients and data sets write."""

from collections.abc import Sequence
from dataclasses import dataclass

from rl_loop.chat.tools import FUNCTIONS


@dataclass
class OpenCall:
    """A call of the assistant that no tool has answered yet."""

    call_id: str | None
    recipient: str
    channel: str


def answered_call(
    open_calls: Sequence[OpenCall], call_id: str | None, name: str | None
) -> OpenCall:
    """Return the call that a tool's answer belongs to: the one of its id or of its name, else the
    only one.

    Raises ValueError if there is none, or if it cannot be told."""
    candidates = list(open_calls)
    if call_id is not None:
        candidates = [call for call in candidates if call.call_id == call_id]
    if name is not None:
        candidates = [call for call in candidates if call.recipient in (name, f"{FUNCTIONS}{name}")]

    if not candidates:
        description = "open call"
        if name:
            description += f" of {name}"
        if call_id is not None:
            description += f" with id {call_id!r}"
        raise ValueError(f"no {description} precedes this answer")

    # Several calls of one function without ids are answered in their order.
    if call_id is None and len({call.recipient for call in candidates}) > 1:
        raise ValueError(
            "several calls are open: say by name or tool_call_id which one this answers"
        )
    return candidates[0]
