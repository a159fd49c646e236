"""Problems from JSONL: errors that name file, line and field; a split that the text decides; rewards."""

import json
import math

import numpy as np
import pytest

from jaxrl_llm.data import datasets
from jaxrl_llm.sampler import scoring
from jaxrl_llm.types import CANCELLED, EOS, LENGTH, STOP, Prompt, Rollouts


def write(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def exact(prompt, text):
    return float(text == prompt.answer)


def numbered(n, start=0):
    return [{"prompt": f"{i} + 1 =", "answer": str(i + 1)} for i in range(start, start + n)]


def test_a_prompt_a_line(tmp_path):
    rows = [{"prompt": "1+1=", "answer": 2, "level": "easy", "tags": [1]}, {"prompt": "é?", "answer": None}]
    path = write(tmp_path / "a.jsonl", rows)
    assert datasets.read_jsonl(path) == (
        Prompt(0, "1+1=", 2, {"level": "easy", "tags": [1]}),
        Prompt(1, "é?", None, {}),
    )


def test_only_a_newline_ends_a_line(tmp_path):
    """U+2028 and U+0085 may stand inside of a JSON string, and Windows ends lines with two characters."""
    text = "one\u2028two\u0085three\x1dfour"
    path = tmp_path / "a.jsonl"
    path.write_bytes(f'{{"prompt": "{text[:-5]}", "answer": "x"}}\r\n\r\n{{"prompt": "b", "answer": "y"}}'.encode())
    assert [p.text for p in datasets.read_jsonl(path)] == [text[:-5], "b"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": "a"}', "no field 'answer'"),
        (b'{"answer": "a"}', "no field 'prompt'"),
        (b'{"Prompt": "a", "answer": "b"}', "no field 'prompt'; expected prompt and answer"),
        (b'{"prompt": "a", "answer": }', "not JSON .*; expected an object a line"),
        (b'["prompt", "answer"]', "no field 'prompt'"),
        (b"3", "not an object"),
        (b'{"prompt": "", "answer": "b"}', "prompt is ''; expected text, or messages"),
        (b'{"prompt": ["a"], "answer": "b"}', r"prompt is \['a'\]; expected text"),
        (b'{"prompt": "\xff", "answer": "b"}', "not UTF-8 .*byte 12 of the line is 0xff"),
        (b"[" * 100_000, "not JSON"),
        (rb'{"prompt": "half \ud83d", "answer": "b"}', r"prompt is 'half \\ud83d'; expected text"),
    ],
)
def test_an_error_names_file_line_and_field(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"prompt": "a", "answer": "b"}\n\n' + line + b"\n")
    with pytest.raises(ValueError, match=rf"bad\.jsonl:3: {message}"):
        datasets.read_jsonl(path)


def test_a_missing_file(tmp_path):
    with pytest.raises(ValueError, match=r"gone\.jsonl: no such file"):
        datasets.jsonl(str(tmp_path / "gone.jsonl"), exact)
    path = write(tmp_path / "a.jsonl", numbered(3))
    with pytest.raises(ValueError, match=r"gone\.jsonl: no such file"):
        datasets.jsonl(path, exact, test=str(tmp_path / "gone.jsonl"))


def test_the_split_is_the_texts_own(tmp_path):
    rows = numbered(400)
    task = datasets.jsonl(write(tmp_path / "a.jsonl", rows), exact)
    train, test = ({p.text for p in side} for side in (task.train, task.test))
    assert train | test == {r["prompt"] for r in rows}
    assert not train & test
    assert 20 <= len(test) <= 60  # a tenth of 400

    other_half = [{"prompt": r["prompt"], "answer": "other", "meta": 1} for r in rows[::-2]] + numbered(50, 1000)
    again = datasets.jsonl(write(tmp_path / "b.jsonl", other_half), exact)
    for side, before in ((again.train, train), (again.test, test)):
        assert {p.text for p in side if int(p.text.split()[0]) < 1000} <= before

    more = datasets.jsonl(write(tmp_path / "a.jsonl", rows), exact, held_out=0.5)
    assert test < {p.text for p in more.test}
    assert 160 <= len(more.test) <= 240


def test_the_same_problem_twice_falls_on_one_side(tmp_path):
    task = datasets.jsonl(write(tmp_path / "a.jsonl", numbered(100) + numbered(100)), exact, held_out=0.3)
    assert not {p.text for p in task.train} & {p.text for p in task.test}
    assert len(task.train) + len(task.test) == 200


def test_a_test_file_leaves_the_training_problems_whole(tmp_path):
    paths = [write(tmp_path / f"{name}.jsonl", numbered(20, start)) for name, start in (("a", 0), ("b", 100))]
    task = datasets.jsonl(paths[0], exact, test=paths[1])
    assert [len(task.train), len(task.test)] == [20, 20]
    assert task.test[0].text == "100 + 1 ="


@pytest.mark.parametrize(("held_out", "side"), [(0.0, "test"), (1.0, "train")])
def test_an_empty_side_is_an_error(tmp_path, held_out, side):
    path = write(tmp_path / "a.jsonl", numbered(5))
    with pytest.raises(ValueError, match=f"a.jsonl: no {side} problems; expected at least 1"):
        datasets.jsonl(path, exact, held_out=held_out)


def test_an_empty_test_file_is_named(tmp_path):
    path, empty = write(tmp_path / "a.jsonl", numbered(5)), write(tmp_path / "empty.jsonl", [])
    with pytest.raises(ValueError, match=r"empty\.jsonl: no test problems; expected at least 1$"):
        datasets.jsonl(path, exact, test=empty)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reward": "exact"}, "a.jsonl: reward 'exact': .* not a callable object; expected"),
        ({"reward": lambda prompt: 1.0}, r"a.jsonl: reward .*: too many .*; expected \(prompt, response\)"),
        ({"reward": lambda p, t, f, g: 1.0}, r"a.jsonl: reward .*: missing .*'g'; expected \(prompt, response\)"),
        ({"held_out": "10%"}, "a.jsonl: held_out is '10%'; expected a number from 0 to 1"),
        ({"held_out": 1.5}, "a.jsonl: held_out is 1.5; expected a number from 0 to 1"),
        ({"path": ["a.jsonl"]}, r"dataset is \['a.jsonl'\]; expected the path of a JSONL file"),
    ],
)
def test_bad_arguments_are_named(tmp_path, arguments, message):
    arguments = {"path": write(tmp_path / "a.jsonl", numbered(50)), "reward": exact} | arguments
    with pytest.raises(ValueError, match=message):
        datasets.jsonl(**arguments)


def test_the_reward_is_the_functions_own(tmp_path):
    reward = datasets.jsonl(write(tmp_path / "a.jsonl", numbered(50)), exact).reward
    prompt = Prompt(0, "1+1=", "2")
    assert (reward(prompt, "2", EOS).value, reward(prompt, "2", EOS).correct) == (1.0, True)
    assert (reward(prompt, "3", EOS).value, reward(prompt, "3", EOS).correct) == (0.0, False)
    assert reward(prompt, "2", STOP).correct


@pytest.mark.parametrize(
    ("value", "correct"), [(1, True), (True, True), (np.float32(1), True), (2.5, True), (0.99, False), (-1, False)]
)
def test_correct_means_a_value_of_at_least_1(tmp_path, value, correct):
    reward = datasets.jsonl(write(tmp_path / "a.jsonl", numbered(50)), lambda prompt, text: value).reward
    found = reward(Prompt(0, "?"), "", EOS)
    assert (found.value, found.correct, type(found.value)) == (float(value), correct, float)


@pytest.mark.parametrize("finish", [LENGTH, CANCELLED])
def test_a_truncated_answer_is_never_correct_and_not_even_graded(tmp_path, finish):
    def refuse(prompt, text):
        raise AssertionError("graded")

    path = write(tmp_path / "a.jsonl", numbered(50))
    for grade in (lambda prompt, text: 1.0, refuse):
        found = datasets.jsonl(path, grade).reward(Prompt(0, "?"), "2", finish)
        assert (found.value, found.correct) == (0.0, False)


def answers(texts):
    """One answer to each prompt, ids from 40 on."""
    n = len(texts)
    prompts = tuple(Prompt(40 + i, "?") for i in range(n))
    zeros = np.zeros((n, 1), np.int32)
    ones = np.ones(n, np.int32)
    logp, finish = np.zeros((n, 1), np.float32), np.full(n, EOS)
    return Rollouts(prompts, zeros, ones, zeros, logp, ones, finish, tuple(texts), np.arange(n))


@pytest.mark.parametrize("bad", [math.nan, math.inf, "high", None])
def test_a_grade_that_is_no_finite_number_names_its_prompt(tmp_path, bad):
    grade = lambda prompt, text: bad if text == "b" else 1.0
    task = datasets.jsonl(write(tmp_path / "a.jsonl", numbered(50)), grade)
    with pytest.raises(ValueError, match="reward of prompt 41"):
        scoring.score(task, answers(["a", "b", "c"]))
    assert [r.value for r in scoring.score(task, answers(["a", "c"]))] == [1.0, 1.0]
