"""The form of an answer: tags once, in order, with white space between them."""

import pytest

from jaxrl_llm.rewards.format import think_answer


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<think>a</think><answer>b</answer>", 1),
        ("<think>a\nb</think>\n\n <answer> b\n</answer>\n", 1),
        (" <think></think> <answer></answer>", 1),
        ("<think>a</think> so <answer>b</answer>", 0),
        ("<answer>b</answer><think>a</think>", 0),
        ("<think>a</think><answer>b</answer> and more", 0),
        ("<think>a</think><answer>b", 0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0),
        ("<think>a</think></think><answer>b</answer>", 0),
        ("<think><think>a</think><answer>b</answer>", 0),
        ("x<think>a</think><answer>b</answer>", 0),
        ("", 0),
    ],
)
def test_whole_responses(text, reward):
    assert think_answer(text, opened=False) == reward
    assert isinstance(think_answer(text), float)


def test_the_prompt_may_have_opened_the_thought():
    text = "a</think><answer>b</answer>"
    assert (think_answer(text), think_answer(text, opened=False)) == (1, 0)
    assert think_answer("<think>a</think><answer>b</answer>") == 1
    assert think_answer("a<think>b</think><answer>c</answer>") == 0
