"""The table that ``gptoss eval`` prints."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from launch.control_characters import show_control_characters
from rl_loop.evaluation.statistics import compare, scores

Episodes = Sequence[dict[str, Any]]
"""Records of an evaluation, as its JSONL file holds them."""


def print_evaluation(episodes: Episodes, baseline: Episodes) -> None:
    """Print the statistics of an evaluation, and how its episodes ended.

    The table has a row per category and one for all, each cell with its 95 % interval. With a
    ``baseline`` there is a column for the difference to it."""
    rows = _group_by_category(episodes)
    table, columns = _build_table(rows, baseline)

    # Wide enough to keep whole rows in a pipe or a log, too.
    console = Console(width=40 + 24 * (columns + 1))
    console.print(table)
    for key in ("finish_reason", "format_error"):
        counts = Counter(episode[key] for episode in episodes if episode[key] is not None)
        if counts:
            listed = ", ".join(f"{name} {count}" for name, count in counts.most_common())
            console.print(show_control_characters(f"{key}: {listed}"), markup=False)


def _group_by_category(episodes: Episodes) -> dict[str, Episodes]:
    """Return the episodes of each category, and all of them if there is more than one category."""
    categories = sorted({episode["category"] for episode in episodes})
    rows: dict[str, Episodes] = {}
    for category in categories:
        rows[category] = [episode for episode in episodes if episode["category"] == category]
    if len(categories) != 1:
        rows["all"] = list(episodes)
    return rows


def _build_table(rows: dict[str, Episodes], baseline: Episodes) -> tuple[Table, int]:
    """Return the table and how many statistics it shows."""
    statistics = {category: scores(episodes) for category, episodes in rows.items()}
    # In the order of the first row that has them: pass@k depends on the samples of a category.
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
        shown = Text(show_control_characters(category))
        table.add_row(shown, str(len(tasks)), *cells)
    return table, len(columns)
