"""Tokenizers with added tokens that a chat does not use, like SmolLM2's."""

from __future__ import annotations

import json
from pathlib import Path


def add_unused_tokens(directory: Path, count: int) -> None:
    """Give ids behind the last added token of a ``tokenizer.json`` the names ``<unused_0>``, ..."""
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    added = tokenizer["added_tokens"]
    first = added[-1]["id"] + 1
    added += [{**added[0], "id": first + i, "content": f"<unused_{i}>"} for i in range(count)]
    # As in SmolLM2's tokenizer.
    tokenizer["model"]["vocab"] |= {token["content"]: token["id"] for token in added}
    path.write_text(json.dumps(tokenizer))
