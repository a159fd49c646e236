"""Templates: exact strings, length targets that stay, tags around answers."""

from functools import partial

import pytest

from jaxrl_llm.data import tasks, templates
from jaxrl_llm.types import EOS, LENGTH, STOP, Prompt

QUESTION = Prompt(7, "1+{x}?", "3", {"key": "k"})


def test_exact_strings():
    r1 = templates.r1(QUESTION).text
    assert r1.startswith(
        "A conversation between User and Assistant. The User asks a question, and the Assistant solves"
    )
    assert r1.endswith("<answer> answer here </answer>.\nUser: 1+{x}?\nAssistant: <think>")
    want = (
        "<|im_start|>system\nPlease reason step by step, and put your final answer within \\boxed{}.<|im_end|>\n"
        "<|im_start|>user\n1+{x}?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert templates.qwen_math(QUESTION).text == want
    assert templates.none(QUESTION) is QUESTION
    mine = templates.custom(QUESTION, text="Q {question} A")
    assert (mine.text, mine.id, mine.answer, mine.meta) == ("Q 1+{x}? A", 7, "3", {"key": "k"})


def test_a_length_target_is_the_prompt_s_own():
    named = partial(templates.with_length, low=100, high=4000)
    first = named(QUESTION)
    assert first == named(QUESTION)
    n = first.meta["n_gold"]
    assert first.text == f"1+{{x}}? Think for {n} tokens."
    assert first.meta["key"] == "k"
    drawn = [named(Prompt(i, "")).meta["n_gold"] for i in range(2000)]
    assert 100 <= min(drawn) < 120
    assert 3980 < max(drawn) <= 4000
    assert abs(sum(drawn) / 2000 - 2050) < 80
    assert {templates.with_length(Prompt(i, ""), low=3, high=4).meta["n_gold"] for i in range(50)} == {3, 4}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(templates.custom, text="no place"), "text is 'no place'; expected '{question}'"),
        (partial(templates.with_length, text="{question}"), "expected '{n}' in it"),
        (partial(templates.with_length, low=5, high=4), "low is 5; expected 1 <= low <= high=4"),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make(QUESTION)


def test_a_template_is_applied_to_both_sides_and_lazily():
    task = tasks.chain(modulus=5, terms=(2, 3), n_train=50, n_test=20)
    made = templates.applied(task, partial(templates.custom, text="<{question}>"))
    assert (len(made.train), len(made.test)) == (50, 20)
    assert made.train[3].text == f"<{task.train[3].text}>"
    assert [p.text for p in made.test[:2]] == [f"<{p.text}>" for p in task.test[:2]]
    assert templates.applied(task, templates.none) is task
    answer = task.trace(task.train[3], "clean", 0)
    assert made.reward(made.train[3], answer, EOS).correct


def test_tagged_answers():
    task = templates.tagged(partial(tasks.chain, modulus=5, terms=(3, 3)))
    prompt = task.train[0]
    text = task.trace(prompt, "clean", 0)
    assert text.endswith(f"</think><answer>{prompt.answer}</answer>")
    assert "#" not in text
    assert task.reward(prompt, text, STOP).correct
    assert not task.reward(prompt, text, LENGTH).correct
    for wrong in (text.replace("</answer>", ""), prompt.answer, f"#{prompt.answer}", text.replace("<answer>", "")):
        assert not task.reward(prompt, wrong, EOS).correct
    assert task.trace(prompt, "no_reasoning", 0).startswith("</think><answer>")
