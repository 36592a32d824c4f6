r"""Splits LaTeX into tokens of mathematical expressions, and lists the names of the grammar."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import sympy

from rl_loop.rewards.notation import MAX_PRODUCT_LETTERS

TOKEN = re.compile(
    r"(?P<number>[0-9]+(?:\.[0-9]*)?|\.[0-9]+)|(?P<command>\\(?:[a-zA-Z]+|.))"
    r"|(?P<word>[a-zA-Z]+)|(?P<mark>[-+*/^_()\[\]{}|!,'=])|(?P<space>\s+)"
)

GREEK_NAMES = """
alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho varrho sigma tau
upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Sigma Upsilon Phi Psi Omega ell hbar
"""
GREEK = frozenset(GREEK_NAMES.split())
ACCENT_NAMES = "vec hat bar overline tilde widehat mathcal mathbb mathfrak mathscr"
ACCENTS = frozenset(ACCENT_NAMES.split())

TRIGONOMETRY: dict[str, Any] = {
    name: getattr(sympy, name)
    for name in ["sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "coth"]
}
INVERSE_FUNCTIONS: dict[str, Any] = {
    "arcsin": sympy.asin,
    "arccos": sympy.acos,
    "arctan": sympy.atan,
    "arccot": sympy.acot,
    "arcsec": sympy.asec,
    "arccsc": sympy.acsc,
    "arsinh": sympy.asinh,
    "arcosh": sympy.acosh,
    "artanh": sympy.atanh,
}
LOGARITHMS = frozenset({"log", "ln", "lg"})
MULTI_ARGUMENT_FUNCTIONS = frozenset({"gcd", "lcm", "max", "min"})
"""Functions of any number of arguments."""
FUNCTIONS = frozenset(
    {*TRIGONOMETRY, *INVERSE_FUNCTIONS, *LOGARITHMS, *MULTI_ARGUMENT_FUNCTIONS, "exp", "sqrt"}
)
"""Names of functions, which may be written without a backslash."""
PLAIN_NAMES = {"pi": r"\pi", "infty": r"\infty", "infinity": r"\infty", "inf": r"\infty"}
SHORT_WORD_LIST = """
an and are as at be but by for from has if in is it its mod no not of off on one or out per than the then to two was
"""
SHORT_WORDS = frozenset(SHORT_WORD_LIST.split())
"""Words of two or three letters that are English, not products of variables."""


class UnreadableError(ValueError):
    """Text that is not one complete expression of the grammar."""


@dataclass(frozen=True)
class LatexToken:
    """Smallest part of an expression."""

    text: str
    kind: str
    """number, command, letter, word, mark or end."""
    after_space: bool


def tokenize(text: str) -> Iterator[LatexToken]:
    """Yield the tokens of an expression, and an end token.

    Raises:
        UnreadableError: if a character is not part of any token.
    """
    position = 0
    after_space = False
    while position < len(text):
        match = TOKEN.match(text, position)
        if match is None:
            raise UnreadableError(text)
        position = match.end()

        kind = str(match.lastgroup)
        if kind == "word":
            yield from _split_letters(match[0], after_space)
        elif kind != "space":
            yield LatexToken(match[0], kind, after_space)
        # The parser distinguishes "5!!" from "5! !". Elsewhere, spaces have no meaning.
        after_space = kind == "space"
    yield LatexToken("", "end", after_space)


def _split_letters(word: str, after_space: bool) -> Iterator[LatexToken]:
    """Yield the tokens of letters without a backslash: a function, a name, a word, or factors."""
    if word in FUNCTIONS:
        yield LatexToken(f"\\{word}", "command", after_space)
    elif word in PLAIN_NAMES:
        yield LatexToken(PLAIN_NAMES[word], "command", after_space)
    elif _is_word(word):
        # The parser accepts words only within a name, such as \overline{ABCD}.
        yield LatexToken(word, "word", after_space)
    else:
        for i, letter in enumerate(word):
            yield LatexToken(letter, "letter", after_space and i == 0)


def _is_word(word: str) -> bool:
    """Return True for letters that are too many for a product, and for SHORT_WORDS."""
    return len(word) > MAX_PRODUCT_LETTERS or (word.lower() in SHORT_WORDS and not word.isupper())
