r"""Parses numbers in common notations: grouped digits, fractions, mixed numbers, powers of ten,
repeating decimals, percent.

Values are exact. If the ground truth is exact (an integer, a fraction, an expression, a decimal of
few places), only an equal value is correct: 3.141593 is not \pi and 0.333333 is not 1/3. A ground
truth with at least ROUNDED_PLACES decimal places counts as rounded. Values that round to it are
then correct, too.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

ROUNDED_PLACES = 6
"""Minimum number of decimal places in a ground truth that counts as rounded."""

MAX_NUMBER_DIGITS = 400
"""Maximum characters of a number. A longer text is not parsed as a number."""
MAX_EXPONENT = 400
"""Maximum exponent, because computing with larger ones could take long."""

# "12", "12.", ".5". The empty text and "." match, too, and are rejected later.
PLAIN = re.compile(r"[0-9]*\.?[0-9]*")

GROUPED = re.compile(
    r"[0-9]{1,3}(?P<separator>[, '_])[0-9]{3}(?:(?P=separator)[0-9]{3})*(?P<places>\.[0-9]*)?"
)
"""1,234,567 with one separator throughout. Spaces also represent the thin spaces of LaTeX."""
CONTINENTAL = re.compile(r"[0-9]{1,3}(?:\.[0-9]{3})+,[0-9]+")
"""1.234.567,8"""

REPEATING = re.compile(
    r"(?P<start>[0-9]*\.[0-9]*)(?:\\overline\s*\{(?P<bar>[0-9]+)\}|\((?P<bracket>[0-9]+)\))"
)
r"""0.1\overline{6} and 0.1(6)"""
DOTTED = re.compile(
    r"(?P<start>[0-9]*\.[0-9]*)\\dot\s*\{?(?P<first>[0-9])\}?"
    r"(?:(?P<middle>[0-9]*)\\dot\s*\{?(?P<last>[0-9])\}?)?"
)
r"""0.1\dot{6}; with two dots, the block between them repeats."""
ELLIPSIS = re.compile(
    r"(?P<start>[0-9]*\.[0-9]*?)(?P<block>[0-9]{1,6}?)(?P=block){2,}(?:\.\.\.|\\ldots|\\dots|\\cdots)"
)
"""0.333... and 0.1666...: the last digits must occur three times. 1.4142... has no repetition."""

# "1.5 \times 10^3" and "10^{-4}"
POWER_OF_TEN = re.compile(
    r"(?:(?P<factor>.+?)\s*(?:\\times|\\cdot|\*)\s*)?"
    r"10\s*\^\s*(?:\{\s*(?P<braced>[-+]?[0-9]{1,4})\s*\}|(?P<digit>[0-9]))"
)
# "1.5e-3"
SCIENTIFIC = re.compile(r"(?P<factor>[^eE]+)[eE](?P<exponent>[-+]?[0-9]{1,4})")

FRACTION = re.compile(r"\\frac\s*\{(?P<above>[^{}]*)\}\s*\{(?P<below>[^{}]*)\}")
SLASH = re.compile(r"(?P<above>[^/]+)/(?P<below>[^/]+)")
# "1 1/2", which only the space distinguishes from 11/2, and "1\frac{1}{2}".
MIXED = re.compile(r"(?P<whole>[0-9]+)\s*(?P<part>\\frac.*|(?<=\s)[0-9]+\s*/\s*[0-9]+)")

# "50%", "50\%", "50 percent"
PERCENT = re.compile(r"(?P<number>.*?)\s*(?:\\?%|(?:\\text\{)?\s*(?:percentage|percent|pct)\s*\}?)")


@dataclass(frozen=True)
class NotatedNumber:
    """Number with its notation."""

    value: Fraction
    places: int = 0
    """Number of digits after the decimal point. 0 for an exact number."""
    percent: bool = False
    """True if a percent sign follows. ``value`` is the number in front of it."""


def parse_number(text: str) -> NotatedNumber | None:
    """Return the number in ``text``, in standard notation. None if it is anything else."""
    text = text.strip()
    if len(text) > MAX_NUMBER_DIGITS:
        return None

    percent = PERCENT.fullmatch(text)
    if percent is None:
        return _parse_signed(text)
    number = _parse_signed(percent["number"])
    if number is None:
        return None
    return NotatedNumber(number.value, number.places, percent=True)


def equivalent_numbers(answer: NotatedNumber, truth: NotatedNumber) -> bool:
    """Return True if ``answer`` is correct. 50% may mean 50 or 0.5."""
    if _is_value(answer.value, truth):
        return True
    if answer.percent == truth.percent:
        return False
    scale = Fraction(1, 100) if answer.percent else Fraction(100)
    return _is_value(answer.value * scale, truth)


def _is_value(value: Fraction, truth: NotatedNumber) -> bool:
    """Return True if a value equals the truth, or rounds to a rounded truth."""
    if value == truth.value:
        return True
    if truth.places < ROUNDED_PLACES or truth.value == 0:
        return False

    # Half a unit of the sixth place, or of the sixth significant digit after leading zeros.
    places = ROUNDED_PLACES
    while abs(truth.value) * 10 ** (places - ROUNDED_PLACES + 1) < 1 and places < MAX_NUMBER_DIGITS:
        places += 1
    return abs(value - truth.value) * 2 * 10**places <= 1


# ---- notations, tried in this order


def _parse_signed(text: str) -> NotatedNumber | None:
    """Parse a number with an optional sign."""
    text = text.strip()
    sign = text[:1] if text[:1] in ("-", "+") else ""
    number = _parse_unsigned(text[len(sign) :].strip())
    # A negated number keeps its places, and percent signs were removed before.
    if number is None or sign != "-":
        return number
    return NotatedNumber(-number.value, number.places)


def _parse_unsigned(text: str) -> NotatedNumber | None:
    """Parse a number without a sign, in any notation."""
    # A number in one pair of braces, such as {12}. With more braces it is an expression.
    while text.startswith("{") and text.endswith("}") and text.count("{") == 1:
        text = text[1:-1].strip()

    for parse in (
        _parse_decimal,
        _parse_repeating,
        _parse_power_of_ten,
        _parse_mixed,
        _parse_fraction,
    ):
        number = parse(text)
        if number is not None:
            return number
    return None


def _parse_decimal(text: str) -> NotatedNumber | None:
    """Parse 12, 12., .5, 1 234.5, 1,234,567 and 1.234,5."""
    grouped = GROUPED.fullmatch(text)
    # With a comma at the end, points separate thousands: 1.234,5.
    if CONTINENTAL.fullmatch(text):
        text = text.replace(".", "").replace(",", ".")
    elif grouped is not None:
        text = text.replace(grouped["separator"], "")

    if not PLAIN.fullmatch(text) or not any(map(str.isdigit, text)):
        return None
    places = text.partition(".")[2]
    return NotatedNumber(Fraction(text.rstrip(".")), len(places))


def _parse_repeating(text: str) -> NotatedNumber | None:
    r"""Parse 0.1\overline{6}, 0.1(6), 0.1\dot{6} and 0.1666..., which are all 1/6."""
    if written := REPEATING.fullmatch(text):
        block = written["bar"] or written["bracket"]
    elif written := DOTTED.fullmatch(text):
        block = written["first"] + (written["middle"] or "") + (written["last"] or "")
    elif written := ELLIPSIS.fullmatch(text):
        block = written["block"]
    else:
        return None

    start = written["start"]
    places = start.partition(".")[2]
    beginning = Fraction("0" + start.rstrip("."))
    # A repeating block of n digits equals the block divided by n nines.
    nines = 10 ** len(block) - 1
    return NotatedNumber(beginning + Fraction(int(block), nines * 10 ** len(places)))


def _parse_power_of_ten(text: str) -> NotatedNumber | None:
    r"""Parse 1.5e3, 1.5 \times 10^3 and 10^3."""
    if written := POWER_OF_TEN.fullmatch(text):
        exponent = int(written["braced"] or written["digit"])
    elif written := SCIENTIFIC.fullmatch(text):
        exponent = int(written["exponent"])
    else:
        return None

    factor: NotatedNumber | None = NotatedNumber(Fraction(1))
    if written["factor"] is not None:
        factor = _parse_decimal(written["factor"].strip())
    if factor is None or abs(exponent) > MAX_EXPONENT:
        return None

    # 1.5e3 is exact, 1.5e-3 has four places.
    places = max(0, factor.places - exponent) if factor.places else 0
    return NotatedNumber(factor.value * Fraction(10) ** exponent, places)


def _parse_mixed(text: str) -> NotatedNumber | None:
    r"""Parse 1 1/2 and 1\frac{1}{2}."""
    written = MIXED.fullmatch(text)
    if written is None:
        return None
    part = _parse_fraction(written["part"])
    # The part of a mixed number is a proper fraction.
    if part is None or not 0 < part.value < 1:
        return None
    return NotatedNumber(int(written["whole"]) + part.value)


def _parse_fraction(text: str) -> NotatedNumber | None:
    r"""Parse 1/2 and \frac{1}{2}."""
    written = FRACTION.fullmatch(text) or SLASH.fullmatch(text)
    if written is None:
        return None
    # A fraction of decimals is an exact number.
    above = _parse_plain_part(written["above"])
    below = _parse_plain_part(written["below"])
    if above is None or below is None or below == 0:
        return None
    return NotatedNumber(above / below)


def _parse_plain_part(text: str) -> Fraction | None:
    """Return the value of a numerator or denominator, which may have a sign or braces."""
    text = text.strip()
    digits = text.removeprefix("-").removeprefix("+").strip().removeprefix("{").removesuffix("}")
    number = _parse_decimal(digits)
    if number is None:
        return None
    return -number.value if text.startswith("-") else number.value
