r"""Judges if the answer in \boxed{} is equivalent to the ground truth.

An answer is right if it was read whole and everything in it was compared. Letters of a choice and
words are compared as text, plain numbers here, and everything else in processes of their own
(``comparison``), because algebra can take any amount of time."""

import asyncio
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal

from rl_loop.rewards.comparison_pool import LONGEST, WORKERS, equivalent
from rl_loop.rewards.notation import LONGEST_PRODUCT, closing_brace, standard_notation
from rl_loop.rewards.number import same_number
from rl_loop.rewards.units import parse_quantity, same_units

BOX_WINDOW = 20_000
"""The last box is looked for around its last mention: an answer may be megabytes of boxes."""
DEEPEST = 50
"""Deeper braces exhaust the parser's stack."""
MOST_DIGITS = 100_000
"""Decimal digits of a power that may be computed."""
LARGEST_FACTORIAL = 20_000
MOST_POWERS = 20
"""Powers and factorials of one expression that are looked at; more count as too large."""

# "-12.5", with so few digits that computing with it costs nothing.
PLAIN_NUMBER = re.compile(r"-?([0-9]{1,30}|[0-9]{1,8}\.[0-9]{1,6})")

# Every brace, and whether it opens a box; "\{" and "\}" are matched to be passed over.
BOX = re.compile(r"(?P<box>\\boxed\s*)?\{|\\.|\}", re.DOTALL)

# "C", "(C)", "C.", "option C", and "(C) 5 cm": the letter and its option.
CHOICE = re.compile(
    r"(?:(?:option|choice|answer)\s+)?(?:\(\s*(?P<bracketed>[A-Z])\s*\)|(?P<marked>[A-Z])\s*[).:])(?P<rest>.*)"
    r"|(?:(?:option|choice|answer)\s+)?(?P<bare>[A-Z])",
    re.IGNORECASE | re.DOTALL,
)
# "A, B and D"
CHOICES = re.compile(r"\(?[A-Z]\)?(?:(?:\s*,\s*|\s*,?\s*and\s+|\s+)\(?[A-Z]\)?)+")
# "Tuesday", "not defined": words alone.
WORDS = re.compile(r"[A-Za-z][A-Za-z'-]+(?: [A-Za-z'-]+)*")

# "10:15" may be a time, and is then not the ratio 2:3.
CLOCK = re.compile(r"[0-9]{1,2}:[0-5][0-9]")

# "12,345,678"; neither "0,123", which may be a decimal, nor the beginning of "1,000,2".
THOUSANDS = re.compile(r"(?<![0-9.,])[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9,])")

# "2^{10}" and "2^9" of plain numbers, which sympy computes at once.
LITERAL_POWER = re.compile(
    r"(?<![0-9.])(?P<base>[0-9]+)\s*\^\s*(?:\{\s*(?P<braced>[0-9]+)\s*\}|(?P<digit>[0-9]))"
)
LITERAL_FACTORIAL = re.compile(r"(?<![0-9.])([0-9]+)\s*!")
# "(3)!" and "{2}^3", whose brackets hide that they are numbers.
BRACKETED_LITERAL = re.compile(r"[({]\s*([0-9]+)\s*[)}](?=\s*[!^])")

# As many as there can be comparisons, each of which waits for a process.
_threads = ThreadPoolExecutor(max_workers=WORKERS, thread_name_prefix="answers")


async def judge(answer: str, ground_truth: str) -> bool:
    """Run ``is_correct`` off the event loop, on threads that nothing else has to wait for.

    Raises CheckerFailure."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_threads, is_correct, answer, ground_truth)


def is_correct(answer: str, ground_truth: str) -> bool:
    r"""Say whether the last \boxed{} of ``answer`` equals ``ground_truth``.

    Raises CheckerFailure if the processes of comparisons do not work."""
    # The policy wrote a text that exhausts a parser, so it is a wrong answer and not a failure.
    boxed = last_boxed(answer)
    if boxed is None or len(boxed) > LONGEST or _depth(boxed) > DEEPEST:
        return False
    return is_equivalent(standard_notation(boxed), standard_notation(ground_truth))


@dataclass(frozen=True)
class _OpenBrace:
    content_start: int
    is_box: bool


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last complete \boxed{...}, or None.

    Braces may nest; of boxes in each other it is the outer one."""
    last_mention = text.rfind(r"\boxed")
    if last_mention < 0:
        return None

    content: str | None = None
    opened: list[_OpenBrace] = []
    for brace in BOX.finditer(text, max(0, last_mention - BOX_WINDOW), last_mention + BOX_WINDOW):
        is_escaped = brace[0].startswith("\\") and brace["box"] is None
        if is_escaped:
            continue
        if brace[0].endswith("{"):
            opened.append(_OpenBrace(brace.end(), is_box=brace["box"] is not None))
        elif opened:
            closed = opened.pop()
            # An outer box is closed after the ones in it.
            if closed.is_box:
                content = text[closed.content_start : brace.start()]
    return content


def is_number(text: str) -> bool:
    """Say whether it is a plain number or a fraction of two."""
    parts = text.strip().strip("$").replace(",", "").split("/")
    return len(parts) <= 2 and all(PLAIN_NUMBER.fullmatch(part.strip()) for part in parts)


def normalised(answer: str | None) -> str | None:
    """Return equal text for answers that are written alike, with numbers in one form."""
    if answer is None:
        return None

    text = "".join(answer.split()).strip("$").replace(r"\dfrac", r"\frac").replace(r"\!", "")
    number = text.replace(",", "")
    if PLAIN_NUMBER.fullmatch(number):
        return format(Decimal(number).normalize(), "f")
    return text


# ---- two expressions in standard notation


def is_equivalent(answer: str, truth: str) -> bool:
    """Say whether two answers in standard notation say the same. Raises CheckerFailure."""
    if not answer or not truth:
        return False
    if _without_spaces(answer) == _without_spaces(truth):
        return True

    plain_answer = _unwrapped(answer)
    plain_truth = _unwrapped(truth)
    # Letters of a choice, which are no variables.
    choice = _choice(truth)
    if choice is not None and _choice(answer) == choice:
        return True
    if CHOICES.fullmatch(plain_truth) and CHOICES.fullmatch(plain_answer):
        return _letters(plain_answer) == _letters(plain_truth)
    if WORDS.fullmatch(plain_truth) and WORDS.fullmatch(plain_answer):
        if plain_answer.lower() == plain_truth.lower():
            return True
        # Up to three letters may be a product: ab is ba.
        if len(plain_truth) > LONGEST_PRODUCT:
            return False
    if CLOCK.fullmatch(_without_spaces(answer)) and CLOCK.fullmatch(_without_spaces(truth)):
        return False

    true_quantity = parse_quantity(plain_truth)
    quantity = parse_quantity(plain_answer)
    if true_quantity is not None and quantity is not None:
        is_same = same_number(quantity.number, true_quantity.number)
        return is_same and same_units(quantity.units, true_quantity.units)

    # The truth is one value, so the comma of "x = 1,000" separates none.
    if "," not in _without_thousands_separators(truth):
        answer = _without_thousands_separators(answer)
        truth = _without_thousands_separators(truth)
    if _is_too_large(answer) or _is_too_large(truth):
        return False
    return equivalent(answer, truth)


def _choice(text: str) -> str | None:
    """Return the letter of a choice, such as C, (C), C. and (C) 5 cm. None if it is no choice."""
    text = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", text).strip()
    choice = CHOICE.fullmatch(text)
    if choice is None:
        return None

    letter = choice["bracketed"] or choice["marked"] or choice["bare"]
    rest = choice["rest"] or ""
    if not letter.isupper() or re.search(r"\([A-Z]\)|\b(?:or|and|not)\b", rest):
        return None
    return str(letter)


def _letters(text: str) -> list[str]:
    """Return the letters of several choices, each once."""
    return sorted(set(re.findall(r"[A-Z]", text)))


def _unwrapped(text: str) -> str:
    r"""Remove the \text{} around all of it."""
    if text.startswith(r"\text{") and closing_brace(text, len(r"\text")) == len(text) - 1:
        return text[len(r"\text{") : -1].strip().rstrip(".")
    return text


def _without_spaces(text: str) -> str:
    """Remove spaces that say nothing: all but those between letters, digits, points and commas."""
    return re.sub(r"(?<![A-Za-z0-9.,])\s+|\s+(?![A-Za-z0-9.,])", "", text)


def _without_thousands_separators(text: str) -> str:
    """Write 1,000 as 1000, but not within brackets: (1,000) may be a point."""

    def joined(number: re.Match[str]) -> str:
        is_bracketed = _open_brackets(text[: number.start()]) != 0
        return number[0] if is_bracketed else number[0].replace(",", "")

    return THOUSANDS.sub(joined, text)


def _open_brackets(text: str) -> int:
    """Return how many more brackets open than close."""
    return sum(map(_depth_change, text))


def _depth(text: str) -> int:
    """Return how deep brackets nest."""
    # A closing bracket too many makes the depth negative, which is no harm.
    depth = 0
    deepest = 0
    for character in text:
        depth += _depth_change(character)
        deepest = max(deepest, depth)
    return deepest


def _depth_change(character: str) -> int:
    return (character in "([{") - (character in ")]}")


# ---- what cannot be computed


def _is_too_large(text: str) -> bool:
    """Say whether a power or factorial of literal numbers is too large to be computed.

    sympy computes 9^(9^(9^9)) before anything else. Time limits hold nevertheless; this check saves
    the time."""
    for _ in range(MOST_POWERS):
        text = BRACKETED_LITERAL.sub(r"\1", text)
        operation = _innermost(text)
        if operation is None:
            return False

        value = _power(operation) if operation.re is LITERAL_POWER else _factorial(operation)
        if value is None:
            return True
        text = f"{text[: operation.start()]}{value}{text[operation.end() :]}"
    return True


def _innermost(text: str) -> re.Match[str] | None:
    """Return the factorial or power to compute first: of a tower of powers, the last."""
    factorial = LITERAL_FACTORIAL.search(text)
    if factorial is not None:
        return factorial
    powers = list(LITERAL_POWER.finditer(text))
    return powers[-1] if powers else None


def _factorial(factorial: re.Match[str]) -> str | None:
    """Return a number of about a factorial's size, which is enough; None if it is too large."""
    digits = factorial[1]
    if len(digits) >= 8 or int(digits) > LARGEST_FACTORIAL:
        return None
    return str(10 ** min(int(digits), 2000))


def _power(power: re.Match[str]) -> str | None:
    """Return a power, or nines in place of a large one; None if it is too large."""
    base = power["base"]
    exponent = power["braced"] or power["digit"]
    if exponent == "0":
        return "1"
    if base in ("0", "1") or exponent == "1":
        return base

    if len(exponent) > 7 or len(base) * int(exponent) > MOST_DIGITS:
        return None
    if len(base) * int(exponent) < 4000:
        return str(int(base) ** int(exponent))
    return "9" * 4000
