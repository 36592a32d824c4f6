"""Parses an answer into a statement, completely or not at all.

Parts between brackets and separators are statements again, down to expressions
(``rl_loop.rewards.expression``). ``rl_loop.rewards.units`` parses numbers with units.
"""

import re

from sympy import Rational

from rl_loop.rewards.expression import DEGREE, read_expression
from rl_loop.rewards.latex_lexer import UnreadableError
from rl_loop.rewards.notation import closing_brace
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
)
from rl_loop.rewards.units import UnitProduct, parse_quantity, parse_units

# Larger bases have no digits that ``int`` reads.
MAX_BASE = 36
# A policy may write thousands of brackets, which would exceed Python's recursion limit.
MAX_STATEMENT_DEPTH = 30
"""Maximum depth of statements within statements."""

RELATIONS = {
    "=": "=",
    "<": "<",
    ">": ">",
    r"\le": "<=",
    r"\ge": ">=",
    r"\ne": "!=",
    r"\approx": "~",
    r"\equiv": "==",
    r"\in": "in",
    r"\notin": "not in",
    r"\subset": "subset",
    r"\subseteq": "subset or equal",
    r"\supset": "superset",
    r"\supseteq": "superset or equal",
    r"\to": "to",
    r"\rightarrow": "to",
    r"\implies": "implies",
    r"\Rightarrow": "implies",
    r"\iff": "iff",
    r"\Leftrightarrow": "iff",
    r"\mid": "divides",
    r"\parallel": "parallel",
    r"\perp": "perpendicular",
    r"\sim": "similar",
    r"\cong": "congruent",
    r"\propto": "proportional",
}
SEPARATORS = (
    {";": ","},
    {",": ",", r"\land": ",", r"\wedge": ",", r"\lor": "or", r"\vee": "or"},
)
"""Connectives by separator, the weakest binding first."""
OPERATIONS = {r"\cup": "cup", r"\cap": "cap", r"\setminus": "minus", r"\backslash": "minus"}

# A command, or a character. "\{" and "\\" are commands of one sign.
PIECE = re.compile(r"\\(?:[a-zA-Z]+|.)|.", re.DOTALL)
OPENING = frozenset({"(", "[", "{", r"\{", r"\langle", r"\lfloor", r"\lceil"})
CLOSING = frozenset({")", "]", "}", r"\}", r"\rangle", r"\rfloor", r"\rceil"})
DOTS = re.compile(r"\\(?:ldots|dots|cdots|dotsc|dotsb)(?![a-zA-Z])|\.\.\.")
LATEX_ENVIRONMENT = re.compile(r"\\begin\{([a-z]+)\}(.*)\\end\{([a-z]+)\}", re.DOTALL)
ARRAY = re.compile(r"\\begin\{array\}\s*\{[lcr| ]*\}(?P<body>.*)\\end\{array\}", re.DOTALL)
MATRICES = frozenset({"pmatrix", "bmatrix", "matrix", "Bmatrix", "smallmatrix"})
BASED_NUMBER = re.compile(
    r"(?P<sign>-?)(?P<digits>[0-9A-Z]*[0-9][0-9A-Z]*)_\{?(?P<base>[0-9]{1,2})\}?"
)
MODULUS = re.compile(r"\\pmod\s*\{")
NAMED_SET = re.compile(r"\\emptyset|\\mathbb\{[NZQRC]\}(?:[\^_]\{?[-+*0-9]\}?)*")
TEXT = re.compile(r"\\text\{([^{}]*)\}")
CONDITION_WORD = re.compile(r"\\text\{\s*(?:if|for|when|where|,)?\s*\}|^\s*(?:if|for|when|where)\b")
OTHERWISE = re.compile(r"\\text\{\s*(?:otherwise|else)\s*\.?\s*\}|\s*(?:otherwise|else)\s*")


def read_statement(text: str) -> Statement:
    """Return the statement in a text in standard notation.

    Raises:
        UnreadableError: if a part is not understood.
    """
    return _read_nested(text, depth=0)


def _read_nested(text: str, depth: int) -> Statement:
    """Parse a statement at a depth of nesting.

    The parts at the weakest separator are parsed first: x = 1, y = 2 is a list of two relations.
    """
    text = _remove_braces(text.strip())
    if depth > MAX_STATEMENT_DEPTH:
        raise UnreadableError(text)
    if not text:
        return WordsStatement("")
    if DOTS.fullmatch(text):
        return EllipsisItem()

    # A text with several moduli is a list of congruences, which is split below.
    modulus = MODULUS.search(text) if text.count(r"\pmod") == 1 else None
    if modulus is not None:
        close = closing_brace(text, modulus.end() - 1)
        if close != len(text) - 1:
            raise UnreadableError(text)
        inner = text[: modulus.start()].rstrip().rstrip(",")
        return Congruence(_read_nested(inner, depth + 1), _read_value(text[modulus.end() : -1]))

    # Separators bind weakest, then relations, then operations of sets.
    for level in SEPARATORS:
        parts, separators = _split_at(text, level)
        if separators:
            # "a, b or c" may group in two ways.
            if len(set(separators)) > 1:
                raise UnreadableError(text)
            return StatementList(
                tuple(_read_nested(part, depth + 1) for part in parts), separators[0]
            )
    parts, relations = _split_at(text, RELATIONS)
    if relations:
        return RelationChain(
            tuple(_read_nested(part, depth + 1) for part in parts), tuple(relations)
        )
    parts, operations = _split_at(text, OPERATIONS)
    if operations:
        # Without brackets the order of different operations is ambiguous.
        if len(set(operations)) > 1 or (operations[0] == "minus" and len(parts) > 2):
            raise UnreadableError(text)
        sets = tuple(_read_nested(part, depth + 1) for part in parts)
        return SetOperation(sets, operations[0])
    parts, colons = _split_at(text, {":": ":"})
    if colons:
        return Ratio(tuple(_read_value(part) for part in parts))
    return _read_undivided(text, depth)


def _read_undivided(text: str, depth: int) -> Statement:
    """Parse a text without separators and relations outside of brackets."""
    bracketed = _split_brackets(text)
    if bracketed is not None:
        opening, inside, closing = bracketed
        array = ARRAY.fullmatch(inside.strip())
        if array is not None and (opening, closing) in (("(", ")"), ("[", "]")):
            return _read_matrix(array["body"], depth)
        if (opening, closing) == (r"\{", r"\}"):
            return _read_set(inside, depth)
        parts, separators = _split_at(inside, {",": ",", ";": ","})
        # Brackets around one item only group it. With separators they are a point or an interval.
        is_group = (opening, closing) in (("(", ")"), ("[", "]")) and not separators
        if not is_group:
            items = tuple(_read_nested(part, depth + 1) for part in parts)
            return BracketedStatement(
                items, opening.replace(r"\langle", "("), closing.replace(r"\rangle", ")")
            )
        # Other groups are parts of expressions, whose parser reads their brackets itself.
        if _split_at(inside, RELATIONS)[1] or _split_at(inside, OPERATIONS)[1]:
            return _read_nested(inside, depth + 1)

    environment = LATEX_ENVIRONMENT.fullmatch(text)
    if environment is not None:
        return _read_latex_environment(environment, depth)
    if NAMED_SET.fullmatch(text):
        return NamedSet(re.sub(r"[{}]", "", text))
    based = BASED_NUMBER.fullmatch(text.replace(" ", ""))
    if based is not None:
        return _read_based_number(based)
    return _read_value(text)


def _read_value(text: str) -> Statement:
    """Parse an expression with its units, or words."""
    text = _remove_braces(text.strip())
    # Parse quantities before expressions, because in an expression the m of "5 m" is a factor.
    quantity = parse_quantity(text)
    if quantity is not None:
        number = quantity.number
        return ExpressionStatement(text, Rational(number.value), number, quantity.units)

    words = TEXT.fullmatch(text)
    # \text{A} is a name in another font.
    if words is not None and len(words[1].strip()) == 1:
        return ExpressionStatement(text, read_expression(words[1]))
    if words is not None:
        return WordsStatement(" ".join(words[1].lower().split()))
    body, units = parse_units(text)
    if r"\text" in body:
        raise UnreadableError(text)
    value = read_expression(body)
    if value.has(DEGREE):
        # An angle is a number of degrees.
        coefficient = value.coeff(DEGREE, 1)
        if units.is_given or (value - coefficient * DEGREE).expand() != 0:
            raise UnreadableError(text)
        if coefficient.has(DEGREE):
            raise UnreadableError(text)
        value, units = coefficient, UnitProduct.of("deg")
    return ExpressionStatement(body, value, None, units)


def _read_set(inside: str, depth: int) -> Statement:
    r"""Parse the contents of \{ and \}: 1, 2 or x : x > 3 or nothing."""
    if not inside.strip():
        return NamedSet(r"\emptyset")
    # Each of these signs may separate a member from its condition: \{x : x > 3\}.
    for separator in (":", r"\mid", "|"):
        parts, found = _split_at(inside, {separator: separator})
        if len(found) == 1:
            member, condition = (_read_nested(part, depth + 1) for part in parts)
            return SetBuilder(member, condition)
    statement = _read_nested(inside, depth + 1)
    if isinstance(statement, StatementList):
        if statement.connective != ",":
            raise UnreadableError(inside)
        return ListedSet(statement.items)
    return ListedSet((statement,))


def _read_latex_environment(environment: re.Match[str], depth: int) -> Statement:
    """Parse a match of LATEX_ENVIRONMENT: a matrix or cases."""
    name, body, end = environment.groups()
    if name != end or r"\begin" in body:
        raise UnreadableError(body)
    if name in MATRICES:
        return _read_matrix(body, depth)
    if name != "cases":
        raise UnreadableError(body)
    return PiecewiseStatement(tuple(_read_case(row, depth) for row in _split_rows(body)))


def _split_rows(body: str) -> list[str]:
    """Return the rows of a matrix or of cases that are not empty."""
    return [row for row in re.split(r"\\\\(?:\[[^\]]*\])?", body) if row.strip()]


def _read_matrix(body: str, depth: int) -> MatrixStatement:
    r"""Parse the rows between \begin{pmatrix} and \end{pmatrix}: 1 & 2 \\ 3 & 4."""
    # Rows and cells are cut at every \\ and &, also at those of an inner matrix.
    if r"\begin" in body:
        raise UnreadableError(body)
    cells = tuple(
        tuple(_read_nested(cell, depth + 1) for cell in row.split("&")) for row in _split_rows(body)
    )
    if not cells or len({len(row) for row in cells}) > 1:
        raise UnreadableError(body)
    return MatrixStatement(cells)


def _read_case(row: str, depth: int) -> tuple[Statement, Statement | None]:
    r"""Parse one row of cases: x & \text{if } x > 0. Returns value and condition."""
    parts = row.split("&")
    if len(parts) == 1:
        # The condition may follow a comma instead of "&".
        parts = re.split(r",\s*(?=\\text\{\s*(?:if|for|when|otherwise))", row, maxsplit=1)
    if len(parts) != 2:
        raise UnreadableError(row)
    value, condition = parts[0].strip().rstrip(","), parts[1].strip().rstrip(".,;")
    if OTHERWISE.fullmatch(condition):
        return _read_nested(value, depth + 1), None
    return _read_nested(value, depth + 1), _read_nested(
        CONDITION_WORD.sub(" ", condition, count=1), depth + 1
    )


def _read_based_number(based: re.Match[str]) -> Statement:
    """Parse a match of BASED_NUMBER: 101_2 or FF_{16}."""
    base = int(based["base"])
    digits = based["digits"].lstrip("0") or "0"
    if not 2 <= base <= MAX_BASE or any(int(digit, 36) >= base for digit in digits):
        raise UnreadableError(based[0])
    # A number in base 10 is a plain value.
    if base == 10:
        number = int(based["sign"] + digits)
        return ExpressionStatement(based[0], Rational(number))
    return BasedNumber(based["sign"] + digits, base)


def _split_at(text: str, separators: dict[str, str]) -> tuple[list[str], list[str]]:
    """Split a text at separators outside of all brackets. Returns the parts and the separators."""
    parts: list[str] = []
    found: list[str] = []
    depth = 0
    start = 0
    for piece in PIECE.finditer(text):
        token = piece[0]
        depth += (token in OPENING) - (token in CLOSING)
        if token.startswith(r"\begin"):
            depth += 1
        elif token.startswith(r"\end"):
            depth -= 1
        if token in separators and depth == 0:
            parts.append(text[start : piece.start()])
            found.append(separators[token])
            start = piece.end()
    if depth != 0:
        raise UnreadableError(text)
    parts.append(text[start:])
    return parts, found


def _split_brackets(text: str) -> tuple[str, str, str] | None:
    """Return left bracket, contents and right bracket if one pair encloses the whole text."""
    pieces = [(piece[0], piece.start(), piece.end()) for piece in PIECE.finditer(text)]
    if len(pieces) < 2:
        return None

    opening, closing = pieces[0][0], pieces[-1][0]
    # "]1, 2[" is another notation of an open interval.
    interval_openings, interval_closings = ("(", "[", "]"), (")", "]", "[")
    is_interval_or_point = opening in interval_openings and closing in interval_closings
    if not is_interval_or_point and (opening, closing) not in (
        (r"\{", r"\}"),
        (r"\langle", r"\rangle"),
    ):
        return None

    depth = 0
    for token, start, _ in pieces[:-1]:
        depth += (token in OPENING) - (token in CLOSING)
        # An opening "]" was counted as a closing bracket above.
        if start == 0 and opening == "]":
            depth = 1
        if depth == 0:
            return None
    return opening, text[pieces[0][2] : pieces[-1][1]], closing


def _remove_braces(text: str) -> str:
    """Remove braces around the whole text: {{x}} is x."""
    while text.startswith("{") and closing_brace(text, 0) == len(text) - 1:
        text = text[1:-1].strip()
    return text
