r"""Is the answer in \boxed{} equivalent to the ground truth?

math-verify compares expressions. What it is asked is prepared here, since it reads some notations wrongly and takes the
last number that it finds in others: numbers are compared exactly (``number``, ``units``), letters of a choice as
letters, and what says something else than the ground truth (a chain of equations, a ratio, an inequality, a denial)
is told apart before."""

import asyncio
import re
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from fractions import Fraction

from rl_loop.rewards.math_verify_pool import LONGEST, WORKERS, equivalent
from rl_loop.rewards.notation import closing_brace, standard_notation
from rl_loop.rewards.number import exact_decimals, same_number
from rl_loop.rewards.units import NO_UNITS, parse_quantity, same_units

# the last box is looked for around its last mention: an answer may be megabytes of boxes
BOX_WINDOW = 20_000
# deeper braces exhaust the parser's stack
DEEPEST = 50
# decimal digits of a power, and arguments of a factorial, that may be computed
MOST_DIGITS = 100_000
LARGEST_FACTORIAL = 20_000

PLAIN_NUMBER = re.compile(r"-?([0-9]{1,30}|[0-9]{1,8}\.[0-9]{1,6})")

BOX = re.compile(r"(?P<box>\\boxed\s*)?\{|\\.|\}", re.DOTALL)

CHOICE = re.compile(
    r"(?:(?:option|choice|answer)\s+)?(?:\(\s*(?P<bracketed>[A-Z])\s*\)|(?P<marked>[A-Z])\s*[).:])(?P<rest>.*)"
    r"|(?:(?:option|choice|answer)\s+)?(?P<bare>[A-Z])",
    re.IGNORECASE | re.DOTALL,
)
CHOICES = re.compile(r"\(?[A-Z]\)?(?:(?:\s*,\s*|\s*,?\s*and\s+|\s+)\(?[A-Z]\)?)+")
WORDS = re.compile(r"[A-Za-z][A-Za-z'-]+(?: [A-Za-z'-]+)*")

DENIAL = re.compile(
    r"\b(?:not|isn'?t|aren'?t|never|neither|nor|cannot|can'?t|except|unless|maybe|anything but)\b", re.IGNORECASE
)
INEQUALITY = re.compile(r"[<>]|\\(?:le|ge|ll|gg)(?![a-zA-Z])")
DIGITS_APART = re.compile(r"[0-9] +[0-9]")
BASE = re.compile(r"[0-9]\s*_")
RATIO = re.compile(r"(?<![:\\])\s*:\s*(?!=)")
CLOCK = re.compile(r"[0-9]{1,2}:[0-5][0-9]")

LITERAL_POWER = re.compile(r"(?<![0-9.])([0-9]+)\s*\^\s*(?:\{\s*([0-9]+)\s*\}|([0-9]))")
LITERAL_FACTORIAL = re.compile(r"(?<![0-9.])([0-9]+)\s*!")
# no more than a box has comparisons, of which every one waits for a process
_threads = ThreadPoolExecutor(max_workers=WORKERS, thread_name_prefix="answers")


async def judge(answer: str, ground_truth: str) -> bool:
    """``is_correct`` off the event loop, on threads that nothing else has to wait for. Raises CheckerFailure."""
    return await asyncio.get_running_loop().run_in_executor(_threads, is_correct, answer, ground_truth)


def is_correct(answer: str, ground_truth: str) -> bool:
    r"""Whether the last \boxed{} of ``answer`` equals ``ground_truth``.

    Raises CheckerFailure if math-verify cannot be asked."""
    boxed = last_boxed(answer)
    if boxed is None or len(boxed) > LONGEST or _depth(boxed) > DEEPEST:
        return False
    return is_equivalent(standard_notation(boxed), standard_notation(ground_truth))


def last_boxed(text: str) -> str | None:
    r"""The content of the last complete \boxed{...} (braces may nest), the outer one if one is in another, or None."""
    last = text.rfind(r"\boxed")
    if last < 0:
        return None

    found: tuple[int, int] | None = None
    opened: list[tuple[int, bool]] = []  # where the content begins, and whether it is that of a box
    for brace in BOX.finditer(text, max(0, last - BOX_WINDOW), last + BOX_WINDOW):
        if brace[0].endswith("{") and not brace[0].startswith("\\{"):
            opened.append((brace.end(), brace["box"] is not None))
        elif brace[0] == "}" and opened:
            start, is_box = opened.pop()
            if is_box:  # an outer box is closed after the ones in it
                found = (start, brace.start())
    return None if found is None else text[found[0] : found[1]]


def is_number(text: str) -> bool:
    """Whether it is a plain number or a fraction of two."""
    parts = text.strip().strip("$").replace(",", "").split("/")
    return len(parts) <= 2 and all(PLAIN_NUMBER.fullmatch(part.strip()) for part in parts)


def normalised(answer: str | None) -> str | None:
    """Equal text for answers that are written alike: without blanks and dollar signs, numbers in one form."""
    if answer is None:
        return None
    text = "".join(answer.split()).strip("$").replace(r"\dfrac", r"\frac").replace(r"\!", "")
    number = text.replace(",", "")
    return format(Decimal(number).normalize(), "f") if PLAIN_NUMBER.fullmatch(number) else text


# ---- two expressions in standard notation


def is_equivalent(given: str, wanted: str) -> bool:
    """Whether two answers in standard notation say the same. Raises CheckerFailure."""
    if not given or not wanted:
        return False
    if _without_spaces(given) == _without_spaces(wanted):
        return True

    choice = _choice(wanted)
    if choice is not None and _choice(given) == choice:
        return True
    if CHOICES.fullmatch(_unwrapped(wanted)) and CHOICES.fullmatch(_unwrapped(given)):
        return _letters(given) == _letters(wanted)
    if WORDS.fullmatch(_unwrapped(wanted)) and _unwrapped(given).lower() == _unwrapped(wanted).lower():
        return True

    wanted_quantity, given_quantity = parse_quantity(_unwrapped(wanted)), parse_quantity(_unwrapped(given))
    if wanted_quantity is not None and given_quantity is not None:
        (number, units), (other, other_units) = given_quantity, wanted_quantity
        return same_number(number, other) and same_units(units, other_units)

    if says_something_else(given, wanted):
        return False
    if ":" in wanted:
        return _same_ratio(given, wanted)
    if "=" in given and "=" not in wanted and not _splits(given, ","):
        return _chain_ends_in(given, wanted)
    return _ask_math_verify(given, wanted)


def says_something_else(given: str, wanted: str) -> bool:
    """Whether ``given`` is another kind of statement than ``wanted``, though the same numbers may be in it."""
    if r"\boxed" in given or r"\fbox" in given:  # 4\fbox{5}: math-verify takes the box and leaves the rest
        return True
    if DENIAL.search(given) and not DENIAL.search(wanted):
        return True
    # math-verify leaves words out ("5 squared"), takes digits apart for a product, and leaves a base out
    if _qualifiers(given) - _qualifiers(wanted) or DIGITS_APART.search(given):
        return True
    if BASE.search(given) and not BASE.search(wanted):
        return True
    if (r"\ne " in f"{given} ") != (r"\ne " in f"{wanted} "):
        return True
    if bool(RATIO.search(given)) != bool(RATIO.search(wanted)):
        return True
    if INEQUALITY.search(given) and _is_point(wanted):
        return True
    if INEQUALITY.search(wanted) and _is_point(given):
        return True

    # (1,2) is a point or an interval, \{1,2\} is a set; 1,2 may be meant for either
    kinds = {_brackets(given), _brackets(wanted)}
    return kinds == {"set", "tuple"}


def _ask_math_verify(given: str, wanted: str) -> bool:
    if _is_too_large(given) or _is_too_large(wanted):
        return False
    if "." not in wanted:
        given = exact_decimals(given)
    return equivalent(given, wanted)


def _same_ratio(given: str, wanted: str) -> bool:
    """3:4 is 6:8, but 10:15 o'clock is not 20:30; a ratio is not a fraction."""
    if CLOCK.fullmatch(_without_spaces(given)) and CLOCK.fullmatch(_without_spaces(wanted)):
        return False
    ours, theirs = RATIO.split(given), RATIO.split(wanted)
    if len(ours) != len(theirs) or not all(ours) or not all(theirs):
        return False
    # each part over the last one
    return all(
        is_equivalent(rf"\frac{{{a}}}{{{ours[-1]}}}", rf"\frac{{{b}}}{{{theirs[-1]}}}")
        for a, b in zip(ours[:-1], theirs[:-1], strict=True)
    )


def _chain_ends_in(given: str, wanted: str) -> bool:
    """Whether the equations of ``given`` say ``wanted``: x = 5, and 2 + 3 = 5, but not 3 = 4 = 5.

    A side with a variable in it names what was asked for (x, or x + 1), as math-verify has it."""
    sides = [side.strip() for side in given.split("=") if side.strip()]
    if _has_variable(wanted):
        named, values = sides[:1], sides[1:]
        if named and not _has_variable(named[0]):
            return False
    else:
        values = [side for side in sides if not _has_variable(side)]
    return bool(values) and all(is_equivalent(value, wanted) for value in values)


def _choice(text: str) -> str | None:
    """The letter, if ``text`` is the letter of a choice, perhaps with what it stands for: C, (C), C. and (C) 5 cm."""
    text = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", text).strip()
    found = CHOICE.fullmatch(text)
    if found is None:
        return None
    letter = found["bracketed"] or found["marked"] or found["bare"]
    rest = found["rest"] or ""
    if not letter.isupper() or re.search(r"\([A-Z]\)|\b(?:or|and|not)\b", rest):
        return None
    return str(letter)


def _letters(text: str) -> list[str]:
    return sorted(set(re.findall(r"[A-Z]", _unwrapped(text))))


def _unwrapped(text: str) -> str:
    r"""Without the \text{} around all of it."""
    if text.startswith(r"\text{") and closing_brace(text, len(r"\text")) == len(text) - 1:
        return text[len(r"\text{") : -1].strip().rstrip(".")
    return text


def _qualifiers(text: str) -> frozenset[str]:
    """Words that make more of a number than its value."""
    said = " ".join(re.findall(r"\\text\s*\{([^{}]*)\}", text))
    return NO_UNITS.intersection(re.findall(r"[a-z]+", said.lower()))


def _without_spaces(text: str) -> str:
    """Spaces that say nothing: not those between letters or digits."""
    return re.sub(r"(?<![A-Za-z0-9])\s+|\s+(?![A-Za-z0-9])", "", text)


def _is_point(text: str) -> bool:
    """Whether it is one value: no relation, interval, set or list."""
    return not re.search(r"[<>=,\[\]]|\\(?:le|ge|ne|in|cup|cap|infty|text|\{)", text)


def _brackets(text: str) -> str | None:
    if text.startswith(r"\{") and text.endswith(r"\}"):
        return "set"
    if text[:1] in "([" and text[-1:] in ")]" and _splits(text[1:-1], ","):
        return "tuple"
    return None


def _splits(text: str, separator: str) -> bool:
    """Whether ``separator`` is there outside of all brackets."""
    depth = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == separator and depth == 0:
            return True
    return False


def _has_variable(text: str) -> bool:
    """Whether letters are left without commands, words, and the constants e and i; or nothing but words is there."""
    if r"\text" in text and not re.search(r"[0-9]", text):
        return True
    text = re.sub(r"\\text\s*\{[^{}]*\}|\\[a-zA-Z]+", " ", text)
    return re.search(r"[a-df-hj-zA-Z]", text) is not None


def _is_too_large(text: str) -> bool:
    """Whether a power or factorial of literal numbers is too large to be computed, however it is nested.

    math-verify computes 9^(9^(9^9)) before anything else. Time limits hold nevertheless: this only saves the time."""
    for _ in range(20):
        text = re.sub(r"[({]\s*([0-9]+)\s*[)}](?=\s*[!^])", r"\1", text)
        if found := LITERAL_FACTORIAL.search(text):
            number = int(found[1]) if len(found[1]) < 8 else LARGEST_FACTORIAL + 1
            if number > LARGEST_FACTORIAL:
                return True
            # its size is all that matters from here on
            text = f"{text[: found.start()]}{10 ** min(number, 2000)}{text[found.end() :]}"
        elif powers := list(LITERAL_POWER.finditer(text)):
            found = powers[-1]  # the innermost of a tower
            base, exponent = found[1], found[2] or found[3]
            if base in ("0", "1") or exponent in ("0", "1"):
                value = "1" if exponent == "0" else base
            elif len(exponent) > 7 or len(base) * int(exponent) > MOST_DIGITS:
                return True
            else:
                value = str(int(Fraction(base)) ** int(exponent)) if len(base) * int(exponent) < 4000 else "9" * 4000
            text = f"{text[: found.start()]}{value}{text[found.end() :]}"
        else:
            return False
    return True


def _depth(text: str) -> int:
    depth = deepest = 0
    for character in text:
        depth += (character in "{([") - (character in "})]")
        deepest = max(deepest, depth)
    return deepest
