"""The prose counter finds the habits, leaves other text alone, and fails when a target is missed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.prose import (
    PACKAGE_TARGETS,
    Counting,
    Report,
    Totals,
    comment_passages,
    comment_pattern,
    load_terms,
    markdown_passages,
    python_passages,
)

ROOT = Path(__file__).resolve().parents[1]


def count_text(directory: Path, name: str, text: str) -> tuple[Totals, Report]:
    """Return the counts of one file, and the report."""
    file = directory / name
    file.write_text(text)
    counting = Counting(load_terms())
    counting.add_file(str(file))
    report = counting.report
    return next(iter([*report.code.values(), *report.markdown.values()])), report


@pytest.mark.parametrize(
    ("sentence", "rule"),
    [
        ("What the server sends is kept.", "opener"),
        ("The trainer keeps what the server sends.", "what"),
        ("The trainer is a process of its own.", "filler"),
        ("Nobody waits for the thread.", "term"),
        (f"The trainer {'really ' * 20}waits; the server sends.", "run_on"),
    ],
)
def test_counter_finds_each_habit(sentence: str, rule: str, tmp_path: Path) -> None:
    for name, text in (
        ("page.md", f"# Page\n\nA first sentence. {sentence}\n"),
        ("docstring.py", f'"""Summary.\n\n{sentence}\n"""\n'),
        ("comment.py", f"x = 1\n# {sentence}\n"),
        ("kernel.cu", f"int x;\n// {sentence}\n"),
        ("view.js", f"const x = 1;\n/** {sentence} */\n"),
        ("style.css", f"p {{}}\n/* {sentence} */\n"),
        ("run.yaml", f"x: 1\n# {sentence}\n"),
    ):
        totals, report = count_text(tmp_path, name, text)
        assert totals.hits[rule] == 1, name
        assert len(report.findings) == 1, name
        assert sentence[:30] in report.findings[0].text


@pytest.mark.parametrize(
    "text",
    [
        "What happens if a server dies?",
        "Of course, the trainer waits.",
        "Run `gptoss what` in a shell.",
        "See [the page](what-is-it.md).",
        "The trainer sends weights to the server.",
    ],
)
def test_counter_accepts_plain_sentences(text: str, tmp_path: Path) -> None:
    totals, report = count_text(tmp_path, "page.md", text)
    assert totals.words >= 3
    assert not report.findings


def test_python_passages_leave_out_data_and_directives() -> None:
    source = '''"""Module."""

TEXT = """What is data."""
print(
    """What is an argument."""
)


class Point:
    x: int
    """Attribute."""

    def f(self):
        """Function."""
        return "# what is in a string"  # noqa: E501


# First line,
# second line.
'''
    passages = python_passages(source)
    assert [(passage.line, passage.kind, passage.text) for passage in passages] == [
        (1, "docstring", "Module."),
        (11, "attribute", "Attribute."),
        (14, "docstring", "Function."),
        (18, "comment", "First line,\nsecond line."),
    ]


@pytest.mark.parametrize(
    ("name", "source", "expected"),
    [
        (
            "tile.cuh",
            'int a;  // A row.\nint b;  // A column.\n\n// Two\n// lines.\nauto url = "http://x";\n',
            [(1, "A row."), (2, "A column."), (4, "Two\nlines.")],
        ),
        (
            "chart.js",
            "/**\n * Draw.\n * @param {number} x of it\n */\nconst a = `//${b}`, c = '/* no */';\n// ----\n",
            [(1, "Draw.\n@param {number} x of it")],
        ),
        ("style.css", "/* Dark. */ a { background: url(//x) }\n", [(1, "Dark.")]),
        (
            "run.yaml",
            "# It isn't run.\n#   gptoss rl x\na: 'x # y'\nb: c#d  # in tokens\n",
            [(1, "It isn't run."), (4, "in tokens")],
        ),
        (
            "Makefile",
            "#!/bin/sh\n\n# Build.\nall: ; echo it's # done\n",
            [(3, "Build."), (4, "done")],
        ),
    ],
)
def test_comments_of_each_language_are_found(
    name: str, source: str, expected: list[tuple[int, str]]
) -> None:
    pattern = comment_pattern(name)
    assert pattern is not None
    found = [(passage.line, passage.text) for passage in comment_passages(source, pattern)]
    assert found == expected


def test_markdown_passages_leave_out_code_and_headings() -> None:
    source = "# What\n\n- item\n  of two lines\n\n| cell | 1 |\n|---|---|\n\n```\nwhat\n```\n\n    what\n"
    passages = markdown_passages(source)
    assert [(passage.line, passage.kind, passage.text) for passage in passages] == [
        (3, "paragraph", "item\nof two lines"),
        (6, "cell", "cell"),
    ]


def test_one_bad_package_fails_despite_a_good_total() -> None:
    report = Report()
    report.code["good"] = Totals(words=100_000)
    report.code["bad"] = Totals(words=1_000)
    report.code["bad"].hits["opener"] = 2
    assert report.missed_targets() == [
        f"code of bad: opener is 20.00, target {PACKAGE_TARGETS['opener']:g}"
    ]
    report.code["bad"].hits["opener"] = 0
    assert not report.missed_targets()


def test_check_exits_with_1_and_names_the_target(tmp_path: Path) -> None:
    page = tmp_path / "page.md"

    def check() -> subprocess.CompletedProcess[str]:
        program = [sys.executable, "scripts/prose.py", "--check", str(page)]
        return subprocess.run(program, cwd=ROOT, text=True, capture_output=True, check=False)

    page.write_text("The trainer sends weights.\n")
    assert check().returncode == 0
    page.write_text("What is sent is kept.\n")
    done = check()
    assert done.returncode == 1
    assert "Markdown: opener is 2000.00, target 5" in done.stdout
