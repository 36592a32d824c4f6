"""Vocabularies for Harmony: of the released models, of tiny models, and of other tokenizers.

openai-harmony renders and parses in the ids of the released models ("Harmony ids"). A vocabulary
translates between Harmony ids and the ids of its model. Untrusted text (prompts, tool output) is
always encoded as text and cannot become a special token.
"""

from binascii import a2b_base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from openai_harmony import HarmonyEncoding, HarmonyEncodingName, load_harmony_encoding

from rl_loop.chat.codec import without_surrogates
from rl_loop.chat.text_encoding import BYTE_TOKENS, byte_characters, check_encodes_text
from rl_loop.chat.tokenizer_vocabulary import TokenizerVocabulary
from rl_loop.harmony.bounded_encoding import O200K_PATTERN, encode_bounded
from rl_loop.harmony.o200k import FILE_NAME, VocabularyUnavailableError, ensure_o200k

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPECIAL_TOKENS = (
    "<|startoftext|>",
    "<|endoftext|>",
    "<|return|>",
    "<|constrain|>",
    "<|channel|>",
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|call|>",
)
TURN_ENDS = ("<|return|>", "<|call|>")
"""Tokens that end an assistant turn."""
FIRST_SPECIAL_ID = 199_998
"""First Harmony id of special tokens, including reserved ones."""
FIRST_RESERVED_ID = 200_013
"""First Harmony id of reserved special tokens, which have no meaning."""


@cache
def harmony_encoding() -> HarmonyEncoding:
    """Load openai-harmony's encoding.

    Raises:
        VocabularyUnavailableError: if its file is not available.
    """
    ensure_o200k()
    return load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)


@cache
def special_id(token: str) -> int:
    """Return the Harmony id of a special token."""
    # Only this token may be special. The regular expression for all of them takes 0.2 s to compile.
    (token_id,) = harmony_encoding().encode(token, allowed_special={token}, disallowed_special=())
    return token_id


def _harmony_ids(text: str) -> list[int]:
    """Encode plain text. No part of it becomes a special token."""

    def encode(piece: str) -> list[int]:
        return harmony_encoding().encode(piece, disallowed_special=())

    return encode_bounded(without_surrogates(text), encode)


class GptOssVocabulary:
    """Vocabulary of GPT-OSS-20B and 120B with 201,088 ids, equal to Harmony's ids."""

    def __init__(self) -> None:
        self.size = 201_088
        self.stop_token_ids: tuple[int, ...] = tuple(map(special_id, TURN_ENDS))
        self.special_ids = range(FIRST_SPECIAL_ID, self.size)
        check_encodes_text(self, self.special_ids, SPECIAL_TOKENS)

    def encode_text(self, text: str) -> list[int]:
        """Encode plain text. "<|end|>" in it is seven characters, not the special token.

        Lone surrogates become U+FFFD.
        """
        return _harmony_ids(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Decode, with special tokens as names. Bytes that are not UTF-8 become U+FFFD."""
        return harmony_encoding().decode(list(ids))

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one id, possibly a part of a character."""
        text = harmony_encoding().decode([token_id], errors="surrogateescape")
        return text.encode(errors="surrogateescape")

    def from_harmony(self, ids: Sequence[int]) -> list[int]:
        """Convert Harmony ids to the model's ids."""
        return list(ids)

    def to_harmony(self, ids: Sequence[int]) -> list[int]:
        """Convert the model's ids to Harmony ids."""
        return list(ids)

    def save(self, directory: Path) -> list[Path]:
        """Write the files that transformers' AutoTokenizer needs, and return them.

        Returns no files here, because the files of the initial checkpoint are copied.
        """
        return []


class TinyVocabulary:
    """Vocabulary with the tokens of a corpus, for small models of demos and tests.

    The ids are the 256 bytes, then o200k tokens in o200k's order, then the special tokens, then
    unused ids up to ``size``. If byte-pair merges form a token from shorter tokens, these are in the
    vocabulary, too. Therefore text like the corpus is split as GPT-OSS splits it. Any other text can
    be encoded, with more tokens.
    """

    def __init__(self, size: int, corpus: str) -> None:
        """Choose the tokens. Raises ValueError if ``size`` is too small for ``corpus``."""
        self.size = size
        self._bytes = choose_tokens(corpus)

        first_special = len(self._bytes)
        unused = size - first_special - len(SPECIAL_TOKENS)
        if unused < 0:
            needed = size - unused
            raise ValueError(
                f"vocabulary=tiny needs {needed} ids for the texts of these tasks, but "
                f"model.vocab_size is {size}. Increase it"
            )

        names = [*SPECIAL_TOKENS, *(f"<|unused_{i}|>" for i in range(unused))]
        # Unused ids have names, too, so that the exported tokenizer has one token per row of the
        # embedding.
        self._names = dict(enumerate(names, start=first_special))

        # Unused ids are reserved tokens of Harmony. Sampling them is a format error, as in Harmony.
        reserved = range(FIRST_RESERVED_ID, FIRST_RESERVED_ID + unused)
        harmony_ids = [*map(special_id, SPECIAL_TOKENS), *reserved]
        self._to_harmony = dict(enumerate(harmony_ids, start=first_special))
        self._from_harmony = {theirs: ours for ours, theirs in self._to_harmony.items()}
        turn_ends = self.from_harmony([special_id(token) for token in TURN_ENDS])
        self.stop_token_ids: tuple[int, ...] = tuple(turn_ends)

        # This tokenizer has no special tokens, so text cannot become one.
        self._tokenizer = byte_pair_tokenizer(self._bytes)
        self.special_ids = range(first_special, size)
        check_encodes_text(self, self.special_ids, names)

    def encode_text(self, text: str) -> list[int]:
        """Encode plain text. No part of it becomes a special token.

        Lone surrogates become U+FFFD.
        """

        def encode(piece: str) -> list[int]:
            return self._tokenizer.encode(piece, add_special_tokens=False).ids

        return encode_bounded(without_surrogates(text), encode)

    def decode(self, ids: Sequence[int]) -> str:
        """Decode, with special tokens as names. Bytes that are not UTF-8 become U+FFFD."""
        text = ""
        for piece in self._pieces(ids):
            if isinstance(piece, bytes):
                text += piece.decode("utf-8", errors="replace")
            else:
                text += self._names[piece]
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one id, possibly a part of a character."""
        [piece] = self._pieces([token_id])
        return piece if isinstance(piece, bytes) else self._names[piece].encode()

    def _pieces(self, ids: Sequence[int]) -> Iterator[bytes | int]:
        """Split ids into runs of ordinary tokens, as bytes, and special or unused ids."""
        # Join a run before decoding, because a character may span several tokens.
        for is_ordinary, group in groupby(ids, key=lambda i: i < len(self._bytes)):
            if is_ordinary:
                yield b"".join(self._bytes[i] for i in group)
            else:
                yield from group

    def from_harmony(self, ids: Sequence[int]) -> list[int]:
        """Convert Harmony ids to the model's ids. Text is encoded again."""
        return _from_harmony(ids, self._from_harmony, self.encode_text)

    def to_harmony(self, ids: Sequence[int]) -> list[int]:
        """Convert the model's ids to Harmony ids, for parsing only.

        Text that is not UTF-8, or is split unusually, does not convert back to the same ids.
        """
        translated: list[int] = []
        for piece in self._pieces(ids):
            if isinstance(piece, bytes):
                # openai-harmony's parser reads Harmony ids only.
                translated += _harmony_ids(piece.decode("utf-8", errors="replace"))
            else:
                translated.append(self._to_harmony[piece])
        return translated

    def save(self, directory: Path) -> list[Path]:
        """Write the files that transformers' AutoTokenizer needs, and return them."""
        from tokenizers import AddedToken
        from transformers import PreTrainedTokenizerFast

        special_tokens = [AddedToken(name, normalized=False) for name in self._names.values()]
        tokenizer = byte_pair_tokenizer(self._bytes)
        tokenizer.add_special_tokens(special_tokens)

        exported = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            # The context of the released models.
            model_max_length=131_072,
            bos_token="<|startoftext|>",
            eos_token="<|return|>",
            pad_token="<|endoftext|>",
        )
        return [Path(file) for file in exported.save_pretrained(directory)]


class HarmonyTokenizer(TokenizerVocabulary):
    """Ids of a Hugging Face tokenizer that has Harmony's special tokens among its added tokens."""

    required_tokens = SPECIAL_TOKENS
    stop_token_names = TURN_ENDS
    markup_tokens = SPECIAL_TOKENS

    def __init__(self, tokenizer_json: str, size: int, where: str) -> None:
        super().__init__(tokenizer_json, size, where)
        self._from_harmony = {special_id(name): self.markup[name] for name in SPECIAL_TOKENS}
        self._to_harmony = {ours: theirs for theirs, ours in self._from_harmony.items()}

    def from_harmony(self, ids: Sequence[int]) -> list[int]:
        """Convert Harmony ids to the model's ids. Text is encoded again."""
        return _from_harmony(ids, self._from_harmony, self.encode_text)

    def to_harmony(self, ids: Sequence[int]) -> list[int]:
        """Convert the model's ids to Harmony ids, for parsing only.

        Added tokens that Harmony does not have, and unused ids, become a reserved token. Sampling
        it is a format error.
        """
        translated: list[int] = []
        for is_text, group in groupby(ids, key=self.is_text):
            if is_text:
                translated += _harmony_ids(self.decode(list(group)))
            else:
                translated += [self._to_harmony.get(i, FIRST_RESERVED_ID) for i in group]
        return translated


def _from_harmony(
    ids: Sequence[int], specials: Mapping[int, int], encode_text: Callable[[str], list[int]]
) -> list[int]:
    """Convert Harmony ids to a model's ids.

    Args:
        ids: Harmony ids.
        specials: {Harmony id of a special token: id in the model}.
        encode_text: encoder of text, for all other tokens.
    """
    translated: list[int] = []
    for is_special, group in groupby(ids, key=specials.__contains__):
        if is_special:
            translated += [specials[i] for i in group]
        else:
            translated += encode_text(harmony_encoding().decode(list(group)))
    return translated


Vocabulary = GptOssVocabulary | TinyVocabulary | HarmonyTokenizer


def model_special_id(vocabulary: Vocabulary, token: str) -> int:
    """Return the model's id of a special token."""
    [token_id] = vocabulary.from_harmony([special_id(token)])
    return token_id


def make_vocabulary(
    kind: Literal["gptoss", "tiny"],
    size: int,
    corpus: Callable[[], str],
) -> Vocabulary:
    """Return the vocabulary of a model.

    Args:
        kind: vocabulary of the released models, or a tiny one.
        size: number of ids.
        corpus: function that returns the text for a tiny vocabulary.

    Raises:
        ValueError: if ``size`` is not that of the released models, or too small for the corpus.
    """
    # Only a tiny vocabulary needs the corpus, which takes time to collect.
    if kind == "tiny":
        return _tiny_vocabulary(size, corpus())

    vocabulary = GptOssVocabulary()
    if size != vocabulary.size:
        raise ValueError(
            f"model.vocab_size is {size}, but vocabulary=gptoss has {vocabulary.size} ids. Set "
            f"model.vocab_size={vocabulary.size}"
        )
    return vocabulary


# Cached, because driver and rollout workers in one process each create the run's vocabulary.
_tiny_vocabulary = lru_cache(maxsize=4)(TinyVocabulary)


@lru_cache(maxsize=4)
def choose_tokens(corpus: str) -> tuple[bytes, ...]:
    """Return the single bytes and all tokens on the merge paths of ``corpus``, by rank."""
    path = ensure_o200k()
    if path is None:
        raise VocabularyUnavailableError(
            f"vocabulary=tiny needs the file {FILE_NAME}. Set TIKTOKEN_ENCODINGS_BASE to its "
            "directory"
        )

    ranks = _token_ranks(path)
    by_rank = list(ranks)

    # A token arises only by merging two shorter ones, so include those as well, down to bytes.
    chosen = set(range(BYTE_TOKENS))
    waiting = set(harmony_encoding().encode(corpus, disallowed_special=()))
    while waiting:
        rank = waiting.pop()
        if rank not in chosen:
            chosen.add(rank)
            waiting |= {ranks[part] for part in _last_merge(ranks, by_rank[rank])}
    return tuple(by_rank[rank] for rank in sorted(chosen))


@lru_cache(maxsize=1)
def _token_ranks(path: Path) -> dict[bytes, int]:
    """Return the rank of each token in the vocabulary file, in the order of ranks."""
    # A line of the file has a token in base64 and its rank, which is the line's number.
    tokens = path.read_bytes().split()[::2]
    return {a2b_base64(token): rank for rank, token in enumerate(tokens)}


def byte_pair_tokenizer(tokens: Sequence[bytes]) -> "Tokenizer":
    """Build a Hugging Face byte-level BPE of the tokens. Merges are derived from their ranks."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    # Byte-level BPE writes each byte as one printable character.
    characters = byte_characters()

    def spell(token: bytes) -> str:
        return "".join(characters[byte] for byte in token)

    # Hugging Face needs the merges in order of preference, which is the order of the ranks.
    ranks = {token: rank for rank, token in enumerate(tokens)}
    vocabulary = {spell(token): rank for token, rank in ranks.items()}
    merges = []
    for token in tokens:
        if len(token) > 1:
            left, right = _last_merge(ranks, token)
            merges.append((spell(left), spell(right)))

    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    split = pre_tokenizers.Split(Regex(O200K_PATTERN), "isolated")
    # The pattern above has split the text already, so ByteLevel must not split it by GPT-2's.
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _last_merge(ranks: dict[bytes, int], token: bytes) -> tuple[bytes, bytes]:
    """Return the two parts whose merge gives ``token``.

    Its bytes are merged, the pair of the lowest rank first, until two parts are left.
    """
    parts = [bytes([byte]) for byte in token]

    def rank_of_pair(i: int) -> int:
        # Byte-pair encoding merges the pair of the lowest rank first. Pairs without a token come
        # last.
        return ranks.get(parts[i] + parts[i + 1], len(ranks))

    while len(parts) > 2:
        best = min(range(len(parts) - 1), key=rank_of_pair)
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return parts[0], parts[1]
