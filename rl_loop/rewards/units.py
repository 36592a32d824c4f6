"""Units after a number: they may be left out, but two different ones are two different answers."""

import re
from dataclasses import dataclass
from fractions import Fraction

from rl_loop.rewards.number import Number, parse_number

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
mph
kph kmh km/h
deg degree degrees
rad radian radians
cent cents
dollar dollars USD
euro euros EUR
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
"""Ways to write a unit, one unit a line."""
UNITS = {name: line.split()[0] for line in SYNONYMS.strip().splitlines() for name in line.split()}
"""Way to write a unit -> the unit."""
SCALES = {
    "dozen": 12,
    "hundred": 100,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}

NOT_UNITS = """
or and not nor if when for while unless to of than less more least most
squared cubed plus minus times over divided factorial mod modulo base half halves third thirds quarter quarters
percent pct
"""
NO_UNITS = frozenset(NOT_UNITS.split())
r"""Words after a number, within \text{}, that are no unit: what is said is more than the
number."""

# "\text{cm}^2" or "cm", at the end of what is left.
LAST_UNIT = re.compile(
    r"(?:\\text\s*\{(?P<text>[^{}]*)\}|(?<![a-zA-Z\\{])(?P<word>[a-zA-Z]+))"
    r"\s*(?:\^\s*\{?\s*(?P<power>-?[0-9])\s*\}?)?$"
)
# What may stand between number and unit, or two units: "5 km/h", "5 N\cdot m".
LAST_SEPARATOR = re.compile(r"(?:\s|/|\\cdot|\\times|\*|\bper)+$")

MOST_UNITS = 6
"""As many are looked for behind a number."""


@dataclass(frozen=True)
class Quantity:
    """A number with the units behind it."""

    number: Number
    units: tuple[str, ...]
    """The last one first, such as ("cm^2",); "" for a word that is no unit known here."""


def parse_quantity(text: str) -> Quantity | None:
    r"""Return the number and units that ``text`` is, such as 5 \text{cm}^2; None if it is not."""
    # From the end on: a unit is taken off until a number is left.
    units: list[str] = []
    scale = 1
    for _ in range(MOST_UNITS):
        number = parse_number(text)
        if number is not None:
            # A number that is scaled is exact: 1.234567 million is an integer.
            places = number.places if scale == 1 else 0
            scaled = Number(number.value * Fraction(scale), places, number.percent)
            return Quantity(scaled, tuple(units))

        last = LAST_UNIT.search(text)
        if last is None or not _is_unit(last):
            return None
        for word in _words(last):
            if word in SCALES:
                scale *= SCALES[word]
            else:
                power = f"^{last['power']}" if last["power"] else ""
                units.append(UNITS.get(word, "") + power)
        text = LAST_SEPARATOR.sub("", text[: last.start()])
    return None


def same_units(answer: tuple[str, ...], truth: tuple[str, ...]) -> bool:
    """Say whether they can be the same: units may be left out, unknown words mean anything."""
    if not answer or not truth or "" in answer or "" in truth:
        return True
    return sorted(answer) == sorted(truth)


def _is_unit(last: re.Match[str]) -> bool:
    r"""Say whether the end of a text can be a unit.

    Without \text{}, unknown letters are variables."""
    if any(word.lower() in NO_UNITS or any(map(str.isdigit, word)) for word in _words(last)):
        return False
    return not last["word"] or last["word"] in UNITS or last["word"] in SCALES


def _words(last: re.Match[str]) -> list[str]:
    return (last["text"] or last["word"] or "").replace(".", " ").split()
