r"""Checks whether the answer in \boxed{} is equivalent to the ground truth.

An answer is correct only if all of it was read and compared. Choice letters and words are compared
as text, and plain numbers in this module. All other answers are compared in separate processes
(``comparison_pool``), because algebra can take any amount of time.
"""

import asyncio
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal

from rl_loop.rewards.comparison_pool import MAX_CHARACTERS, WORKERS, equivalent_texts
from rl_loop.rewards.notation import MAX_PRODUCT_LETTERS, closing_brace, standard_notation
from rl_loop.rewards.number import equivalent_numbers
from rl_loop.rewards.units import equivalent_units, parse_quantity

BOX_WINDOW = 20_000
"""Characters to search around the last mention of a box. Answers may be megabytes of boxes."""
MAX_BRACE_DEPTH = 50
"""Maximum depth of brackets in an answer, because deeper ones exhaust the parser's stack."""
MAX_POWER_DIGITS = 100_000
"""Maximum decimal digits of a power that is computed."""
MAX_FACTORIAL = 20_000
MAX_POWERS = 20
"""Maximum powers and factorials in one expression. An expression with more counts as too large."""

# "-12.5", with few digits, so that computing with it is fast.
PLAIN_NUMBER = re.compile(r"-?([0-9]{1,30}|[0-9]{1,8}\.[0-9]{1,6})")

# Every brace, and whether it opens a box. "\{" and "\}" are matched so that they are skipped.
BOX = re.compile(r"(?P<box>\\boxed\s*)?\{|\\.|\}", re.DOTALL)

# "C", "(C)", "C.", "option C", and "(C) 5 cm": the letter and its option.
CHOICE = re.compile(
    r"(?:(?:option|choice|answer)\s+)?(?:\(\s*(?P<bracketed>[A-Z])\s*\)|(?P<marked>[A-Z])\s*[).:])(?P<rest>.*)"
    r"|(?:(?:option|choice|answer)\s+)?(?P<bare>[A-Z])",
    re.IGNORECASE | re.DOTALL,
)
# "A, B and D"
CHOICES = re.compile(r"\(?[A-Z]\)?(?:(?:\s*,\s*|\s*,?\s*and\s+|\s+)\(?[A-Z]\)?)+")
# "Tuesday", "not defined": only words.
WORDS = re.compile(r"[A-Za-z][A-Za-z'-]+(?: [A-Za-z'-]+)*")

# "10:15" may be a time, which is not the ratio 2:3.
CLOCK = re.compile(r"[0-9]{1,2}:[0-5][0-9]")

# "12,345,678", but not "0,123", which may be a decimal, and not the beginning of "1,000,2".
THOUSANDS = re.compile(r"(?<![0-9.,])[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9,])")

# "2^{10}" and "2^9" of plain numbers, which sympy computes immediately.
LITERAL_POWER = re.compile(
    r"(?<![0-9.])(?P<base>[0-9]+)\s*\^\s*(?:\{\s*(?P<braced>[0-9]+)\s*\}|(?P<digit>[0-9]))"
)
LITERAL_FACTORIAL = re.compile(r"(?<![0-9.])([0-9]+)\s*!")
# "(3)!" and "{2}^3", whose brackets hide that they are numbers.
BRACKETED_LITERAL = re.compile(r"[({]\s*([0-9]+)\s*[)}](?=\s*[!^])")

# One thread per concurrent comparison, because each waits for a process.
_threads = ThreadPoolExecutor(max_workers=WORKERS, thread_name_prefix="answers")


async def is_correct_async(answer: str, ground_truth: str) -> bool:
    """Run ``is_correct`` on separate threads, without blocking the event loop.

    Raises:
        CheckerError: if comparisons cannot run.
    """
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_threads, is_correct, answer, ground_truth)


def is_correct(answer: str, ground_truth: str) -> bool:
    r"""Return True if the last \boxed{} of ``answer`` equals ``ground_truth``.

    Raises:
        CheckerError: if comparisons cannot run.
    """
    # A text that exhausts a parser is a wrong answer, not a failure.
    boxed = last_boxed(answer)
    if boxed is None or len(boxed) > MAX_CHARACTERS or _max_depth(boxed) > MAX_BRACE_DEPTH:
        return False
    return equivalent_answers(standard_notation(boxed), standard_notation(ground_truth))


@dataclass(frozen=True)
class _OpenBrace:
    content_start: int
    is_box: bool


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last complete \boxed{...}, or None.

    Braces may be nested. The outer one of nested boxes is returned.

    Example:
        >>> last_boxed(r"Half: \boxed{\frac{1}{2}}.")
        '\\frac{1}{2}'
    """
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
            # An outer box closes after its inner boxes.
            if closed.is_box:
                content = text[closed.content_start : brace.start()]
    return content


def is_number(text: str) -> bool:
    """Return True for a plain number or a fraction of two numbers."""
    parts = text.strip().strip("$").replace(",", "").split("/")
    return len(parts) <= 2 and all(PLAIN_NUMBER.fullmatch(part.strip()) for part in parts)


def normalize_answer(answer: str | None) -> str | None:
    r"""Return an answer in a canonical spelling, to count equal answers.

    Spaces are removed, \dfrac becomes \frac, and a plain number has no commas and no trailing
    zeros.
    """
    if answer is None:
        return None

    text = "".join(answer.split()).strip("$").replace(r"\dfrac", r"\frac").replace(r"\!", "")
    number = text.replace(",", "")
    if PLAIN_NUMBER.fullmatch(number):
        return format(Decimal(number).normalize(), "f")
    return text


# ---- two expressions in standard notation


def equivalent_answers(answer: str, truth: str) -> bool:
    """Return True if two texts in standard notation mean the same. Raises CheckerError."""
    if not answer or not truth:
        return False
    if _without_spaces(answer) == _without_spaces(truth):
        return True

    plain_answer = _unwrap(answer)
    plain_truth = _unwrap(truth)
    # Choice letters are not variables.
    choice = _find_choice(truth)
    if choice is not None and _find_choice(answer) == choice:
        return True
    if CHOICES.fullmatch(plain_truth) and CHOICES.fullmatch(plain_answer):
        return _find_letters(plain_answer) == _find_letters(plain_truth)
    if WORDS.fullmatch(plain_truth) and WORDS.fullmatch(plain_answer):
        if plain_answer.lower() == plain_truth.lower():
            return True
        # Up to three letters may be a product: ab is ba.
        if len(plain_truth) > MAX_PRODUCT_LETTERS:
            return False
    # Times are equal only if their texts are equal, which was checked above. Parsed as ratios, 10:15
    # and 2:3 would be equal.
    if CLOCK.fullmatch(_without_spaces(answer)) and CLOCK.fullmatch(_without_spaces(truth)):
        return False

    true_quantity = parse_quantity(plain_truth)
    quantity = parse_quantity(plain_answer)
    if true_quantity is not None and quantity is not None:
        is_same = equivalent_numbers(quantity.number, true_quantity.number)
        return is_same and equivalent_units(quantity.units, true_quantity.units)

    # If the truth has no comma except in thousands, it is not a list. Then the comma of the answer
    # "x = 1,000" separates thousands, too.
    if "," not in _without_thousands_separators(truth):
        answer = _without_thousands_separators(answer)
        truth = _without_thousands_separators(truth)
    if _is_too_large(answer) or _is_too_large(truth):
        return False
    return equivalent_texts(answer, truth)


def _find_choice(text: str) -> str | None:
    """Return the letter of a choice: C, (C), C. and (C) 5 cm. None if it is not a choice."""
    text = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", text).strip()
    choice = CHOICE.fullmatch(text)
    if choice is None:
        return None

    letter = choice["bracketed"] or choice["marked"] or choice["bare"]
    rest = choice["rest"] or ""
    # "a" may be a variable, and "(A) or (B)" names two options.
    if not letter.isupper() or re.search(r"\([A-Z]\)|\b(?:or|and|not)\b", rest):
        return None
    return str(letter)


def _find_letters(text: str) -> list[str]:
    """Return the letters of several choices without duplicates."""
    return sorted(set(re.findall(r"[A-Z]", text)))


def _unwrap(text: str) -> str:
    r"""Remove a \text{} around the whole text."""
    if text.startswith(r"\text{") and closing_brace(text, len(r"\text")) == len(text) - 1:
        return text[len(r"\text{") : -1].strip().rstrip(".")
    return text


def _without_spaces(text: str) -> str:
    """Remove meaningless spaces: all except between letters, digits, points and commas."""
    return re.sub(r"(?<![A-Za-z0-9.,])\s+|\s+(?![A-Za-z0-9.,])", "", text)


def _without_thousands_separators(text: str) -> str:
    """Write 1,000 as 1000, except within brackets, because (1,000) may be a point."""

    def joined(number: re.Match[str]) -> str:
        """Return the number without its commas, or unchanged within brackets."""
        is_bracketed = _count_open_brackets(text[: number.start()]) != 0
        return number[0] if is_bracketed else number[0].replace(",", "")

    return THOUSANDS.sub(joined, text)


def _count_open_brackets(text: str) -> int:
    """Return the number of left minus right brackets."""
    return sum(map(_depth_change, text))


def _max_depth(text: str) -> int:
    """Return the maximum depth of brackets."""
    # An extra closing bracket makes the depth negative, which has no effect.
    depth = 0
    deepest = 0
    for character in text:
        depth += _depth_change(character)
        deepest = max(deepest, depth)
    return deepest


def _depth_change(character: str) -> int:
    """Return 1 for a left bracket, -1 for a right bracket, 0 otherwise."""
    return (character in "([{") - (character in ")]}")


# ---- expressions that are too large


def _is_too_large(text: str) -> bool:
    """Return True if a power or factorial of literal numbers is too large to be computed."""
    # sympy computes 9^(9^(9^9)) before anything else. The time limit would stop it, but only after
    # seconds.
    for _ in range(MAX_POWERS):
        # Replace operations by their values, from the inside out.
        text = BRACKETED_LITERAL.sub(r"\1", text)
        operation = _find_innermost(text)
        if operation is None:
            return False

        value = (
            _compute_power(operation)
            if operation.re is LITERAL_POWER
            else _estimate_factorial(operation)
        )
        if value is None:
            return True
        text = f"{text[: operation.start()]}{value}{text[operation.end() :]}"
    return True


def _find_innermost(text: str) -> re.Match[str] | None:
    """Return the factorial or power to compute first. In a tower of powers it is the last one."""
    factorial = LITERAL_FACTORIAL.search(text)
    if factorial is not None:
        return factorial
    powers = list(LITERAL_POWER.finditer(text))
    return powers[-1] if powers else None


def _estimate_factorial(factorial: re.Match[str]) -> str | None:
    """Return a number of about a factorial's size. None if it is too large."""
    digits = factorial[1]
    if len(digits) >= 8 or int(digits) > MAX_FACTORIAL:
        return None
    # Only its size matters for the operations around it.
    return str(10 ** min(int(digits), 2000))


def _compute_power(power: re.Match[str]) -> str | None:
    """Return a power, or nines in place of a large one. None if it is too large."""
    base = power["base"]
    exponent = power["braced"] or power["digit"]
    if exponent == "0":
        return "1"
    if base in ("0", "1") or exponent == "1":
        return base

    if len(exponent) > 7 or len(base) * int(exponent) > MAX_POWER_DIGITS:
        return None
    if len(base) * int(exponent) < 4000:
        return str(int(base) ** int(exponent))
    return "9" * 4000
