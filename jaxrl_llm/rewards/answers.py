r"""Mathematical answers against a gold, by math-verify behind guards.

Whole and decimal numbers and fractions are compared here, exactly; the rest goes to math-verify as `\boxed{…}`, once
this module has refused what it would wrongly accept and rewritten what it would not understand. docs/rewards.md has
the rates of false verdicts.

Both parsing and comparing can take for ever, so that a training run wants them in workers: `isolated(answers.reward)`.
"""

import ast
import contextlib
import itertools
import logging
import math
import re
from fractions import Fraction
from functools import cache, lru_cache, partial
from typing import Any

from jaxrl_llm.rewards.extraction import FORMS, extract
from jaxrl_llm.types import EOS, STOP, Prompt, Reward, expect

MAX_LENGTH = 2000  # characters of an answer; a longer one is compared with nothing


def reward(
    prompt: Prompt,
    text: str,
    finish: str,
    *,
    forms: tuple[str, ...] = FORMS,
    last: bool = False,
    percent: bool = True,
    rounding: int = 6,
    evaluated: bool = True,
    truncated: bool = False,
) -> Reward:
    r"""1 if the response's final answer equals `prompt.answer` or one of its alternatives, else 0.

    forms, last: which answers are found, see `extraction.extract`;  percent: 5 % equals 5 too, not only 0.05;
    rounding: decimals to which a decimal fraction must agree;  evaluated: where the gold is a number, sums, powers,
    integrals and the like of the same value are wrong;  truncated: a response that did not end by itself may be right.
    A list as gold, or text that is one in Python, holds alternatives.
    """
    answer = extract(text, forms, last)
    if answer is None or (finish not in (EOS, STOP) and not truncated):
        return Reward(0.0, False, answer and answer[:200])
    correct = any(equal(gold, answer, percent, rounding, evaluated) for gold in alternatives(prompt.answer))
    return Reward(float(correct), correct, answer[:200])


def check_gold(answer: Any) -> None:
    """Raises ValueError with the reason if one of a gold's alternatives does not parse or does not equal itself."""
    golds = alternatives(answer)
    expect(golds, "answer", answer, "an answer")
    for gold in golds:
        expect(plain(gold), "answer", gold, "an answer")
        expect(len(gold) <= MAX_LENGTH, "answer", f"{gold[:40]}…", f"at most {MAX_LENGTH} characters")
        text = plain(gold)
        closed = text.count("{") == text.count("}")
        sound = closed and (_number(text) is not None or _DOTS.search(text) or _verify(text, text, 6))
        expect(sound, "answer", gold, "an answer that math-verify parses and finds equal to itself")


def alternatives(answer: Any) -> tuple[str, ...]:
    """Golds of which one suffices, as text."""
    if isinstance(answer, str) and re.fullmatch(r"\s*\[\s*['\"].*['\"]\s*\]\s*", answer, re.DOTALL):
        with contextlib.suppress(ValueError, SyntaxError):  # an interval, a matrix
            answer = ast.literal_eval(answer.strip())
    return tuple(str(a).strip() for a in (answer if isinstance(answer, list | tuple) else (answer,)) if a is not None)


_USUAL = r"""
2x^2-\frac{3}{4}x+5y;(x+1)(y-2)=0;3\sqrt{2}+\sqrt[3]{5};-\frac{\sqrt{3}}{2};2\pi r;e^{-2x}+10^5;[1,2.5)\cup(3,\infty)
\left(3,-\frac{1}{2},4\right);(1,2),(3,4);\{1,-2,3\};1,2,3;x=1,y=-2;x\in[-2,7];-1\le x<2;x\ge 3;\pm\sqrt{5};5\%;12!
\sin^2(x)+\cos 2\theta;\log_2 8+\ln x;|x-3|;\text{Evelyn};\begin{pmatrix}1&-2\\3&\frac{1}{2}\end{pmatrix};f(x)=x^{n+1}
\sum_{k=1}^{n}k^2;\int_0^1 x dx;a_1+a_{n-1};\binom{n}{2};2+3 i;(x-1)^2+(y+2)^2=4;\frac{a+b}{c-d};0.25;x \cdot y/3;p:q
"""


def warm_up() -> None:
    """Before workers are forked: the parser learns formulas as it meets them, a worker's first ones take seconds."""
    for text in re.split(r"[;\n]", _USUAL.strip()):
        _verify(text, f"{text}+1", 6)


# --- the verdict ----------------------------------------------------------------------------------------------------


def equal(gold: str, answer: str, percent: bool = True, rounding: int = 6, evaluated: bool = True) -> bool:
    """Whether an answer is the gold. Not symmetric: what the gold leaves out, as a unit, the answer may say."""
    if len(answer) > max(MAX_LENGTH, 2 * len(gold)):
        return False
    (gold, unit), (answer, said) = _unit(plain(gold)), _unit(plain(answer))
    if unit and said is not None and unit != said or not gold or not answer:
        return False
    if "%" in gold + answer and not percent:
        gold, answer = (re.sub(r"([\d.]+)\s*\\?%", r"\\frac{\1}{100}", s) for s in (gold, answer))
    tight = [re.sub(r"(?<!\w)\s+|\s+(?!\w)|\\[,;! ]", "", _DOTS.sub("…", s)) for s in (gold, answer)]
    if tight[0] == tight[1] or "…" in tight[0] + tight[1]:  # math-verify would drop the dots
        return tight[0] == tight[1]
    of, last = _number(_assigned(gold, True)), _assigned(answer)
    if of is not None and (number := _number(last)) is not None:
        return _close(of, number, "." in gold + last, rounding)
    one, two = _base(_assigned(gold, True)), _base(last)
    if one or two:  # math-verify would drop the bases; an answer may leave its base out
        return one == two if one and two else one[0] == answer if one else two == (gold, 10)
    letters = set(_LETTER.findall(gold))
    if letters & {c.upper() for c in letters if c.islower()}:  # math-verify takes N for n
        gold, answer = (_LETTER.sub(lambda m: m[0] if m[0].islower() else f"{m[0]}_{{0}}", s) for s in (gold, answer))
    if _unbounded(answer, gold) or _refused(gold, answer, evaluated):
        return False
    return _verify(gold, answer, rounding)


def _close(a: Fraction, b: Fraction, decimal: bool, rounding: int) -> bool:
    """Equal, or to `rounding` decimals if one is a decimal fraction; but not all that is tiny is one number."""
    small = decimal and round(a, rounding) == round(b, rounding)
    return a == b or (small and abs(a - b) <= max(abs(a), abs(b)) / 10 ** max(rounding - 2, 1))


_LITERAL = re.compile(r"[-+]?(?:[\d.,;:/\s(){}\[\]]|\\[{}%,]|%|\^\{?\\circ\}?|\\circ|\\pm|\\[dt]?frac|-(?=[\d.\\]))+")
_WORK = re.compile(
    r"\\(?:sum|int|prod|lim|binom|sqrt|cdot|times|div|log|ln|sin|cos|tan|exp|gcd|min|max)(?![a-zA-Z])"
    r"|[+*!÷×]|[\d)}]\s*-|\^(?!\{?\\circ)"
)
_LIMITS = re.compile(r"\\(?:sum|i*int|oint|prod|lim)(?![a-zA-Z])")
_DOTS = re.compile(r"\\[lc]?dots[cbmio]?(?![a-zA-Z])|\.\.\.|…")
_BASE = re.compile(
    r"\(?\{?(?:\\text\s*\{)?(\d\w*)\}?\)?\s*_\s*\{?\s*(?:\\text\s*\{)?\s*(?:base\s*)?(\d{1,3}|[a-z]+)\s*\}*"
)
_LETTER = re.compile(r"(?<![a-zA-Z\\])[a-zA-Z](?![a-zA-Z_])")
_BASES = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")


def _refused(gold: str, answer: str, evaluated: bool) -> bool:
    """What math-verify would accept and is wrong."""
    listed = [p.strip() for p in answer.strip("\\{}() ").split(",")]
    if "(" not in answer and len(set(listed)) < len(listed) != gold.count(",") + 1:  # 7, 7 would be the set of 7
        return True
    brackets = [s[:2] == "\\{" for s in (gold, answer)]
    if brackets[0] != brackets[1] and "," in gold and "," in answer:
        other = answer if brackets[0] else gold
        if other[0] in "([" and other[-1] in ")]" and _one_group(other):
            return True
    if _LIMITS.search(answer) and not _LIMITS.search(gold):
        return True
    number, last = _scientific(_assigned(gold, True)), _scientific(_assigned(answer))
    exact = "." in number and re.search(r"\\(?:sqrt|pi|ln|log|exp|sin|cos|tan)|e\^", last)  # of a gold that is rounded
    return evaluated and bool(_LITERAL.fullmatch(number)) and bool(_WORK.search(last)) and not exact


_OPERATOR = re.compile(r"\\[a-zA-Z]+|[-+*/^_!=|&,]")
_POWER = re.compile(r"(?<![\w.])(\d{1,9})\s*\^\s*(?:\{\s*(\d{1,4})\s*\}|(\d))")
_VAST = re.compile(r"\^[\s{(-]*(?:\d{5}|\d+\s*\^[\s{(-]*\d)|\d{5,}\s*!|\\[dt]?binom\s*\{\s*\d{5}|\d[eE][-+]?\d{4}")


def _unbounded(answer: str, gold: str) -> bool:
    r"""Whether an answer is so much larger than the gold that math-verify may not come to an end with it.

    That is one with 40 operators more than four times the gold's, or, unless the gold is such a one too, a tower of
    four powers, or a number beyond what is computed: 9^{9^9}, 10^8!, (x+1)^{10^6}.
    """
    if len(_OPERATOR.findall(answer)) > 40 + 4 * len(_OPERATOR.findall(gold)):
        return True
    return (_tower(answer) > 3 or _vast(answer)) and not (_tower(gold) > 3 or _vast(gold))


def _tower(text: str) -> int:
    """How many powers stand in each other's exponents."""
    powers, most = [], 0
    for sign in re.findall(r"\^\s*[{(]?|[{}()]", text):
        if sign in "})":
            powers and powers.pop()
        elif sign != "^":
            powers.append(sign[0] == "^")
            most = max(most, sum(powers))
    return most


def _vast(text: str) -> bool:
    """Whether an exponent, or the number of a factorial or a binomial, has five digits, powers of numbers evaluated."""

    def value(found: re.Match) -> str:
        n, power = int(found[1]), int(found[2] or found[3])
        return str(n**power) if power * math.log10(max(n, 1)) < 15 else found[0]

    before = None
    while before != text:
        before = text
        text = re.sub(r"\(\s*(\d+)\s*\)", r" \1 ", _POWER.sub(value, text))
        text = re.sub(r"(?<!\d)(\d)!", lambda digit: str(math.factorial(int(digit[1]))), text)
    return bool(_VAST.search(text))


def _base(text: str) -> tuple[str, int] | None:
    """The digits and the base of 4343_6."""
    if found := _BASE.fullmatch(text):
        name = found[2]
        base = int(name) if name.isdecimal() else _BASES.index(name) + 2 if name in _BASES else 0
        return (found[1].upper(), base) if base else None
    return None


def _one_group(text: str) -> bool:
    """Whether the first bracket is closed by the last character and no earlier."""
    return 0 not in list(itertools.accumulate((c in "([") - (c in ")]") for c in text))[:-1]


# --- as it is written -----------------------------------------------------------------------------------------------

_SIGNS = {
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": r"\div ", "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ",
    "≥": r"\ge ", "≠": r"\ne ", "±": r"\pm ", "°": r"^\circ ", "∪": r"\cup ", "∩": r"\cap ", "∅": r"\emptyset ",
    "∈": r"\in ", "½": r"\frac12 ", "²": "^2", "³": "^3", "√": r"\sqrt ", "\u00a0": " ", "\u202f": " ", "％": "%",
}  # fmt: skip
_REWRITES = [(re.compile(old), new) for old, new in [
    (r"\\(?:left|right|displaystyle|[Bb]igg?[lr]?)(?![a-zA-Z])|\\!\s*", ""),
    (r"\\(?:textbf|textit|textrm|textnormal|mathrm|mathbf|mbox|rm)(?=\s*\{)", r"\\text"),
    (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
    (r"(?<=\d)\{,\}(?=\d)", ","),
    (r"\s+(?=[,;])", ""),
    (r"\\(?:varnothing|O)(?![a-zA-Z])|\\text\s*\{\s*(?:the )?empty set\s*\}", r"\\emptyset "),
    (r"\\frac\s*(\\[a-zA-Z]+)\s*(\d)", r"\\frac{\1}{\2}"),
    (r"(?<=\d)i(?![a-zA-Z])", " i"),
    (r"\\([dt]?binom)\s*(\d)\s*(\d)", r"\\binom{\2}{\3}"),
    (r"\\sqrt\s*(?:\{\s*-\s*1\s*\}|-1\b)", " i"),
    (r"(?<![\w\\])(\d+(?:\.\d+)?)[eE]([+-]?\d+)(?![\w.])", r"\1\\times 10^{\2}"),
    (r"\\text\s*\{\s*(?:percent|pct)\s*\}|\b(?:percent|pct)\b", r"\\%"),
    (r"\\(?:geqslant)", r"\\ge "), (r"\\(?:leqslant)", r"\\le "),
]]  # fmt: skip


def plain(text: str) -> str:
    """An answer without what says nothing: dollars and brackets of formulas, full stops, spaces, styles."""
    text = "".join(_SIGNS.get(c, c) for c in text).strip().strip("*").strip()
    for old, new in _REWRITES:
        text = old.sub(new, text)
    before = None
    while before != text:
        before = text = text.strip()
        text = re.sub(r"(?:\\[,;: ]|\\q?quad|[\s.,;:])+$", "", text) if not text.endswith("...") else text
        for left, right in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
            inner = text.removeprefix(left).removesuffix(right)
            if len(inner) == len(text) - len(left + right) and left not in inner.replace(r"\$", ""):
                text = inner.strip()
    return text.replace("$", "") if len(re.findall(r"(?<!\\)\$", text)) % 2 == 0 and "\\$" not in text else text


def _assigned(text: str, gold: bool = False) -> str:
    r"""Of `x = … = 3 \approx 3.01` what is not rounded and comes last; of a gold only if a name stands before it."""
    if re.search(r"[,;<>]|\\(?:le|ge|ne|text|in)(?![a-zA-Z])|\band\b|\bor\b", text):
        return text
    parts = [p.strip() for p in re.split(r"(?<![!\\:])=|\\approx|\\simeq|≈", text)]
    exact = [p.strip() for p in re.split(r"(?<![!\\:])=", re.split(r"\\approx|\\simeq|≈", text)[0])]
    if gold and not re.fullmatch(r"[|\\{}()\w:' ]*", parts[0]):
        return text
    return exact[-1] if len(exact) > 1 else parts[-1]


def _scientific(text: str) -> str:
    """Without a power of ten that belongs to a decimal number."""
    return re.sub(r"(?<=\d)\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*(?:\{\s*[-+]?\d+\s*\}|\d)", "", text)


_DECIMAL = r"(?:\d{1,3}(?:,\d{3}|\\,\d{3}|\s\d{3})+|\d+)?(?:\.\d+)?"
_NUMBER = re.compile(
    rf"([-+]?)\s*(?:(?P<whole>\d+)?\s*\\frac\s*(?:\{{\s*(-?\d+)\s*\}}|(\d))\s*(?:\{{\s*(\d+)\s*\}}|(\d))"
    rf"|({_DECIMAL})(?:\s*/\s*(\d+)|\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*(?:\{{\s*([-+]?\d{{1,3}})\s*\}}|(\d)))?)"
)


def _number(text: str) -> Fraction | None:
    r"""The value of -3, 1,000.5, 3/4, \frac34, 2\frac{1}{3} or 6.02\times 10^{23}; None for anything else."""
    found = len(text) <= 400 and _NUMBER.fullmatch(re.sub(r"^([-+]?)10\s*\^", r"\g<1>1\\times 10^", text))
    if not found or not re.search(r"\d", text):
        return None
    sign, whole, n, n1, d, d1, decimal, over, power, power1 = found.groups()
    if d or d1:
        value = Fraction(int(whole or 0)) + Fraction(int(n or n1), int(d or d1)) if int(d or d1) else None
    else:
        decimal = re.sub(r"[,\s\\]", "", decimal)
        if not decimal or over and not int(over):
            return None
        value = Fraction(decimal) / int(over or 1) * Fraction(10) ** int(power or power1 or 0)
    return value if value is None or sign != "-" else -value


_SAME = (
    "in inch inches|ft foot feet|cm centimeter centimetre|mm millimeter millimetre|m meter metre|km kilometer kilometre"
)
_SAME += "|g gram|kg kilogram|mg milligram|s sec second|min minute|h hr hour|dollar usd|cent ¢|degree deg circ|yd yard"
_SAME += "|mi mile|lb pound|oz ounce|l liter litre|ml milliliter millilitre|yr year|hz hertz|n newton|j joule|w watt"
_SAME += "|^2 square sq sq.|^3 cubic cu"
_UNITS = {word: group.split()[0] for group in _SAME.split("|") for word in group.split()} | {"unit": "", "units": ""}
_TEXT = r"\\text\s*\{[^{}]*\}"
_UNIT = re.compile(
    rf"(.*[\d)}}%])(?:\\[ ,;:]|~|\s)*((?:{_TEXT}|(?<=\s)[a-zA-Z./ ]*[a-zA-Z.]|(?<=\d)(?:cm|mm|km|kg|ft|mph|ml))"
    rf"(?:\s*[/^]\s*(?:\{{?-?\d\}}?|{_TEXT}))*)"
)
_NO_UNIT = re.compile(r".*\b(?:and|or|base|mod|if|for|when|where|not)\b.*|[a-z]?")


def _unit(text: str) -> tuple[str, str | None]:
    r"""A number or the like without its unit, and the unit: `18 dollars`, `\$18`, `15\text{ cm}^2`, `90^\circ`."""
    text = re.sub(r"^(-?)\s*(\\?\$|€|£)\s*(.*\d.*)$|^(.*\d)\s*(\\?\$|€|£)$", r"\1\3\4\\text{\2\5}", text)
    text = re.sub(r"(?<=[\d})])\s*\^\s*\{?\s*\\circ\s*\}?$", r"\\text{degree}", text)
    found = _UNIT.fullmatch(text)
    words = found and re.sub(r"\\text|[\\{}()~]", " ", found[2]).lower().strip()
    if not found or (_NO_UNIT.fullmatch(words) and "text" not in found[2]):
        return text, None
    tokens = re.findall(r"[a-z]+|[$€£¢]|[/^]\s*-?\d?", words)
    named = [_UNITS.get(t, _UNITS.get(t.removesuffix("s"), t.removesuffix("s"))).replace(" ", "") for t in tokens]
    unit = "".join(sorted(named, key=lambda n: n[:1] == "^")).replace("$", "dollar")
    return found[1].strip(), unit.rstrip("^23") and unit or None


# --- math-verify ----------------------------------------------------------------------------------------------------


@cache
def _library() -> tuple:
    """Parser, verifier and what their timeouts raise; those are off: they would count wall time, and by SIGALRM."""
    try:
        from latex2sympy2_extended import NormalizationConfig
        from math_verify import LatexExtractionConfig, parse, verify
        from math_verify.errors import TimeoutException
    except ImportError as error:
        raise ImportError(f"rewards.answers: {error}; expected pip install 'jaxrl_llm[data]'") from error
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # or it warns that its timeouts are off
    normal = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all")
    config = LatexExtractionConfig(boxed_match_priority=0, normalization_config=normal)
    read = partial(parse, extraction_config=[config], parsing_timeout=None, extraction_mode="first_match")
    return read, partial(verify, timeout_seconds=None, allow_set_relation_comp=True), TimeoutException


@lru_cache(4096)
def _parsed(text: str) -> list:
    """What math-verify reads, [] for nothing."""
    return _library()[0](rf"\boxed{{{text}}}")


def _verify(gold: str, answer: str, rounding: int) -> bool:
    _, verify, timeout = _library()
    try:
        one, two = _parsed(gold), _parsed(answer)
        equal = verify(one, two, float_rounding=rounding)
        return equal and ("%" in gold + answer or _same_size(one[0], two[0], rounding))
    except MemoryError:
        raise
    except (Exception, timeout):
        return False


def _same_size(gold: Any, answer: Any, rounding: int) -> bool:
    """Against its rounding: 2^{-99} is not 2^{-98}. What is no number passes."""
    from sympy import Abs, Expr, Float, N

    if not all(isinstance(e, Expr) and e.is_number for e in (gold, answer)):
        return True
    decimal = any(e.atoms(Float) for e in (gold, answer))
    gold, answer = (N(e.doit(), 30) for e in (gold, answer))
    largest = max(Abs(gold), Abs(answer))
    return bool(Abs(gold - answer) <= largest * (10.0 ** (2 - rounding) if decimal else 1e-12))
