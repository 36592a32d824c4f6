r"""One notation for what means the same: typography, Unicode and packages' commands become LaTeX for math-verify.

For texts of at most a few thousand characters. Regular expressions here have no repeated group inside a repeated group,
which could take exponential time."""

import re
import unicodedata
from collections.abc import Callable

SYMBOLS = {
    **dict.fromkeys("−–—‒―﹣－", "-"),
    **dict.fromkeys("×✕⨯", r"\times "),
    **dict.fromkeys("·⋅∙•", r"\cdot "),
    **dict.fromkeys("÷∕⁄", "/"),
    **dict.fromkeys("≤⩽", r"\le "),
    **dict.fromkeys("≥⩾", r"\ge "),
    **dict.fromkeys("∅⌀", r"\emptyset "),
    **dict.fromkeys("\u200b\u2060\ufeff\u00ad", ""),
    "≠": r"\ne ",
    "≈": r"\approx ",
    "±": r"\pm ",
    "∞": r"\infty ",
    "∪": r"\cup ",
    "∩": r"\cap ",
    "∈": r"\in ",
    "∶": ":",
    "′": "'",
    "″": "''",
    "º": r"^\circ ",
    "°": r"^\circ ",
    "…": r"\ldots ",
    "ℝ": r"\mathbb{R}",
    "ℤ": r"\mathbb{Z}",
    "ℚ": r"\mathbb{Q}",
    "ℕ": r"\mathbb{N}",
    "ℂ": r"\mathbb{C}",
}
SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n", strict=True))
SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉₊₋ₙ", "0123456789+-n", strict=True))

# commands whose argument is what they show, and what they are replaced by
SHOWN = (
    *("boldsymbol", "bm", "pmb", "mathbf", "mathit", "mathsf", "mathtt", "mathnormal", "underline", "uline", "emph"),
    *("ensuremath", "mathord", "mathopen", "mathclose", "mathpunct", "num", "strut", "smash", "cancel"),
)
WORDS = ("mathrm", "textrm", "textbf", "textit", "textup", "textsf", "texttt", "textnormal", "mbox", "hbox", "text")
FRACTIONS = ("dfrac", "tfrac", "cfrac", "nicefrac", "sfrac", "xfrac", "flatfrac", "frac")

REPLACEMENTS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:left|right|[bB]igg?[lrm]?)(?![a-zA-Z])\s*\.?", ""),
        (r"\\(?:displaystyle|textstyle|scriptstyle|limits|nolimits|bf|rm|it|sf|tt|large|Large)(?![a-zA-Z])", ""),
        (r"\\!|\\\(|\\\)|\\\[|\\\]|\\/|\\hspace\*?\s*\{[^{}]*\}", ""),
        (r"(?<!\\)\\[,;:> ]|~|\\q?quad(?![a-zA-Z])|\\(?:thin|med|thick)space(?![a-zA-Z])", " "),
        (r"(?<![a-zA-Z])\{\s*([,:.;])\s*\}", r"\1"),
        (r"\\(?:colon|ratio)(?![a-zA-Z])", ":"),
        # a degree sign says nothing that a number does not, nor does a currency
        (
            r"(?:\{\})?\s*(?:\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-zA-Z]))|\\(?:text)?degree(?![a-zA-Z])(?:\{\})?)",
            r"\\degree ",
        ),
        (r"\\degree\s*(?:(?:C|F)(?![a-zA-Z])|\\text\s*\{\s*[CF]\s*\})?", " "),
        (r"\\?\$|[€£¥₹₽₩¢₿]|\\(?:text)?(?:euro?|pounds?|sterling|yen|dollar|cent)(?![a-zA-Z])(?:\{\})?", " "),
        (r"\\(?:neq|ne|not\s*=)(?![a-zA-Z])|!=|\\not\s*=", r"\\ne "),
        (r"\\(?:leqslant|leqq|leq|le)(?![a-zA-Z])|<=", r"\\le "),
        (r"\\(?:geqslant|geqq|geq|ge)(?![a-zA-Z])|>=", r"\\ge "),
        (r"\\lt(?![a-zA-Z])", "<"),
        (r"\\gt(?![a-zA-Z])", ">"),
        (r"==", "="),
        (r"\\varnothing(?![a-zA-Z])", r"\\emptyset "),
        (r"\\[dt]binom(?![a-zA-Z])", r"\\binom"),
        (rf"\\(?:{'|'.join(FRACTIONS)})(?![a-zA-Z])", r"\\frac"),
        (r"√\s*([0-9]+|[a-zA-Z]|\([^()]*\)|\{[^{}]*\})", r"\\sqrt{\1}"),
        (r"([0-9])\u0305", r"\\overline{\1}"),
        (r"\^\s*\{?\s*\\prime\s*\}?", "'"),
    )
]
FRACTION_OF_DIGITS = re.compile(r"\\frac\s*(?:\{([^{}]*)\}|([0-9]))\s*(?:\{([^{}]*)\}|([0-9a-zA-Z]))")
CHOOSE = re.compile(r"\{?\s*([^{}\\]+?)\s*\\choose(?![a-zA-Z])\s*([^{}\\]+?)\s*\}?")
LIST_WORD = re.compile(r",?\s*(?:\\text\s*\{\s*(?:and|or)\s*\}|(?<=\s)(?:and|or)(?=\s))\s*")
DIGIT_GROUPS = re.compile(r"(?<![0-9.])[0-9]{1,3}(?: [0-9]{3})+(?![0-9]| [0-9])")

INTRODUCTION = re.compile(
    r"(?:(?:so|thus|hence|therefore|then)\b,?\s*)?(?:the\s+|my\s+)?(?:(?:final|correct|right|only|required)\s+)?"
    r"(?:answer|solution|result|value|sum|total|it)s?\s*(?:is|are|equals|:|=)\s*(?:equal\s+to\s+)?:?\s*",
    re.IGNORECASE,
)


def standard_notation(text: str) -> str:
    """The same answer as math-verify reads it: what is shown is kept, how it is shown is not."""
    text = _without_unicode(text)
    for pattern, replacement in REPLACEMENTS:
        text = pattern.sub(replacement, text)

    for command in SHOWN:
        text = replace_command(text, command, 1, lambda shown: shown)
    for command in ("textcolor", "color"):
        text = replace_command(text, command, 2, lambda _colour, shown: shown)
        text = replace_command(text, command, 1, lambda _colour: "")
    for command in ("SI", "qty"):
        text = replace_command(text, command, 2, lambda number, unit: rf"{number}\text{{ {unit}}}")
    for command in (*WORDS, "unit", "si"):
        text = replace_command(text, command, 1, _words)

    text = FRACTION_OF_DIGITS.sub(lambda m: rf"\frac{{{m[1] or m[2] or ''}}}{{{m[3] or m[4] or ''}}}", text)
    if chosen := CHOOSE.fullmatch(text.strip()):
        text = rf"\binom{{{chosen[1]}}}{{{chosen[2]}}}"

    text = LIST_WORD.sub(", ", " ".join(text.split()))
    text = DIGIT_GROUPS.sub(lambda digits: digits[0].replace(" ", ""), text)
    text = without_punctuation(_without_introduction(without_punctuation(text)))
    text = _without_box(text)
    while text.startswith("{") and closing_brace(text, 0) == len(text) - 1:
        text = text[1:-1].strip()
    return text


def without_punctuation(text: str) -> str:
    """Without the full stop of a sentence; 0.333... keeps its dots, 5. does not."""
    text = text.strip()
    while text and text[-1] in ".,;" and not text.endswith("..."):
        text = text[:-1].rstrip()
    return text


def replace_command(text: str, command: str, count: int, replacement: Callable[..., str]) -> str:
    r"""``text`` with what ``replacement`` makes of the ``count`` arguments in braces of each ``\command``."""
    pattern = re.compile(rf"\\{command}(?![a-zA-Z])\*?\s*(?=\{{)")
    start = 0
    while found := pattern.search(text, start):
        arguments: list[str] = []
        end = found.end()
        while len(arguments) < count and end < len(text) and text[end] == "{":
            close = closing_brace(text, end)
            if close is None:
                break
            arguments.append(text[end + 1 : close])
            end = close + 1
        if len(arguments) < count:
            start = found.end()
            continue
        new = replacement(*arguments)
        text = text[: found.start()] + new + text[end:]
        # what a command shows may hold another one of its kind, but what stays a command is not looked at again
        start = found.start() + (len(new) if new.startswith("\\" + command) else 0)
    return text


def closing_brace(text: str, opening: int) -> int | None:
    r"""Where the brace that opens at ``opening`` is closed; \{ and \} are text."""
    depth = 0
    for found in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, opening):
        if found[0] == "{":
            depth += 1
        elif found[0] == "}":
            depth -= 1
            if depth == 0:
                return found.start()
    return None


def _words(content: str) -> str:
    r"""\text{...} only around words: numbers and single symbols in it are mathematics."""
    letters = sum(character.isalpha() for character in content)
    if letters == 0:
        return content
    return rf"\text{{{content}}}"


def _without_unicode(text: str) -> str:
    found: list[str] = []
    for character in text:
        if character < "\x80":
            found.append(character)
        elif character in SYMBOLS:
            found.append(SYMBOLS[character])
        elif character in SUPERSCRIPTS or character in SUBSCRIPTS:
            found.append(_raised_or_lowered(character, found))
        elif character.isspace():
            found.append(" ")
        else:
            found.append(_plain_character(character))
    return "".join(found)


def _raised_or_lowered(character: str, before: list[str]) -> str:
    """^{12} for the two characters of an exponent: the second one opens the first one's braces again."""
    command, plain = ("^", SUPERSCRIPTS) if character in SUPERSCRIPTS else ("_", SUBSCRIPTS)
    if before and before[-1].startswith(command + "{"):
        opened = before.pop()
        return f"{opened[:-1]}{plain[character]}}}"
    return f"{command}{{{plain[character]}}}"


def _plain_character(character: str) -> str:
    kind = unicodedata.decomposition(character).partition(">")[0]
    if kind == "<fraction":
        above, _, below = unicodedata.normalize("NFKC", character).partition("⁄")
        return rf"\frac{{{above}}}{{{below}}}"
    if kind in ("<font", "<wide", "<narrow"):
        return unicodedata.normalize("NFKC", character)
    name = unicodedata.name(character, "").split()
    if len(name) == 4 and name[0] == "GREEK" and name[2] == "LETTER" and character not in "ςΑΒΕΖΗΙΚΜΝΟΡΤΥΧο":
        letter = name[3].lower().replace("lamda", "lambda")
        return rf"\{letter.capitalize() if name[1] == 'CAPITAL' else letter} "
    return character


def _without_introduction(text: str) -> str:
    """'The answer is 5', as text or in text, is 5."""
    if text.startswith(r"\text{"):
        close = closing_brace(text, len(r"\text"))
        said = text[len(r"\text{") : close].strip() if close is not None else ""
        if close is not None and close + 1 < len(text) and INTRODUCTION.fullmatch(f"{said} "):
            return text[close + 1 :].strip()
        if close == len(text) - 1 and INTRODUCTION.match(said):
            return INTRODUCTION.sub("", said, count=1)
    if found := INTRODUCTION.match(text):
        rest = text[found.end() :]
        return rest or text
    return text


def _without_box(text: str) -> str:
    for command in (r"\boxed", r"\fbox"):
        inside = text.removeprefix(command).lstrip()
        if text.startswith(command) and inside.startswith("{") and closing_brace(inside, 0) == len(inside) - 1:
            return _without_box(without_punctuation(inside[1:-1]))
    return text
