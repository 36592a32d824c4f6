"""Names of metrics: those that the code writes, and those that docs/metrics.md explains."""

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from rl_loop.tracking.metrics import MetricName
from rl_loop.tracking.step_metrics import PER_TOKEN

ROOT = Path(__file__).resolve().parents[2]
PLACEHOLDER = "…"
PREFIXES = (*PER_TOKEN, "mismatch/", "distillation/", "finish/", "format_error/", "rollout/")
"""Beginnings of names in sums. Other keys of sums are no metrics, but divisors."""
NOT_METRICS = {"step", "time"}
"""Keys of a line in ``metrics.jsonl`` that are no metrics."""


@cache
def documented_metrics() -> frozenset[str]:
    """Return the names in the first cells of the page's tables, such as ``seconds/PHASE``."""
    page = (ROOT / "docs/metrics.md").read_text()
    cells = re.findall(r"^\| (`.*?)\s*\|", page, flags=re.M)
    return frozenset(name for cell in cells for name in re.findall(r"`([\w/]+)`", cell))


def undocumented_metrics(names: Iterable[str]) -> list[str]:
    """Return the names of a run's metrics that the page does not explain.

    A word in capitals on the page stands for any text.
    """
    patterns = [re.sub(r"[A-Z]+", ".+", name) for name in documented_metrics()]
    explained = re.compile("|".join(patterns))
    return sorted(name for name in {*names} - NOT_METRICS if not explained.fullmatch(name))


def written_metrics() -> set[str]:
    """Return the names in the code of rl_loop, with PLACEHOLDER for each value of an f-string.

    They are the first arguments of ``StepMetrics.add`` and ``add_mean``, and the keys of sums that
    an optimizer step returns.
    """
    names = set()
    for file in (ROOT / "rl_loop").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names |= {*_names_of_calls(node), *_names_of_sums(node)}
    return names


def _names_of_calls(node: ast.AST) -> Iterator[str]:
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("add", "add_mean")
        # Only the methods of StepMetrics have more than one argument.
        and len(node.args) > 1
    ):
        yield from _texts(node.args[0])


def _names_of_sums(node: ast.AST) -> Iterator[str]:
    keys: list[ast.expr | None] = []
    if isinstance(node, ast.Dict):
        keys = list(node.keys)
    elif isinstance(node, ast.Assign):
        keys = [target.slice for target in node.targets if isinstance(target, ast.Subscript)]
    for key in keys:
        is_named = isinstance(key, ast.Attribute)
        yield from (name for name in _texts(key) if is_named or name.startswith(PREFIXES))


def _texts(node: ast.expr | None) -> Iterator[str]:
    """Yield the text of a constant, an f-string or an attribute of MetricName."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        parts = [str(p.value) if isinstance(p, ast.Constant) else PLACEHOLDER for p in node.values]
        yield "".join(parts)
    elif isinstance(node, ast.Attribute) and hasattr(MetricName, node.attr):
        yield getattr(MetricName, node.attr)
