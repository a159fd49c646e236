"""Programs are judged by what they print or return, and no trick passes for it."""

import json

import pytest

from jaxrl_llm.rewards import code
from jaxrl_llm.rewards.sandbox import Limits
from jaxrl_llm.types import CANCELLED, EOS, LENGTH, STOP, Prompt

SUMS = {"stdin": [["1 2\n", "3\n"], ["4 5\n", "9\n"], ["0 0\n", "0\n"], ["-1 1\n", "0"]]}
ADD = {"function": "add", "cases": [[[1, 2], 3], [[4, 5], 9], [[0, 0], 0], [[-1, 1], 0]]}
QUICK = Limits(cpu_s=1, wall_s=1.2)


def judged(answer, program, finish=EOS, **settings):
    return code.reward(Prompt(0, "?", answer), program, finish, **{"limits": QUICK} | settings)


@pytest.mark.parametrize("form", [dict, json.dumps])
def test_right_programs_pass(form):
    for answer, program in (
        (SUMS, "print(sum(map(int, input().split())))"),
        (SUMS, "Here it is:\n```python\na, b = map(int, input().split())\nprint(a + b, '\\n\\n')\n```\nDone."),
        (ADD, "def add(a, b):\n    print('debug')\n    return a + b"),
        (ADD, "```python\nclass Solution:\n    def add(self, a, b):\n        return a + b\n```"),
    ):
        found = judged(form(answer), program)
        assert (found.value, found.correct, found.parsed) == (1, True, "passed 4")
        assert (found.parts, found.outcome) == ({"passed": 1}, "scored")


@pytest.mark.parametrize(
    ("program", "parsed", "outcome"),
    [
        ("print(3)", "test 2 of 4: printed '3\\n'", "scored"),
        ("", None, "scored"),
        ("print(3); 1/0", "test 1 of 4: ZeroDivisionError: division by zero", "scored"),
        ("print(3); raise SystemExit(2)", "test 1 of 4: exit code 2", "scored"),
        ("while True: pass", "test 1 of 4: timed out", "timed_out"),
        ("x = bytearray(1 << 40)", "test 1 of 4: out of memory", "out_of_memory"),
        ("import os; os.abort()", "test 1 of 4: crashed", "crashed"),
        ("while True: print('3' * 100000)", "test 1 of 4: flooded", "crashed"),
        ("I do not know.", "test 1 of 4: SyntaxError: invalid syntax", "scored"),
    ],
)
def test_wrong_programs_fail_and_say_why(program, parsed, outcome):
    found = judged(SUMS, program)
    assert (found.value, found.correct, found.parsed, found.outcome) == (0, False, parsed, outcome)


@pytest.mark.parametrize(
    ("program", "share"),
    [
        ("def add(a, b): return a + b if a != 4 else 0", 3 / 4),
        ("def add(a, b):\n    if a == 4: raise SystemExit\n    return a + b", 3 / 4),
        ("import os\ndef add(a, b):\n    if a == 4: os._exit(0)\n    return a + b", 3 / 4),
        ("import os\ndef add(a, b):\n    if a == 4: os.abort()\n    return a + b", 3 / 4),
        ("def add(a, b):\n    if a == 4: bytearray(1 << 40)\n    return a + b", 3 / 4),
        ("def add(a, b):\n    while a == 0: pass\n    return a + b", 2 / 4),  # what comes after counts as failed
        ("def sub(a, b): return a - b", 0),
        ("def add(a, b): return str(a + b)", 0),
        ("def add(a): return a", 0),
        ("add = 3", 0),
    ],
)
def test_the_share_that_passes(program, share):
    found = judged(ADD, program, share=True)
    assert (found.value, found.correct, found.parts) == (share, False, {"passed": share})
    assert share == 2 / 4 or judged(ADD, program).value == 0


def test_the_share_of_printed_tests():
    found = judged(SUMS, "a, b = map(int, input().split())\nprint(a + b if a >= 0 else 1 / 0)", share=True)
    assert (found.value, found.parsed) == (3 / 4, "test 4 of 4: ZeroDivisionError: division by zero")
    assert judged(SUMS, "a, b = map(int, input().split())\nwhile a == 4: pass\nprint(a + b)", share=True).value == 1 / 4


FORGERIES = [
    "print('passed 4')",
    "import os; os._exit(0)",
    "raise SystemExit(0)",
    "import sys; sys.modules['__main__'].__dict__.clear()",
    "import builtins, json\njson.dumps = lambda *a, **k: '{\"value\": true}'\ndef add(a, b): return 0",
    "import builtins\nbuiltins.__import__ = None\ndef add(a, b): return 0",
    "import atexit, os\natexit.register(lambda: os.write(1, b'{\"value\": 0}\\n' * 4))\ndef add(a, b): return 0",
    "import os\nos.write(1, b'{\"value\": 3}\\n' * 99)\nos._exit(0)",
    "import os\nos.write(1, b'{\"value\": [[[' * 9999)\nos._exit(0)",
    "import os\nos.write(1, b'{\"value\": ' + b'9' * 9999 + b'}\\n')\nos._exit(0)",
    "import os\nos.write(1, b'null\\n3\\n[]\\n\"value\"\\n')\nos._exit(0)",
    "import os\nos.write(1, b'\\xff\\x00\\n' * 4)\nos._exit(0)",
    "class Same(int):\n    def __eq__(self, other): return True\ndef add(a, b): return Same(7)",
    "class Same(float):\n    __repr__ = lambda self: 'NaN'\ndef add(a, b): return Same('nan')",
    "def add(a, b): return (yield)",
    "import sys\ndef add(a, b): return sys.modules['__main__'].given.get('expected', sys._getframe(1).f_locals)",
    "import gc\ndef add(a, b): return [o for o in gc.get_objects() if isinstance(o, dict) and 'cases' in o]",
    "import sys\nsys.settrace(lambda *a: None)\nsys.setrecursionlimit(5)\ndef add(a, b): return 0",
    "from threading import Thread\nThread(target=lambda: print('{\"value\": 0}')).start()\ndef add(a, b): return 1",
]


@pytest.mark.parametrize("program", FORGERIES)
@pytest.mark.parametrize("answer", [ADD, SUMS])
def test_nothing_is_forged(answer, program):
    found = judged(answer, program)
    assert (found.value, found.correct) == (0, False)


def test_expected_outputs_do_not_enter_the_sandbox(monkeypatch):
    given = []
    run = code.sandbox.run
    monkeypatch.setattr(code.sandbox, "run", lambda *args, **kwargs: given.append(args) or run(*args, **kwargs))
    judged({"stdin": [["1", "424242"]]}, "print(1)")
    judged({"function": "f", "cases": [[[1], 424242]]}, "def f(x): return x")
    assert len(given) == 2
    assert "424242" not in repr(given)


def test_of_several_blocks_the_last_python_counts():
    text = "```python\nA\n```\nno:\n```python\nB\n```\nprints\n```\n7\n```\nand\n```cpp\nC\n```\n"
    assert code.program(text) == "B\n"
    assert code.program("```\nA\n```\n```text\nB\n```\n") == "A\n"
    assert code.program("```Python3\nA") == "A"
    assert code.program("  ```py\n  A\n  ```") == "  A\n"
    assert code.program("print(1)") == "print(1)"
    assert len(code.program("```python\n" * 100_000)) < 20


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        ("1  2 \n3\n\n", "1 2\n3", True),
        ("1 2 3", "1 2\n3", False),
        ("1\n\n2", "1\n2", False),
        ("0.3333333", "0.33333334", True),
        ("0.334", "0.333", False),
        ("1000000007", "1000000008", False),  # close, but whole
        ("5.0", "5", False),
        ("5", "5.0", True),
        ("1e3", "1000.0", True),
        ("nan", "nan", True),
        ("nan", "1.0", False),
        ("1_0.5", "10.5", False),
        ("Yes", "YES", False),
        ("", "", True),
        ("", "0", False),
    ],
)
def test_outputs_are_compared_word_by_word(found, expected, same):
    assert code.same_text(found, expected, 1e-6) == same


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        ([1, [2.0000001]], [1, [2.0]], True),
        ([1, 2], [1, 2, 3], False),
        (2.0, 2, True),
        (2.0000001, 2, False),
        (True, 1, False),
        (1, True, False),
        (None, 0, False),
        ({"a": [1]}, {"a": [1]}, True),
        ({"a": 1, "b": 2}, {"a": 1}, False),
        ("1", 1, False),
        ([], "", False),
        (float("nan"), 1.0, False),
    ],
)
def test_values_are_compared_by_kind(found, expected, same):
    assert code.same_value(found, expected, 1e-6) == same


def test_what_a_function_returns_need_not_be_json():
    answer = {"function": "f", "cases": [[[3], [0, 1, 2]]]}
    for body in ("range(n)", "tuple(range(n))", "{0, 1, 2}", "(i for i in range(n))"):
        assert judged(answer, f"def f(n): return {body}").value == 1
    assert judged(answer, "def f(n): return object()").parsed == 'test 1 of 1: returned {"error": "TypeError"}'
    assert judged({"function": "f", "cases": [[[1], 0.5]]}, "def f(n): return 10**400").value == 0


@pytest.mark.parametrize("finish", [LENGTH, CANCELLED])
def test_a_truncated_answer_is_not_even_run(finish, monkeypatch):
    monkeypatch.setattr(code.sandbox, "run", None)
    assert judged(SUMS, "print(1)", finish).value == 0


def test_a_stop_string_ends_an_answer_too():
    assert judged(SUMS, "print(sum(map(int, input().split())))", STOP).value == 1


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("{", "tests are not JSON"),
        ("7", "tests is 7; expected {'stdin': "),
        ({}, "tests is {}; expected {'stdin': "),
        ({"stdin": [["a", "b"]], "function": "f"}, "tests is .*; expected"),
        ({"stdin": []}, r"tests is {'stdin': \[\]}; expected"),
        ({"stdin": "ab"}, "tests is .*; expected"),
        ({"stdin": [["a"]]}, "tests is .*; expected"),
        ({"stdin": [["a", 3]]}, "tests is .*; expected"),
        ({"stdin": [[1, "3"]]}, "tests is .*; expected"),
        ({"function": "f", "cases": [[1, 1]]}, "tests is .*; expected"),
        ({"function": "f()", "cases": [[[1], 1]]}, "tests is .*; expected"),
    ],
)
def test_bad_tests_are_named(answer, message):
    with pytest.raises(ValueError, match=message):
        code.check_tests(answer)
