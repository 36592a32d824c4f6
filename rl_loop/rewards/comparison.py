"""Compares two complete statements (``rl_loop.rewards.statement``).

All parts are compared: exact values, relations, moduli, bases, units and brackets. The order is
compared if it has a meaning.
"""

from collections.abc import Callable, Iterable, Sequence

from sympy import Expr

from rl_loop.rewards.equality import as_number, equivalent_values
from rl_loop.rewards.latex_lexer import UnreadableError
from rl_loop.rewards.number import ROUNDED_PLACES, equivalent_numbers
from rl_loop.rewards.relations import (
    FLIPPED,
    ORDERED,
    constant_ratio,
    find_interval,
    find_variable,
    has_variables,
    is_set,
    is_unknown_name,
    reversed_chain,
    rounds_to,
    split_sides,
    subtract_sides,
)
from rl_loop.rewards.statement import (
    BasedNumber,
    BracketedStatement,
    Congruence,
    EllipsisItem,
    ExpressionStatement,
    ListedSet,
    MatrixStatement,
    NamedSet,
    PiecewiseStatement,
    Ratio,
    RelationChain,
    SetBuilder,
    SetOperation,
    Statement,
    StatementList,
    WordsStatement,
    is_name,
    signs_expanded,
)
from rl_loop.rewards.statement_parser import read_statement
from rl_loop.rewards.units import equivalent_units


def equivalent_texts(answer: str, truth: str) -> bool:
    """Return True if two texts in standard notation mean the same.

    Returns False if one of them cannot be read completely.
    """
    try:
        return equivalent_statements(read_statement(answer), read_statement(truth))
    except UnreadableError:
        return False


def equivalent_statements(answer: Statement, truth: Statement, modulus: Expr | None = None) -> bool:
    """Return True if an answer means the same as the truth. Values may differ by ``modulus``."""
    # Relations come first, because a chain may describe a set or name a value.
    if isinstance(answer, Congruence) or isinstance(truth, Congruence):
        return _equivalent_congruences(answer, truth)
    if isinstance(answer, RelationChain) or isinstance(truth, RelationChain):
        return _equivalent_chains(answer, truth, modulus)
    if isinstance(answer, ExpressionStatement) and isinstance(truth, ExpressionStatement):
        return _equivalent_expressions(answer, truth, modulus)

    # A single value is a list, or a set, with one item.
    items, true_items = _get_items(answer), _get_items(truth)
    if items is not None and true_items is not None:
        return _equivalent_collections(answer, truth, items, true_items, modulus)
    if isinstance(answer, BracketedStatement | MatrixStatement) or isinstance(
        truth, BracketedStatement | MatrixStatement
    ):
        return _equivalent_brackets(answer, truth, modulus)
    if isinstance(answer, SetOperation) and isinstance(truth, SetOperation):
        return _equivalent_operations(answer, truth)
    return _equivalent_rest(answer, truth)


def _equivalent_rest(answer: Statement, truth: Statement) -> bool:
    """Compare words, set builders, ratios, piecewise values, and named or based values."""
    # Empty words stand for a missing side, which equals nothing.
    if isinstance(answer, WordsStatement) and isinstance(truth, WordsStatement):
        return bool(answer.text) and answer.text == truth.text
    if isinstance(answer, SetBuilder) and isinstance(truth, SetBuilder):
        same_member = equivalent_statements(answer.member, truth.member)
        return same_member and equivalent_statements(answer.condition, truth.condition)
    if isinstance(answer, Ratio) and isinstance(truth, Ratio):
        return _equivalent_ratios(answer, truth)
    if isinstance(answer, PiecewiseStatement) and isinstance(truth, PiecewiseStatement):
        return _equivalent_cases(answer, truth)
    if isinstance(answer, BasedNumber | NamedSet | EllipsisItem):
        return answer == truth
    return False


# ---- values


def _equivalent_expressions(
    answer: ExpressionStatement, truth: ExpressionStatement, modulus: Expr | None
) -> bool:
    r"""Compare values, including both values of \pm."""
    values, true_values = signs_expanded(answer), signs_expanded(truth)
    # "3" does not equal "\pm 3", which has two values.
    if len(values) != len(true_values):
        return False
    return _match(values, true_values, lambda a, b: _equivalent_single_values(a, b, modulus))


def _equivalent_single_values(
    answer: ExpressionStatement, truth: ExpressionStatement, modulus: Expr | None
) -> bool:
    r"""Compare two values without \pm."""
    if not equivalent_units(answer.units, truth.units):
        return False
    # Equal modulo m: the difference is a multiple of m.
    if modulus is not None:
        difference = answer.value - truth.value
        return equivalent_values(answer.value, truth.value) or bool(
            (difference / modulus).expand().is_Integer
        )
    if answer.number is not None and truth.number is not None:
        return equivalent_numbers(answer.number, truth.number)
    # The truth is rounded, so an expression such as \sqrt{2} may equal 1.414214.
    if truth.number is not None and truth.number.places >= ROUNDED_PLACES:
        number = as_number(answer.value)
        return number is not None and equivalent_numbers(number, truth.number)
    # 50% may mean 50 or 0.5.
    percents = [value.number is not None and value.number.percent for value in (answer, truth)]
    values = [answer.value, answer.value / 100] if percents[0] else [answer.value]
    true_values = [truth.value, truth.value / 100] if percents[1] else [truth.value]
    return any(equivalent_values(value, other) for value in values for other in true_values)


# ---- lists, sets, points


def _get_items(statement: Statement) -> tuple[Statement, ...] | None:
    """Return the items of a list or set. A value is a single item. None for other statements."""
    if isinstance(statement, StatementList | ListedSet):
        return statement.items
    if isinstance(statement, ExpressionStatement):
        expanded = signs_expanded(statement)
        return expanded if len(expanded) > 1 else (statement,)
    return None


def _equivalent_collections(
    answer: Statement,
    truth: Statement,
    items: Sequence[Statement],
    true_items: Sequence[Statement],
    modulus: Expr | None,
) -> bool:
    """Compare lists and sets by their items, in any order."""
    connectives = [x.connective if isinstance(x, StatementList) else "," for x in (answer, truth)]
    # "x < 1 or x > 3" does not equal "x < 1, x > 3".
    if connectives[0] != connectives[1]:
        return False
    if isinstance(answer, ListedSet) and isinstance(truth, ListedSet):
        # A set has no duplicates: \{1, 1, 2\} is \{1, 2\}.
        items, true_items = _drop_duplicates(items), _drop_duplicates(true_items)
    # The order of a sequence with an ellipsis determines its continuation.
    if any(isinstance(item, EllipsisItem) for item in (*items, *true_items)):
        return _equivalent_in_order(items, true_items, modulus)
    return _match(items, true_items, lambda a, b: equivalent_statements(a, b, modulus))


def _drop_duplicates(items: Iterable[Statement]) -> list[Statement]:
    """Return the items without those that are equivalent to an earlier item."""
    kept: list[Statement] = []
    for item in items:
        if not any(equivalent_statements(item, other) for other in kept):
            kept.append(item)
    return kept


def _match[T](items: Sequence[T], others: Sequence[T], same: Callable[[T, T], bool]) -> bool:
    """Return True if each item can be paired with a different one of ``others``."""
    if len(items) != len(others):
        return False
    # Each of ``others`` is used once, so that 1, 1, 2 does not match 1, 2, 2.
    left = list(others)
    for item in items:
        for i, other in enumerate(left):
            if same(item, other):
                del left[i]
                break
        else:
            return False
    return True


def _equivalent_in_order(
    items: Sequence[Statement], others: Sequence[Statement], modulus: Expr | None = None
) -> bool:
    """Return True if the sequences have the same length and equivalent items in the same order."""
    if len(items) != len(others):
        return False
    return all(equivalent_statements(a, b, modulus) for a, b in zip(items, others, strict=True))


def _equivalent_brackets(answer: Statement, truth: Statement, modulus: Expr | None) -> bool:
    """Compare points, intervals and matrices. "1, 2" may mean (1, 2)."""
    items, true_items = _get_entries(answer), _get_entries(truth)
    if isinstance(answer, BracketedStatement) and isinstance(truth, BracketedStatement):
        # (1, 2) and [1, 2] are different intervals.
        if (answer.opening, answer.closing) != (truth.opening, truth.closing):
            return False
        return _equivalent_in_order(answer.items, truth.items, modulus)
    if isinstance(answer, MatrixStatement) and isinstance(truth, MatrixStatement):
        if len(answer.rows) != len(truth.rows):
            return False
        rows = zip(answer.rows, truth.rows, strict=True)
        return all(_equivalent_in_order(row, true_row, modulus) for row, true_row in rows)
    if items is None or true_items is None:
        return False
    return _equivalent_in_order(items, true_items, modulus)


def _get_entries(statement: Statement) -> tuple[Statement, ...] | None:
    """Return the entries of a point, a list, or a matrix with one row or column."""
    if isinstance(statement, StatementList) and statement.connective == ",":
        return statement.items
    if isinstance(statement, BracketedStatement) and (statement.opening, statement.closing) == (
        "(",
        ")",
    ):
        return statement.items
    if isinstance(statement, MatrixStatement):
        if len(statement.rows) == 1:
            return statement.rows[0]
        if len(statement.rows[0]) == 1:
            return tuple(row[0] for row in statement.rows)
    return None


def _equivalent_operations(answer: SetOperation, truth: SetOperation) -> bool:
    """Compare unions, intersections and differences of sets."""
    if answer.operation != truth.operation:
        return False
    # The only operation in which the order matters.
    if answer.operation == "minus":
        return _equivalent_in_order(answer.parts, truth.parts)
    return _match(answer.parts, truth.parts, equivalent_statements)


def _equivalent_cases(answer: PiecewiseStatement, truth: PiecewiseStatement) -> bool:
    """Compare piecewise values: each value and its condition, in any order."""

    def same(
        row: tuple[Statement, Statement | None], other: tuple[Statement, Statement | None]
    ) -> bool:
        """Return True if two rows have equivalent conditions and values."""
        (value, condition), (true_value, true_condition) = row, other
        if (condition is None) != (true_condition is None):
            return False
        is_same = (
            condition is None
            or true_condition is None
            or equivalent_statements(condition, true_condition)
        )
        return is_same and equivalent_statements(value, true_value)

    return _match(answer.rows, truth.rows, same)


def _equivalent_ratios(answer: Ratio, truth: Ratio) -> bool:
    """Compare ratios: 3:4 equals 6:8."""
    parts = [part for part in answer.parts if isinstance(part, ExpressionStatement)]
    true_parts = [part for part in truth.parts if isinstance(part, ExpressionStatement)]
    if len(parts) != len(answer.parts) or len(true_parts) != len(truth.parts):
        return False
    if len(parts) != len(true_parts):
        return False
    if not all(equivalent_units(a.units, b.units) for a, b in zip(parts, true_parts, strict=True)):
        return False
    # Divide each part by the last one: the ratio 3:4:5 has two quotients.
    last, true_last = parts[-1].value, true_parts[-1].value
    if last == 0 or true_last == 0:
        return False
    pairs = zip(parts[:-1], true_parts[:-1], strict=True)
    return all(equivalent_values(a.value * true_last, b.value * last) for a, b in pairs)


# ---- relations


def _equivalent_congruences(answer: Statement, truth: Statement) -> bool:
    r"""Compare congruences: x \equiv 3 (mod 5) equals x \equiv 8 (mod 5)."""
    if not isinstance(answer, Congruence) or not isinstance(truth, Congruence):
        return False
    modulus, true_modulus = answer.modulus, truth.modulus
    if not isinstance(modulus, ExpressionStatement) or not isinstance(
        true_modulus, ExpressionStatement
    ):
        return False
    # Modulo 0 has no meaning, and would divide by zero.
    if not equivalent_values(modulus.value, true_modulus.value) or modulus.value == 0:
        return False

    statement, true_statement = answer.statement, truth.statement
    # "x = 3 (mod 5)" also matches "3 (mod 5)".
    sides, true_sides = split_sides(statement), split_sides(true_statement)
    if len(sides) > 1 and len(true_sides) > 1:
        return _equivalent_in_order(sides, true_sides, modulus.value) and len(sides) == 2

    if len(sides) == 2 and is_name(sides[0]):
        sides = sides[1:]
    if len(true_sides) == 2 and is_name(true_sides[0]):
        true_sides = true_sides[1:]
    if len(sides) != 1 or len(true_sides) != 1:
        return False
    return equivalent_statements(sides[0], true_sides[0], modulus.value)


def _equivalent_chains(answer: Statement, truth: Statement, modulus: Expr | None) -> bool:
    """Compare an answer and a truth of which at least one is a chain of relations."""
    if isinstance(answer, RelationChain) and isinstance(truth, RelationChain):
        return _equivalent_relations(answer, truth)
    if isinstance(answer, RelationChain):
        interval = find_interval(answer)
        if interval is not None and is_set(truth):
            return equivalent_statements(interval, truth)
        return _chain_implies(answer, truth, modulus)
    assert isinstance(truth, RelationChain)
    interval = find_interval(truth)
    if interval is not None and is_set(answer):
        return equivalent_statements(answer, interval)
    # The truth may be x = 5 and the answer 5.
    name, *values = truth.sides
    if truth.relations == ("=",) and is_name(name, may_have_numbers=is_unknown_name(name)):
        return equivalent_statements(answer, values[0], modulus)
    return False


def _chain_implies(answer: RelationChain, truth: Statement, modulus: Expr | None) -> bool:
    """Return True if equations imply ``truth`` 5: x = 5 and 2 + 3 = 5 do, 3 = 4 = 5 does not."""
    sides = list(answer.sides)
    relations = list(answer.relations)
    # A rounded value at the end, as in 1/3 = 0.333.
    if relations[-1] == "~":
        rounded = sides[-1]
        if len(sides) == 2 and (is_name(sides[0]) or sides[0] == WordsStatement("")):
            return equivalent_statements(rounded, truth, modulus)
        if not rounds_to(sides[-2], rounded):
            return False
        sides.pop()
        relations.pop()
        if not relations:
            return equivalent_statements(sides[0], truth, modulus)
    if relations == ["in"] and is_name(sides[0]):
        return is_set(truth) and equivalent_statements(sides[1], truth)
    if set(relations) != {"="}:
        return False

    # The name of the value is first or last: 5 = x.
    if is_name(sides[0]):
        sides = sides[1:]
    elif is_name(sides[-1]) and not has_variables(truth):
        sides = sides[:-1]
    return all(equivalent_statements(side, truth, modulus) for side in sides)


def _equivalent_relations(answer: RelationChain, truth: RelationChain) -> bool:
    """Compare two chains of relations."""
    if _equivalent_sides(answer, truth):
        return True
    # 3 > x is x < 3.
    turned = reversed_chain(answer)
    if turned is not None and _equivalent_sides(turned, truth):
        return True
    interval, true_interval = find_interval(answer), find_interval(truth)
    if interval is not None and true_interval is not None:
        names = (find_variable(answer), find_variable(truth))
        return names[0] == names[1] and equivalent_statements(interval, true_interval)
    if set(answer.relations) == {"="} and set(truth.relations) == {"="} and len(truth.sides) == 2:
        return _equivalent_equation(answer, truth)
    if len(answer.sides) == len(truth.sides) == 2:
        return _equivalent_inequality(answer, truth)
    return False


def _equivalent_sides(answer: RelationChain, truth: RelationChain) -> bool:
    """Return True if two chains have the same relations and equivalent sides, in order."""
    return answer.relations == truth.relations and _equivalent_in_order(answer.sides, truth.sides)


def _equivalent_equation(answer: RelationChain, truth: RelationChain) -> bool:
    """Compare equations: x = 2 + 3 = 5 implies x = 5, and 2x - 2y = 4 equals x - y = 2."""
    if len(answer.sides) > 2:
        name, *values = answer.sides
        steps = [RelationChain((name, value), ("=",)) for value in values]
        return is_name(name) and all(_equivalent_relations(step, truth) for step in steps)
    differences = [subtract_sides(chain) for chain in (answer, truth)]
    if differences[0] is None or differences[1] is None:
        return False
    # Compare equations with a named value by value, not as equations between names.
    return constant_ratio(differences[0], differences[1]) is not None


def _equivalent_inequality(answer: RelationChain, truth: RelationChain) -> bool:
    """Compare relations of two sides by left minus right: 2x < 4 equals x < 2."""
    relation, true_relation = answer.relations[0], truth.relations[0]
    if relation not in ORDERED | {"!="} or true_relation not in ORDERED | {"!="}:
        return False
    difference, true_difference = subtract_sides(answer), subtract_sides(truth)
    if difference is None or true_difference is None:
        return False
    ratio = constant_ratio(difference, true_difference)
    if ratio is None:
        return False
    # A negative factor turns the relation: -x < 1 is x > -1.
    return relation == true_relation if ratio > 0 else FLIPPED[relation] == true_relation
