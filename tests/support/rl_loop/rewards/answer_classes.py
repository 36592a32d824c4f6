r"""Pairs of an answer and a ground truth, labelled by hand, by kind of similarity.

``labelled_answers`` covers mathematical equality. Here, the answer is the same number, letter or
expression in another notation, or looks like the ground truth and differs. Where people would
disagree, a comment names the decision.
"""

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
    # math-verify: a list may mean a point or a set, and a single value is a set with one element
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
    # like math-verify: 5 % may mean 5 or 0.05
    "percent": r"""
5\% | 5
5\% | 0.05
5 percent | 5
0.5\% | 0.005
12.5\% | \frac{1}{8}
""",
    # like math-verify: a decimal with six or more places is rounded, so values that round to it
    # match
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
    "read whole and equal": r"""
\log_2 8 | 3
\log_{2}{8} | 3
\log 100 | 2
\ln e^2 | 2
x \equiv 2 \pmod 5 | x \equiv 2 \pmod{5}
x \equiv 7 \pmod 5 | x \equiv 2 \pmod 5
2 \pmod 5 | x \equiv 2 \pmod 5
x ≡ 2 (mod 5) | x \equiv 2 \pmod{5}
101_2 | 101_{2}
101_{10} | 101
\gcd(a,3) | \gcd(3,a)
\gcd(12,18) | 6
1, 2, \ldots, n | 1,2,\dots,n
\begin{cases} x+1 & x>0 \\ 2 & x \le 0\end{cases} | \begin{cases} 1+x & \text{if } x>0 \\ 2 & \text{if }x\le0\end{cases}
x<1 \text{ or } x>3 | x>3 \text{ or } x<1
\{x : x > 3\} | \{x \mid x > 3\}
x > 3 | 3 < x
x>3 | (3,\infty)
(3,\infty) | x>3
1<x\le 2 | (1,2]
x \in (1,2) | (1,2)
2x > 6 | x > 3
-x < -3 | x > 3
2x+4y=6 | x+2y=3
y = 2x+1 | y=1+2x
y-2x-1=0 | y = 2x+1
5 | a_2=5
\sqrt{2}\sqrt{3}-\sqrt{6} | 0
x = 2+3 = 5 | x=5
\frac{1}{3} \approx 0.333 | 1/3
x \approx 3.14 | 3.14
\pm 5 | 5, -5
x=\pm 5 | 5, -5
x=-5 \text{ or } x=5 | \pm 5
\frac{-b \pm \sqrt{b^2-4ac}}{2a} | \frac{-b \pm \sqrt{b^2-4ac}}{2a}
1\pm\sqrt{2} | 1-\sqrt2, 1+\sqrt2
\begin{pmatrix}1 & 2\\3 & 4\end{pmatrix} | \begin{bmatrix}1&2\\3&4\end{bmatrix}
\begin{pmatrix}1\\2\end{pmatrix} | (1,2)
\sin 30^\circ | \frac12
\cos\frac{\pi}{3} | 1/2
\sin^2 x + \cos^2 x | 1
(x+1)^2 | x^2+2x+1
\frac{x^2-1}{x-1} | x+1
2\sin x\cos x | \sin 2x
\sqrt{8} | 2\sqrt{2}
\frac{1}{\sqrt 2} | \frac{\sqrt2}{2}
\sqrt[3]{8} | 2
e^{i\pi} | -1
3+4i | 4i+3
\frac{n(n+1)}{2} | \frac{n^2+n}{2}
\sum_{k=1}^{n} k | \frac{n(n+1)}{2}
n! | n\cdot(n-1)!
|x-1| | |1-x|
[0,1]\cup[2,3] | [2,3]\cup[0,1]
(-\infty, 1) \cup (3, \infty) | (-\infty,1)\cup(3,\infty)
\mathbb{R} \setminus \{0\} | \mathbb{R}\setminus\{0\}
\{1,2,3\} | \{3,2,1\}
(1, -2, \frac12) | (1,-2,0.5)
5\text{ red apples} | 5\text{ apples}
1\text{ point} | 1
5\text{ square feet} | 5\text{ ft}^2
5\text{ meters per second} | 5\text{ m/s}
60\text{ mph} | 60\text{ miles per hour}
\$5 | 5\text{ dollars}
45^\circ | 45
45^\circ | 45 \text{ degrees}
\frac{\pi}{4}\text{ radians} | \frac{\pi}{4}
\text{Sunday} | Sunday
3x^2y | 3yx^2
\frac{a}{b} | a/b
2^{n+1} | 2\cdot 2^n
x^{-1} | \frac1x
\frac{3\pi}{4} | 0.75\pi
\overline{AB} | \overline{AB}
\text{(A)} | A
a_{n+1} | a_{n+1}
f(x)=x+1 | x+1
\left(\frac{3}{5}, \frac{8}{3}\right] | \left(\frac35,\frac83\right]
x=1,y=2 | (1,2)
(1,2) | x=1, y=2
x=1,y=2 | y=2, x=1
f(x)=\frac{1}{x} | f(x) = x^{-1}
\frac{1}{2}\ln 3 | \ln\sqrt{3}
\arctan 1 | \frac{\pi}{4}
2\sqrt{3}\text{ cm}^2 | 2\sqrt3
1.5 \times 10^3 | 1500
3 \frac{1}{2} | 3.5
4! | 24
\binom{n}{2} | \frac{n(n-1)}{2}
-\frac{1}{2} | \frac{-1}{2}
\lfloor 3.7 \rfloor | 3
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
    # an exact ground truth requires an exact answer
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
    # a parser that reads only a known part, or rounds, would accept these
    "read in part": r"""
\frac{1}{2006!} | \frac{1}{2004!}
x \equiv 3 \pmod 5 | x \equiv 2 \pmod 5
x \equiv 2 \pmod 7 | x \equiv 2 \pmod 5
2 \pmod 7 | 2 \pmod 5
2 | x \equiv 2 \pmod 5
x \equiv 2 \pmod 5 | 2
101_3 | 101_2
101_2 | 101
101 | 101_2
101_{2} | 5
\gcd(a,3) | \gcd(a,2)
30' | 30^\circ
1, 3, 5, \ldots, 2n-1 | 1, 2, \ldots, n
1, 2, \ldots, n | 1,2,3
\begin{cases} x+1 & x>0 \\ 2 & x \le 0\end{cases} | \begin{cases} x-1 & x>0 \\ 2 & x \le 0\end{cases}
\begin{cases} x+1 & x>1 \\ 2 & x \le 1\end{cases} | \begin{cases} x+1 & x>0 \\ 2 & x \le 0\end{cases}
3 \lor 4 | 4
3 \cup 4 | 4
3 \to 4 | 4
3 | 4 | 4
3 \mid 4 | 4
3 ∨ 4 | 4
3 \approx 4 | 3
3 \approx 4 | 4
\pi \approx 3.14 | 3.14
5 \pm 0.1 | 5
f(2) | f(3)
f(2)=5 | f(3)=5
f(2)=5 | 5
a_2=5 | 5
a_2=5 | a_3=5
x \equiv 2 \pmod 5, x \equiv 3 \pmod 7 | x \equiv 2 \pmod 5
x \equiv 2 \pmod 5 \text{ or } x \equiv 3 \pmod 5 | x \equiv 3 \pmod 5
10^{-50} | 0
\sin(10^{-50}) | 0
x+1=5 | 5
x_1 | x_2
\sum_{k=1}^{n} k | \sum_{k=1}^{n} k^2
\lfloor x \rfloor | \lceil x \rceil
5 € | \$5
€5 | £5
5\text{ apples} | 5\text{ oranges}
5\text{ m/s} | 5\text{ m s}
5\text{ m}^2 | 5\text{ m}
5^\circ C | 5^\circ F
x<1 \text{ or } x>3 | x<1 \text{ and } x>3
\{x : x > 3\} | \{x : x > 4\}
\{x \mid x > 3\} | \{x \mid x \ge 3\}
\begin{pmatrix}1 & 2\\3 & 4\end{pmatrix} | \begin{pmatrix}1 & 2\\4 & 3\end{pmatrix}
[0,1) | [0,1]
(0,1) | [0,1]
x > 3 | x \ge 3
3 < x < 5 | 3 < x < 6
\log_2 8 | 4
\log_3 8 | \log_2 8
2^{10} | 1025
10^{-30} | 10^{-31}
x + 10^{-50} | x + 10^{-51}
\sqrt{2}+\frac{1}{2006!} | \sqrt{2}+\frac{1}{2004!}
e^{-1000} | e^{-1001}
n! | (n+1)!
n!! | n!
5\text{ hundred} | 5
\overline{AB} | \overline{AC}
12{:}30 \text{ PM} | 12{:}30 \text{ AM}
1:2 | 2:1
\text{between 3 and 5} | 5
3 to 5 | 5
3-5 | 5
\frac{3}{4}\text{ of } 8 | 8
5 \text{ more than } 3 | 3
|x| | x
\sqrt{x^2} | x
x=3 \text{ and } y=4 | 4
a \mid 5 | 5
3 \parallel 4 | 4
3 \oplus 4 | 4
3 \otimes 4 | 4
3 \circ 4 | 4
3 ; 4 | 4
3 & 4 | 4
3 \\ 4 | 4
3 \Rightarrow 4 | 4
3 \therefore 4 | 4
3 \mapsto 4 | 4
3 \sim 4 | 4
3 @ 4 | 4
3 # 4 | 4
3 → 4 | 4
3 \quad 4 | 4
3 \text{ then } 4 | 4
3 - - 4 | 4
3 … 4 | 4
3 \ldots 4 | 4
3 \not= 4 | 4
3 ? 4 | 4
3 ~ 4 | 4
3 ^ 4 | 4
3 _ 4 | 4
3 ! 4 | 4
3 vs 4 | 4
3 \backslash 4 | 4
3 \setminus 4 | 4
3 \% 4 | 4
"4" | 44
\text{No} | \text{on}
5 \bmod 3 | 3
17 \bmod 5 | 5
2.5.3 | 2.5
1/2/3 | 1/2
\binom{5}{2} | \binom{5}{1}
P(X=2)=0.5 | 0.5
x^2=25 | 25
\max(1,2) | \max(1,3)
\operatorname{lcm}(a,2) | \operatorname{lcm}(a,3)
AB=5, CD=6 | 6
\text{Point A at }(1,2) | (1,2)
A(1,2) | (1,2)
3 \times 10^{5} | 10^5
\sin^2 x | \sin x
\int_0^1 x dx | \int_0^2 x dx
\lim_{x\to 0} x | \lim_{x\to 1} x
\frac{dy}{dx} | \frac{dx}{dy}
3\sqrt{2} | 2\sqrt{3}
2m | 2
5k | 5
""",
}


def classes() -> dict[str, list[tuple[str, str, bool]]]:
    """Return (given, ground truth, True if equal) by class."""
    found = {}
    for equal, groups in ((True, SAME), (False, OTHER)):
        for name, block in groups.items():
            lines = (line.rpartition(" | ") for line in block.strip("\n").split("\n"))
            found[f"{'same' if equal else 'other'}: {name}"] = [
                (given, truth, equal) for given, _, truth in lines
            ]
    return found
