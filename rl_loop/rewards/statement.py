r"""Statements: the forms of an answer.

An answer is a value, a list, a set, an interval, a relation, a congruence, a matrix or cases.
``rl_loop.rewards.statement_parser`` parses them.

Examples, in standard notation:

* ``5 \text{cm}``: ExpressionStatement with units
* ``101_2``: BasedNumber
* ``\text{even}``: WordsStatement
* ``1, 2, \ldots``: StatementList with an EllipsisItem
* ``(1, 2]``: BracketedStatement
* ``\{1, 2\}``: ListedSet
* ``\{x : x > 3\}``: SetBuilder
* ``\mathbb{R}``: NamedSet
* ``A \cup B``: SetOperation
* ``1 < x < 2``: RelationChain
* ``x = 3 \pmod{5}``: Congruence
* ``3:4``: Ratio
* ``\begin{pmatrix} 1 & 2 \end{pmatrix}``: MatrixStatement
* ``\begin{cases} 1 & x > 0 \\ 0 & \text{otherwise} \end{cases}``: PiecewiseStatement
"""

import re
from dataclasses import dataclass

from sympy import Expr

from rl_loop.rewards.expression import SIGN
from rl_loop.rewards.number import NotatedNumber
from rl_loop.rewards.units import UnitProduct

NO_UNIT = UnitProduct()


@dataclass(frozen=True)
class ExpressionStatement:
    """One expression."""

    text: str
    value: Expr
    number: NotatedNumber | None = None
    """Parsed notation, if it is a plain number."""
    units: UnitProduct = NO_UNIT


@dataclass(frozen=True)
class BasedNumber:
    """Digits in a base, such as 101_2."""

    digits: str
    base: int


@dataclass(frozen=True)
class WordsStatement:
    r"""Words in \text{}, or an empty side of a relation, or an empty item of a list."""

    text: str


@dataclass(frozen=True)
class EllipsisItem:
    r"""Ellipsis in a list."""


@dataclass(frozen=True)
class StatementList:
    """Statements with separators between them, without brackets."""

    items: tuple["Statement", ...]
    connective: str
    """Connective: "," or "or"."""


@dataclass(frozen=True)
class BracketedStatement:
    """Point, vector or interval."""

    items: tuple["Statement", ...]
    opening: str
    closing: str


@dataclass(frozen=True)
class ListedSet:
    r"""Set of listed elements, \{1, 2\}."""

    items: tuple["Statement", ...]


@dataclass(frozen=True)
class SetBuilder:
    r"""Set with a condition, \{x : x > 3\}."""

    member: "Statement"
    condition: "Statement"


@dataclass(frozen=True)
class NamedSet:
    r"""Named set: \emptyset, \mathbb{R}, with signs as in \mathbb{R}^+."""

    name: str


@dataclass(frozen=True)
class SetOperation:
    r"""Sets joined by \cup, \cap or \setminus."""

    parts: tuple["Statement", ...]
    operation: str


@dataclass(frozen=True)
class RelationChain:
    """Sides with relations between them: x = 5, 1 < x < 2."""

    sides: tuple["Statement", ...]
    relations: tuple[str, ...]


@dataclass(frozen=True)
class Congruence:
    r"""Equality of residues, such as x = 3 \pmod{5}."""

    statement: "Statement"
    """Part in front of the modulus: x = 3."""
    modulus: "Statement"
    """Modulus: 5."""


@dataclass(frozen=True)
class Ratio:
    """Ratio such as 3:4."""

    parts: tuple["Statement", ...]


@dataclass(frozen=True)
class MatrixStatement:
    """Matrix as a sequence of rows."""

    rows: tuple[tuple["Statement", ...], ...]


@dataclass(frozen=True)
class PiecewiseStatement:
    """Values with their conditions."""

    rows: tuple[tuple["Statement", "Statement | None"], ...]
    """(value, condition) of each row. The condition is None for "otherwise"."""


type Statement = (
    ExpressionStatement
    | BasedNumber
    | WordsStatement
    | EllipsisItem
    | StatementList
    | BracketedStatement
    | ListedSet
    | SetBuilder
    | NamedSet
    | SetOperation
    | RelationChain
    | Congruence
    | Ratio
    | MatrixStatement
    | PiecewiseStatement
)


def is_name(side: Statement, *, may_have_numbers: bool = False) -> bool:
    """Return True if a side of an equation names a value: a variable, f(x), words.

    A name in an answer has no numbers. The ground truth may use any name.
    """
    if isinstance(side, Ratio):
        return all(is_name(part, may_have_numbers=may_have_numbers) for part in side.parts)
    if isinstance(side, BracketedStatement):
        is_point = (side.opening, side.closing) == ("(", ")")
        return is_point and all(
            is_name(item, may_have_numbers=may_have_numbers) for item in side.items
        )
    if not isinstance(side, WordsStatement | ExpressionStatement):
        return False
    # The numbers distinguish names: a_2 = 5 says nothing about a_3.
    if not may_have_numbers and re.search("[0-9]", side.text):
        return False
    if isinstance(side, WordsStatement):
        return True
    is_negative = side.text.startswith(("-", "+"))
    return bool(side.value.free_symbols) and not side.units.is_given and not is_negative


def signs_expanded(value: ExpressionStatement) -> tuple[ExpressionStatement, ...]:
    r"""Return the two values of an expression with \pm, or the value itself without it."""
    if not value.value.has(SIGN):
        return (value,)
    return tuple(
        ExpressionStatement(value.text, value.value.subs(SIGN, sign), None, value.units)
        for sign in (1, -1)
    )
