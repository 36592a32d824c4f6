"""Units after a number. An answer may omit them, but different units are different answers."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Self

from rl_loop.rewards.number import NotatedNumber, parse_number

SYNONYMS = """
mm millimeter millimeters millimetre millimetres
cm centimeter centimeters centimetre centimetres
dm decimeter decimeters decimetre decimetres
m meter meters metre metres
km kilometer kilometers kilometre kilometres
in inch inches
ft foot feet
yd yard yards
mi mile miles
mg milligram milligrams
g gram grams
kg kilogram kilograms
lb lbs pound pounds
oz ounce ounces
ms millisecond milliseconds
s sec secs second seconds
min mins minute minutes
h hr hrs hour hours
day days
week weeks
month months
year years yr yrs
ml mL milliliter milliliters millilitre millilitres
L l liter liters litre litres
gallon gallons gal
quart quarts
cup cups
acre acres
hectare hectares ha
deg degree degrees
rad radian radians
cent cents
dollar dollars USD usd
euro euros EUR
sterling GBP
yen JPY
rupee rupees Rs INR
unit units
point points
N newton newtons
J joule joules
W watt watts
kW kilowatt kilowatts
Pa pascal pascals
V volt volts
A ampere amperes
K kelvin
Hz hertz
mol moles
"""
"""Spellings of units, one unit per line."""
UNITS = {name: line.split()[0] for line in SYNONYMS.strip().splitlines() for name in line.split()}
"""Units by spelling."""
SCALES = {
    "dozen": 12,
    "hundred": 100,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}


COMPOUND = {
    "mph": {"mi": 1, "h": -1},
    "kph": {"km": 1, "h": -1},
    "kmh": {"km": 1, "h": -1},
    "celsius": {"deg": 1},
    "fahrenheit": {"deg": 1},
}
"""Names of unit products."""
KINDS_OF_DEGREES = ("celsius", "fahrenheit")
"""Units that are degrees, but not interchangeable."""
POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
"""Powers by the words in front of a unit."""

NOT_UNITS = """
or and not nor if when for while unless to of than but except without with plus minus times over divided by into from
between about around approximately approx roughly nearly almost over under above below exceeding beyond until up down
more less fewer least most greater smaller larger bigger at only exactly maybe perhaps probably either neither both
squared cubed factorial mod modulo base power exponent root reciprocal inverse negative opposite
half halves third thirds quarter quarters fourth fourths fifth fifths sixth sixths seventh eighth ninth tenth tenths
twice double doubled triple tripled thrice fold pairs pair couple score scores tens hundreds percent pct percentage
zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety
is are was equals equal isn't aren't never cannot can't no none
"""
NO_UNITS = frozenset(NOT_UNITS.split())
r"""Words that are not units. With them a text means more than the number, or something else."""

# "\text{cm}^2", "cm", "\degree", and marks of feet, inches and arcs, at the end of the rest.
LAST_UNIT = re.compile(
    r"(?:\\text\s*\{(?P<text>[^{}]*)\}|(?<![a-zA-Z\\{])(?P<word>[a-zA-Z]+)"
    r"|(?P<degree>\\degree)|(?P<mark>(?<=[0-9}\s])'{1,3}))"
    r"\s*(?:\^\s*\{?\s*(?P<power>-?[0-9])\s*\}?)?\s*$"
)
# Separators between number and unit, or between two units: "5 km/h", "5 N\cdot m".
LAST_SEPARATOR = re.compile(r"(?:\s|/|\\cdot(?![a-z])|\\times(?![a-z])|\*|(?<![a-z])per)+$")
WORD_IN_TEXT = re.compile(
    r"\s*(?:(?P<over>/|per(?![a-zA-Z]))|(?P<times>[*\u00b7-])"
    r"|(?P<word>[a-zA-Z][a-zA-Z'.]*)(?:\^\{?(?P<power>-?[0-9])\}?)?)"
)

MAX_UNITS = 6
"""Maximum number of units, or texts of units, behind a number."""


@dataclass(frozen=True)
class UnitProduct:
    """Units behind a number."""

    powers: tuple[tuple[str, int], ...] = ()
    """Known units and their powers, sorted."""
    words: frozenset[str] = frozenset()
    """Words that are not known units, in the singular."""

    @classmethod
    def of(cls, name: str) -> Self:
        """Return one known unit."""
        return cls(((name, 1),))

    @property
    def is_given(self) -> bool:
        """True if there are any units."""
        return bool(self.powers or self.words)


@dataclass(frozen=True)
class NumberWithUnits:
    """Number with its units."""

    number: NotatedNumber
    units: UnitProduct


@dataclass
class _Collected:
    """Units removed from the end of a text so far."""

    powers: Counter[str] = field(default_factory=Counter)
    words: set[str] = field(default_factory=set)
    scale: int = 1

    def units(self) -> UnitProduct:
        """Return the collected units."""
        powers = tuple(sorted((unit, power) for unit, power in self.powers.items() if power))
        return UnitProduct(powers, frozenset(self.words))


def parse_quantity(text: str) -> NumberWithUnits | None:
    r"""Return the number and units of ``text``, such as 5 \text{cm}^2. None if it is neither."""
    for rest, collected in _remove_units(text, takes_words=True):
        number = parse_number(rest)
        if number is not None:
            # A scaled number is exact: 1.234567 million is an integer.
            places = number.places if collected.scale == 1 else 0
            value = number.value * Fraction(collected.scale)
            return NumberWithUnits(NotatedNumber(value, places, number.percent), collected.units())
    return None


def parse_units(text: str) -> tuple[str, UnitProduct]:
    r"""Split a text into an expression and the units in \text{} behind it."""
    body = text
    units = UnitProduct()
    for rest, collected in _remove_units(text, takes_words=False):
        # "2 million" is a number, which ``parse_quantity`` reads.
        if collected.scale != 1:
            break
        body = rest
        units = collected.units()
    return body, units


def equivalent_units(answer: UnitProduct, truth: UnitProduct) -> bool:
    """Return True if the units of two numbers do not contradict each other.

    Either side may omit its units. One side may also have fewer of the words that are not known
    units: 5 red apples are 5 apples.
    """
    if not answer.is_given or not truth.is_given:
        return True
    # 5 m is not 5 cm: units are compared, not converted.
    if answer.powers != truth.powers:
        return False
    return answer.words <= truth.words or truth.words <= answer.words


def _remove_units(text: str, *, takes_words: bool) -> Iterator[tuple[str, _Collected]]:
    """Yield a text with none, one, two, ... units removed from its end."""
    collected = _Collected()
    # Every step yields the same object. Callers read it before the next step.
    yield text, collected
    # From the end, because the number comes first.
    for _ in range(MAX_UNITS):
        last = LAST_UNIT.search(text)
        if last is None or (last["word"] and not takes_words):
            return
        if last["degree"] and not takes_words:
            return

        before = text[: last.start()]
        separator = LAST_SEPARATOR.search(before)
        rest = before[: separator.start()] if separator else before
        # "5m" is five times m, "5 m" are five meters.
        if last["word"] and len(last["word"]) == 1 and not separator:
            return

        is_inverse = separator is not None and re.search("/|per", separator[0]) is not None
        if not _add_unit(collected, last, -1 if is_inverse else 1):
            return
        text = rest
        yield text, collected


def _add_unit(collected: _Collected, last: re.Match[str], sign: int) -> bool:
    """Add the end of a text to the units. Returns False if it is not a unit.

    Without \\text{}, unknown letters are variables.
    """
    power = int(last["power"] or 1)
    if last["degree"]:
        collected.powers["deg"] += sign * power
        return True
    # 5' may be feet or minutes of arc, so a mark is compared as a separate unit.
    if last["mark"]:
        collected.powers[last["mark"]] += sign * power
        return True
    if last["word"]:
        word = last["word"]
        if word not in UNITS and word not in SCALES and word not in COMPOUND:
            return False
        return _add_word(collected, word, sign * power)
    return _add_text(collected, last["text"], sign, power)


def _add_text(collected: _Collected, text: str, sign: int, power: int) -> bool:
    """Add the units of a \\text{}: "square feet per second". ``power`` is the last unit's."""
    position = 0
    direction = sign
    next_power = 1
    text = text.strip()
    while position < len(text):
        match = WORD_IN_TEXT.match(text, position)
        if match is None:
            return False
        position = match.end()
        # Everything behind "per" or "/" is divided by.
        if match["over"]:
            direction = -sign
            continue
        if not match["word"]:
            continue

        word = match["word"].strip(".'")
        if word.lower() in POWERS:
            next_power = POWERS[word.lower()]
            continue

        exponent = next_power * int(match["power"] or 1)
        if not text[position:].strip():
            exponent *= power
        next_power = 1
        if not _add_word(collected, word, direction * exponent):
            return False
    return True


def _add_word(collected: _Collected, word: str, power: int) -> bool:
    """Add a word to the units. Returns False if it is not a unit."""
    name = word.lower()
    if name in NO_UNITS:
        return False
    if name in SCALES:
        collected.scale *= SCALES[name]
    elif word in UNITS:
        collected.powers[UNITS[word]] += power
    elif name in COMPOUND:
        for unit, own in COMPOUND[name].items():
            collected.powers[unit] += own * power
        if name in KINDS_OF_DEGREES:
            # Celsius and Fahrenheit are stored as degrees, so that an answer in degrees agrees with both.
            # The added word makes them differ from each other.
            collected.words.add(name)
    # "Meters" is a unit, but the case of short names has a meaning.
    elif name in UNITS and len(name) > 2:
        collected.powers[UNITS[name]] += power
    else:
        collected.words.add(_to_singular(name))
    return True


def _to_singular(word: str) -> str:
    """Return the singular of an English word in lower case."""
    # The first match counts: "glasses" becomes "glass", and "glass" stays.
    for ending, replacement in (
        ("ies", "y"),
        ("sses", "ss"),
        ("ses", "s"),
        ("ss", "ss"),
        ("s", ""),
    ):
        if word.endswith(ending) and len(word) > len(ending) + 1:
            return word.removesuffix(ending) + replacement
    return word
