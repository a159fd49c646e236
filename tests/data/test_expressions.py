from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.data.expressions import MAX_DEPTH, MAX_LENGTH, expression, parse_value, run_steps, written


def test_a_program_by_hand():
    steps = [(0, "*", 1), (3, "+", 2)]
    values = run_steps([3, 7, 5], steps)
    assert values == [3, 7, 5, 21, 26]
    assert written(values, steps) == ["3*7=21", "21+5=26"]
    assert expression([3, 7, 5], steps) == "(3*7)+5"
    assert run_steps([3, 7, 5], steps, {0: -1}) == [3, 7, 5, 20, 25]
    assert expression([8, 2, 9, 4], [(0, "/", 1), (2, "-", 3), (4, "*", 5)]) == "(8/2)*(9-4)"


@pytest.mark.parametrize(
    ("text", "value", "numbers"),
    [
        ("7", 7, (7,)),
        ("0", 0, (0,)),
        ("2+3*4", 14, (2, 3, 4)),
        ("(2+3)*4", 20, (2, 3, 4)),
        ("10-4-3", 3, (10, 4, 3)),
        ("10-(4-3)", 9, (10, 4, 3)),
        ("48/4/2", 6, (48, 4, 2)),
        ("48/(4/2)", 24, (48, 4, 2)),
        ("1/3*3", 1, (1, 3, 3)),
        ("8/(3-8/3)", 24, (8, 3, 8, 3)),
        ("3-5", -2, (3, 5)),
        (" ( 3*7 ) + 5 ", 26, (3, 7, 5)),
        ("(" * MAX_DEPTH + "1" + ")" * MAX_DEPTH, 1, (1,)),
    ],
)
def test_expressions_by_hand(text, value, numbers):
    assert parse_value(text) == (Fraction(value), numbers)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "+1",
        "-1",
        "1+",
        "1 2",
        "1++2",
        "1--2",
        "1+-2",
        "2**3",
        "7//2",
        "01",
        "00",
        "1.5",
        "1e3",
        "1_0",
        "(1",
        "1)",
    ]
    + ["()", "(1)(2)", "2(3)", "1/0", "1/(2-2)", "1=1", "\u0661", "\uff11+1", "1\u00b2", "3\u00d74", "1\t+1", "1\n+1"]
    + ["a", "__import__('os')", "1,2", "(" * MAX_LENGTH, "1" * (MAX_LENGTH + 1), "1+" * 10_000 + "1"]
    + ["(" * (MAX_DEPTH + 1) + "1" + ")" * (MAX_DEPTH + 1), "(" * 100_000 + "1" + ")" * 100_000],
)
def test_not_an_expression(text):
    assert parse_value(text) is None


def combined(parts):
    (left, a, first), op, (right, b, second) = parts
    text, numbers = f"({left}){op}({right})", first + second
    if a is None or b is None or (op == "/" and b == 0):
        return text, None, numbers
    return text, {"+": lambda: a + b, "-": lambda: a - b, "*": lambda: a * b, "/": lambda: a / b}[op](), numbers


leaf = st.integers(0, 30).map(lambda n: (str(n), Fraction(n), (n,)))
trees = st.recursive(leaf, lambda t: st.tuples(t, st.sampled_from("+-*/"), t).map(combined), max_leaves=6)


@settings(max_examples=200, deadline=None)
@given(trees)
def test_expressions_against_the_tree_they_were_written_from(tree):
    text, value, numbers = tree
    assert parse_value(text) == (None if value is None else (value, numbers))
