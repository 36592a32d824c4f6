"""Counts habits that make prose hard to read, in docstrings, comments and Markdown.

    python scripts/prose.py                    # tables of the whole tree
    python scripts/prose.py --worst 50 rl_loop # the worst sentences of one package
    python scripts/prose.py --list term        # every sentence with a private term
    python scripts/prose.py --check            # exit with status 1 if a target is missed

Comments are those of Python, CUDA, C++, JavaScript, CSS, YAML, TOML, shell, Makefile and Dockerfile. Rates are hits per
10,000 words, so that packages of different sizes compare. Code blocks, headings and inline code are not counted.
``prose_terms.txt`` holds the private terms and their replacements.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[1]
TERMS = Path(__file__).with_name("prose_terms.txt")

LONG_SENTENCE = 30
"""Words above which a sentence counts as long."""
RUN_ON = 20
"""Words above which a semicolon makes a sentence a run-on."""
LONG_CELL = 25
"""Words above which a table cell counts as long."""
MIN_SENTENCE = 3
"""Words below which a fragment is left out of the statistics of sentence length."""

TARGETS: dict[str, dict[str, float]] = {
    "code": {
        "opener": 5,
        "what": 8,
        "filler": 2,
        "term": 6,
        "run_on": 20,
        "median_words": 11,
        "share_long": 0.03,
        "of_attributes": 0,
        "long_cell": 0,
    },
    "Markdown": {
        "opener": 5,
        "what": 10,
        "filler": 2,
        "term": 5,
        "run_on": 20,
        "median_words": 13,
        "share_long": 0.07,
        "of_attributes": 0,
        "long_cell": 2,
    },
}
"""Upper bounds of the totals: a little above the worst of seven projects of the same field."""

PACKAGE_TARGETS: dict[str, float] = {"opener": 8, "what": 12}
"""Upper bounds of each package, so that a good total hides no bad package."""

SKIPPED_DIRECTORIES = {
    "venv",
    "node_modules",
    "__pycache__",
    "build",
    "dist",
    "runs",
    "models",
    "site-packages",
    "third_party",
}
"""Directories without prose of this project. Hidden directories are skipped, too."""

RULES = {
    # A clause where a noun or a verb belongs. Questions are fine.
    "opener": re.compile(r"^(?:What|Of(?! course)|Whether|Whoever|Says|Tells)\b(?![^.]*\?)"),
    # A relative pronoun in place of a noun: "what is sampled" for "the sampled tokens".
    "what": re.compile(r"(?<!^)\bwhat\b(?! if\b)(?!'s)|\bwhoever\b|\bwhat is to be\b"),
    "filler": re.compile(
        r"\b(?:meanwhile|beside|besides|apart|anew|by itself|by themselves|of their own"
        r"|of its own|of one's own|of ours|of our own|for ever|further on)\b",
        re.I,
    ),
}

WEIGHTS = {"opener": 3.0, "what": 2.0, "filler": 2.0, "run_on": 1.0, "term": 1.0}
"""Weight of a hit in the score that orders the worst sentences."""

COLUMNS = {
    "words": "words",
    "opener": "opener",
    "what": "what",
    "filler": "filler",
    "term": "term",
    "run_on": "run-on",
    "median_words": "median",
    "share_long": ">30",
    "of_attributes": '"Of" attr',
    "long_cell": "long cell",
}

# Strings and comments of Python source. Short strings match first, so that a # in them is no comment.
_TOKEN = re.compile(
    r"""(?P<triple>[rRuUbBfF]{0,2}(?:\"\"\"(?:\\.|[^\\])*?\"\"\"|'''(?:\\.|[^\\])*?'''))"""
    r"""|[rRuUbBfF]{0,2}"(?:\\.|[^"\\\n])*"|[rRuUbBfF]{0,2}'(?:\\.|[^'\\\n])*'"""
    r"""|(?P<comment>\#[^\n]*)""",
    re.S,
)
# In other languages: strings, in which no comment can begin, and comments.
_STRING = r"\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'"
_C = re.compile(rf"{_STRING}|(?P<comment>/\*.*?\*/|//[^\n]*)", re.S)
_CSS = re.compile(rf"{_STRING}|(?P<comment>/\*.*?\*/)", re.S)
# A template of JavaScript can hold // in a URL.
_JAVASCRIPT = re.compile(rf"`(?:\\.|[^`\\])*`|{_C.pattern}", re.S)
# An apostrophe inside a word begins no string, and "#" after other text no comment.
_HASH = re.compile(rf"(?<!\w)(?:{_STRING})|(?<!\S)(?P<comment>\#[^\n]*)")
COMMENTS = {
    **dict.fromkeys((".cu", ".cuh", ".cpp", ".h"), _C),
    ".css": _CSS,
    ".js": _JAVASCRIPT,
    **dict.fromkeys((".yaml", ".toml", ".sh", "Makefile", "Dockerfile"), _HASH),
}
"""Pattern of the comments of a language, by suffix or name of the file."""
_COMMENT_MARKS = re.compile(r"^[ \t]*(?:/\*+|//+|\*+/?|\#+)[ \t]?|[ \t]*\*/$", re.M)
_DIRECTIVE = re.compile(
    r"#\s*(?:noqa|type:|fmt:|pragma|pylint|mypy|ruff|!|-\*-)|(?:\#|//|/\*)[-=\s#/*]*$"
)
# Commands in comments are indented.
_NO_PROSE = re.compile(rf"{_DIRECTIVE.pattern}|\#[ ]{{3}}")
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"')\]`*]*\s+(?=[\"'(\[`*]*[A-Z0-9`])")
# Blank lines, list items, entries of "Args:" and lines of an aligned listing end a sentence.
_BLOCK = re.compile(
    r"(\n\s*\n|\n\s*[-*]\s|\n(?=\s*[\w*`, ]{1,40}:\s)"
    r"|\n(?=\s*[\w*`./:<> ,\[\]-]{1,40}\s{2,}\S)|\n(?=\s*\w+:\n))"
)
_INLINE_CODE = re.compile(r"``[^`]*``|`[^`\n]*`")
_LINK_TARGET = re.compile(r"\]\([^)]*\)|https?://\S+")
_WORD = re.compile(r"[A-Za-z][A-Za-z'’-]*|\d[\d.,]*")

Kind = Literal["docstring", "attribute", "comment", "paragraph", "cell"]


@dataclass(frozen=True)
class Passage:
    """A docstring, comment, paragraph or table cell."""

    line: int
    """1-based number of its first line."""
    text: str
    kind: Kind


@dataclass(frozen=True)
class Finding:
    """A sentence with at least one hit."""

    score: float
    path: str
    line: int
    text: str
    reasons: list[str]


@dataclass(frozen=True)
class Term:
    """A private term."""

    pattern: str
    """Regular expression in lower case."""
    rule: re.Pattern[str]
    """The pattern between word boundaries."""
    replacement: str
    """Term of the field."""


@dataclass
class Totals:
    """Counts of one package, for code or for Markdown."""

    words: int = 0
    hits: Counter[str] = field(default_factory=Counter)
    """Hits by rule, and by "term:PATTERN"."""
    lengths: list[int] = field(default_factory=list)
    """Words of each sentence with at least MIN_SENTENCE words."""
    attributes: int = 0
    """Number of attribute docstrings."""

    def add(self, other: Totals) -> None:
        """Add the counts of another package."""
        self.words += other.words
        self.hits += other.hits
        self.lengths += other.lengths
        self.attributes += other.attributes

    def rates(self) -> dict[str, float]:
        """Return the values of COLUMNS: rates per 10,000 words, except lengths and numbers."""
        per = 10_000 / max(1, self.words)
        lengths = self.lengths or [0]
        return {
            "words": self.words,
            **{name: self.hits[name] * per for name in ("opener", "what", "filler", "term")},
            "run_on": self.hits["run_on"] * per,
            "median_words": statistics.median(lengths),
            "share_long": sum(length > LONG_SENTENCE for length in lengths) / len(lengths),
            "of_attributes": self.hits["of_attribute"],
            "long_cell": self.hits["long_cell"] * per,
        }


@dataclass
class Report:
    """Counts of a tree, and its findings."""

    code: dict[str, Totals] = field(default_factory=dict)
    """By package."""
    markdown: dict[str, Totals] = field(default_factory=dict)
    """By top-level directory."""
    findings: list[Finding] = field(default_factory=list)

    def missed_targets(self) -> list[str]:
        """Return one message for each target that a total or a package misses."""
        missed = []
        for where, packages in (("code", self.code), ("Markdown", self.markdown)):
            rates = sum_totals(packages).rates()
            for name, bound in TARGETS[where].items():
                if rates[name] > bound:
                    missed.append(f"{where}: {name} is {rates[name]:.2f}, target {bound:g}")
            for package, totals in sorted(packages.items()):
                for name, bound in PACKAGE_TARGETS.items():
                    rate = totals.rates()[name]
                    # One hit in a small package exceeds every bound, so a single hit is accepted.
                    if rate > bound and totals.hits[name] > 1:
                        missed.append(f"{where} of {package}: {name} is {rate:.2f}, target {bound}")
        return missed


# ---- passages and sentences


def python_passages(source: str) -> list[Passage]:
    """Return the docstrings and comments of a Python file. Adjacent comment lines are joined."""
    passages: list[Passage] = []
    newlines = [match.start() for match in re.finditer("\n", source)]
    comment: list[str] = []
    comment_start = comment_end = -2

    def flush() -> None:
        if comment:
            passages.append(Passage(comment_start, "\n".join(comment), "comment"))

    for match in _TOKEN.finditer(source):
        line = bisect_left(newlines, match.start()) + 1
        if match["comment"]:
            if _DIRECTIVE.match(match["comment"]):
                continue
            if line != comment_end + 1:
                flush()
                comment, comment_start = [], line
            comment.append(match["comment"].lstrip("#: "))
            comment_end = line
        elif match["triple"]:
            kind = _docstring_kind(source, match.start())
            if kind:
                text = match["triple"].lstrip("rRuUbBfF").strip("\"'")
                passages.append(Passage(line, text, kind))
    flush()
    return passages


def comment_passages(source: str, pattern: re.Pattern[str]) -> list[Passage]:
    """Return the comments of a file. A comment that continues in the next line is one passage.

    Args:
        source: text of the file.
        pattern: strings and comments of its language, from ``comment_pattern``.
    """
    passages: list[Passage] = []
    continued_at = (-1, -1)
    for match in pattern.finditer(source):
        if not match["comment"] or _NO_PROSE.match(match["comment"]):
            continue
        line = source.count("\n", 0, match.start()) + 1
        begin = source.rfind("\n", 0, match.start()) + 1
        column = match.start() - begin
        text = _COMMENT_MARKS.sub("", match["comment"]).strip()
        # Comments after code on adjacent lines belong to these lines, so they stay separate.
        if not source[begin : match.start()].strip() and (line, column) == continued_at:
            last = passages.pop()
            passages.append(Passage(last.line, f"{last.text}\n{text}", "comment"))
        else:
            passages.append(Passage(line, text, "comment"))
        continued_at = (line + match["comment"].count("\n") + 1, column)
    return passages


def _docstring_kind(source: str, start: int) -> Literal["docstring", "attribute"] | None:
    """Return the kind of docstring that a triple-quoted string is; None for data."""
    begin = source.rfind("\n", 0, start) + 1
    if source[begin:start].strip():
        return None
    before = source[max(0, begin - 4000) : begin].rstrip()
    if not before:
        return "docstring"
    last = before[before.rfind("\n") + 1 :].rstrip()
    # A string inside a call, a list or an assignment is data.
    if last.endswith(("(", ",", "=", "[", "{", "+", "\\", "return", "|")):
        return None
    if last.endswith(":") or last.lstrip().startswith("#") or not source[begin:start]:
        return "docstring"
    return "attribute"


def markdown_passages(source: str) -> list[Passage]:
    """Return the paragraphs, list items and table cells of a page."""
    passages: list[Passage] = []
    paragraph: list[str] = []
    first = 0
    in_code = False

    def flush() -> None:
        if paragraph:
            passages.append(Passage(first, "\n".join(paragraph), "paragraph"))
            paragraph.clear()

    for number, line in enumerate(source.splitlines(), 1):
        stripped = line.strip()
        if stripped.startswith(("```", "~~~")):
            in_code = not in_code
            flush()
            continue
        is_markup = stripped.startswith(("#", "<", "![", "|--", "|:-"))
        is_code = in_code or (line.startswith(("    ", "\t")) and not paragraph)
        if is_code or is_markup or not stripped:
            flush()
            continue
        if stripped.startswith("|"):
            flush()
            for cell in stripped.strip("|").split("|"):
                if re.search("[A-Za-z]{2}", cell):
                    passages.append(Passage(number, cell.strip(), "cell"))
            continue
        if re.match(r"(?:[-*+]|\d+\.)\s", stripped):
            flush()
            stripped = re.sub(r"^(?:[-*+]|\d+\.)\s+", "", stripped)
        if not paragraph:
            first = number
        paragraph.append(stripped)
    flush()
    return passages


def sentences(passage: Passage) -> Iterator[tuple[int, str]]:
    """Yield the line and text of each sentence."""
    offset = 0
    for block in _BLOCK.split(passage.text):
        start = offset + len(block) - len(block.lstrip())
        line = passage.line + passage.text.count("\n", 0, start)
        offset += len(block)
        block = block.strip()
        position = 0
        for part in _SENTENCE_END.split(block):
            at = block.find(part, position)
            position = at + len(part)
            text = re.sub(r"\s+", " ", part).strip()
            if text:
                yield line + block.count("\n", 0, at), text


# ---- counts


def load_terms(path: Path = TERMS) -> list[Term]:
    """Read lines of ``regular expression => term of the field``. "#" begins a comment."""
    terms = []
    for line in path.read_text().splitlines():
        line = line.split(" # ")[0].strip()
        if line and not line.startswith("#"):
            pattern, _, replacement = (part.strip() for part in line.partition("=>"))
            terms.append(Term(pattern, _between_words(pattern), replacement))
    return terms


def _between_words(pattern: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![\w.`-])(?:{pattern})(?![\w`-])")


class Counting:
    """Counts hits of the rules and of a list of terms.

    Attributes:
        report: counts and findings of the files so far.
    """

    def __init__(self, terms: list[Term]) -> None:
        self.report = Report()
        self._terms = terms
        # One search of all patterns rejects most sentences.
        self._any_term = _between_words("|".join(term.pattern for term in terms) or r"\b\B")

    def add_file(self, path: str) -> None:
        """Count a file of Python, Markdown or a language of ``COMMENTS``."""
        source = Path(path).read_text(errors="replace")
        comments = comment_pattern(path)
        if comments:
            packages, passages = self.report.code, comment_passages(source, comments)
        elif path.endswith(".py"):
            packages, passages = self.report.code, python_passages(source)
        else:
            packages, passages = self.report.markdown, markdown_passages(source)
        totals = packages.setdefault(find_package(path), Totals())
        for passage in passages:
            self._add_passage(path, passage, totals)

    def _add_passage(self, path: str, passage: Passage, totals: Totals) -> None:
        if passage.kind == "attribute":
            totals.attributes += 1
            totals.hits["of_attribute"] += bool(re.match(r"\s*Of\b", passage.text))
        for line, text in sentences(passage):
            plain = _LINK_TARGET.sub("]", _INLINE_CODE.sub("X", text))
            words = len(_WORD.findall(plain))
            totals.words += words
            if passage.kind == "cell":
                totals.hits["long_cell"] += words > LONG_CELL
            elif words >= MIN_SENTENCE:
                totals.lengths.append(words)
            reasons, score = self._hits(plain, words, totals.hits)
            if reasons:
                self.report.findings.append(Finding(score, path, line, text, reasons))

    def _hits(self, plain: str, words: int, hits: Counter[str]) -> tuple[list[str], float]:
        """Add the hits of a sentence. Return the reasons to print and the score."""
        reasons = []
        score = 0.0
        for name, rule in RULES.items():
            number = len(rule.findall(plain))
            if number:
                hits[name] += number
                reasons.append(name if number == 1 else f"{name} x{number}")
                score += number * WEIGHTS[name]
        lower = plain.lower()
        if self._any_term.search(lower):
            for term in self._terms:
                number = len(term.rule.findall(lower))
                if number:
                    hits["term"] += number
                    hits["term:" + term.pattern] += number
                    reasons.append(f"term {term.pattern!r} -> {term.replacement}")
                    score += number * WEIGHTS["term"]
        if ";" in plain and words > RUN_ON:
            hits["run_on"] += 1
            reasons.append("run_on")
            score += WEIGHTS["run_on"]
        if words > LONG_SENTENCE:
            reasons.append(f"{words} words")
            score += (words - LONG_SENTENCE) / 6
        return reasons, score


def list_files(paths: list[str]) -> Iterator[str]:
    """Yield files, and the files with prose of directories."""
    for path in paths:
        if os.path.isfile(path):
            yield path
        for directory, folders, names in os.walk(path):
            folders[:] = sorted(
                name for name in folders if name not in SKIPPED_DIRECTORIES and name[0] != "."
            )
            for name in sorted(names):
                if name.endswith((".py", ".md")) or comment_pattern(name):
                    yield os.path.join(directory, name)


def comment_pattern(path: str) -> re.Pattern[str] | None:
    """Return the pattern of comments; None for Python, Markdown and files without prose."""
    file = Path(path)
    return COMMENTS.get(file.suffix) or COMMENTS.get(file.name)


def find_package(path: str) -> str:
    """Return the top-level directory of a path in this repository, or "(top)"."""
    absolute = Path(path).resolve()
    parts = absolute.relative_to(ROOT).parts if absolute.is_relative_to(ROOT) else absolute.parts
    return parts[0] if len(parts) > 1 else "(top)"


def sum_totals(packages: dict[str, Totals]) -> Totals:
    """Return the sum over packages."""
    total = Totals()
    for totals in packages.values():
        total.add(totals)
    return total


def count(paths: list[str]) -> Report:
    """Count the prose of files and directories."""
    counting = Counting(load_terms())
    for path in list_files(paths):
        counting.add_file(path)
    return counting.report


# ---- output


def print_table(title: str, packages: dict[str, Totals]) -> None:
    """Print the rates of each package and of all."""
    print(f"\n{title} (per 10,000 words; median words and share over {LONG_SENTENCE} per sentence)")
    print("| package | " + " | ".join(COLUMNS.values()) + " |")
    print("|---" * (len(COLUMNS) + 1) + "|")
    for name, totals in [*sorted(packages.items()), ("**total**", sum_totals(packages))]:
        rates = totals.rates()
        cells = [f"{rates[key]:.1f}" for key in COLUMNS]
        columns = list(COLUMNS)
        for key in ("words", "median_words"):
            cells[columns.index(key)] = f"{rates[key]:,.0f}"
        cells[columns.index("share_long")] = f"{rates['share_long']:.0%}"
        cells[columns.index("of_attributes")] = (
            f"{rates['of_attributes']:.0f} of {totals.attributes}"
        )
        print(f"| {name} | " + " | ".join(cells) + " |")


def print_terms(report: Report) -> None:
    """Print the private terms that occur most often."""
    used: Counter[str] = Counter()
    for totals in (*report.code.values(), *report.markdown.values()):
        used.update(
            {key[5:]: number for key, number in totals.hits.items() if key.startswith("term:")}
        )
    if used:
        most = ", ".join(f"{term} {number}" for term, number in used.most_common(25))
        print(f"\nPrivate terms used most: {most}")


def main(arguments: list[str] | None = None) -> int:
    """Run the program. Return its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("paths", nargs="*", help="files or directories (default: the repository)")
    parser.add_argument("--worst", type=int, default=0, help="number of worst sentences to print")
    parser.add_argument(
        "--list", choices=[*RULES, "term", "run_on"], help="print only the sentences of one kind"
    )
    parser.add_argument(
        "--check", action="store_true", help="print only missed targets; exit with 1 if there are"
    )
    options = parser.parse_args(arguments)
    report = count(options.paths or [os.path.relpath(ROOT)])

    if options.list:
        for finding in report.findings:
            if any(reason.startswith(options.list) for reason in finding.reasons):
                reasons = "; ".join(finding.reasons)
                print(f"{finding.path}:{finding.line}: [{reasons}] {finding.text}")
        return 0
    if not options.check:
        print_table("Docstrings and comments", report.code)
        print_table("Markdown", report.markdown)
        print_terms(report)
    for finding in sorted(report.findings, key=lambda found: -found.score)[: options.worst]:
        text = finding.text if len(finding.text) < 200 else finding.text[:197] + "..."
        print(f"{finding.path}:{finding.line}: {text}\n    [{'; '.join(finding.reasons)}]")
    missed = report.missed_targets() if options.check else []
    for message in missed:
        print(f"prose: {message}")
    if missed:
        print("prose: scripts/prose.py --list NAME prints the sentences. Rewrite them.")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
