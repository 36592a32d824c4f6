"""Matches tool outputs with the calls of a policy.

Harmony and ChatML have no ids of calls. A policy identifies the call of an output by its position,
so outputs are rendered in the order of their calls. Clients and data sets send them in any order.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_loop.chat.tools import FUNCTIONS

Numbered = tuple[int, dict[str, Any]]
"""Index of a message in its conversation, and the message."""


# With slots, a call is one object instead of two for the garbage collector.
@dataclass(eq=False, slots=True)
class OpenCall:
    """Call of the assistant whose output is missing."""

    call_id: str | None
    recipient: str
    channel: str
    is_skipped: bool = False
    """True if the conversation continued with a message other than the call's output."""


class UnmatchedToolOutputError(ValueError):
    """Tool output that belongs to no call, or to an ambiguous one."""

    def __init__(self, index: int, message: str) -> None:
        """Create the error. ``index`` counts consecutive tool outputs from 0."""
        super().__init__(message)
        self.index = index


def parse_calls(message: Mapping[str, Any]) -> list[OpenCall]:
    """Return the calls in an assistant message. Malformed calls are left out."""
    calls: list[OpenCall] = []
    entries = message.get("tool_calls")
    for entry in entries if isinstance(entries, list) else ():
        # Some data sets leave out the nested object. Names may have the prefix of recipients.
        function = entry.get("function") or entry if isinstance(entry, dict) else None
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            name = function["name"].removeprefix(FUNCTIONS)
            calls.append(OpenCall(entry.get("id"), f"{FUNCTIONS}{name}", "commentary"))
    return calls


def match_outputs(
    calls: Sequence[OpenCall], outputs: Sequence[Mapping[str, Any]], *, by_index: bool = False
) -> list[OpenCall]:
    """Return the call of each tool output.

    Outputs are matched by id (``tool_call_id``), then by function (``name``). Outputs with neither
    belong to the remaining calls, in order.

    Args:
        calls: open calls, oldest first.
        outputs: consecutive messages of tools.
        by_index: allow outputs without id and name if calls of different functions are open.

    Raises:
        UnmatchedToolOutputError: if a call is missing or ambiguous.
    """
    # Ids of outputs are useless if the calls were recorded without ids.
    has_ids = any(call.call_id is not None for call in calls) or not by_index
    claims = [_read_claim(output, has_ids) for output in outputs]

    # An output belongs to the latest turn, unless it names a call that the conversation skipped.
    left = [*(c for c in calls if not c.is_skipped), *(c for c in calls if c.is_skipped)]
    matched: dict[int, OpenCall] = {}
    # The most specific outputs choose first.
    for index in sorted(range(len(outputs)), key=lambda i: claims[i].rank):
        try:
            call = claims[index].choose(left, by_index)
        except ValueError as error:
            raise UnmatchedToolOutputError(index, str(error)) from None
        left.remove(call)
        matched[index] = call
    return [matched[index] for index in range(len(outputs))]


def in_call_order(
    calls: Sequence[OpenCall], outputs: Sequence[Numbered], *, by_index: bool = False
) -> list[tuple[Numbered, OpenCall]]:
    """Sort consecutive outputs by the order of their calls. Arguments as in ``match_outputs``.

    Raises:
        UnmatchedToolOutputError: as in ``match_outputs``. Also if a call of a function has an output
            but an earlier call of the same turn and function has none.
    """
    matched = match_outputs(calls, [message for _, message in outputs], by_index=by_index)
    index_of = {id(call): index for index, call in enumerate(calls)}
    order = sorted(range(len(outputs)), key=lambda i: index_of[id(matched[i])])

    # Rendered outputs of calls of one function differ only in their order.
    matched_ids = {id(call) for call in matched}
    missing: set[str] = set()
    for call in calls:
        if id(call) not in matched_ids:
            if not call.is_skipped:
                missing.add(call.recipient)
        elif call.recipient in missing:
            raise UnmatchedToolOutputError(
                matched.index(call),
                f"an earlier call of {call.recipient} has no tool output, but outputs of calls "
                "with the same name are matched by their order. Send the outputs of all calls "
                "together",
            )
    return [(outputs[i], matched[i]) for i in order]


def with_outputs_in_order(
    messages: Iterable[dict[str, Any]], earlier: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, Any], ...]:
    """Return a conversation with tool outputs in the order of their calls.

    Outputs that cannot be matched keep their positions. ``earlier`` are the preceding messages.
    """
    ordered: list[dict[str, Any]] = []
    outputs: list[Numbered] = []
    calls = parse_calls(earlier[-1]) if earlier else []

    def take_outputs() -> None:
        try:
            ordered.extend(message for (_, message), _ in in_call_order(calls, outputs))
        # The rendering raises the error, which then has the position of the message.
        except UnmatchedToolOutputError:
            ordered.extend(message for _, message in outputs)
        outputs.clear()

    for message in messages:
        if message["role"] == "tool":
            outputs.append((len(outputs), message))
            continue
        take_outputs()
        calls = parse_calls(message)
        ordered.append(message)
    take_outputs()
    return tuple(ordered)


@dataclass(frozen=True)
class _Claim:
    """Call that a tool output names."""

    call_id: str | None
    name: str | None

    @property
    def rank(self) -> int:
        return 0 if self.call_id is not None else 1 if self.name is not None else 2

    def choose(self, calls: Sequence[OpenCall], by_index: bool) -> OpenCall:
        """Return one of ``calls``. Raises ValueError if none fits or several do."""
        candidates = list(calls)
        # Ids are unique in a conversation. Names are not: several calls of a function may be open.
        if self.call_id is not None:
            candidates = [call for call in candidates if call.call_id == self.call_id]
        if self.name is not None:
            named = (self.name, f"{FUNCTIONS}{self.name}")
            candidates = [call for call in candidates if call.recipient in named]

        if not candidates:
            description = "open call"
            if self.name:
                description += f" of {self.name}"
            if self.call_id is not None:
                description += f" with id {self.call_id!r}"
            raise ValueError(f"no {description} precedes this tool output")

        # Without an id, calls of one function are answered in order. Calls of two would be a
        # guess.
        is_clear = by_index or self.call_id is not None
        if not is_clear and len({call.recipient for call in candidates}) > 1:
            raise ValueError(
                "several calls have no tool output yet. Set name or tool_call_id to the call of "
                "this output"
            )
        return candidates[0]


def _read_claim(output: Mapping[str, Any], has_ids: bool) -> _Claim:
    call_id, name = output.get("tool_call_id"), output.get("name")
    return _Claim(
        call_id if has_ids and call_id is not None else None,
        name if isinstance(name, str) and name else None,
    )
