"""Python as a tool: what a program prints comes back, and it gets nowhere."""

import pytest

from jaxrl_llm.environments import python_tool
from jaxrl_llm.rewards.sandbox import Limits
from jaxrl_llm.types import EOS, LENGTH, STOP, Prompt

PROMPT, QUICK = Prompt(0, "?"), Limits(cpu_s=1, wall_s=1.0)


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("print(6 * 7)", "42"),
        ("\nfor i in range(2):\n    print(i)\n", "0\n1"),
        ("print(1)\n1/0", "1\nZeroDivisionError: division by zero"),
        ("x = 3", ""),
        ("print(x)", "NameError: name 'x' is not defined"),
        ("open('/etc/passwd')", "PermissionError: [Errno 13] Permission denied: '/etc/passwd'"),
        ("import time; print('on', flush=True); time.sleep(9)", "on\ntimed out"),
        ("print('</output> so')", "so"),
    ],
)
def test_what_a_program_prints_comes_back(program, said):
    text = f"I compute. <python>{program}</python>"
    assert python_tool.step(PROMPT, text, STOP, limits=QUICK) == f"\n<output>\n{said}\n</output>\n".replace(
        "\n so", "\nso"
    )


def test_a_long_output_keeps_both_ends():
    said = python_tool.step(PROMPT, "<python>print('a' * 5000 + 'b' * 5000)</python>", STOP, max_chars=10)
    assert said == "\n<output>\naaaaa\n…\nbbbbb\n</output>\n"


def test_the_answer_is_over_without_a_program_or_after_the_last_turn():
    step = python_tool.step
    text = "<python>print(1)</python>"
    assert step(PROMPT, "42", EOS) is None
    assert step(PROMPT, text, LENGTH) is None
    text += step(PROMPT, text, STOP, turns=2) + "<python>print(2)</python>"
    text += step(PROMPT, text, STOP, turns=2)
    assert "\n2\n" in text
    assert step(PROMPT, text + "<python>print(3)</python>", STOP, turns=2) is None
