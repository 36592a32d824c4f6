"""Text never becomes a special token, even if a tokenizer lacks bytes or adds tokens."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_loop.chat.text_encoding import byte_characters
from rl_loop.chat.tokenizer_vocabulary import TokenizerError
from rl_loop.chatml.vocabulary import END_OF_TEXT, ChatMlVocabulary, tiny_vocabulary
from rl_loop.environments import arithmetic

WORDS = arithmetic.vocabulary_text()
SIZE = 1200
MISSING_IN_SMOLLM = (0x04, 0x05, 0x06, 0x0E, 0x10, 0x7F, 0xC0, 0xC1, 0xF1, 0xF2, 0xF5, 0xFF)
"""Some bytes that SmolLM2's tokenizer lacks, and two bytes that begin characters."""

TEXTS = st.text(max_size=30) | st.text(
    "ab \x04\x05\x10\x7f\u00e9\U00040000\U00090000\ud800<|im_end|>endoftext\n", max_size=60
)


def tokenizer(missing: tuple[int, ...] = (), **changes: Any) -> str:
    """Return tokenizer.json without tokens for some bytes; ``changes`` replace top-level keys."""
    written = json.loads(tiny_vocabulary(SIZE, WORDS)._tokenizer.to_str())
    characters = byte_characters()
    lost = {characters[byte] for byte in missing}
    model = written["model"]
    model["vocab"] = {t: i for t, i in model["vocab"].items() if not lost.intersection(t)}
    model["merges"] = [pair for pair in model["merges"] if not lost.intersection("".join(pair))]
    model |= changes.pop("model", {})
    return json.dumps(written | changes)


def load(**options: Any) -> ChatMlVocabulary:
    return ChatMlVocabulary(tokenizer(**options), SIZE, "test")


VOCABULARIES = {
    "whole": load(),
    "unknown bytes are a stop token": load(
        missing=MISSING_IN_SMOLLM, model={"unk_token": END_OF_TEXT}
    ),
    "unknown bytes vanish": load(missing=MISSING_IN_SMOLLM, model={"unk_token": None}),
    "no replacement character": load(missing=(0x04, 0xEF), model={"unk_token": END_OF_TEXT}),
    "padding": load(
        padding={
            "strategy": {"Fixed": 16},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 700,
            "pad_type_id": 0,
            "pad_token": END_OF_TEXT,
        }
    ),
    "truncation": load(
        truncation={
            "direction": "Right",
            "max_length": 4,
            "strategy": "LongestFirst",
            "stride": 0,
        }
    ),
    "dropout": load(model={"dropout": 0.5}),
}


@pytest.fixture(params=VOCABULARIES)
def vocabulary(request: pytest.FixtureRequest) -> ChatMlVocabulary:
    return VOCABULARIES[request.param]


@settings(deadline=None, max_examples=100)
@given(text=TEXTS)
@pytest.mark.parametrize("name", VOCABULARIES)
def test_text_never_becomes_a_special_token(name: str, text: str) -> None:
    vocabulary = VOCABULARIES[name]
    ids = vocabulary.encode_text(text)
    assert all(vocabulary.is_text(token_id) for token_id in ids)
    assert bool(ids) == bool(text)
    assert vocabulary.encode_text(text) == ids


def test_every_byte_is_encoded_or_replaced(vocabulary: ChatMlVocabulary) -> None:
    for point in [*range(256), 0x40000, 0x90000, 0xFFFD]:
        character = chr(point)
        said = vocabulary.decode(vocabulary.encode_text(f"a{character}b"))
        assert said in (f"a{character}b", "a\ufffdb", "a?b")
        if point in range(0x20, 0x7F):
            assert said == f"a{character}b"


def test_missing_bytes_become_the_replacement_character() -> None:
    said = VOCABULARIES["unknown bytes are a stop token"]
    assert said.decode(said.encode_text("a\x04b\U00040000c")) == "a\ufffdb\ufffdc"
    # Without tokens for U+FFFD, "?" replaces a character.
    poorer = VOCABULARIES["no replacement character"]
    assert poorer.decode(poorer.encode_text("a\x04b\ufffdc")) == "a?b?c"


def test_tokenizer_that_cannot_encode_text_is_rejected() -> None:
    with pytest.raises(TokenizerError, match=r"test: the text .* is encoded as"):
        # Neither U+FFFD nor "?" can be encoded.
        load(missing=(0x04, 0xEF, ord("?")), model={"unk_token": END_OF_TEXT})
    with pytest.raises(TokenizerError, match="has the model WordLevel"):
        vocab = json.loads(tokenizer())["model"]["vocab"]
        load(model={"type": "WordLevel", "vocab": vocab, "unk_token": END_OF_TEXT})


def test_pickled_vocabulary_prints_no_warning(capfd: pytest.CaptureFixture[str]) -> None:
    """The tokenizers library prints thousands of ids if a vocabulary has holes."""
    pickle.dumps(VOCABULARIES["whole"])
    assert "holes" not in "".join(capfd.readouterr())
