"""Parts of docs/library.md run with only the packages that the page names for them."""

from __future__ import annotations

import importlib
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from examples.convert_checkpoint import save_tiny_model
from tests.support.wheels import ROOT, link_distributions, run_isolated

PAGE = (ROOT / "docs/library.md").read_text()
PROGRAMS = {"bubblewrap"}
"""Requirements that are not Python packages."""
ALL = "everything in `requirements.txt`"

CONVERSION = """
from pathlib import Path
from converters.torch_dist import export_checkpoint, import_checkpoint
from converters.verify import verify

import_checkpoint(Path("{0}/original"), Path("{0}/megatron"))
print(verify(Path("{0}/original"), Path("{0}/megatron")))
export_checkpoint(Path("{0}/megatron"), Path("{0}/exported"))
"""


def rows() -> dict[str, str]:
    """Return the last column of the table of parts, by part."""
    return dict(re.findall(r"^\| \[([\w ]+)\]\(#[\w-]+\) \| [^|]+ \| ([^|]+) \|$", PAGE, re.M))


def packages(part: str) -> list[str]:
    """Return the Python packages that the page names for a part."""
    return [name for name in rows()[part].split(", ") if name not in PROGRAMS]


def run_with(part: str, program: str, directory: Path) -> str:
    """Run a program of this checkout with only a part's packages and their requirements."""
    directory.mkdir()
    link_distributions(directory, *packages(part))
    return run_isolated(program, directory, ROOT, ROOT / "kernels")


@pytest.mark.parametrize("part", [part for part in rows() if part not in ("Converters", "Runs")])
def test_part_runs_with_only_its_packages(part: str, tmp_path: Path) -> None:
    section = PAGE.split(f"\n## {part}\n")[1].split("\n## ")[0]
    programs = re.findall(r"^```python\n(.*?)^```\n\n```\n(.*?)^```", section, re.M | re.S)
    assert programs
    # One interpreter imports torch once.
    program, output = ("".join(texts) for texts in zip(*programs, strict=True))
    assert run_with(part, program, tmp_path / "packages") == output


def test_converters_run_with_only_their_packages(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "original")
    program = CONVERSION.format(tmp_path)
    printed = run_with("Converters", program, tmp_path / "packages")
    assert "tensors are equal bit for bit" in printed
    assert (tmp_path / "exported/model.safetensors").is_file()


def test_only_runs_need_every_package() -> None:
    assert [part for part, cell in rows().items() if cell == ALL] == ["Runs"]


def test_packages_export_what_the_page_imports() -> None:
    exported: dict[str, set[str]] = {}
    for name, imported in re.findall(r"^from ([\w.]+) import (.+)$", PAGE, re.M):
        if not find_spec(name).origin.startswith(str(ROOT)):
            continue
        if hasattr(importlib.import_module(name), "__path__"):
            exported.setdefault(name, set()).update(imported.split(", "))
        else:
            # A module: its package exports it.
            package, _, part = name.rpartition(".")
            exported.setdefault(package, set()).add(part)
    # Packages of the second column of the table.
    for cell in re.findall(r"^\| \[[\w ]+\]\(#[\w-]+\) \| ([^|]+) \|", PAGE, re.M):
        for name in re.findall(r"`([\w.]+)`", cell):
            exported.setdefault(name, set())

    assert len(exported) >= 9
    for name, names in exported.items():
        assert names <= set(importlib.import_module(name).__all__), name
        # This raises AttributeError if a name of __all__ does not exist.
        exec(f"from {name} import *", {})
