"""Equality of expressions, first at some points, then by algebra if points may be insufficient."""

from collections.abc import Sequence
from fractions import Fraction

import sympy
from sympy import Dummy, Expr, Rational, S
from sympy.core.function import AppliedUndef

from rl_loop.rewards.number import NotatedNumber

DIGITS = 60
"""Number of decimal digits for comparing expressions at points."""
EQUAL = sympy.Float(10) ** -45
"""Maximum relative difference of equal values."""
MAX_MAGNITUDE = 10**18
"""Largest numerator, denominator or power for which agreement at points is trusted."""
MAX_EXPONENT = 60
"""Largest exponent for which agreement at points is trusted."""
POINTS = (
    Fraction(7, 19),
    Fraction(-31, 17),
    Fraction(23, 11),
    Fraction(10**4, 7),
    Fraction(-(10**4), 11),
)
"""Values of the first variable. Further variables get values near it.

Some values are large, because small ones do not reveal all differences: |x - 9| is 9 - x if x < 9.
"""
OPAQUE = (
    AppliedUndef,
    sympy.Abs,
    sympy.Max,
    sympy.Min,
    sympy.floor,
    sympy.ceiling,
)
"""Functions that may agree at all points and differ elsewhere. Their arguments are compared."""


def equivalent_values(one: Expr, other: Expr) -> bool:
    """Return True if two expressions agree.

    They must agree at POINTS and, where points may be insufficient, by algebra.
    """
    if one == other:
        return True
    # Infinite values equal only themselves, which was checked above. ``is_finite`` is None if sympy
    # does not know it.
    if one.is_finite is False or other.is_finite is False:
        return False
    # sympy reduces rationals, so different ones have been found unequal above.
    if one.is_Rational and other.is_Rational:
        return False

    if one.has(*OPAQUE) or other.has(*OPAQUE):
        one, other = _replace_functions(one, other)
    # Sorted, so that a verdict does not depend on the order of a set.
    symbols = sorted(one.free_symbols | other.free_symbols, key=str)
    if one == 0 or other == 0:
        # Relative to 0 no difference is small, so algebra must show that it is 0.
        is_small = _agree_at_points(one - other + 1, S.One, symbols)
        return is_small and bool(sympy.simplify(one - other) == 0)
    if not _agree_at_points(one, other, symbols):
        return False
    difference = sympy.expand(one - other)
    if difference == 0:
        return True
    # Agreement within EQUAL is enough proof, unless terms are too small to be visible.
    if _has_usual_numbers(one) and _has_usual_numbers(other):
        return True
    return bool(sympy.simplify(difference) == 0)


def _replace_functions(one: Expr, other: Expr) -> tuple[Expr, Expr]:
    """Replace OPAQUE functions, such as f(x) and |x|, by variables."""
    dummies: dict[Expr, Expr] = {}

    def replaced(function: Expr) -> Expr:
        # Expanded, so that f(x + x) and f(2x) become the same variable.
        key = function.func(*map(sympy.expand, function.args))
        return dummies.setdefault(key, Dummy(f"z{len(dummies)}"))

    def without(value: Expr) -> Expr:
        return value.replace(lambda part: isinstance(part, OPAQUE), replaced)

    return without(one), without(other)


def _agree_at_points(one: Expr, other: Expr, symbols: Sequence[Expr]) -> bool:
    """Return True if two expressions have equal values at all POINTS where they are defined."""
    compared = 0
    for point in POINTS if symbols else POINTS[:1]:
        values = {
            # Different for every variable, so that x - y does not vanish.
            symbol: Rational(point + Fraction(i * i + i, 7 * i + 29))
            for i, symbol in enumerate(symbols)
        }
        left_value, right_value = (_evaluate(value, values) for value in (one, other))
        if left_value is None or right_value is None:
            # If only one has a value at the point, they are not known to be equal.
            if (left_value is None) != (right_value is None):
                return False
            continue
        compared += 1
        size = max(abs(left_value), abs(right_value))
        if size != 0 and abs(left_value - right_value) > EQUAL * size:
            return False
    # Expressions that are defined at one point only could agree there by chance.
    return compared >= (2 if symbols else 1)


def _evaluate(value: Expr, point: dict[Expr, Expr]) -> Expr | None:
    """Return the value of an expression at a point. None if it has no finite value."""
    try:
        result = value.subs(point).evalf(DIGITS)
    except (ValueError, TypeError, ArithmeticError):
        return None
    is_number = result.is_number and not result.has(S.NaN, S.ComplexInfinity, S.Infinity)
    parts = result.as_real_imag() if is_number else ()
    return result if parts and all(part.is_Float or part.is_Rational for part in parts) else None


def _has_usual_numbers(value: Expr) -> bool:
    """Return True if no number is so large or small that it could hide a difference."""
    for number in value.atoms(Rational):
        if abs(number.p) > MAX_MAGNITUDE or number.q > MAX_MAGNITUDE:
            return False
    # Powers hide large numbers: 2^{-1000}.
    for power in value.atoms(sympy.Pow):
        size = power.evalf(15) if not power.free_symbols else S.One
        if (
            size.is_Float
            and size != 0
            and not (Rational(1, MAX_MAGNITUDE) < abs(size) < MAX_MAGNITUDE)
        ):
            return False
    for exponent in (power.exp for power in value.atoms(sympy.Pow)):
        # x^100 is tiny or huge at some points, and hides other terms there.
        if exponent.is_number and abs(exponent.evalf(15)) > MAX_EXPONENT:
            return False
    return not value.has(sympy.factorial, sympy.exp)


def as_number(value: Expr) -> NotatedNumber | None:
    """Return a constant as a number: exact if it is rational, to DIGITS digits otherwise."""
    if value.free_symbols or value.has(AppliedUndef):
        return None
    if value.is_Rational:
        return NotatedNumber(Fraction(int(value.p), int(value.q)))
    digits = value.evalf(DIGITS)
    if not digits.is_Float or not digits.is_finite:
        return None
    # By its decimal digits, because sympy's Float is binary.
    return NotatedNumber(Fraction(str(digits)))
