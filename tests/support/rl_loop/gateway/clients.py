"""Clients of OpenAI's package that end with their test."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def no_client_is_left() -> Iterator[None]:
    """Let OpenAI's clients that a test has not closed go now, when no event loop runs. Whatever loop runs when they go
    would be told to close connections of a loop that is closed, and a test of another file would fail."""
    yield
    gc.collect()
