"""Turns of the assistant in held-out conversations, as tasks of one turn each."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from megatron_gptoss.samples import TrainingSamples
from rl_loop.chat.codec import ChatCodec
from rl_loop.chat.messages import FormatError
from rl_loop.chat.turn_content import TurnContent
from rl_loop.environments import Task

ENVIRONMENT = "rl_loop.environments.chat_turn:ChatTurnEnvironment"
CALLS, ANSWERS = "tool calls", "answers"
"""Kinds of turns, by their reference."""


@dataclass(frozen=True)
class ChatTurn:
    """One turn of a conversation."""

    task: Task
    conversation: str
    """Name of the conversation: its file and line."""
    sample: int
    """Index of the sample with the turn and its history."""
    start: int
    """First token of the turn in its sample."""
    end: int
    """End of the turn in its sample."""

    @property
    def has_calls(self) -> bool:
        """True if the reference calls tools."""
        return bool(self.task.metadata["reference"]["calls"])


@dataclass(frozen=True)
class HeldOutChats:
    """Turns of held-out conversations, with the samples that have them."""

    turns: list[ChatTurn]
    samples: TrainingSamples
    """Whole conversations. The turns are in the loss."""
    cut_off_turns: int
    """Turns that are left out, because they were cut off."""

    @property
    def conversations(self) -> int:
        """Number of conversations."""
        return len({turn.conversation for turn in self.turns})

    def reference_log_probs(self, log_probs: np.ndarray) -> list[float]:
        """Return the log-prob of each turn's reference, in nats.

        Args:
            log_probs: log-probs of the samples' tokens, [tokens]. Those of first tokens are unused.
        """
        offsets = self.samples.offsets
        return [
            float(
                log_probs[offsets[turn.sample] + turn.start : offsets[turn.sample] + turn.end].sum(
                    dtype=np.float64
                )
            )
            for turn in self.turns
        ]


def held_out_chats(
    validation: Mapping[str, TrainingSamples], codec: ChatCodec, conversations: int
) -> HeldOutChats:
    """Return the turns of the first conversations of every source.

    Args:
        validation: samples by source. A run of tokens in the loss is a turn of the assistant.
        codec: chat format of the samples.
        conversations: maximum number of conversations per source.
    """
    turns: list[ChatTurn] = []
    used: list[dict[str, np.ndarray]] = []
    names: list[str] = []
    cut_off_turns = 0
    for source, samples in validation.items():
        prefix = f"{source}: " if len(validation) > 1 else ""
        # Number of turns of each conversation so far. A conversation can have several samples.
        numbers = dict.fromkeys(list(dict.fromkeys(samples.names))[:conversations], 0)
        rows = zip(samples.names, samples.rows("token_ids"), samples.rows("loss_mask"), strict=True)
        for name, ids, mask in rows:
            if name not in numbers:
                continue

            token_ids = ids.tolist()
            for start, end in _runs(mask):
                reference = _read_reference(token_ids, start, end, codec)
                if reference is None:
                    cut_off_turns += 1
                    continue

                numbers[name] += 1
                task_name = f"{name}, turn {numbers[name]}"
                task = _task(task_name, prefix, token_ids, start, reference)
                turns.append(ChatTurn(task, name, len(used), start, end))

            used.append({"token_ids": ids, "loss_mask": mask})
            names.append(name)
    return HeldOutChats(turns, TrainingSamples.join(used, names), cut_off_turns)


def _task(name: str, prefix: str, token_ids: list[int], start: int, reference: TurnContent) -> Task:
    """Return the task of one turn.

    Args:
        name: name of the task.
        prefix: beginning of the task's category.
        token_ids: tokens of the whole sample. The tasks of a sample share them.
        start: first token of the turn.
        reference: content of the turn.
    """
    kind = CALLS if reference.calls else ANSWERS
    metadata = {
        "category": prefix + kind,
        "token_ids": token_ids,
        "prompt_tokens": start,
        "reference": reference.to_json(),
    }
    return Task(name, [], str(reference), ENVIRONMENT, metadata)


def _read_reference(ids: list[int], start: int, end: int, codec: ChatCodec) -> TurnContent | None:
    """Return the content of a turn; None if its beginning or its end is missing.

    ``finish_reason: length`` and ``data.too_long: truncate`` cut turns off.
    """
    parsed = codec.parse(ids[start:end])
    if start == 0 or isinstance(parsed, FormatError):
        return None
    return TurnContent.of(parsed)


def _runs(mask: np.ndarray) -> list[tuple[int, int]]:
    """Return the ranges [start, end) of a mask in which it is True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]
