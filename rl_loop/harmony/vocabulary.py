"""Token ids: the vocabulary of the released models, and a small one cut from it.

openai-harmony renders and parses in the ids of the released models ("Harmony ids"). A vocabulary translates between
those and the ids of its model. Text from outside (prompts, tool output) is always encoded as text: it can never become
a special token."""

import base64
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from openai_harmony import HarmonyEncoding, HarmonyEncodingName, load_harmony_encoding

from rl_loop.harmony.bounded_encoding import O200K_PATTERN, encode_bounded
from rl_loop.harmony.o200k import FILE_NAME, VocabularyUnavailable, ensure_o200k

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPECIAL_TOKENS = (
    "<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>", "<|end|>",
    "<|message|>", "<|call|>",
)  # fmt: skip
# Harmony ids from here on are special tokens that mean nothing
FIRST_RESERVED_ID = 200_013


@cache
def harmony_encoding() -> HarmonyEncoding:
    """openai-harmony's encoding; raises VocabularyUnavailable where its file cannot be had."""
    ensure_o200k()
    return load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)


@cache
def special_id(token: str) -> int:
    """Harmony id of a special token. openai-harmony takes milliseconds to look one up."""
    (token_id,) = harmony_encoding().encode(token, allowed_special={token})
    return token_id


def _harmony_ids(text: str) -> list[int]:
    """Harmony ids of plain text."""
    return encode_bounded(text, lambda part: harmony_encoding().encode(part, disallowed_special=()))


class GptOssVocabulary:
    """The 201,088 ids of GPT-OSS-20B and 120B: the same as Harmony's."""

    def __init__(self) -> None:
        self.size = 201_088
        # what ends an assistant turn
        self.stop_token_ids: tuple[int, ...] = (special_id("<|return|>"), special_id("<|call|>"))

    def encode_text(self, text: str) -> list[int]:
        """Ids of plain text; "<|end|>" in it is five ordinary characters and more, never the special token."""
        return _harmony_ids(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text with special tokens written out; bytes that are not UTF-8 become U+FFFD."""
        return harmony_encoding().decode(list(ids))

    def from_harmony(self, ids: Sequence[int]) -> list[int]:
        return list(ids)

    def to_harmony(self, ids: Sequence[int]) -> list[int]:
        return list(ids)

    def save(self, directory: Path) -> list[Path]:
        """Write what transformers' AutoTokenizer needs; returns the files. None here: those of the checkpoint that
        training started from are copied."""
        return []


class TinyVocabulary:
    """The 256 bytes, the o200k tokens that ``corpus`` is made of, the special tokens, then unused ids up to ``size``.

    With every token come the shorter ones that byte-pair merging makes it from, in o200k's order. So text like the
    corpus is split as GPT-OSS splits it, and all other text is encoded too, only in more tokens."""

    def __init__(self, size: int, corpus: str) -> None:
        self.size = size
        self._bytes = _tokens_of(corpus)
        first = len(self._bytes)
        unused = size - first - len(SPECIAL_TOKENS)
        if unused < 0:
            raise ValueError(f"a tiny vocabulary of {size} ids is too small: the tasks need {size - unused}")
        names = [*SPECIAL_TOKENS, *(f"<|unused_{i}|>" for i in range(unused))]
        self._names = dict(enumerate(names, start=first))
        harmony_ids = [*map(special_id, SPECIAL_TOKENS), *range(FIRST_RESERVED_ID, FIRST_RESERVED_ID + unused)]
        self._to_harmony = dict(enumerate(harmony_ids, start=first))
        self._from_harmony = {big: small for small, big in self._to_harmony.items()}
        self._text = _tokenizer(self._bytes)  # without the special tokens: text can then not contain one
        ends = special_id("<|return|>"), special_id("<|call|>")
        self.stop_token_ids: tuple[int, ...] = tuple(self._from_harmony[end] for end in ends)

    def encode_text(self, text: str) -> list[int]:
        return encode_bounded(text, lambda part: self._text.encode(part, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        pieces = self._pieces(ids)
        return "".join(self._names[p] if isinstance(p, int) else p.decode("utf-8", errors="replace") for p in pieces)

    def _pieces(self, ids: Sequence[int]) -> Iterator[bytes | int]:
        """Runs of ordinary tokens as bytes, and the ids of special and unused tokens between them."""
        for ordinary, group in groupby(ids, key=lambda i: i < len(self._bytes)):
            if ordinary:
                yield b"".join(self._bytes[i] for i in group)
            else:
                yield from group

    def from_harmony(self, ids: Sequence[int]) -> list[int]:
        out: list[int] = []
        for special, group in groupby(ids, key=lambda i: i in self._from_harmony):
            if special:
                out += [self._from_harmony[i] for i in group]
            else:
                out += self.encode_text(harmony_encoding().decode(list(group)))
        return out

    def to_harmony(self, ids: Sequence[int]) -> list[int]:
        """For parsing only: text that is not UTF-8 or is split unusually does not come back as the same ids."""
        out: list[int] = []
        for piece in self._pieces(ids):
            if isinstance(piece, bytes):
                out += _harmony_ids(piece.decode("utf-8", errors="replace"))
            else:
                out.append(self._to_harmony[piece])
        return out

    def save(self, directory: Path) -> list[Path]:
        from tokenizers import AddedToken
        from transformers import PreTrainedTokenizerFast

        tokenizer = _tokenizer(self._bytes)
        tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in self._names.values()])
        special = {"bos_token": "<|startoftext|>", "eos_token": "<|return|>", "pad_token": "<|endoftext|>"}
        whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=131_072, **special)
        return [Path(file) for file in whole.save_pretrained(directory)]


Vocabulary = GptOssVocabulary | TinyVocabulary


def make_vocabulary(kind: Literal["gptoss", "tiny"], size: int, corpus: Callable[[], str]) -> Vocabulary:
    """The vocabulary of a model with ``size`` ids; the tiny one is made for ``corpus``. Raises ValueError if that is
    not its size."""
    if kind == "tiny":
        return TinyVocabulary(size, corpus())
    vocabulary = GptOssVocabulary()
    if size != vocabulary.size:
        raise ValueError(f"model.vocab_size is {size}, but vocabulary 'gptoss' has {vocabulary.size} ids")
    return vocabulary


def _tokens_of(corpus: str) -> list[bytes]:
    """The single bytes and all tokens on the merge paths of ``corpus``, in order of rank."""
    path = ensure_o200k()
    if path is None:
        advice = "set TIKTOKEN_ENCODINGS_BASE to its folder"
        raise VocabularyUnavailable(f"the tiny vocabulary needs the file {FILE_NAME}; {advice}")
    by_rank = [base64.b64decode(line.split()[0]) for line in path.read_bytes().splitlines()]
    ranks = {token: rank for rank, token in enumerate(by_rank)}
    kept = set(range(256))
    waiting = set(harmony_encoding().encode(corpus, disallowed_special=()))
    while waiting:
        rank = waiting.pop()
        if rank not in kept:
            kept.add(rank)
            waiting |= {ranks[part] for part in _last_merge(ranks, by_rank[rank])}
    return [by_rank[rank] for rank in sorted(kept)]


def _tokenizer(tokens: list[bytes]) -> "Tokenizer":
    """The tokens as a Hugging Face byte-level BPE: merges are recovered from the ranks."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = bytes_to_unicode()

    def spell(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    ranks = {token: rank for rank, token in enumerate(tokens)}
    merges = [tuple(map(spell, _last_merge(ranks, token))) for token in tokens if len(token) > 1]
    tokenizer = Tokenizer(models.BPE({spell(token): rank for token, rank in ranks.items()}, merges))
    split = pre_tokenizers.Split(Regex(O200K_PATTERN), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _last_merge(ranks: dict[bytes, int], token: bytes) -> tuple[bytes, bytes]:
    """The two parts whose merge makes ``token``: merge its bytes by rank until two parts are left."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        best = min(range(len(parts) - 1), key=lambda i: ranks.get(parts[i] + parts[i + 1], len(ranks)))
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return parts[0], parts[1]
