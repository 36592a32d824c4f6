"""A class name means one thing in the whole product."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("kernels", "megatron_gptoss", "converters", "rl_loop", "launch")


def modules_by_class(sources: dict[str, str]) -> dict[str, list[str]]:
    """Return the modules that define a class at their top level, by the name of the class.

    Args:
        sources: text of every module, by path.
    """
    modules = defaultdict(list)
    for path, source in sources.items():
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef):
                modules[node.name].append(path)
    return modules


def repeated(modules: dict[str, list[str]]) -> dict[str, list[str]]:
    return {name: paths for name, paths in modules.items() if len(paths) > 1}


def test_every_class_of_the_product_has_its_own_name() -> None:
    sources = {
        str(path.relative_to(ROOT)): path.read_text()
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
    }
    modules = modules_by_class(sources)
    assert len(modules) > 500
    assert repeated(modules) == {}


def test_repeated_class_name_is_found() -> None:
    sources = {"a.py": "class Turn: ...", "b.py": "class Turn: ...\nclass Node: ..."}
    assert repeated(modules_by_class(sources)) == {"Turn": ["a.py", "b.py"]}
