r"""Rewrites answers in one notation of plain LaTeX, without Unicode, formatting or packages.

Texts may have up to a few thousand characters. Therefore no regular expression here has nested
repetitions, which could take exponential time.
"""

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
    "∨": r"\lor ",
    "∧": r"\land ",
    "→": r"\to ",
    "∖": r"\setminus ",
    "⊂": r"\subset ",
    "⊆": r"\subseteq ",
    "≡": r"\equiv ",
    "∣": r"\mid ",
    "⟨": r"\langle ",
    "⟩": r"\rangle ",
    "⌊": r"\lfloor ",
    "⌋": r"\rfloor ",
    "⌈": r"\lceil ",
    "⌉": r"\rceil ",
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

FORMATTING_COMMANDS = (
    *(
        "boldsymbol",
        "bm",
        "pmb",
        "mathbf",
        "mathit",
        "mathsf",
        "mathtt",
        "mathnormal",
        "underline",
        "uline",
        "emph",
    ),
    *(
        "ensuremath",
        "mathord",
        "mathopen",
        "mathclose",
        "mathpunct",
        "num",
        "strut",
        "smash",
        "cancel",
    ),
)
"""Commands with one argument that are replaced by their argument."""
TEXT_COMMANDS = (
    "mathrm",
    "textrm",
    "textbf",
    "textit",
    "textup",
    "textsf",
    "texttt",
    "textnormal",
    "mbox",
    "hbox",
    "text",
)
r"""Commands that become \text{} if their argument contains letters."""
FRACTIONS = ("dfrac", "tfrac", "cfrac", "nicefrac", "sfrac", "xfrac", "flatfrac", "frac")

CURRENCIES = {
    "dollar": r"\\\$|\\(?:text)?dollar(?![a-zA-Z])(?:\{\})?",
    "euro": r"€|\\(?:text)?euro?(?![a-zA-Z])(?:\{\})?",
    "sterling": r"£|\\(?:text)?(?:pounds?|sterling)(?![a-zA-Z])(?:\{\})?",
    "yen": r"¥|\\(?:text)?yen(?![a-zA-Z])(?:\{\})?",
    "rupee": "₹",
    "cent": r"\\(?:text)?cent(?![a-zA-Z])(?:\{\})?",
}
"""Patterns of currency signs, by the word that replaces them."""

REPLACEMENTS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        # Sizes, styles and spacing.
        (r"\\(?:left|right|[bB]igg?[lrm]?)(?![a-zA-Z])\s*\.?", ""),
        (
            r"\\(?:displaystyle|textstyle|scriptstyle|limits|nolimits|bf|rm|it|sf|tt|large|Large)(?![a-zA-Z])",
            "",
        ),
        (r"(?<=[0-9]),\\!\s*(?=[0-9]{3})", ","),
        (r"\\!|\\\(|\\\)|\\\[|\\\]|\\/|\\hspace\*?\s*\{[^{}]*\}", ""),
        (r"(?<!\\)\\[,;:> ]|~|\\q?quad(?![a-zA-Z])|\\(?:thin|med|thick)space(?![a-zA-Z])", " "),
        # 1{,}234 and 3{:}4
        (r"(?<![a-zA-Z])\{\s*([,:.;])\s*\}", r"\1"),
        (r"\\(?:colon|ratio)(?![a-zA-Z])", ":"),
        # Degrees, as one command; Celsius and Fahrenheit as words.
        (
            r"(?:\{\})?\s*(?:\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-zA-Z]))|\\(?:text)?degree(?![a-zA-Z])(?:\{\})?)",
            r"\\degree ",
        ),
        (r"\\text\s*\{\s*\\degree\s*\}", r"\\degree "),
        (r"\\degree\s*(?:C(?![a-zA-Z])|\\text\s*\{\s*C\s*\})", r"\\text{ celsius}"),
        (r"\\degree\s*(?:F(?![a-zA-Z])|\\text\s*\{\s*F\s*\})", r"\\text{ fahrenheit}"),
        # Currencies, as a word behind the number.
        *(
            (
                rf"(?:{sign})\s*(?P<number>-?[0-9][0-9.,{{}}]*[0-9]|-?[0-9])",
                rf"\g<number>\\text{{ {word}}}",
            )
            for word, sign in CURRENCIES.items()
        ),
        *((rf"(?:{sign})", rf"\\text{{ {word}}}") for word, sign in CURRENCIES.items()),
        (r"\$|[₽₩¢₿]", " "),
        # Relations.
        (r"\\(?:neq|ne|not\s*=)(?![a-zA-Z])|!=|\\not\s*=", r"\\ne "),
        (r"\\(?:leqslant|leqq|leq|le)(?![a-zA-Z])|<=", r"\\le "),
        (r"\\(?:geqslant|geqq|geq|ge)(?![a-zA-Z])|>=", r"\\ge "),
        (r"\\(?:not\s*\\in|notin)(?![a-zA-Z])|∉", r"\\notin "),
        (r"\\lt(?![a-zA-Z])", "<"),
        (r"\\gt(?![a-zA-Z])", ">"),
        (r"==", "="),
        # Synonyms.
        (r"\\varnothing(?![a-zA-Z])", r"\\emptyset "),
        (r"\\[dt]binom(?![a-zA-Z])", r"\\binom"),
        (rf"\\(?:{'|'.join(FRACTIONS)})(?![a-zA-Z])", r"\\frac"),
        (r"\\(?:longrightarrow|rightarrow|to)(?![a-zA-Z])", r"\\to "),
        (
            r"\\(?:operatorname|mathop)\s*\{\s*(gcd|lcm|max|min|log|ln|sin|cos|tan)\s*\}",
            r"\\operatorname{\1}",
        ),
        # "(mod 5)", "\pmod 5"
        (
            r"\(\s*(?:\\b?mod(?![a-zA-Z])|\\(?:text|mathrm|operatorname)\s*\{\s*mod\s*\}|mod\b)\s*([^()]*)\)",
            r"\\pmod{\1}",
        ),
        (
            r"(?:\\[bp]?mod(?![a-zA-Z])|\\(?:text|mathrm|operatorname)\s*\{\s*mod\s*\}|\bmod\b)"
            r"\s*(?:\{([^{}]*)\}|([0-9]+|[a-zA-Z]))",
            r"\\pmod{\1\2}",
        ),
        # "√2", a bar over a digit, and a prime.
        (r"√\s*([0-9]+|[a-zA-Z]|\([^()]*\)|\{[^{}]*\})", r"\\sqrt{\1}"),
        (r"([0-9])\u0305", r"\\overline{\1}"),
        (r"\^\s*\{?\s*\\prime\s*\}?", "'"),
    )
]
"""Replacements, applied in this order. Some match the results of earlier ones."""

MAX_PRODUCT_LETTERS = 3
"""Maximum number of letters in a product of variables. A longer sequence of letters is a word."""

FRACTION_OF_DIGITS = re.compile(
    r"\\frac\s*(?:\{(?P<above>[^{}]*)\}|(?P<digit_above>[0-9]))"
    r"\s*(?:\{(?P<below>[^{}]*)\}|(?P<sign_below>[0-9a-zA-Z]))"
)
r"""\frac12 and \frac{1}2 as well as \frac{1}{2}"""
# "{n \choose k}", as plain TeX writes binomials.
CHOOSE = re.compile(r"\{?\s*([^{}\\]+?)\s*\\choose(?![a-zA-Z])\s*([^{}\\]+?)\s*\}?")
# The words of "1, 2 and 3" and "x = 1 or x = 2".
LIST_WORD = re.compile(
    r",?\s*(?:\\text\s*\{\s*(?P<text>and|or)\s*\}"
    r"|(?<=[\s)\]}0-9])(?P<word>and|or)(?=[\s(\[\\{0-9-]))\s*"
)
# "12 345 678" and "12'345'678".
DIGIT_GROUPS = re.compile(
    r"(?<![0-9.])[0-9]{1,3}(?:(?: [0-9]{3})+(?![0-9]| [0-9])|(?:'[0-9]{3})+(?![0-9']))"
)

# "So the final answer is: "
INTRODUCTION = re.compile(
    r"(?:(?:so|thus|hence|therefore|then)\b,?\s*)?(?:the\s+|my\s+)?(?:(?:final|correct|right|only|required)\s+)?"
    r"(?:answer|solution|result|value|sum|total|it)s?\s*(?:is|are|equals|:|=)\s*(?:equal\s+to\s+)?:?\s*",
    re.IGNORECASE,
)

# Matches "\{" as one unit, because an escaped brace does not open a group.
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def standard_notation(text: str) -> str:
    """Return an answer in the notation that the module ``statement`` parses.

    Args:
        text: answer in LaTeX, Unicode or words.
    """
    text = _without_unicode(text)
    for pattern, replacement in REPLACEMENTS:
        text = pattern.sub(replacement, text)

    text = _without_commands(text)
    text = FRACTION_OF_DIGITS.sub(_braced_fraction, text)
    chosen = CHOOSE.fullmatch(text.strip())
    if chosen is not None:
        text = rf"\binom{{{chosen[1]}}}{{{chosen[2]}}}"

    # "1 and 2" is a list, "12 345" one number.
    text = " ".join(text.split())
    text = LIST_WORD.sub(_separator, text)
    text = DIGIT_GROUPS.sub(lambda digits: re.sub("[ ']", "", digits[0]), text)

    # The period of "The answer is 5." may be inside the box or after it.
    text = without_punctuation(text)
    text = without_punctuation(_without_introduction(text))
    text = _without_box(text)
    # Braces around everything only group.
    while text.startswith("{") and closing_brace(text, 0) == len(text) - 1:
        text = text[1:-1].strip()
    return text


def without_punctuation(text: str) -> str:
    """Remove punctuation at the end of an answer: "5." becomes "5", "0.333..." is unchanged."""
    text = text.strip()
    while text and text[-1] in ".,;" and not text.endswith("..."):
        text = text[:-1].rstrip()
    return text


def replace_command(text: str, command: str, count: int, replacement: Callable[..., str]) -> str:
    r"""Replace each ``\command`` that has at least ``count`` arguments in braces.

    Args:
        text: text to change.
        command: name of the command.
        count: number of its arguments.
        replacement: function that returns the replacement for the arguments.
    """
    pattern = re.compile(rf"\\{command}(?![a-zA-Z])\*?\s*(?=\{{)")
    position = 0
    while match := pattern.search(text, position):
        arguments, end = _arguments_at(text, match.end(), count)
        if len(arguments) < count:
            position = match.end()
            continue

        shown = replacement(*arguments)
        text = text[: match.start()] + shown + text[end:]
        # Continue in the replacement, because it may contain the same command. Skip a replacement
        # that begins with the command, because it would be replaced forever.
        position = match.start()
        if shown.startswith("\\" + command):
            position += len(shown)
    return text


def closing_brace(text: str, opening: int) -> int | None:
    r"""Return the position of the brace that closes the one at ``opening``. \{ and \} are text."""
    depth = 0
    for brace in BRACE.finditer(text, opening):
        if brace[0] == "{":
            depth += 1
        elif brace[0] == "}":
            depth -= 1
            if depth == 0:
                return brace.start()
    return None


# ---- the steps of ``standard_notation``


def _arguments_at(text: str, start: int, count: int) -> tuple[list[str], int]:
    """Return up to ``count`` arguments in braces from ``start``, and the position after them."""
    arguments: list[str] = []
    end = start
    while len(arguments) < count and text[end : end + 1] == "{":
        close = closing_brace(text, end)
        if close is None:
            break
        arguments.append(text[end + 1 : close])
        end = close + 1
    return arguments, end


def _without_commands(text: str) -> str:
    """Replace formatting commands, and commands of packages, by their contents."""
    for command in FORMATTING_COMMANDS:
        text = replace_command(text, command, 1, lambda shown: shown)
    # \textcolor{red}{x} has two arguments, and \color{red} alone is a switch.
    for command in ("textcolor", "color"):
        text = replace_command(text, command, 2, lambda _color, shown: shown)
        text = replace_command(text, command, 1, lambda _color: "")
    for command in ("SI", "qty"):
        text = replace_command(text, command, 2, lambda number, unit: rf"{number}\text{{ {unit}}}")
    for command in (*TEXT_COMMANDS, "unit", "si"):
        text = replace_command(text, command, 1, _words)
    return text


def _separator(word: re.Match[str]) -> str:
    r"""Write \lor for "or" between conditions, and a comma between values."""
    # "1 or 2" is a list of values. "x < 1 or x > 3" is not "x < 1 and x > 3".
    is_or = (word["text"] or word["word"]) == "or"
    has_conditions = re.search(r"[<>]|\\[lg]e(?![a-zA-Z])", word.string) is not None
    return r" \lor " if is_or and has_conditions else ", "


def _words(content: str) -> str:
    r"""Return content with letters as \text{}, and other content unchanged, as mathematics."""
    if not any(character.isalpha() for character in content):
        return content
    return rf"\text{{{content}}}"


def _braced_fraction(fraction: re.Match[str]) -> str:
    """Return a fraction with braces around both parts."""
    above = fraction["above"] or fraction["digit_above"] or ""
    below = fraction["below"] or fraction["sign_below"] or ""
    return rf"\frac{{{above}}}{{{below}}}"


def _without_unicode(text: str) -> str:
    """Write characters outside ASCII in LaTeX."""
    pieces: list[str] = []
    for character in text:
        if character < "\x80":
            pieces.append(character)
        elif character in SYMBOLS:
            pieces.append(SYMBOLS[character])
        elif character in SUPERSCRIPTS or character in SUBSCRIPTS:
            pieces.append(_convert_script(character, pieces))
        elif character.isspace():
            pieces.append(" ")
        else:
            pieces.append(_plain_character(character))
    return "".join(pieces)


def _convert_script(character: str, before: list[str]) -> str:
    """Return a superscript or subscript as an exponent or index, such as ^{12}.

    If ``before`` ends with an exponent or index of the same kind, it is removed from ``before`` and
    returned with the character appended.
    """
    if character in SUPERSCRIPTS:
        command = "^"
        plain = SUPERSCRIPTS[character]
    else:
        command = "_"
        plain = SUBSCRIPTS[character]

    if before and before[-1].startswith(command + "{"):
        opened = before.pop().removesuffix("}")
        return f"{opened}{plain}}}"
    return f"{command}{{{plain}}}"


def _plain_character(character: str) -> str:
    """Return a fraction character, a letter of another font or a Greek letter in LaTeX."""
    kind = unicodedata.decomposition(character).partition(">")[0]
    if kind == "<fraction":
        above, _, below = unicodedata.normalize("NFKC", character).partition("⁄")
        return rf"\frac{{{above}}}{{{below}}}"
    if kind in ("<font", "<wide", "<narrow"):
        return unicodedata.normalize("NFKC", character)

    # Names are such as "GREEK SMALL LETTER ALPHA". LaTeX has no command for a Greek letter that
    # looks like a Latin one.
    name = unicodedata.name(character, "").split()
    if (
        len(name) == 4
        and name[0] == "GREEK"
        and name[2] == "LETTER"
        and character not in "ςΑΒΕΖΗΙΚΜΝΟΡΤΥΧο"
    ):
        letter = name[3].lower().replace("lamda", "lambda")
        if name[1] == "CAPITAL":
            letter = letter.capitalize()
        return rf"\{letter} "
    return character


def _without_introduction(text: str) -> str:
    """Return 5 for 'The answer is 5', with or without \\text{}."""
    if text.startswith(r"\text{"):
        close = closing_brace(text, len(r"\text"))
        if close is not None:
            words = text[len(r"\text{") : close].strip()
            rest = text[close + 1 :]
            if rest and INTRODUCTION.fullmatch(f"{words} "):
                return rest.strip()
            if not rest and INTRODUCTION.match(words):
                return INTRODUCTION.sub("", words, count=1)

    introduction = INTRODUCTION.match(text)
    if introduction is None:
        return text
    return text[introduction.end() :] or text


def _without_box(text: str) -> str:
    """Remove boxes around the whole text."""
    for command in (r"\boxed", r"\fbox"):
        inside = text.removeprefix(command).lstrip()
        if (
            text.startswith(command)
            and inside.startswith("{")
            and closing_brace(inside, 0) == len(inside) - 1
        ):
            return _without_box(without_punctuation(inside[1:-1]))
    return text
