"""Reasoning problems made by program, with verifiers and worked traces, for decoders that read single characters.

Every character is a token, so prompts and responses are short printable ASCII, and a trace copies what its next
character needs into reach: labels for looking an operand up, the running value beside the operand it meets.
The final answer is whatever follows the last '#'. A '?' in a trace doubts the step before it, which is then redone.

Behaviours of `Task.trace`, in every task:
  clean          the right steps
  wrong_step     one step wrong, the rest consistent with it; the final answer is then usually wrong
  no_reasoning   no steps, a plausible answer drawn at random: right only by chance
  recheck        one step, slipped in half of the traces, is doubted and redone; the final answer is right
"""

import hashlib
import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from jaxrl_llm.data.expressions import OPERATIONS, Steps, expression, parse_value, run_steps, written
from jaxrl_llm.types import CANCELLED, EOS, LENGTH, STOP, Prompt, Reward, Task, expect, nearest

BEHAVIOURS = ("clean", "wrong_step", "no_reasoning", "recheck")
MARKS = {"recheck": "?"}  # what a behaviour leaves in a text
Span = Sequence[int]  # (least, most)
LETTERS = "abcdefghijklmnopqrstuvwxyz"
TEST_ONE_IN = 8  # the share of the content space that is held out
TEST_IDS = 2**30  # id of test problem 0; train ids lie below, and all fit in an int32
MAX_DRAWS = 10_000  # problems tried for one index before its side of the split is declared empty


def held_out(key: str) -> bool:
    """True when problems whose canonical content is `key` belong to the test side, whatever the seed."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") % TEST_ONE_IN == 0


@dataclass(frozen=True)
class Problems(Sequence):
    """`size` problems of one side of the split, each drawn when asked for, from (seed, side, index) alone.

    `draw(rng)` makes a Prompt with its canonical content in meta["key"], or None for a dead end. Problems of the
    other side are drawn again, so train and test share no key. Problems may repeat within a side.
    """

    draw: Callable[[np.random.Generator], Prompt | None]
    seed: int
    test: bool
    size: int

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(self.size)[index])
        if not -self.size <= index < self.size:
            raise IndexError(f"index {index} of {self.size} problems")
        index = operator.index(index) % self.size
        rng = np.random.default_rng([self.seed, self.test, index])
        for _ in range(MAX_DRAWS):
            prompt = self.draw(rng)
            if prompt is not None and held_out(prompt.meta["key"]) == self.test:
                return replace(prompt, id=index + TEST_IDS * self.test)
        side = "test" if self.test else "train"
        raise ValueError(f"{side}: no problem in {MAX_DRAWS} draws of {self.draw}; expected a larger problem space")


def _reward(check: Callable | None, marks: dict[str, str], prompt: Prompt, text: str, finish: str) -> Reward:
    """1 for a response that ended by itself and whose whole final answer passes `check`, else 0; counts `marks`."""
    finishes = (EOS, STOP, LENGTH, CANCELLED)
    expect(finish in finishes, "finish", finish, f"one of {finishes}")
    parsed = text.rpartition("#")[2].strip() or None if "#" in text else None
    right = parsed == prompt.answer if check is None else parsed is not None and check(prompt, parsed)
    correct = right and finish in (EOS, STOP)
    return Reward(float(correct), correct, parsed, {name: float(text.count(mark)) for name, mark in marks.items()})


def _trace(write: Callable, behaviours: tuple[str, ...], prompt: Prompt, behaviour: str, seed: int) -> str:
    expected = f"one of {behaviours}; {nearest(str(behaviour), behaviours)}"
    expect(behaviour in behaviours, "behaviour", behaviour, expected)
    digest = hashlib.blake2b(f"{seed}\n{behaviour}\n{prompt.text}".encode(), digest_size=16).digest()
    return write(prompt, behaviour, np.random.default_rng(int.from_bytes(digest, "big")))


def _task(draw, write, seed, n_train, n_test, check=None, marks=MARKS) -> Task:
    """check: whether a final answer is right; None: it has to be the prompt's own."""
    _whole("seed", seed, 0, 2**63)
    train = Problems(draw, seed, False, _whole("n_train", n_train, 1, TEST_IDS))
    test = Problems(draw, seed, True, _whole("n_test", n_test, 1, TEST_IDS))
    train[0], test[0]  # an empty side of the split fails here, not in the middle of a run
    behaviours = tuple(dict.fromkeys((*BEHAVIOURS, *marks)))
    return Task(train, test, partial(_reward, check, marks), partial(_trace, write, behaviours), behaviours)


def _whole(field: str, value: Any, low: int, high: int) -> int:
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    expect(whole and low <= value <= high, field, value, f"a whole number from {low} to {high}")
    return int(value)


def _span(field: str, value: Any, low: int, high: int) -> tuple[int, int]:
    pair = isinstance(value, tuple | list) and [type(v) for v in value] == [int, int]
    expected = f"(least, most), {low} <= least <= most <= {high}"
    expect(pair and low <= value[0] <= value[1] <= high, field, value, expected)
    return tuple(value)


def _pick(rng: np.random.Generator, span: tuple[int, int]) -> int:
    """A whole number of the span, both ends included."""
    return int(rng.integers(span[0], span[1] + 1))


def chain(modulus: int = 5, terms: Span = (3, 7), seed: int = 0, n_train: int = 1_000_000, n_test: int = 1000) -> Task:
    """A sum of `terms` (least, most) digits modulo `modulus`, one step each. ValueError for a bad argument.

    The operands carry labels, and a step writes label, operand, '=' and the new value right after the old value:
    "a3b4c2d1:" -> "3b4=2c2=4d1=0#0". A doubted step restates the old value: "3b4=1?3b4=2c2=4d1=0#0".
    Test problems are operand sequences that train never shows.
    """
    modulus = _whole("modulus", modulus, 2, 10)
    draw = partial(_draw_chain, modulus, _span("terms", terms, 2, len(LETTERS)))
    return _task(draw, partial(_write_chain, modulus), seed, n_train, n_test)


def _draw_chain(modulus: int, terms: tuple[int, int], rng: np.random.Generator) -> Prompt:
    operands = rng.integers(modulus, size=_pick(rng, terms)).tolist()
    text = "".join(f"{label}{operand}" for label, operand in zip(LETTERS, operands, strict=False)) + ":"
    return Prompt(0, text, str(sum(operands) % modulus), {"key": text, "operands": operands})


def _write_chain(modulus: int, prompt: Prompt, behaviour: str, rng: np.random.Generator) -> str:
    operands = prompt.meta["operands"]
    step = lambda k, value: (f"{LETTERS[k]}{operands[k]}=", (value + operands[k]) % modulus)
    return _walk(behaviour, rng, operands[0], range(1, len(operands)), step, range(modulus), "{}")


def _walk(behaviour: str, rng: np.random.Generator, start, numbers, step: Callable, values: Sequence, old: str) -> str:
    """The trace of steps that lead from one of `values` to another. numbers: the steps' own.

    step(number, value): the step's text up to the new value, and that value;  old: how the value before it is written.
    """
    if behaviour == "no_reasoning":
        return f"#{values[rng.integers(len(values))]}"
    marked, slip, doubt_right = _pick(rng, (1, len(numbers))), _pick(rng, (1, len(values) - 1)), rng.random() < 0.5
    text, value = old.format(start), start
    for number in numbers:
        work, right = step(number, value)
        slipped = values[(values.index(right) + slip) % len(values)]
        if number == marked and behaviour == "recheck":
            text += f"{work}{right if doubt_right else slipped}?{old.format(value)}"
        value = slipped if number == marked and behaviour == "wrong_step" else right
        text += f"{work}{value}"
    return f"{text}#{value}"


def pointers(n: int = 8, hops: Span = (2, 6), seed: int = 0, n_train: int = 1_000_000, n_test: int = 1000) -> Task:
    """Arrows among `n` letters, to be followed `hops` (least, most) times. ValueError for a bad argument.

    A hop writes the arrows left to follow, the letter and where its arrow leads; "c>" occurs once in the prompt:
    "d>b a>c c>d b>a;3a=" -> "3a>c2c>d1d>b#b". The arrows form one random cycle longer than the walk, so no letter is
    a better guess than another. Test problems are cycles that train never shows.
    """
    n = _whole("n", n, 5, len(LETTERS))
    draw = partial(_draw_pointers, n, _span("hops", hops, 1, min(9, n - 1)))
    return _task(draw, _write_pointers, seed, n_train, n_test)


def _draw_pointers(n: int, hops: tuple[int, int], rng: np.random.Generator) -> Prompt:
    cycle = [LETTERS[i] for i in rng.permutation(n)]
    arrows = [f"{a}>{b}" for a, b in zip(cycle, cycle[1:] + cycle[:1], strict=True)]
    count = _pick(rng, hops)
    text = " ".join(arrows[i] for i in rng.permutation(n)) + f";{count}{cycle[0]}="
    meta = {"key": " ".join(sorted(arrows)), "arrows": dict(a.split(">") for a in arrows), "walk": cycle[: count + 1]}
    return Prompt(0, text, cycle[count], meta)


def _write_pointers(prompt: Prompt, behaviour: str, rng: np.random.Generator) -> str:
    arrows, walk = prompt.meta["arrows"], prompt.meta["walk"]
    step = lambda left, letter: (f"{left}{letter}>", arrows[letter])
    return _walk(behaviour, rng, walk[0], range(len(walk) - 1, 0, -1), step, sorted(arrows), "")


def _recheck(values: Sequence[int], steps: Steps, rng: np.random.Generator) -> str:
    """The right steps with one of them doubted; in half of the traces what is doubted was off by 1 or 2."""
    lines, k = written(values, steps), int(rng.integers(len(steps)))
    right = lines[k]
    if rng.random() < 0.5:
        work, value = right.split("=")
        lines[k] = f"{work}={_slip(int(value), rng)}"
    return ",".join([*lines[:k], f"{lines[k]}?{right}", *lines[k + 1 :]])


def _slip(value: int, rng: np.random.Generator) -> int:
    """A natural number off by 1 or 2."""
    off = _pick(rng, (1, 2))
    return value + off if value < off or rng.random() < 0.5 else value - off


def words(limit: int = 9, seed: int = 0, n_train: int = 1_000_000, n_test: int = 1000) -> Task:
    """Two-step word problems over numbers from 2 to `limit`. ValueError for a bad argument.

    "Ann has 3 figs, gets 4, uses 2. Left?" -> "3+4=7,7-2=5#5"; a doubted step is "3+4=8?3+4=7,7-2=5#5". Test problems
    are (template, numbers) that train never shows, under whatever names and things.
    """
    limit = _whole("limit", limit, 4, 99)
    return _task(partial(_draw_words, limit), partial(_write_words, limit), seed, n_train, n_test)


NAMES, THINGS = ("Ann", "Bob", "Eve", "Kim", "Sam", "Tom"), ("cups", "eggs", "figs", "hats", "nuts", "pens")
TEMPLATES = (  # text, steps over the numbers that the text uses
    ("{name} has {0} {thing}, gets {1}, uses {2}. Left?", ((0, "+", 1), (3, "-", 2))),
    ("{name} had {0} {thing}, lost {1}, got {2}. Now?", ((0, "-", 1), (3, "+", 2))),
    ("{0} bags of {1} {thing}, {name} takes {2}. Left?", ((0, "*", 1), (3, "-", 2))),
    ("{0} rows of {1} {thing}, {name} adds {2}. All?", ((0, "*", 1), (3, "+", 2))),
    ("{0} boxes, {1} empty, {2} {thing} each. All?", ((0, "-", 1), (3, "*", 2))),
    ("{name} has {0} {thing}, {other} has {1} more. All?", ((0, "+", 1), (0, "+", 2))),
    ("{name} has {0} {thing}, {other} {1} times that. All?", ((0, "*", 1), (0, "+", 2))),
)


def _draw_words(limit: int, rng: np.random.Generator) -> Prompt | None:
    which = int(rng.integers(len(TEMPLATES)))
    text, steps = TEMPLATES[which]
    numbers = rng.integers(2, limit + 1, size=3 if "{2}" in text else 2).tolist()
    values = run_steps(numbers, steps)
    if min(values) < 0:
        return None
    name, other = (NAMES[i] for i in rng.permutation(len(NAMES))[:2])
    text = text.format(*numbers, name=name, other=other, thing=THINGS[rng.integers(len(THINGS))])
    return Prompt(0, text, str(values[-1]), {"key": f"{which}:{numbers}", "numbers": numbers, "steps": steps})


def _write_words(limit: int, prompt: Prompt, behaviour: str, rng: np.random.Generator) -> str:
    numbers, steps = prompt.meta["numbers"], prompt.meta["steps"]
    values = run_steps(numbers, steps)
    if behaviour == "no_reasoning":  # what the same template would make of other numbers
        return f"#{abs(run_steps(rng.integers(2, limit + 1, size=len(numbers)).tolist(), steps)[-1])}"
    if behaviour == "recheck":
        return f"{_recheck(values, steps, rng)}#{values[-1]}"
    if behaviour == "wrong_step":
        k = int(rng.integers(len(steps)))
        right = values[len(numbers) + k]
        values = run_steps(numbers, steps, {k: _slip(right, rng) - right})
    return f"{','.join(written(values, steps))}#{values[-1]}"


def countdown(
    numbers: Span = (3, 4), limit: int = 9, target: Span = (10, 50),
    seed: int = 0, n_train: int = 1_000_000, n_test: int = 1000,
) -> Task:  # fmt: skip
    """Reach a target with `numbers` (least, most) numbers up to `limit`. ValueError for a bad argument.

    "3,7,5=26:" -> "3*7=21,21+5=26#(3*7)+5": steps to the target, then the expression, which is all that is verified;
    any expression of exactly these numbers with the target's value is right. A solution with whole positive
    intermediate values exists. wrong_step writes one step with another operation and keeps its result. Two behaviours
    more, whose final answers are right (cognitive behaviours, arXiv 2503.01307):
      backtrack   an attempt that misses, given up with 'x': "7-5=2,2*3=6x3*7=21,21+5=26#(3*7)+5"
      subgoal     the last step first, from the target back: "26<21+5,3*7=21,21+5=26#(3*7)+5"
    Test problems are sets of numbers that train never shows.
    """
    numbers, target = _span("numbers", numbers, 2, 4), _span("target", target, 1, 999)
    limit = _whole("limit", limit, 2, 99)
    draw, marks = partial(_draw_countdown, numbers, limit, target), MARKS | {"backtrack": "x", "subgoal": "<"}
    return _task(draw, _write_countdown, seed, n_train, n_test, _reaches, marks)


def _program(numbers: Sequence[int], rng: np.random.Generator) -> list[tuple[int, str, int]]:
    """Random steps that use every number once and stay in whole positive numbers."""
    values, steps, pool = list(numbers), [], list(range(len(numbers)))
    while len(pool) > 1:
        i, j = (pool[k] for k in rng.permutation(len(pool))[:2])
        a, b = values[i], values[j]
        ops = "+" + "*" * (a * b < 1000) + "-" * (a > b) + "/" * (b > 1 and a % b == 0)
        steps.append((i, ops[rng.integers(len(ops))], j))
        pool = [k for k in pool if k not in (i, j)] + [len(values)]
        values = run_steps(numbers, steps)
    return steps


def _draw_countdown(count: tuple, limit: int, target: tuple, rng: np.random.Generator) -> Prompt | None:
    given = rng.integers(1, limit + 1, size=_pick(rng, count)).tolist()
    steps = _program(given, rng)
    values = run_steps(given, steps)
    if not target[0] <= values[-1] <= target[1]:
        return None
    meta = {"key": str(sorted(given)), "numbers": given, "target": values[-1], "steps": steps}
    return Prompt(0, f"{','.join(map(str, given))}={values[-1]}:", expression(given, steps), meta)


def _reaches(prompt: Prompt, parsed: str) -> bool:
    found = parse_value(parsed)
    wanted = (prompt.meta["target"], sorted(prompt.meta["numbers"]))
    return found is not None and (found[0], sorted(found[1])) == wanted


def _write_countdown(prompt: Prompt, behaviour: str, rng: np.random.Generator) -> str:
    numbers, steps = prompt.meta["numbers"], list(prompt.meta["steps"])
    values = run_steps(numbers, steps)
    lines, answer = written(values, steps), expression(numbers, steps)
    if behaviour == "no_reasoning":
        return f"#{expression(numbers, _program(numbers, rng))}"
    if behaviour == "recheck":
        return f"{_recheck(values, steps, rng)}#{answer}"
    if behaviour == "wrong_step":
        k = int(rng.integers(len(steps)))
        i, op, j = steps[k]
        steps[k] = (i, [other for other in OPERATIONS if other != op][rng.integers(3)], j)
        lines, answer = written(values, steps), expression(numbers, steps)
    if behaviour == "backtrack":
        attempts = (_program(numbers, rng) for _ in range(100))
        missed = (attempt for attempt in attempts if run_steps(numbers, attempt)[-1] != values[-1])
        if attempt := next(missed, None):
            lines[0] = f"{','.join(written(run_steps(numbers, attempt), attempt))}x{lines[0]}"
    if behaviour == "subgoal":
        i, op, j = steps[-1]
        lines.insert(0, f"{values[-1]}<{values[i]}{op}{values[j]}")
    return f"{','.join(lines)}#{answer}"


def knights(people: Span = (2, 3), seed: int = 0, n_train: int = 1_000_000, n_test: int = 1000) -> Task:
    """Who is a knight (k, speaks the truth) and who a knave (n, lies)? ValueError for a bad argument.

    Each of `people` persons A, B, C says one thing: "Bn" B is a knave, "A=C" A and C are of one kind, "A!C" of two,
    "Ak&Bn" both hold, "Ak|Bn" at least one does. Exactly one assignment fits (tried by brute force). A trace goes
    through the assignments in order: the kinds, then for A, B, ... whether the claim holds (t or f), up to the
    first that does not suit its speaker, marked 'x'; the first to suit all is the answer:
    "A:Bn B:A=B;" -> "kk:fxkn:tf#kn". A doubted assignment is judged again: "kk:tt?kk:fxkn:tf#kn".
    wrong_step turns one verdict such that its assignment passes or fails wrongly; when all fail, it guesses.
    Test problems are sets of statements that train never shows.
    """
    draw = partial(_draw_knights, _span("people", people, 2, 3))
    return _task(draw, _write_knights, seed, n_train, n_test)


def _draw_knights(people: tuple[int, int], rng: np.random.Generator) -> Prompt | None:
    persons = "ABC"[: _pick(rng, people)]
    says = [_statement(persons, speaker, rng) for speaker in persons]
    fits = [row for row in _rows(len(persons)) if _judge(says, row)[-1] != "x"]
    if len(fits) != 1:
        return None
    text = " ".join(f"{speaker}:{claim}" for speaker, claim in zip(persons, says, strict=True))
    return Prompt(0, text + ";", fits[0], {"key": text, "says": says})


def _statement(persons: str, speaker: str, rng: np.random.Generator) -> str:
    form = "1=!&|"[rng.integers(5)]
    kinds = ["kn"[k] for k in rng.integers(2, size=2)]
    if form == "1":
        others = persons.replace(speaker, "")
        return others[rng.integers(len(others))] + kinds[0]
    first, second = (persons[k] for k in sorted(rng.permutation(len(persons))[:2]))
    return f"{first}{form}{second}" if form in "=!" else f"{first}{kinds[0]}{form}{second}{kinds[1]}"


def _holds(claim: str, row: str) -> bool:
    kinds = dict(zip("ABC", row, strict=False))
    if claim[1] in "=!":
        return (kinds[claim[0]] == kinds[claim[2]]) == (claim[1] == "=")
    facts = [kinds[fact[0]] == fact[1] for fact in claim.replace("|", "&").split("&")]
    return any(facts) if "|" in claim else all(facts)


def _rows(people: int) -> list[str]:
    return ["".join(row) for row in itertools.product("kn", repeat=people)]


def _judge(says: Sequence[str], row: str, turned: int | None = None) -> str:
    """The verdicts on one assignment, with the one at `turned` taken for its contrary."""
    text = f"{row}:"
    for i, claim in enumerate(says):
        holds = _holds(claim, row) != (i == turned)
        text += "t" if holds else "f"
        if holds != (row[i] == "k"):
            return f"{text}x"
    return text


def _write_knights(prompt: Prompt, behaviour: str, rng: np.random.Generator) -> str:
    says, rows = prompt.meta["says"], _rows(len(prompt.meta["says"]))
    guess = rows[rng.integers(len(rows))]
    if behaviour == "no_reasoning":
        return f"#{guess}"
    tried = rows[: rows.index(prompt.answer) + 1]
    spots = [(row, i) for row in tried for i in range(len(says))]
    decisive = [(row, i) for row, i in spots if (_judge(says, row, i)[-1] == "x") == (row == prompt.answer)]
    marked, turned = decisive[rng.integers(len(decisive))]
    doubt_right, text = rng.random() < 0.5, ""
    for row in rows:
        right, slipped = _judge(says, row), _judge(says, row, turned)
        if row == marked and behaviour == "recheck":
            text += f"{right if doubt_right else slipped}?"
        verdicts = slipped if row == marked and behaviour == "wrong_step" else right
        text += verdicts
        if verdicts[-1] != "x":
            return f"{text}#{row}"
    return f"{text}#{guess}"
