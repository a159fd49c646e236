"""An environment is an object; a task is made of it, and other libraries' environments fit in by an adapter."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from jaxrl_llm.environments.protocol import as_task, request
from jaxrl_llm.types import CANCELLED, EOS, LENGTH, STOP, Prompt, Reward


def of_the_docs(name):
    """What the block of docs/environments.md that defines `name` defines."""
    page = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()
    code = next(block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if f"class {name}:" in block)
    namespace = {}
    exec(compile(code, "docs/environments.md", "exec"), namespace)
    return namespace[name]


def test_a_task_of_an_environment():
    env = of_the_docs("Guess")()
    task = as_task(env)
    assert [len(task.train), len(task.test)] == [9, 1]
    prompt = task.train[4]
    assert [task.step(prompt, text, EOS) for text in ("3", "3 higher 5", "3 higher 5 lower 4", "x")] == [
        " higher ", " lower ", None, None,
    ]  # fmt: skip
    assert task.reward(prompt, "3 higher 4", EOS).value == 1
    env.step = None
    assert as_task(env).step is None


def test_what_is_no_environment_is_named():
    with pytest.raises(ValueError, match="env is .*; expected an object with a method prompts"):
        as_task(object())
    env = of_the_docs("Guess")()
    env.score = None
    with pytest.raises(ValueError, match="expected an object with a method score"):
        as_task(env)
    env = of_the_docs("Guess")()
    env.prompts = lambda split: [] if split == "test" else [Prompt(0, "?")]
    with pytest.raises(ValueError, match=r"prompts\('test'\) is \[\]; expected at least one problem"):
        as_task(env)


@pytest.mark.parametrize(
    ("text", "finish", "asked"),
    [
        ("so <search> who? </search>", STOP, "who?"),
        ("so <search>who?</search>\n", EOS, "who?"),
        ("<search>a</search><result>b</result><search>c</search>", STOP, "c"),
        ("<search>a <search>b</search>", STOP, "b"),
        ("<search></search>", STOP, ""),
        ("<search>who?", STOP, None),
        ("who?</search>", STOP, None),
        ("<search>who?</search> and then", EOS, None),
        ("<search>who?</search>", LENGTH, None),
        ("<search>who?</search>", CANCELLED, None),
        ("<result>" * 3 + "<search>who?</search>", STOP, None),
        ("", EOS, None),
    ],
)
def test_a_request_stands_at_the_end(text, finish, asked):
    assert request(text, finish, "search", "result", 3) == asked


class Rubric:
    """Stands in for a rubric of `verifiers`: weighted functions of a conversation and its state."""

    funcs = [
        lambda messages, state: float("blue" in messages[-1]["content"]),
        lambda messages, state: state["turn"] / 2,
    ]
    weights = [1.0, 0.5]

    def score(self, messages, state):
        return sum(w * f(messages, state) for f, w in zip(self.funcs, self.weights, strict=True))


class Conversation:
    """Stands in for a multi-turn environment of `verifiers`: asks twice, then is satisfied."""

    dataset = [{"prompt": [{"role": "user", "content": f"Colour {i}?"}], "answer": "blue"} for i in range(3)]
    eval_dataset = dataset[:1]
    rubric = Rubric()

    def is_completed(self, messages, state):
        return state["turn"] >= 2

    def env_response(self, messages, state):
        said = messages[-1]["content"]
        return [{"role": "user", "content": f"You said {said}. Sure?"}], {**state, "turn": state["turn"] + 1}


def test_the_adapter_of_the_docs():
    task = as_task(of_the_docs("Adapted")(Conversation()))
    assert [len(task.train), len(task.test)] == [3, 1]
    prompt, text = task.train[1], "red"
    assert prompt.text == "Colour 1?"
    for turn in ("red", "dark red"):
        said = task.step(prompt, text, EOS)
        assert f"You said {turn}. Sure?" in said
        text += said + {"red": "dark red", "dark red": "blue"}[turn]
    assert task.step(prompt, text, EOS) is None
    assert task.step(prompt, text, LENGTH) is None
    assert task.reward(prompt, text, EOS) == Reward(1.5, True)
    assert task.reward(prompt, "red", EOS).value == 0
    assert replace(task, step=None).reward is not None
