"""Token ids of a Hugging Face tokenizer, for any chat format.

Untrusted text (prompts, tool output) is always encoded as text and cannot become an added token
such as ``<|im_end|>``.
"""

import json
from collections.abc import Collection, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from megatron_gptoss.untrusted_files import MAX_LISTING_BYTES, UntrustedFileError, read_bytes
from megatron_gptoss.user_error import UserError
from rl_loop.chat.codec import without_surrogates
from rl_loop.chat.text_encoding import REPLACEMENT, byte_characters, check_encodes_text

UNKNOWN = "<|no token of the vocabulary|>"
"""Name of the id for bytes without a token, before they are replaced."""
TOKENIZER_FILE = "tokenizer.json"


class TokenizerError(UserError, ValueError):
    """Tokenizer that cannot be used. The message names its file and the reason."""


class TokenizerVocabulary:
    """Ids of a Hugging Face tokenizer. A subclass adds the tokens of a chat format."""

    required_tokens: Collection[str]
    """Names of the added tokens that the chat format needs."""
    stop_token_names: Collection[str]
    """Names of the tokens that end an assistant turn. Those that exist are used."""
    markup_tokens: Collection[str]
    """Names of all tokens that the chat format uses."""

    def __init__(self, tokenizer_json: str, size: int, where: str) -> None:
        """Read a tokenizer.

        Args:
            tokenizer_json: content of ``tokenizer.json``.
            size: rows of the model's embedding. Ids that the tokenizer does not have are unused.
            where: name of the tokenizer for errors.

        Raises:
            TokenizerError: if the tokenizer lacks a token of the chat format, or has more ids than
                the model.
        """
        self.size = size
        self._tokenizer = Tokenizer.from_str(tokenizer_json)

        self.markup: dict[str, int] = {}
        """Ids of the tokens that are not text."""
        description = json.loads(tokenizer_json)
        for added in description["added_tokens"]:
            self.markup[added["content"]] = added["id"]
        self._check_markup(description["added_tokens"], where)
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

        ends = [name for name in self.stop_token_names if name in self.markup]
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

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one id, possibly a part of a character."""
        if not self.is_text(token_id):
            return self.decode([token_id]).encode()
        spelled = self._text_tokenizer.id_to_token(token_id)
        # Tokenizers that do not work on bytes have characters outside of the table.
        if spelled is None or not _bytes_by_character().keys() >= set(spelled):
            return self.decode([token_id]).encode()
        return bytes(_bytes_by_character()[character] for character in spelled)

    @property
    def special_ids(self) -> Collection[int]:
        """Ids that are not text: added tokens, and ids that the tokenizer does not have."""
        return {*self._names, *range(self._known, self.size)}

    def is_text(self, token_id: int) -> bool:
        """Return True if an id is a piece of text."""
        return token_id < self._known and token_id not in self._names

    def save(self, directory: Path) -> list[Path]:
        """Return no files, because those of a checkpoint's tokenizer are copied from it."""
        return []

    def _check_markup(self, added_tokens: list[dict[str, Any]], where: str) -> None:
        """Raise TokenizerError if the tokenizer lacks tokens of the chat format."""
        by_name = {added["content"]: added for added in added_tokens}
        missing = [name for name in self.required_tokens if name not in by_name]
        if missing:
            raise TokenizerError(
                f"{where} has no token {', '.join(missing)}, which the chat format needs. Use a "
                "tokenizer with the tokens of ChatML or Harmony"
            )
        for name in self.markup_tokens:
            # Such a token removes spaces of adjacent text, which is not supported.
            if name in by_name and (by_name[name]["lstrip"] or by_name[name]["rstrip"]):
                raise TokenizerError(
                    f"{where}: the token {name} strips adjacent spaces, which is not supported"
                )


@cache
def _bytes_by_character() -> dict[str, int]:
    """Return the byte of each character of byte-level BPE."""
    return {character: byte for byte, character in enumerate(byte_characters())}


def read_tokenizer(directory: Path) -> str:
    """Return the content of a Hugging Face directory's tokenizer.

    Raises:
        TokenizerError: if the file is missing or unreadable.
    """
    file = directory / TOKENIZER_FILE
    try:
        return read_bytes(file, MAX_LISTING_BYTES).decode()
    except UntrustedFileError as error:
        raise TokenizerError(str(error)) from None
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{file}: cannot be read as a tokenizer: {error}") from None
    except OSError as error:
        raise TokenizerError(
            f"{file}: {error.strerror}. The file must contain the tokens of the model"
        ) from None


def read_vocabulary[V: TokenizerVocabulary](kind: type[V], directory: Path, size: int) -> V:
    """Read the tokenizer of a Hugging Face directory.

    Args:
        kind: vocabulary of a chat format.
        directory: Hugging Face directory.
        size: rows of the model's embedding.

    Raises:
        TokenizerError: if the file is missing or unreadable, or lacks a token of the chat format.
    """
    content = read_tokenizer(directory)
    file = directory / TOKENIZER_FILE
    try:
        return kind(content, size, str(file))
    # Its message has the cause already.
    except TokenizerError:
        raise
    except Exception as error:  # tokenizers raises no specific class
        raise TokenizerError(f"{file}: cannot be read as a tokenizer: {error}") from None


def added_tokens(directory: Path) -> frozenset[str]:
    """Return the names of the tokens that were added to a Hugging Face directory's tokenizer.

    Raises:
        TokenizerError: if the file is missing or unreadable.
    """
    content = read_tokenizer(directory)
    try:
        return frozenset(added["content"] for added in json.loads(content)["added_tokens"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        file = directory / TOKENIZER_FILE
        raise TokenizerError(f"{file}: cannot be read as a tokenizer: {error}") from None


def text_tokens(directory: Path) -> dict[str, int]:
    """Return the ids of a tokenizer's text tokens.

    Added tokens are left out.

    Raises:
        TokenizerError: if the file is missing or unreadable.
    """
    file = directory / TOKENIZER_FILE
    try:
        description = json.loads(read_tokenizer(directory))
        # A model may use other names for the ids of added tokens.
        added = {token["id"] for token in description["added_tokens"]}
        return {
            token: token_id
            for token, token_id in description["model"]["vocab"].items()
            if token_id not in added
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, TokenizerError):
            raise
        raise TokenizerError(f"{file}: cannot be read as a tokenizer: {error}") from None


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
    # It may be the id of an added token, which text cannot have either. A larger id would leave
    # a gap, about which the library prints a message whenever the tokenizer is copied.
    vocabulary = model["vocab"]
    unknown = 1 + max(vocabulary.values())
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
