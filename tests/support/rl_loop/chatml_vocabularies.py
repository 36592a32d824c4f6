"""Vocabularies of ChatML models."""

from __future__ import annotations

import json

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from rl_loop.chatml.vocabulary import (
    TINY_MARKUP,
    ChatMlVocabulary,
    tiny_vocabulary,
)
from rl_loop.environments import arithmetic
from rl_loop.harmony.vocabulary import byte_pair_tokenizer, choose_tokens

WORDS = arithmetic.vocabulary_text()


def with_call_tokens() -> ChatMlVocabulary:
    """Return a vocabulary with call tokens, like Qwen2.5."""
    return tiny_vocabulary(1200, WORDS)


def without_call_tokens() -> ChatMlVocabulary:
    """Return a vocabulary without call tokens, like SmolLM2, whose digits are single tokens."""
    vocabulary = json.loads(byte_pair_tokenizer(choose_tokens(WORDS)).to_str())["model"]
    merges = [tuple(pair) for pair in vocabulary["merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary["vocab"], merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(n, normalized=False) for n in TINY_MARKUP[:3]])
    return ChatMlVocabulary(tokenizer.to_str(), 1200, "test")


VOCABULARIES = {"qwen": with_call_tokens(), "smollm": without_call_tokens()}
