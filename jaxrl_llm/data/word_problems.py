"""Word problems of one and two steps in English, made by program: small enough for a decoder of a few million weights.

Ann has 12 apples. Tom gives Ann 7 more. By evening there are 2 times as many. How many apples are there now?
12 + 7 = 19. 19 * 2 = 38. The answer is \\boxed{38}.
"""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from jaxrl_llm.data.tasks import Problems
from jaxrl_llm.types import Prompt, Reward, Task, expect

NAMES = ("Ann", "Tom", "Mia", "Leo", "Eva", "Sam", "Zoe", "Max")
THINGS = ("apples", "books", "coins", "cards", "eggs", "stamps", "shells", "pens")
OPENINGS = (
    "{name} has {n} {things}.",
    "There are {n} {things} in the box of {name}.",
    "{name} starts the day with {n} {things}.",
    "In the morning {name} counts {n} {things}.",
)
CHANGES = (  # an operation, and a sentence for it
    ("+", "{name} buys {n} more."),
    ("+", "{other} gives {name} {n} more."),
    ("+", "Then {name} finds another {n}."),
    ("+", "Later {n} more {things} are added."),
    ("-", "{name} loses {n} of them."),
    ("-", "{name} gives {n} of them to {other}."),
    ("-", "Then {other} takes {n} away."),
    ("-", "Later {n} of the {things} are sold."),
    ("*", "By evening there are {n} times as many."),
    ("*", "{other} makes it {n} times as many."),
    ("*", "The pile becomes {n} times as large."),
    ("/", "{name} makes {n} equal piles and keeps one."),
    ("/", "Of {n} equal parts only one is left."),
    ("/", "Shared equally among {n} friends, one share stays."),
)
QUESTIONS = (
    "How many {things} are there now?",
    "How many {things} does {name} have in the end?",
    "What is the number of {things} left?",
)
LARGEST = 99  # value on the way
BEHAVIOURS = ("clean", "wrong_step", "no_reasoning")


def word_problems(
    reward: Callable[[Prompt, str, str], Reward], steps: tuple[int, int] = (1, 2), seed: int = 0,
    n_train: int = 1_000_000, n_test: int = 1000,
) -> Task:  # fmt: skip
    """Problems of `steps` (least, most) operations. A test problem's template, the sentences without names, things and
    numbers, is one that train never shows.

    reward: of an answer with its result in \\boxed{}. Traces are clean, have a wrong_step that the rest goes on from,
    or no_reasoning but a number. ValueError for a number of steps that is not 1 to 4.
    """
    expect(1 <= steps[0] <= steps[1] <= 4, "steps", steps, "(least, most), 1 <= least <= most <= 4")
    draw = partial(_draw, tuple(steps))
    train, test = Problems(draw, seed, False, n_train), Problems(draw, seed, True, n_test)
    return Task(train, test, reward, _trace, BEHAVIOURS)


def texts(n: int = 2000) -> Iterator[str]:
    """Problems and worked answers of the training templates, to learn byte pairs from."""
    train = word_problems(reward=lambda *_: Reward(0.0, False)).train
    for i in range(n):
        yield train[i].text
        yield _trace(train[i], "clean", i)


def _draw(steps: tuple[int, int], rng: np.random.Generator) -> Prompt | None:
    pick = lambda of: int(rng.integers(len(of)))
    opening, question = pick(OPENINGS), pick(QUESTIONS)
    changes = [pick(CHANGES) for _ in range(rng.integers(steps[0], steps[1] + 1))]
    values, numbers = [int(rng.integers(5, 51))], []
    for i in changes:
        n = int(rng.integers(2, 31) if CHANGES[i][0] in "+-" else rng.integers(2, 6))
        value = _result(values[-1], CHANGES[i][0], n)
        if value is None:
            return None
        numbers.append(n)
        values.append(value)
    name, other = (NAMES[i] for i in rng.permutation(len(NAMES))[:2])
    words = {"name": name, "other": other, "things": THINGS[pick(THINGS)]}
    sentences = [(OPENINGS[opening], values[0]), *((CHANGES[i][1], n) for i, n in zip(changes, numbers, strict=True))]
    text = " ".join(s.format(n=n, **words) for s, n in [*sentences, (QUESTIONS[question], 0)])
    operations = [(CHANGES[i][0], n) for i, n in zip(changes, numbers, strict=True)]
    meta = {"key": f"{opening} {changes} {question}", "first": values[0], "operations": operations}
    return Prompt(0, text, str(values[-1]), meta | {"level": len(changes)})


def _result(value: int, operation: str, n: int) -> int | None:
    """None: not a whole number from 1 to LARGEST."""
    if operation == "/" and value % n:
        return None
    result = {"+": value + n, "-": value - n, "*": value * n, "/": value // n}[operation]
    return result if 1 <= result <= LARGEST else None


def _trace(prompt: Prompt, behaviour: str, seed: int) -> str:
    expect(behaviour in BEHAVIOURS, "behaviour", behaviour, f"one of {BEHAVIOURS}")
    rng, value, lines = np.random.default_rng([seed, prompt.id]), prompt.meta["first"], []
    operations = prompt.meta["operations"]
    slipped = int(rng.integers(len(operations))) if behaviour == "wrong_step" else None
    for i, (operation, n) in enumerate(operations):
        result = {"+": value + n, "-": abs(value - n), "*": value * n, "/": value // n}[operation]
        if i == slipped:
            result += int(rng.choice([by for by in (-10, -2, -1, 1, 2, 10) if result + by >= 1]))
        lines.append(f"{value} {operation} {n} = {result}. ")
        value = result
    if behaviour == "no_reasoning":
        lines, value = [], int(rng.integers(1, LARGEST + 1))
    return f"{''.join(lines)}The answer is \\boxed{{{value}}}."
