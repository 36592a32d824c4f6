"""Clients of OpenAI's package that end with their test."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def no_client_is_left() -> Iterator[None]:
    """Release OpenAI's clients that a test has not closed, while no event loop runs.

    Otherwise a later loop would close connections of a closed loop, and a test of another file
    would fail.
    """
    yield
    gc.collect()
