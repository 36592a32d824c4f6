"""The settings of the documentation site cover every page, and rewrite links that leave ``docs``."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def conf() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_conf", DOCS / "conf.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_navigation_has_every_page_once(conf: ModuleType) -> None:
    listed = [entry for entries in conf.NAVIGATION.values() for entry in entries]
    pages = [page for entry in listed for page in sorted(DOCS.glob(f"{entry}.md"))]
    assert len(pages) == len(set(pages))
    assert {*pages, DOCS / "README.md"} == set(DOCS.rglob("*.md"))
    assert all(list(DOCS.glob(f"{entry}.md")) for entry in listed)


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        ("[loop](../rl_loop/run.py)", "[loop](https://host/p/blob/main/rl_loop/run.py)"),
        ("[a [b]](../Makefile#L3)", "[a [b]](https://host/p/blob/main/Makefile#L3)"),
        ("[tests](../tests/support)", "[tests](https://host/p/tree/main/tests/support)"),
        ("[data](data.md#files)", "[data](data.md#files)"),
        ("![curve](images/tiny_retool.png)", "![curve](images/tiny_retool.png)"),
        ("[peer](https://example.org/a)", "[peer](https://example.org/a)"),
        ("`[code](../Makefile)`", "`[code](../Makefile)`"),
        ("```\n[code](../Makefile)\n```", "```\n[code](../Makefile)\n```"),
    ],
)
def test_outside_links_lead_to_the_repository(conf: ModuleType, link: str, expected: str) -> None:
    page = DOCS / "page.md"
    rewritten = conf.with_outside_links(f"See\n{link}\n", page, "https://host/p/")
    assert rewritten == f"See\n{expected}\n"


def test_outside_links_become_text_without_a_repository(conf: ModuleType) -> None:
    page = DOCS / "performance/loop.md"
    text = "Run [`train.py`](../../examples/train.py)."
    assert conf.with_outside_links(text, page, None) == "Run `train.py`."


def test_link_to_a_missing_file_is_an_error(conf: ModuleType) -> None:
    with pytest.raises(FileNotFoundError, match=r"docs/page.md: link to missing file ../gone.py"):
        conf.with_outside_links("[gone](../gone.py)", DOCS / "page.md", None)


def test_docs_extra_and_pinned_file_have_equal_versions() -> None:
    (extra,) = re.findall(r"^docs = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), flags=re.M)
    wanted = re.findall(r'"([^"]+)"', extra)
    pinned = re.findall(
        r"^(\S+==\S+) \\$", (ROOT / "requirements-docs.txt").read_text(), flags=re.M
    )
    assert len(wanted) == 3
    assert set(wanted) <= set(pinned)
