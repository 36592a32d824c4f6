"""Configuration keys that messages and documentation name exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import get_origin

import pytest

from tests.support.rl_loop.lifecycle.config_keys import all_keys

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
PACKAGES = ("kernels", "megatron_gptoss", "converters", "rl_loop", "launch")


@cache
def keys() -> set[str]:
    """Return all configuration keys. ``*`` is a name that the user chooses."""
    found = set(all_keys())
    found |= {
        f"{key}.*" for key, annotation in all_keys().items() if get_origin(annotation) is dict
    }
    # A page names the keys of a source without the name of the source.
    found |= {key.replace(".*", "") for key in found}
    # ``data.path`` is short for a single source.
    return found | {key.replace("data.sources.", "data.") for key in found}


@cache
def sections() -> set[str]:
    """Return all prefixes of keys, such as ``rollout`` and ``rollout.engine``."""
    found = set()
    for key in keys():
        while key := key.rpartition(".")[0]:
            found.add(key)
    return found


def exists(key: str) -> bool:
    """Return True for a key or a section. ``*`` in ``key`` stands for any text."""
    pattern = re.escape(key).replace(r"\*", r"[\w*]+")
    return any(re.fullmatch(pattern, known) for known in keys() | sections())


# ---- pages


def test_configuration_keys_in_prose_exist() -> None:
    for page in PAGES:
        prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
        if page.name == "comparison.md":  # a row has our key first, then keys of other trainers
            prose = re.sub(r"^(\| `[^|]*\|).*", r"\1", prose, flags=re.M)
        for key in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?:[:=][^`]*)?`", prose):
            is_file = re.search(r"\.(md|py|json|yaml|safetensors)$", key)
            is_module = (ROOT / "rl_loop" / key.replace(".", "/")).with_suffix(".py").exists()
            if key.rpartition(".")[0] in sections() and not is_file and not is_module:
                assert exists(key), f"{page.name}: {key}"


# ---- strings of the code

OTHER_NAMES = re.compile(
    r"model\.(layers|norm|embed_tokens)\b"  # weights in Hugging Face's format
    r"|optimizer\.(optimizer|clip_grads|distrib_optimizer)$"  # modules of Megatron
    r"|.*\.(json|safetensors)$"
)

NAMES_OF_FIELDS = {"adapter.*", "algorithm.*", "data.sources.*.*"}
"""Keys in messages whose last part is read from a configuration."""


def list_strings(code: str) -> Iterator[str]:
    """Yield all strings except docstrings. ``*`` replaces a placeholder of an f-string."""
    tree = ast.parse(code)
    parts: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else "*" for part in node.values
            )
            parts |= set(node.values)
        elif isinstance(node, ast.Expr):
            parts.add(node.value)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in parts:
            yield node.value


def wrong_keys(code: str) -> set[str]:
    """Return the dotted keys in the strings of ``code`` that do not exist.

    A placeholder may be a name that the user chooses, a part of a key, or a value after it.
    """
    names = "|".join(sorted(section for section in sections() if "." not in section))
    wrong = set()
    for text in list_strings(code):
        for key in re.findall(rf"(?<![\w./*-])((?:{names})(?:\.[a-z_*][a-z_0-9*]*)+)", text):
            if OTHER_NAMES.match(key) or key in NAMES_OF_FIELDS:
                continue
            is_any = key.endswith(".*") and key not in keys() | sections()
            if is_any or not (exists(key) or exists(key.rstrip("*"))):
                wrong.add(key)
    return wrong


@pytest.mark.parametrize("package", PACKAGES)
def test_configuration_keys_in_messages_exist(package: str) -> None:
    for file in sorted((ROOT / package).rglob("*.py")):
        assert not wrong_keys(file.read_text()), file.relative_to(ROOT)


@pytest.mark.parametrize(
    ("code", "wrong"),
    [
        ("'rollout.workers must be 1'", set()),
        ("f'tasks.sources.{name}: no file'", set()),
        ("f'data.sources.{name}.weight is 0'", set()),
        ("f'lower training.keep_checkpoints{hint}'", set()),
        ("'sandbox.workers must be 1'", {"sandbox.workers"}),
        ("f'data.sources.{name}.wait is 0'", {"data.sources.*.wait"}),
        ("f'parallel.{key} must be 1'", {"parallel.*"}),
        ("f'parallel.context_schema_{kind} all_to_all'", {"parallel.context_schema_*"}),
    ],
)
def test_wrong_keys_are_found_in_code(code: str, wrong: set[str]) -> None:
    assert wrong_keys(f"message = {code}") == wrong
