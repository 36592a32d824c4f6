"""Pages of the viewer in Chromium."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.support.launch.viewer.served import Served
from tests.support.waiting import wait_until

WIDTHS = (1400, 420)
THEMES = ("light", "dark")
PATIENCE_MS = 60_000
"""Time limit of a wait on a busy machine, in milliseconds."""


@contextmanager
def opened(
    chromium: Any,
    viewer: Served,
    path: str = "#/curves",
    width: int = 1400,
    theme: str = "light",
    height: int = 900,
) -> Iterator[Any]:
    """Open a page. Fail if it reports errors or sends requests to other hosts."""
    context = chromium.new_context(
        viewport={"width": width, "height": height}, color_scheme=theme, reduced_motion="reduce"
    )
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    troubles: list[str] = []
    page.on(
        "console", lambda m: troubles.append(m.text) if m.type in ("error", "warning") else None
    )
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("requestfailed", lambda request: troubles.append(f"{request.url}: {request.failure}"))
    foreign: list[str] = []
    page.on(
        "request",
        lambda request: (
            None if request.url.startswith(viewer.address) else foreign.append(request.url)
        ),
    )
    page.goto(viewer.address + path)
    yield page
    context.close()
    aborted = [trouble for trouble in troubles if "ERR_ABORTED" in trouble]  # by the page itself
    assert [trouble for trouble in troubles if trouble not in aborted] == []
    assert foreign == []


def until(page: Any, condition: str, argument: Any = None) -> None:
    """Wait until an expression or a function of ``argument`` is true.

    Playwright waits with a script that the page's content policy forbids.
    """
    wait_until(lambda: page.evaluate(condition, argument), lambda: condition, seconds=60)


def fits(page: Any) -> bool:
    """Return True if the page does not scroll sideways."""
    wider = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    return bool(wider <= 0)


def barriers(page: Any) -> list[str]:
    """Return accessibility violations found by axe: contrast, labels, roles, keyboard access."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    found = axe.Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
    return [
        f"{violation['id']}: {node['html'][:200]} {node['failureSummary']}"
        for violation in found
        for node in violation["nodes"]
    ]
