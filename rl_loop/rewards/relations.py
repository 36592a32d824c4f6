"""Chains of relations: their sides, the reversed chain, and the interval that a chain describes."""

import sympy
from sympy import Expr, Rational, S
from sympy.core.function import AppliedUndef

from rl_loop.rewards.equality import as_number
from rl_loop.rewards.statement import (
    BracketedStatement,
    ExpressionStatement,
    ListedSet,
    NamedSet,
    RelationChain,
    SetBuilder,
    SetOperation,
    Statement,
    is_name,
    signs_expanded,
)
from rl_loop.rewards.units import equivalent_units

FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!="}
ORDERED = frozenset({"<", "<=", ">", ">="})


def split_sides(statement: Statement) -> tuple[Statement, ...]:
    """Return the sides of an equation or congruence. Other statements are a single side."""
    if isinstance(statement, RelationChain) and set(statement.relations) <= {"=", "=="}:
        return statement.sides
    return (statement,)


def is_set(statement: Statement) -> bool:
    """Return True for intervals, points and sets of any form."""
    return isinstance(
        statement, BracketedStatement | SetOperation | NamedSet | ListedSet | SetBuilder
    )


def has_variables(statement: Statement) -> bool:
    """Return True for a value with variables."""
    return isinstance(statement, ExpressionStatement) and bool(statement.value.free_symbols)


def rounds_to(exact: Statement, rounded: Statement) -> bool:
    """Return True if a value rounds to a decimal at the decimal's number of places."""
    if (
        not isinstance(exact, ExpressionStatement)
        or not isinstance(rounded, ExpressionStatement)
        or rounded.number is None
    ):
        return False
    number = exact.number or as_number(exact.value)
    if number is None or not equivalent_units(exact.units, rounded.units):
        return False
    difference = abs(number.value - rounded.number.value)
    # At most half a unit of the last place.
    return difference * 2 * 10**rounded.number.places <= 1


def reversed_chain(chain: RelationChain) -> RelationChain | None:
    """Return a chain with reversed sides and relations."""
    if not set(chain.relations) <= set(FLIPPED):
        return None
    relations = tuple(FLIPPED[relation] for relation in reversed(chain.relations))
    return RelationChain(chain.sides[::-1], relations)


def subtract_sides(chain: RelationChain) -> Expr | None:
    """Return left minus right of a relation between 2 plain values without units."""
    left, right = chain.sides
    if not isinstance(left, ExpressionStatement) or not isinstance(right, ExpressionStatement):
        return None
    if left.units.is_given or right.units.is_given:
        return None
    # With \pm, a side has two values, and there are several differences.
    if len(signs_expanded(left)) > 1 or len(signs_expanded(right)) > 1:
        return None
    return left.value - right.value


def constant_ratio(one: Expr, other: Expr) -> Rational | None:
    """Return one / other if it is a rational number other than 0."""
    if other == 0 or not one.free_symbols or one.free_symbols != other.free_symbols:
        return None
    # 2x - 2y = 4 and x - y = 2 have differences with the ratio 2.
    ratio = sympy.cancel(sympy.together(one / other))
    return ratio if ratio.is_Rational and ratio != 0 else None


def is_unknown_name(side: Statement) -> bool:
    """Return True for x_1 and f(2), which are names with numbers."""
    return isinstance(side, ExpressionStatement) and _is_unknown(side.value)


def _is_unknown(value: Expr) -> bool:
    """Return True for x and f(x)."""
    return bool(value.is_Symbol) or isinstance(value, AppliedUndef)


def find_variable(chain: RelationChain) -> str | None:
    """Return the only name among the sides. None if there is no single name."""
    names = [
        str(side.value)
        for side in chain.sides
        if isinstance(side, ExpressionStatement) and is_name(side)
    ]
    return names[0] if len(names) == 1 else None


def find_interval(chain: RelationChain) -> Statement | None:
    """Return the interval of the variable in 1 < x < 2, x > 3 or x in (1, 2)."""
    if chain.relations == ("in",) and is_name(chain.sides[0]):
        return chain.sides[1] if is_set(chain.sides[1]) else None

    rising = _to_rising(chain)
    # A variable has at most two bounds.
    if rising is None or len(rising.sides) > 3:
        return None

    # One side is the variable, and the others are its bounds.
    sides = rising.sides
    places = [i for i, side in enumerate(sides) if is_unknown_name(side) and is_name(side)]
    bounds = [
        side for side in sides if isinstance(side, ExpressionStatement) and not has_variables(side)
    ]
    if len(places) != 1 or len(bounds) != len(sides) - 1:
        return None
    (place,) = places
    # 1 < 2 < x says more about x than its interval.
    if len(sides) == 3 and place != 1:
        return None

    low: Statement = ExpressionStatement(r"-\infty", S.NegativeInfinity)
    high: Statement = ExpressionStatement(r"\infty", S.Infinity)
    opening, closing = "(", ")"
    if place > 0:
        low = sides[0]
        opening = "[" if rising.relations[0] == "<=" else "("
    if place < len(sides) - 1:
        high = sides[-1]
        closing = "]" if rising.relations[-1] == "<=" else ")"
    return BracketedStatement((low, high), opening, closing)


def _to_rising(chain: RelationChain) -> RelationChain | None:
    """Return inequalities with only < and <=. None for mixed directions and other relations."""
    if not set(chain.relations) <= ORDERED:
        return None
    falling = [relation.startswith(">") for relation in chain.relations]
    if not any(falling):
        return chain
    return reversed_chain(chain) if all(falling) else None
