"""Output of `gptoss data preview`: tokens with masks, counts, lengths, and rejected rows."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from launch.data_preview import histogram, print_preview
from launch.token_display import color_tokens, decode_pieces, token_lines
from rl_loop.conversations.config import DataConfig
from rl_loop.conversations.dataset import ConversationData
from rl_loop.conversations.errors import DataError
from rl_loop.conversations.source_stream import DataSample
from rl_loop.harmony.codec import Harmony, PromptConfig
from rl_loop.harmony.vocabulary import GptOssVocabulary
from tests.support.launch.forked_command import ForkedCommand
from tests.support.rl_loop.conversations.written_by_hand import chat, said, user

NO_SYSTEM_MESSAGE = PromptConfig(
    model_identity=None, knowledge_cutoff=None, reasoning_effort=None, channels=False
)


@pytest.fixture(scope="module")
def harmony() -> Harmony:
    return Harmony(GptOssVocabulary(), NO_SYSTEM_MESSAGE)


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    good = [json.dumps(chat(user(f"Hi {i} 🫠"), said("Hello."))) for i in range(12)]
    path.write_text("\n".join([*good, "{"]))
    return path


def printed(chats: Path, harmony: Harmony, *, terminal: bool) -> str:
    config = DataConfig.model_validate({"path": str(chats), "workers": 0})
    file = io.StringIO()
    colors: Any = "truecolor" if terminal else None
    console = Console(file=file, force_terminal=terminal, width=200, color_system=colors)
    with ConversationData(config, harmony, 1000) as data:
        print_preview(data, harmony, console, sources=["data"], samples=1, conversations=100)
    return file.getvalue()


def test_without_a_terminal_each_token_has_a_line_with_its_mask(
    chats: Path, harmony: Harmony
) -> None:
    text = printed(chats, harmony, terminal=False)
    assert "\x1b" not in text
    title, *lines = text.splitlines()
    assert re.fullmatch(r"sample 1: .*chats.jsonl, line 1; 18 tokens, 6 trained", title)

    tokens = lines[: lines.index("")]
    assert tokens[0].split() == ["0", "200006", "'<|start|>'"]
    trained = [line for line in tokens if line.split()[1] == "train"]
    assert [eval(line.split(maxsplit=3)[3]) for line in trained] == [
        "<|channel|>", "final", "<|message|>", "Hello", ".", "<|return|>",
    ]  # fmt: skip
    assert "'🫠'" in text or "' 🫠'" in text, "a character is not shown in halves"


@pytest.mark.parametrize("terminal", [True, False])
def test_preview_prints_no_control_characters(
    terminal: bool, harmony: Harmony, tmp_path: Path
) -> None:
    """Data is untrusted. An escape sequence could change the title or clear the terminal."""
    path = tmp_path / "chats.jsonl"
    odd = "\x1b]0;owned\x07 \x9b2J \x1b[2J \x7f \u202e"
    bad = {"messages": [{"role": odd, "content": odd}]}
    path.write_text(f"{json.dumps(chat(user(odd), said(odd)))}\n{json.dumps(bad)}\n")
    text = printed(path, harmony, terminal=terminal)
    colors = re.compile(r"\x1b\[[0-9;]*m")  # escape sequences of the preview itself
    rest = colors.sub("", text) if terminal else text
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", rest)
    assert "owned" in rest and "rejected" in rest


def test_trained_tokens_have_another_color_on_a_terminal(chats: Path, harmony: Harmony) -> None:
    text = printed(chats, harmony, terminal=True)
    assert "\x1b[" in text
    sample = DataSample(
        np.array(harmony.vocabulary.encode_text("a b c d")), np.array([0, 0, 1, 1]) > 0, "x"
    )
    shown = color_tokens(sample.token_ids, sample.loss_mask, harmony)
    assert shown.plain == "a b c d"
    styles = [str(span.style) for span in shown.spans]
    assert ["green" in style for style in styles] == [False, False, True, True]
    assert len(set(styles)) == 4, "neighbors differ"


def test_preview_counts_read_samples_and_names_rejected_ones(chats: Path, harmony: Harmony) -> None:
    text = printed(chats, harmony, terminal=False)
    assert "13 conversations read, 12 samples, 1 rejected" in text
    assert f"rejected: {chats}, line 13: not JSON" in text
    assert "72 trained" in text
    assert re.search(r"17 - +32 tokens  #{40}  12", text)


def test_the_histogram_counts_every_sample_once() -> None:
    lengths = np.array([1, 2, 3, 4, 5, 9, 16, 17, 1000])
    bars = list(histogram(lengths))
    bounds = [tuple(int(n) for n in re.findall(r"\d+", bar.replace(",", ""))[:2]) for bar in bars]
    counts = [int(bar.split()[-1]) for bar in bars]
    assert sum(counts) == len(lengths)
    for (low, high), count in zip(bounds, counts, strict=True):
        # The first bar also includes all shorter samples.
        low = 0 if (low, high) == bounds[0] else low
        assert count == np.count_nonzero((lengths >= low) & (lengths <= high))


def test_preview_pieces_are_all_tokens_in_order(harmony: Harmony) -> None:
    ids = harmony.vocabulary.encode_text("naïve 🫠🫠 日本語")
    sample = DataSample(np.array(ids), np.zeros(len(ids), dtype=bool), "x")
    pieces = list(decode_pieces(sample.token_ids, sample.loss_mask, harmony))
    assert [i for piece in pieces for i in piece.token_ids] == ids
    assert "".join(piece.text for piece in pieces) == "naïve 🫠🫠 日本語"
    assert len(list(token_lines(sample.token_ids, sample.loss_mask, harmony))) == len(pieces)


def test_unknown_source_is_named(chats: Path, harmony: Harmony) -> None:
    config = DataConfig.model_validate({"path": str(chats), "workers": 0})
    with (
        ConversationData(config, harmony, 1000) as data,
        pytest.raises(DataError, match=r"there is no data\.sources\.chat\. Known sources: data"),
    ):
        data.preview("chat", 1)


def test_the_command_previews_a_configuration(chats: Path, command: ForkedCommand) -> None:
    options = [f"data.path={chats}", "data.validation_path=null", "data.max_rejected_fraction=0.1"]
    result = command.run(
        "data", "preview", "configs/sft/tiny_shop.yaml", *options, "--samples", "1"
    )
    assert result.returncode == 0, result.stderr
    assert "sample 1" in result.stdout
    assert "13 conversations read, 12 samples, 1 rejected" in result.stdout

    broken = chats.with_name("broken.jsonl")
    broken.write_text("{}\n")
    options[0] = f"data.path={broken}"
    result = command.run("data", "preview", "configs/sft/tiny_shop.yaml", *options)
    assert result.returncode == 1
    assert "1 conversations read, 0 samples, 1 rejected" in result.stdout

    result = command.run("data", "preview", "configs/sft/tiny_retool.yaml")
    assert result.returncode == 1
    assert "does not train on conversations" in result.stderr
    options = ["data.path=none.jsonl", "data.validation_path=null"]
    result = command.run("data", "preview", "configs/sft/tiny_shop.yaml", *options)
    assert result.returncode == 1
    assert "data.sources.data.path: none.jsonl does not exist" in result.stderr
