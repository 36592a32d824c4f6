r"""Generated answers, each with ground truths of which at most one equals the answer.

Every kind of answer has slots for numbers. The ground truths are the answer with another number in
one slot, each number alone, and values that a careless parser might read.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Composed:
    """An answer and the ground truths to compare it with."""

    kind: str
    answer: str
    same: str
    """The same answer in another notation."""
    others: tuple[str, ...]
    """Ground truths that differ from the answer."""
    is_readable: bool
    """True if the answer is mathematics, so that it must equal ``same``."""


SEPARATOR_TEXT = r"""
\lor \land \vee \wedge \cup \cap \to \mid \rightarrow \Rightarrow \implies \iff \mapsto \leftarrow \gets \sim \simeq
\cong \equiv \approx \asymp \propto \parallel \perp \oplus \otimes \ominus \odot \circ \bullet \star \diamond \dagger
\setminus \backslash \vdash \models \prec \succ \preceq \succeq \ll \gg \subset \supset \in \ni \notin \because
\therefore \colon \& \\ \# \_ \@ \; \quad \qquad \textbar \vert \| \divides \nmid \leadsto \hookrightarrow
\longmapsto \triangleq \doteq \coloneqq ∨ ∧ ∪ ∩ → ⇒ ↦ ← ∣ ∥ ⊥ ⊕ ⊗ ∘ • ⋆ ≅ ≃ ∼ ∝ ⊂ ⊃ ∋ ∉ ‖ ¦ ‾ ‣ ※ § ¶ @ # & ; ? ~ _ " `
\text{or} \text{and} \text{then} \text{to} \text{vs} \text{not} \text{hence} or and , ;; | to vs then not => -> <- := ::
.. ... \ldots \cdots -- ++ ** ^^ != <> = == =\!= < > \le \ge \ne : - + / \cdot \times * ^ !
"""
SEPARATORS = SEPARATOR_TEXT.split()
UNIT_TEXT = """
cm m km kg g s hours minutes days dollars euros degrees radians apples oranges ways points cm^2 m/s km/h feet
"""
UNITS = (*UNIT_TEXT.split(), "m s", "square feet", "cubic feet")
PROSE = r"""
\text{between }{a}\text{ and }{b}
\text{from }{a}\text{ to }{b}
{a}\text{ out of }{b}
{a}\text{ of the }{b}
{a}\text{ more than }{b}
{a}\text{ less than }{b}
\text{either }{a}\text{ or }{b}
{a}\text{ (not }{b}\text{)}
{a}, not {b}
\text{first }{a}\text{, later }{b}
\text{The answer is }{a}\text{, or maybe }{b}
{a}\text{ remainder }{b}
{a}\text{ with probability }{b}
\text{at least }{a}\text{ and at most }{b}
{a} hours and {b} minutes
{a} feet {b} inches
It is {a} but I first got {b}
{a} (was {b})
{a}. {b}
""".strip().split("\n")


def composed(count: int, seed: int) -> Iterator[Composed]:
    """Yield answers, alternating over all kinds."""
    rng = random.Random(seed)
    kinds = list(KINDS.items())
    for i in range(count):
        name, make = kinds[i % len(kinds)]
        yield make(rng, name)


# ---- kinds


def _numbers(rng: random.Random, count: int, low: int = 2, high: int = 40) -> list[int]:
    return rng.sample(range(low, high), count)


def _from_template(
    template: str,
    same: str,
    *,
    slots: int,
    alone: bool = True,
    extra: Callable[[list[int]], list[str]] | None = None,
    low: int = 2,
    high: int = 40,
    spread: Callable[[random.Random, int], int] | None = None,
) -> Callable[[random.Random, str], Composed]:
    """Return a kind in which every number matters: another number is another ground truth."""

    def make(rng: random.Random, name: str) -> Composed:
        numbers = _numbers(rng, slots, low, high)

        def filled(text: str, values: list[int]) -> str:
            for letter, value in zip("abcdef", values, strict=False):
                text = text.replace(f"<{letter}>", str(value))
            return text

        others = []
        for i in range(slots):
            step = spread(rng, i) if spread else rng.choice((1, 2, 7))
            changed = [n + step * (j == i) for j, n in enumerate(numbers)]
            others.append(filled(same, changed))
        if alone:
            others += map(str, numbers)
        if extra is not None:
            others += extra(numbers)
        return Composed(name, filled(template, numbers), filled(same, numbers), tuple(others), True)

    return make


def _separated(rng: random.Random, name: str) -> Composed:
    separator = rng.choice(SEPARATORS)
    a, b = _numbers(rng, 2, 2, 60)
    space = rng.choice(("", " "))
    answer = f"{a}{space}{separator} {b}"
    # The result of the separator's operation, if there is one, differs from both sides.
    return Composed(name, answer, answer, (str(a), str(b)), False)


def _prose(rng: random.Random, name: str) -> Composed:
    a, b = _numbers(rng, 2)
    answer = rng.choice(PROSE).replace("{a}", str(a)).replace("{b}", str(b))
    return Composed(name, answer, answer, (str(a), str(b), f"{a}{b}", f"{a}.{b}"), False)


def _units(rng: random.Random, name: str) -> Composed:
    unit, *others = rng.sample(UNITS, 4)
    (n,) = _numbers(rng, 1)
    others_with_units = [rf"{n} \text{{ {other}}}" for other in others]
    changed = [rf"{n + 1}\text{{ {unit}}}", str(n + 1), rf"{n}0\text{{ {unit}}}"]
    answer = rf"{n} \text{{ {unit}}}"
    return Composed(name, answer, rf"{n}\text{{{unit}}}", (*others_with_units, *changed), True)


def _set_operation(rng: random.Random, name: str) -> Composed:
    operation = rng.choice((r"\cup", r"\cap", r"\setminus"))
    a, b, c, d = sorted(_numbers(rng, 4))
    left, right = rng.choice(("()", "[]", "[)", "(]")), rng.choice(("()", "[]", "[)", "(]"))

    def text(a: int, b: int, c: int, d: int, op: str = operation) -> str:
        return f"{left[0]}{a},{b}{left[1]} {op} {right[0]}{c}, {d}{right[1]}"

    others = [text(a + 1, b, c, d), text(a, b, c, d + 1), text(a, b, c + 1, d), f"({a},{b})"]
    others += [text(a, b, c, d, op) for op in (r"\cup", r"\cap", r"\setminus") if op != operation]
    return Composed(name, text(a, b, c, d), text(a, b, c, d), tuple(others), True)


def _relation(rng: random.Random, name: str) -> Composed:
    relations = ["<", ">", r"\le", r"\ge", "=", r"\ne"]
    relation = rng.choice(relations)
    (a,) = _numbers(rng, 1)
    others = [f"x {other} {a}" for other in relations if other != relation]
    others += [f"x {relation} {a + 1}", f"y {relation} {a}", rf"x \equiv {a} \pmod{{{a + 3}}}"]
    if relation != "=":
        others.append(str(a))
    return Composed(name, f"x {relation} {a}", f"x{relation} {a}.0", tuple(others), True)


def _base(rng: random.Random, name: str) -> Composed:
    digits = "1" + "".join(rng.choices("01", k=rng.randint(2, 6)))
    base, other = rng.sample(range(2, 10), 2)
    others = (f"{digits}_{other}", digits, f"{digits}1_{base}", str(int(digits, base)), str(base))
    return Composed(name, f"{digits}_{base}", f"{digits}_{{{base}}}", others, True)


def _collection(rng: random.Random, name: str) -> Composed:
    numbers = _numbers(rng, rng.randint(2, 5))
    shown = ", ".join(map(str, numbers))
    turned = ", ".join(map(str, reversed(numbers)))
    more = f"{shown}, {max(numbers) + 1}"
    others = [rf"\{{{more}\}}", rf"\{{{', '.join(map(str, numbers[1:]))}\}}", f"({shown})"]
    changed = [n + 50 * (i == 0) for i, n in enumerate(numbers)]
    others += [rf"\{{{', '.join(map(str, changed))}\}}", *map(str, numbers)]
    return Composed(name, rf"\{{{shown}\}}", rf"\{{{turned}\}}", tuple(others), True)


def _decimal(rng: random.Random, name: str) -> Composed:
    whole, places = rng.randint(0, 999), rng.randint(1, 99999)
    answer = f"{whole}.{places:05d}"
    others = (
        f"{whole}.{places - 1:05d}",
        str(whole),
        str(places),
        f"{whole}{places:05d}",
        f"-{answer}",
    )
    return Composed(name, answer, f"{answer}0", others, True)


def _far(rng: random.Random, _slot: int) -> int:
    return rng.choice((1, 2))


KINDS: dict[str, Callable[[random.Random, str], Composed]] = {
    "separators": _separated,
    "prose": _prose,
    "units": _units,
    "operations of sets": _set_operation,
    "relations": _relation,
    "bases": _base,
    "sets": _collection,
    "decimals": _decimal,
    "more separators": _separated,
    "sums": _from_template("<a>x + <b>", "<b>+<a>x", slots=2),
    "quadratics": _from_template("<a>x^2-<b>x+<c>", "<a>x^{2} - <b>x + <c>", slots=3),
    "fractions": _from_template(r"\frac{x+<a>}{<b>}", r"(x+<a>)/<b>", slots=2),
    "roots": _from_template(r"<a>\sqrt{<b>}+x", r"x+<a>\sqrt{<b>}", slots=2),
    "powers": _from_template("x^{<a>}+<b>", "<b>+x^{<a>}", slots=2),
    "logarithms": _from_template(r"\log_{<a>} <b>x", r"\log_{<a>}(<b>x)", slots=2),
    "factorials": _from_template(
        r"\frac{<a>}{<b>!}", r"<a>/<b>!", slots=2, low=41, high=2000, spread=_far
    ),
    "large powers": _from_template(
        r"<a>^{-<b>}", r"\frac{1}{<a>^{<b>}}", slots=2, low=11, high=400
    ),
    "tiny terms": _from_template(
        r"\pi + <a>^{-<b>}",
        r"<a>^{-<b>}+\pi",
        slots=2,
        low=31,
        high=90,
        alone=False,
        extra=lambda n: [r"\pi"],
    ),
    "moduli": _from_template(
        r"x \equiv <a> \pmod{<b>}",
        r"x\equiv <a> (mod <b>)",
        slots=2,
        low=50,
        high=90,
        spread=_far,
        extra=lambda n: [f"x={n[0]}", rf"{n[0]} \pmod{{{n[1] + 1}}}"],
    ),
    "binomials": _from_template(r"\binom{x+<a>}{<b>}", r"\dbinom{<a>+x}{<b>}", slots=2),
    "divisors": _from_template(r"\gcd(n,<a>)+<b>", r"<b>+\gcd(<a>,n)", slots=2),
    "floors": _from_template(
        r"\lfloor <a>x+\frac{<b>}{<c>} \rfloor",
        r"\lfloor <a>x+<b>/<c> \rfloor",
        slots=3,
        low=40,
        high=90,
        extra=lambda n: [rf"\lceil {n[0]}x+\frac{{{n[1]}}}{{{n[2]}}} \rceil"],
    ),
    "functions": _from_template(r"f(<a>)+<b>", r"<b>+f(<a>)", slots=2),
    "named values": _from_template(r"f(<a>)=<b>", r"f(<a>)=<b>", slots=2),
    "indices": _from_template(r"a_{<a>}+<b>", r"<b>+a_{<a>}", slots=2),
    "points": _from_template(
        "(<a>, <b>, <c>)",
        "(<a>,<b>,<c>)",
        slots=3,
        extra=lambda n: [f"({n[1]},{n[0]},{n[2]})", f"[{n[0]},{n[1]},{n[2]}]"],
    ),
    "intervals": _from_template(
        "[<a>, <b>)",
        r"\left[<a>,<b>\right)",
        slots=2,
        extra=lambda n: [f"[{n[0]},{n[1]}]", f"({n[0]},{n[1]})", f"({n[0]},{n[1]}]"],
    ),
    "inequalities": _from_template(
        r"<a> < x \le <b>",
        r"(<a>,<b>]",
        slots=2,
        low=2,
        high=90,
        extra=lambda n: [rf"{n[0]} \le x \le {n[1]}", rf"{n[0]} < x < {n[1]}"],
    ),
    "conditions": _from_template(
        r"\{x : x > <a>\}",
        r"\{x \mid x > <a>\}",
        slots=1,
        extra=lambda n: [rf"\{{x : x \ge {n[0]}\}}"],
    ),
    "alternatives": _from_template(
        r"x < <a> \text{ or } x > <b>",
        r"x > <b> \text{ or } x < <a>",
        slots=2,
        extra=lambda n: [rf"x < {n[0]} \text{{ and }} x > {n[1]}"],
    ),
    "cases": _from_template(
        r"\begin{cases} x+<a> & x > <b> \\ <c> & x \le <b> \end{cases}",
        r"\begin{cases} <a>+x & \text{if } x > <b> \\ <c> & \text{if } x \le <b> \end{cases}",
        slots=3,
    ),
    "matrices": _from_template(
        r"\begin{pmatrix} <a> & <b> \\ <c> & <d> \end{pmatrix}",
        r"\begin{bmatrix} <a> & <b> \\ <c> & <d> \end{bmatrix}",
        slots=4,
    ),
    "ellipses": _from_template(
        r"<a>, <b>, \ldots, <c>n",
        r"<a>,<b>,\dots,<c>n",
        slots=3,
        extra=lambda n: [f"{n[0]},{n[1]},{n[2]}n", rf"{n[1]},{n[0]},\ldots,{n[2]}n"],
    ),
    "signs": _from_template(
        r"<a> \pm \sqrt{<b>}",
        r"<a>-\sqrt{<b>}, <a>+\sqrt{<b>}",
        slots=2,
        low=50,
        high=90,
        extra=lambda n: [rf"{n[0]}+\sqrt{{{n[1]}}}"],
    ),
    "ratios": _from_template(
        "<a> : <b>x", "<a>:<b>x", slots=2, extra=lambda n: [rf"\frac{{{n[0]}}}{{{n[1]}}}"]
    ),
    "angles": _from_template(
        r"<a>^\circ",
        r"<a>\text{ degrees}",
        slots=1,
        alone=False,
        extra=lambda n: [
            f"{n[0]}'",
            rf"{n[0]}\text{{ radians}}",
            str(n[0] + 1),
            rf"\frac{{{n[0]}\pi}}{{180}}",
        ],
    ),
    "mixed numbers": _from_template(
        r"<a>\frac{1}{<b>}", r"<a> 1/<b>", slots=2, extra=lambda n: [rf"\frac{{{n[0]}}}{{{n[1]}}}"]
    ),
    "chains": _from_template(
        "x = <a>y = <b>z", "x = <a>y = <b>z", slots=2, extra=lambda n: [f"x={n[1]}z"]
    ),
    "lists": _from_template("<a>, <b>, <c>", "<c>, <a>, <b>", slots=3, low=100, high=900),
    "sums with bounds": _from_template(
        r"\sum_{k=<a>}^{n} k^2",
        r"\sum_{k=<a>}^n k^2",
        slots=1,
        extra=lambda n: [rf"\sum_{{k={n[0]}}}^{{n}} k"],
    ),
    "scientific": _from_template(r"<a>.5 \times 10^{<b>}", r"<a>.5e<b>", slots=2),
    "trigonometry": _from_template(r"\sin(<a>x)+\cos <b>x", r"\cos(<b>x)+\sin <a>x", slots=2),
}
