r"""Pairs of an answer and a ground truth, labelled by hand as mathematically equal or not."""

EQUAL = r"""
1 | 1
1.0 | 1
01 | 1
+7 | 7
-0 | 0
- 5 | -5
1,000 | 1000
1,234,567 | 1234567
12{,}345 | 12345
1\,000 | 1000
0.50 | 0.5
.5 | 0.5
1/2 | 0.5
\frac{1}{2} | 0.5
\frac12 | 0.5
\dfrac{1}{2} | \frac{1}{2}
\tfrac{3}{4} | 0.75
\frac{2}{4} | \frac{1}{2}
-\frac{1}{2} | \frac{-1}{2}
\frac{1}{-2} | -\frac{1}{2}
-\frac12 | -0.5
3\frac{1}{2} | 3.5
50\% | 50
50\% | 0.5
25 \% | 25\%
$42$ | 42
\$5 | 5
5\text{ dollars} | 5
12\text{ cm} | 12
7\ \text{apples} | 7
\text{42} | 42
x=5 | 5
x = -3 | -3
y=\frac{1}{3} | \frac{1}{3}
2^3 | 8
2^{10} | 1024
10^{-2} | 0.01
3\times 10^2 | 300
3\cdot 10^{2} | 300
1.5\times10^{3} | 1500
\sqrt{4} | 2
\sqrt{2} | 2^{1/2}
\sqrt 2 | \sqrt{2}
\frac{1}{\sqrt{2}} | \frac{\sqrt{2}}{2}
\sqrt{12} | 2\sqrt{3}
\sqrt{8} | 2\sqrt{2}
\sqrt[3]{8} | 2
\sqrt[3]{27} | 3
\sqrt[3]{x} | x^{1/3}
\pi | \pi
2\pi | \pi + \pi
\frac{\pi}{2} | 0.5\pi
\frac{2\pi}{4} | \frac{\pi}{2}
x+1 | 1+x
x^2-1 | (x-1)(x+1)
(x+1)^2 | x^2+2x+1
2(x+y) | 2x+2y
x\cdot y | yx
ab | ba
\frac{x}{2} | 0.5x
\frac{a+b}{2} | \frac{a}{2}+\frac{b}{2}
x(x+2) | x^2+2x
\frac{x^2}{x} | x
(a-b)(a+b) | a^2-b^2
-(x-1) | 1-x
4x^3 | 4 x^{3}
x^{-1} | \frac{1}{x}
e^{x} | e^x
e^{2x} | (e^x)^2
\ln(e) | 1
\log_{2}(8) | 3
\sin(0) | 0
\cos(0) | 1
\sin^2(x)+\cos^2(x) | 1
\tan(\frac{\pi}{4}) | 1
\sin(\frac{\pi}{6}) | \frac{1}{2}
(1,2) | (1, 2)
(1,2,3) | ( 1, 2, 3 )
(\frac{1}{2}, 3) | (0.5, 3)
\left(1,2\right) | (1,2)
[1,2] | [1, 2]
\left[0,1\right) | [0,1)
(-\infty,3) | (-\infty, 3)
\{1,2\} | \{2,1\}
\{1, 2, 3\} | \{3, 2, 1\}
\{\frac12\} | \{0.5\}
1,2,3 | 1, 2, 3
\{a,b\} | \{b,a\}
(-\infty,1)\cup(2,\infty) | (-\infty, 1) \cup (2, \infty)
x>3 | x > 3
x\ge 3 | x\geq 3
x\leq 2 | x \le 2
x < 5 | x<5
\infty | \infty
-\infty | -\infty
i | i
1+i | i+1
(1+i)^2 | 2i
2i \cdot i | -2
\begin{pmatrix}1&2\\3&4\end{pmatrix} | \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}
\begin{pmatrix}\frac12\\1\end{pmatrix} | \begin{pmatrix}0.5\\1\end{pmatrix}
\begin{bmatrix}1\\2\end{bmatrix} | \begin{pmatrix}1\\2\end{pmatrix}
\binom{5}{2} | 10
5! | 120
\frac{10!}{8!} | 90
|{-3}| | 3
|-3| | 3
\left|x\right| | |x|
90^\circ | 90
90^{\circ} | 90
\text{A} | A
\text{(B)} | B
\mathrm{C} | C
\text{yes} | yes
\frac{3}{7} | 3/7
\frac{22}{7} | 3+\frac{1}{7}
0.333333 | 0.333333
100000000 | 10^8
1e3 | 1000
16\sqrt{3}+8 | 8+16\sqrt{3}
\frac{5\sqrt{3}}{3} | \frac{5}{\sqrt{3}}
\frac{1}{3}+\frac{1}{6} | \frac{1}{2}
\frac{-3}{-4} | \frac{3}{4}
"""

DIFFERENT = r"""
1 | 2
-1 | 1
0 | 1
10 | 100
1,000 | 100
1000 | 10000
0.5 | 0.05
0.5 | 0.6
1.01 | 1.1
3.14 | \pi
3.1416 | \pi
22/7 | \pi
\frac{1}{2} | 2
\frac{1}{2} | \frac{1}{3}
\frac{2}{1} | \frac{1}{2}
\frac{3}{4} | 0.74
-\frac{1}{2} | \frac{1}{2}
3\frac{1}{2} | \frac{3}{2}
50\% | 5
5\text{ dollars} | 6
x=5 | 6
2^3 | 6
2^{10} | 1000
10^2 | 1000
3\times 10^2 | 3000
\sqrt{2} | 2
\sqrt{4} | 4
\sqrt{12} | 3\sqrt{2}
\sqrt[3]{8} | 3
\frac{1}{\sqrt{2}} | \sqrt{2}
2\pi | \pi
\pi^2 | 2\pi
x+1 | x-1
x | y
x^2 | 2x
(x+1)^2 | x^2+1
x^2-1 | (x-1)^2
2(x+y) | 2x+y
\frac{a}{b} | \frac{b}{a}
a-b | b-a
x^{-1} | -x
e^{x} | x^e
e^x | e
\ln(2) | 2
\log_{2}(8) | 2
\sin(x) | \cos(x)
\sin(0) | 1
\cos(0) | 0
\tan(x) | \sin(x)
(1,2) | (2,1)
(1,2) | (1,3)
(1,2,3) | (1,2)
(0,1) | [0,1]
[0,1) | (0,1]
[1,2] | [1,3]
(-\infty,3) | (3,\infty)
(-\infty,3) | (-\infty,3]
\{1,2\} | \{1,3\}
\{1,2\} | \{1,2,3\}
\{1\} | \{2\}
1,2,3 | 1,2
1,2 | 1,3
x>3 | x<3
x>3 | x>4
x\ge 3 | x>3
x\leq 2 | x\geq 2
\infty | -\infty
\infty | 0
i | -i
1+i | 1-i
(1+i)^2 | 2
i | 1
\begin{pmatrix}1&2\\3&4\end{pmatrix} | \begin{pmatrix}1&3\\2&4\end{pmatrix}
\begin{pmatrix}1\\2\end{pmatrix} | \begin{pmatrix}2\\1\end{pmatrix}
\begin{pmatrix}1\\2\end{pmatrix} | \begin{pmatrix}1\\3\end{pmatrix}
\binom{5}{2} | 20
5! | 24
|-3| | -3
90^\circ | 180
\text{A} | B
\text{(B)} | C
\text{yes} | no
\text{even} | odd
\frac{3}{7} | \frac{7}{3}
100000000 | 10^9
16\sqrt{3} | 16
16\sqrt{3}+8 | 16\sqrt{3}-8
\frac{5\sqrt{3}}{3} | 5\sqrt{3}
\frac{1}{3} | 0.3
\frac{2}{3} | 0.6
forty-two | 42
unknown | 7
 | 0
? | 3
\frac{ | 1
{{{ | 1
\emptyset | 0
\text{no solution} | 0
\text{none} | 1
123456789 | 123456788
0.1 | 0.11
1.0001 | 1
7 | \frac{7}{2}
2x+3 | 2x-3
12:30 | 12
"""


def pairs() -> list[tuple[str, str, bool]]:
    """Return (given, ground truth, True if equal)."""
    found = []
    for block, equal in ((EQUAL, True), (DIFFERENT, False)):
        for line in block.strip("\n").split("\n"):
            given, _, truth = line.rpartition(" | ")
            found.append((given, truth, equal))
    return found
