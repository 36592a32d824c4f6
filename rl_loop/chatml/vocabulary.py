"""Token ids of ChatML models: a checkpoint's tokenizer, or a tiny vocabulary.

Untrusted text (prompts, tool output) is always encoded as text and cannot become a markup token
such as ``<|im_end|>``.
"""

import json
import re
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers

from megatron_gptoss.untrusted_files import MAX_LISTING_BYTES, UntrustedFileError, read_bytes
from megatron_gptoss.user_error import UserError
from rl_loop.chat.codec import without_surrogates
from rl_loop.chat.text_encoding import REPLACEMENT, check_encodes_text
from rl_loop.harmony.vocabulary import byte_pair_tokenizer, tokens_of

IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
END_OF_TEXT = "<|endoftext|>"
TOOL_CALL = "<tool_call>"
TOOL_CALL_END = "</tool_call>"

TINY_MARKUP = (END_OF_TEXT, IM_START, IM_END, TOOL_CALL, TOOL_CALL_END)
"""Added tokens of a tiny vocabulary. Qwen2.5 has these and more."""
UNKNOWN = "<|no token of the vocabulary|>"
"""Name of the id for bytes without a token, before they are replaced."""
TOKENIZER_FILE = "tokenizer.json"

# Qwen2.5's pattern for splitting text before byte-pair merging.
QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class TokenizerError(UserError, ValueError):
    """Tokenizer that cannot be used. The message names its file and the reason."""


class ChatMlVocabulary:
    """Ids of a Hugging Face tokenizer."""

    def __init__(self, tokenizer_json: str, size: int, where: str, is_own: bool = False) -> None:
        """Read a tokenizer.

        Args:
            tokenizer_json: content of ``tokenizer.json``.
            size: rows of the model's embedding. Ids that the tokenizer does not have are unused.
            where: name of the tokenizer for errors.
            is_own: True if it was created for this run, so that exports get it from here.

        Raises:
            TokenizerError: if the tokenizer has no ChatML tokens or more ids than the model.
        """
        self.size = size
        self._is_own = is_own
        self._tokenizer = Tokenizer.from_str(tokenizer_json)

        self.markup: dict[str, int] = {}
        """Ids of the tokens that are not text."""
        description = json.loads(tokenizer_json)
        for added in description["added_tokens"]:
            self.markup[added["content"]] = added["id"]
        _check_markup(description["added_tokens"], where)
        self._names = {token_id: name for name, token_id in self.markup.items()}

        # Added tokens may have ids behind a gap, so the size alone is not enough.
        known = self._tokenizer.get_vocab_size(with_added_tokens=True)
        largest = max([known - 1, *self._names])
        if largest >= size:
            raise TokenizerError(
                f"{where}: the tokenizer has ids up to {largest}, but model.vocab_size is "
                f"{size}. Set model.vocab_size to at least {largest + 1}"
            )
        self._known = largest + 1

        # A second tokenizer without added tokens, so that no text can become markup.
        self._text_tokenizer = Tokenizer.from_str(json.dumps(_text_only(description, where)))
        self._forbidden = frozenset([*self._names, self._text_tokenizer.token_to_id(UNKNOWN)])
        """Ids that encoded text must not contain: markup, and the id of unknown bytes."""
        try:
            check_encodes_text(self, self._forbidden, self.markup)
        except ValueError as error:
            raise TokenizerError(
                f"{where}: {error}. Use a tokenizer that can encode every text"
            ) from None

        # Qwen2.5's generation settings have both. Base models end a text with <|endoftext|>.
        ends = [name for name in (IM_END, END_OF_TEXT) if name in self.markup]
        self.stop_token_ids: tuple[int, ...] = tuple(self.markup[name] for name in ends)

    def encode_text(self, text: str) -> list[int]:
        """Encode plain text. No part of it becomes a markup token.

        Characters without tokens, and lone surrogates, become U+FFFD ("?" if the tokenizer has no
        tokens for U+FFFD either).
        """
        text = without_surrogates(text)
        ids = self._encode(text)
        if self._forbidden.isdisjoint(ids):
            return ids

        # Normalization may join characters.
        if self._text_tokenizer.normalizer is not None:
            text = self._text_tokenizer.normalizer.normalize_str(text)
        # Test each character separately. Byte-pair merging starts from single characters, so a
        # character whose bytes all have tokens can be encoded in any position.
        fallback = REPLACEMENT if self._has_tokens(REPLACEMENT) else "?"
        missing = {character for character in set(text) if not self._has_tokens(character)}
        ids = self._encode("".join(fallback if c in missing else c for c in text))
        return [token_id for token_id in ids if token_id not in self._forbidden]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._text_tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _has_tokens(self, character: str) -> bool:
        """Return True if the tokenizer has tokens for a character."""
        return self._forbidden.isdisjoint(self._encode(character))

    def decode(self, ids: Sequence[int]) -> str:
        """Decode with markup as text. Bytes that are not UTF-8 become U+FFFD."""
        text = ""
        # The text tokenizer does not know the added tokens.
        for is_text, group in groupby(ids, key=self.is_text):
            if is_text:
                text += self._text_tokenizer.decode(list(group), skip_special_tokens=False)
            else:
                text += "".join(self._names.get(i, f"<|unused_{i}|>") for i in group)
        return text

    def is_text(self, token_id: int) -> bool:
        """Return True if an id is a piece of text."""
        return token_id < self._known and token_id not in self._names

    def save(self, directory: Path) -> list[Path]:
        """Write the files for transformers' AutoTokenizer and return them, for the run's own
        vocabulary.

        The files of a checkpoint's tokenizer are copied from the checkpoint instead.
        """
        if not self._is_own:
            return []
        from transformers import PreTrainedTokenizerFast

        exported = PreTrainedTokenizerFast(
            tokenizer_object=self._tokenizer,
            eos_token=IM_END,
            pad_token=END_OF_TEXT,
        )
        return [Path(file) for file in exported.save_pretrained(directory)]


def read_vocabulary(directory: Path, size: int) -> ChatMlVocabulary:
    """Read the tokenizer of a Hugging Face directory.

    Args:
        directory: Hugging Face directory.
        size: rows of the model's embedding.

    Raises:
        TokenizerError: if the file is missing or unreadable, or has no ChatML tokens.
    """
    file = directory / TOKENIZER_FILE
    try:
        # Bounded, because the file may come from an untrusted source.
        content = read_bytes(file, MAX_LISTING_BYTES)
    except UntrustedFileError as error:
        raise TokenizerError(str(error)) from None
    except OSError as error:
        raise TokenizerError(
            f"{file}: {error.strerror}. The file must contain the tokens of the model"
        ) from None
    try:
        return ChatMlVocabulary(content.decode(), size, str(file))
    # Its message has the cause already.
    except TokenizerError:
        raise
    except Exception as error:  # tokenizers raises no specific class
        raise TokenizerError(f"{file}: cannot be read as a tokenizer: {error}") from None


def tiny_vocabulary(size: int, corpus: str) -> ChatMlVocabulary:
    """Return a tiny vocabulary: o200k's tokens in ``corpus``, all bytes and the markup.

    Text is split as Qwen2.5's tokenizer splits it.

    Raises:
        TokenizerError: if ``size`` is too small for the corpus.
    """
    # Qwen2.5 has only single digits. A line break behind every digit keeps o200k from joining
    # several digits to one token.
    tokens = tokens_of(re.sub("[0-9]", r"\g<0>\n", corpus))
    needed = len(tokens) + len(TINY_MARKUP)
    if needed > size:
        raise TokenizerError(
            f"a tiny vocabulary needs {needed} ids for these tasks, but model.vocab_size is "
            f"{size}. Raise it"
        )

    # transformers adds these two parts to any tokenizer in a qwen2 directory.
    tokenizer = byte_pair_tokenizer(tokens)
    tokenizer.normalizer = normalizers.NFC()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre_tokenizers.Split(Regex(QWEN_PATTERN), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    markup = [AddedToken(name, normalized=False, special=True) for name in TINY_MARKUP]
    tokenizer.add_special_tokens(markup)
    return ChatMlVocabulary(tokenizer.to_str(), size, "the tiny vocabulary", is_own=True)


def _text_only(description: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a tokenizer without added tokens, so that no text can become one.

    Args:
        description: content of ``tokenizer.json``.
        where: name of the tokenizer for errors.

    Raises:
        TokenizerError: if the tokenizer is not a byte-pair encoding.
    """
    model = description["model"]
    # Older files have no model type.
    if model.get("type", "BPE") != "BPE":
        raise TokenizerError(
            f"{where}: the tokenizer has the model {model['type']}. Use a byte-pair encoding"
        )

    # Bytes without a token become the tokenizer's unknown token, which may be a stop token
    # (SmolLM2), or vanish if there is none. A separate id makes them detectable.
    vocabulary = model["vocab"]
    unknown = 1 + max([*vocabulary.values(), *(t["id"] for t in description["added_tokens"])])
    model = {
        **model,
        "vocab": {**vocabulary, UNKNOWN: unknown},
        "unk_token": UNKNOWN,
        "dropout": None,  # would encode the same text differently each time
    }
    # The post-processor would need the added tokens. Truncation would lose text, and padding would
    # add a special token.
    return {
        **description,
        "model": model,
        "added_tokens": [],
        "post_processor": None,
        "truncation": None,
        "padding": None,
    }


def _check_markup(added_tokens: list[dict[str, Any]], where: str) -> None:
    """Raise TokenizerError if the tokenizer lacks tokens that ChatML needs."""
    by_name = {added["content"]: added for added in added_tokens}
    for name in (IM_START, IM_END):
        if name not in by_name:
            raise TokenizerError(
                f"{where} has no token {name}, but only the ChatML format is supported for this "
                "family"
            )

    for name in (IM_START, IM_END, TOOL_CALL, TOOL_CALL_END):
        # Such a token removes spaces of adjacent text, which is not supported.
        if name in by_name and (by_name[name]["lstrip"] or by_name[name]["rstrip"]):
            raise TokenizerError(
                f"{where}: the token {name} strips adjacent spaces, which is not supported"
            )
