"""Programs and options of the benchmark commands in the documentation exist."""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks import harness

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PACKAGES = sorted(path.parent.name for path in (ROOT / "benchmarks").glob("*/__main__.py"))
OWN_OPTIONS = {"--help", "--nproc_per_node"}


def commands_in(text: str) -> list[tuple[str, ...]]:
    """Return the words after ``-m benchmarks.`` of every command, quoted ones as one word."""
    lines = text.replace("\\\n", " ")
    found = re.findall(r"-m\s+benchmarks\.([a-z_]+)([^`\n]*)", lines)
    return [(name, *shlex.split(re.split(r" # | {2,}#|;|&", rest)[0])) for name, rest in found]


COMMANDS = sorted({command for page in PAGES for command in commands_in(page.read_text())})


@cache
def capture_help(package: str, words: tuple[str, ...]) -> str:
    """Return the output of a program with ``--help``."""
    patch = pytest.MonkeyPatch()
    printed: list[str] = []
    try:
        patch.setattr(sys, "argv", ["benchmarks", *words, "--help"])
        patch.setattr(sys, "stdout", type("Out", (), {"write": printed.append, "flush": id})())
        patch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as ended:
            if package in PACKAGES:
                main = import_module(f"benchmarks.{package}.__main__")
                default = getattr(main, "DEFAULT", None)
                harness.run_program(f"benchmarks.{package}", main.PROGRAMS, default)
            else:
                runpy.run_module(f"benchmarks.{package}", run_name="__main__")
        assert ended.value.code in (0, None), f"benchmarks.{package} {' '.join(words)}"
    finally:
        patch.undo()
    return "".join(printed)


def subcommands(command: tuple[str, ...]) -> tuple[str, ...]:
    """Return the words before the first option that name a program or one of its cases."""
    words = []
    for word in command[1:]:
        if not re.fullmatch(r"[a-z][a-z-]*", word) or len(words) == 2:
            break
        words.append(word)
    return tuple(words)


def test_documentation_has_benchmark_commands() -> None:
    assert len(COMMANDS) > 50
    assert {command[0] for command in COMMANDS} <= {*PACKAGES}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_program_prints_its_help(package: str) -> None:
    main = import_module(f"benchmarks.{package}.__main__")
    for name in main.PROGRAMS:
        assert "--help" in capture_help(package, (name,))
    assert f"python -m benchmarks.{package}" in capture_help(package, ())


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_options_of_documented_commands_exist(command: tuple[str, ...]) -> None:
    package, words = command[0], subcommands(command)
    texts = [capture_help(package, words[:1])]
    if len(words) > 1:
        texts.append(capture_help(package, words[:2]))
    known = set(re.findall(r"--[a-z][\w-]*", "\n".join(texts))) | OWN_OPTIONS
    options = {word.partition("=")[0] for word in command if word.startswith("--")}
    assert options <= known


def test_options_check_finds_an_unknown_option() -> None:
    with pytest.raises(AssertionError):
        test_options_of_documented_commands_exist(("attention", "kernels", "--no-such-option"))
