"""Units after a number: they may be left out, but two different ones are two different answers."""

import re
from fractions import Fraction

from rl_loop.rewards.number import Number, parse_number

# units by the ways to write them; what is in one line is the same
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
UNITS = {name: line.split()[0] for line in SYNONYMS.strip().splitlines() for name in line.split()}
SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}

# words after a number, within \text{}, that are no unit: what is said is more than the number
NOT_UNITS = """
or and not nor if when for while unless to of than less more least most
squared cubed plus minus times over divided factorial mod modulo base half halves third thirds quarter quarters
percent pct
"""
NO_UNITS = frozenset(word for line in NOT_UNITS.splitlines() for word in line.split())

LAST_UNIT = re.compile(
    r"(?:\\text\s*\{(?P<text>[^{}]*)\}|(?<![a-zA-Z\\{])(?P<word>[a-zA-Z]+))\s*(?:\^\s*\{?\s*(?P<power>-?[0-9])\s*\}?)?$"
)
LAST_SEPARATOR = re.compile(r"(?:\s|/|\\cdot|\\times|\*|\bper)+$")


def parse_quantity(text: str) -> tuple[Number, tuple[str, ...]] | None:
    r"""A number with the units behind it, the last one first: 5 \text{cm}^2 is 5 and ("cm^2",). None if it is anything
    else."""
    units: list[str] = []
    scale = 1
    for _ in range(6):
        number = parse_number(text)
        if number is not None:
            # a number that is scaled is exact: 1.234567 million is an integer
            scaled = Number(number.value * Fraction(scale), number.places if scale == 1 else 0, number.percent)
            return scaled, tuple(units)

        found = LAST_UNIT.search(text)
        if found is None:
            return None
        words = (found["text"] or found["word"] or "").replace(".", " ").split()
        if any(word.lower() in NO_UNITS or any(map(str.isdigit, word)) for word in words):
            return None
        # without \text{}, unknown letters are variables
        if found["word"] and found["word"] not in UNITS and found["word"] not in SCALES:
            return None
        for word in words:
            if word in SCALES:
                scale *= SCALES[word]
            else:
                units.append(UNITS.get(word, "") + (f"^{found['power']}" if found["power"] else ""))
        text = LAST_SEPARATOR.sub("", text[: found.start()])
    return None


def same_units(given: tuple[str, ...], wanted: tuple[str, ...]) -> bool:
    """Whether they can be the same: units may be left out, and unknown words may mean anything."""
    if not given or not wanted or "" in given or "" in wanted:
        return True
    return sorted(given) == sorted(wanted)
