"""Arithmetic as text: steps written out, the expression they amount to, and a parser for what a model wrote.

A program is a sequence of steps (i, op, j); i and j index the given numbers followed by the values of earlier steps.
"""

import ast
import itertools
import operator
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction

Steps = Sequence[tuple[int, str, int]]
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}
EXACT = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}

MAX_LENGTH, MAX_DEPTH = 100, 16  # characters, brackets: bounds the size of the numbers and of the tree


def run_steps(numbers: Sequence[int], steps: Steps, slips: Mapping[int, int] | None = None) -> list[int]:
    """The numbers, then the value of each step; `slips[k]` is added to that of step k. Division is exact or floors."""
    values = list(numbers)
    for k, (i, op, j) in enumerate(steps):
        values.append(OPERATIONS[op](values[i], values[j]) + (slips or {}).get(k, 0))
    return values


def written(values: Sequence[int], steps: Steps) -> list[str]:
    """Each step as text, "3*7=21", with the values that `run_steps` returned."""
    results = values[len(values) - len(steps) :]
    return [f"{values[i]}{op}{values[j]}={result}" for (i, op, j), result in zip(steps, results, strict=True)]


def expression(numbers: Sequence[int], steps: Steps) -> str:
    """The last step over the given numbers, with brackets round each earlier step: "(3*7)+5"."""
    texts = [str(number) for number in numbers]
    for i, op, j in steps:
        a, b = (texts[k] if k < len(numbers) else f"({texts[k]})" for k in (i, j))
        texts.append(f"{a}{op}{b}")
    return texts[-1]


def parse_value(text: str) -> tuple[Fraction, tuple[int, ...]] | None:
    """The exact value of an arithmetic expression and the whole numbers in it, as written; None if it has none.

    Python parses it into a tree, which is evaluated over fractions; nothing is ever run as code.

        expression = term {("+" | "-") term}     term = factor {("*" | "/") factor}
        factor = number | "(" expression ")"     number = "0" | ASCII digits that begin with 1 to 9

    Spaces may stand between these. Anything else gives None: signs before a number, division by zero, other
    characters (unicode digits too), more than MAX_LENGTH characters or MAX_DEPTH nested brackets.
    """
    depths = itertools.accumulate((char == "(") - (char == ")") for char in text)
    if len(text) > MAX_LENGTH or max(depths, default=0) > MAX_DEPTH or re.search(r"[^-+*/() 0-9]|\b0[0-9]", text):
        return None
    try:
        value = _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None
    return value, tuple(map(int, re.findall("[0-9]+", text)))


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value):
            return Fraction(value)
        case ast.BinOp(left, op, right) if type(op) in EXACT:
            return EXACT[type(op)](_value(left), _value(right))
    raise ValueError(ast.dump(node))  # a sign, a power, a call
