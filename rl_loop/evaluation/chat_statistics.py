"""Statistics of sampled turns of conversations, from the records of ``rl_loop.evaluation.chats``.

Conversations are independent. Turns of one conversation are not, so intervals are computed from the
sums of each conversation.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_loop.evaluation.statistics import MeanEstimate, estimate, normal_estimate
from rl_loop.tasks.chat_turns import ANSWERS, CALLS
from rl_loop.tasks.evaluation_records import is_correct

Records = Sequence[dict[str, Any]]

FIGURES = {CALLS: "tool_call_accuracy", ANSWERS: "answer_accuracy"}
"""Names of the accuracy of each kind of turns."""


@dataclass(frozen=True)
class ChatStatistics:
    """Statistics of turns, with 95% intervals over conversations."""

    turns: int
    conversations: int
    correct: MeanEstimate
    """Share of correct turns."""
    function: MeanEstimate
    """Share of turns that call the functions of the reference, or none if it is an answer."""
    format_errors: MeanEstimate
    """Share of malformed turns."""
    perplexity: MeanEstimate | None
    """exp(mean negative log-prob of the references' tokens). None if log-probs are unknown."""


def chat_statistics(records: Records) -> ChatStatistics:
    """Compute the statistics of at least one sampled turn."""
    conversations = _by_conversation(records)
    return ChatStatistics(
        turns=len({record["task_id"] for record in records}),
        conversations=len(conversations),
        correct=_share(conversations, is_correct),
        function=_share(conversations, lambda record: record["reward_parts"]["function"]),
        format_errors=_share(conversations, lambda record: record["format_error"] is not None),
        perplexity=_perplexity(conversations),
    )


def by_kind(records: Records) -> dict[str, Records]:
    """Return the records of tool calls and of answers, of all sources together."""
    kinds: dict[str, list[dict[str, Any]]] = {CALLS: [], ANSWERS: []}
    for record in records:
        # A category of one of several sources begins with the name of the source.
        kinds[next(kind for kind in kinds if record["category"].endswith(kind))].append(record)
    return {kind: chosen for kind, chosen in kinds.items() if chosen}


def chat_figures(records: Records) -> dict[str, Any]:
    """Return figures for a summary. NAME_interval is the 95% interval [low, high] of NAME."""
    if not records:
        return {}
    figures: dict[str, Any] = {}
    for name, value in _estimates(records).items():
        figures[name] = value.value
        figures[f"{name}_interval"] = [value.low, value.high]
    return figures | {"evaluated_turns": chat_statistics(records).turns}


def chat_metrics(records: Records) -> dict[str, float]:
    """Return the metrics of a validation."""
    if not records:
        return {}
    return {f"validation/{name}": value.value for name, value in _estimates(records).items()}


def _estimates(records: Records) -> dict[str, MeanEstimate]:
    estimates = {
        FIGURES[kind]: chat_statistics(chosen).correct for kind, chosen in by_kind(records).items()
    }
    everything = chat_statistics(records)
    estimates["format_errors"] = everything.format_errors
    if everything.perplexity is not None:
        estimates["perplexity"] = everything.perplexity
    return estimates


def compare_chats(records: Records, baseline: Records) -> MeanEstimate | None:
    """Estimate accuracy minus the accuracy of ``baseline`` on common turns. None without any."""
    earlier = _rates(baseline)
    gains: dict[str, list[float]] = defaultdict(list)
    conversations = {record["task_id"]: record.get("conversation") for record in records}
    for turn, rate in _rates(records).items():
        if turn in earlier:
            gains[str(conversations[turn])].append(rate - earlier[turn])
    if not gains:
        return None
    counts = [len(turns) for turns in gains.values()]
    means = [sum(turns) / len(turns) for turns in gains.values()]
    return normal_estimate(means, counts)


def _rates(records: Records) -> dict[str, float]:
    """Return the share of correct samples by turn."""
    samples: dict[str, list[bool]] = defaultdict(list)
    for record in records:
        samples[record["task_id"]].append(is_correct(record))
    return {turn: sum(correct) / len(correct) for turn, correct in samples.items()}


def _by_conversation(records: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    conversations: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        conversations[record["conversation"]].append(record)
    return conversations


def _share(
    conversations: Mapping[str, Records], value: Callable[[dict[str, Any]], float]
) -> MeanEstimate:
    """Estimate the mean of ``value`` over all records."""
    counts = [len(records) for records in conversations.values()]
    means = [sum(map(value, records)) / len(records) for records in conversations.values()]
    return estimate(means, counts)


def _perplexity(conversations: Mapping[str, Records]) -> MeanEstimate | None:
    tokens: list[int] = []
    losses: list[float] = []
    for records in conversations.values():
        # The reference of a turn counts once, however often the turn is sampled.
        turns = {record["task_id"]: record for record in records}.values()
        if any(turn["reference_log_prob"] is None for turn in turns):
            return None
        tokens.append(sum(turn["reference_tokens"] for turn in turns))
        losses.append(-sum(turn["reference_log_prob"] for turn in turns) / tokens[-1])
    loss = normal_estimate(losses, tokens)
    return MeanEstimate(_exp(loss.value), _exp(loss.low), _exp(loss.high), loss.tasks)


def _exp(value: float) -> float:
    """Return e to the power of ``value``, infinity if it is too large."""
    return math.exp(value) if value < 700 else math.inf
