"""Conversations that a small ChatML model writes itself."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.learning import self_text
from rl_loop.chatml.vocabulary import tiny_vocabulary
from rl_loop.environments import arithmetic
from tests.support.converters.dense_models import save_dense
from tests.support.megatron_gptoss.dense_reference import LLAMA

TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}<|im_start|>assistant
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    config = LLAMA.model_copy(update={"vocab_size": 1200, "max_length": 512})
    directory = save_dense(tmp_path / "model", config)
    tiny_vocabulary(config.vocab_size, arithmetic.vocabulary_text()).save(directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


def write(
    monkeypatch: pytest.MonkeyPatch, model: Path, *options: str
) -> list[list[dict[str, str]]]:
    out = model.parent / "out.jsonl"
    arguments = ["self-text", str(model), str(out), "--max-tokens", "12", "--batch", "4", *options]
    monkeypatch.setattr(sys, "argv", arguments)
    self_text.main()
    return [json.loads(line)["messages"] for line in out.read_text().splitlines()]


def test_model_writes_questions_and_answers(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chats = write(monkeypatch, model, "--conversations", "6")
    # A random model may write an empty message.
    assert 3 <= len(chats) <= 6
    assert len({chat[0]["content"] for chat in chats}) == len(chats)
    for chat in chats:
        assert [message["role"] for message in chat] == ["user", "assistant"]
        assert all(message["content"].strip() for message in chat)
        assert "<|im_" not in str(chat)
    assert write(monkeypatch, model, "--conversations", "6") == chats


def test_model_answers_the_questions_of_a_file(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = ["What is 1 + 2?", "Compute 3 * 4.", "Why?", "How?", "When?"]
    records = [json.dumps({"question": text, "answer": ""}) for text in asked]
    (tmp_path / "prompts.jsonl").write_text("\n".join(records) + "\n")
    chats = write(monkeypatch, model, "--prompts", str(tmp_path / "prompts.jsonl"))
    assert {chat[0]["content"] for chat in chats} <= set(asked)
    assert len(chats) >= 3
