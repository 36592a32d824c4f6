r"""Numbers as people write them: grouped digits, fractions, mixed numbers, powers of ten, repeating decimals, percent.

Everything is exact. When is a decimal right? If the ground truth is exact (an integer, a fraction, an expression, a
decimal of few places), only what equals it: 3.141593 is not \pi and 0.333333 is not 1/3. If the ground truth is a
decimal of at least ROUNDED_PLACES places, it is taken for rounded, and what rounds to it is right, too, as math-verify
has it."""

import re
from dataclasses import dataclass
from fractions import Fraction

# decimals of the ground truth from here on are taken for rounded; math-verify compares as many places
ROUNDED_PLACES = 6
# beyond these, computing with a number could take long
MOST_DIGITS = 400
LARGEST_EXPONENT = 400

PLAIN = re.compile(r"[0-9]*\.?[0-9]*")
# 1,234,567 with one and the same separator; spaces also stand for the thin spaces of LaTeX
GROUPED = re.compile(r"[0-9]{1,3}(?P<separator>[, '_])[0-9]{3}(?:(?P=separator)[0-9]{3})*(?P<places>\.[0-9]*)?")
CONTINENTAL = re.compile(r"[0-9]{1,3}(?:\.[0-9]{3})+,[0-9]+")
REPEATING = re.compile(r"(?P<start>[0-9]*\.[0-9]*)(?:\\overline\s*\{(?P<bar>[0-9]+)\}|\((?P<bracket>[0-9]+)\))")
DOTTED = re.compile(
    r"(?P<start>[0-9]*\.[0-9]*)\\dot\s*\{?(?P<first>[0-9])\}?(?:(?P<middle>[0-9]*)\\dot\s*\{?(?P<last>[0-9])\}?)?"
)
# 0.333... and 0.1666...: the last digits must be there three times; 1.4142... repeats nothing
ELLIPSIS = re.compile(
    r"(?P<start>[0-9]*\.[0-9]*?)(?P<block>[0-9]{1,6}?)(?P=block){2,}(?:\.\.\.|\\ldots|\\dots|\\cdots)"
)

POWER_OF_TEN = re.compile(
    r"(?:(?P<factor>.+?)\s*(?:\\times|\\cdot|\*)\s*)?10\s*\^\s*(?:\{\s*(?P<braced>[-+]?[0-9]{1,4})\s*\}|(?P<digit>[0-9]))"
)
SCIENTIFIC = re.compile(r"(?P<factor>[^eE]+)[eE](?P<exponent>[-+]?[0-9]{1,4})")
FRACTION = re.compile(r"\\frac\s*\{(?P<above>[^{}]*)\}\s*\{(?P<below>[^{}]*)\}")
SLASH = re.compile(r"(?P<above>[^/]+)/(?P<below>[^/]+)")
MIXED = re.compile(r"(?P<whole>[0-9]+)\s*(?P<part>\\frac.*|(?<=\s)[0-9]+\s*/\s*[0-9]+)")


@dataclass(frozen=True)
class Number:
    """A number and how it was written."""

    value: Fraction
    places: int = 0  # digits after the decimal point; 0 for what is exact
    percent: bool = False  # ``value`` is the number before the sign


def parse_number(text: str) -> Number | None:
    """The number that ``text`` is, in standard notation; None if it is anything else."""
    text = text.strip()
    if len(text) > MOST_DIGITS:
        return None

    percent = re.fullmatch(r"(?P<number>.*?)\s*(?:\\?%|(?:\\text\{)?\s*(?:percent|pct)\s*\}?)", text)
    if percent is not None:
        number = _signed(percent["number"])
        return None if number is None else Number(number.value, number.places, percent=True)
    return _signed(text)


def same_number(given: Number, wanted: Number) -> bool:
    """Whether ``given`` is right. 50 % may stand for 50 and for 0.5, as math-verify has it."""
    if given.percent == wanted.percent:
        return _same_value(given.value, wanted)
    if given.percent:
        return _same_value(given.value, wanted) or _same_value(given.value / 100, wanted)
    return _same_value(given.value, wanted) or _same_value(given.value * 100, wanted)


def exact_decimals(text: str) -> str:
    """The same expression with fractions for its decimals: math-verify takes decimals for rounded numbers."""
    return re.sub(r"([0-9]*)\.([0-9]+)", _as_fraction, text)


def _as_fraction(match: re.Match[str]) -> str:
    return rf"\frac{{{match[1] + match[2]}}}{{1{'0' * len(match[2])}}}"


def _same_value(value: Fraction, wanted: Number) -> bool:
    if value == wanted.value:
        return True
    if wanted.places < ROUNDED_PLACES or wanted.value == 0:
        return False

    # half a unit of the sixth place; of the sixth significant digit if there are zeros before it
    places = ROUNDED_PLACES
    while abs(wanted.value) * 10 ** (places - ROUNDED_PLACES + 1) < 1 and places < MOST_DIGITS:
        places += 1
    return abs(value - wanted.value) * 2 * 10**places <= 1


def _signed(text: str) -> Number | None:
    sign, text = re.fullmatch(r"([-+]?)\s*(.*)", text.strip(), re.DOTALL).groups()  # type: ignore[union-attr]
    number = _unsigned(text.strip())
    if number is None or sign != "-":
        return number
    return Number(-number.value, number.places)


def _unsigned(text: str) -> Number | None:
    while text.startswith("{") and text.endswith("}") and text.count("{") == 1:
        text = text[1:-1].strip()
    for parse in (_decimal, _repeating, _power_of_ten, _mixed, _fraction):
        number = parse(text)
        if number is not None:
            return number
    return None


def _decimal(text: str) -> Number | None:
    """12, 12., .5, 1 234.5, 1,234,567 and 1.234,5."""
    if CONTINENTAL.fullmatch(text):
        text = text.replace(".", "").replace(",", ".")
    elif grouped := GROUPED.fullmatch(text):
        text = text.replace(grouped["separator"], "")
    if not PLAIN.fullmatch(text) or not any(map(str.isdigit, text)):
        return None
    places = text.partition(".")[2]
    return Number(Fraction(text.rstrip(".")), len(places))


def _repeating(text: str) -> Number | None:
    r"""0.1\overline{6}, 0.1(6), 0.1\dot{6} and 0.1666...; all are 1/6."""
    if found := REPEATING.fullmatch(text):
        start, block = found["start"], found["bar"] or found["bracket"]
    elif found := DOTTED.fullmatch(text):
        start, block = found["start"], found["first"] + (found["middle"] or "") + (found["last"] or "")
    elif found := ELLIPSIS.fullmatch(text):
        start, block = found["start"], found["block"]
    else:
        return None
    shift = len(start.partition(".")[2])
    beginning = Fraction("0" + start.rstrip("."))
    return Number(beginning + Fraction(int(block), (10 ** len(block) - 1) * 10**shift))


def _power_of_ten(text: str) -> Number | None:
    r"""1.5e3, 1.5 \times 10^3 and 10^3."""
    if found := POWER_OF_TEN.fullmatch(text):
        exponent = int(found["braced"] or found["digit"])
    elif found := SCIENTIFIC.fullmatch(text):
        exponent = int(found["exponent"])
    else:
        return None
    factor = Number(Fraction(1)) if found["factor"] is None else _decimal(found["factor"].strip())
    if factor is None or abs(exponent) > LARGEST_EXPONENT:
        return None
    return Number(factor.value * Fraction(10) ** exponent, max(0, factor.places - exponent) if factor.places else 0)


def _mixed(text: str) -> Number | None:
    r"""1 1/2 and 1\frac{1}{2}."""
    found = MIXED.fullmatch(text)
    part = found and _fraction(found["part"])
    if not found or not part or part.places or not 0 < part.value < 1:
        return None
    return Number(int(found["whole"]) + part.value)


def _fraction(text: str) -> Number | None:
    found = FRACTION.fullmatch(text) or SLASH.fullmatch(text)
    if found is None:
        return None
    above, below = (_plain_part(found[name]) for name in ("above", "below"))
    if above is None or below is None or below == 0:
        return None
    return Number(above / below)


def _plain_part(text: str) -> Fraction | None:
    sign = -1 if text.strip().startswith("-") else 1
    number = _decimal(text.strip().removeprefix("-").removeprefix("+").strip().removeprefix("{").removesuffix("}"))
    return None if number is None else sign * number.value
