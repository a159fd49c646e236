"""Rewards for programs: what they print or return, beside what a problem's tests expect.

`Prompt.answer` holds the tests, as a mapping or its JSON: what is given and what is to be printed, or a function (or a
method of a class Solution), its arguments and what it is to return:

    {"stdin": [["3 4\\n", "7\\n"], …]}        {"function": "add", "cases": [[[3, 4], 7], …]}

A program can forge nothing: it runs in a sandbox that the expected outputs never enter, and whatever it prints, patches
or skips, its output is compared here.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

from jaxrl_llm.rewards import sandbox
from jaxrl_llm.rewards.sandbox import LIMITS, Limits, Outcome
from jaxrl_llm.types import EOS, STOP, Prompt, Reward, expect

FORM = "{'stdin': [[text, text], …]} or {'function': name, 'cases': [[arguments, value], …]}"
FENCE = re.compile(r"^[ \t]*```([^\n`]*)\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
WHOLE = re.compile(r"[+-]?\d+", re.ASCII)
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE | re.ASCII)
OUTCOMES = {"exited": "scored", "timed_out": "timed_out", "out_of_memory": "out_of_memory"}  # others are crashes
Verdicts = Iterator[tuple[str | None, str]]  # why a test failed, None if it did not; how the run ended

# It runs in the sandbox around the program. A line of output per call; what the program prints goes elsewhere.
DRIVER = """
import io, json, sys, types
given, lines = json.load(sys.stdin), sys.stdout
sys.stdout, sys.stdin = sys.stderr, io.StringIO()
sys.modules["solution"] = module = types.ModuleType("solution")
exec(compile(given["program"], "solution.py", "exec", dont_inherit=True), vars(module))
name = given["function"]
function = getattr(module, name) if hasattr(module, name) else getattr(module.Solution(), name)
for arguments in given["arguments"]:
    try:
        line = json.dumps({"value": function(*arguments)}, default=list)
    except Exception as error:
        line = json.dumps({"error": type(error).__name__})
    lines.write(line + chr(10))
    lines.flush()
"""


def program(text: str) -> str:
    """The last ```python block of a response, else its last block without a language, else all of it."""
    blocks = [(language.strip().lower(), block) for language, block in FENCE.findall(text)]
    python = [block for language, block in blocks if language.startswith("py")]
    return (python or [block for language, block in blocks if not language] or [text])[-1]


def check_tests(answer: Any) -> Mapping[str, Any]:
    """The tests of a problem. Raises ValueError for what is not of the form above, and for no tests."""
    try:
        tests = json.loads(answer) if isinstance(answer, str) else answer
    except (ValueError, RecursionError) as error:
        raise ValueError(f"tests are not JSON ({error}); expected {FORM}") from error
    names = sorted(tests) if isinstance(tests, Mapping) else None
    printed, listed = names == ["stdin"], lambda x: isinstance(x, list | tuple)
    expect(printed or names == ["cases", "function"], "tests", tests, FORM)
    pairs = tests["stdin" if printed else "cases"]
    expect(listed(pairs) and len(pairs) and all(listed(p) and len(p) == 2 for p in pairs), "tests", tests, FORM)
    sound = all(isinstance(a, str) and isinstance(b, str) if printed else listed(a) for a, b in pairs)
    expect(sound and str(tests.get("function", "f")).isidentifier(), "tests", tests, FORM)
    return tests


def reward(
    prompt: Prompt, text: str, finish: str, *,
    share: bool = False, tolerance: float = 1e-6, limits: Limits = LIMITS, unsafe: bool = False,
) -> Reward:  # fmt: skip
    """1 if a response's program passes all tests of `prompt.answer`, else 0, or the share that it passes.

    An answer that did not end by itself is worth 0. share: the value is the share of tests passed, and all are run;
    else none after the first that fails. A program that reaches its time limit fails the rest. tolerance: of decimal
    numbers, absolute or relative; whole numbers and texts are compared exactly, white space apart. limits: of one run:
    a test of stdin, or all calls of the function. unsafe: see `sandbox.run`.
    `parsed` says what failed first, parts["passed"] is the share. Raises ValueError for bad tests.
    """
    tests, source = check_tests(prompt.answer), program(text)
    if finish not in (EOS, STOP) or not source.strip():
        return Reward(0.0, False)
    judged, total = (_printed, len(tests["stdin"])) if "stdin" in tests else (_returned, len(tests["cases"]))
    run = lambda source, stdin: sandbox.run(source, stdin, limits=limits, unsafe=unsafe)
    passed, reason, outcome = 0, None, "scored"
    for number, (failure, ended) in enumerate(judged(source, tests, run, tolerance), 1):
        passed += failure is None
        if failure is not None and reason is None:
            reason, outcome = f"test {number} of {total}: {failure}", OUTCOMES.get(ended, "crashed")
        if failure is not None and (not share or ended == "timed_out"):
            break
    correct, part = passed == total, passed / total
    return Reward(part if share else float(correct), correct, reason or f"passed {total}", {"passed": part}, outcome)


def _printed(source: str, tests: Mapping, run: Callable, tolerance: float) -> Verdicts:
    for stdin, expected in tests["stdin"]:
        done = run(source, stdin)
        same = same_text(done.stdout, expected, tolerance)
        yield _failed(done) or (None if same else f"printed {done.stdout[:80]!r}"), done.ended


def _returned(source: str, tests: Mapping, run: Callable, tolerance: float) -> Verdicts:
    """All calls in one run; one that ends it is followed by another run, of the calls after it."""
    cases = list(tests["cases"])
    while cases:
        given = {"program": source, "function": tests["function"], "arguments": [list(c[0]) for c in cases]}
        done = run(DRIVER, json.dumps(given))
        lines = done.stdout.split("\n")[:-1][: len(cases)]
        for line, (_, expected) in zip(lines, cases, strict=False):
            try:
                good = same_value(json.loads(line)["value"], expected, tolerance)
            except (ValueError, TypeError, LookupError, OverflowError, RecursionError):  # the program has written it
                good = False
            memory = line == '{"error": "MemoryError"}'
            yield (None if good else f"returned {line[:80]}"), "out_of_memory" if memory else "exited"
        if len(lines) < len(cases):
            yield _failed(done) or "returned nothing", done.ended
        cases = cases[len(lines) + 1 :]


def _failed(done: Outcome) -> str | None:
    if done.ended != "exited":
        return done.ended.replace("_", " ")
    return (done.stderr.strip().rpartition("\n")[2][:80] or f"exit code {done.exit_code}") if done.exit_code else None


def same_text(found: str, expected: str, tolerance: float) -> bool:
    """Whether two outputs have the same words line by line; empty lines around them do not count."""
    a, b = ([line.split() for line in text.strip().split("\n")] for text in (found, expected))
    if [len(line) for line in a] != [len(line) for line in b]:
        return False
    return all(_same_word(x, y, tolerance) for x, y in zip(chain(*a), chain(*b), strict=True))


def _same_word(found: str, expected: str, tolerance: float) -> bool:
    """Decimal numbers are compared as such where one is expected: not whole ones, not words."""
    if found == expected or WHOLE.fullmatch(expected) or not (NUMBER.fullmatch(found) and NUMBER.fullmatch(expected)):
        return found == expected
    return math.isclose(float(found), float(expected), rel_tol=tolerance, abs_tol=tolerance)


def same_value(found: Any, expected: Any, tolerance: float) -> bool:
    """Whether two values of JSON are the same; true is not 1, and where a decimal is expected it need only be close."""
    if isinstance(expected, list | tuple):
        same = isinstance(found, list) and len(found) == len(expected)
        return same and all(same_value(a, b, tolerance) for a, b in zip(found, expected, strict=True))
    if isinstance(expected, Mapping):
        same = isinstance(found, dict) and found.keys() == expected.keys()
        return same and all(same_value(found[k], expected[k], tolerance) for k in expected)
    if isinstance(expected, float) and type(found) in (int, float):
        return math.isclose(found, expected, rel_tol=tolerance, abs_tol=tolerance)
    return isinstance(found, bool) == isinstance(expected, bool) and found == expected
