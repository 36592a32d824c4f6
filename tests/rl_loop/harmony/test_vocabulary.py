"""Token ids of the small vocabulary, compared with plain byte-pair encoding and transformers."""

from __future__ import annotations

from itertools import pairwise

import pytest
import regex
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rl_loop.chat.text_encoding import byte_characters
from rl_loop.environments import arithmetic
from rl_loop.harmony.vocabulary import (
    O200K_PATTERN,
    SPECIAL_TOKENS,
    GptOssVocabulary,
    TinyVocabulary,
    harmony_encoding,
    make_vocabulary,
    special_id,
)

SIZE = 640
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40) | st.text(
    "ab 1290é\n\r'sST*()漢 ", max_size=60
)


@pytest.fixture(scope="module")
def vocabulary() -> TinyVocabulary:
    return TinyVocabulary(SIZE, arithmetic.vocabulary_text())


@pytest.fixture(scope="module")
def exported(vocabulary: TinyVocabulary, tmp_path_factory: pytest.TempPathFactory):
    """Return the tokenizer that transformers loads from the exported files."""
    from transformers import AutoTokenizer

    directory = tmp_path_factory.mktemp("tokenizer")
    vocabulary.save(directory)
    return AutoTokenizer.from_pretrained(directory)


@pytest.fixture(scope="module")
def ranks(vocabulary: TinyVocabulary) -> dict[bytes, int]:
    return {token: rank for rank, token in enumerate(vocabulary._bytes)}


def plain_byte_pair_encoding(text: str, ranks: dict[bytes, int]) -> list[int]:
    ids = []
    for word in regex.findall(O200K_PATTERN, text):
        parts = [bytes([byte]) for byte in word.encode()]
        while True:
            pairs = [ranks.get(a + b, len(ranks)) for a, b in pairwise(parts)]
            if not pairs or min(pairs) == len(ranks):
                break
            i = pairs.index(min(pairs))
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        ids += [ranks[part] for part in parts]
    return ids


@settings(deadline=None, max_examples=150)
@given(TEXTS)
def test_text_is_encoded_like_byte_pair_merging_by_rank(vocabulary, ranks, text: str) -> None:
    assert vocabulary.encode_text(text) == plain_byte_pair_encoding(text, ranks)


def test_corpus_is_split_like_the_released_models_split_it(vocabulary) -> None:
    text, full = arithmetic.vocabulary_text(), GptOssVocabulary()
    assert [vocabulary.decode([i]) for i in vocabulary.encode_text(text)] == [
        full.decode([i]) for i in full.encode_text(text)
    ]


@pytest.mark.parametrize(
    "text",
    [
        "1234567 12.345 007",
        "I'll HelloWorld don't IT'S naïve Übung",
        "x = [1, 2]\n\n    if a//b:\r\n\treturn  None   \n ",
        "漢字 и кириллица, عربى 🙂🙂 e\u0301",
    ],
)
def test_vocabulary_splits_its_text_like_the_released_models(text: str) -> None:
    own, full = TinyVocabulary(512, text), GptOssVocabulary()
    mine, theirs = own.encode_text(text), full.encode_text(text)
    assert len(mine) == len(theirs)
    assert [own.decode(mine[:i]) for i in range(len(mine))] == [
        full.decode(theirs[:i]) for i in range(len(mine))
    ]


def test_numbers_of_two_digits_are_one_token(vocabulary) -> None:
    assert all(len(vocabulary.encode_text(str(n))) == 1 for n in range(10, 100))


@settings(deadline=None, max_examples=150)
@given(TEXTS)
def test_text_is_unchanged_after_encoding_and_decoding(vocabulary, text: str) -> None:
    assert vocabulary.decode(vocabulary.encode_text(text)) == text


@settings(deadline=None, max_examples=150)
@given(TEXTS)
def test_exported_tokenizer_encodes_like_the_vocabulary(vocabulary, exported, text: str) -> None:
    assume(
        "<|" not in text
    )  # transformers parses names of special tokens in text; the vocabulary never does
    assert exported.encode(text, add_special_tokens=False) == vocabulary.encode_text(text)


@settings(deadline=None, max_examples=300)
@given(
    st.lists(
        st.integers(0, SIZE - 1) | st.integers(120, 255) | st.integers(SIZE - 100, SIZE - 1),
        max_size=20,
    )
)
def test_exported_tokenizer_decodes_any_ids_like_the_vocabulary(
    vocabulary, exported, ids: list[int]
) -> None:
    assert exported.decode(ids, clean_up_tokenization_spaces=False) == vocabulary.decode(ids)


def test_exported_tokenizer_knows_the_special_tokens(vocabulary, exported) -> None:
    text = "<|start|>assistant<|channel|>final<|message|>4<|return|>"
    ids = exported.encode(text, add_special_tokens=False)
    assert vocabulary.to_harmony(ids) == harmony_encoding().encode(text, allowed_special="all")
    assert exported.eos_token_id == ids[-1] == vocabulary.stop_token_ids[0]
    assert len(exported) == vocabulary.size
    assert exported.chat_template is None


def test_byte_characters_equal_those_of_transformers() -> None:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    assert dict(enumerate(byte_characters())) == bytes_to_unicode()


def test_text_cannot_become_a_special_token(vocabulary) -> None:
    text = "".join(SPECIAL_TOKENS) + "<|unused_0|><|reserved_200013|>"
    assert max(vocabulary.encode_text(text)) < len(vocabulary._bytes)
    assert max(GptOssVocabulary().encode_text(text)) < 199_998
    assert vocabulary.decode(vocabulary.encode_text(text)) == text


@settings(deadline=None, max_examples=100)
@given(st.lists(TEXTS | st.sampled_from(SPECIAL_TOKENS), max_size=6))
def test_conversion_to_harmony_ids_keeps_text_and_special_tokens(
    vocabulary, pieces: list[str]
) -> None:
    harmony_ids = []
    for piece in pieces:
        allowed = {piece} if piece in SPECIAL_TOKENS else set()
        harmony_ids += harmony_encoding().encode(
            piece, allowed_special=allowed, disallowed_special=()
        )
    ids = vocabulary.from_harmony(harmony_ids)
    assert vocabulary.decode(ids) == "".join(pieces)
    assert harmony_encoding().decode(vocabulary.to_harmony(ids)) == "".join(pieces)
    specials = [i for i in harmony_ids if i >= 199_998]
    assert [i for i in vocabulary.to_harmony(ids) if i >= 199_998] == specials


def test_every_named_special_token_has_an_id(
    vocabulary,
) -> None:
    named = {name for name in harmony_encoding().special_tokens_set if "reserved" not in name}
    assert named == set(SPECIAL_TOKENS)
    for name in named:
        (small,) = vocabulary.from_harmony([special_id(name)])
        assert vocabulary.to_harmony([small]) == [special_id(name)]
        assert vocabulary.decode([small]) == name


def test_invalid_utf8_decodes_to_the_replacement_character(vocabulary) -> None:
    broken = [vocabulary.encode_text("漢")[0], vocabulary.encode_text("a")[0]]
    assert (
        harmony_encoding().decode(vocabulary.to_harmony(broken))
        == vocabulary.decode(broken)
        == "\N{REPLACEMENT CHARACTER}a"
    )


def test_too_small_vocabulary_names_the_size_that_is_needed() -> None:
    needed = 256 + len(SPECIAL_TOKENS) + 1  # "th" is one merge
    assert TinyVocabulary(needed, "th").size == needed
    with pytest.raises(ValueError, match=f"needs {needed}"):
        TinyVocabulary(needed - 1, "th")


def test_model_and_vocabulary_of_different_size_are_rejected() -> None:
    with pytest.raises(
        ValueError, match=r"model\.vocab_size is 1000, but vocabulary=gptoss has 201088"
    ):
        make_vocabulary("gptoss", 1000, str)
