r"""Is the answer in \boxed{} equivalent to the ground truth?"""

import re
from decimal import Decimal

from rl_loop.rewards.math_verify_process import equivalent

# beyond six decimal places math-verify rounds, beyond fifteen digits it is as inexact as its floating point
PLAIN_NUMBER = re.compile(r"-?([0-9]{1,30}|[0-9]{1,8}\.[0-9]{1,6})")

SCIENTIFIC = re.compile(r"-?[0-9]{1,15}(\.[0-9]{1,15})?[eE][-+]?[0-9]{1,2}")


def last_boxed(text: str) -> str | None:
    r"""The content of the last complete \boxed{...} (braces may nest), or None."""
    start = text.rfind(r"\boxed{")
    while start >= 0:
        depth = 0
        for i in range(start + len(r"\boxed"), len(text)):
            depth += (text[i] == "{") - (text[i] == "}")
            if depth == 0:
                return text[start + len(r"\boxed{") : i]
        start = text.rfind(r"\boxed{", 0, start)
    return None


def is_number(text: str) -> bool:
    """Whether it is a plain number or a fraction of two."""
    parts = text.strip().strip("$").replace(",", "").split("/")
    return len(parts) <= 2 and all(PLAIN_NUMBER.fullmatch(part.strip()) for part in parts)


def is_correct(answer: str, ground_truth: str) -> bool:
    r"""Whether the last \boxed{} of ``answer`` equals ``ground_truth``, as math-verify sees it.

    Two plain decimal numbers are compared as such, which is what math-verify finds, only faster."""
    boxed = last_boxed(answer)
    if boxed is None:
        return False
    given, wanted = (re.sub(r"(?<=\d)\\[,!;](?=\d)", "", text.strip()) for text in (boxed, ground_truth))
    given, wanted = (format(Decimal(text), "f") if SCIENTIFIC.fullmatch(text) else text for text in (given, wanted))
    if PLAIN_NUMBER.fullmatch(given) and PLAIN_NUMBER.fullmatch(wanted):
        return Decimal(given) == Decimal(wanted)
    return equivalent(given, wanted)


def normalised(answer: str | None) -> str | None:
    """Equal text for answers that are written alike: without blanks and dollar signs, numbers in one form."""
    if answer is None:
        return None
    text = "".join(answer.split()).strip("$").replace(r"\dfrac", r"\frac").replace(r"\!", "")
    number = text.replace(",", "")
    return format(Decimal(number).normalize(), "f") if PLAIN_NUMBER.fullmatch(number) else text
