"""Word problems: templates of test that train never shows, and worked answers checked by other arithmetic."""

import ast
import operator
import re

import pytest

from jaxrl_llm.data import word_problems
from jaxrl_llm.data.word_problems import LARGEST, NAMES, THINGS
from jaxrl_llm.rewards import answers
from jaxrl_llm.types import EOS

N = 400
TASK = word_problems.word_problems(answers.reward, steps=(1, 3))
EXACT = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
LINE = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)\. ")


def value(expression):
    """Of a line's left side, by Python's own grammar and rational arithmetic."""
    node = ast.parse(expression, mode="eval").body
    return EXACT[type(node.op)](node.left.value, node.right.value)


def template(text):
    """A problem's sentences, in which no name, thing or number is left."""
    return re.sub(rf"\b(?:{'|'.join((*NAMES, *THINGS))}|\d+)\b", "_", text)


def lines(trace):
    head, answer = re.fullmatch(r"(.*)The answer is \\boxed\{(\d+)\}\.", trace).groups()
    found = LINE.findall(head)
    assert "".join(f"{a} {o} {b} = {c}. " for a, o, b, c in found) == head
    return [(int(a), o, int(b), int(c)) for a, o, b, c in found], int(answer)


def test_train_shows_no_template_of_test():
    train, test = ({template(p.text) for p in side[:N]} for side in (TASK.train, TASK.test))
    assert min(len(train), len(test)) > 50
    assert not train & test
    assert not any(re.search(r"[{}]", text) for text in train | test)


def test_problems_have_all_levels_and_small_whole_answers():
    problems = TASK.train[:N]
    assert {p.meta["level"] for p in problems} == {1, 2, 3}
    assert all(1 <= int(p.answer) <= LARGEST for p in problems)
    assert problems == word_problems.word_problems(answers.reward, steps=(1, 3)).train[:N]
    other = word_problems.word_problems(answers.reward, steps=(1, 3), seed=1).train[:N]
    assert sum(a.text == b.text for a, b in zip(problems, other, strict=True)) < N / 50


def test_a_clean_trace_computes_what_the_problem_tells():
    for prompt in (*TASK.train[:N], *TASK.test[:N]):
        worked, answer = lines(TASK.trace(prompt, "clean", 3))
        told = [int(n) for n in re.findall(r"\d+", prompt.text)]
        assert [worked[0][0], *(b for _, _, b, _ in worked)] == told
        assert all(value(f"{a} {o} {b}") == c for a, o, b, c in worked)
        assert [c for *_, c in worked[:-1]] == [a for a, *_ in worked[1:]]
        assert worked[-1][3] == answer == int(prompt.answer)


def test_a_wrong_step_is_wrong_and_the_rest_goes_on_from_it():
    places = set()
    for prompt in TASK.train[: 3 * N]:
        right, _ = lines(TASK.trace(prompt, "clean", 3))
        worked, answer = lines(TASK.trace(prompt, "wrong_step", 3))
        assert [(o, b) for _, o, b, _ in worked] == [(o, b) for _, o, b, _ in right]
        place = next(i for i, (a, b) in enumerate(zip(worked, right, strict=True)) if a != b)
        assert worked[place][:3] == right[place][:3]
        assert worked[place][3] >= 1
        assert [c for *_, c in worked[place:-1]] == [a for a, *_ in worked[place + 1 :]]
        # From there on no number need be one that the problem could have: differences are taken positive, parts whole.
        assert all(abs(abs(value(f"{a} {o} {b}")) - c) < 1 for a, o, b, c in worked[place + 1 :])
        assert answer == worked[-1][3]
        places.add((place, len(worked)))
    assert places == {(i, n) for n in (1, 2, 3) for i in range(n)}


def test_without_reasoning_there_is_a_number_alone():
    found = [lines(TASK.trace(p, "no_reasoning", 3)) for p in TASK.train[:N]]
    assert not any(worked for worked, _ in found)
    assert len({answer for _, answer in found}) > 80


def test_verdicts_on_traces():
    for prompt in TASK.test[:20]:
        for behaviour in ("clean", "wrong_step"):
            trace = TASK.trace(prompt, behaviour, 3)
            assert TASK.reward(prompt, trace, EOS).correct == (lines(trace)[1] == int(prompt.answer))


def test_what_it_refuses():
    for steps in ((0, 1), (2, 1), (1, 5)):
        with pytest.raises(ValueError, match=r"steps is \(\d, \d\); expected \(least, most\)"):
            word_problems.word_problems(answers.reward, steps=steps)
    with pytest.raises(ValueError, match="behaviour is 'brilliant'; expected one of"):
        TASK.trace(TASK.train[0], "brilliant", 0)


def test_texts_are_of_the_training_side():
    texts = list(word_problems.texts(30))
    assert len(texts) == 60
    train = word_problems.word_problems(answers.reward).train
    assert texts[::2] == [p.text for p in train[:30]]
