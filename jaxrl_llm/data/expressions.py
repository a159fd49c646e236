"""Arithmetic as text: steps written out, the expression they amount to, and a parser for what a model wrote.

A program is a sequence of steps (i, op, j); i and j index the given numbers followed by the values of earlier steps.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from fractions import Fraction

Steps = Sequence[tuple[int, str, int]]
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}

MAX_LENGTH, MAX_DEPTH = 100, 16  # characters, brackets: bounds the size of the numbers and of the Python stack


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

    A recursive-descent parser over fractions; nothing is ever run as code.

        expression = term {("+" | "-") term}     term = factor {("*" | "/") factor}
        factor = number | "(" expression ")"     number = "0" | ASCII digits that begin with 1 to 9

    Spaces may stand between these. Anything else gives None: signs before a number, division by zero, other
    characters (unicode digits too), more than MAX_LENGTH characters or MAX_DEPTH nested brackets.
    """
    if len(text) > MAX_LENGTH:
        return None
    try:
        value, end, numbers = _expression(text, 0, 0)
    except (ValueError, ZeroDivisionError):
        return None
    return (value, numbers) if end == len(text) else None


def _skip(text: str, at: int) -> int:
    while text[at : at + 1] == " ":
        at += 1
    return at


def _expression(text: str, at: int, depth: int) -> tuple[Fraction, int, tuple[int, ...]]:
    value, at, numbers = _term(text, at, depth)
    while (sign := text[at : at + 1]) in ("+", "-"):
        other, at, further = _term(text, at + 1, depth)
        value, numbers = value + other if sign == "+" else value - other, numbers + further
    return value, at, numbers


def _term(text: str, at: int, depth: int) -> tuple[Fraction, int, tuple[int, ...]]:
    value, at, numbers = _factor(text, at, depth)
    while (sign := text[at : at + 1]) in ("*", "/"):
        other, at, further = _factor(text, at + 1, depth)
        value, numbers = value * other if sign == "*" else value / other, numbers + further
    return value, at, numbers


def _factor(text: str, at: int, depth: int) -> tuple[Fraction, int, tuple[int, ...]]:
    at = _skip(text, at)
    if text[at : at + 1] == "(" and depth < MAX_DEPTH:
        value, at, numbers = _expression(text, at + 1, depth + 1)
        if text[at : at + 1] != ")":
            raise ValueError(text)
        return value, _skip(text, at + 1), numbers
    end = at
    while "0" <= text[end : end + 1] <= "9":
        end += 1
    if end == at or (text[at] == "0" and end - at > 1):
        raise ValueError(text)
    return Fraction(int(text[at:end])), _skip(text, end), (int(text[at:end]),)
