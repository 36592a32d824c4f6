r"""Pairs of a given answer and the ground truth by the way in which they are alike or not, labelled by hand.

``labelled_answers`` says what equal mathematics is; here it is the same number, letter or expression in another
notation, or something that looks like the ground truth and says another thing. Where people would disagree, a comment
says who decides."""

SAME = {
    "a full stop ends the sentence": r"""
5. | 5
5\text{.} | 5
-3. | -3
1,000. | 1000
\frac{1}{2}. | 0.5
x+1. | 1+x
5; | 5
""",
    "digits in groups": r"""
1 234 | 1234
1\ 234 | 1234
1\,234 | 1234
1\;234 | 1234
1~234 | 1234
1\!234 | 1234
1 234 567 | 1234567
1\ 234\ 567 | 1234567
1 234 | 1234
1 234 | 1234
1 234 | 1234
1 234.5 | 1234.5
1{,}234.50 | 1234.5
1,234.50 | 1234.5
1'234 | 1234
1_000 | 1000
1.234,5 | 1234.5
(1\,000, 2) | (1000, 2)
x=12\,345 | 12345
x = 1,000 | 1000
x = 1,000 | 1,000
x = 12{,}345 | 12345
x=-1,000 | -1000
x = 1,234,567 | 1234567
n = 500 + 1,000 | 1500
x = 1,000 | x = 1000
""",
    "one character": r"""
½ | \frac{1}{2}
½ | 0.5
¾ | 3/4
⅔ | \frac{2}{3}
3½ | 3.5
-½ | -0.5
−5 | -5
– 5 | -5
5×10³ | 5000
3·4 | 12
x² | x^2
x²+y³ | x^2+y^3
10⁻² | 0.01
x₁₂ | x_{12}
√2 | \sqrt{2}
2√3 | 2\sqrt{3}
√(x+1) | \sqrt{x+1}
2π | 2\pi
π/2 | \frac{\pi}{2}
α+β | \beta+\alpha
x≤3 | x\le 3
x≥3 | x\ge 3
∞ | \infty
(−∞,3) | (-\infty,3)
[0,1)∪(2,3] | [0,1)\cup(2,3]
５ | 5
𝟓 | 5
6÷2 | 3
""",
    "units": r"""
5° | 5
5\degree | 5
5^\circ | 5
5^{\circ}\text{C} | 5
5\text{°} | 5
5~\mathrm{cm} | 5
5\,\mathrm{km/h} | 5
5 cm | 5
5 cm^2 | 5
5\text{ cm}^2 | 5
5\text{ cm}^{2} | 5
5 \text{ square units} | 5
5\text{ m/s} | 5
5 hours | 5
1000 dollars | 1000
7\text{ ways} | 7
\SI{5}{cm} | 5
\qty{5}{m} | 5
5 cm | 5\text{ cm}
5 \text{ centimeters} | 5\text{ cm}
5 | 5\text{ cm}
5\pi\text{ cm} | 5\pi
1\text{ million} | 1000000
2.5 million | 2500000
3 dozen | 36
""",
    "currency": r"""
€5 | 5
5€ | 5
5 € | 5
\euro5 | 5
\euro{} 5 | 5
£5 | 5
\pounds 5 | 5
¥500 | 500
\$5.00 | 5
\$1{,}000 | 1000
₹1,000 | 1000
""",
    "repeating decimals": r"""
0.\overline{3} | \frac{1}{3}
0.\overline{3} | 1/3
\frac{1}{3} | 0.\overline{3}
0.1\overline{6} | \frac{1}{6}
0.\overline{142857} | 1/7
0.\dot{3} | \frac13
0.\dot{1}4285\dot{7} | 1/7
0.(3) | 1/3
0.333... | 1/3
0.1666\ldots | 1/6
0.\overline{9} | 1
-0.\overline{3} | -1/3
0.3̅ | 1/3
""",
    "commands that only show": r"""
\nicefrac{1}{2} | 0.5
\sfrac12 | 0.5
\cfrac{1}{2} | 1/2
\displaystyle\frac{1}{2} | 1/2
\boldsymbol{5} | 5
\boldsymbol{\frac{1}{2}} | 0.5
\mathbf{5} | 5
\bm{5} | 5
\num{1000} | 1000
\underline{5} | 5
\textcolor{red}{5} | 5
\color{red}{5} | 5
\color{red} 5 | 5
\fbox{5} | 5
\boxed{5} | 5
\mathrm{5} | 5
\textbf{5} | 5
{\bf 5} | 5
\left(\frac{1}{2}, 3\right) | (0.5, 3)
\bigl(1,2\bigr) | (1,2)
\left\{1,2\right\} | \{1,2\}
$5$ | 5
\(5\) | 5
{5} | 5
""",
    "binomials": r"""
5 \choose 2 | 10
{5 \choose 2} | 10
\dbinom{5}{2} | 10
\tbinom{5}{2} | \binom{5}{3}
""",
    "words around": r"""
\text{The answer is }5 | 5
\text{The answer is } 5 | 5
\text{The answer is 5} | 5
The answer is 5 | 5
The answer is $5$. | 5
the final answer is: 5 | 5
Answer: 5 | 5
So the answer is 5. | 5
\text{Therefore, the sum is } \frac{1}{2} | 0.5
x = 5 | 5
\text{Area} = 5 | 5
5 = x | 5
2+3 = 5 | 5
x = 2+3 = 5 | 5
y = x+1 | x+1
f(x) = x^2 | x^2
5 | x=5
""",
    "mixed numbers": r"""
1 1/2 | \frac{3}{2}
1 1/2 | 1.5
1\ 1/2 | 1.5
1 \frac{1}{2} | 1.5
1\frac12 | 3/2
-1\frac12 | -1.5
2 2/3 | 8/3
\frac{3}{2} | 1 1/2
""",
    "letters of a choice": r"""
C. | C
C) | C
(C) | C
(C). | C
\text{C} | C
\text{C.} | C
\textbf{(C)} | C
\textbf{(C)}\ 5 | C
\text{(C) } 5 | C
C. 5 cm | C
(C) \frac{1}{2} | C
Option C | C
\text{Choice C} | C
C | \text{(C)}
A, C | \text{A, C}
A and C | A, C
""",
    "words": r"""
\text{Yes} | yes
\text{yes.} | \text{yes}
True | \text{true}
\text{even} | even
\text{no solution} | No solution
\emptyset | \varnothing
\{\} | \emptyset
""",
    "ratios and times": r"""
3:4 | 3:4
3 : 4 | 3:4
6:8 | 3:4
1:2:3 | 2:4:6
\sqrt{2}:2 | 1:\sqrt{2}
3\colon 4 | 3:4
12:30 | 12:30
10\text{:}30 | 10:30
""",
    # math-verify: a list may be meant for a point or a set, and one value is a set of one
    "lists": r"""
1, 2 | 2, 1
1,2 | (1,2)
1, 2 | \{1,2\}
5 \text{ and } 3 | 3, 5
x = 5 \text{ or } x = 3 | 3, 5
x=5, x=3 | 3,5
\{5\} | 5
(5) | 5
""",
    # as math-verify: 5 % may be meant for 5 and for 0.05
    "percent": r"""
5\% | 5
5\% | 0.05
5 percent | 5
0.5\% | 0.005
12.5\% | \frac{1}{8}
""",
    # a decimal of six places or more is rounded: what rounds to it is right, as math-verify has it
    "a rounded ground truth": r"""
\frac{1}{3} | 0.333333
\pi | 3.141593
\sqrt{2} | 1.41421356
0.3333333 | 0.333333
0.12345678 | 0.12345679
2/3 | 0.66666667
\frac{1}{3\cdot 10^{7}} | 0.0000000333333
""",
    "symbols": r"""
x^{2} | x²
(x+1)(x-1) | x²-1
2\sqrt3 | 2√3
5! | 120
2^{-1} | 1/2
\pi/2 | \frac{\pi}{2}
x\in[1,2] | [1,2]
""",
}

OTHER = {
    "chains of equations": r"""
3=4=5 | 5
5=4=3 | 5
5=6 | 6
5=6 | 5
2+2=5 | 5
x=4=5 | 5
x=5=4 | 5
y=x+2=x+1 | x+1
5=x+1 | x+1
""",
    "a box inside": r"""
4\fbox{5} | 5
4\boxed{5} | 5
\fbox{5}4 | 5
-\boxed{5} | 5
\boxed{4}\boxed{5} | 5
""",
    "denials": r"""
\neq 5 | 5
\ne 5 | 5
\not= 5 | 5
x\neq 5 | 5
≠5 | 5
5\neq6 | 6
not 5 | 5
\text{not }5 | 5
\text{The answer is not }5 | 5
It is not 5 | 5
It isn't 5 | 5
\text{maybe }5 | 5
\text{neither } 5 | 5
""",
    "inequalities": r"""
>5 | 5
<5 | 5
x>5 | 5
x\ge 5 | 5
≥5 | 5
x \leqslant 5 | 5
5 | x>5
5 | x\ge 5
4<5 | 5
""",
    "ratios": r"""
3:4 | 3/4
3:4 | \frac34
3:4 | 0.75
3\colon4 | 0.75
3:4 | 4:3
1:2:3 | 1:2
3/4 | 3:4
12:30 | 12
12:30 | 0.4
10:15 | 20:30
1:2:3 | 1:2:4
""",
    # an exact ground truth wants an exact answer
    "decimals for exact answers": r"""
3.141593 | \pi
3.14159265358979 | \pi
3.14 | \pi
1.414214 | \sqrt{2}
2.718282 | e
0.333 | 1/3
0.333333 | 1/3
0.3333333333 | \frac{1}{3}
0.666667 | \frac{2}{3}
0.3 | 0.\overline{3}
6.283185 | 2\pi
1.4142135623730951 | \sqrt 2
(0.333333, 1) | (\frac{1}{3}, 1)
""",
    "a ground truth of few places is exact": r"""
\pi | 3.14
\pi | 3.1416
\frac{1}{3} | 0.33
0.334 | 0.33
\frac{1}{10^9} | 0.000000002
0.000000001 | 0.000000002
1234567.123456 | 1234567.123457
99999999999999999999.123456 | 99999999999999999999.123457
""",
    "sets, points and intervals": r"""
\{1,2\} | (1,2)
(1,2) | \{1,2\}
(2,1) | \{1,2\}
[1,2] | \{1,2\}
[1,2] | (1,2)
(1,2) | (2,1)
\{1\} | \{1,2\}
(1,2) | 1
[0,1] | 1
\{1,1,2\} | 1
""",
    "more than one value": r"""
5 or 6 | 5
5\text{ or }6 | 5
5, 6 | 5
5, 6 | 6
5 6 | 5
5 6 | 6
5 6 | 56
5\pm 1 | 5
\pm 5 | 5
5 | \pm 5
5 | 5, 6
x=5, y=6 | 5
x=5, y=6 | 6
""",
    "digits that are no group": r"""
x = 1,000 | 1
x = 1,000 | 0
x = 1,000 | 100
x = 1, 000 | 1000
x = 1,000, 2 | 1000
x = 1,00 | 100
x = 0,123 | 123
(1,000) | 1000
[1,000] | 1000
12 34 | 1234
1 23 | 123
1\ 23 | 123
1 2345 | 12345
1,2345 | 12345
1,23 | 123
1.234 | 1234
1 234 | 234
0 5 | 5
""",
    "units": r"""
5 cm | 6
5 cm | 5 m
5\text{ cm} | 5\text{ m}
5\text{ cm}^2 | 5\text{ cm}^3
5 hours | 5 minutes
5\text{ million} | 5
5 thousand | 5
5\text{ dozen} | 5
5\text{ squared} | 5
5\text{ factorial} | 5
5\text{ less than }7 | 5
5 percent | 500
5C | 5
""",
    "letters of a choice": r"""
C. | D
(C) | D
\text{(C) } 5 | D
(C) or (D) | C
(C), (D) | C
C or D | C
A, C | A, B
A, C | A
5C | C
CD | C
\text{not C} | C
""",
    "other numbers": r"""
1 1/2 | 1/2
1 1/2 | 11/2
11/2 | 1 1/2
½ | 2
0.\overline{3} | 3
0.1\overline{6} | 0.16
0.1\overline{6} | 1/3
5 \choose 2 | 5
5 \choose 2 | 20
-5 | 5
5- | -5
4!5 | 5
5? | 5
4\text{ 5} | 5
5 | 5\pi
5\% | 500
5x | 5
a=5 | b=5
x_5 | 5
5_7 | 5
x² | x^3
√2 | 2
2^{100001} | 4^{50000}
""",
    "nothing": r"""
\text{} | 5
\boxed{} | 5
. | 5
= | 5
: | 5
\frac{}{} | 5
\text{cm} | 5
\$ | 5
""",
}


def classes() -> dict[str, list[tuple[str, str, bool]]]:
    """(given, ground truth, whether they are equal) by class."""
    found = {}
    for equal, groups in ((True, SAME), (False, OTHER)):
        for name, block in groups.items():
            lines = (line.rpartition(" | ") for line in block.strip("\n").split("\n"))
            found[f"{'same' if equal else 'other'}: {name}"] = [
                (given, truth, equal) for given, _, truth in lines
            ]
    return found
