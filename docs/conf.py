"""Settings of the documentation site: ``make docs`` builds it with Sphinx.

The pages stay plain Markdown that GitHub shows. This file adds the parts that only the site has: the navigation, and
links to files outside of ``docs``.
"""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

NAVIGATION: dict[str, list[str]] = {
    "Start": [
        "getting_started/laptop",
        "concepts",
        "getting_started/one_gpu",
        "getting_started/one_node",
        "getting_started/slurm",
        "recipe",
        "installing",
        "comparison",
    ],
    "Train": [
        "running",
        "resuming",
        "launching",
        "sglang",
        "viewer",
        "hyperparameters",
        "metrics",
        "evaluating",
        "troubleshooting",
    ],
    "Bring your own": [
        "data",
        "tasks",
        "one_step",
        "environments",
        "tool_servers",
        "mcp_example",
        "agents",
        "gateway",
        "rewards",
        "algorithms",
        "library",
    ],
    "Models": [
        "adapters",
        "quantization",
        "dense",
        "converting",
        "upcycling",
        "serving",
        "tinker",
        "certify",
    ],
    "Operate": ["sandbox", "shell", "security"],
    "Reference": ["reference/configuration", "reference/api", "reference/openai_api"],
    "Results": ["status", "performance", "performance/*"],
    "Design notes": ["architecture", "reliability", "design/*"],
}
"""Pages by section, in the order that a new user needs them. A page in no section fails the build."""

project = _PROJECT["name"]
release = _PROJECT["version"]
copyright = "the authors of megatron-gptoss"
root_doc = "README"
exclude_patterns = ["images/**"]
extensions = ["myst_parser"]
# The anchors of headings that GitHub makes, too.
myst_heading_anchors = 4
html_theme = "furo"
html_title = f"{project} {release}"
html_copy_source = False
html_show_sphinx = False
# Furo embeds no fonts or scripts of other hosts, and the search index is a file of the site.
html_theme_options = {"navigation_with_keys": True}

# Code, whose links stay, or a link to a file. A link's text may hold code.
_CODE_OR_LINK = re.compile(
    r"^```.*?^```|`[^`\n]*`"
    r"|(?P<image>!?)\[(?P<label>(?:[^\[\]]|\[[^\]]*\])*)\]"
    r"\((?!https?://|#|mailto:)(?P<path>[^)\s#]+)(?P<anchor>#[^)\s]*)?\)",
    re.S | re.M,
)


def with_outside_links(text: str, page: Path, repository: str | None) -> str:
    """Point links to files outside of ``docs`` to the repository.

    Args:
        text: Markdown of the page.
        page: file of the page.
        repository: URL of the repository; None to keep the link's text only.

    Returns:
        The Markdown. Links inside of code stay as they are.

    Raises:
        FileNotFoundError: a linked file does not exist.
    """

    def replaced(match: re.Match[str]) -> str:
        if match["path"] is None or match["image"]:
            return match[0]
        target = Path(os.path.normpath(page.parent / match["path"]))
        if target.is_relative_to(DOCS):
            return match[0]
        if not target.exists():
            raise FileNotFoundError(
                f"{page.relative_to(ROOT)}: link to missing file {match['path']}"
            )
        if repository is None:
            return match["label"]
        kind = "tree" if target.is_dir() else "blob"
        file = target.relative_to(ROOT).as_posix()
        url = f"{repository.rstrip('/')}/{kind}/main/{file}{match['anchor'] or ''}"
        return f"[{match['label']}]({url})"

    return _CODE_OR_LINK.sub(replaced, text)


def navigation() -> str:
    """Return the hidden tables of contents of the index page."""
    sections = []
    for title, pages in NAVIGATION.items():
        entries = "\n".join(pages)
        sections.append(f"```{{toctree}}\n:hidden:\n:glob:\n:caption: {title}\n\n{entries}\n```\n")
    return "\n".join(sections)


def prepare_page(app: Any, name: str, source: list[str]) -> None:
    """Rewrite links of a page, and add the navigation to the index. Sphinx calls this for every page that it reads."""
    from sphinx.util import logging  # tests of this file run without Sphinx

    repository = _PROJECT.get("urls", {}).get("Repository")
    try:
        source[0] = with_outside_links(source[0], DOCS / f"{name}.md", repository)
    except FileNotFoundError as error:
        logging.getLogger(__name__).warning(str(error))
    if name == root_doc:
        source[0] += f"\n{navigation()}"


def write_index(app: Any, error: Exception | None) -> None:
    """Write ``index.html``, which opens the first page: GitHub wants it to be README.md."""
    if error is None:
        page = f'<meta http-equiv="refresh" content="0; url={root_doc}.html">'
        (Path(app.outdir) / "index.html").write_text(f"<!doctype html>{page}\n")


def setup(app: Any) -> None:
    """Connect the functions of this file with Sphinx."""
    app.connect("source-read", prepare_page)
    app.connect("build-finished", write_index)
