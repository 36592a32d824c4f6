"""Turns of one session as a forest. The conversation that a client repeats identifies a turn.

A client sends its whole conversation with every request, as text. Stored tokens replace the longest
prefix that was sampled or rendered before, and only the messages after it are rendered. Therefore
no sampled token is tokenized again. A conversation that differs (other tools, an edited or
summarized history, a sub-agent's prompt) begins another tree, or a branch at the difference.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from rl_loop.chat.open_calls import with_outputs_in_order
from rl_loop.data.trajectory import Trajectory
from rl_loop.gateway.errors import ApiError, invalid_request
from rl_loop.gateway.node import ForestPosition, TurnNode
from rl_loop.gateway.parameters import MAX_MESSAGES
from rl_loop.gateway.raw_prompt import RawPrompt
from rl_loop.gateway.request import (
    MessageDigest,
    TurnRequest,
    digest_of_calls,
    raw_prefix_keys,
)
from rl_loop.rollout.episode_draft import EpisodeDraft

MAX_TURN_BYTES = 256 << 20
"""Maximum bytes of a session's turns if old turns are dropped."""
MAX_SORTED_PAIRS = 16_384
"""Maximum pairs of a tool output and an open call for which outputs are sorted on the event
loop."""


class TurnForest:
    """The turns of one session."""

    def __init__(self, max_stored_turns: int | None = None) -> None:
        """Make an empty forest.

        Args:
            max_stored_turns: number of turns to keep. Older turns can neither be continued nor
                trained on, and turns beyond MAX_TURN_BYTES are dropped, too. None to keep all.
        """
        self._max_stored_turns = max_stored_turns
        self._memory_bytes = 0
        self._nodes: dict[str, TurnNode] = {}
        """Turns by response id, in the order of their addition."""
        self._by_key: dict[bytes, TurnNode] = {}
        """Newest turn of every conversation that can continue."""
        self._completed: Counter[int] = Counter()
        """Number of completions by ``TurnNode.completed_bytes``."""
        self._by_fingerprint: dict[bytes, list[TurnNode]] = {}
        """Answers to equal requests, newest last."""
        self._by_call: dict[str, TurnNode] = {}
        """Turn that made a call, by the id of the call."""

    def __len__(self) -> int:
        """Return the number of stored turns, including turns with a format error."""
        return len(self._nodes)

    @property
    def nodes(self) -> list[TurnNode]:
        """All turns, in the order of their addition."""
        return list(self._nodes.values())

    @property
    def leaves(self) -> list[TurnNode]:
        """Last turns of all conversations, in the order of their addition."""
        return [node for node in self._nodes.values() if node.is_leaf]

    def node(self, response_id: str) -> TurnNode:
        """Return the turn of a response. Raises ApiError if this session has none."""
        node = self._nodes.get(response_id)
        # The client has no id of a malformed turn, because it got an error instead.
        if node is None or not node.is_stored or node.format_error is not None:
            raise ApiError(
                404,
                "response_not_found",
                f"this session has no response {response_id!r}",
                parameter="previous_response_id",
            )
        return node

    def has_response(self, response_id: str) -> bool:
        """Return True if one of the turns is the response of this id."""
        return response_id in self._nodes

    def answers(self, fingerprint: bytes) -> Sequence[TurnNode]:
        """Return the answers to requests with the same fingerprint, newest last."""
        return self._by_fingerprint.get(fingerprint, ())

    # ---- growing

    def find_completion(self, prompt: RawPrompt) -> ForestPosition:
        """Find the longest completion that a prompt continues.

        Args:
            prompt: prompt of a completion.
        """
        lengths = sorted(length for length in self._completed if length <= len(prompt.content))
        parent = None
        for key in raw_prefix_keys(prompt, lengths):
            parent = self._by_key.get(key, parent)
        return ForestPosition(parent, (), (), [], (), 0)

    def find(self, request: TurnRequest) -> ForestPosition:
        """Find the longest stored prefix of a request's conversation.

        Raises:
            ApiError: the request refers to a response that this session does not have.
        """
        previous: TurnNode | None = None
        conversation, digests = request.messages, request.digests
        if request.previous_id is not None:
            previous = self.node(request.previous_id)
            conversation, digests = _find_continued(previous, request)
            if len(conversation) > MAX_MESSAGES:
                message = f"the conversation has more than {MAX_MESSAGES} messages"
                raise invalid_request(message, "previous_response_id")

        everything = (*request.head, *conversation)
        all_digests = (*request.head_digests, *digests)
        keys = request.conversation_keys(all_digests)
        parent = None
        reused = 0
        # At least one message has to be new.
        for length in range(len(everything) - 1, 0, -1):
            parent = self._by_key.get(keys[length])
            # Answers can have the same text and other hidden reasoning. The id distinguishes them.
            # A client that names a response means this turn, even if a newer one has the same
            # text.
            if previous is not None and previous.key == keys[length]:
                parent = previous
            if parent is not None:
                reused = length
                break

        new = zip(everything[reused:], all_digests[reused:], strict=True)
        return ForestPosition(
            parent=parent,
            conversation=conversation,
            digests=digests,
            keys=keys,
            new_messages=tuple(self._with_thinking(*message) for message in new),
            first_number=max(0, reused - len(request.head)),
        )

    def _with_thinking(self, message: dict[str, Any], digest: MessageDigest) -> dict[str, Any]:
        """Return a message with the stored thinking if it is a turn with calls of this session."""
        # Clients need not repeat thinking. The policy needs it until its calls have led to an
        # answer, even if the conversation is rendered again.
        calls = message.get("tool_calls") if message["role"] == "assistant" else None
        node = self._by_call.get(calls[0].get("id")) if calls else None
        if node is None or not node.answer.reasoning:
            return message
        if digest_of_calls(digest) != digest_of_calls(node.digest):
            return message  # An edited turn.
        return message | {"thinking": node.answer.reasoning}

    def add(self, node: TurnNode) -> None:
        """Store a turn, and drop the oldest turns above the limits of number and memory."""
        self._nodes[node.response_id] = node
        # Two conversations may continue from one turn. Each ends in its own leaf.
        if node.parent is not None:
            node.parent.is_leaf = False
        # The client gets no answer to a malformed turn, so no request can continue it.
        if node.format_error is None:
            self._by_fingerprint.setdefault(node.fingerprint, []).append(node)
            # A newer turn with the same conversation replaces the older one.
            self._by_key[node.key] = node
            if node.completed_bytes is not None:
                self._completed[node.completed_bytes] += 1
            for call in node.answer.calls:
                self._by_call[call.call_id] = node

        self._memory_bytes += node.memory_bytes
        if self._max_stored_turns is None:
            return
        # The newest turn stays, even if it alone exceeds the limit of bytes.
        while len(self) > self._max_stored_turns or (
            len(self) > 1 and self._memory_bytes > MAX_TURN_BYTES
        ):
            self._drop(next(iter(self._nodes.values())))

    def _drop(self, node: TurnNode) -> None:
        """Drop a turn, so that no request can continue it. Later turns keep its tokens."""
        del self._nodes[node.response_id]
        if node.completed_bytes is not None:
            self._completed[node.completed_bytes] -= 1
            if self._completed[node.completed_bytes] == 0:
                del self._completed[node.completed_bytes]
        self._memory_bytes -= node.memory_bytes
        # A newer turn may have the same key.
        if self._by_key.get(node.key) is node:
            del self._by_key[node.key]
        for call in node.answer.calls:
            self._by_call.pop(call.call_id, None)
        equal = self._by_fingerprint.get(node.fingerprint, [])
        if node in equal:
            equal.remove(node)
        if not equal:
            self._by_fingerprint.pop(node.fingerprint, None)

    # ---- for training

    def trajectories(
        self, task_id: str, decode: Callable[[Sequence[int]], str]
    ) -> list[tuple[TurnNode, Trajectory]]:
        """Return a trajectory for every leaf, in the order in which the leaves were sampled.

        Every sampled token has the mask True in exactly one trajectory. Turns that two leaves share
        are trained on with the first leaf, and are context of the second. For this, truncated
        leaves come after all others. The caller sets outcomes and rewards.
        """
        leaves = self.leaves
        # Complete leaves claim shared turns first, so that masking a truncated leaf does not lose
        # them.
        trained: set[TurnNode] = set()
        fresh_of: dict[TurnNode, list[TurnNode]] = {}
        for leaf in sorted(leaves, key=lambda leaf: leaf.was_truncated):
            # A turn is trained on together with all turns before it, so these are the path's last.
            fresh_of[leaf] = [node for node in leaf.path() if node not in trained]
            trained.update(fresh_of[leaf])

        trajectories: list[tuple[TurnNode, Trajectory]] = []
        for leaf in leaves:
            path = leaf.path()
            fresh = fresh_of[leaf]
            shared = path[: len(path) - len(fresh)]
            draft = _draft(task_id, shared, fresh, decode)
            trajectory = draft.to_trajectory()
            trajectory.finish_reason = leaf.finish_reason
            trajectories.append((leaf, trajectory))
        return trajectories


def _find_continued(
    previous: TurnNode, request: TurnRequest
) -> tuple[tuple[dict[str, Any], ...], tuple[MessageDigest, ...]]:
    """Return the messages up to a request that continues a stored response, and their digests."""
    # Tool outputs have no ids in a prompt, but a client may send them in any order. Outputs of the
    # request's calls are sorted already. The first outputs are those of the calls of ``previous``.
    messages = request.messages
    first = next((i for i, m in enumerate(messages) if m["role"] != "tool"), len(messages))
    # By identity: sorting returns the same objects, and a digest takes long for a long message.
    digest_of = dict(zip(map(id, messages), request.digests, strict=True))
    if first * len(previous.open_calls) <= MAX_SORTED_PAIRS:
        messages = (*with_outputs_in_order(messages[:first], previous.messages), *messages[first:])
    digests = tuple(digest_of[id(message)] for message in messages)
    return (*previous.messages, *messages), (*previous.digests, *digests)


def _draft(
    task_id: str,
    shared: Sequence[TurnNode],
    fresh: Sequence[TurnNode],
    decode: Callable[[Sequence[int]], str],
) -> EpisodeDraft:
    """Join the tokens of one path. ``shared`` has the turns that are only context."""
    draft = EpisodeDraft(task_id)
    context = shared[-1].token_ids() if shared else []
    # Each turn holds only the routes of its new tokens, so all turns of the path contribute.
    for node in shared:
        draft.append_routes(node.sampled.routed_experts)

    for node in fresh:
        # Everything before the first turn to train on is its prompt.
        if node is fresh[0]:
            prompt = [*context, *node.new_ids]
            draft.append("prompt", prompt, decode(prompt))
        else:
            draft.note_reuse(node.sampled)
            # A completion may continue directly behind a truncated one.
            if node.new_ids:
                new_ids = node.new_ids
                draft.append(node.new_role, new_ids, decode(new_ids), time=node.client_time)

        sampled_ids = node.sampled.output_ids
        start = len(draft)
        draft.append(
            "assistant", sampled_ids, decode(sampled_ids), node.sampled, node.sampling_time
        )
        if node.is_constrained:
            draft.constrained.append((start, len(draft)))
        draft.tool_calls += len(node.answer.calls)
    return draft
