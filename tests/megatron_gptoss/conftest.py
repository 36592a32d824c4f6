"""Fixtures shared by the tests of ``megatron_gptoss``."""

from __future__ import annotations

from tests.support.megatron_gptoss.process_groups import process_groups as process_groups
