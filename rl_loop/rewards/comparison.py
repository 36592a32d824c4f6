"""Compares two answers that were read whole (``rl_loop.rewards.statement``).

Everything that was read is compared: values exactly, relations, moduli, bases, units, brackets, and
the order where it says something."""

from collections.abc import Iterable, Sequence
from fractions import Fraction

import sympy
from sympy import Dummy, Expr, Rational, S
from sympy.core.function import AppliedUndef

from rl_loop.rewards.expression import Unreadable
from rl_loop.rewards.number import ROUNDED_PLACES, Number, same_number
from rl_loop.rewards.statement import (
    BasedNumber,
    Brackets,
    Builder,
    Cases,
    Chain,
    Collection,
    Congruence,
    Dots,
    Grid,
    Listing,
    NamedSet,
    Ratio,
    SetOperation,
    Statement,
    Value,
    Words,
    is_name,
    read_statement,
    signs_expanded,
)
from rl_loop.rewards.units import same_units

DIGITS = 60
"""Decimal digits with which expressions are compared at some points."""
EQUAL = sympy.Float(10) ** -45
"""Largest relative difference of equal values."""
MOST_MAGNITUDE = 10**18
"""With larger or smaller numbers in them, values can differ by less than EQUAL."""
POINTS = (
    Fraction(7, 19),
    Fraction(-31, 17),
    Fraction(23, 11),
    Fraction(10**4, 7),
    Fraction(-(10**4), 11),
)
"""Values of the first variable; the others are near it. Far ones, too: |x - 9| is 9 - x below 9."""
OPAQUE = (
    AppliedUndef,
    sympy.Abs,
    sympy.Max,
    sympy.Min,
    sympy.floor,
    sympy.ceiling,
)
"""Functions that can agree at all points and differ elsewhere: compared by their arguments."""

FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!="}
ORDERED = frozenset({"<", "<=", ">", ">="})


def says_the_same(answer: str, truth: str) -> bool:
    """Return True if two texts in standard notation say the same.

    False unless both are read whole."""
    try:
        return equal(read_statement(answer), read_statement(truth))
    except Unreadable:
        return False


def equal(answer: Statement, truth: Statement, modulus: Expr | None = None) -> bool:
    """Return True if an answer says what the truth says; values may differ by ``modulus``."""
    if isinstance(answer, Congruence) or isinstance(truth, Congruence):
        return _equal_congruences(answer, truth)
    if isinstance(answer, Chain) or isinstance(truth, Chain):
        return _equal_chains(answer, truth, modulus)
    if isinstance(answer, Value) and isinstance(truth, Value):
        return _equal_signs(answer, truth, modulus)

    # One value is a list, or a set, of one.
    items, true_items = _items(answer), _items(truth)
    if items is not None and true_items is not None:
        return _equal_collections(answer, truth, items, true_items, modulus)
    if isinstance(answer, Brackets | Grid) or isinstance(truth, Brackets | Grid):
        return _equal_brackets(answer, truth, modulus)
    if isinstance(answer, SetOperation) and isinstance(truth, SetOperation):
        return _equal_operations(answer, truth)
    return _equal_rest(answer, truth)


def _equal_rest(answer: Statement, truth: Statement) -> bool:
    """Compare statements that have no other form."""
    if isinstance(answer, Words) and isinstance(truth, Words):
        return bool(answer.text) and answer.text == truth.text
    if isinstance(answer, Builder) and isinstance(truth, Builder):
        same_member = equal(answer.member, truth.member)
        return same_member and equal(answer.condition, truth.condition)
    if isinstance(answer, Ratio) and isinstance(truth, Ratio):
        return _equal_ratios(answer, truth)
    if isinstance(answer, Cases) and isinstance(truth, Cases):
        return _equal_cases(answer, truth)
    if isinstance(answer, BasedNumber | NamedSet | Dots):
        return answer == truth
    return False


# ---- values


def _equal_signs(answer: Value, truth: Value, modulus: Expr | None) -> bool:
    r"""Compare values, with all that \pm stands for."""
    values, true_values = signs_expanded(answer), signs_expanded(truth)
    if len(values) != len(true_values):
        return False
    return _match(values, true_values, lambda a, b: _equal_values(a, b, modulus))


def _equal_values(answer: Value, truth: Value, modulus: Expr | None) -> bool:
    if not same_units(answer.units, truth.units):
        return False
    if modulus is not None:
        difference = answer.value - truth.value
        return same_value(answer.value, truth.value) or bool(
            (difference / modulus).expand().is_Integer
        )
    if answer.number is not None and truth.number is not None:
        return same_number(answer.number, truth.number)
    if truth.number is not None and truth.number.places >= ROUNDED_PLACES:
        number = _as_number(answer.value)
        return number is not None and same_number(number, truth.number)
    # 50 % may stand for 50 and for 0.5.
    percents = [value.number is not None and value.number.percent for value in (answer, truth)]
    values = [answer.value, answer.value / 100] if percents[0] else [answer.value]
    true_values = [truth.value, truth.value / 100] if percents[1] else [truth.value]
    return any(same_value(value, other) for value in values for other in true_values)


def _as_number(value: Expr) -> Number | None:
    """Return a constant as a number: exact if it is rational, to DIGITS digits otherwise."""
    if value.free_symbols or value.has(AppliedUndef):
        return None
    if value.is_Rational:
        return Number(Fraction(int(value.p), int(value.q)))
    digits = value.evalf(DIGITS)
    if not digits.is_Float or not digits.is_finite:
        return None
    return Number(Fraction(str(digits)))


def same_value(one: Expr, other: Expr) -> bool:
    """Return True if two expressions are equal for all values of their variables."""
    if one == other:
        return True
    if not (one.is_finite is not False and other.is_finite is not False):
        return False
    if one.is_Rational and other.is_Rational:
        return False

    if one.has(*OPAQUE) or other.has(*OPAQUE):
        one, other = _without_functions(one, other)
    symbols = sorted(one.free_symbols | other.free_symbols, key=str)
    if one == 0 or other == 0:
        # No difference is small beside 0, so algebra has to say that it is none.
        is_small = _agree_at_points(one - other + 1, S.One, symbols)
        return is_small and bool(sympy.simplify(one - other) == 0)
    if not _agree_at_points(one, other, symbols):
        return False
    difference = sympy.expand(one - other)
    if difference == 0:
        return True
    # Agreement in DIGITS digits is proof enough, unless terms are too small to be seen.
    if _has_usual_numbers(one) and _has_usual_numbers(other):
        return True
    return bool(sympy.simplify(difference) == 0)


def _without_functions(one: Expr, other: Expr) -> tuple[Expr, Expr]:
    """Replace f(x), |x| and whatever else values at a few points say little of by variables."""
    dummies: dict[Expr, Expr] = {}

    def replaced(function: Expr) -> Expr:
        key = function.func(*map(sympy.expand, function.args))
        return dummies.setdefault(key, Dummy(f"z{len(dummies)}"))

    def without(value: Expr) -> Expr:
        return value.replace(lambda part: isinstance(part, OPAQUE), replaced)

    return without(one), without(other)


def _agree_at_points(one: Expr, other: Expr, symbols: Sequence[Expr]) -> bool:
    compared = 0
    for point in POINTS if symbols else POINTS[:1]:
        values = {
            symbol: Rational(point + Fraction(i * i + i, 7 * i + 29))
            for i, symbol in enumerate(symbols)
        }
        here, there = (_evaluated(value, values) for value in (one, other))
        if here is None or there is None:
            # Where one has a value and the other has none, they are not known to be equal.
            if (here is None) != (there is None):
                return False
            continue
        compared += 1
        size = max(abs(here), abs(there))
        if size != 0 and abs(here - there) > EQUAL * size:
            return False
    return compared >= (2 if symbols else 1)


def _evaluated(value: Expr, point: dict[Expr, Expr]) -> Expr | None:
    """Return the value of an expression at a point; None if it has no finite one."""
    try:
        result = value.subs(point).evalf(DIGITS)
    except (ValueError, TypeError, ArithmeticError):
        return None
    is_number = result.is_number and not result.has(S.NaN, S.ComplexInfinity, S.Infinity)
    parts = result.as_real_imag() if is_number else ()
    return result if parts and all(part.is_Float or part.is_Rational for part in parts) else None


def _has_usual_numbers(value: Expr) -> bool:
    """Return True if no number is so large or small that a difference could hide."""
    for number in value.atoms(Rational):
        if abs(number.p) > MOST_MAGNITUDE or number.q > MOST_MAGNITUDE:
            return False
    # Powers hide large numbers: 2^{-1000}.
    for power in value.atoms(sympy.Pow):
        size = power.evalf(15) if not power.free_symbols else S.One
        if (
            size.is_Float
            and size != 0
            and not (Rational(1, MOST_MAGNITUDE) < abs(size) < MOST_MAGNITUDE)
        ):
            return False
    for exponent in (power.exp for power in value.atoms(sympy.Pow)):
        if exponent.is_number and abs(exponent.evalf(15)) > 60:
            return False
    return not value.has(sympy.factorial, sympy.exp)


# ---- lists, sets, points


def _items(statement: Statement) -> tuple[Statement, ...] | None:
    """Return what a list or set holds; a value is one of one. None for anything else."""
    if isinstance(statement, Listing | Collection):
        return statement.items
    if isinstance(statement, Value):
        expanded = signs_expanded(statement)
        return expanded if len(expanded) > 1 else (statement,)
    return None


def _equal_collections(
    answer: Statement,
    truth: Statement,
    items: Sequence[Statement],
    true_items: Sequence[Statement],
    modulus: Expr | None,
) -> bool:
    connectives = [x.connective if isinstance(x, Listing) else "," for x in (answer, truth)]
    if connectives[0] != connectives[1]:
        return False
    if isinstance(answer, Collection) and isinstance(truth, Collection):
        items, true_items = _distinct(items), _distinct(true_items)
    # The order of a sequence with an ellipsis says how it goes on.
    if any(isinstance(item, Dots) for item in (*items, *true_items)):
        return _equal_in_order(items, true_items, modulus)
    return _match(items, true_items, lambda a, b: equal(a, b, modulus))


def _distinct(items: Iterable[Statement]) -> list[Statement]:
    kept: list[Statement] = []
    for item in items:
        if not any(equal(item, other) for other in kept):
            kept.append(item)
    return kept


def _match(items: Sequence[Statement], others: Sequence[Statement], same: object) -> bool:
    """Return True if every item has one of the others to itself."""
    assert callable(same)
    if len(items) != len(others):
        return False
    left = list(others)
    for item in items:
        for i, other in enumerate(left):
            if same(item, other):
                del left[i]
                break
        else:
            return False
    return True


def _equal_in_order(
    items: Sequence[Statement], others: Sequence[Statement], modulus: Expr | None = None
) -> bool:
    if len(items) != len(others):
        return False
    return all(equal(a, b, modulus) for a, b in zip(items, others, strict=True))


def _equal_brackets(answer: Statement, truth: Statement, modulus: Expr | None) -> bool:
    """Compare points, intervals and matrices; 1, 2 may be meant for (1, 2)."""
    items, true_items = _ordered(answer), _ordered(truth)
    if isinstance(answer, Brackets) and isinstance(truth, Brackets):
        if (answer.opening, answer.closing) != (truth.opening, truth.closing):
            return False
        return _equal_in_order(answer.items, truth.items, modulus)
    if isinstance(answer, Grid) and isinstance(truth, Grid):
        if len(answer.rows) != len(truth.rows):
            return False
        rows = zip(answer.rows, truth.rows, strict=True)
        return all(_equal_in_order(row, true_row, modulus) for row, true_row in rows)
    if items is None or true_items is None:
        return False
    return _equal_in_order(items, true_items, modulus)


def _ordered(statement: Statement) -> tuple[Statement, ...] | None:
    """Return the entries of a point, a list, or a matrix of one row or column."""
    if isinstance(statement, Listing) and statement.connective == ",":
        return statement.items
    if isinstance(statement, Brackets) and (statement.opening, statement.closing) == ("(", ")"):
        return statement.items
    if isinstance(statement, Grid):
        if len(statement.rows) == 1:
            return statement.rows[0]
        if len(statement.rows[0]) == 1:
            return tuple(row[0] for row in statement.rows)
    return None


def _equal_operations(answer: SetOperation, truth: SetOperation) -> bool:
    if answer.operation != truth.operation:
        return False
    if answer.operation == "minus":
        return _equal_in_order(answer.parts, truth.parts)
    return _match(answer.parts, truth.parts, equal)


def _equal_cases(answer: Cases, truth: Cases) -> bool:
    def same(
        row: tuple[Statement, Statement | None], other: tuple[Statement, Statement | None]
    ) -> bool:
        (value, condition), (true_value, true_condition) = row, other
        if (condition is None) != (true_condition is None):
            return False
        is_same = condition is None or true_condition is None or equal(condition, true_condition)
        return is_same and equal(value, true_value)

    return _match(answer.rows, truth.rows, same)  # type: ignore[arg-type]


def _equal_ratios(answer: Ratio, truth: Ratio) -> bool:
    """3:4 is 6:8."""
    parts = [part for part in answer.parts if isinstance(part, Value)]
    true_parts = [part for part in truth.parts if isinstance(part, Value)]
    if len(parts) != len(answer.parts) or len(true_parts) != len(truth.parts):
        return False
    if len(parts) != len(true_parts):
        return False
    if not all(same_units(a.units, b.units) for a, b in zip(parts, true_parts, strict=True)):
        return False
    # Each part over the last one: the ratio 3:4:5 is two shares.
    last, true_last = parts[-1].value, true_parts[-1].value
    if last == 0 or true_last == 0:
        return False
    pairs = zip(parts[:-1], true_parts[:-1], strict=True)
    return all(same_value(a.value * true_last, b.value * last) for a, b in pairs)


# ---- relations


def _equal_congruences(answer: Statement, truth: Statement) -> bool:
    if not isinstance(answer, Congruence) or not isinstance(truth, Congruence):
        return False
    modulus, true_modulus = answer.modulus, truth.modulus
    if not isinstance(modulus, Value) or not isinstance(true_modulus, Value):
        return False
    if not same_value(modulus.value, true_modulus.value) or modulus.value == 0:
        return False
    statement, true_statement = answer.statement, truth.statement
    # "x = 3 (mod 5)", and "3 (mod 5)" for what x is.
    sides, true_sides = _sides(statement), _sides(true_statement)
    if len(sides) > 1 and len(true_sides) > 1:
        return _equal_in_order(sides, true_sides, modulus.value) and len(sides) == 2
    if len(sides) == 2 and is_name(sides[0]):
        sides = sides[1:]
    if len(true_sides) == 2 and is_name(true_sides[0]):
        true_sides = true_sides[1:]
    if len(sides) != 1 or len(true_sides) != 1:
        return False
    return equal(sides[0], true_sides[0], modulus.value)


def _sides(statement: Statement) -> tuple[Statement, ...]:
    """Return the sides of an equation or congruence; a statement is one side."""
    if isinstance(statement, Chain) and set(statement.relations) <= {"=", "=="}:
        return statement.sides
    return (statement,)


def _equal_chains(answer: Statement, truth: Statement, modulus: Expr | None) -> bool:
    if isinstance(answer, Chain) and isinstance(truth, Chain):
        return _equal_relations(answer, truth)
    if isinstance(answer, Chain):
        interval = _interval_of(answer)
        if interval is not None and _is_set(truth):
            return equal(interval, truth)
        return _chain_says(answer, truth, modulus)
    assert isinstance(truth, Chain)
    interval = _interval_of(truth)
    if interval is not None and _is_set(answer):
        return equal(answer, interval)
    # x = 5 is asked for, and 5 is said.
    name, *values = truth.sides
    if truth.relations == ("=",) and is_name(name, may_have_numbers=_is_unknown_name(name)):
        return equal(answer, values[0], modulus)
    return False


def _is_set(statement: Statement) -> bool:
    return isinstance(statement, Brackets | SetOperation | NamedSet | Collection | Builder)


def _chain_says(answer: Chain, truth: Statement, modulus: Expr | None) -> bool:
    """Return True if equations say ``truth``: x = 5 and 2 + 3 = 5 do, 3 = 4 = 5 does not."""
    sides = list(answer.sides)
    relations = list(answer.relations)
    # A rounded value at the end, as in 1/3 = 0.333.
    if relations[-1] == "~":
        rounded = sides[-1]
        if len(sides) == 2 and (is_name(sides[0]) or sides[0] == Words("")):
            return equal(rounded, truth, modulus)
        if not _rounds_to(sides[-2], rounded):
            return False
        sides.pop()
        relations.pop()
        if not relations:
            return equal(sides[0], truth, modulus)
    if relations == ["in"] and is_name(sides[0]):
        return _is_set(truth) and equal(sides[1], truth)
    if set(relations) != {"="}:
        return False

    # The name of the value comes first, or last: 5 = x.
    if is_name(sides[0]):
        sides = sides[1:]
    elif is_name(sides[-1]) and not _has_variables(truth):
        sides = sides[:-1]
    return all(equal(side, truth, modulus) for side in sides)


def _has_variables(statement: Statement) -> bool:
    return isinstance(statement, Value) and bool(statement.value.free_symbols)


def _rounds_to(exact: Statement, rounded: Statement) -> bool:
    """Return True if a decimal is a value to the places that it has."""
    if not isinstance(exact, Value) or not isinstance(rounded, Value) or rounded.number is None:
        return False
    number = exact.number or _as_number(exact.value)
    if number is None or not same_units(exact.units, rounded.units):
        return False
    difference = abs(number.value - rounded.number.value)
    return difference * 2 * 10**rounded.number.places <= 1


def _equal_relations(answer: Chain, truth: Chain) -> bool:
    if _same_sides(answer, truth):
        return True
    flipped = _flipped(answer)
    if flipped is not None and _same_sides(flipped, truth):
        return True
    interval, true_interval = _interval_of(answer), _interval_of(truth)
    if interval is not None and true_interval is not None:
        names = (_variable_of(answer), _variable_of(truth))
        return names[0] == names[1] and equal(interval, true_interval)
    if set(answer.relations) == {"="} and set(truth.relations) == {"="} and len(truth.sides) == 2:
        return _same_equation(answer, truth)
    if len(answer.sides) == len(truth.sides) == 2:
        return _same_inequality(answer, truth)
    return False


def _same_sides(answer: Chain, truth: Chain) -> bool:
    return answer.relations == truth.relations and _equal_in_order(answer.sides, truth.sides)


def _flipped(chain: Chain) -> Chain | None:
    """Return a chain read from its end."""
    if not set(chain.relations) <= set(FLIPPED):
        return None
    relations = tuple(FLIPPED[relation] for relation in reversed(chain.relations))
    return Chain(chain.sides[::-1], relations)


def _same_equation(answer: Chain, truth: Chain) -> bool:
    """x = 2 + 3 = 5 says x = 5, and 2x - 2y = 4 says x - y = 2."""
    if len(answer.sides) > 2:
        name, *values = answer.sides
        steps = [Chain((name, value), ("=",)) for value in values]
        return is_name(name) and all(_equal_relations(step, truth) for step in steps)
    differences = [_difference(chain) for chain in (answer, truth)]
    if differences[0] is None or differences[1] is None:
        return False
    # A value that has a name is compared as such, not as an equation between names.
    return _constant_ratio(differences[0], differences[1]) is not None


def _same_inequality(answer: Chain, truth: Chain) -> bool:
    relation, true_relation = answer.relations[0], truth.relations[0]
    if relation not in ORDERED | {"!="} or true_relation not in ORDERED | {"!="}:
        return False
    difference, true_difference = _difference(answer), _difference(truth)
    if difference is None or true_difference is None:
        return False
    ratio = _constant_ratio(difference, true_difference)
    if ratio is None:
        return False
    return relation == true_relation if ratio > 0 else FLIPPED[relation] == true_relation


def _difference(chain: Chain) -> Expr | None:
    left, right = chain.sides
    if not isinstance(left, Value) or not isinstance(right, Value):
        return None
    if left.units.is_given or right.units.is_given:
        return None
    if len(signs_expanded(left)) > 1 or len(signs_expanded(right)) > 1:
        return None
    return left.value - right.value


def _constant_ratio(one: Expr, other: Expr) -> Rational | None:
    """Return one / other if it is a rational number other than 0."""
    if other == 0 or not one.free_symbols or one.free_symbols != other.free_symbols:
        return None
    ratio = sympy.cancel(sympy.together(one / other))
    return ratio if ratio.is_Rational and ratio != 0 else None


def _is_unknown_name(side: Statement) -> bool:
    """Return True for x_1 and f(2), which are names with numbers."""
    return isinstance(side, Value) and (_is_unknown(side.value))


def _is_unknown(value: Expr) -> bool:
    """Return True for x and f(x)."""
    return bool(value.is_Symbol) or isinstance(value, AppliedUndef)


def _variable_of(chain: Chain) -> str | None:
    names = [str(side.value) for side in chain.sides if isinstance(side, Value) and is_name(side)]
    return names[0] if len(names) == 1 else None


def _interval_of(chain: Chain) -> Statement | None:
    """Return the interval that 1 < x < 2, x > 3 or x in (1, 2) say a variable is in."""
    if chain.relations == ("in",) and is_name(chain.sides[0]):
        return chain.sides[1] if _is_set(chain.sides[1]) else None
    if not set(chain.relations) <= ORDERED:
        return None
    falling = [relation.startswith(">") for relation in chain.relations]
    if all(falling):
        flipped = _flipped(chain)
        assert flipped is not None
        chain = flipped
    elif any(falling):
        return None

    places = [
        i
        for i, side in enumerate(chain.sides)
        if isinstance(side, Value) and _is_unknown(side.value) and is_name(side)
    ]
    values = [
        side for side in chain.sides if isinstance(side, Value) and not side.value.free_symbols
    ]
    if len(places) != 1 or len(places) + len(values) != len(chain.sides) or len(chain.sides) > 3:
        return None
    place = places[0]
    if len(chain.sides) == 3 and place != 1:
        return None
    infinite = Value(r"\infty", S.Infinity), Value(r"-\infty", S.NegativeInfinity)
    low: Statement = chain.sides[0] if place > 0 else infinite[1]
    high: Statement = chain.sides[-1] if place < len(chain.sides) - 1 else infinite[0]
    is_closed_below = place > 0 and chain.relations[0] == "<="
    is_closed_above = place < len(chain.sides) - 1 and chain.relations[-1] == "<="
    return Brackets((low, high), "[" if is_closed_below else "(", "]" if is_closed_above else ")")
