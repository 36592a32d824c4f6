"""Token ids of ChatML models: a checkpoint's tokenizer, or a tiny vocabulary."""

import re
from pathlib import Path

from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers

from rl_loop.chat.tokenizer_vocabulary import TokenizerError, TokenizerVocabulary
from rl_loop.harmony.vocabulary import byte_pair_tokenizer, choose_tokens

IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
END_OF_TEXT = "<|endoftext|>"
TOOL_CALL = "<tool_call>"
TOOL_CALL_END = "</tool_call>"
CALL_MARKUP = re.compile(f"({re.escape(TOOL_CALL)}|{re.escape(TOOL_CALL_END)})")
"""The group keeps the markup among the parts of a split."""

TINY_MARKUP = (END_OF_TEXT, IM_START, IM_END, TOOL_CALL, TOOL_CALL_END)
"""Added tokens of a tiny vocabulary. Qwen2.5 has these and more."""

# Qwen2.5's pattern for splitting text before byte-pair merging.
QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class ChatMlVocabulary(TokenizerVocabulary):
    """Ids of a tokenizer with the tokens of ChatML."""

    required_tokens = (IM_START, IM_END)
    stop_token_names = (IM_END, END_OF_TEXT)
    markup_tokens = (IM_START, IM_END, TOOL_CALL, TOOL_CALL_END)


class TinyChatMlVocabulary(ChatMlVocabulary):
    """Vocabulary that a run builds from its own texts.

    No checkpoint has it, so ``save`` writes the tokenizer of an export.
    """

    def save(self, directory: Path) -> list[Path]:
        """Write the files for transformers' AutoTokenizer, and return them."""
        from transformers import PreTrainedTokenizerFast

        exported = PreTrainedTokenizerFast(
            tokenizer_object=self._tokenizer,
            eos_token=IM_END,
            pad_token=END_OF_TEXT,
        )
        return [Path(file) for file in exported.save_pretrained(directory)]


def tiny_vocabulary(size: int, corpus: str) -> TinyChatMlVocabulary:
    """Return a tiny vocabulary: o200k's tokens in ``corpus``, all bytes and the markup.

    Text is split as Qwen2.5's tokenizer splits it.

    Raises:
        TokenizerError: if ``size`` is too small for the corpus.
    """
    # Qwen2.5 has one token per digit. A line break after each digit keeps o200k from merging
    # digits.
    tokens = choose_tokens(re.sub("[0-9]", r"\g<0>\n", corpus))
    needed = len(tokens) + len(TINY_MARKUP)
    if needed > size:
        raise TokenizerError(
            f"vocabulary=tiny needs {needed} ids for the texts of these tasks, but "
            f"model.vocab_size is {size}. Increase it"
        )

    tokenizer = byte_pair_tokenizer(tokens)
    # Normalizer and pre-tokenizer, which transformers also adds when it loads a tokenizer of model
    # type qwen2.
    tokenizer.normalizer = normalizers.NFC()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre_tokenizers.Split(Regex(QWEN_PATTERN), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    markup = [AddedToken(name, normalized=False, special=True) for name in TINY_MARKUP]
    tokenizer.add_special_tokens(markup)
    return TinyChatMlVocabulary(tokenizer.to_str(), size, "the tiny vocabulary")
