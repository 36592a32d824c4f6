"""A system message without optional parts."""

from __future__ import annotations

from rl_loop.harmony.codec import PromptConfig

SHORT_PROMPT = PromptConfig(
    model_identity=None,
    knowledge_cutoff=None,
    reasoning_effort=None,
    channels=False,
    describe_builtin_tools=False,
)
