"""CONTRIBUTING.md and the pre-commit hooks name existing files, and run the commands of CI."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
GUIDE = (ROOT / "CONTRIBUTING.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()


def lint_commands() -> list[str]:
    """Return the commands of ``make lint`` with the Makefile's variables expanded."""
    packages = re.search(r"^TYPED_PACKAGES := (.*)$", MAKEFILE, flags=re.M)[1]
    recipe = re.search(r"^lint: setup\n((?:\t.*\n)+)", MAKEFILE, flags=re.M)[1]
    return [line.strip().replace("$(TYPED_PACKAGES)", packages) for line in recipe.splitlines()]


def test_pre_commit_runs_commands_of_make_lint_without_downloads() -> None:
    repositories = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [repository["repo"] for repository in repositories] == ["local"]
    hooks = repositories[0]["hooks"]
    assert all(hook["language"] == "system" for hook in hooks)

    # Hooks get the changed files, and format them instead of failing.
    entries = [hook["entry"].replace(" --force-exclude", "") for hook in hooks]
    assert entries == [
        command.removesuffix(" .").replace("format --check", "format")
        for command in lint_commands()
    ]


def test_targets_and_files_that_the_guide_names_exist() -> None:
    targets = set(re.findall(r"`make ([\w-]+)`", GUIDE))
    assert {"setup", "test", "lint"} <= targets
    assert targets <= set(re.findall(r"^([\w-]+):", MAKEFILE, flags=re.M))

    linked = re.findall(r"\]\(([\w./-]+)", GUIDE)
    quoted = re.findall(r"`([\w./-]+)`", GUIDE)
    folders = {path.name for path in ROOT.iterdir() if path.is_dir()}
    named = [path for path in quoted if path.partition("/")[0] in folders - {".venv"}]
    assert len(named) > 10
    for path in linked + named:
        assert (ROOT / path).exists(), path


def test_markers_that_the_guide_selects_by_are_registered() -> None:
    registered = set(
        re.findall(r'^    "(\w+): ', (ROOT / "pyproject.toml").read_text(), flags=re.M)
    )
    expressions = re.findall(r"pytest[^|\n]*? -m \"?([a-z ]+)", GUIDE)
    assert len(expressions) == 3
    for expression in expressions:
        assert set(expression.split()) - {"and", "not"} <= registered
