import hashlib
import json
import os
import pickle
import re
import subprocess
import sys
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.data import tasks
from jaxrl_llm.data.expressions import parse_value
from jaxrl_llm.types import CANCELLED, EOS, LENGTH, STOP, Prompt

BUILDERS = (tasks.chain, tasks.pointers, tasks.countdown, tasks.knights, tasks.words)
every_task = pytest.mark.parametrize("build", BUILDERS, ids=lambda build: build.__name__)


def digest_of_everything() -> str:
    """Prompts and traces of every task, in one number that must not depend on the process."""
    seen = []
    for build in BUILDERS:
        task = build(seed=3)
        for prompt in (*task.train[:20], *task.test[:20]):
            seen.append((prompt.id, prompt.text, prompt.answer, prompt.meta))
            seen.append([task.trace(prompt, behaviour, 7) for behaviour in task.behaviours])
    return hashlib.sha256(json.dumps(seen).encode()).hexdigest()


# ---- sequences and the split


@every_task
def test_train_and_test_share_no_content(build):
    task, other = build(), build(seed=1)
    train = [*task.train[:2000], *other.train[:500]]
    assert not {p.meta["key"] for p in train} & {p.meta["key"] for p in task.test}
    assert not {p.text for p in train} & {p.text for p in task.test}
    assert {tasks.held_out(p.meta["key"]) for p in train} == {False}
    assert len({p.text for p in train}) > 500


@every_task
def test_ids_never_collide_and_fit_in_int32(build):
    task = build(n_train=50, n_test=50)
    assert [p.id for p in task.train] == list(range(50))
    assert [p.id for p in task.test] == [2**30 + i for i in range(50)]


@every_task
def test_sequences_index_like_sequences(build):
    task = build(n_train=10, n_test=5)
    assert (len(task.train), len(task.test)) == (10, 5)
    assert len(list(task.test)) == 5
    assert task.train[-1] == task.train[9]
    assert task.train[2:5] == tuple(task.train[i] for i in (2, 3, 4))
    for index in (10, -11):
        with pytest.raises(IndexError, match="10 problems"):
            task.train[index]


@every_task
def test_a_problem_depends_on_seed_and_index_only(build):
    short, long, other = build(n_train=5), build(n_train=100), build(seed=1)
    _ = long.train[50]
    assert short.train[:5] == long.train[:5]
    assert short.test[:5] == long.test[:5]
    assert [p.text for p in short.train] != [p.text for p in other.train[:5]]


def test_the_same_in_another_process():
    here = os.path.dirname(__file__)
    code = f"import sys; sys.path.insert(0, {here!r}); import test_tasks as t; print(t.digest_of_everything())"
    env = {**os.environ, "PYTHONHASHSEED": "123", "JAX_PLATFORMS": "cpu"}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == digest_of_everything()


@every_task
def test_a_task_goes_to_worker_processes(build):
    task = build()
    again = pickle.loads(pickle.dumps(task))
    prompt = again.train[3]
    assert prompt == task.train[3]
    assert again.reward(prompt, task.trace(prompt, "clean", 0), EOS).correct


@every_task
def test_texts_are_short_printable_ascii(build):
    task = build()
    for prompt in task.train[:300]:
        traces = [task.trace(prompt, behaviour, 0) for behaviour in task.behaviours]
        assert len(prompt.text) <= 40
        assert max(map(len, traces)) <= 100
        assert all(" " <= c <= "~" for c in "".join([prompt.text, *traces]))
        assert "#" not in prompt.text
        assert json.loads(json.dumps(prompt.meta))["key"] == prompt.meta["key"]


# ---- the verifier


@pytest.mark.parametrize(
    ("text", "parsed", "correct"),
    [
        ("3b4=2c2=4d1=0#0", "0", True),
        ("# 0 ", "0", True),
        ("#0\n", "0", True),
        ("#3#0", "0", True),
        ("#0#3", "3", False),
        ("#0#", None, False),
        ("#00", "00", False),
        ("#01", "01", False),
        ("#0 or 1", "0 or 1", False),
        ("#-0", "-0", False),
        ("#\u0660", "\u0660", False),
        ("0", None, False),
        ("", None, False),
        ("#", None, False),
    ],
)
def test_the_whole_last_answer_must_match(text, parsed, correct):
    prompt = Prompt(0, "a3b4c2d1:", "0", {"operands": [3, 4, 2, 1]})
    reward = tasks.chain().reward(prompt, text, EOS)
    assert (reward.parsed, reward.correct, reward.value) == (parsed, correct, float(correct))


@every_task
def test_only_a_response_that_ended_by_itself_is_right(build):
    task = build()
    prompt = task.train[0]
    text = task.trace(prompt, "clean", 0)
    right = {finish: task.reward(prompt, text, finish) for finish in (EOS, STOP, LENGTH, CANCELLED)}
    assert {finish: (r.correct, r.value) for finish, r in right.items()} == {
        EOS: (True, 1.0),
        STOP: (True, 1.0),
        LENGTH: (False, 0.0),
        CANCELLED: (False, 0.0),
    }
    assert right[LENGTH].parsed == right[EOS].parsed
    with pytest.raises(ValueError, match="finish is 'done'"):
        task.reward(prompt, text, "done")


FUZZED = [(task, task.train[i]) for task in (build() for build in BUILDERS) for i in (0, 1)]


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.text(), st.text("0123456789+-*/() #knabc", max_size=30)))
def test_no_text_breaks_a_verifier(text):
    for task, prompt in FUZZED:
        reward = task.reward(prompt, text, EOS)
        assert reward.value == float(reward.correct)
        if reward.correct:
            assert "#" in text
            assert text.strip().endswith(reward.parsed)


@pytest.mark.parametrize(
    ("answer", "correct"),
    [
        ("(3*7)+5", True),
        ("5+7*3", True),
        ("7*(3)+5", True),
        ("3*7+4", False),
        ("3*7+5+0", False),
        ("3*7", False),
        ("26", False),
        ("21+5", False),
        ("3*7+5=26", False),
        ("(3*7)+5)", False),
        ("35-7-2", False),
        ("5*7-3*3", False),
    ],
)
def test_countdown_uses_each_number_once(answer, correct):
    prompt = Prompt(0, "3,7,5=26:", "", {"numbers": [3, 7, 5], "target": 26})
    assert tasks.countdown().reward(prompt, f"3*7=21#{answer}", EOS).correct is correct


# ---- traces


@every_task
def test_right_traces_are_right_and_wrong_ones_are_not(build):
    task = build()
    share = dict.fromkeys(task.behaviours, 0.0)
    for i, prompt in enumerate((*task.train[:300], *task.test[:100])):
        for behaviour in task.behaviours:
            text = task.trace(prompt, behaviour, i)
            reward = task.reward(prompt, text, EOS)
            share[behaviour] += reward.correct / 400
            assert reward.parsed is not None
            assert reward.parts["recheck"] == (behaviour == "recheck")
            assert text.startswith("#") == (behaviour == "no_reasoning")
    guesses = ("wrong_step", "no_reasoning")
    assert all(share[behaviour] == pytest.approx(1.0) for behaviour in task.behaviours if behaviour not in guesses)
    assert share["wrong_step"] < 0.2
    assert 0.0 < share["no_reasoning"] < 0.35


@every_task
def test_a_trace_depends_on_prompt_behaviour_and_seed_only(build):
    task = build()
    prompt = task.train[0]
    for behaviour in task.behaviours:
        assert task.trace(prompt, behaviour, 5) == task.trace(prompt, behaviour, 5)
    assert len({task.trace(prompt, "recheck", seed) for seed in range(40)}) > 2
    assert len({task.trace(prompt, "clean", seed) for seed in range(10)}) == 1


@every_task
def test_an_unknown_behaviour_names_the_nearest(build):
    task = build()
    with pytest.raises(ValueError, match=r"behaviour is 're-check'.*mean 'recheck'"):
        task.trace(task.train[0], "re-check", 0)


DOUBT = {  # the doubted text and its repetition
    tasks.chain: r"([a-z]\d=\d)\?\d([a-z]\d=\d)",
    tasks.pointers: r"(\d\w>\w)\?(\d\w>\w)",
    tasks.countdown: r"(\d+.\d+=\d+)\?(\d+.\d+=\d+)",
    tasks.knights: r"([kn]{2,3}:[tf]+x?)\?([kn]{2,3}:[tf]+x?)",
    tasks.words: r"(\d+.\d+=\d+)\?(\d+.\d+=\d+)",
}


@every_task
def test_a_recheck_redoes_one_step_that_was_wrong_half_of_the_time(build):
    task, wrong = build(), 0
    for prompt in task.train[:300]:
        text, clean = task.trace(prompt, "recheck", 0), task.trace(prompt, "clean", 0)
        doubted = re.search(DOUBT[build], text)
        before, again = doubted.groups()
        restated = text[doubted.start() : doubted.end() - len(again)]
        assert text.replace(restated, "", 1) == clean
        wrong += before != again
    assert 105 < wrong < 195


def chain_steps(prompt, trace):
    """(follows from the value before it, operand copied) for each step of a chain's trace."""
    operands = dict(re.findall(r"([a-z])(\d)", prompt.text))
    work, answer = trace.split("#")
    steps = re.findall(r"(?=(\d)([a-z])(\d)=(\d))", work)
    assert "".join(label for _, label, _, _ in steps) == "".join(operands)[1:]
    assert work[0] == operands["a"]
    assert work[-1] == answer
    assert all(operands[label] == operand for _, label, operand, _ in steps)
    return [(int(value) + int(operand)) % 5 == int(after) for value, _, operand, after in steps]


def test_chain_by_hand():
    task = tasks.chain()
    prompt = Prompt(0, "a3b4c2d1:", "0", {"operands": [3, 4, 2, 1]})
    assert task.trace(prompt, "clean", 0) == "3b4=2c2=4d1=0#0"
    assert "3b4=1?3b4=2c2=4d1=0#0" in {task.trace(prompt, "recheck", seed) for seed in range(200)}
    for prompt in task.train[:300]:
        operands = [int(digit) for digit in re.findall(r"\d", prompt.text)]
        assert 3 <= len(operands) <= 7
        assert prompt.answer == str(sum(operands) % 5)
        assert all(chain_steps(prompt, task.trace(prompt, "clean", 0)))
        assert chain_steps(prompt, task.trace(prompt, "wrong_step", 0)).count(False) == 1
    assert {len(p.meta["operands"]) for p in task.train[:300]} == {3, 4, 5, 6, 7}


def test_pointers_by_hand():
    task = tasks.pointers()
    meta = {"arrows": {"a": "c", "b": "a", "c": "d", "d": "b"}, "walk": ["a", "c", "d", "b"]}
    assert task.trace(Prompt(0, "d>b a>c c>d b>a;3a=", "b", meta), "clean", 0) == "3a>c2c>d1d>b#b"
    for prompt in task.train[:300]:
        arrows = dict(re.findall(r"(\w)>(\w)", prompt.text))
        hops, at = re.search(r";(\d)(\w)=", prompt.text).groups()
        assert sorted(arrows) == sorted(arrows.values()) == list("abcdefgh")
        seen = [at]
        for _ in range(int(hops)):
            seen.append(arrows[seen[-1]])
        assert seen[-1] == prompt.answer
        assert len(set(seen)) == len(seen)
        wrong = re.findall(r"(\d)(\w)>(\w)", task.trace(prompt, "wrong_step", 0))
        assert [arrows[a] == b for _, a, b in wrong].count(False) == 1
        assert [int(left) for left, _, _ in wrong] == list(range(int(hops), 0, -1))


def equations(trace):
    """Whether each equation of a trace holds."""
    return [parse_value(left)[0] == int(right) for left, right in re.findall(r"(\d+[-+*/]\d+)=(\d+)", trace)]


def test_countdown_by_hand():
    task = tasks.countdown()
    meta = {"numbers": [3, 7, 5], "target": 26, "steps": [(0, "*", 1), (3, "+", 2)]}
    prompt = Prompt(0, "3,7,5=26:", "(3*7)+5", meta)
    assert task.trace(prompt, "clean", 0) == "3*7=21,21+5=26#(3*7)+5"
    assert task.trace(prompt, "subgoal", 0) == "26<21+5,3*7=21,21+5=26#(3*7)+5"
    assert "3*7=21,21-5=26#(3*7)-5" in {task.trace(prompt, "wrong_step", seed) for seed in range(50)}
    assert task.trace(prompt, "backtrack", 0).endswith("x3*7=21,21+5=26#(3*7)+5")
    for prompt in task.train[:300]:
        *numbers, target = map(int, re.findall(r"\d+", prompt.text))
        assert 10 <= target <= 50
        assert parse_value(prompt.answer)[0] == target
        assert sorted(parse_value(prompt.answer)[1]) == sorted(numbers)
        for behaviour in ("clean", "backtrack", "subgoal"):
            trace = task.trace(prompt, behaviour, 0)
            assert all(equations(trace))
            assert task.reward(prompt, trace, EOS).parts["subgoal"] == (behaviour == "subgoal")
            assert task.reward(prompt, trace, EOS).parts["backtrack"] == (behaviour == "backtrack")
        missed = task.trace(prompt, "backtrack", 0).split("x")[0]
        assert not missed.endswith(f"={target}")
        assert equations(task.trace(prompt, "wrong_step", 0)).count(False) <= 1


def spoken(said, kind):
    """Whether a statement of `knights` holds, by way of Python's own words."""
    if match := re.fullmatch(r"([ABC])([=!])([ABC])", said):
        return (kind[match[1]] == kind[match[3]]) == (match[2] == "=")
    left, op, right = re.fullmatch(r"([ABC][kn])(?:([&|])([ABC][kn]))?", said).groups()
    facts = [kind[person] == claimed for person, claimed in filter(None, (left, right))]
    return {None: facts[0], "&": facts[0] and facts[-1], "|": facts[0] or facts[-1]}[op]


def fitting(text):
    """Every assignment that fits a prompt of `knights`."""
    says = re.findall(r"([ABC]):([^ ;]+)", text)
    kinds = [dict(zip("ABC", row, strict=False)) for row in product("kn", repeat=len(says))]
    fits = [kind for kind in kinds if all(spoken(said, kind) == (kind[who] == "k") for who, said in says)]
    return ["".join(kind.values()) for kind in fits]


def test_knights_by_hand():
    task = tasks.knights()
    prompt = Prompt(0, "A:Bn B:A=B;", "kn", {"says": ["Bn", "A=B"]})
    assert task.trace(prompt, "clean", 0) == "kk:fxkn:tf#kn"
    assert "kk:tt?kk:fxkn:tf#kn" in {task.trace(prompt, "recheck", seed) for seed in range(50)}
    assert "kk:tt#kk" in {task.trace(prompt, "wrong_step", seed) for seed in range(50)}
    for prompt in task.train[:300]:
        assert fitting(prompt.text) == [prompt.answer]
    assert {len(p.answer) for p in task.train[:300]} == {2, 3}


STORIES = {
    r"\w+ has (\d+) \w+, gets (\d+), uses (\d+)\. Left\?": lambda a, b, c: a + b - c,
    r"\w+ had (\d+) \w+, lost (\d+), got (\d+)\. Now\?": lambda a, b, c: a - b + c,
    r"(\d+) bags of (\d+) \w+, \w+ takes (\d+)\. Left\?": lambda a, b, c: a * b - c,
    r"(\d+) rows of (\d+) \w+, \w+ adds (\d+)\. All\?": lambda a, b, c: a * b + c,
    r"(\d+) boxes, (\d+) empty, (\d+) \w+ each\. All\?": lambda a, b, c: (a - b) * c,
    r"\w+ has (\d+) \w+, \w+ has (\d+) more\. All\?": lambda a, b: a + a + b,
    r"\w+ has (\d+) \w+, \w+ (\d+) times that\. All\?": lambda a, b: a + a * b,
}


def test_words_by_hand():
    task, told = tasks.words(), set()
    meta = {"numbers": [3, 4, 2], "steps": ((0, "+", 1), (3, "-", 2))}
    assert task.trace(Prompt(0, "", "5", meta), "clean", 0) == "3+4=7,7-2=5#5"
    for prompt in task.train[:300]:
        story, match = next((s, m) for s in STORIES if (m := re.fullmatch(s, prompt.text)))
        told.add(story)
        assert prompt.answer == str(STORIES[story](*map(int, match.groups())))
        assert all(equations(task.trace(prompt, "clean", 0)))
        assert equations(task.trace(prompt, "wrong_step", 0)).count(False) == 1
    assert len(told) == len(STORIES)


# ---- arguments


@pytest.mark.parametrize(
    ("build", "arguments", "message"),
    [
        (tasks.chain, {"modulus": 1}, r"modulus is 1; expected a whole number from 2 to 10"),
        (tasks.chain, {"modulus": 11}, r"modulus is 11"),
        (tasks.chain, {"terms": (7, 3)}, r"terms is \(7, 3\); expected \(least, most\), 2 <= least"),
        (tasks.chain, {"terms": (1, 3)}, r"terms is \(1, 3\)"),
        (tasks.chain, {"terms": (3,)}, r"terms is \(3,\)"),
        (tasks.chain, {"seed": -1}, r"seed is -1"),
        (tasks.chain, {"n_train": 0}, r"n_train is 0"),
        (tasks.chain, {"n_test": 2**30 + 1}, r"n_test is 1073741825"),
        (tasks.pointers, {"n": 4}, r"n is 4"),
        (tasks.pointers, {"n": 6, "hops": (2, 6)}, r"hops is \(2, 6\).*most <= 5"),
        (tasks.countdown, {"numbers": (3, 9)}, r"numbers is \(3, 9\)"),
        (tasks.countdown, {"limit": True}, r"limit is True"),
        (tasks.countdown, {"target": (0, 5)}, r"target is \(0, 5\)"),
        (tasks.countdown, {"numbers": (2, 2), "limit": 3, "target": (50, 60)}, r"train: no problem.*larger"),
        (tasks.knights, {"people": (2, 4)}, r"people is \(2, 4\)"),
        (tasks.words, {"limit": 3}, r"limit is 3"),
    ],
)
def test_bad_arguments_are_named(build, arguments, message):
    with pytest.raises(ValueError, match=message):
        build(**arguments)


def test_settings_may_come_from_json():
    settings = json.loads(json.dumps({"modulus": 10, "terms": (2, 4), "seed": 9}))
    assert tasks.chain(**settings).train[:50] == tasks.chain(modulus=10, terms=(2, 4), seed=9).train[:50]
