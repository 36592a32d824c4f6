r"""Parses one mathematical expression in LaTeX, completely or not at all.

An unknown token makes the whole text unreadable, so no part of an answer is ignored. Values are
exact sympy expressions. Decimals are fractions.
"""

import re
from fractions import Fraction
from typing import Any

import sympy
from sympy import Expr, Function, I, Rational, S, Symbol

from rl_loop.rewards.latex_lexer import (
    ACCENTS,
    FUNCTIONS,
    GREEK,
    INVERSE_FUNCTIONS,
    LOGARITHMS,
    MULTI_ARGUMENT_FUNCTIONS,
    TRIGONOMETRY,
    LatexToken,
    UnreadableError,
    tokenize,
)

DEGREE = Symbol("degree")
"""Unit of an angle, used as a factor: 30 degree."""
SIGN = Symbol("plus_minus")
r"""Symbol for \pm: 1 or -1."""
MAX_EXPRESSION_DEPTH = 60
"""Maximum depth of nested groups, because Python's stack is limited."""

UNDEFINED_FUNCTIONS = frozenset("fghFGH")
"""Letters that are functions in front of a bracket. Other letters are factors."""

TIMES = frozenset({"*", r"\cdot", r"\times", r"\ast"})
OVER = frozenset({"/", r"\div"})
SIGNS = frozenset({"+", "-", r"\pm", r"\mp"})

CONSTANTS: dict[str, Expr] = {"pi": sympy.pi, "infty": S.Infinity, "imath": I}
FIGURES = frozenset({"angle", "triangle"})
"""Commands that form one name with the following letters."""
BRACKETS: dict[str, Any] = {"lfloor": sympy.floor, "lceil": sympy.ceiling, "lvert": sympy.Abs}
"""Left brackets of functions. Names of right brackets begin with r."""
SERIES: dict[str, Any] = {"sum": sympy.Sum, "prod": sympy.Product}
FACTORS = frozenset(
    {
        *GREEK,
        *ACCENTS,
        *FUNCTIONS,
        *CONSTANTS,
        *FIGURES,
        *BRACKETS,
        *SERIES,
        "frac",
        "binom",
        "operatorname",
    }
)
"""Commands that may follow a factor without a multiplication sign."""


def read_expression(text: str) -> Expr:
    """Return the value of an expression. Raises UnreadableError if a part is not understood."""
    return _Reader(text).read()


class _Reader:
    """Recursive-descent parser for the tokens of one text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = list(tokenize(text))
        self._at = 0
        self._depth = 0
        self._bars = 0
        """Number of open | of absolute values."""

    def read(self) -> Expr:
        """Return the value of the whole text."""
        value = self._read_sum()
        if self._next.kind != "end":
            raise self._unreadable()
        return value

    # ---- tokens

    @property
    def _next(self) -> LatexToken:
        """Token that is read next."""
        return self._tokens[self._at]

    def _take(self) -> LatexToken:
        """Return the next token and move past it."""
        token = self._tokens[self._at]
        # Stays at the end token, so that no caller has to check for the end.
        self._at = min(self._at + 1, len(self._tokens) - 1)
        return token

    def _skip(self, text: str) -> bool:
        """Move past the next token if it is ``text``. Returns False otherwise."""
        if self._next.text != text or self._next.kind == "end":
            return False
        self._take()
        return True

    def _expect(self, text: str) -> None:
        """Move past the next token, which must be ``text``."""
        if not self._skip(text):
            raise self._unreadable()

    def _unreadable(self) -> UnreadableError:
        """Return the error for this text."""
        return UnreadableError(self._text)

    # ---- sums and products

    def _read_sum(self) -> Expr:
        """Parse a sum, which is a complete expression: 2x - 3."""
        # Every nested group passes here, so one counter bounds the recursion.
        self._depth += 1
        if self._depth > MAX_EXPRESSION_DEPTH:
            raise self._unreadable()
        terms = [self._read_signed_product()]
        while self._next.text in SIGNS:
            terms.append(self._read_signed_product())
        self._depth -= 1
        return sympy.Add(*terms)

    def _read_signed_product(self) -> Expr:
        """Parse a product with any signs in front of it: -2x."""
        sign: Expr = S.One
        while self._next.text in SIGNS:
            mark = self._take().text
            if mark == "-":
                sign = -sign
            elif mark == r"\pm":
                sign = sign * SIGN
            elif mark == r"\mp":
                sign = -sign * SIGN
        return sign * self._read_product()

    def _read_product(self) -> Expr:
        r"""Parse factors with or without signs between them: 2x \cdot 3, x / 2."""
        value = self._read_mixed_number()
        if value is None:
            value = self._read_power()
        while True:
            if self._next.text in TIMES:
                self._take()
                value = value * self._read_signed_factor()
            elif self._next.text in OVER:
                self._take()
                value = self._divide(value, self._read_signed_factor())
            elif self._begins_factor():
                value = value * self._read_power()
            else:
                return value

    def _read_mixed_number(self) -> Expr | None:
        r"""Parse 1\frac{1}{2} and "1 1/2". Returns None if no mixed number is next."""
        # Without this, 1\frac{1}{2} would be the product of 1 and 1/2.
        pattern = r"([0-9]+)\s*\\frac\{([0-9]+)\}\{([0-9]+)\}|([0-9]+) ([0-9]+)/([0-9]+)"
        text = ""
        for token in self._tokens[self._at : self._at + 9]:
            # A space has a meaning only between two numbers.
            text += " " if token.kind == "number" and text[-1:].isdigit() else ""
            text += token.text
        match = re.match(rf"(?:{pattern})(?![0-9.])", text)
        if match is None:
            return None
        whole, above, below = (int(digits) for digits in match.groups() if digits is not None)
        # "1 3/2" may be a mixed number or a product.
        if not 0 < above < below:
            raise self._unreadable()
        # The number of tokens of the two forms.
        self._at += 8 if match[1] is not None else 4
        return Rational(whole * below + above, below)

    def _read_signed_factor(self) -> Expr:
        r"""Parse a factor after a multiplication or division sign: the -3 of 2 \cdot -3."""
        negative = False
        while self._next.text in ("+", "-"):
            negative ^= self._take().text == "-"
        value = self._read_power()
        return -value if negative else value

    def _begins_factor(self) -> bool:
        """Return True if a factor without a multiplication sign follows."""
        token = self._next
        if token.kind == "letter":
            return True
        if token.kind == "mark":
            # A bar ends an absolute value if one is open, and begins one otherwise.
            return token.text in ("(", "[", "{") or (token.text == "|" and self._bars == 0)
        # A number needs a multiplication sign, because "2 3" and "x2" are ambiguous.
        return token.kind == "command" and token.text[1:] in FACTORS

    def _divide(self, above: Expr, below: Expr) -> Expr:
        """Return above / below, exactly."""
        if below == 0:
            raise self._unreadable()
        return above / below

    # ---- powers

    def _read_power(self) -> Expr:
        """Parse an atom with its exponent and postfix signs: x^2, 5!."""
        value = self._read_postfix(self._read_atom())
        if self._skip("^"):
            value = self._raise_to(value, self._read_exponent())
            value = self._read_postfix(value)
            # "2^3^2" is not valid LaTeX and is ambiguous.
            if self._next.text == "^":
                raise self._unreadable()
        return value

    def _raise_to(self, base: Expr, exponent: Expr) -> Expr:
        """Return ``base`` to the power ``exponent``."""
        # sympy would return infinity for 0^{-1}, and 1 for 0^0.
        if base == 0 and (exponent.is_negative or exponent == 0):
            raise self._unreadable()
        return sympy.Pow(base, exponent)

    def _read_exponent(self) -> Expr:
        """Parse an exponent, in braces or not: the 2 of x^2, the -1 of x^{-1}."""
        if self._next.text == "{":
            return self._read_group("{", "}")
        negative = False
        if self._next.text in ("+", "-"):
            negative = self._take().text == "-"
        value = self._read_postfix(self._read_atom())
        if self._skip("^"):
            value = self._raise_to(value, self._read_exponent())
        return -value if negative else value

    def _read_postfix(self, value: Expr) -> Expr:
        r"""Parse the ! and \degree behind ``value``."""
        while True:
            if self._skip("!"):
                # "5!!" is the double factorial, and not the factorial of 5!.
                doubled = self._next.text == "!" and not self._next.after_space
                if doubled:
                    self._take()
                value = sympy.factorial2(value) if doubled else sympy.factorial(value)
                # (-1)! is not defined, but sympy has a value for it.
                if value.has(S.ComplexInfinity):
                    raise self._unreadable()
            elif self._skip(r"\degree"):
                value = value * DEGREE
            else:
                return value

    # ---- atoms

    def _read_atom(self) -> Expr:
        """Parse a number, name, bracketed expression, absolute value or command."""
        token = self._take()
        if token.kind == "number":
            return self._read_number(token.text)
        if token.kind == "letter":
            return self._read_letter(token.text)
        if token.text in ("(", "[", "{"):
            self._at -= 1
            return self._read_group(token.text, {"(": ")", "[": "]", "{": "}"}[token.text])
        if token.text == "|":
            return self._read_absolute("|")
        if token.kind == "command":
            return self._read_command(token.text[1:])
        raise self._unreadable()

    def _read_group(self, opening: str, closing: str) -> Expr:
        """Parse an expression between two brackets."""
        self._expect(opening)
        # Bars within brackets belong to the brackets: |(|x|)|.
        bars, self._bars = self._bars, 0
        value = self._read_sum()
        self._bars = bars
        self._expect(closing)
        return value

    def _read_absolute(self, closing: str) -> Expr:
        """Parse the rest of an absolute value, after its first bar."""
        self._bars += 1
        # ||x|| may be nested or a norm.
        if self._bars > 1:
            raise self._unreadable()
        value = self._read_sum()
        self._expect(closing)
        self._bars -= 1
        return sympy.Abs(value)

    def _read_number(self, digits: str) -> Expr:
        r"""Return the value of digits, with a repeating block if one follows: 0.1\overline{6}."""
        # Digits in a base, such as 101_2, are no part of an expression.
        if self._next.text == "_":
            raise self._unreadable()
        if "." in digits and self._next.text == r"\overline":
            self._take()
            block = self._read_raw_group()
            if not block.isdigit():
                raise self._unreadable()
            # 0.1\overline{6}: the block divided by as many nines, behind the places before it.
            places = len(digits.partition(".")[2])
            nines = (10 ** len(block) - 1) * 10**places
            return Rational(Fraction(digits.rstrip(".") or "0") + Fraction(int(block), nines))
        return Rational(Fraction(digits.rstrip(".")))

    def _read_letter(self, letter: str) -> Expr:
        """Parse the rest of a variable, a constant (e, i) or a function such as f(x)."""
        name = self._read_index(letter)
        if letter in UNDEFINED_FUNCTIONS and self._next.text == "(":
            return Function(name)(*self._read_arguments())
        if name == "e":
            return S.Exp1
        if name == "i":
            return I
        return Symbol(name)

    def _read_index(self, name: str) -> str:
        """Add index and primes to a name."""
        if self._skip("_"):
            index = self._read_raw_group() if self._next.text == "{" else self._take().text
            if not index:
                raise self._unreadable()
            name += f"_{index}"
        while self._skip("'"):
            name += "'"
        return name

    def _read_raw_group(self) -> str:
        """Return the text of a group in braces."""
        self._expect("{")
        depth = 1
        pieces: list[str] = []
        while True:
            token = self._take()
            if token.kind == "end":
                raise self._unreadable()
            depth += (token.text == "{") - (token.text == "}")
            if depth == 0:
                return "".join(pieces)
            pieces.append(token.text)

    def _read_argument(self) -> Expr:
        r"""Parse an argument of a command: in braces, or one digit, letter or command."""
        if self._next.text == "{":
            return self._read_group("{", "}")
        token = self._next
        if token.kind == "number" and len(token.text) == 1:
            self._take()
            return sympy.Integer(int(token.text))
        if token.kind in ("letter", "command"):
            return self._read_atom()
        raise self._unreadable()

    def _read_command(self, name: str) -> Expr:
        """Parse a command after its name."""
        # Constants and names.
        if name in CONSTANTS:
            return CONSTANTS[name]
        if name in GREEK:
            return Symbol(self._read_index(f"\\{name}"))
        if name in ACCENTS:
            return Symbol(self._read_index(f"\\{name}{{{self._read_raw_group()}}}"))
        if name in FIGURES:
            return self._read_figure(name)

        # Commands with arguments in braces or between brackets.
        if name == "frac":
            return self._divide(self._read_argument(), self._read_argument())
        if name == "binom":
            return sympy.binomial(self._read_argument(), self._read_argument())
        if name == "sqrt":
            return self._read_root()
        if name in BRACKETS:
            return self._read_bracketed(name)
        if name in SERIES:
            return self._read_series(SERIES[name])

        # Functions, also in \operatorname.
        if name == "operatorname":
            name = self._read_raw_group()
        if name in MULTI_ARGUMENT_FUNCTIONS:
            return self._read_multi_argument_function(name)
        if name in FUNCTIONS:
            return self._read_function(name)
        raise self._unreadable()

    def _read_figure(self, name: str) -> Expr:
        r"""Parse the letters of \angle ABC."""
        letters = ""
        while self._next.kind == "letter":
            letters += self._take().text
        if not letters:
            raise self._unreadable()
        return Symbol(f"\\{name} {letters}")

    def _read_bracketed(self, name: str) -> Expr:
        r"""Parse the rest of \lfloor x \rfloor."""
        value = self._read_sum()
        self._expect("\\r" + name[1:])
        return BRACKETS[name](value)

    def _read_root(self) -> Expr:
        r"""Parse the rest of \sqrt{x} or \sqrt[3]{x}."""
        degree: Expr = sympy.Integer(2)
        if self._next.text == "[":
            degree = self._read_group("[", "]")
        inner = self._read_group("(", ")") if self._next.text == "(" else self._read_argument()
        if degree == 0:
            raise self._unreadable()
        return sympy.root(inner, degree)

    # ---- functions

    def _read_function(self, name: str) -> Expr:
        r"""Parse the rest of a function of one argument: \sin^2 x, \log_2 8."""
        base: Expr | None = None
        if name == "log" and self._skip("_"):
            base = self._read_argument()
            if base in (0, 1):
                raise self._unreadable()
        exponent: Expr | None = None
        if self._skip("^"):
            exponent = self._read_exponent()

        argument = self._read_function_argument()
        if name in TRIGONOMETRY or name == "exp":
            # Functions take radians.
            argument = argument.subs(DEGREE, sympy.pi / 180)
        # \sin^{-1} x is the inverse function, but \sin^2 x is a power.
        if name in TRIGONOMETRY and exponent == -1:
            inverse = "arc" + name if not name.endswith("h") else "ar" + name
            if inverse not in INVERSE_FUNCTIONS:
                raise self._unreadable()
            return INVERSE_FUNCTIONS[inverse](argument)

        if name in LOGARITHMS:
            if argument == 0:
                raise self._unreadable()
            value = sympy.log(argument)
            if name != "ln":
                value = value / sympy.log(sympy.Integer(10) if base is None else base)
        elif name == "exp":
            value = sympy.exp(argument)
        else:
            value = (TRIGONOMETRY | INVERSE_FUNCTIONS)[name](argument)
        return value if exponent is None else self._raise_to(value, exponent)

    def _read_function_argument(self) -> Expr:
        r"""Parse (x) or {x}, or factors without signs between them, such as 2x in \sin 2x."""
        if self._next.text in ("(", "{", "["):
            opening = self._next.text
            return self._read_group(opening, {"(": ")", "[": "]", "{": "}"}[opening])
        negative = self._skip("-")
        value = self._read_power()
        # "\sin x \cos x" is a product of two functions.
        while self._begins_factor() and self._next.text.removeprefix("\\") not in FUNCTIONS:
            value = value * self._read_power()
        # "\sin \pi/2" is \sin(\pi/2), but "\sin x/2" is ambiguous and usually a half of \sin x.
        if self._next.text == "/" and value.is_number:
            self._take()
            value = self._divide(value, self._read_power())
        return -value if negative else value

    def _read_arguments(self) -> list[Expr]:
        """Parse arguments between parentheses: (1, 2)."""
        self._expect("(")
        values = [self._read_sum()]
        while self._skip(","):
            values.append(self._read_sum())
        self._expect(")")
        return values

    def _read_multi_argument_function(self, name: str) -> Expr:
        """Parse the rest of gcd, lcm, max or min."""
        values = self._read_arguments()
        if name in ("max", "min"):
            return (sympy.Max if name == "max" else sympy.Min)(*values)
        if all(value.is_Integer for value in values):
            numbers = [int(value) for value in values]
            return sympy.Integer(sympy.igcd(*numbers) if name == "gcd" else sympy.ilcm(*numbers))
        # sympy's gcd of polynomials, for example of a and 3, differs from the gcd of integers.
        return Function(name)(*sorted(values, key=str))

    def _read_series(self, kind: Any) -> Expr:
        r"""Parse the rest of a sum or product: \sum_{k=1}^{n} k."""
        self._expect("_")
        bound = self._read_raw_group()
        variable, equals, first = bound.partition("=")
        if not equals or not re.fullmatch("[a-zA-Z]", variable):
            raise self._unreadable()
        self._expect("^")
        last = self._read_exponent()
        body = self._read_product()
        # Evaluated, so that it is compared as a value.
        return kind(body, (Symbol(variable), read_expression(first), last)).doit()
