"""Conversations that a small ChatML model writes itself."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from converters.errors import ConversionError
from rl_loop.chat.tokenizer_vocabulary import TokenizerError
from rl_loop.chatml.vocabulary import tiny_vocabulary
from rl_loop.conversations.errors import DataError
from rl_loop.environments import arithmetic
from rl_loop.self_written import (
    WritingOptions,
    WrittenConversations,
    read_questions,
    read_written,
    write_conversations,
)
from tests.support.converters.dense_models import save_dense
from tests.support.megatron_gptoss.dense_reference import LLAMA, dense_weights

TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}<|im_start|>assistant
"""
OPTIONS = WritingOptions(batch_size=4, max_tokens=12)
QUESTIONS = ["What is 1 + 2?", "Compute 3 * 4.", "Why?", "How?", "Why?"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = LLAMA.model_copy(update={"vocab_size": 1200, "max_length": 512})
    directory = save_dense(tmp_path_factory.mktemp("dense") / "model", config)
    tiny_vocabulary(config.vocab_size, arithmetic.vocabulary_text()).save(directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


def read_chats(path: Path) -> list[list[dict[str, str]]]:
    return [json.loads(line)["messages"] for line in path.read_text().splitlines()]


class InterruptionError(Exception):
    pass


def stop_after(conversations: int) -> object:
    """Return a progress function that interrupts the command."""

    def progress(done: int, total: int) -> None:
        if done >= conversations:
            raise InterruptionError

    return progress


def test_model_writes_questions_and_answers(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "data/out.jsonl"
    seen: list[tuple[int, int]] = []
    progress = lambda done, total: seen.append((done, total))  # noqa: E731
    assert write_conversations(model, out, 6, OPTIONS, progress) == 0
    chats = read_chats(out)
    assert len(chats) == 6
    assert len({chat[0]["content"] for chat in chats}) == 6, "samples differ"
    for chat in chats:
        assert [message["role"] for message in chat] == ["user", "assistant"]
        assert all(message["content"].strip() for message in chat)
        assert "<|im_" not in str(chat)
    assert seen[0] == (0, 6) and seen[-1] == (6, 6) and len(seen) > 2


def test_model_answers_every_question_of_a_file(model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"q": text, "answer": ""}) + "\n" for text in QUESTIONS))
    questions = read_questions(str(prompts), "q")
    assert questions == QUESTIONS

    out = tmp_path / "out.jsonl"
    assert write_conversations(model, out, questions, OPTIONS) == 0
    assert sorted(chat[0]["content"] for chat in read_chats(out)) == sorted(QUESTIONS)


@pytest.mark.parametrize("questions", [9, QUESTIONS], ids=["own questions", "questions of a file"])
def test_interrupted_writing_continues(
    questions: int | list[str], model: Path, tmp_path: Path
) -> None:
    whole = tmp_path / "whole.jsonl"
    write_conversations(model, whole, questions, OPTIONS)

    out = tmp_path / "out.jsonl"
    with pytest.raises(InterruptionError):
        write_conversations(model, out, questions, OPTIONS, stop_after(1))
    kept = read_chats(out)
    assert 1 <= len(kept) <= 4
    # The process was killed while it wrote a line.
    with out.open("a") as file:
        file.write('{"messages": [{"role": "user", "con')

    write_conversations(model, out, questions, OPTIONS)
    assert read_chats(out)[: len(kept)] == kept
    assert out.read_text() == whole.read_text()


def test_complete_file_is_not_changed(tmp_path: Path) -> None:
    """The model is not loaded either: it does not exist."""
    out = tmp_path / "out.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "3"}]}
        for text in QUESTIONS
    ]
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    before = out.read_bytes()
    assert write_conversations(tmp_path / "none", out, QUESTIONS, OPTIONS) == 0
    assert write_conversations(tmp_path / "none", out, 5, OPTIONS) == 0
    assert out.read_bytes() == before


@pytest.mark.parametrize(
    "content",
    [
        '{"question": "Why?"}\n',
        "notes without a line break",
        '{"messages": [{"role": "user", "content": "Why?"}]}\n',
        "[1, 2]\n",
        "\xff\n",
    ],
)
def test_file_with_other_content_is_kept(content: str, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text(content, encoding="latin-1")
    with pytest.raises(DataError, match=r"out\.jsonl, line 1: this command did not write the line"):
        write_conversations(model, out, 3, OPTIONS)
    assert out.read_text(encoding="latin-1") == content


def test_answers_to_other_questions_are_kept(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    write_conversations(model, out, ["Why?"], OPTIONS)
    before = out.read_bytes()
    with pytest.raises(DataError, match="line 1: the question is not in --prompts"):
        write_conversations(model, out, ["How?"], OPTIONS)
    assert out.read_bytes() == before


def test_pipe_is_no_file_of_conversations(tmp_path: Path) -> None:
    """A pipe would block the command."""
    os.mkfifo(tmp_path / "out.jsonl")
    with pytest.raises(DataError, match="is a FIFO"):
        read_written(tmp_path / "out.jsonl")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ('{"question": "Why?"}\n{"answer": 1}\n', "line 2: there is no column 'question'"),
        ("[]\n", "line 1: there is no column 'question', but no columns"),
        ('{"question": " "}\n', "line 1: question is not a text"),
        ('{"question": 3}\n', "line 1: question is not a text"),
        ("Why?\n", "line 1: not JSON"),
        ("", "the file is empty"),
    ],
)
def test_rows_without_a_question_are_named(rows: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(rows)
    with pytest.raises(DataError, match=message):
        read_questions(str(path), "question")


def test_questions_longer_than_the_model_are_rejected(model: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"--max-tokens: 'Why\? Why.*has 512 positions"):
        write_conversations(model, tmp_path / "out.jsonl", ["Why? " * 300], OPTIONS)
    with pytest.raises(DataError, match="--max-tokens: the header of a conversation"):
        write_conversations(model, tmp_path / "out.jsonl", 3, WritingOptions(4, max_tokens=300))
    assert not (tmp_path / "out.jsonl").exists()


def test_unsuitable_models_are_named(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with pytest.raises(ConversionError, match="none: no such directory"):
        write_conversations(tmp_path / "none", out, 3, OPTIONS)

    no_tokenizer = save_dense(tmp_path / "no_tokenizer", LLAMA)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: No such file"):
        write_conversations(no_tokenizer, out, 3, OPTIONS)

    template = (model / "chat_template.jinja").read_text()
    try:
        (model / "chat_template.jinja").write_text("{{ messages[0].content }}")
        with pytest.raises(DataError, match="the chat template is missing, or is not ChatML"):
            write_conversations(model, out, 3, OPTIONS)
    finally:
        (model / "chat_template.jinja").write_text(template)
    assert not out.exists()


def test_model_that_writes_nothing_is_named(model: Path, tmp_path: Path) -> None:
    config = LLAMA.model_copy(update={"vocab_size": 1200, "max_length": 512})
    weights = {name: torch.zeros_like(tensor) for name, tensor in dense_weights(config).items()}
    weights["model.embed_tokens.weight"] += 1
    weights["model.norm.weight"] += 1
    [end] = [
        token["id"]
        for token in json.loads((model / "tokenizer.json").read_text())["added_tokens"]
        if token["content"] == "<|im_end|>"
    ]
    weights["lm_head.weight"][end] = 10
    silent = save_dense(tmp_path / "silent", config, weights)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(model / name, silent)

    out = tmp_path / "out.jsonl"
    with pytest.raises(DataError, match="silent: the model wrote only empty messages"):
        write_conversations(silent, out, QUESTIONS, OPTIONS)
    assert out.read_bytes() == b""
    assert read_written(out) == WrittenConversations([], 0)
