"""The table that ``gptoss eval`` prints."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from rl_loop.evaluation.statistics import compare, scores


def print_evaluation(records: Sequence[dict[str, Any]], baseline: Sequence[dict[str, Any]]) -> None:
    """One row per category and one for all, each cell with its 95 % interval; the difference to ``baseline`` if any."""
    categories = sorted({record["category"] for record in records})
    parts = {name: [r for r in records if r["category"] == name] for name in categories}
    rows = parts if len(parts) == 1 else parts | {"all": list(records)}
    columns = dict.fromkeys(name for part in rows.values() for name in scores(part))
    table = Table("category", "tasks", *columns, *(["minus baseline"] if baseline else []), box=None)
    for name, part in rows.items():
        found = scores(part)
        cells = [str(found.get(column, "-")) for column in columns]
        if baseline:
            change = compare(part, baseline)
            cells.append("no common task" if change is None else str(change))
        table.add_row(name, str(len({r["task_id"] for r in part})), *cells)
    console = Console(width=40 + 24 * (len(columns) + 1))  # whole rows in a pipe or a log, too
    console.print(table)
    for key in ("finish_reason", "format_error"):
        if counts := Counter(record[key] for record in records if record[key] is not None):
            console.print(f"{key}: " + ", ".join(f"{name} {count}" for name, count in counts.most_common()))
