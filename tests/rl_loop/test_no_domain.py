"""The loop has no domain knowledge. Names and topics of environments stay in environments/."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from rl_loop.environments import ENVIRONMENTS

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = [
    path
    for room in ("rl_loop", "launch")
    for path in sorted((ROOT / room).rglob("*.py"))
    if not path.is_relative_to(ROOT / "rl_loop/environments")
]

# Chat formats also use the word "instructions", so only a whole string constant counts as a name.
# A field of OpenAI's responses API has the name of an environment.
FIELDS = {
    (ROOT / f"rl_loop/gateway/{module}.py", "instructions")
    for module in ("fields", "answer_fields")
}
WORDS = [name for name in ENVIRONMENTS if name != "instructions"]
ENVIRONMENT_MODULES = {
    f"rl_loop.environments.{path.stem}"
    for path in (ROOT / "rl_loop/environments").glob("*.py")
    if path.stem not in ("__init__", "base", "registry", "scripted_messages", "tool_calls")
}


@pytest.mark.parametrize("path", PRODUCT, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_environment_is_named_outside_of_their_package(path: Path) -> None:
    text = path.read_text()
    named = set(re.findall(rf"\b({'|'.join(WORDS)})\b", text, flags=re.IGNORECASE))
    assert not named, (
        f"{path} names {named}: ask the environment instead, see rl_loop/environments/base.py"
    )

    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and (path, node.value) not in FIELDS:
            assert node.value not in ENVIRONMENTS.entries, (
                f"{path}:{node.lineno} names an environment"
            )
        if isinstance(node, ast.Import):
            imported = {alias.name for alias in node.names}
            assert not imported & ENVIRONMENT_MODULES, (
                f"{path}:{node.lineno} imports an environment"
            )
        if isinstance(node, ast.ImportFrom):
            imported = {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            assert not imported & ENVIRONMENT_MODULES, (
                f"{path}:{node.lineno} imports an environment"
            )
