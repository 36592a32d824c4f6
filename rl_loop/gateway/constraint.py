"""Constrained decoding: the tokens that a turn with a required call or a JSON schema may have.

llguidance parses the tokens with a grammar of the chat format. It is an optional package.
"""

import json
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from rl_loop.chat.codec import ChatCodec, Vocabulary
from rl_loop.engines.protocol import TokenMatcher
from rl_loop.gateway.errors import invalid_request, unsupported_error
from rl_loop.gateway.request import TurnConstraint

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

WORD_BITS = 32
"""Bits of one number in a mask of llguidance."""
MAX_ERROR_CHARACTERS = 300
"""Maximum characters of an error of llguidance in a message, which also has the parser's state."""


class GrammarError(RuntimeError):
    """The grammar cannot be parsed further: it is too complex, or a token does not fit."""


class GrammarMatcher:
    """Implements ``rl_loop.engines.protocol.TokenMatcher``."""

    def __init__(self, matcher: "LLMatcher", vocabulary_size: int) -> None:
        """Begin a turn.

        Args:
            matcher: matcher of llguidance before the first token.
            vocabulary_size: number of token ids.
        """
        self._matcher = matcher
        self._size = vocabulary_size
        # llguidance writes whole words.
        self._mask = np.zeros(-(-vocabulary_size // WORD_BITS), dtype=np.int32)

    def allowed(self) -> np.ndarray:
        """Return the tokens that may come next: bool [vocab]."""
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        self._check()
        bits = np.unpackbits(self._mask.view(np.uint8), count=self._size, bitorder="little")
        return bits.view(np.bool_)

    def accept(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        self._matcher.consume_tokens(list(tokens))
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(_summary(self._matcher))


type NewMatcher = Callable[[Sequence[int]], TokenMatcher]
"""Returns the matcher of a turn behind its first tokens."""


def prepare_constraints(codec: ChatCodec) -> None:
    """Load the vocabulary for constraints, if llguidance is installed.

    It blocks other threads for a second with GPT-OSS's vocabulary, so it is done before requests.
    """
    if find_spec("llguidance") is not None:
        _tokenizer(codec.vocabulary)


def compile_constraint(codec: ChatCodec, constraint: TurnConstraint) -> NewMatcher:
    """Compile the grammar of a turn. It takes up to a second for a large schema.

    Args:
        codec: chat format of the policy.
        constraint: required calls or a JSON schema.

    Raises:
        ApiError: llguidance is not installed, or does not support the schema.
    """
    try:
        from llguidance import LLMatcher
    except ImportError:
        message = "it needs llguidance, the extra `constraints` of the server"
        raise unsupported_error(constraint.parameter, message) from None

    schema = None if constraint.schema is None else _with_options(constraint.schema)
    arguments = {
        tool.name: _with_options(tool.parameters or ANY_OBJECT) for tool in constraint.tools
    }
    grammar = codec.turn_grammar(schema, arguments)
    # llguidance prints errors to standard error otherwise.
    matcher = LLMatcher(
        _tokenizer(codec.vocabulary), LLMatcher.grammar_from_lark(grammar), log_level=0
    )
    if matcher.is_error():
        raise invalid_request(
            f"the JSON schema is not supported: {_summary(matcher)}", constraint.parameter
        )
    return partial(_begin, matcher, codec.vocabulary.size)


def _begin(matcher: "LLMatcher", size: int, tokens: Sequence[int]) -> TokenMatcher:
    matcher_copy = GrammarMatcher(matcher.deep_copy(), size)
    matcher_copy.accept(tokens)
    return matcher_copy


ANY_OBJECT: dict[str, Any] = {"type": "object"}
"""JSON schema of any object."""
JSON_OPTIONS = {
    # A policy may repeat whitespace to the token limit otherwise.
    "whitespace_pattern": r"(\n {0,32}| )?",
    "json_allow_general_unicode_escapes": True,
}
"""Options of llguidance for a schema."""


def _with_options(schema: dict[str, Any]) -> str:
    return json.dumps(schema | {"x-guidance": JSON_OPTIONS})


def _summary(matcher: "LLMatcher") -> str:
    """Return the first line of a matcher's error."""
    return matcher.get_error().partition("\n")[0][:MAX_ERROR_CHARACTERS]


class _TokenBytes:
    """A vocabulary in the form that llguidance reads."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        special = vocabulary.special_ids
        self.special_token_ids = sorted(special)
        # Grammars name special tokens by their ids.
        self.tokens = [
            f"<|{token}|>".encode() if token in special else vocabulary.token_bytes(token)
            for token in range(vocabulary.size)
        ]
        # The token that would end a text. Turns end with a token of their grammar before.
        self.eos_token_id = self.special_token_ids[-1]
        self._encode = vocabulary.encode_text

    def __call__(self, text: str | bytes) -> list[int]:
        """Encode a text that the grammar prescribes. Other tokens of it are not allowed."""
        return self._encode(text if isinstance(text, str) else text.decode(errors="replace"))


_tokenizers: "WeakKeyDictionary[Vocabulary, LLTokenizer]" = WeakKeyDictionary()
"""Tokens of the vocabularies so far."""


def _tokenizer(vocabulary: Vocabulary) -> "LLTokenizer":
    """Return the tokens of a vocabulary for llguidance."""
    from llguidance import LLTokenizer, TokenizerWrapper

    if vocabulary not in _tokenizers:
        _tokenizers[vocabulary] = LLTokenizer(TokenizerWrapper(_TokenBytes(vocabulary)))
    return _tokenizers[vocabulary]
