"""Form of the results pages: a conclusion, few caveats, and tables whose rows can be read alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs/performance").glob("*.md"))
MOST_CAVEATS = 3
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def tables(page: Path) -> Iterator[list[list[str]]]:
    """Yield the tables of a page as lists of rows of cells, without the line below the header."""
    for block in re.findall(r"(?:^\|.*\n)+", page.read_text(), flags=re.M):
        lines = [line.strip("|").split("|") for line in block.splitlines()]
        yield [[cell.strip() for cell in line] for line in (lines[0], *lines[2:])]


@pages
def test_results_begin_with_a_conclusion(page: Path) -> None:
    _, conclusion, *_ = page.read_text().split("\n\n")
    sentences = re.findall(r"[.!](?:\s|$)", conclusion)
    assert len(sentences) >= 2
    assert re.search(r"\d", conclusion), "a conclusion without a figure"


@pages
def test_results_have_few_caveats(page: Path) -> None:
    _, _, caveats = page.read_text().partition("\n## Caveats\n")
    assert len(re.findall(r"^\d+\. ", caveats, flags=re.M)) <= MOST_CAVEATS


@pages
def test_rows_of_results_can_be_read_alone(page: Path) -> None:
    for header, *rows in tables(page):
        assert all(header), f"a column without a name: {header}"
        assert len(set(header)) == len(header), f"two columns with one name: {header}"
        for row in rows:
            assert all(row), f"an empty cell: {row}"
            assert "the same" not in " ".join(row), row
            two_values = [cell for cell in row if re.match(r"[\d.,]+ / [\d.,]+$", cell)]
            assert not two_values, f"two values in one cell: {row}"


@pages
def test_tables_of_results_have_one_kind_of_gpu(page: Path) -> None:
    for table in tables(page):
        # Settings are not measured.
        if "Appended settings" in table[0]:
            continue
        text = " ".join(" ".join(row) for row in table)
        assert not ("H100" in text and "H200" in text), table[0]
