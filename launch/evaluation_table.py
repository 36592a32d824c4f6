"""Output of ``gptoss eval``."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from launch.control_characters import show_control_characters
from rl_loop.evaluation.chat_statistics import chat_statistics, compare_chats
from rl_loop.evaluation.statistics import accuracy_estimates, compare

Episodes = Sequence[dict[str, Any]]
"""Records of an evaluation, from its JSONL file."""


def print_evaluation(episodes: Episodes, baseline: Episodes) -> None:
    """Print the statistics of an evaluation and the counts of finish reasons.

    The table has a row per category and one for all, with 95% intervals.

    Args:
        episodes: evaluation to print.
        baseline: evaluation to compare with, which adds a column; empty for none.
    """
    rows = _group_by_category(episodes)
    table, columns = _build_table(rows, baseline)

    # Wide enough for whole rows in a pipe or a log.
    console = Console(width=40 + 24 * (columns + 1))
    console.print(table)
    _print_counts(console, episodes)


def print_chat_evaluation(turns: Episodes, baseline: Episodes) -> None:
    """Print the statistics of sampled turns of conversations, and the counts of finish reasons.

    The table has a row per kind of turns and one for all, with 95% intervals.

    Args:
        turns: evaluation to print.
        baseline: evaluation to compare with, which adds a column; empty for none.
    """
    columns = ("conversations", "turns", "correct", "function", "format errors", "perplexity")
    table = Table("category", *columns, box=None)
    if baseline:
        table.add_column("correct minus baseline")
    for category, chosen in _group_by_category(turns).items():
        if not chosen:
            continue
        statistics = chat_statistics(chosen)
        estimates = (
            statistics.correct,
            statistics.function,
            statistics.format_errors,
            statistics.perplexity,
        )
        cells = [str(statistics.conversations), str(statistics.turns)]
        cells += ["-" if estimate is None else str(estimate) for estimate in estimates]
        if baseline:
            change = compare_chats(chosen, baseline)
            cells.append("no common turn" if change is None else str(change))
        table.add_row(Text(show_control_characters(category)), *cells)

    console = Console(width=60 + 24 * len(columns))
    console.print(table)
    _print_counts(console, turns)


def _print_counts(console: Console, episodes: Episodes) -> None:
    """Print how often each finish reason and each format error occurred."""
    for key in ("finish_reason", "format_error"):
        counts = Counter(episode[key] for episode in episodes if episode[key] is not None)
        if counts:
            listed = ", ".join(f"{name} {count}" for name, count in counts.most_common())
            console.print(show_control_characters(f"{key}: {listed}"), markup=False)


def _group_by_category(episodes: Episodes) -> dict[str, Episodes]:
    """Return the episodes per category, and under "all" if there are several categories."""
    categories = sorted({episode["category"] for episode in episodes})
    rows: dict[str, Episodes] = {}
    for category in categories:
        rows[category] = [episode for episode in episodes if episode["category"] == category]
    # One category would repeat its row.
    if len(categories) != 1:
        rows["all"] = list(episodes)
    return rows


def _build_table(rows: dict[str, Episodes], baseline: Episodes) -> tuple[Table, int]:
    """Return the table and its number of statistics."""
    statistics = {category: accuracy_estimates(episodes) for category, episodes in rows.items()}
    # In the order of first appearance, because pass@k depends on a category's number of samples.
    columns = list(dict.fromkeys(name for values in statistics.values() for name in values))

    table = Table("category", "tasks", *columns, box=None)
    if baseline:
        table.add_column("minus baseline")

    for category, episodes in rows.items():
        tasks = {episode["task_id"] for episode in episodes}
        cells = [str(statistics[category].get(column, "-")) for column in columns]
        if baseline:
            change = compare(episodes, baseline)
            cells.append("no common task" if change is None else str(change))
        # Text instead of markup, because categories come from the data.
        shown = Text(show_control_characters(category))
        table.add_row(shown, str(len(tasks)), *cells)
    return table, len(columns)
